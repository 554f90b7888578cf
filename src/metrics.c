#include "metrics.h"

#include <string.h>

/* Of 1, 2.5 and 5 times powers of ten, in microseconds: 0.1 ms to 250 s. */
static const int64_t times_us[] = {100,      250,      500,      1000,      2500,
                                   5000,     10000,    25000,    50000,     100000,
                                   250000,   500000,   1000000,  2500000,   5000000,
                                   10000000, 25000000, 50000000, 100000000, 250000000};
static const int64_t gaps_ns[] = {1000,   2000,   5000,   10000,   20000,   50000,
                                  100000, 200000, 500000, 1000000, 10000000};
static const int64_t sizes_tokens[] = {1,    8,    64,    128,   256,   512,    1024,  2048,
                                       4096, 8192, 16384, 32768, 65536, 131072, 262144};
static const int64_t counts[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};

#define BOUNDS(h, list)                                                                        \
    do {                                                                                       \
        (h)->bounds = (list);                                                                  \
        (h)->n_bounds = (int32_t)(sizeof(list) / sizeof((list)[0]));                           \
    } while (0)

int metrics_init(struct metrics *m)
{
    memset(m, 0, sizeof(*m));
    BOUNDS(&m->queue_us, times_us);
    BOUNDS(&m->prefill_us, times_us);
    BOUNDS(&m->first_us, times_us);
    BOUNDS(&m->total_us, times_us);
    BOUNDS(&m->prompt_sizes, sizes_tokens);
    BOUNDS(&m->steps_us, times_us);
    BOUNDS(&m->step_sizes, sizes_tokens);
    BOUNDS(&m->step_pieces, counts);
    BOUNDS(&m->gaps_ns, gaps_ns);
    return pthread_mutex_init(&m->lock, NULL) == 0 ? 0 : ERR_NOMEM;
}

void metrics_fini(struct metrics *m)
{
    pthread_mutex_destroy(&m->lock);
}

void metrics_set_pools(struct metrics *m, const struct metrics_pools *p)
{
    pthread_mutex_lock(&m->lock);
    m->pools = *p;
    pthread_mutex_unlock(&m->lock);
}

void metrics_get_pools(struct metrics *m, struct metrics_pools *p)
{
    pthread_mutex_lock(&m->lock);
    *p = m->pools;
    pthread_mutex_unlock(&m->lock);
}

void metrics_count(struct metrics *m, enum outcome o)
{
    atomic_fetch_add_explicit(&m->requests[o], 1, memory_order_relaxed);
}

void metrics_zero_steps(struct metrics *m)
{
    atomic_store(&m->steps, 0);
    atomic_store(&m->step_tokens, 0);
    atomic_store(&m->steps_replayed, 0);
    atomic_store(&m->prompt_tokens, 0);
    atomic_store(&m->new_tokens, 0);
    struct histogram *all[] = {&m->queue_us,     &m->prefill_us, &m->first_us,
                               &m->total_us,     &m->steps_us,   &m->step_sizes,
                               &m->prompt_sizes, &m->gaps_ns,    &m->step_pieces};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        histogram_zero(all[i]);
}

const char *outcome_name(enum outcome o)
{
    static const char *const names[OUTCOME_COUNT] = {
        [OUTCOME_OK] = "ok",
        [OUTCOME_INVALID] = "invalid",
        [OUTCOME_OVERLOAD] = "overload",
        [OUTCOME_DEADLINE] = "deadline",
        [OUTCOME_CANCELLED] = "cancelled",
        [OUTCOME_ERROR] = "error",
    };
    return names[o];
}
