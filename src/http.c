#include "http.h"

#include <errno.h>
#include <microhttpd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "http_framing.h"
#include "http_impl.h"
#include "log.h"

enum { TICK_MS = 50 };

/* ---- connections; I/O thread ---- */

static struct conn *conn_of(struct MHD_Connection *mhd)
{
    return MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static void conn_start(struct http *h, struct MHD_Connection *mhd, void **context)
{
    struct conn *c = calloc(1, sizeof(*c));
    pthread_mutex_lock(&h->lock);
    h->n_adding--;
    pthread_cond_broadcast(&h->changed);
    h->n_conns++;
    if (c) {
        c->http = h;
        c->fd = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        c->phase = CONN_HEADERS;
        c->deadline_us = http_now_us() + (int64_t)h->c.header_timeout_s * 1000000;
        c->next = h->conns;
        if (h->conns)
            h->conns->prev = c;
        h->conns = c;
    }
    if (h->c.n_connections)
        atomic_fetch_add(h->c.n_connections, 1);
    pthread_mutex_unlock(&h->lock);
    *context = c; /* NULL: its requests are refused */
}

static void conn_end(struct http *h, struct conn *c)
{
    pthread_mutex_lock(&h->lock);
    h->n_conns--;
    if (c) {
        if (c->prev)
            c->prev->next = c->next;
        else
            h->conns = c->next;
        if (c->next)
            c->next->prev = c->prev;
        if (c->is_lingering && !h->is_closing)
            conn_linger(c);
    }
    if (h->c.n_connections)
        atomic_fetch_sub(h->c.n_connections, 1);
    bool wakes = c && c->is_lingering;
    pthread_mutex_unlock(&h->lock);
    if (wakes)
        watch_wake(h->watch);
    free(c);
}

static void on_connection(void *cls, struct MHD_Connection *mhd, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        conn_start(cls, mhd, context);
    else
        conn_end(cls, *context);
}

/* Returns false when the deadline has struck: the socket is shut down already. */
static bool conn_set_phase(struct conn *c, enum conn_phase phase, int64_t deadline_us)
{
    pthread_mutex_lock(&c->http->lock);
    bool is_good = !c->is_expired;
    if (is_good) {
        c->phase = phase;
        c->deadline_us = deadline_us;
    }
    pthread_mutex_unlock(&c->http->lock);
    return is_good;
}

/* ---- requests; I/O thread ---- */

static int32_t count_of(const char *s, char c)
{
    int32_t n = 0;
    for (; s && (s = strchr(s, c)) != NULL; s++)
        n++;
    return n;
}

/* The request line is complete. What is returned becomes *context of the other callbacks. */
static void *on_target(void *cls, const char *target, struct MHD_Connection *mhd)
{
    struct http *h = cls;
    struct conn *c = conn_of(mhd);
    struct exchange *x = c ? exchange_new(h, c, mhd, target ? target : "") : NULL;
    if (!x)
        return NULL;
    pthread_mutex_lock(&h->lock);
    c->current = x;
    if (c->phase == CONN_IDLE) {
        c->phase = CONN_HEADERS;
        c->deadline_us = http_now_us() + (int64_t)h->c.header_timeout_s * 1000000;
    }
    /* libmicrohttpd keeps each argument in the connection's memory, and does not say so when
     * there are too many: it waits. */
    if (count_of(target, '&') > HTTP_MAX_ARGUMENTS)
        conn_refuse_now(c, 414, "the request target has more than 256 arguments");
    pthread_mutex_unlock(&h->lock);
    return x;
}

static void on_completed(void *cls, struct MHD_Connection *mhd, void **context,
                         enum MHD_RequestTerminationCode code)
{
    struct http *h = cls;
    struct exchange *x = *context;
    (void)mhd;
    if (!x)
        return;
    *context = NULL;
    struct conn *c = x->conn;
    /* While its descriptor is open. */
    watch_remove(h->watch, x->watch_token);
    pthread_mutex_lock(&h->lock);
    /* The length of a file is known: it is over before its owner says so. */
    if (x->state == EXCHANGE_STREAMING && x->file_bytes >= 0 &&
        code == MHD_REQUEST_TERMINATED_COMPLETED_OK)
        x->state = EXCHANGE_ANSWERED;
    if (x->state == EXCHANGE_STREAMING || x->state == EXCHANGE_INTAKE)
        exchange_lose_stream(x);
    c->current = NULL;
    c->phase = CONN_IDLE;
    c->deadline_us = http_now_us() + (int64_t)h->c.idle_timeout_s * 1000000;
    c->idle_bytes = conn_received_bytes(c->fd);
    if (x->is_active) {
        h->n_active--;
        pthread_cond_broadcast(&h->changed);
    }
    pthread_mutex_unlock(&h->lock);
    if (x->refused_status && h->c.refused)
        h->c.refused(h->c.arg, x, x->refused_status);
    exchange_unref(x);
}

/* http.lock held. Ends the connection under a stream: libmicrohttpd gets a byte that it cannot
 * send. Its own ways, MHD_CONTENT_READER_END_WITH_ERROR and the end of a body that is not
 * chunked, mark the connection as closed, but with epoll (0.9.75) forget to clean it up, unless
 * it is the one that has been quiet for longest: its descriptor stayed until the idle
 * timeout. */
static ssize_t cut_stream(struct exchange *x, char *out)
{
    x->conn->is_expired = true;
    shutdown(x->conn->fd, SHUT_RDWR);
    *out = ' ';
    return 1;
}

/* libmicrohttpd wants bytes of a stream. */
static ssize_t read_stream(void *cls, uint64_t pos, char *out, size_t max)
{
    struct exchange *x = cls;
    (void)pos;
    pthread_mutex_lock(&x->http->lock);
    size_t left = x->stream.len - x->stream_at;
    ssize_t n = (ssize_t)(left < max ? left : max);
    bool is_file = x->file_bytes >= 0, wants_more = false;
    if (x->state == EXCHANGE_GONE) {
        n = cut_stream(x, out);
    } else if (n > 0) {
        memcpy(out, x->stream.data + x->stream_at, (size_t)n);
        x->stream_at += (size_t)n;
        if (x->stream_at == x->stream.len)
            x->stream_at = x->stream.len = 0;
        wants_more = is_file && x->state == EXCHANGE_STREAMING && left >= HTTP_FILE_LOW_BYTES &&
                     left - (size_t)n < HTTP_FILE_LOW_BYTES;
    } else if (x->state == EXCHANGE_ANSWERED) {
        n = x->is_chunked && !is_file ? MHD_CONTENT_READER_END_OF_STREAM : cut_stream(x, out);
    } else {
        x->is_parked = true;
        MHD_suspend_connection(x->mhd);
    }
    pthread_mutex_unlock(&x->http->lock);
    if (wants_more)
        exchange_notice(x);
    return n;
}

static struct MHD_Response *make_response(struct exchange *x)
{
    enum { BLOCK_BYTES = 16 * 1024, FILE_BLOCK_BYTES = 256 * 1024 };
    size_t len;
    if (x->is_streaming && x->file_bytes >= 0)
        return MHD_create_response_from_callback((uint64_t)x->file_bytes, FILE_BLOCK_BYTES,
                                                 read_stream, x, NULL);
    if (x->is_streaming)
        return MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_stream, x,
                                                 NULL);
    char *data = buf_take(&x->answer, &len);
    struct MHD_Response *r = MHD_create_response_from_buffer(
        len, data ? data : "", data ? MHD_RESPMEM_MUST_FREE : MHD_RESPMEM_PERSISTENT);
    if (!r)
        free(data);
    return r;
}

