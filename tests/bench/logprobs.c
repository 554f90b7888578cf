/* Writing whole rows of logprobs, as /v1/completions answers them with echo: offsets, numbers,
 * tokens and candidates; jansson's writer, with its tree made before, in the same run.
 *   make tests/bench/logprobs && tests/bench/logprobs TOKENIZER.json [ROWS]  default 100000 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../rng.h"
#include "api_logprobs.h"

/* Behind the single bytes: jansson has no NUL in names. */
enum { FIRST_ID = 256 };

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* what others do on the machine is left out */
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* Tokens of the vocabulary, logprobs of all sizes that occur. */
static struct request *make_rows(int32_t n_rows, int32_t n_top, int32_t vocab)
{
    struct rng r = {1};
    int32_t *ids = malloc((size_t)n_rows * sizeof(*ids));
    for (int32_t t = 0; ids && t < n_rows; t++)
        ids[t] = FIRST_ID + rng_int(&r, vocab - FIRST_ID);
    struct request *q = ids ? request_new(ids, n_rows, LOGPROBS_ALL, n_top, 64) : NULL;
    for (int32_t t = 1; q && t < n_rows; t++) {
        float own = q->prompt_logprobs[t] = -(float)rng_int(&r, 1 << 24) * 0x1p-20f;
        for (int32_t i = 0; i < n_top; i++)
            q->prompt_top[t * n_top + i] =
                i == 0 && t % 3 == 0
                    ? (struct top_entry){ids[t], own}
                    : (struct top_entry){FIRST_ID + rng_int(&r, vocab - FIRST_ID),
                                         -(float)rng_int(&r, 1 << 24) * 0x1p-22f};
    }
    return q;
}

static void measure(const struct api *a, int32_t n_rows, int32_t n_top, int32_t vocab)
{
    enum { RUNS = 15 };
    struct request *q = make_rows(n_rows, n_top, vocab);
    const struct row_style style = {n_top, false, false};
    double best = 1e9, best_jansson = 1e9;
    size_t bytes = 0;
    for (int i = 0; q && i < RUNS; i++) {
        struct buf b;
        struct text_offsets o;
        buf_init(&b);
        text_offsets_init(&o, a->tokenizer, false);
        double start = cpu_ms();
        write_logprobs(a, &b, q, 0, n_rows, &style, &o);
        double end = cpu_ms();
        best = end - start < best ? end - start : best;
        bytes = b.len;
        json_t *root = i < 3 ? json_loadb(b.data, b.len, JSON_ALLOW_NUL, NULL) : NULL;
        start = cpu_ms();
        char *text = root ? json_dumps(root, JSON_REAL_PRECISION(9)) : NULL;
        end = cpu_ms();
        if (text)
            best_jansson = end - start < best_jansson ? end - start : best_jansson;
        free(text);
        json_decref(root);
        text_offsets_fini(&o);
        buf_fini(&b);
    }
    printf("logprobs rows=%d top=%d bytes=%zu ms=%.1f ns_a_row=%.0f jansson_ms=%.1f ratio=%.1f "
           "best_of=%d\n",
           n_rows, n_top, bytes, best, best * 1e6 / n_rows, best_jansson, best_jansson / best,
           RUNS);
    request_unref(q);
}

int main(int argc, char **argv)
{
    struct tokenizer *t;
    struct errmsg e;
    int32_t n_rows = argc > 2 ? atoi(argv[2]) : 100000;
    if (argc < 2 || tokenizer_load(argv[1], &t, &e) != 0) {
        fprintf(stderr, "%s\n", argc < 2 ? "logprobs TOKENIZER.json [ROWS]" : e.text);
        return 1;
    }
    const struct api a = {.tokenizer = t};
    static const int32_t tops[] = {0, 1, 5};
    for (int i = 0; i < 3; i++)
        measure(&a, n_rows, tops[i], tokenizer_size(t));
    tokenizer_free(t);
    return 0;
}
