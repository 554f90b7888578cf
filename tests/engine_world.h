/* What tests of prefixes and of sessions have in common: a model of random weights with pools
 * of any size, an engine driven by hand, with a table of sessions or without, and a look at its
 * pools. */
#ifndef PREFILLD_TESTS_ENGINE_WORLD_H
#define PREFILLD_TESTS_ENGINE_WORLD_H

#include "engine_impl.h"
#include "model_fixture.h"
#include "rng.h"

/* The model of dir on one thread; ends the program when it cannot. fixture_close closes it. */
static inline void world_open(struct fixture *f, const char *dir, const struct model_options *o,
                              const struct engine_config *c)
{
    if (fixture_open_as(f, dir, o, 1, true) != 0 || fixture_open_engine(f, c) != 0)
        exit(1);
}

/* The same with a table of sessions. */
static inline void world_open_sessions(struct fixture *f, const char *dir,
                                       const struct model_options *o,
                                       const struct engine_config *c)
{
    struct engine_config with = *c;
    if (fixture_open_as(f, dir, o, 1, true) != 0 || sessions_open(&f->sessions) != 0)
        exit(1);
    with.sessions = f->sessions;
    if (fixture_open_engine(f, &with) != 0)
        exit(1);
}

/* And with random pools, in which prompts of up to max_tokens fit, and another order of what is
 * free each time. */
static inline void world_open_random(struct fixture *f, const char *dir, struct rng *rng,
                                     int32_t max_tokens, int32_t state_slots)
{
    struct model_options o = {.max_step_tokens = 64 * (1 + rng_int(rng, 4)),
                              .max_seqs = 1 + rng_int(rng, 4),
                              .page_tokens = rng_int(rng, 3) ? 64 : 128,
                              .kv_tokens = max_tokens + 128 + 64 * rng_int(rng, 24),
                              .max_prompt_tokens = max_tokens,
                              .state_slots = state_slots};
    struct engine_config c = {.max_waiting = 16,
                              .checkpoint_tokens = 64,
                              .min_shared_tokens = 1,
                              .shuffle = true,
                              .shuffle_seed = rng_u64(rng)};
    world_open_sessions(f, dir, &o, &c);
}

static inline bool world_is_sound(const struct fixture *f)
{
    const struct engine *en = f->engine;
    return slots_is_sound(&en->slots) && pages_is_sound(&en->pages) &&
           prefix_is_sound(&en->prefix);
}

/* When no request is left: nothing is held, and the tree is there for kept states alone. */
static inline bool world_is_idle(const struct fixture *f)
{
    const struct engine *en = f->engine;
    bool is_idle = en->slots.n_held == 0 && en->pages.n_held == 0;
    for (uint32_t i = 0; i < en->prefix.n_buckets; i++)
        for (const struct prefix_node *v = en->prefix.buckets[i]; v; v = v->next)
            is_idle &= v->n_users == 0 && v->n_wanted == 0 && !v->parked && !v->maker &&
                       v->state != PREFIX_PENDING && v->n_refs == (v->state == PREFIX_READY);
    return is_idle;
}

#endif
