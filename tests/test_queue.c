/* The queue: order, bounds, waits and wakes; then several producers, hang-ups and a stop
 * against one consumer. A lost wake hangs the program: the alarm turns that into a failure. */
#include "queue.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "rate.h"
#include "rng.h"
#include "tap.h"

enum { SEED = 99, N_IDS = 10, ALARM_S = 120 };

static struct request *make(int32_t n_ids)
{
    struct request *r =
        request_new(calloc((size_t)n_ids, sizeof(int32_t)), n_ids, LOGPROBS_NONE, 0, 64);
    if (!r)
        abort();
    return r;
}

static struct queue *open_queue(int32_t max_waiting)
{
    struct queue *q;
    if (queue_open(max_waiting, &q))
        abort();
    return q;
}

static void test_order(void)
{
    struct queue *q = open_queue(4);
    struct request *r[6], *out[8];
    bool in_order = true, has_seq = true;
    /* More than once round the ring. */
    uint64_t seq = 0;
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 3; i++) {
            r[i] = make(N_IDS);
            in_order = in_order && queue_push(q, r[i]) == 0;
            has_seq = has_seq && r[i]->item.seq == seq++;
        }
        in_order = in_order && queue_take(q, out, 2, 0) == 2 && out[0] == r[0] &&
                   out[1] == r[1] && queue_take(q, out + 2, 8, 0) == 1 && out[2] == r[2];
        for (int i = 0; i < 3; i++) {
            queue_leave(q, r[i]);
            in_order = in_order && atomic_load(&r[i]->refs) == 2;
            request_unref(r[i]);
            request_unref(out[i]);
        }
    }
    CHECK(in_order, "requests come out in the order they went in, with the queue's reference");
    CHECK(has_seq, "seq counts pushes");
    CHECK(queue_n_waiting(q) == 0 && queue_waiting_tokens(q) == 0, "nothing is left");
    CHECK(queue_take(q, out, 8, 0) == 0, "an empty queue gives nothing at once");
    queue_close(q);
}

static void test_full(void)
{
    struct queue *q = open_queue(2), *none;
    struct request *a = make(5), *b = make(7), *c = make(11), *out[2];
    CHECK(queue_push(q, a) == 0 && queue_push(q, b) == 0, "two fit");
    CHECK(queue_push(q, c) == ERR_FULL && atomic_load(&c->refs) == 1,
          "the third is refused and not referred to");
    CHECK(queue_n_waiting(q) == 2 && queue_waiting_tokens(q) == 12, "two wait, 12 tokens");
    CHECK(queue_take(q, out, 2, 0) == 2 && queue_push(q, c) == ERR_FULL,
          "those taken and not admitted still count");
    queue_leave(q, a);
    CHECK(queue_n_waiting(q) == 1 && queue_waiting_tokens(q) == 7, "one left");
    CHECK(queue_push(q, c) == 0 && c->item.seq == 2, "its place is free; a refusal has no seq");
    request_unref(a);
    request_unref(a);
    request_unref(b);
    request_unref(b);
    queue_close(q);
    CHECK(atomic_load(&c->refs) == 1, "close gives up the references left in it");
    request_unref(c);
    CHECK(queue_open(0, &none) == ERR_INVALID && !none, "a queue of 0 is refused");
    queue_close(NULL);
}

/* Many at a time: all or none, and round the ring. */
static void test_all_or_none(void)
{
    struct queue *q = open_queue(4);
    struct request *r[3], *out[4];
    bool is_whole = true;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 3; i++)
            r[i] = make(N_IDS + i);
        is_whole = is_whole && queue_push_all(q, r, 3) == 0 && queue_n_waiting(q) == 3 &&
                   queue_waiting_tokens(q) == 3 * N_IDS + 3;
        is_whole = is_whole && queue_push_all(q, r, 2) == ERR_FULL && queue_n_waiting(q) == 3 &&
                   atomic_load(&r[0]->refs) == 2;
        is_whole = is_whole && queue_take(q, out, 4, 0) == 3 && out[0] == r[0] &&
                   out[2] == r[2] && r[2]->item.seq == r[0]->item.seq + 2;
        for (int i = 0; i < 3; i++) {
            queue_leave(q, r[i]);
            request_unref(r[i]);
            request_unref(out[i]);
        }
    }
    CHECK(is_whole, "several are pushed in order, or none of them");
    CHECK(queue_max_waiting(q) == 4, "so many may wait");
    queue_close(q);
}

