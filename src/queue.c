#include "queue.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct queue {
    pthread_mutex_t lock;
    pthread_cond_t wakes;  /* on CLOCK_MONOTONIC; only queue_take waits */
    struct request **ring; /* [max_waiting] */
    int32_t max_waiting;
    int32_t i_head, n_ring; /* oldest in the ring; how many */
    uint64_t next_seq;
    struct request *oldest, *newest; /* of those that wait, in the order of pushes */
    bool is_woken; /* queue_wake or queue_stop came; cleared by the take that answers it */
    /* Written under the lock, read also without. */
    atomic_int n_waiting; /* in the ring, or taken and not left */
    atomic_llong waiting_tokens;
    atomic_bool is_stopped;
};

int queue_open(int32_t max_waiting, struct queue **out)
{
    *out = NULL;
    if (max_waiting < 1)
        return ERR_INVALID;
    struct queue *q = calloc(1, sizeof(*q));
    if (!q)
        return ERR_NOMEM;
    q->ring = calloc((size_t)max_waiting, sizeof(*q->ring));
    if (!q->ring)
        goto fail;
    q->max_waiting = max_waiting;

    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr))
        goto fail;
    int rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (!rc)
        rc = pthread_cond_init(&q->wakes, &attr);
    pthread_condattr_destroy(&attr);
    if (rc)
        goto fail;
    if (pthread_mutex_init(&q->lock, NULL)) {
        pthread_cond_destroy(&q->wakes);
        goto fail;
    }
    *out = q;
    return 0;
fail:
    free(q->ring);
    free(q);
    return ERR_NOMEM;
}

void queue_close(struct queue *q)
{
    if (!q)
        return;
    for (; q->n_ring > 0; q->n_ring--) {
        request_unref(q->ring[q->i_head]);
        q->i_head = (q->i_head + 1) % q->max_waiting;
    }
    pthread_mutex_destroy(&q->lock);
    pthread_cond_destroy(&q->wakes);
    free(q->ring);
    free(q);
}

/* The lock is held. */
static void add_waiting(struct queue *q, struct request *r)
{
    r->older = q->newest;
    r->newer = NULL;
    if (q->newest)
        q->newest->newer = r;
    else
        q->oldest = r;
    q->newest = r;
}

int queue_push_all(struct queue *q, struct request *const *r, int32_t n)
{
    int rc = 0;
    pthread_mutex_lock(&q->lock);
    if (q->is_stopped) {
        rc = ERR_STOPPED;
    } else if (n > q->max_waiting - q->n_waiting) {
        rc = ERR_FULL;
    } else {
        for (int32_t i = 0; i < n; i++) {
            request_ref(r[i]);
            r[i]->item.seq = q->next_seq++;
            q->ring[(q->i_head + q->n_ring++) % q->max_waiting] = r[i];
            q->waiting_tokens += r[i]->n_ids;
            add_waiting(q, r[i]);
        }
        q->n_waiting += n;
        pthread_cond_signal(&q->wakes);
    }
    pthread_mutex_unlock(&q->lock);
    return rc;
}

int queue_push(struct queue *q, struct request *r)
{
    return queue_push_all(q, &r, 1);
}

int32_t queue_max_waiting(const struct queue *q)
{
    return q->max_waiting;
}

/* Waits for a request or a wake, at most wait_us (-1: for ever). The lock is held. */
static void wait_for_work(struct queue *q, int64_t wait_us)
{
    struct timespec until;
    if (wait_us > 0) {
        clock_gettime(CLOCK_MONOTONIC, &until);
        int64_t ns = until.tv_nsec + wait_us % 1000000 * 1000;
        until.tv_sec += (time_t)(wait_us / 1000000 + ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
    }
    int rc = 0;
    while (q->n_ring == 0 && !q->is_woken && rc != ETIMEDOUT)
        rc = wait_us < 0 ? pthread_cond_wait(&q->wakes, &q->lock)
                         : pthread_cond_timedwait(&q->wakes, &q->lock, &until);
}

int32_t queue_take(struct queue *q, struct request **out, int32_t max, int64_t wait_us)
{
    int32_t n = 0;
    pthread_mutex_lock(&q->lock);
    if (wait_us != 0 && q->n_ring == 0) {
        wait_for_work(q, wait_us);
        q->is_woken = false;
    }
    while (n < max && q->n_ring > 0) {
        out[n++] = q->ring[q->i_head];
        q->i_head = (q->i_head + 1) % q->max_waiting;
        q->n_ring--;
    }
    pthread_mutex_unlock(&q->lock);
    return n;
}

void queue_wake(struct queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->is_woken = true;
    pthread_cond_signal(&q->wakes);
    pthread_mutex_unlock(&q->lock);
}

void queue_leave(struct queue *q, struct request *r)
{
    pthread_mutex_lock(&q->lock);
    assert(q->n_waiting > q->n_ring && q->waiting_tokens >= r->n_ids);
    assert(r->older || q->oldest == r);
    *(r->older ? &r->older->newer : &q->oldest) = r->newer;
    *(r->newer ? &r->newer->older : &q->newest) = r->older;
    r->older = r->newer = NULL;
    q->n_waiting--;
    q->waiting_tokens -= r->n_ids;
    pthread_mutex_unlock(&q->lock);
}

void queue_stop(struct queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->is_stopped = true;
    q->is_woken = true;
    pthread_cond_signal(&q->wakes);
    pthread_mutex_unlock(&q->lock);
}

bool queue_is_stopped(const struct queue *q)
{
    return atomic_load(&q->is_stopped);
}

int32_t queue_n_waiting(const struct queue *q)
{
    return atomic_load(&q->n_waiting);
}

int64_t queue_waiting_tokens(const struct queue *q)
{
    return atomic_load(&q->waiting_tokens);
}

int64_t queue_oldest_us(struct queue *q)
{
    pthread_mutex_lock(&q->lock);
    int64_t arrival_us = q->oldest ? q->oldest->arrival_us : 0;
    pthread_mutex_unlock(&q->lock);
    return arrival_us;
}

int32_t queue_retry_after_s(int64_t backlog_tokens, double tokens_per_s)
{
    enum { MIN_S = 1, MAX_S = 3600 };
    if (backlog_tokens <= 0 || !(tokens_per_s > 0))
        return MIN_S;
    double s = (double)backlog_tokens / tokens_per_s;
    if (s >= MAX_S)
        return MAX_S;
    int32_t whole = (int32_t)s;
    whole += whole < s;
    return whole < MIN_S ? MIN_S : whole;
}