static enum MHD_Result send_answer(struct exchange *x)
{
    struct MHD_Response *r = make_response(x);
    if (!r)
        return MHD_NO;
    pthread_mutex_lock(&x->http->lock);
    bool closes = x->must_close || x->http->is_quiescing;
    pthread_mutex_unlock(&x->http->lock);
    bool is_events = x->is_streaming && x->file_bytes < 0;
    const char *type = is_events ? "text/event-stream" : x->content_type;
    int ok = MHD_add_response_header(r, "Content-Type", type) == MHD_YES &&
             MHD_add_response_header(r, "X-Request-Id", x->id) == MHD_YES;
    if (is_events)
        ok &= MHD_add_response_header(r, "Cache-Control", "no-cache") == MHD_YES;
    if (closes)
        ok &= MHD_add_response_header(r, "Connection", "close") == MHD_YES;
    for (int32_t i = 0; i < x->n_headers; i++)
        ok &= MHD_add_response_header(r, x->headers[i].name, x->headers[i].value) == MHD_YES;
    unsigned status = x->is_streaming ? MHD_HTTP_OK : (unsigned)x->status;
    ok &= MHD_queue_response(x->mhd, status, r) == MHD_YES;
    MHD_destroy_response(r);
    return ok ? MHD_YES : MHD_NO;
}

