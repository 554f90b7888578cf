/* The calls that need no engine: health, readiness, version, models, metrics. */
#include <stdio.h>
#include <string.h>

#include "api_priv.h"
#include "log.h"

void api_version(struct api *a, struct exchange *x)
{
    struct buf b;
    buf_init(&b);
    buf_adds(&b, "{\"version\": ");
    buf_json_string(&b, a->version, strlen(a->version));
    buf_adds(&b, ", \"backend\": ");
    buf_json_string(&b, a->backend_name, strlen(a->backend_name));
    buf_adds(&b, "}");
    api_reply(x, 200, &b);
}

static void add_model(const struct api *a, struct buf *b)
{
    size_t len = strlen(a->model_id);
    buf_adds(b, "{\"id\": ");
    buf_json_string(b, a->model_id, len);
    buf_adds(b, ", \"object\": \"model\", \"created\": ");
    buf_json_i64(b, a->started_unix_s);
    buf_adds(b, ", \"owned_by\": \"prefilld\", \"root\": ");
    buf_json_string(b, a->model_id, len);
    buf_adds(b, ", \"max_model_len\": ");
    buf_json_i64(b, a->max_prompt_tokens);
    buf_adds(b, ", \"vocab_size\": ");
    buf_json_i64(b, a->vocab);
    buf_addc(b, '}');
}

void api_models(struct api *a, struct exchange *x)
{
    struct buf b;
    buf_init(&b);
    buf_adds(&b, "{\"object\": \"list\", \"data\": [");
    add_model(a, &b);
    buf_adds(&b, "]}");
    api_reply(x, 200, &b);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Is text, with its %-escapes decoded, name? */
static bool is_name(const char *text, const char *name)
{
    for (; *text && *name; text++, name++) {
        int c = (unsigned char)*text;
        if (c == '%' && hex_digit(text[1]) >= 0 && hex_digit(text[2]) >= 0) {
            c = hex_digit(text[1]) * 16 + hex_digit(text[2]);
            text += 2;
        }
        if (c != (unsigned char)*name)
            return false;
    }
    return !*text && !*name;
}

void api_model(struct api *a, struct exchange *x)
{
    struct buf b;
    if (!is_name(exchange_path(x) + strlen("/v1/models/"), a->model_id)) {
        char text[320];
        snprintf(text, sizeof(text), "model is not served here; served is %.256s", a->model_id);
        api_error(a, x, 404, "model", text);
        return;
    }
    buf_init(&b);
    add_model(a, &b);
    api_reply(x, 200, &b);
}

void api_metrics(struct api *a, struct exchange *x)
{
    struct buf b;
    /* The queue is there when the model is. */
    bool is_loading = atomic_load(&a->phase) == PHASE_LOADING;
    int64_t oldest_us = is_loading ? 0 : queue_oldest_us(a->queue);
    buf_init(&b);
    metrics_render(a->metrics, oldest_us ? request_now_us() - oldest_us : 0, &b);
    exchange_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
}

/* last=N of a query, or the default; negative: not a number from 1 on. */
static int64_t trace_last(const char *query)
{
    enum { DEFAULT_STEPS = 32, MAX_DIGITS = 9 };
    for (const char *p = query; p && *p; p += strcspn(p, "&"), p += *p == '&') {
        if (strncmp(p, "last=", 5) != 0)
            continue;
        int64_t n = 0;
        size_t len = strspn(p + 5, "0123456789");
        if (len == 0 || len > MAX_DIGITS || (p[5 + len] && p[5 + len] != '&'))
            return -1;
        for (size_t i = 0; i < len; i++)
            n = 10 * n + (p[5 + i] - '0');
        return n > 0 ? n : -1;
    }
    return DEFAULT_STEPS;
}

void api_trace(struct api *a, struct exchange *x)
{
    struct buf b;
    int64_t n = trace_last(exchange_query(x));
    if (n < 0) {
        api_error(a, x, 400, "last", "last: give the number of steps, 1 or more");
        return;
    }
    buf_init(&b);
    steps_render_trace(a->steps, n, &b);
    api_reply(x, 200, &b);
}

void api_stall(struct api *a, struct exchange *x)
{
    enum { MAX_S = 3600 };
    static const char *const fields[] = {"seconds", NULL};
    const struct json_rules rules = {.fields = fields};
    struct json_body body;
    struct json_error e;
    int64_t seconds = 0;
    int rc = api_read_body(x, &rules, &body, &e);
    if (rc == 0) {
        rc = json_get_int(body.root, "seconds", 1, MAX_S, &seconds, &e);
        if (rc == 0 && seconds == 0)
            rc = json_fail(&e, ERR_INVALID, "seconds",
                           "seconds is missing; an integer from 1 to %d is accepted", MAX_S);
        json_fini(&body);
    }
    if (rc != 0) {
        api_bad_body(a, x, rc, &e);
        return;
    }
    log_warn("id=%s event=debug_stall seconds=%lld", exchange_id(x), (long long)seconds);
    a->stall(a->cancel_arg, seconds * 1000000);
    struct buf b;
    buf_init(&b);
    buf_printf(&b, "{\"stalled_s\": %lld}", (long long)seconds);
    api_reply(x, 200, &b);
}

/* status_text is a constant; 503 gets Retry-After. */
static void reply_status(struct exchange *x, int status, const char *status_text,
                         const char *more)
{
    struct buf b;
    buf_init(&b);
    buf_printf(&b, "{\"status\": \"%s\"%s}", status_text, more);
    if (status == 503)
        exchange_add_header(x, "Retry-After", "1");
    api_reply(x, status, &b);
}

/* Work is there and no step has ended for stall-s. The queue is asked itself: a stuck engine
 * publishes nothing. */
static bool is_stalled(const struct api *a)
{
    struct metrics_pools p;
    metrics_get_pools(a->metrics, &p);
    int64_t quiet_us = request_now_us() - atomic_load(&a->metrics->last_progress_us);
    return (p.requests_running > 0 || queue_n_waiting(a->queue) > 0) &&
           quiet_us > (int64_t)a->stall_s * 1000000;
}

void api_health(struct api *a, struct exchange *x)
{
    if (atomic_load(&a->metrics->device_lost))
        reply_status(x, 503, "device lost", "");
    else if (atomic_load(&a->phase) != PHASE_LOADING && is_stalled(a))
        reply_status(x, 503, "stalled", "");
    else
        reply_status(x, 200, "ok", "");
}

void api_ready(struct api *a, struct exchange *x)
{
    char progress[40];
    int phase = atomic_load(&a->phase);
    if (phase == PHASE_LOADING) {
        int permille = atomic_load(&a->loaded_permille);
        snprintf(progress, sizeof(progress), ", \"progress\": %d.%03d", permille / 1000,
                 permille % 1000);
        reply_status(x, 503, "loading", progress);
    } else if (phase == PHASE_DRAINING) {
        reply_status(x, 503, "draining", "");
    } else if (atomic_load(&a->metrics->device_lost)) {
        reply_status(x, 503, "device lost", "");
    } else {
        reply_status(x, 200, "ready", "");
    }
}
