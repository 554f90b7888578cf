/* Bodies and answers that are handed on as they come: what is kept of them, and who looks at
 * it.
 *
 * A body goes through a ring of fixed size: when it is full the connection is suspended, so
 * that the client waits. An answer goes through the exchange's stream, which its owner refills
 * when little is left. Both owners work in looks: a worker, one at a time, after each
 * notice. */
#include <stdlib.h>
#include <string.h>

#include "http_impl.h"

bool exchange_intake_start(struct exchange *x)
{
    x->is_intake = true;
    return exchange_enter(x, EXCHANGE_INTAKE, WORK_REQUEST);
}

static void run_look(struct exchange *x)
{
    int seen;
    do {
        seen = atomic_load(&x->n_notices);
        /* Ended: with notices left nobody posts a worker again. */
        if (!x->look(x))
            return;
    } while (atomic_fetch_sub(&x->n_notices, seen) > seen);
}

void exchange_notice(struct exchange *x)
{
    if (atomic_fetch_add(&x->n_notices, 1) == 0)
        exchange_post(x, run_look);
}

void exchange_start_looks(struct exchange *x, bool (*look)(struct exchange *x), void *call,
                          void (*on_hangup)(void *call), void (*free_call)(void *call))
{
    exchange_ref(x); /* a notice of another may have looked, and ended x */
    pthread_mutex_lock(&x->http->lock);
    bool is_here = exchange_put_call(x, call, on_hangup, free_call);
    x->look = look;
    pthread_mutex_unlock(&x->http->lock);
    if (!is_here)
        on_hangup(call);
    exchange_notice(x);
    exchange_unref(x);
}

void exchange_file_open(struct exchange *x, const char *content_type, int64_t len)
{
    pthread_mutex_lock(&x->http->lock);
    x->file_bytes = len;
    x->content_type = content_type;
    x->file_until_us = http_now_us() + (int64_t)x->http->c.file_timeout_s * 1000000;
    pthread_mutex_unlock(&x->http->lock);
}

bool exchange_is_intake(const struct exchange *x)
{
    return x->is_intake;
}

int exchange_intake_open(struct exchange *x, size_t cap)
{
    char *ring = malloc(cap);
    if (!ring)
        return ERR_NOMEM;
    pthread_mutex_lock(&x->http->lock);
    x->intake = ring;
    x->intake_cap = cap;
    if (x->is_parked && x->state == EXCHANGE_INTAKE) {
        x->is_parked = false;
        http_resume(x);
    }
    pthread_mutex_unlock(&x->http->lock);
    return 0;
}

/* http.lock held. */
static size_t ring_put(struct exchange *x, const char *data, size_t len)
{
    size_t cap = x->intake_cap, room = cap - x->n_intake, n = len < room ? len : room;
    size_t end = cap ? (x->intake_at + x->n_intake) % cap : 0;
    size_t first = cap - end < n ? cap - end : n;
    if (n == 0)
        return 0;
    memcpy(x->intake + end, data, first);
    memcpy(x->intake, data + first, n - first);
    x->n_intake += n;
    return n;
}

bool exchange_intake_add(struct exchange *x, const char *data, size_t *size)
{
    pthread_mutex_lock(&x->http->lock);
    bool is_wanted = x->state == EXCHANGE_INTAKE;
    size_t n = is_wanted ? ring_put(x, data, *size) : 0;
    x->intake_bytes += (int64_t)n;
    *size -= n;
    if (is_wanted && *size > 0) {
        x->is_parked = true;
        http_suspend(x);
    }
    bool tells = n > 0 && x->look;
    pthread_mutex_unlock(&x->http->lock);
    if (tells)
        exchange_notice(x);
    return is_wanted;
}

bool exchange_intake_end(struct exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    bool is_wanted = x->state == EXCHANGE_INTAKE;
    if (is_wanted) {
        x->is_intake_over = true;
        x->state = EXCHANGE_PENDING;
        http_suspend(x);
    }
    bool tells = is_wanted && x->look;
    pthread_mutex_unlock(&x->http->lock);
    if (tells)
        exchange_notice(x);
    return is_wanted;
}

size_t exchange_intake_read(struct exchange *x, void *out, size_t len, bool *is_over)
{
    pthread_mutex_lock(&x->http->lock);
    size_t cap = x->intake_cap, n = len < x->n_intake ? len : x->n_intake;
    size_t first = cap - x->intake_at < n ? cap - x->intake_at : n;
    if (n > 0) {
        memcpy(out, x->intake + x->intake_at, first);
        memcpy((char *)out + first, x->intake, n - first);
        x->intake_at = (x->intake_at + n) % cap;
        x->n_intake -= n;
    }
    *is_over = x->is_intake_over && x->n_intake == 0;
    if (x->is_parked && x->state == EXCHANGE_INTAKE && x->n_intake <= cap / 2) {
        x->is_parked = false;
        http_resume(x);
    }
    pthread_mutex_unlock(&x->http->lock);
    return n;
}