struct header_scan {
    struct exchange *x;
    struct framing framing;
};

static char *copy_of(const char *s, size_t len)
{
    char *copy = malloc(len + 1);
    if (copy) {
        memcpy(copy, s, len);
        copy[len] = '\0';
    }
    return copy;
}

static enum MHD_Result scan_header(void *cls, enum MHD_ValueKind kind, const char *name,
                                   size_t name_len, const char *value, size_t value_len)
{
    struct header_scan *s = cls;
    (void)kind;
    if (!value)
        value_len = 0;
    framing_add(&s->framing, name, name_len, value ? value : "", value_len);
    bool is_id = strcasecmp(name, "X-Request-Id") == 0;
    bool is_key = strcasecmp(name, "Authorization") == 0 && !s->x->authorization;
    if (!value || (!is_id && !is_key))
        return MHD_YES;
    /* libmicrohttpd 0.9.75 leaves the blanks behind a value (RFC 9112, 5.1). */
    while (value_len > 0 && (value[value_len - 1] == ' ' || value[value_len - 1] == '\t'))
        value_len--;
    char *copy = copy_of(value, value_len);
    if (is_key) {
        s->x->authorization = copy;
        return MHD_YES;
    }
    if (copy && exchange_id_is_valid(copy, value_len))
        exchange_set_id(s->x, copy);
    free(copy);
    return MHD_YES;
}

/* Looks at the headers; returns false after a refusal that must be sent before the body. */
static bool check_headers(struct exchange *x, const char *version, struct framing *f)
{
    struct http *h = x->http;
    struct header_scan scan = {.x = x};
    MHD_get_connection_values_n(x->mhd, MHD_HEADER_KIND, scan_header, &scan);
    const char *message;
    int status = framing_check(&scan.framing, strcmp(version, "HTTP/1.0") != 0, &message);
    size_t header_bytes =
        MHD_get_connection_info(x->mhd, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE)->header_size;
    size_t target_len = strlen(x->target) + (x->query ? strlen(x->query) + 1 : 0);
    *f = scan.framing;
    x->length_bytes = f->length_bytes;
    if (status == 0 && target_len > HTTP_MAX_TARGET) {
        status = 414;
        message = "the request target is longer than 8192 bytes";
    } else if (status == 0 && header_bytes > HTTP_MAX_HEADERS) {
        status = 431;
        message = "the headers are longer than 16384 bytes";
    }
    int64_t most = x->max_intake_bytes ? x->max_intake_bytes : h->c.max_body_bytes;
    if (status == 0 && f->length_bytes > most) {
        char text[128];
        snprintf(text, sizeof(text),
                 "the body has more bytes than %s: at most %lld are accepted",
                 x->max_intake_bytes ? "any session here" : "max-body-bytes", (long long)most);
        exchange_refuse(x, 413, text);
        return false;
    }
    if (status != 0) {
        exchange_set_close(x);
        exchange_refuse(x, status, message);
    }
    return status == 0;
}

/* First callback: the headers are complete, nothing of the body was read. */
static enum MHD_Result begin(struct exchange *x, const char *method, const char *version)
{
    struct http *h = x->http;
    struct framing f;
    x->is_begun = true;
    x->arrival_us = http_now_us();
    x->method = strdup(method);
    x->max_intake_bytes = h->c.intake ? h->c.intake(h->c.arg, x) : 0;
    int64_t timeout_s = x->max_intake_bytes ? h->c.file_timeout_s : h->c.body_timeout_s;
    if (!conn_set_phase(x->conn, CONN_BODY, x->arrival_us + timeout_s * 1000000))
        return MHD_NO;
    x->is_chunked = strcmp(version, "HTTP/1.0") != 0;
    bool is_fine = check_headers(x, version, &f);
    if (is_fine && h->c.admit)
        h->c.admit(h->c.arg, x);
    if (x->state != EXCHANGE_ANSWERED)
        return !x->max_intake_bytes || exchange_intake_start(x) ? MHD_YES : MHD_NO;
    /* A small body is read and dropped, so that the connection can stay; a large one is not
     * waited for, but the client may be sending it. */
    x->is_deferred = is_fine && !f.is_expecting && x->length_bytes >= 0 &&
                     x->length_bytes <= HTTP_SWALLOW_BYTES;
    if (x->is_deferred)
        return MHD_YES;
    x->conn->is_lingering = true;
    return send_answer(x);
}

