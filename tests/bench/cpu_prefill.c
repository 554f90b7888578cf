/* Prefill speed of whole models on the CPU backend, through the engine.
 *
 * cpu_prefill MODEL_DIR file|dummy THREADS REPEATS NxLEN...   (8x256: 8 prompts of 256 tokens)
 *
 * One JSON line a shape: seconds (median over repeats, each on other tokens), tok/s, and the
 * next token of the first prompt of the first repeat, so that a driver can check what ran.
 * Token t of prompt p of repeat r is (7919 * (t + 1) + 104729 * (p + 1) + 1299709 * r) %
 * vocab. */
#include <stdio.h>

#include "../model_fixture.h"

enum { MAX_REPEATS = 32 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Runs n prompts of len tokens at once; returns seconds from the first push to the last end. */
static double run_once(struct fixture *f, int32_t n, int32_t len, int32_t repeat,
                       struct top_entry *next)
{
    struct request **r = calloc((size_t)n, sizeof(struct request *));
    int32_t *ids = malloc((size_t)len * sizeof(int32_t));
    int n_done = 0;
    for (int32_t p = 0; p < n; p++) {
        for (int64_t t = 0; t < len; t++)
            ids[t] = (int32_t)((7919 * (t + 1) + 104729 * (p + 1) + 1299709 * (int64_t)repeat) %
                               f->arch.vocab);
        r[p] = fixture_request(f, ids, len, LOGPROBS_NEXT, 1, &n_done);
    }
    int64_t from_us = request_now_us();
    for (int32_t p = 0; p < n; p++)
        queue_push(f->queue, r[p]);
    while (n_done < n)
        engine_turn(f->engine);
    double seconds = (double)(request_now_us() - from_us) / 1e6;
    *next = r[0]->next_top[0];
    for (int32_t p = 0; p < n; p++) {
        if (r[p]->outcome != OUTCOME_OK) {
            fprintf(stderr, "prompt %d: %s\n", p, r[p]->error.text);
            exit(1);
        }
        request_unref(r[p]);
    }
    free(r);
    free(ids);
    return seconds;
}

int main(int argc, char **argv)
{
    if (argc < 6) {
        fprintf(stderr, "usage: cpu_prefill MODEL_DIR file|dummy THREADS REPEATS NxLEN...\n");
        return 2;
    }
    struct fixture f;
    struct model_options o = {
        .max_step_tokens = 8192, .max_seqs = 64, .page_tokens = 64, .kv_tokens = 65536};
    struct engine_config c = {.max_waiting = 64};
    int32_t threads = atoi(argv[3]), repeats = atoi(argv[4]);
    int rc = fixture_open_as(&f, argv[1], &o, threads, strcmp(argv[2], "dummy") == 0);
    if (rc != 0 || fixture_open_engine(&f, &c) != 0 || repeats < 1 || repeats > MAX_REPEATS)
        return 1;
    for (int i = 5; i < argc; i++) {
        int n, len;
        struct top_entry next, ignored;
        double s[MAX_REPEATS];
        if (sscanf(argv[i], "%dx%d", &n, &len) != 2)
            return 2;
        run_once(&f, n, len, 0, &next);
        for (int32_t k = 0; k < repeats; k++)
            s[k] = run_once(&f, n, len, k + 1, &ignored);
        qsort(s, (size_t)repeats, sizeof(s[0]), by_value);
        double median = s[repeats / 2];
        printf("{\"shape\": \"%s\", \"seconds\": %.6f, \"tokens_per_s\": %.1f, "
               "\"next_id\": %d, \"next_logprob\": %.9g}\n",
               argv[i], median, n * (double)len / median, next.id, (double)next.logprob);
        fflush(stdout);
    }
    fixture_close(&f);
    return 0;
}
