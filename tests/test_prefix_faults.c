/* Faults of other engines with kept prefixes on models with recurrent layers, each as the test
 * that would have met it, by its number in gdn.md section 4. All compare bits with a cold
 * start. Plain program. */
#include <math.h>

#include "engine_world.h"
#include "tap.h"
#include "tiny_model.h"

enum { MAX_TOKENS = 2700, N_TOP = 2 };

struct answer {
    struct top_entry next[N_TOP];
    int32_t n_cached;
    bool is_ok;
};

struct world {
    struct fixture f;
    int32_t ids[MAX_TOKENS], other[MAX_TOKENS];
    int n_done;
};

static struct model_options options = {
    .max_step_tokens = 192, .state_slots = 64, .kv_tokens = 64 * 1024};

static void open_world(struct world *w, const char *dir, int32_t page_tokens)
{
    struct rng rng = {20261202};
    struct model_options o = options;
    struct engine_config c = {
        .max_waiting = 64, .checkpoint_tokens = 64, .min_shared_tokens = 1, .cache_share = 900};
    memset(w, 0, sizeof(*w));
    o.page_tokens = page_tokens;
    world_open(&w->f, dir, &o, &c);
    for (int32_t t = 0; t < MAX_TOKENS; t++) {
        w->ids[t] = rng_int(&rng, w->f.arch.vocab);
        w->other[t] = rng_int(&rng, w->f.arch.vocab);
    }
}

/* The first n of ids, and n_other of the others behind them. */
static struct answer ask(struct world *w, int32_t n, int32_t n_other, bool shares)
{
    struct answer a = {.is_ok = true};
    int32_t *prompt = malloc((size_t)(n + n_other) * sizeof(*prompt));
    memcpy(prompt, w->ids, (size_t)n * sizeof(*prompt));
    memcpy(prompt + n, w->other, (size_t)n_other * sizeof(*prompt));
    struct request *r =
        fixture_request(&w->f, prompt, n + n_other, LOGPROBS_NEXT, N_TOP, &w->n_done);
    r->shares = shares;
    fixture_run(&w->f, r);
    memcpy(a.next, r->next_top, sizeof(a.next));
    a.n_cached = r->n_cached;
    a.is_ok = r->outcome == OUTCOME_OK && isfinite(a.next[0].logprob);
    request_unref(r);
    free(prompt);
    return a;
}

/* Whether a prompt gives the same with what is kept as without; how much was kept is added. */
static bool is_same(struct world *w, int32_t n, int32_t n_other, int64_t *n_cached)
{
    struct answer hit = ask(w, n, n_other, true), cold = ask(w, n, n_other, false);
    *n_cached += hit.n_cached;
    return hit.is_ok && cold.is_ok && memcmp(hit.next, cold.next, sizeof(hit.next)) == 0;
}

/* 20: NaN after a hit when the prefill before ended a few tokens past a block. 21: states kept
 * off the blocks. */
static void test_ends(const char *dir)
{
    struct world w;
    int64_t n_cached = 0;
    int n_bad = 0, n = 0;
    open_world(&w, dir, 64);
    for (int32_t end = 0; end < 16; end++) {
        n_bad += !is_same(&w, 128 + end, 0, &n_cached);
        for (int32_t more = 1; more < 70; more += 17, n++)
            n_bad += !is_same(&w, 128 + end, more, &n_cached);
    }
    CHECK(n_bad == 0 && n_cached >= 128 * n / 2, "20: ends 0 to 15 past a block (%lld kept)",
          (long long)n_cached);
    n_cached = 0;
    for (int32_t at = 64; at <= 640; at += 64)
        for (int32_t off = -1; off <= 1; off++)
            n_bad += !is_same(&w, at + off, 30, &n_cached);
    CHECK(n_bad == 0 && n_cached > 64 * 30, "21: every boundary, and one beside it (%lld kept)",
          (long long)n_cached);
    fixture_close(&w.f);
}