/* An answer in the middle of a body, where libmicrohttpd takes none: by hand, and a close. */
static enum MHD_Result refuse_in_body(struct exchange *x, int status, const char *message)
{
    pthread_mutex_lock(&x->http->lock);
    if (!x->conn->is_expired)
        conn_send_refusal(x->conn->fd, status, x->id, message);
    x->refused_status = status;
    pthread_mutex_unlock(&x->http->lock);
    x->conn->is_lingering = true;
    return MHD_NO;
}

static enum MHD_Result add_body(struct exchange *x, const char *data, size_t *size)
{
    struct http *h = x->http;
    size_t len = *size;
    if (x->is_intake)
        return exchange_intake_add(x, data, size) ? MHD_YES : MHD_NO;
    *size = 0;
    if (x->is_deferred)
        return MHD_YES;
    if ((int64_t)len > h->c.max_body_bytes - (int64_t)x->body.len)
        return refuse_in_body(x, 413, "the body has more bytes than max-body-bytes");
    pthread_mutex_lock(&h->lock);
    bool is_charged = exchange_charge(x, (int64_t)len);
    pthread_mutex_unlock(&h->lock);
    /* Known lengths get their memory once, when the first bytes are there. */
    if (is_charged && x->body.len == 0 && x->length_bytes > 0)
        buf_reserve(&x->body, (size_t)x->length_bytes);
    buf_add(&x->body, data, len);
    if (!is_charged || x->body.failed)
        return refuse_in_body(x, 503, "too many bodies are being read");
    return MHD_YES;
}

/* The request is complete: suspend the connection, watch its socket, hand x to a worker. */
static enum MHD_Result dispatch(struct exchange *x)
{
    struct http *h = x->http;
    x->arrival_us = http_now_us();
    if (!conn_set_phase(x->conn, CONN_ANSWER, 0))
        return MHD_NO;
    enum work_lane lane = h->c.lane ? h->c.lane(h->c.arg, x) : WORK_REQUEST;
    return exchange_enter(x, EXCHANGE_PENDING, lane) ? MHD_YES : MHD_NO;
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *mhd, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *size, void **context)
{
    struct exchange *x = *context;
    (void)cls;
    (void)mhd;
    (void)url;
    if (!x)
        return MHD_NO;
    if (!x->is_begun)
        return begin(x, method, version);
    if (*size > 0)
        return add_body(x, data, size);
    pthread_mutex_lock(&x->http->lock);
    enum exchange_state state = x->is_sent ? EXCHANGE_GONE : x->state;
    pthread_mutex_unlock(&x->http->lock);
    if (state == EXCHANGE_READING)
        return dispatch(x);
    if (state == EXCHANGE_INTAKE)
        return conn_set_phase(x->conn, CONN_ANSWER, 0) && exchange_intake_end(x) ? MHD_YES
                                                                                 : MHD_NO;
    if (state == EXCHANGE_GONE)
        return MHD_NO;
    if (x->is_deferred && !conn_set_phase(x->conn, CONN_ANSWER, 0))
        return MHD_NO;
    return send_answer(x);
}

void http_resume(struct exchange *x)
{
    MHD_resume_connection(x->mhd);
}

void http_suspend(struct exchange *x)
{
    MHD_suspend_connection(x->mhd);
}

/* ---- open and close ---- */

static void log_library(void *cls, const char *format, va_list args)
{
    char text[256];
    (void)cls;
    int n = vsnprintf(text, sizeof(text), format, args);
    if (n > 0)
        text[strcspn(text, "\n")] = '\0';
    log_debug("event=libmicrohttpd text=\"%s\"", text);
}

void http_add_socket(struct http *h, int fd, const void *addr, unsigned addr_len)
{
    /* Closes fd when it fails. */
    if (MHD_add_connection(h->mhd, fd, addr, addr_len) == MHD_YES)
        return;
    pthread_mutex_lock(&h->lock);
    h->n_adding--;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

static int start_library(struct http *h)
{
    /* The limit is kept at accept; here is room for connections that are just being closed. */
    unsigned limit = (unsigned)h->c.max_connections + 1024;
    /* Its timeout starts anew with every byte: only a client that does not read is left to
     * it. */
    int32_t timeout_s = h->c.idle_timeout_s;
    timeout_s = timeout_s > h->c.header_timeout_s ? timeout_s : h->c.header_timeout_s;
    timeout_s = timeout_s > h->c.body_timeout_s ? timeout_s : h->c.body_timeout_s;
    h->mhd = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG |
            MHD_USE_NO_LISTEN_SOCKET,
        0, NULL, NULL, on_request, h, MHD_OPTION_EXTERNAL_LOGGER, log_library, NULL,
        MHD_OPTION_CONNECTION_LIMIT, limit, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)HTTP_POOL_BYTES, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)timeout_s + 1,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, h, MHD_OPTION_NOTIFY_CONNECTION,
        on_connection, h, MHD_OPTION_URI_LOG_CALLBACK, on_target, h, MHD_OPTION_END);
    return h->mhd ? 0 : ERR_IO;
}

