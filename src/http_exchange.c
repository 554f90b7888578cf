#include "http_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#include "api_error.h"
#include "random_name.h"

/* ---- making and freeing ---- */

/* RFC 9112, 3.2.2: http://HOST/PATH is to be taken for /PATH. */
static const char *skip_authority(const char *target)
{
    if (strncasecmp(target, "http://", 7) != 0)
        return target;
    const char *path = target + 7 + strcspn(target + 7, "/?");
    return *path == '/' ? path : "/";
}

struct exchange *exchange_new(struct http *h, struct conn *c, struct MHD_Connection *mhd,
                              const char *target)
{
    struct exchange *x = calloc(1, sizeof(*x));
    char *copy = strdup(skip_authority(target));
    if (!x || !copy) {
        free(x);
        free(copy);
        return NULL;
    }
    atomic_init(&x->refs, 1);
    x->http = h;
    x->conn = c;
    x->mhd = mhd;
    x->state = EXCHANGE_READING;
    x->target = copy;
    char *mark = strchr(copy, '?');
    if (mark) {
        *mark = '\0';
        x->query = mark + 1;
    }
    buf_init(&x->body);
    buf_init(&x->answer);
    buf_init(&x->stream);
    x->file_bytes = -1;
    random_name(x->id, "pf-");
    return x;
}

bool exchange_charge(struct exchange *x, int64_t n_bytes)
{
    struct http *h = x->http;
    if (n_bytes > h->c.max_buffered_bytes - h->buffered_bytes)
        return false;
    h->buffered_bytes += n_bytes;
    x->charged_bytes += n_bytes;
    return true;
}

static void uncharge(struct exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    x->http->buffered_bytes -= x->charged_bytes;
    x->charged_bytes = 0;
    pthread_mutex_unlock(&x->http->lock);
}

void exchange_ref(struct exchange *x)
{
    atomic_fetch_add_explicit(&x->refs, 1, memory_order_relaxed);
}

void exchange_unref(struct exchange *x)
{
    if (atomic_fetch_sub_explicit(&x->refs, 1, memory_order_acq_rel) > 1)
        return;
    if (x->charged_bytes)
        uncharge(x);
    if (x->call && x->free_call)
        x->free_call(x->call);
    for (int32_t i = 0; i < x->n_headers; i++)
        free(x->headers[i].value);
    buf_fini(&x->body);
    buf_fini(&x->answer);
    buf_fini(&x->stream);
    free(x->intake);
    free(x->target);
    free(x->method);
    free(x->authorization);
    free(x);
}

/* ---- what the client sent ---- */

const char *exchange_method(const struct exchange *x)
{
    return x->method ? x->method : "";
}

const char *exchange_path(const struct exchange *x)
{
    return x->target;
}

const char *exchange_query(const struct exchange *x)
{
    return x->query;
}

const char *exchange_authorization(const struct exchange *x)
{
    return x->authorization;
}

int64_t exchange_arrival_us(const struct exchange *x)
{
    return x->arrival_us;
}

const char *exchange_id(const struct exchange *x)
{
    return x->id;
}

bool exchange_id_is_valid(const char *id, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (id[i] < 0x21 || id[i] > 0x7e)
            return false;
    return len >= 1 && len <= HTTP_ID_MAX;
}

void exchange_set_id(struct exchange *x, const char *id)
{
    snprintf(x->id, sizeof(x->id), "%s", id);
}

size_t exchange_body_len(const struct exchange *x)
{
    return x->body.len;
}

void exchange_take_body(struct exchange *x, struct buf *body)
{
    buf_fini(body);
    *body = x->body;
    buf_init(&x->body);
    uncharge(x);
}

/* ---- the handler's side ---- */

bool exchange_put_call(struct exchange *x, void *call, void (*on_hangup)(void *call),
                       void (*free_call)(void *call))
{
    bool is_here = x->state != EXCHANGE_GONE;
    x->call = call;
    x->free_call = free_call;
    x->on_hangup = is_here ? on_hangup : NULL;
    return is_here;
}

bool exchange_set_call(struct exchange *x, void *call, void (*on_hangup)(void *call),
                       void (*free_call)(void *call))
{
    pthread_mutex_lock(&x->http->lock);
    bool is_here = exchange_put_call(x, call, on_hangup, free_call);
    pthread_mutex_unlock(&x->http->lock);
    return is_here;
}

void *exchange_call(const struct exchange *x)
{
    return x->call;
}

