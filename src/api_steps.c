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
    int64_t place; /* the worker's */
    atomic_bool is_gone;
};

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

/* Writes what there is; false: it was the last. */
static bool look(struct exchange *x)
{
    struct steps_reader *r = exchange_call(x);
    struct steps_readers *l = &r->api->readers;
    struct buf events;
    buf_init(&events);
    if (exchange_stream_waiting(x) < MAX_WAITING)
        r->place = steps_render(r->api->steps, r->place, &events);
    bool is_over = atomic_load(&r->is_gone) || atomic_load(&l->is_closing);
    if (!is_over && events.len > 0)
        is_over = !exchange_stream_write(x, &events);
    if (!is_over) {
        buf_fini(&events);
        return true;
    }
    leave(l, r); /* first: who is in the list may get notices */
    exchange_stream_end(x, &events);
    return false;
}

static void on_hangup(void *call)
{
    struct steps_reader *r = call;
    atomic_store(&r->is_gone, true);
    exchange_notice(r->x);
}

void api_steps(struct api *a, struct exchange *x)
{
    struct buf hello;
    buf_init(&hello);
    /* libmicrohttpd ends a stream with a last chunk, for HEAD, too, which has no body. */
    if (strcmp(exchange_method(x), "HEAD") == 0) {
        exchange_reply(x, 200, "text/event-stream", &hello);
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
    exchange_stream_open(x);
    buf_adds(&hello, ": the latest steps, then each as it ends\n\n");
    exchange_stream_write(x, &hello);
    /* Its first look, which may be the last, and those after notices find it in the list. */
    struct steps_readers *l = &a->readers;
    pthread_mutex_lock(&l->lock);
    r->next = l->first;
    if (l->first)
        l->first->prev = r;
    l->first = r;
    exchange_start_looks(x, look, r, on_hangup, free);
    pthread_mutex_unlock(&l->lock);
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
        exchange_notice(r->x);
    pthread_mutex_unlock(&l->lock);
}

void api_steps_close(struct api *a)
{
    atomic_store(&a->readers.is_closing, true);
    api_steps_notify(a);
}
