#include "steps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int steps_init(struct steps *s)
{
    memset(s, 0, sizeof(*s));
    buf_init(&s->text);
    if (pthread_mutex_init(&s->lock, NULL) != 0)
        return ERR_NOMEM;
    if (pthread_mutex_init(&s->text_lock, NULL) == 0)
        return 0;
    pthread_mutex_destroy(&s->lock);
    return ERR_NOMEM;
}

void steps_fini(struct steps *s)
{
    buf_fini(&s->text);
    pthread_mutex_destroy(&s->text_lock);
    pthread_mutex_destroy(&s->lock);
}

void steps_set_listener(struct steps *s, void (*fn)(void *arg), void *arg)
{
    s->listener = fn;
    s->listener_arg = arg;
}

void steps_take(struct steps_record *r, const struct step *step)
{
    for (int32_t i = 0; i < step->n_pieces && i < STEPS_PIECES; i++) {
        const struct step_piece *p = &step->pieces[i];
        struct steps_piece *to = &r->pieces[i];
        snprintf(to->id, sizeof(to->id), "%.*s", STEPS_ID - 1, p->req->id);
        to->start = p->start;
        to->n_tokens = p->n_tokens;
        to->is_last = p->is_last;
        bool ends_prompt = p->is_last && p->start < p->req->n_prompt;
        to->latency_us = ends_prompt ? request_now_us() - p->req->arrival_us : -1;
    }
}

void steps_add(struct steps *s, const struct steps_record *r)
{
    pthread_mutex_lock(&s->lock);
    struct steps_record *to = &s->records[s->n_added++ % STEPS_KEPT];
    *to = *r;
    s->ended_us = trace_place(&to->trace, s->ended_us);
    pthread_mutex_unlock(&s->lock);
    steps_tell(s, request_now_us());
}

bool steps_tell(struct steps *s, int64_t now_us)
{
    if (atomic_load(&s->n_told) == s->n_added)
        return true;
    if (now_us - s->told_us < STEPS_TELL_US)
        return false;
    s->told_us = now_us;
    atomic_store(&s->n_told, s->n_added);
    if (s->listener)
        s->listener(s->listener_arg);
    return true;
}

void steps_forget(struct steps *s)
{
    s->n_added = s->told_us = s->text_from = s->text_end = 0;
    atomic_store(&s->n_told, 0);
}

int64_t steps_end(struct steps *s)
{
    pthread_mutex_lock(&s->lock);
    int64_t n = s->n_added;
    pthread_mutex_unlock(&s->lock);
    return n;
}

static void render(const struct steps_record *r, struct buf *out)
{
    const struct metrics_pools *p = &r->pools;
    const struct trace_step *t = &r->trace;
    double us = t->device_us >= 0 ? (double)t->device_us : (double)(t->done_us - t->launch_us);
    buf_printf(out,
               "data: {\"step\": %lld, \"t_ms\": %.3f, \"ms\": %.3f, \"tokens\": %d, "
               "\"n_pieces\": %d, ",
               (long long)t->number, (double)t->done_us / 1e3, us / 1e3, t->n_tokens,
               t->n_pieces);
    if (t->gap_us >= 0)
        buf_printf(out, "\"gap_us\": %.1f, ", (double)t->gap_us);
    buf_adds(out, "\"pieces\": [");
    for (int32_t i = 0; i < t->n_pieces && i < STEPS_PIECES; i++) {
        const struct steps_piece *q = &r->pieces[i];
        buf_adds(out, i ? ", {\"id\": " : "{\"id\": ");
        buf_json_string(out, q->id, strlen(q->id));
        buf_printf(out, ", \"start\": %d, \"tokens\": %d, \"last\": %s", q->start, q->n_tokens,
                   q->is_last ? "true" : "false");
        if (q->latency_us >= 0)
            buf_printf(out, ", \"latency_ms\": %.3f", (double)q->latency_us / 1e3);
        buf_addc(out, '}');
    }
    buf_printf(out,
               "], \"running\": %d, \"waiting\": %d, \"queue_age_ms\": %.3f, \"slots\": [%d, "
               "%d, %d], \"pages\": [%d, %d, "
               "%d]}\n\n",
               p->requests_running, p->requests_waiting, (double)r->queue_age_us / 1e3,
               p->slots_free, p->slots_held, p->slots_cached, p->pages_free, p->pages_held,
               p->pages_cached);
}

/* The record at place i, unless it was written over. One at a time: the engine waits for the
 * copy of one at most. */
static bool copy_record(struct steps *s, int64_t i, struct steps_record *r)
{
    pthread_mutex_lock(&s->lock);
    bool is_there = i >= s->n_added - STEPS_KEPT;
    if (is_there)
        *r = s->records[i % STEPS_KEPT];
    pthread_mutex_unlock(&s->lock);
    return is_there;
}

static void each_from(struct steps *s, int64_t from, int64_t end, struct buf *out,
                      void (*fn)(const struct steps_record *r, struct buf *out))
{
    struct steps_record *r = malloc(sizeof(*r));
    out->failed |= !r;
    for (from = from > 0 ? from : 0; r && from < end; from++)
        if (copy_record(s, from, r))
            fn(r, out);
    free(r);
}

int64_t steps_render(struct steps *s, int64_t from, struct buf *out)
{
    int64_t end = atomic_load(&s->n_told);
    pthread_mutex_lock(&s->text_lock);
    if (s->text_from != from || s->text_end != end || s->text.failed) {
        buf_fini(&s->text);
        each_from(s, from > end - STEPS_KEPT ? from : end - STEPS_KEPT, end, &s->text, render);
        s->text_from = from;
        s->text_end = end;
    }
    buf_add(out, s->text.data, s->text.len);
    out->failed |= s->text.failed;
    pthread_mutex_unlock(&s->text_lock);
    return end;
}

static void render_trace(const struct steps_record *r, struct buf *out)
{
    trace_render_step(&r->trace, out);
}

void steps_render_trace(struct steps *s, int64_t n, struct buf *out)
{
    int64_t end = steps_end(s);
    trace_render_begin(out);
    each_from(s, end - (n < STEPS_KEPT ? n : STEPS_KEPT), end, out, render_trace);
    trace_render_end(out);
}