static void run_posted(struct work_job *job)
{
    struct exchange *x = (struct exchange *)((char *)job - offsetof(struct exchange, job));
    x->posted(x);
}

int exchange_run(struct exchange *x, enum work_lane lane, void (*fn)(struct exchange *x))
{
    x->posted = fn;
    x->job.run = run_posted;
    return work_post(x->http->c.work, lane, &x->job);
}

static void run_handler(struct exchange *x)
{
    x->http->c.handle(x->http->c.arg, x);
}

bool exchange_enter(struct exchange *x, enum exchange_state next, enum work_lane lane)
{
    struct http *h = x->http;
    pthread_mutex_lock(&h->lock);
    if (h->is_closing) {
        pthread_mutex_unlock(&h->lock);
        return false;
    }
    x->state = EXCHANGE_ENTERING;
    x->is_active = x->is_owed = true;
    h->n_active++;
    h->n_owed++;
    exchange_ref(x);
    if (next == EXCHANGE_PENDING)
        http_suspend(x);
    pthread_mutex_unlock(&h->lock);

    int rc = watch_add(h->watch, WATCH_HANGUP, x->conn->fd, x, &x->watch_token);

    pthread_mutex_lock(&h->lock);
    /* A hang-up in this moment is the handler's to hear of, as any other. */
    bool is_gone = x->is_hung || h->is_closing;
    x->state = is_gone ? EXCHANGE_GONE : next;
    pthread_mutex_unlock(&h->lock);
    if (is_gone && next == EXCHANGE_PENDING) {
        watch_remove(h->watch, x->watch_token);
        http_resume(x);
    }
    if (rc == 0)
        rc = exchange_run(x, lane, run_handler);
    if (rc != 0)
        exchange_refuse(x, 503, "too many requests wait to be read");
    return true;
}

void exchange_post(struct exchange *x, void (*fn)(struct exchange *x))
{
    exchange_run(x, WORK_RESULT, fn); /* this lane is never full */
}

bool exchange_is_gone(struct exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    bool is_gone = x->state == EXCHANGE_GONE;
    pthread_mutex_unlock(&x->http->lock);
    return is_gone;
}

void exchange_add_header(struct exchange *x, const char *name, const char *value)
{
    /* A stream that has begun has sent its headers. */
    pthread_mutex_lock(&x->http->lock);
    bool has_room = x->n_headers < HTTP_N_HEADERS && !x->is_streaming;
    char *copy = has_room ? strdup(value) : NULL;
    if (copy) {
        x->headers[x->n_headers].name = name;
        x->headers[x->n_headers++].value = copy;
    }
    pthread_mutex_unlock(&x->http->lock);
}

void exchange_set_close(struct exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    x->must_close = true;
    pthread_mutex_unlock(&x->http->lock);
}