/* Who leaves first need not be who came first. */
static void test_oldest(void)
{
    enum { N = 5 };
    static const int order[N] = {1, 0, 4, 2, 3};
    static const int64_t oldest[N] = {1000, 1002, 1002, 1003, 0};
    struct queue *q = open_queue(N);
    struct request *r[N], *out[N];
    CHECK(queue_oldest_us(q) == 0, "nobody waits");
    for (int i = 0; i < N; i++) {
        r[i] = make(N_IDS);
        r[i]->arrival_us = 1000 + i;
        queue_push(q, r[i]);
    }
    CHECK(queue_oldest_us(q) == 1000, "in the ring");
    bool is_right = queue_take(q, out, N, 0) == N && queue_oldest_us(q) == 1000;
    for (int i = 0; i < N; i++) {
        queue_leave(q, r[order[i]]);
        is_right = is_right && queue_oldest_us(q) == oldest[i];
    }
    CHECK(is_right, "and when they leave in another order");
    queue_push(q, r[3]);
    CHECK(queue_oldest_us(q) == 1003, "anew");
    for (int i = 0; i < N; i++) {
        request_unref(r[i]);
        request_unref(out[i]);
    }
    queue_close(q);
}

static void test_waits(void)
{
    struct queue *q = open_queue(2);
    struct request *r = make(N_IDS), *out[2];
    int64_t t_us = request_now_us();
    int32_t n = queue_take(q, out, 2, 20000);
    t_us = request_now_us() - t_us;
    CHECK(n == 0 && t_us >= 20000 && t_us < 10000000, "waits 20 ms for nothing");
    t_us = request_now_us();
    n = queue_take(q, out, 2, 1050000);
    t_us = request_now_us() - t_us;
    CHECK(n == 0 && t_us >= 1050000 && t_us < 10500000, "waits 1.05 s: past a whole second");

    queue_wake(q);
    queue_wake(q);
    CHECK(queue_take(q, out, 2, 0) == 0, "a take that does not wait uses no wake up");
    CHECK(queue_take(q, out, 2, -1) == 0, "a wake before the wait ends it");
    t_us = request_now_us();
    CHECK(queue_take(q, out, 2, 10000) == 0 && request_now_us() - t_us >= 10000,
          "two wakes are one");

    queue_wake(q);
    queue_push(q, r);
    CHECK(queue_take(q, out, 2, -1) == 1, "with a request there is no wait");
    CHECK(queue_take(q, out, 2, -1) == 0, "and the wake is kept for the next");
    queue_leave(q, r);
    request_unref(r);

    CHECK(queue_push(q, r) == 0 && !queue_is_stopped(q), "not stopped");
    queue_stop(q);
    CHECK(queue_is_stopped(q) && queue_push(q, r) == ERR_STOPPED, "stopped: refuses");
    CHECK(queue_take(q, out, 2, -1) == 1, "stopped: what is in it comes out");
    CHECK(queue_take(q, out, 2, -1) == 0, "stop wakes once");
    t_us = request_now_us();
    CHECK(queue_take(q, out, 2, 10000) == 0 && request_now_us() - t_us >= 10000,
          "stopped and empty: waits, does not spin");
    request_unref(r);
    request_unref(r);
    queue_close(q);
}

static void test_retry_after(void)
{
    CHECK(queue_retry_after_s(0, 1000) == 1, "at least 1 s");
    CHECK(queue_retry_after_s(999, 1000) == 1 && queue_retry_after_s(1000, 1000) == 1,
          "up to a second: 1");
    CHECK(queue_retry_after_s(1001, 1000) == 2, "rounds up");
    CHECK(queue_retry_after_s(3600000, 1000) == 3600, "an hour");
    CHECK(queue_retry_after_s(INT64_MAX, 1e-9) == 3600, "at most an hour");
    CHECK(queue_retry_after_s(1000, 0) == 1 && queue_retry_after_s(1000, 0.0 / 0.0) == 1 &&
              queue_retry_after_s(1000, -5) == 1,
          "no rate yet: 1");
}

