/* Time of the tree of prompts with 100,000 kept states: what an arriving request costs, which
 * is putting its prompt in and looking for the nearest state, and what its leaving costs.
 *
 *   tests/bench/prefix
 *
 * The same prompts come in again, with all the others in between: the least time of each prompt
 * leaves out what other work did to the machine meanwhile, and is printed, too.
 *
 * Bar: a look-up <= 50 us. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../rng.h"
#include "prefix.h"

enum {
    STATES = 100000,
    LOOKS = 2000,
    PASSES = 3,
    MAX_TOKENS = 32768,
    VOCAB = 150000,
    SEED = 7
};

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

struct documents {
    int32_t n, n_tokens;
    int32_t cut_tokens; /* they are cut at a multiple of this */
    int32_t **ids;      /* [n][n_tokens] */
};

static void open_documents(struct documents *d, struct rng *rng)
{
    d->ids = calloc((size_t)d->n, sizeof(*d->ids));
    for (int32_t i = 0; d->ids && i < d->n; i++) {
        d->ids[i] = malloc((size_t)d->n_tokens * sizeof(int32_t));
        for (int32_t t = 0; t < d->n_tokens; t++)
            d->ids[i][t] = rng_int(rng, VOCAB);
    }
    if (!d->ids)
        abort();
}

static void close_documents(struct documents *d)
{
    for (int32_t i = 0; i < d->n; i++)
        free(d->ids[i]);
    free(d->ids);
}

/* One of the documents, half of it or more, and a question behind it. */
static int32_t make_prompt(struct rng *rng, const struct documents *d, int32_t *ids)
{
    int32_t n = d->n_tokens / 2 + rng_int(rng, d->n_tokens / 2);
    const int32_t *from = d->ids[rng_int(rng, d->n)];
    n -= n % d->cut_tokens;
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

static double at(double *us, int32_t share_of_100)
{
    qsort(us, LOOKS, sizeof(*us), compare);
    return us[LOOKS * share_of_100 / 100];
}

static void look_up(struct prefix *p, const struct documents *d, struct rng first)
{
    static double look[LOOKS], least[LOOKS], leave[LOOKS];
    static int32_t ids[MAX_TOKENS];
    int64_t n_found = 0, n_tokens = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        struct rng rng = first;
        for (int i = 0; i < LOOKS; i++) {
            int32_t n = make_prompt(&rng, d, ids);
            double from_us = clock_us();
            struct prefix_node *v = prefix_insert(p, NULL, 0, ids, n);
            struct prefix_node *found = prefix_nearest(v);
            double found_us = clock_us(), look_us = found_us - from_us;
            prefix_unref(p, v);
            if (pass == 0) {
                leave[i] = clock_us() - found_us;
                look[i] = look_us;
                n_tokens += n;
                n_found += found ? found->depth : 0;
            }
            least[i] = pass == 0 || look_us < least[i] ? look_us : least[i];
        }
    }
    printf("%d documents of %d tokens, cut at %d, prompts of %lld, %lld of them found, %d "
           "nodes: look-up p50 %.1f us p99 %.1f us, least of %d p50 %.1f p99 %.1f, leaving p50 "
           "%.1f us p99 %.1f us\n",
           d->n, d->n_tokens, d->cut_tokens, (long long)(n_tokens / LOOKS),
           (long long)(n_found / LOOKS), p->n_nodes, at(look, 50), at(look, 99), PASSES,
           at(least, 50), at(least, 99), at(leave, 50), at(leave, 99));
}

static void measure(struct documents d)
{
    static int32_t ids[MAX_TOKENS];
    struct rng rng = {SEED};
    struct prefix p;
    if (prefix_init(&p, 64) != 0)
        abort();
    open_documents(&d, &rng);
    while (p.n_ranked < STATES) {
        int32_t n = make_prompt(&rng, &d, ids);
        struct prefix_node *v = prefix_insert(&p, NULL, 0, ids, n);
        keep(&p, v);
        if (v->parent->parent) /* where it parts from others */
            keep(&p, v->parent);
        prefix_unref(&p, v);
    }
    look_up(&p, &d, rng);
    prefix_fini(&p);
    close_documents(&d);
}

int main(void)
{
    printf("# seed %d, %d states\n", SEED, STATES);
    measure((struct documents){.n = 1000, .n_tokens = 2048, .cut_tokens = 1});
    measure((struct documents){.n = 100, .n_tokens = 8192, .cut_tokens = 1});
    measure((struct documents){.n = 20, .n_tokens = 32000, .cut_tokens = 1});
    /* Long edges. */
    measure((struct documents){.n = 20, .n_tokens = 32000, .cut_tokens = 2048});
    return 0;
}
