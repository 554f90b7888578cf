/* The CPU backend's threads: every item once, all done at return, asleep when idle. A plain
 * program: it also runs under TSan. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu.h"
#include "rng.h"
#include "tap.h"

enum { MAX_ITEMS = 1000, MAX_THREADS = 4 };

/* Plain memory on purpose: TSan sees whether a run's end orders it. */
struct tally {
    int32_t n_threads;
    int32_t times[MAX_ITEMS];
    int64_t last[MAX_THREADS]; /* each thread's latest item */
    int64_t sum[MAX_THREADS];
    bool is_out_of_order[MAX_THREADS], is_out_of_range[MAX_THREADS];
    int32_t busy; /* turns of a loop an item takes */
};

static void count_item(void *arg, int64_t item, int32_t thread)
{
    struct tally *t = arg;
    if (thread < 0 || thread >= t->n_threads) {
        t->is_out_of_range[0] = true;
        return;
    }
    t->times[item]++;
    t->is_out_of_order[thread] |= item <= t->last[thread];
    t->last[thread] = item;
    t->sum[thread] += item + 1;
    for (volatile int32_t i = 0; i < t->busy; i = i + 1)
        ;
}

static bool run_counts(struct cpu_pool *pool, struct tally *t, int32_t n_items)
{
    memset(t, 0, sizeof(*t) - sizeof(t->busy));
    t->n_threads = cpu_pool_threads(pool);
    for (int i = 0; i < MAX_THREADS; i++)
        t->last[i] = -1;
    cpu_pool_run(pool, n_items, count_item, t);
    int64_t sum = 0;
    bool is_right = true;
    for (int i = 0; i < MAX_THREADS; i++) {
        sum += t->sum[i];
        is_right = is_right && !t->is_out_of_order[i] && !t->is_out_of_range[i];
    }
    for (int32_t i = 0; i < n_items; i++)
        is_right = is_right && t->times[i] == 1;
    return is_right && sum == (int64_t)n_items * (n_items + 1) / 2;
}

static void sleep_us(int64_t us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

static int64_t process_cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Back to back, and with pauses around the length of the spin, so that runs meet workers that
 * spin, that fall asleep and that sleep. */
static void test_runs(int32_t n_threads, struct rng *r)
{
    enum { RUNS = 2000 };
    struct cpu_pool *pool = cpu_pool_open(n_threads);
    CHECK(pool && cpu_pool_threads(pool) == n_threads, "%d threads open", n_threads);
    struct tally *t = calloc(1, sizeof(*t));
    int n_wrong = 0;
    for (int i = 0; i < RUNS; i++) {
        t->busy = rng_int(r, 4) == 0 ? rng_int(r, 2000) : 0;
        n_wrong += !run_counts(pool, t, rng_int(r, 8) == 0 ? rng_int(r, 3) : rng_int(r, 40));
        if (rng_int(r, 16) == 0)
            sleep_us(rng_int(r, 100));
    }
    t->busy = 0;
    n_wrong += !run_counts(pool, t, MAX_ITEMS);
    CHECK(n_wrong == 0, "%d runs on %d threads, every item once, ascending", RUNS + 1,
          n_threads);
    free(t);
    cpu_pool_close(pool);
}

static void test_open_close(void)
{
    struct tally *t = calloc(1, sizeof(*t));
    bool is_right = true;
    for (int i = 0; i < 100; i++) {
        struct cpu_pool *pool = cpu_pool_open(1 + i % MAX_THREADS);
        if (i % 3)
            is_right = is_right && run_counts(pool, t, i);
        cpu_pool_close(pool);
    }
    CHECK(is_right, "pools open and close, used or not, at once");
    cpu_pool_close(NULL);
    free(t);
}

/* A thread that spun on would use as much as the pause; the last spin is 30 us a thread. */
static void test_idle(void)
{
    enum { PAUSE_US = 200000 };
    struct cpu_pool *pool = cpu_pool_open(MAX_THREADS);
    struct tally *t = calloc(1, sizeof(*t));
    run_counts(pool, t, 100);
    sleep_us(10000);
    int64_t before_us = process_cpu_us();
    sleep_us(PAUSE_US);
    int64_t used_us = process_cpu_us() - before_us;
    CHECK(used_us < PAUSE_US / 10, "an idle pool sleeps: %lld us in %d", (long long)used_us,
          PAUSE_US);
    CHECK(run_counts(pool, t, 100), "and wakes");
    free(t);
    cpu_pool_close(pool);
}

static _Atomic int32_t n_arrived;

static void meet(void *arg, int64_t item, int32_t thread)
{
    (void)item;
    (void)thread;
    atomic_fetch_add(&n_arrived, 1);
    while (atomic_load(&n_arrived) < *(int32_t *)arg)
        ;
}

/* Items that wait for each other end only when each has a thread of its own. */
static void test_all_threads_work(void)
{
    int32_t n = MAX_THREADS;
    struct cpu_pool *pool = cpu_pool_open(n);
    for (int i = 0; i < 20; i++) {
        atomic_store(&n_arrived, 0);
        cpu_pool_run(pool, n, meet, &n);
    }
    CHECK(atomic_load(&n_arrived) == n, "all threads take part");
    cpu_pool_close(pool);
}

int main(void)
{
    struct rng r = {11};
    printf("# seed 11\n");
    for (int32_t n = 1; n <= MAX_THREADS; n++)
        test_runs(n, &r);
    test_open_close();
    test_idle();
    test_all_threads_work();
    struct cpu_pool *pool = cpu_pool_open(0);
    CHECK(pool && cpu_pool_threads(pool) >= 1, "0: as many threads as this process may use");
    cpu_pool_close(pool);
    return tap_done();
}