/* 22: another answer at the second run of the same prompts. */
static void test_twice(const char *dir)
{
    enum { N = 24 };
    struct world w;
    struct answer first[N];
    int64_t n_cached = 0;
    int n_bad = 0;
    open_world(&w, dir, 64);
    for (int run = 0; run < 3; run++) {
        for (int i = 0; i < N; i++) {
            struct answer a = ask(&w, 64 + 37 * i, 5 * i, true);
            n_bad += !a.is_ok || (run && memcmp(a.next, first[i].next, sizeof(a.next)) != 0);
            first[i] = run ? first[i] : a;
            n_cached += run ? a.n_cached : 0;
        }
    }
    CHECK(n_bad == 0 && n_cached > 0, "22: the same prompts three times (%lld kept)",
          (long long)n_cached);
    fixture_close(&w.f);
}

/* 23: a wrong first token at lengths of 64 n + 1. */
static void test_lengths(const char *dir)
{
    struct world w;
    int64_t n_cached = 0;
    int n_bad = 0;
    open_world(&w, dir, 64);
    for (int32_t n = 1; n <= 40; n++)
        n_bad += !is_same(&w, 64 * n + 1, 0, &n_cached);
    CHECK(n_bad == 0 && n_cached > 64 * 40, "23: lengths 64 n + 1 (%lld kept)",
          (long long)n_cached);
    fixture_close(&w.f);
}

/* 24: what was NaN in a slot survives in its next user, or moves with it. All that is free is
 * NaN before each prompt. */
static void test_poison(const char *dir)
{
    struct world w;
    int64_t n_cached = 0;
    int n_bad = 0;
    open_world(&w, dir, 64);
    for (int i = 0; i < 12; i++) {
        const struct engine *en = w.f.engine;
        for (int32_t k = 0; k < en->slots.n_free; k++)
            model_poison_slot(w.f.model, en->slots.free_list[k]);
        for (int32_t k = 0; k < en->pages.n_free; k++)
            model_poison_page(w.f.model, en->pages.free_list[k]);
        n_bad += !is_same(&w, 130 + 64 * (i % 3), 20 * i, &n_cached);
    }
    CHECK(n_bad == 0 && n_cached > 0, "24: free slots and pages are NaN (%lld kept)",
          (long long)n_cached);
    fixture_close(&w.f);
}

/* 25: a state that is not the same when it was given back. The kept one is begun at time and
 * again, and evicted and made anew in between. */
static void test_restore(const char *dir)
{
    struct world w;
    int64_t n_cached = 0;
    int n_bad = 0;
    open_world(&w, dir, 64);
    struct answer cold = ask(&w, 400, 0, false);
    for (int i = 0; i < 20; i++) {
        struct answer a = ask(&w, 400, 0, true);
        n_bad += memcmp(a.next, cold.next, sizeof(a.next)) != 0;
        n_cached += a.n_cached;
        n_bad += !is_same(&w, 64 * (1 + i % 6), 10 + i, &n_cached);
    }
    CHECK(n_bad == 0 && n_cached >= 19 * 384, "25: begun at 20 times (%lld kept)",
          (long long)n_cached);
    fixture_close(&w.f);
}

/* 39: no state where a prompt in pieces crosses a block. Three and more pieces, pages of one to
 * four of them. */
static void test_pieces(const char *dir)
{
    for (int32_t page = 64; page <= 256; page *= 2) {
        struct world w;
        int64_t n_cached = 0;
        int n_bad = 0;
        open_world(&w, dir, page);
        for (int32_t n = 500; n < 1200; n += 111) {
            n_bad += !is_same(&w, n, 0, &n_cached);
            n_bad += !is_same(&w, n, 77, &n_cached);
        }
        CHECK(n_bad == 0 && n_cached > 500 && n_cached % page == 0,
              "39: pieces of 192 tokens, pages of %d (%lld kept)", page, (long long)n_cached);
        fixture_close(&w.f);
    }
}

int main(void)
{
    char dir[64];
    tiny_make(dir);
    test_ends(dir);
    test_twice(dir);
    test_lengths(dir);
    test_poison(dir);
    test_restore(dir);
    test_pieces(dir);
    tiny_remove(dir);
    return tap_done();
}
