/* The CPU backend's threads: a fixed set that shares out the items of one loop at a time.
 *
 * A run is published as a new generation of one word that also counts the workers inside it, so
 * that a worker which wakes late finds the run closed and touches nothing, and the caller waits
 * only for workers that joined. Waiting is a short spin, then a condition variable: an idle
 * daemon uses no CPU. cpu_pool_run is called by one thread at a time; fn never calls it. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "cpu.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "cpu_gemm.h"

/* Longer than the gap between two operations of a step, shorter than anyone notices. */
enum { SPIN_US = 30, PAUSES_PER_LOOK = 16 };

/* The state word: generation | open bit | workers inside. */
#define STATE_OPEN (1ull << 31)
#define STATE_GENERATION (1ull << 32)
#define STATE_INSIDE (STATE_OPEN - 1)

struct cpu_pool {
    int32_t n_threads;
    int32_t n_started; /* workers whose pthread_t is valid */
    pthread_t *workers;
    struct worker *args;
    struct cpu_gemm_ctx gemm;

    /* The run in flight; written before the state word opens it. */
    void (*fn)(void *arg, int64_t item, int32_t thread);
    void *arg;
    int64_t n_items;

    _Alignas(64) _Atomic uint64_t state;
    _Alignas(64) _Atomic int64_t next_item;
    _Alignas(64) _Atomic int32_t n_sleeping; /* threads in or near a wait on cond */
    atomic_bool stop;
    pthread_mutex_t lock; /* held only around waits on, and signals of, cond */
    pthread_cond_t cond;
};

struct worker {
    struct cpu_pool *pool;
    int32_t thread;
};

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* A worker waits for an open generation other than the one it has seen. */
static bool worker_may_go(struct cpu_pool *pool, uint64_t seen)
{
    uint64_t s = atomic_load(&pool->state);
    return atomic_load(&pool->stop) || ((s & STATE_OPEN) && s / STATE_GENERATION != seen);
}

/* The caller waits for the workers inside to leave. */
static bool caller_may_go(struct cpu_pool *pool, uint64_t unused)
{
    (void)unused;
    return (atomic_load(&pool->state) & STATE_INSIDE) == 0;
}

/* n_sleeping is raised before the last look at the condition, and wake_sleepers reads it after
 * the change of state, both sequentially consistent: one of the two sees the other. */
static void wait_until(struct cpu_pool *pool, bool (*may_go)(struct cpu_pool *, uint64_t),
                       uint64_t seen)
{
    int64_t end_us = now_us() + SPIN_US;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            if (may_go(pool, seen))
                return;
            pause_cpu();
        }
    } while (now_us() < end_us);
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->n_sleeping, 1);
    while (!may_go(pool, seen))
        pthread_cond_wait(&pool->cond, &pool->lock);
    atomic_fetch_sub(&pool->n_sleeping, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void wake_sleepers(struct cpu_pool *pool)
{
    if (atomic_load(&pool->n_sleeping) == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->cond);
    pthread_mutex_unlock(&pool->lock);
}

static void take_items(struct cpu_pool *pool, int32_t thread)
{
    int64_t n_items = pool->n_items;
    for (;;) {
        int64_t item = atomic_fetch_add_explicit(&pool->next_item, 1, memory_order_relaxed);
        if (item >= n_items)
            return;
        pool->fn(pool->arg, item, thread);
    }
}

static void *worker_main(void *arg)
{
    const struct worker *w = arg;
    struct cpu_pool *pool = w->pool;
    uint64_t seen = 0;
    for (;;) {
        wait_until(pool, worker_may_go, seen);
        if (atomic_load(&pool->stop))
            return NULL;
        uint64_t s = atomic_load(&pool->state);
        if (!(s & STATE_OPEN) || !atomic_compare_exchange_strong(&pool->state, &s, s + 1))
            continue;
        seen = s / STATE_GENERATION;
        take_items(pool, w->thread);
        s = atomic_fetch_sub(&pool->state, 1) - 1;
        if (!(s & STATE_OPEN) && (s & STATE_INSIDE) == 0)
            wake_sleepers(pool);
    }
}

void cpu_pool_run(struct cpu_pool *pool, int64_t n_items,
                  void (*fn)(void *arg, int64_t item, int32_t thread), void *arg)
{
    if (pool->n_threads == 1 || n_items <= 1) {
        for (int64_t i = 0; i < n_items; i++)
            fn(arg, i, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->n_items = n_items;
    atomic_store_explicit(&pool->next_item, 0, memory_order_relaxed);
    atomic_fetch_add(&pool->state, STATE_GENERATION + STATE_OPEN);
    wake_sleepers(pool);
    take_items(pool, 0);
    atomic_fetch_and(&pool->state, ~STATE_OPEN);
    wait_until(pool, caller_may_go, 0);
}

static int32_t usable_cpus(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? n : 1;
}

struct cpu_pool *cpu_pool_open(int32_t n_threads)
{
    struct cpu_pool *pool = aligned_alloc(64, sizeof(*pool));
    if (!pool)
        return NULL;
    *pool = (struct cpu_pool){.n_threads = n_threads > 0 ? n_threads : usable_cpus()};
    atomic_init(&pool->state, 0);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->cond, NULL);
    size_t n = (size_t)pool->n_threads;
    pool->workers = calloc(n, sizeof(*pool->workers));
    pool->args = calloc(n, sizeof(*pool->args));
    if (!pool->workers || !pool->args || cpu_gemm_ctx_init(&pool->gemm, pool->n_threads) != 0)
        goto fail;
    for (int32_t i = 1; i < pool->n_threads; i++) {
        pool->args[i] = (struct worker){pool, i};
        if (pthread_create(&pool->workers[i], NULL, worker_main, &pool->args[i]) != 0)
            goto fail;
        pool->n_started = i;
    }
    return pool;

fail:
    cpu_pool_close(pool);
    return NULL;
}

void cpu_pool_close(struct cpu_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stop, true);
    wake_sleepers(pool);
    for (int32_t i = 1; i <= pool->n_started; i++)
        pthread_join(pool->workers[i], NULL);
    cpu_gemm_ctx_fini(&pool->gemm);
    pthread_cond_destroy(&pool->cond);
    pthread_mutex_destroy(&pool->lock);
    free(pool->args);
    free(pool->workers);
    free(pool);
}

int32_t cpu_pool_threads(const struct cpu_pool *pool)
{
    return pool->n_threads;
}

struct cpu_gemm_ctx *cpu_pool_gemm(struct cpu_pool *pool)
{
    return &pool->gemm;
}
