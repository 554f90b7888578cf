#include "http_stub.h"

#include <stdlib.h>

struct call {
    struct server *s;
};

static void on_hangup(void *arg)
{
    struct call *c = arg;
    atomic_fetch_add(&c->s->n_hangups, 1);
}

static void free_call(void *arg)
{
    struct call *c = arg;
    atomic_fetch_add(&c->s->n_freed, 1);
    free(c);
}

static void reply_text(struct exchange *x, int status, const char *text)
{
    struct buf b;
    buf_init(&b);
    buf_adds(&b, text);
    exchange_reply(x, status, "text/plain", &b);
}

static void finish(struct exchange *x)
{
    struct call *c = exchange_call(x);
    struct server *s = c->s;
    struct buf b;
    buf_init(&b);
    buf_adds(&b, "done");
    if (!exchange_reply(x, 200, "text/plain", &b))
        atomic_fetch_add(&s->n_replied_gone, 1);
}

static void park(struct server *s, struct exchange *x)
{
    struct call *c = malloc(sizeof(*c));
    c->s = s;
    exchange_set_call(x, c, on_hangup, free_call);
    pthread_mutex_lock(&s->lock);
    s->parked[s->n_parked++] = x;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void handle(void *arg, struct exchange *x)
{
    struct server *s = arg;
    const char *path = exchange_path(x);
    struct buf body, out;
    buf_init(&body);
    buf_init(&out);
    exchange_take_body(x, &body);
    atomic_fetch_add(&s->n_handled, 1);
    if (strcmp(path, "/echo") == 0) {
        buf_printf(&out, "%s %zu %.*s", exchange_method(x), body.len, (int)body.len,
                   body.data ? body.data : "");
        exchange_reply(x, 200, "text/plain", &out);
    } else if (strcmp(path, "/wait") == 0) {
        park(s, x);
    } else if (strcmp(path, "/later") == 0) {
        struct call *c = malloc(sizeof(*c));
        c->s = s;
        exchange_set_call(x, c, on_hangup, free_call);
        client_sleep_ms(1);
        exchange_post(x, finish);
    } else if (strcmp(path, "/big") == 0) {
        buf_reserve(&out, BIG_WORDS * sizeof(uint32_t));
        for (uint32_t i = 0; i < BIG_WORDS; i++)
            ((uint32_t *)(void *)out.data)[i] = i;
        out.len = BIG_WORDS * sizeof(uint32_t);
        exchange_reply(x, 200, "text/plain", &out);
    } else if (strcmp(path, "/events") == 0) {
        exchange_stream_open(x);
        for (int i = 0; i < N_EVENTS; i++)
            buf_printf(&out, "data: %0*d\n\n", EVENT_DIGITS, i);
        exchange_stream_end(x, &out);
    } else if (strcmp(path, "/hold") == 0) {
        while (atomic_load(&s->holds_workers))
            client_sleep_ms(1);
        reply_text(x, 200, "held");
    } else {
        reply_text(x, 200, path);
    }
    buf_fini(&body);
}

static void admit(void *arg, struct exchange *x)
{
    (void)arg;
    if (strcmp(exchange_path(x), "/no") == 0)
        reply_text(x, 403, "no");
}

static enum work_lane lane(void *arg, const struct exchange *x)
{
    (void)arg;
    return strcmp(exchange_path(x), "/quick") == 0 ? WORK_QUICK
           : exchange_body_len(x) > 100000         ? WORK_BULK
                                                   : WORK_REQUEST;
}

static void refused(void *arg, const struct exchange *x, int status)
{
    struct server *s = arg;
    (void)x;
    atomic_store(&s->last_refused, status);
    atomic_fetch_add(&s->n_refused, 1);
}

struct http_config server_config(void)
{
    static const char *const any[] = {"127.0.0.1:0"};
    return (struct http_config){.listen = any,
                                .n_listen = 1,
                                .max_connections = 300,
                                .max_body_bytes = 1 << 20,
                                .header_timeout_s = 10,
                                .body_timeout_s = 10,
                                .idle_timeout_s = 30,
                                .admit = admit,
                                .lane = lane,
                                .handle = handle,
                                .refused = refused};
}

struct server *server_start_with(struct http_config c, int32_t max_requests)
{
    struct server *s = calloc(1, sizeof(*s));
    struct errmsg e = {{0}};
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    work_open(2, max_requests, &s->work);
    c.work = s->work;
    c.arg = s;
    c.n_connections = &s->n_connections;
    if (http_open(&c, &s->http, &e) != 0) {
        printf("Bail out! http_open: %s\n", e.text);
        exit(1);
    }
    snprintf(s->address, sizeof(s->address), "%s", http_addresses(s->http));
    return s;
}

struct server *server_start(struct http_config c)
{
    return server_start_with(c, 1000);
}

void server_stop(struct server *s)
{
    http_close(s->http);
    work_close(s->work);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    free(s);
}

int becomes(atomic_int *value, int want)
{
    for (int i = 0; i < 2000 && atomic_load(value) != want; i++)
        client_sleep_ms(1);
    return atomic_load(value) == want;
}

int wait_parked(struct server *s, int n)
{
    for (int i = 0; i < 2000; i++) {
        pthread_mutex_lock(&s->lock);
        int have = s->n_parked;
        pthread_mutex_unlock(&s->lock);
        if (have >= n)
            return 1;
        client_sleep_ms(1);
    }
    return 0;
}

void release_parked(struct server *s)
{
    pthread_mutex_lock(&s->lock);
    int n = s->n_parked;
    struct exchange *x[MAX_PARKED];
    memcpy(x, s->parked, (size_t)n * sizeof(x[0]));
    s->n_parked = 0;
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < n; i++)
        finish(x[i]);
}
