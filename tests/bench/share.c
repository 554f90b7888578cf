/* What sharing a prefix saves, and what keeping states costs: questions behind one context,
 * with the context computed once and computed for each, and long prompts with states kept and
 * without.
 *
 *   tests/bench/share FOLDER [context tokens] [questions] [threads]
 *
 * FOLDER has a checkpoint, or config.json alone. Bars: 90% of the limit, which is the time of
 * the context plus that of the questions' tokens behind a context they share already; 2% for
 * states. */
#include <time.h>

#include "../model_fixture.h"
#include "../rng.h"

enum { QUESTION_TOKENS = 200, LONG_PROMPTS = 9, WARM_UPS = 6, HITS = 15 };

struct bench {
    struct fixture f;
    int32_t *ids; /* the context and a question */
    int32_t n_context;
    struct rng rng;
    int n_done;
};

static struct request *push(struct bench *b, int32_t n, bool shares, int32_t key)
{
    for (int32_t t = b->n_context; t < n; t++)
        b->ids[t] = rng_int(&b->rng, b->f.arch.vocab);
    struct request *r = fixture_request(&b->f, b->ids, n, LOGPROBS_NEXT, 1, &b->n_done);
    r->shares = shares;
    r->share_key = malloc(sizeof(*r->share_key));
    r->n_share_key = 1;
    *r->share_key = key;
    if (queue_push(b->f.queue, r) != 0)
        exit(1);
    return r;
}

/* n prompts at once, from the first to the last answer. Returns seconds. */
static double run(struct bench *b, int n, int32_t n_tokens, bool shares, int32_t key,
                  int64_t *n_cached)
{
    struct request **r = calloc((size_t)n, sizeof(*r));
    int64_t from_us = request_now_us();
    b->n_done = 0;
    for (int i = 0; i < n; i++)
        r[i] = push(b, n_tokens, shares, key);
    while (b->n_done < n)
        engine_turn(b->f.engine);
    double s = (double)(request_now_us() - from_us) / 1e6;
    *n_cached = 0;
    for (int i = 0; i < n; i++) {
        *n_cached += r[i]->n_cached;
        request_unref(r[i]);
    }
    free(r);
    return s;
}

/* The likeliest token behind one prompt. */
static struct top_entry ask(struct bench *b, bool shares, int64_t *n_cached)
{
    b->n_done = 0;
    struct request *r = push(b, b->n_context + QUESTION_TOKENS, shares, 1);
    while (b->n_done < 1)
        engine_turn(b->f.engine);
    struct top_entry top = r->next_top[0];
    *n_cached = r->n_cached;
    request_unref(r);
    return top;
}

/* Behind a kept context a question has the bits that it has without. */
static bool check_answer(struct bench *b)
{
    int64_t n_cached, n_none;
    struct rng same = b->rng;
    struct top_entry hit = ask(b, true, &n_cached);
    b->rng = same;
    struct top_entry cold = ask(b, false, &n_none);
    struct top_entry other = ask(b, false, &n_none);
    bool is_same = hit.id == cold.id && memcmp(&hit.logprob, &cold.logprob, sizeof(float)) == 0;
    bool differs = memcmp(&other.logprob, &cold.logprob, sizeof(float)) != 0;
    printf("an answer behind it has the bits of a cold one: %s; another question's: %s\n",
           is_same && n_cached > 0 ? "yes" : "NO", differs ? "no" : "YES");
    return is_same && n_cached > 0 && differs;
}

static int by_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* A question behind a kept context and a prompt of the tokens it has to compute, turn about. */
static void hits(struct bench *b)
{
    int64_t n_cached = 0, n_none;
    double behind[HITS], alone[HITS], more[HITS];
    int32_t n_tokens = b->n_context + QUESTION_TOKENS, n_context = b->n_context;
    int32_t *ids = b->ids;
    for (int i = -WARM_UPS; i < HITS; i++) {
        double first = run(b, 1, n_tokens, true, 1, &n_cached);
        b->n_context = 0;
        b->ids = malloc((size_t)n_tokens * sizeof(*b->ids));
        double tail = run(b, 1, n_tokens - (int32_t)n_cached, false, 0, &n_none);
        free(b->ids);
        b->ids = ids, b->n_context = n_context;
        if (i >= 0)
            behind[i] = first, alone[i] = tail, more[i] = first - tail;
    }
    qsort(behind, HITS, sizeof(behind[0]), by_double);
    qsort(alone, HITS, sizeof(alone[0]), by_double);
    qsort(more, HITS, sizeof(more[0]), by_double);
    printf("one question behind a kept context: %.2f ms, a prompt of its %lld tokens alone "
           "%.2f ms; %.2f more (%.2f..%.2f), medians of %d pairs\n",
           behind[HITS / 2] * 1e3, (long long)(n_tokens - n_cached), alone[HITS / 2] * 1e3,
           more[HITS / 2] * 1e3, more[0] * 1e3, more[HITS - 1] * 1e3, HITS);
}

