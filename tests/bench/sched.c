/* Time of the scheduler's calls with 10,000 requests waiting. Items lie as far apart as in
 * struct request, and each run keeps the number waiting: what leaves is replaced.
 *
 *   tests/bench/sched [steps]
 *
 * Bar: sched_plan <= 50 us a step. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../rng.h"
#include "request.h"
#include "sched.h"

enum { WAITING = 10000, SLOTS = 512, MAX_SEQS = 256, SEED = 7 };

struct bench {
    struct sched *s;
    struct rng rng;
    struct request *items; /* [WAITING + SLOTS] */
    struct request **spare;
    int32_t n_spare;
    int64_t now_us;
    uint64_t next_seq;
    int32_t min_tokens, max_tokens;
};

/* The thread's own time: what others on the machine take is not the scheduler's. */
static double clock_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void add_one(struct bench *b)
{
    struct request *r = b->spare[--b->n_spare];
    double spread = (double)b->max_tokens / b->min_tokens;
    r->item = (struct sched_item){
        .arrival_us = b->now_us,
        .deadline_us = b->now_us + 1000000000 + rng_int(&b->rng, 1000000000),
        .n_tokens = (int32_t)(b->min_tokens * exp(rng_unit(&b->rng) * log(spread))),
        .n_pages = 1,
        .seq = b->next_seq++,
        .i_entry = -1};
    if (sched_add(b->s, &r->item))
        abort();
}

static struct request *request_of(struct sched_item *item)
{
    return (struct request *)((char *)item - offsetof(struct request, item));
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_row(const char *name, double *us, int n, double per_step)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += us[i];
    qsort(us, (size_t)n, sizeof(*us), compare);
    printf("%-38s %8.2f %8.2f %8.2f %8.2f %8.1f\n", name, sum / n, us[n / 2], us[n * 99 / 100],
           us[n - 1], per_step);
}

static void open_bench(struct bench *b, enum sched_policy policy, int32_t min, int32_t max)
{
    struct sched_config c = {policy, 8192, MAX_SEQS, WAITING, 0};
    *b = (struct bench){.rng = {SEED}, .min_tokens = min, .max_tokens = max};
    b->items = calloc(WAITING + SLOTS, sizeof(*b->items));
    b->spare = calloc(WAITING + SLOTS, sizeof(struct request *));
    if (!b->items || !b->spare || sched_open(&c, &b->s))
        abort();
    /* Requests come and go: those that wait together are not neighbours in memory. */
    for (int32_t i = 0; i < WAITING + SLOTS; i++) {
        int32_t k = rng_int(&b->rng, ++b->n_spare);
        b->spare[i] = b->spare[k];
        b->spare[k] = &b->items[i];
    }
    for (int32_t i = 0; i < WAITING; i++) {
        b->now_us += 100;
        add_one(b);
    }
}

static void close_bench(struct bench *b)
{
    sched_close(b->s);
    free(b->items);
    free(b->spare);
}

/* jump: factor the rate changes by, up and down, each step. */
static void bench_plan(const char *name, enum sched_policy policy, int32_t min, int32_t max,
                       double jump, int n_steps)
{
    struct bench b;
    struct sched_piece pieces[MAX_SEQS];
    double *us = calloc((size_t)n_steps, sizeof(*us)), rate = 0.05;
    int64_t n_pieces = 0;
    open_bench(&b, policy, min, max);
    for (int i = -50; i < n_steps; i++) {
        struct sched_room room = {b.now_us, rate, SLOTS - sched_n_running(b.s),
                                  1000000,  NULL, NULL};
        double start_us = clock_us();
        int32_t n = sched_plan(b.s, &room, pieces);
        double end_us = clock_us();
        if (i >= 0) {
            us[i] = end_us - start_us;
            n_pieces += n;
        }
        for (int32_t k = 0; k < n; k++)
            if (pieces[k].is_last)
                b.spare[b.n_spare++] = request_of(pieces[k].item);
        b.now_us += (int64_t)(8192 / rate);
        while (sched_n_waiting(b.s) < WAITING)
            add_one(&b);
        rate *= i % 2 ? jump : 1 / jump;
    }
    print_row(name, us, n_steps, (double)n_pieces / n_steps);
    free(us);
    close_bench(&b);
}

/* In batches, because one call is as short as reading the clock. */
static void bench_add_remove(int n_rounds)
{
    enum { BATCH = 64 };
    struct bench b;
    double *us = calloc((size_t)n_rounds * 3, sizeof(*us));
    double *add_us = us, *remove_us = us + n_rounds, *expire_us = us + 2 * n_rounds;
    open_bench(&b, SCHED_SHORT_FIRST, 64, 16384);
    for (int i = 0; i < n_rounds; i++) {
        struct request *r[BATCH];
        for (int k = 0; k < BATCH; k++) {
            do
                r[k] = &b.items[rng_int(&b.rng, WAITING + SLOTS)];
            while (r[k]->item.n_tokens == 0);
            r[k]->item.n_tokens = 0; /* taken */
        }
        double t0 = clock_us();
        for (int k = 0; k < BATCH; k++)
            sched_remove(b.s, &r[k]->item);
        double t1 = clock_us();
        for (int k = 0; k < BATCH; k++)
            if (sched_pop_expired(b.s, b.now_us))
                abort();
        double t2 = clock_us();
        for (int k = 0; k < BATCH; k++)
            b.spare[b.n_spare++] = r[k];
        b.now_us += 100;
        double t3 = clock_us();
        for (int k = 0; k < BATCH; k++)
            add_one(&b);
        double t4 = clock_us();
        remove_us[i] = (t1 - t0) / BATCH;
        expire_us[i] = (t2 - t1) / BATCH;
        add_us[i] = (t4 - t3) / BATCH;
    }
    print_row("sched_add, with making the item", add_us, n_rounds, 1);
    print_row("sched_remove of any", remove_us, n_rounds, 1);
    print_row("sched_pop_expired, none is", expire_us, n_rounds, 1);
    free(us);
    close_bench(&b);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 5000;
    if (n < 1)
        return 1;
    printf("# %d waiting, %d slots, max-step-tokens 8192, max-seqs %d, %d calls, seed %d\n",
           WAITING, SLOTS, MAX_SEQS, n, SEED);
    printf("%-38s %8s %8s %8s %8s %8s\n", "us a call", "mean", "p50", "p99", "max", "pieces");
    bench_plan("plan, prompts of 64..16384", SCHED_SHORT_FIRST, 64, 16384, 1, n);
    bench_plan("plan, prompts of 64..16384, fcfs", SCHED_FCFS, 64, 16384, 1, n);
    bench_plan("plan, prompts of 8..64", SCHED_SHORT_FIRST, 8, 64, 1, n);
    bench_plan("plan, prompts of 8..64, fcfs", SCHED_FCFS, 8, 64, 1, n);
    bench_plan("plan, 64..16384, rate +-5% each step", SCHED_SHORT_FIRST, 64, 16384, 1.05, n);
    bench_plan("plan, 64..16384, rate x2, /2 each step", SCHED_SHORT_FIRST, 64, 16384, 2, n);
    bench_add_remove(n);
    return 0;
}
