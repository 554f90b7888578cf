/* What a request holds of the pools, how it gets and gives it back, and how it ends. */
#include <stdlib.h>

#include "config.h"
#include "engine_impl.h"
#include "log.h"

/* ---- pools ---- */

static uint64_t engine_random(struct engine *en)
{
    en->shuffle_state = en->shuffle_state * 6364136223846793005u + 1442695040888963407u;
    return en->shuffle_state >> 33;
}

/* Tests: the next slots and pages come in another order. */
static void engine_shuffle(struct engine *en)
{
    int32_t *lists[] = {en->slots.free_list, en->pages.free_list};
    int32_t counts[] = {en->slots.n_free, en->pages.n_free};
    for (int l = 0; l < 2; l++) {
        for (int32_t i = counts[l] - 1; i > 0; i--) {
            int32_t j = (int32_t)(engine_random(en) % (uint64_t)(i + 1));
            int32_t keep = lists[l][i];
            lists[l][i] = lists[l][j];
            lists[l][j] = keep;
        }
    }
}

void engine_admit(struct engine *en, struct request *r, const struct engine_start *at)
{
    if (en->shuffle)
        engine_shuffle(en);
    int32_t n_shared = at->n_shared;
    for (int32_t i = 0; i < n_shared; i++) {
        r->pages[i] = at->pages[i];
        pages_hold(&en->pages, r->pages[i]);
    }
    r->copy_from = at->slot;
    r->copy_page = at->copy_page;
    r->n_cached = r->n_computed = at->depth;
    r->slot = slots_alloc(&en->slots);
    int rc = pages_alloc(&en->pages, r->n_all_pages - n_shared, r->pages + n_shared);
    if (r->slot < 0 || rc != 0) {
        /* They were counted; running out here would mix up two requests' states. */
        log_error("id=%s event=pool_miscount slot=%d pages=%d", r->id, r->slot,
                  r->n_all_pages - n_shared);
        abort();
    }
    r->n_pages = r->n_all_pages;
    en->n_admitted++;
    en->admitted_left += r->n_ids - r->n_computed;
    queue_leave(en->queue, r);
}

void engine_free_slot(struct engine *en, int32_t slot, bool wipe)
{
    if (PREFILLD_POISON || wipe)
        model_poison_slot(en->model, slot);
    slots_free(&en->slots, slot);
}

static void engine_release(struct engine *en, struct request *r, bool wipe)
{
    if (r->slot < 0)
        return;
    if (!engine_session_keep(en, r))
        engine_free_slot(en, r->slot, wipe);
    r->slot = -1;
    for (int32_t i = 0; i < r->n_pages; i++) {
        bool is_freed;
        int32_t page = r->pages[i];
        pages_unhold(&en->pages, page, &is_freed);
        if (is_freed && (PREFILLD_POISON || wipe))
            model_poison_page(en->model, page);
    }
    r->n_pages = 0;
    en->n_admitted--;
}

void engine_publish_metrics(struct engine *en)
{
    struct metrics_pools p = {.slots_free = en->slots.n_free,
                              .slots_held = en->slots.n_held,
                              .slots_cached = en->slots.n_cached,
                              .pages_free = en->pages.n_free,
                              .pages_held = en->pages.n_held,
                              .pages_cached = en->pages.n_cached,
                              .requests_running = en->n_admitted,
                              .requests_waiting = queue_n_waiting(en->queue)};
    metrics_set_pools(en->metrics, &p);
    atomic_store(&en->metrics->backlog_tokens,
                 queue_waiting_tokens(en->queue) + en->admitted_left);
}

/* ---- the one way out ---- */

static void engine_unlink(struct engine *en, struct request *r)
{
    if (r->prev)
        r->prev->next = r->next;
    else
        en->first = r->next;
    if (r->next)
        r->next->prev = r->prev;
    r->prev = r->next = NULL;
    en->n_held--;
}

static void engine_observe(struct metrics *m, const struct request *r)
{
    atomic_fetch_add(&m->prompt_tokens, r->n_prompt);
    histogram_add(&m->queue_us, r->started_us - r->arrival_us);
    histogram_add(&m->prefill_us, r->prompt_us - r->started_us);
    histogram_add(&m->first_us, r->prompt_us - r->arrival_us);
    histogram_add(&m->total_us, r->ended_us - r->arrival_us);
    histogram_add(&m->prompt_sizes, r->n_prompt);
}

void engine_end_request(struct engine *en, struct request *r, enum outcome outcome,
                        const char *why)
{
    if (!r->is_ending) {
        sched_remove(en->sched, &r->item);
        engine_prefix_leave(en, r, outcome == OUTCOME_ERROR);
        r->outcome = outcome;
        errmsg_set(&r->error, 0, "%s", why);
        r->is_ending = true;
        if (r->slot < 0)
            queue_leave(en->queue, r);
        else
            en->admitted_left -= r->n_ids - r->n_computed;
    }
    if (r->n_in_flight > 0)
        return;
    engine_release(en, r, r->outcome == OUTCOME_ERROR);
    engine_session_leave(en, r);
    engine_prefix_trim(en);
    engine_unlink(en, r);
    r->ended_us = request_now_us();
    if (r->outcome == OUTCOME_OK)
        engine_observe(en->metrics, r);
    int32_t n_slots = en->slots.n_held - en->n_slots_coming;
    int32_t n_pages = en->pages.n_held - en->n_pages_coming;
    if (en->n_held == 0 && (n_slots || n_pages || en->admitted_left))
        log_error("event=leak slots_held=%d pages_held=%d tokens_left=%lld", n_slots, n_pages,
                  (long long)en->admitted_left);
    /* Before the owner hears of it: who has the answer sees the pools without it. */
    engine_publish_metrics(en);
    r->done(r, r->done_arg);
    request_unref(r);
    atomic_fetch_sub(&en->n_alive, 1);
}

void engine_end_all(struct engine *en, const char *why)
{
    struct request *next;
    for (struct request *r = en->first; r; r = next) {
        next = r->next;
        engine_end_request(en, r, OUTCOME_ERROR, why);
    }
}