/* A full step of 8,192 tokens in 0.5 s, then a thousand of 5 tokens in 2 ms each: a queue is
 * still worked off at 16,384 tokens a second, where a quotient of sums says 2,500. */
static void test_rate(void)
{
    struct rate r = rate_start(8192);
    CHECK(rate_tokens_per_us(&r, 7) == 7, "no step yet");
    rate_add(&r, 8192, 500000);
    CHECK(fabs(rate_tokens_per_us(&r, 7) * 1e6 - 16384) < 1, "one step");
    for (int i = 0; i < 1000; i++)
        rate_add(&r, 5, 2000);
    CHECK(fabs(rate_tokens_per_us(&r, 7) * 1e6 / 16384 - 1) < 0.05,
          "small steps say little: %g", rate_tokens_per_us(&r, 7) * 1e6);
    for (int i = 0; i < 64; i++)
        rate_add(&r, 8192, 1000000);
    CHECK(fabs(rate_tokens_per_us(&r, 7) * 1e6 / 8192 - 1) < 0.05, "full ones are followed: %g",
          rate_tokens_per_us(&r, 7) * 1e6);
}

/* ---- threads */

enum { PRODUCERS = 4, PUSHES = 2000, MAX_WAITING = 50 };

struct stress {
    struct queue *q;
    int i_producer;
    int64_t n_pushed, n_full, n_stopped;
};

/* Pushes, tries again when full, and hangs up on every request: the consumer ends them for that
 * alone. Ends early when the queue is stopped. */
static void *produce(void *arg)
{
    struct stress *s = arg;
    struct rng rng = {SEED + (uint64_t)s->i_producer};
    struct request *kept[8] = {NULL};
    for (int i = 0; i < PUSHES; i++) {
        struct request *r = make(1 + rng_int(&rng, 100));
        r->done_arg = (void *)(intptr_t)(s->i_producer * PUSHES + i);
        int rc;
        while ((rc = queue_push(s->q, r)) == ERR_FULL) {
            s->n_full++;
            usleep(100);
        }
        if (rc == ERR_STOPPED) {
            s->n_stopped++;
            request_unref(r);
            break;
        }
        s->n_pushed++;
        /* Hang up on this one, or later on it, in another order. */
        struct request **place = &kept[rng_int(&rng, 8)];
        struct request *gone = *place;
        *place = r;
        if (gone) {
            atomic_store(&gone->cancelled, true);
            queue_wake(s->q);
            request_unref(gone);
        }
        /* Those kept must not fill the queue for ever. */
        if (i % 16 == 15 || i == PUSHES - 1)
            for (int k = 0; k < 8; k++)
                if (kept[k]) {
                    atomic_store(&kept[k]->cancelled, true);
                    queue_wake(s->q);
                    request_unref(kept[k]);
                    kept[k] = NULL;
                }
    }
    for (int k = 0; k < 8; k++)
        if (kept[k]) {
            atomic_store(&kept[k]->cancelled, true);
            queue_wake(s->q);
            request_unref(kept[k]);
        }
    return NULL;
}

struct consumer {
    struct queue *q;
    int64_t n_taken, n_ended;
    bool is_ordered, is_bounded;
    int64_t last_of[PRODUCERS];
    uint64_t next_seq;
};

/* Takes as the engine does, waiting without limit; ends only what was hung up on. Ends when the
 * queue is stopped and all it took has ended. */
