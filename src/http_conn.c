/* The watcher's part of HTTP: accepting, the limit of connections, deadlines, and sockets that
 * are read empty before their close. */
#include "config.h"

#include "http_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "api_error.h"
#include "log.h"

enum {
    ACCEPT_BATCH = 64,             /* then other sockets get their turn */
    ACCEPT_PAUSE_US = 100000,      /* when descriptors or memory are short */
    SCAN_US = 50000,               /* of deadlines */
    INSPECTION_US = 500000,        /* of waiting connections, two system calls each */
    FAREWELL_BATCH_BYTES = 262144, /* then other sockets get their turn */
    OWN_FDS = 64                   /* epoll sets, logs, model files */
};

int64_t http_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

uint64_t conn_received_bytes(int fd)
{
    struct tcp_info info;
    socklen_t len = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0 ||
        len < offsetof(struct tcp_info, tcpi_bytes_received) + sizeof(info.tcpi_bytes_received))
        return 0;
    return info.tcpi_bytes_received;
}

static const char *reason_of(int status)
{
    switch (status) {
    case 400:
        return "Bad Request";
    case 408:
        return "Request Timeout";
    case 413:
        return "Content Too Large";
    case 414:
        return "URI Too Long";
    case 500:
        return "Internal Server Error";
    default:
        return "Service Unavailable";
    }
}

/* headers: whole lines. */
static void send_by_hand(int fd, int status, const char *id, const char *headers,
                         const struct buf *body)
{
    struct buf out;
    buf_init(&out);
    buf_printf(&out,
               "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: application/json\r\n"
               "Content-Length: %zu\r\n%s",
               status, reason_of(status), body->len, headers);
    if (id)
        buf_printf(&out, "X-Request-Id: %s\r\n", id);
    buf_adds(&out, "\r\n");
    buf_add(&out, body->data, body->len);
    /* Nothing is before it in the socket's buffer, so it fits, or the client is not worth
     * it. */
    if (!body->failed && !out.failed) {
        ssize_t sent = send(fd, out.data, out.len, MSG_NOSIGNAL | MSG_DONTWAIT);
        (void)sent;
    }
    buf_fini(&out);
}

void conn_send_refusal(int fd, int status, const char *id, const char *message)
{
    struct buf body;
    buf_init(&body);
    api_error_write(&body, status, NULL, NULL, message);
    send_by_hand(fd, status, id, status == 503 ? "Retry-After: 1\r\n" : "", &body);
    buf_fini(&body);
}

void conn_send_answer(int fd, const struct exchange *x, int status, const struct buf *body)
{
    struct buf headers;
    buf_init(&headers);
    for (int32_t i = 0; i < x->n_headers; i++)
        buf_printf(&headers, "%s: %s\r\n", x->headers[i].name, x->headers[i].value);
    const char *lines = buf_cstr(&headers);
    send_by_hand(fd, status, x->id, lines ? lines : "", body);
    buf_fini(&headers);
}

/* ---- farewells ---- */

/* http.lock held. Takes fd, which is closed at once when there is no room. */
static void farewell_start(struct http *h, int fd)
{
    shutdown(fd, SHUT_WR);
    for (int i = 0; i < HTTP_MAX_FAREWELLS; i++) {
        struct farewell *l = &h->farewells[i];
        if (l->fd >= 0)
            continue;
        l->fd = fd;
        l->token = 0; /* the watcher's next turn adds it */
        l->deadline_us = http_now_us() + HTTP_FAREWELL_US;
        return;
    }
    close(fd);
}

void conn_linger(struct conn *c)
{
    int copy = fcntl(c->fd, F_DUPFD_CLOEXEC, 0);
    if (copy >= 0)
        farewell_start(c->http, copy);
}

/* Watcher thread. */
static void farewell_end(struct http *h, struct farewell *l)
{
    watch_remove(h->watch, l->token);
    pthread_mutex_lock(&h->lock);
    close(l->fd);
    l->fd = -1;
    pthread_mutex_unlock(&h->lock);
}

static void farewell_read(struct http *h, struct farewell *l)
{
    char scratch[16384];
    for (size_t total = 0; total < FAREWELL_BATCH_BYTES;) {
        ssize_t n = recv(l->fd, scratch, sizeof(scratch), MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            farewell_end(h, l);
            return;
        }
        total += (size_t)n;
    }
}