static void init_lock(struct http *h)
{
    pthread_condattr_t attr;
    pthread_mutex_init(&h->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->changed, &attr);
    pthread_condattr_destroy(&attr);
}

static void free_http(struct http *h)
{
    for (int32_t i = 0; i < h->n_listeners; i++)
        listener_close(&h->listeners[i]);
    free(h->listeners);
    free(h->listener_tokens);
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

int http_open(const struct http_config *c, struct http **out, struct errmsg *e)
{
    const struct watch_ops ops = {exchange_hangup, conn_readable, conn_turn};
    struct http *h = calloc(1, sizeof(*h));
    if (!h)
        return errmsg_set(e, ERR_NOMEM, "no memory for the HTTP server");
    h->c = *c;
    h->c.listen = NULL;
    h->c.inherited = NULL;
    if (h->c.max_buffered_bytes == 0)
        h->c.max_buffered_bytes = 4 * c->max_body_bytes;
    init_lock(h);
    for (int i = 0; i < HTTP_MAX_FAREWELLS; i++)
        h->farewells[i].fd = -1;
    int rc = conn_raise_limit(&h->c.max_connections, e);
    if (rc == 0)
        rc = http_open_listeners(h, c, e);
    if (rc != 0)
        goto fail;
    rc = watch_open(h->c.max_connections + c->n_inherited + c->n_listen + HTTP_MAX_FAREWELLS,
                    TICK_MS, &ops, h, &h->watch);
    if (rc == 0)
        rc = start_library(h);
    for (int32_t i = c->n_inherited; i < h->n_listeners && rc == 0; i++)
        rc = watch_add(h->watch, WATCH_READABLE, h->listeners[i].fd, &h->listeners[i],
                       &h->listener_tokens[i]);
    if (rc == 0)
        rc = watch_start(h->watch);
    if (rc != 0) {
        errmsg_set(e, rc, "the HTTP server cannot start: %s", strerror(errno));
        goto fail;
    }
    *out = h;
    return 0;
fail:
    if (h->mhd)
        MHD_stop_daemon(h->mhd);
    watch_close(h->watch);
    free_http(h);
    return rc;
}

const char *http_addresses(const struct http *h)
{
    return h->addresses;
}

void http_quiesce(struct http *h)
{
    pthread_mutex_lock(&h->lock);
    h->is_quiescing = true;
    watch_wake(h->watch);
    while (!h->are_listeners_closed)
        pthread_cond_wait(&h->changed, &h->lock);
    pthread_mutex_unlock(&h->lock);
}

/* Waits until *count is 0; false when the deadline came first. */
static bool wait_for_none(struct http *h, const int32_t *count, int64_t deadline_us)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_us / 1000000),
                             .tv_nsec = (long)(deadline_us % 1000000 * 1000)};
    int rc = 0;
    pthread_mutex_lock(&h->lock);
    while (*count > 0 && rc == 0)
        rc = pthread_cond_timedwait(&h->changed, &h->lock, &until);
    bool is_none = *count == 0;
    pthread_mutex_unlock(&h->lock);
    return is_none;
}

bool http_flush(struct http *h, int64_t deadline_us)
{
    return wait_for_none(h, &h->n_active, deadline_us);
}

void http_close(struct http *h)
{
    if (!h)
        return;
    http_quiesce(h);
    /* What the watcher has given to libmicrohttpd is to be begun by its thread before this
     * one ends it: only our lock orders the two. One dropped unseen is not waited for long. */
    wait_for_none(h, &h->n_adding, http_now_us() + 1000000);
    pthread_mutex_lock(&h->lock);
    h->is_closing = true;
    pthread_mutex_unlock(&h->lock);
    exchange_hangup_all(h);
    /* libmicrohttpd aborts the process when it is stopped with a suspended connection. */
    pthread_mutex_lock(&h->lock);
    while (h->n_owed > 0)
        pthread_cond_wait(&h->changed, &h->lock);
    pthread_mutex_unlock(&h->lock);
    MHD_stop_daemon(h->mhd);
    watch_close(h->watch);
    conn_close_farewells(h);
    free_http(h);
}
