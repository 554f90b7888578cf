/* A histogram of whole numbers (microseconds, tokens) for Prometheus. Adding is lock-free, from
 * any thread; a reader may see a value in its bucket before it is in the sum. */
#ifndef PREFILLD_HISTOGRAM_H
#define PREFILLD_HISTOGRAM_H

#include <stdatomic.h>
#include <stdint.h>

enum { HISTOGRAM_MAX_BUCKETS = 24 };

struct histogram {
    const int64_t *bounds; /* [n_bounds] rising; a bucket holds what is at most its bound */
    int32_t n_bounds;
    atomic_llong counts[HISTOGRAM_MAX_BUCKETS + 1]; /* the last: above all bounds */
    atomic_llong sum;
};

static inline void histogram_add(struct histogram *h, int64_t value)
{
    int32_t low = 0, high = h->n_bounds;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (h->bounds[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    atomic_fetch_add_explicit(&h->counts[low], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum, value, memory_order_relaxed);
}

static inline void histogram_zero(struct histogram *h)
{
    for (int32_t i = 0; i <= h->n_bounds; i++)
        atomic_store(&h->counts[i], 0);
    atomic_store(&h->sum, 0);
}

#endif