static void farewell_turn(struct http *h, int64_t now_us)
{
    for (int i = 0; i < HTTP_MAX_FAREWELLS; i++) {
        struct farewell *l = &h->farewells[i];
        pthread_mutex_lock(&h->lock);
        bool is_new = l->fd >= 0 && l->token == 0;
        bool is_late = l->fd >= 0 && l->deadline_us <= now_us;
        pthread_mutex_unlock(&h->lock);
        if (is_new && watch_add(h->watch, WATCH_READABLE, l->fd, l, &l->token) != 0)
            is_late = true;
        if (is_late)
            farewell_end(h, l);
    }
}

void conn_close_farewells(struct http *h)
{
    for (int i = 0; i < HTTP_MAX_FAREWELLS; i++)
        if (h->farewells[i].fd >= 0)
            close(h->farewells[i].fd);
}

/* ---- accepting ---- */

/* The usual soft limit of 1024 descriptors is below the usual number of connections. Where the
 * hard limit is, too, there are fewer connections, since one that cannot be accepted waits
 * untold. */
int conn_raise_limit(int32_t *max_connections, struct errmsg *e)
{
    struct rlimit limit;
    const rlim_t others = HTTP_MAX_FAREWELLS + OWN_FDS;
    rlim_t need = (rlim_t)*max_connections + others;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= need)
        return 0;
    limit.rlim_cur = limit.rlim_max < need ? limit.rlim_max : need;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur <= others)
        return errmsg_set(
            e, ERR_INVALID,
            "the limit of open files is %llu (ulimit -n, LimitNOFILE): at least %llu "
            "are needed, and max-connections %d takes %llu",
            (unsigned long long)limit.rlim_cur, (unsigned long long)others + 1,
            *max_connections, (unsigned long long)need);
    if (limit.rlim_cur < need) {
        log_warn("event=fewer_connections max_connections=%d open_files=%llu needed=%llu",
                 (int)(limit.rlim_cur - others), (unsigned long long)limit.rlim_cur,
                 (unsigned long long)need);
        *max_connections = (int32_t)(limit.rlim_cur - others);
    }
    return 0;
}

static void refuse_socket(struct http *h, int fd)
{
    conn_send_refusal(fd, 503, NULL, "too many connections");
    pthread_mutex_lock(&h->lock);
    farewell_start(h, fd);
    pthread_mutex_unlock(&h->lock);
}

static void add_listeners(struct http *h)
{
    for (int32_t i = 0; i < h->n_listeners; i++)
        if (h->listeners[i].fd >= 0 && (h->accepts_inherited || !h->listeners[i].is_adopted))
            watch_add(h->watch, WATCH_READABLE, h->listeners[i].fd, &h->listeners[i],
                      &h->listener_tokens[i]);
}

static void remove_listeners(struct http *h)
{
    for (int32_t i = 0; i < h->n_listeners; i++) {
        watch_remove(h->watch, h->listener_tokens[i]);
        h->listener_tokens[i] = 0;
    }
}

/* Takes at most n connections. */
static void accept_some(struct http *h, struct listener *l, int n)
{
    for (int i = 0; i < n; i++) {
        struct sockaddr_storage addr;
        socklen_t len = sizeof(addr);
        int fd = accept4(l->fd, (struct sockaddr *)&addr, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                /* The listener stays readable: without a pause this would spin. */
                log_warn("event=accept_paused error=\"%s\"", strerror(errno));
                remove_listeners(h);
                h->accept_again_us = http_now_us() + ACCEPT_PAUSE_US;
            }
            return;
        }
        pthread_mutex_lock(&h->lock);
        bool is_full = h->n_conns + h->n_adding >= h->c.max_connections;
        if (!is_full)
            h->n_adding++;
        pthread_mutex_unlock(&h->lock);
        if (is_full)
            refuse_socket(h, fd);
        else
            http_add_socket(h, fd, &addr, len);
    }
}

void conn_readable(void *arg, void *owner)
{
    struct http *h = arg;
    if ((char *)owner >= (char *)h->farewells &&
        (char *)owner < (char *)(h->farewells + HTTP_MAX_FAREWELLS))
        farewell_read(h, owner);
    else
        accept_some(h, owner, ACCEPT_BATCH);
}

