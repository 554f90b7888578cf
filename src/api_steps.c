/* GET /v1/steps: each step as a server-sent event, to any number of readers.
 *
 * The engine tells when there are more steps, not of each short one; a worker then writes to
 * each reader what it has not had. A reader belongs to its exchange, and is in the list until
 * it is ended by the worker that finds its client gone or the server stopping. */
#include <stdlib.h>
#include <string.h>

#include "api_priv.h"
#include "api_steps.h"

enum {
    HISTORY = 40,             /* records that a new reader gets at once */
    MAX_WAITING = 256 * 1024, /* bytes; a reader that has not taken so many misses steps */
};

struct steps_reader {
    struct api *api;
    struct exchange *x;
    struct steps_reader *prev, *next;
    int64_t place;        /* the worker's */
    atomic_int n_notices; /* not yet looked at; a worker is there, or to come, while above 0 */
    atomic_bool is_gone;
};

static void write_to(struct exchange *x);

/* A worker will look at r, soon. */
static void notice(struct steps_reader *r)
{
    if (atomic_fetch_add(&r->n_notices, 1) == 0)
        exchange_post(r->x, write_to);
}

static void leave(struct steps_readers *l, struct steps_reader *r)
{
    pthread_mutex_lock(&l->lock);
    if (r->prev)
        r->prev->next = r->next;
    else
        l->first = r->next;
    if (r->next)
        r->next->prev = r->prev;
    pthread_mutex_unlock(&l->lock);
}

static void write_to(struct exchange *x)
{
    struct steps_reader *r = exchange_call(x);
    struct steps_readers *l = &r->api->readers;
    struct buf events;
    int seen;
    do {
        seen = atomic_load(&r->n_notices);
        buf_init(&events);
        if (exchange_stream_waiting(x) < MAX_WAITING)
            r->place = steps_render(r->api->steps, r->place, &events);
        bool is_over = atomic_load(&r->is_gone) || atomic_load(&l->is_closing);
        if (!is_over && events.len > 0)
            is_over = !exchange_stream_write(x, &events);
        if (is_over) {
            /* Out of the list first; with notices left nobody posts a worker again. */
            leave(l, r);
            exchange_stream_end(x, &events);
            return;
        }
        buf_fini(&events);
        /* Without notices left r is another worker's, which may end it. */
    } while (atomic_fetch_sub(&r->n_notices, seen) > seen);
}

static void on_hangup(void *call)
{
    struct steps_reader *r = call;
    atomic_store(&r->is_gone, true);
    notice(r);
}

void api_steps(struct api *a, struct exchange *x)
{
    struct steps_readers *l = &a->readers;
    /* libmicrohttpd ends a stream with a last chunk, for HEAD, too, which has no body. */
    if (strcmp(exchange_method(x), "HEAD") == 0) {
        struct buf none;
        buf_init(&none);
        exchange_reply(x, 200, "text/event-stream", &none);
        return;
    }
    struct steps_reader *r = calloc(1, sizeof(*r));
    if (!r) {
        api_error(a, x, 500, NULL, "memory is short");
        return;
    }
    r->api = a;
    r->x = x;
    r->place = steps_end(a->steps) - HISTORY;
    /* This thread is the worker that looks, until the first events are written. */
    atomic_init(&r->n_notices, 1);
    exchange_stream_open(x);
    pthread_mutex_lock(&l->lock);
    r->next = l->first;
    if (l->first)
        l->first->prev = r;
    l->first = r;
    pthread_mutex_unlock(&l->lock);
    if (!exchange_set_call(x, r, on_hangup, free))
        atomic_store(&r->is_gone, true);
    struct buf hello;
    buf_init(&hello);
    buf_adds(&hello, ": the latest steps, then each as it ends\n\n");
    exchange_stream_write(x, &hello);
    write_to(x);
}

void steps_readers_init(struct steps_readers *l)
{
    pthread_mutex_init(&l->lock, NULL);
}

void steps_readers_fini(struct steps_readers *l)
{
    pthread_mutex_destroy(&l->lock);
}

void api_steps_notify(void *arg)
{
    struct api *a = arg;
    struct steps_readers *l = &a->readers;
    pthread_mutex_lock(&l->lock);
    for (struct steps_reader *r = l->first; r; r = r->next)
        notice(r);
    pthread_mutex_unlock(&l->lock);
}

void api_steps_close(struct api *a)
{
    atomic_store(&a->readers.is_closing, true);
    api_steps_notify(a);
}