static bool questions(struct bench *b, int n)
{
    int64_t n_cached, n_none;
    int32_t n_tokens = b->n_context + QUESTION_TOKENS, n_cold = n < 8 ? n : 8;
    run(b, 1, n_tokens, false, 0, &n_none); /* touches its memory for the first time */
    double once = run(b, 1, n_tokens, false, 0, &n_none);
    double cold = run(b, n_cold, n_tokens, false, 0, &n_none) / n_cold;
    double shared = run(b, n, n_tokens, true, 1, &n_cached);
    double warm = run(b, n, n_tokens, true, 1, &n_none); /* the state is there */
    double limit = once + warm * (n - 1) / n;
    printf("context %d, %d questions of %d tokens: shared %.2f s (%lld of %lld tokens from a "
           "state), each alone %.2f s, %.1f times; limit %.2f s, %.0f%% of it\n",
           b->n_context, n, QUESTION_TOKENS, shared, (long long)n_cached,
           (long long)n * n_tokens, cold * n, cold * n / shared, limit, 100 * limit / shared);
    bool is_right = check_answer(b);
    hits(b);
    return is_right;
}

/* On a CPU the time of all threads: what others on the machine take is not a state's cost. */
static double clock_s(const struct bench *b)
{
    struct timespec t;
    bool is_cpu = b->f.backend.ops == &backend_cpu_ops;
    clock_gettime(is_cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A prompt alone, whose end is 62 tokens behind the last place where a state may lie: without
 * the cache, and with its end and one each checkpoint-tokens kept. */
static void cost(struct bench *b)
{
    int64_t n_none;
    double kept[LONG_PROMPTS], plain[LONG_PROMPTS], ratio[LONG_PROMPTS];
    int32_t n = b->n_context / 64 * 64 - 2;
    for (int i = 0; i < WARM_UPS; i++) /* a device replays such steps then */
        run(b, 1, n, false, 0, &n_none);
    int64_t n_before = atomic_load(&b->f.metrics.prefix_kept);
    for (int i = 0; i < LONG_PROMPTS; i++) { /* turn about */
        double from = clock_s(b);
        run(b, 1, n, false, 0, &n_none);
        double between = clock_s(b);
        run(b, 1, n, true, 10 + i, &n_none);
        plain[i] = between - from;
        kept[i] = clock_s(b) - between;
        ratio[i] = kept[i] / plain[i];
    }
    long long n_states = atomic_load(&b->f.metrics.prefix_kept) - n_before;
    qsort(plain, LONG_PROMPTS, sizeof(plain[0]), by_double);
    qsort(kept, LONG_PROMPTS, sizeof(kept[0]), by_double);
    qsort(ratio, LONG_PROMPTS, sizeof(ratio[0]), by_double);
    double p = plain[LONG_PROMPTS / 2], k = kept[LONG_PROMPTS / 2];
    printf("a prompt of %d tokens: %.2f ms, with %.1f states kept %.2f (%+.1f%%), medians of "
           "%d pairs\n",
           n, p * 1e3, (double)n_states / LONG_PROMPTS, k * 1e3,
           100 * (ratio[LONG_PROMPTS / 2] - 1), LONG_PROMPTS);
}

int main(int argc, char **argv)
{
    struct bench b = {.rng = {7}};
    const char *dir = argc > 1 ? argv[1] : "";
    char path[512];
    b.n_context = argc > 2 ? atoi(argv[2]) : 8192;
    int n = argc > 3 ? atoi(argv[3]) : 1000;
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    struct model_options o = {.max_step_tokens = 8192,
                              .max_seqs = 256,
                              .state_slots = 300,
                              .kv_tokens = 300 * 256 + 12 * (b.n_context + 256)};
    struct engine_config c = {.max_waiting = n + 1};
    if (argc < 2 ||
        fixture_open_as(&b.f, dir, &o, argc > 4 ? atoi(argv[4]) : 2, access(path, R_OK) != 0) !=
            0 ||
        fixture_open_engine(&b.f, &c) != 0)
        return 1;
    /* Memory that is new to the process is slow: all of it is touched before. */
    for (int32_t i = 0; i < b.f.sizes.o.state_slots; i++)
        model_poison_slot(b.f.model, i);
    for (int32_t i = 0; i < b.f.sizes.n_pages; i++)
        model_poison_page(b.f.model, i);
    int32_t n_context = b.n_context;
    b.ids = malloc((size_t)(n_context + QUESTION_TOKENS) * sizeof(*b.ids));
    b.n_context = 0;
    run(&b, 1, n_context, false, 0, &(int64_t){0}); /* fills the context */
    b.n_context = n_context;
    bool is_right = questions(&b, n);
    cost(&b);
    free(b.ids);
    fixture_close(&b.f);
    return !is_right;
}