static void close_listeners(struct http *h)
{
    remove_listeners(h);
    for (int32_t i = 0; i < h->n_listeners; i++) {
        /* Whoever has connected is told that we are going, not reset; but at an inherited
         * socket, where a successor may take it. */
        if (!h->listeners[i].is_adopted)
            accept_some(h, &h->listeners[i], 4096);
        listener_close(&h->listeners[i]);
    }
    pthread_mutex_lock(&h->lock);
    h->are_listeners_closed = true;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

/* What was asked from outside about inherited sockets. */
static void turn_inherited(struct http *h)
{
    pthread_mutex_lock(&h->lock);
    bool accepts = h->wants_inherited && !h->accepts_inherited;
    bool releases = h->releases_inherited;
    pthread_mutex_unlock(&h->lock);
    if (!accepts && !releases)
        return;
    remove_listeners(h);
    h->accept_again_us = 0;
    h->accepts_inherited = true;
    for (int32_t i = 0; i < h->n_listeners && releases; i++)
        if (h->listeners[i].is_adopted)
            listener_close(&h->listeners[i]);
    add_listeners(h);
    pthread_mutex_lock(&h->lock);
    if (releases)
        h->releases_inherited = false;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

/* ---- deadlines ---- */

void conn_refuse_now(struct conn *c, int status, const char *message)
{
    conn_send_refusal(c->fd, status, c->current ? c->current->id : NULL, message);
    /* One that was refused already is not told of twice. */
    if (c->current && c->current->state == EXCHANGE_READING)
        c->current->refused_status = status;
    c->is_expired = true;
    shutdown(c->fd, SHUT_RDWR);
}

/* http.lock held. Answers 408 if anything was asked. */
static void expire(struct conn *c)
{
    bool is_answered = c->current && c->current->is_sent;
    bool is_silent =
        is_answered || c->phase == CONN_IDLE ||
        (c->phase == CONN_HEADERS && !c->current && conn_received_bytes(c->fd) == 0);
    const char *what = c->phase != CONN_BODY
                           ? "the headers did not arrive within header-timeout-s"
                       : c->current && c->current->max_intake_bytes
                           ? "the body did not arrive within transfer-timeout-s"
                           : "the body did not arrive within body-timeout-s";
    if (!is_silent) {
        conn_refuse_now(c, 408, what);
        return;
    }
    c->is_expired = true;
    shutdown(c->fd, SHUT_RDWR);
}

/* http.lock held. What libmicrohttpd 0.9.75 does not see of a connection that waits for
 * bytes. */
static void inspect(struct conn *c, int64_t now_us)
{
    struct pollfd p = {.fd = c->fd, .events = POLLRDHUP};
    /* A client that closed right behind its last bytes: the edge that told of them was used up
     * by a short read, and there is no other. */
    if (poll(&p, 1, 0) == 1) {
        c->is_expired = true;
        shutdown(c->fd, SHUT_RDWR);
    } else if (c->phase == CONN_IDLE && conn_received_bytes(c->fd) > c->idle_bytes) {
        /* A request is told of when its first line is complete; one that drips shows here. */
        c->phase = CONN_HEADERS;
        c->deadline_us = now_us + (int64_t)c->http->c.header_timeout_s * 1000000;
    }
}

static void scan_deadlines(struct http *h, int64_t now_us)
{
    bool inspects = now_us >= h->next_inspection_us;
    h->next_scan_us = now_us + SCAN_US;
    if (inspects)
        h->next_inspection_us = now_us + INSPECTION_US;
    pthread_mutex_lock(&h->lock);
    for (struct conn *c = h->conns; c; c = c->next) {
        if (c->phase == CONN_ANSWER && c->current)
            exchange_ping(c->current, now_us);
        if (c->phase == CONN_ANSWER || c->is_expired)
            continue;
        if (now_us >= c->deadline_us)
            expire(c);
        else if (inspects)
            inspect(c, now_us);
    }
    pthread_mutex_unlock(&h->lock);
}

void conn_turn(void *arg)
{
    struct http *h = arg;
    int64_t now_us = http_now_us();
    exchange_tell_gone(h);
    farewell_turn(h, now_us);
    pthread_mutex_lock(&h->lock);
    bool closes = h->is_quiescing && !h->are_listeners_closed;
    pthread_mutex_unlock(&h->lock);
    if (closes)
        close_listeners(h);
    else if (!h->are_listeners_closed)
        turn_inherited(h);
    if (h->accept_again_us && now_us >= h->accept_again_us) {
        h->accept_again_us = 0;
        if (!h->are_listeners_closed)
            add_listeners(h);
    }
    if (now_us >= h->next_scan_us)
        scan_deadlines(h, now_us);
}