static void *consume(void *arg)
{
    struct consumer *c = arg;
    struct request *live[MAX_WAITING], *out[7];
    int32_t n_live = 0;
    for (;;) {
        bool is_stopped = queue_is_stopped(c->q);
        int32_t n = queue_take(c->q, out, 7, is_stopped && n_live == 0 ? 0 : -1);
        for (int32_t i = 0; i < n; i++) {
            int64_t id = (intptr_t)out[i]->done_arg;
            int64_t *last = &c->last_of[id / PUSHES];
            c->is_ordered = c->is_ordered && id > *last && out[i]->item.seq == c->next_seq++;
            *last = id;
            c->is_bounded = c->is_bounded && n_live < MAX_WAITING;
            if (n_live == MAX_WAITING)
                return NULL;
            live[n_live++] = out[i];
        }
        c->n_taken += n;
        for (int32_t i = 0; i < n_live; i++) {
            if (!atomic_load(&live[i]->cancelled))
                continue;
            queue_leave(c->q, live[i]);
            request_unref(live[i]);
            live[i--] = live[--n_live];
            c->n_ended++;
        }
        if (is_stopped && n == 0 && n_live == 0)
            return NULL;
    }
}

static void test_threads(bool stops_early)
{
    struct queue *q = open_queue(MAX_WAITING);
    struct stress s[PRODUCERS];
    struct consumer c = {.q = q, .is_ordered = true, .is_bounded = true};
    pthread_t producers[PRODUCERS], consumer;
    for (int i = 0; i < PRODUCERS; i++)
        c.last_of[i] = -1;
    if (pthread_create(&consumer, NULL, consume, &c))
        abort();
    for (int i = 0; i < PRODUCERS; i++) {
        s[i] = (struct stress){.q = q, .i_producer = i};
        if (pthread_create(&producers[i], NULL, produce, &s[i]))
            abort();
    }
    if (stops_early) {
        usleep(20000);
        queue_stop(q);
    }
    int64_t n_pushed = 0, n_full = 0, n_stopped = 0;
    for (int i = 0; i < PRODUCERS; i++) {
        pthread_join(producers[i], NULL);
        n_pushed += s[i].n_pushed;
        n_full += s[i].n_full;
        n_stopped += s[i].n_stopped;
    }
    queue_stop(q);
    pthread_join(consumer, NULL);
    printf("# pushed %lld, full %lld times, stopped %lld\n", (long long)n_pushed,
           (long long)n_full, (long long)n_stopped);
    const char *when = stops_early ? "stop in the middle" : "all pushed";
    CHECK(stops_early || n_pushed == PRODUCERS * PUSHES, "%s: none was lost", when);
    CHECK(c.n_taken == n_pushed && c.n_ended == n_pushed, "%s: each came out once", when);
    CHECK(c.is_ordered, "%s: in the order of each producer and of seq", when);
    CHECK(c.is_bounded, "%s: never more than the limit", when);
    CHECK(queue_n_waiting(q) == 0 && queue_waiting_tokens(q) == 0, "%s: nothing waits", when);
    queue_close(q);
}

static void *wake_later(void *arg)
{
    usleep(10000);
    queue_wake(arg);
    return NULL;
}

static void *push_later(void *arg)
{
    usleep(10000);
    struct request *r = make(N_IDS);
    queue_push(arg, r);
    request_unref(r);
    return NULL;
}

static void *stop_later(void *arg)
{
    usleep(10000);
    queue_stop(arg);
    return NULL;
}

/* Each ends a wait that has no limit. */
static void test_wakes_a_sleeper(void)
{
    void *(*const others[])(void *) = {wake_later, push_later, stop_later};
    const char *const names[] = {"wake", "push", "stop"};
    const int32_t expected[] = {0, 1, 0};
    for (int i = 0; i < 3; i++) {
        struct queue *q = open_queue(2);
        struct request *out[2];
        pthread_t t;
        if (pthread_create(&t, NULL, others[i], q))
            abort();
        int32_t n = queue_take(q, out, 2, -1);
        CHECK(n == expected[i], "%s ends the wait", names[i]);
        pthread_join(t, NULL);
        if (n == 1) {
            queue_leave(q, out[0]);
            request_unref(out[0]);
        }
        queue_close(q);
    }
}

int main(void)
{
    alarm(ALARM_S);
    printf("# seed %d\n", SEED);
    test_order();
    test_full();
    test_all_or_none();
    test_oldest();
    test_waits();
    test_retry_after();
    test_rate();
    test_wakes_a_sleeper();
    test_threads(false);
    test_threads(true);
    return tap_done();
}
