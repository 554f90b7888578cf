/* Time of the tree of prompts with 100,000 kept states: what an arriving request costs, which
 * is putting its prompt in and looking for the nearest state, and what its leaving costs.
 *
 *   tests/bench/prefix
 *
 * Bar: a look-up <= 50 us. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../rng.h"
#include "prefix.h"

enum { STATES = 100000, LOOKS = 2000, MAX_TOKENS = 32768, VOCAB = 150000, SEED = 7 };

/* The thread's own time: what others on the machine take is not the tree's. */
static double clock_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* One of some documents, cut anywhere, and a question behind it. */
static int32_t make_prompt(struct rng *rng, int32_t *const *documents, int32_t n_documents,
                           int32_t document_tokens, int32_t *ids)
{
    int32_t n = document_tokens / 2 + rng_int(rng, document_tokens / 2);
    const int32_t *from = documents[rng_int(rng, n_documents)];
    for (int32_t t = 0; t < n; t++)
        ids[t] = from[t];
    for (int32_t t = 0; t < 200; t++)
        ids[n++] = rng_int(rng, VOCAB);
    return n;
}

static void keep(struct prefix *p, struct prefix_node *v)
{
    if (v->state == PREFIX_READY)
        return;
    v->state = PREFIX_READY;
    prefix_ref(v);
    if (prefix_rank(p, v, v->depth, 1) != 0)
        abort();
}

static void measure(int32_t n_documents, int32_t document_tokens)
{
    struct rng rng = {SEED};
    struct prefix p;
    int32_t **documents = calloc((size_t)n_documents, sizeof(*documents));
    int32_t *ids = malloc(MAX_TOKENS * sizeof(*ids));
    static double look[LOOKS], leave[LOOKS];
    int64_t n_found = 0, n_tokens = 0;
    if (prefix_init(&p, 64) != 0 || !documents || !ids)
        abort();
    for (int32_t i = 0; i < n_documents; i++) {
        documents[i] = malloc((size_t)document_tokens * sizeof(int32_t));
        for (int32_t t = 0; t < document_tokens; t++)
            documents[i][t] = rng_int(&rng, VOCAB);
    }
    while (p.n_ranked < STATES) {
        int32_t n = make_prompt(&rng, documents, n_documents, document_tokens, ids);
        struct prefix_node *v = prefix_insert(&p, NULL, 0, ids, n);
        keep(&p, v);
        if (v->parent->parent) /* where it parts from others */
            keep(&p, v->parent);
        prefix_unref(&p, v);
    }
    for (int i = 0; i < LOOKS; i++) {
        int32_t n = make_prompt(&rng, documents, n_documents, document_tokens, ids);
        double from_us = clock_us();
        struct prefix_node *v = prefix_insert(&p, NULL, 0, ids, n);
        struct prefix_node *found = prefix_nearest(v);
        double found_us = clock_us();
        n_tokens += n;
        n_found += found ? found->depth : 0;
        prefix_unref(&p, v);
        look[i] = found_us - from_us;
        leave[i] = clock_us() - found_us;
    }
    qsort(look, LOOKS, sizeof(*look), compare);
    qsort(leave, LOOKS, sizeof(*leave), compare);
    printf("%d documents of %d tokens, prompts of %lld, %lld of them found, %d nodes: look-up "
           "p50 %.1f us p99 %.1f us, leaving p50 %.1f us p99 %.1f us\n",
           n_documents, document_tokens, (long long)(n_tokens / LOOKS),
           (long long)(n_found / LOOKS), p.n_nodes, look[LOOKS / 2], look[LOOKS * 99 / 100],
           leave[LOOKS / 2], leave[LOOKS * 99 / 100]);
    prefix_fini(&p);
    for (int32_t i = 0; i < n_documents; i++)
        free(documents[i]);
    free(documents);
    free(ids);
}

int main(void)
{
    printf("# seed %d, %d states\n", SEED, STATES);
    measure(1000, 2048);
    measure(100, 8192);
    measure(20, 32000);
    return 0;
}