void exchange_settle(struct exchange *x)
{
    struct http *h = x->http;
    pthread_mutex_lock(&h->lock);
    bool is_owed = x->is_owed;
    x->is_owed = false;
    pthread_mutex_unlock(&h->lock);
    if (!is_owed)
        return;
    exchange_unref(x);
    /* Last: http_close may free h as soon as the count is 0. */
    pthread_mutex_lock(&h->lock);
    h->n_owed--;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

/* The call is of no more use, and may be large: it need not wait for a slow reader. */
static void drop_call(struct exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    void *call = x->is_hanging_up ? NULL : x->call;
    if (call)
        x->call = NULL;
    pthread_mutex_unlock(&x->http->lock);
    if (call && x->free_call)
        x->free_call(call);
}

/* body becomes the last event of a stream. */
static void add_last_event(struct buf *stream, const struct buf *body)
{
    buf_adds(stream, "data: ");
    buf_add(stream, body->data, body->len);
    buf_adds(stream, "\n\ndata: [DONE]\n\n");
}

/* http.lock held. There is more to send, or an end. */
static void wake_stream(struct exchange *x)
{
    x->stream_us = http_now_us();
    if (!x->is_parked)
        return;
    x->is_parked = false;
    http_resume(x);
}

/* http.lock held. In the middle of a body libmicrohttpd takes no answer: by hand, and a close,
 * for which the I/O thread has to meet the next bytes, or the watcher the client's end, or a
 * deadline. */
static void answer_in_body(struct exchange *x, int status, const struct buf *body)
{
    if (!x->conn->is_expired)
        conn_send_answer(x->conn->fd, x, status, body);
    x->is_sent = x->conn->is_lingering = true;
    x->conn->deadline_us = http_now_us() + HTTP_FAREWELL_US;
    x->state = EXCHANGE_ANSWERED;
    if (x->is_parked) {
        x->is_parked = false;
        http_resume(x);
    }
}

bool exchange_reply(struct exchange *x, int status, const char *content_type, struct buf *body)
{
    struct http *h = x->http;
    if (body->failed) {
        buf_fini(body);
        status = 500;
        content_type = "application/json";
        api_error_write(body, 500, NULL, NULL, "memory is short");
    }
    drop_call(x);
    pthread_mutex_lock(&h->lock);
    enum exchange_state before = x->state;
    if (before == EXCHANGE_STREAMING) {
        if (x->file_bytes < 0)
            add_last_event(&x->stream, body);
        x->state = EXCHANGE_ANSWERED;
        wake_stream(x);
    } else if (before == EXCHANGE_INTAKE) {
        answer_in_body(x, status, body);
    } else if (before != EXCHANGE_GONE) {
        x->status = status;
        x->content_type = content_type;
        x->answer = *body;
        buf_init(body);
        x->state = EXCHANGE_ANSWERED;
    }
    pthread_mutex_unlock(&h->lock);
    buf_fini(body);
    if (before == EXCHANGE_PENDING || before == EXCHANGE_INTAKE)
        watch_remove(h->watch, x->watch_token);
    if (before == EXCHANGE_PENDING)
        http_resume(x);
    exchange_settle(x);
    return before != EXCHANGE_GONE;
}

void exchange_refuse(struct exchange *x, int status, const char *message)
{
    struct buf body;
    buf_init(&body);
    api_error_write(&body, status, NULL, NULL, message);
    pthread_mutex_lock(&x->http->lock);
    x->refused_status = status;
    pthread_mutex_unlock(&x->http->lock);
    if (status == 503)
        exchange_add_header(x, "Retry-After", "1");
    exchange_reply(x, status, "application/json", &body);
}

/* ---- streams ---- */

/* Does the handler owe an answer, or the rest of one? */
static bool is_waiting(const struct exchange *x)
{
    return x->state == EXCHANGE_PENDING || x->state == EXCHANGE_STREAMING ||
           x->state == EXCHANGE_INTAKE;
}

static const char ping[] = ": ping\n\n";

static void let_go(struct exchange *x);

void exchange_stream_open(struct exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    x->is_stream = true;
    x->stream_us = http_now_us();
    pthread_mutex_unlock(&x->http->lock);
}

/* http.lock held. */
static void add_to_stream(struct exchange *x, struct buf *more)
{
    if (x->stream.len == x->stream_at && !x->stream.failed) {
        buf_fini(&x->stream);
        x->stream = *more;
        x->stream_at = 0;
        buf_init(more);
        return;
    }
    if (x->stream_at > HTTP_MAX_STREAM_BYTES / 4) {
        x->stream.len -= x->stream_at;
        memmove(x->stream.data, x->stream.data + x->stream_at, x->stream.len);
        x->stream_at = 0;
    }
    buf_add(&x->stream, more->data, more->len);
}

/* http.lock held; x is PENDING or STREAMING. */
static void write_stream(struct exchange *x, struct buf *more)
{
    add_to_stream(x, more);
    if (x->stream.failed || x->stream.len - x->stream_at > HTTP_MAX_STREAM_BYTES) {
        let_go(x);
        watch_wake(x->http->watch);
        return;
    }
    if (x->state == EXCHANGE_STREAMING) {
        wake_stream(x);
        return;
    }
    x->stream_us = http_now_us();
    x->state = EXCHANGE_STREAMING;
    x->is_streaming = true;
    http_resume(x);
}

bool exchange_stream_write(struct exchange *x, struct buf *events)
{
    pthread_mutex_lock(&x->http->lock);
    x->stream.failed |= events->failed;
    if (is_waiting(x))
        write_stream(x, events);
    bool is_here = x->state == EXCHANGE_STREAMING;
    pthread_mutex_unlock(&x->http->lock);
    buf_fini(events);
    return is_here;
}

size_t exchange_stream_waiting(struct exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    size_t n = x->stream.len - x->stream_at;
    pthread_mutex_unlock(&x->http->lock);
    return n;
}

bool exchange_stream_end(struct exchange *x, struct buf *events)
{
    drop_call(x);
    bool is_here = exchange_stream_write(x, events);
    pthread_mutex_lock(&x->http->lock);
    if (x->state == EXCHANGE_STREAMING) {
        x->state = EXCHANGE_ANSWERED;
        wake_stream(x);
    }
    pthread_mutex_unlock(&x->http->lock);
    exchange_settle(x);
    return is_here;
}

/* http.lock held. Keeps what waits of x's events up to the end of the one that is being sent,
 * if that and `last` are less than all. */
static void cut(struct exchange *x, const struct buf *last)
{
    struct buf *s = &x->stream;
    size_t at = x->stream_at > 0 ? x->stream_at - 1 : 0; /* the blank line may be half sent */
    while (at + 2 <= s->len && memcmp(s->data + at, "\n\n", 2) != 0)
        at++;
    if (at + 2 + last->len >= s->len)
        return;
    s->len = at + 2;
    buf_add(s, last->data, last->len);
}

void http_cut(struct http *h)
{
    struct buf body, last;
    buf_init(&body);
    buf_init(&last);
    api_error_write(&body, 503, NULL, NULL, "the server is shutting down");
    add_last_event(&last, &body);
    pthread_mutex_lock(&h->lock);
    for (struct conn *c = h->conns; c && !last.failed && !body.failed; c = c->next) {
        struct exchange *x = c->current;
        if (x && x->state == EXCHANGE_ANSWERED && x->is_streaming && x->file_bytes < 0)
            cut(x, &last);
    }
    pthread_mutex_unlock(&h->lock);
    buf_fini(&body);
    buf_fini(&last);
}

void exchange_ping(struct exchange *x, int64_t now_us)
{
    int64_t ping_us = (int64_t)x->http->c.ping_s * 1000000;
    /* What waits to be read is sign enough. */
    if (x->is_stream && is_waiting(x) && ping_us > 0 && now_us - x->stream_us >= ping_us &&
        x->stream.len == x->stream_at) {
        struct buf b;
        buf_init(&b);
        buf_adds(&b, ping);
        write_stream(x, &b);
        buf_fini(&b);
    }
    if (x->file_bytes >= 0 && x->state == EXCHANGE_STREAMING && now_us >= x->file_until_us) {
        x->conn->is_expired = true;
        shutdown(x->conn->fd, SHUT_RDWR);
    }
}

void exchange_lose_stream(struct exchange *x)
{
    x->is_parked = false;
    let_go(x);
    watch_wake(x->http->watch);
}

/* ---- hang-ups ---- */

/* http.lock held. From PENDING or STREAMING to GONE, and out of the suspension. */
static void let_go(struct exchange *x)
{
    struct http *h = x->http;
    bool is_suspended = x->state == EXCHANGE_PENDING || x->is_parked;
    x->state = EXCHANGE_GONE;
    x->is_parked = false;
    x->is_hanging_up = true;
    atomic_fetch_add_explicit(&x->refs, 1, memory_order_relaxed);
    x->next_gone = h->gone;
    h->gone = x;
    if (is_suspended)
        http_resume(x);
}

void exchange_hangup(void *arg, void *owner)
{
    struct http *h = arg;
    struct exchange *x = owner;
    pthread_mutex_lock(&h->lock);
    if (x->state == EXCHANGE_ENTERING) {
        x->is_hung = true;
    } else if (is_waiting(x)) {
        let_go(x);
    }
    pthread_mutex_unlock(&h->lock);
}

void exchange_hangup_all(struct http *h)
{
    struct exchange *x;
    do {
        x = NULL;
        pthread_mutex_lock(&h->lock);
        for (struct conn *c = h->conns; c && !x; c = c->next)
            if (c->current && is_waiting(c->current))
                x = c->current;
        if (x)
            let_go(x);
        pthread_mutex_unlock(&h->lock);
    } while (x);
    exchange_tell_gone(h);
}

void exchange_tell_gone(struct http *h)
{
    for (;;) {
        pthread_mutex_lock(&h->lock);
        struct exchange *x = h->gone;
        if (x)
            h->gone = x->next_gone;
        void (*on_hangup)(void *call) = x && x->call ? x->on_hangup : NULL;
        pthread_mutex_unlock(&h->lock);
        if (!x)
            return;
        if (on_hangup)
            on_hangup(x->call);
        pthread_mutex_lock(&h->lock);
        x->is_hanging_up = false;
        pthread_mutex_unlock(&h->lock);
        exchange_unref(x);
    }
}
