/* POST /v1/prefill: a body becomes a request, a finished request an answer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api_priv.h"
#include "backend.h"
#include "log.h"

enum {
    DEFAULT_TOP = 5,
    MAX_DEADLINE_MS = 86400000,
    MAX_PRIORITY = SCHED_MAX_PRIORITY,
    /* A text that is too long is counted to its end, so that the refusal can say how long it is,
     * unless it has more bytes than these and these for each accepted token (prose has 4). */
    COUNT_BYTES = 1 << 20,
    COUNT_BYTES_A_TOKEN = 16
};

static const char *const fields[] = {
    "prompt",   "model",       "logprobs",   "top_logprobs",
    "priority", "deadline_ms", "request_id", "return_token_ids",
    "session",  "fork",        "keep",       NULL};

/* What the exchange remembers until its answer. */
struct call {
    struct api *api;
    struct request *request; /* a reference */
    bool with_ids;
};

/* The question, as it is read from the body. */
struct question {
    int32_t *ids; /* owned until request_new takes it */
    int32_t n_ids;
    enum logprobs_mode mode;
    int64_t n_top, priority, deadline_ms; /* deadline_ms 0: none */
    bool with_ids;
};

/* ---- one line for each request, and its count ---- */

static void finish_line(struct api *a, const struct exchange *x, int status, enum outcome o,
                        const struct request *r)
{
    metrics_count(a->metrics, o);
    if (!r) {
        log_info(
            "id=%s status=%d outcome=%s tokens=0 cached=0 pieces=0 queue_ms=0 prefill_ms=0",
            exchange_id(x), status, outcome_name(o));
        return;
    }
    int64_t started_us = r->started_us ? r->started_us : r->ended_us;
    log_info("id=%s status=%d outcome=%s tokens=%d cached=%d pieces=%d queue_ms=%.1f "
             "prefill_ms=%.1f",
             exchange_id(x), status, outcome_name(o), r->n_ids, r->n_cached, r->n_pieces,
             (double)(started_us - r->arrival_us) / 1e3,
             (double)(r->ended_us - started_us) / 1e3);
}

void api_prefill_refused(struct api *a, const struct exchange *x, int status)
{
    enum outcome o = status == 503   ? OUTCOME_OVERLOAD
                     : status >= 500 ? OUTCOME_ERROR
                                     : OUTCOME_INVALID;
    finish_line(a, x, status, o, NULL);
}

/* Refused before it was queued. */
static void refuse(struct api *a, struct exchange *x, int status, const char *param,
                   const char *message)
{
    api_prefill_refused(a, x, status);
    api_error(a, x, status, param, message);
}

/* The client has gone: nobody reads an answer. */
static void drop(struct api *a, struct exchange *x, const struct request *r)
{
    struct buf none;
    buf_init(&none);
    finish_line(a, x, 0, OUTCOME_CANCELLED, r);
    api_reply(x, 200, &none);
}

/* ---- reading the body ---- */

static int read_request_id(struct exchange *x, const json_t *root, struct json_error *e)
{
    const char *id = NULL;
    size_t len;
    int rc = json_get_string(root, "request_id", &id, &len, e);
    if (rc != 0 || !id)
        return rc;
    if (!exchange_id_is_valid(id, len))
        return json_fail(
            e, ERR_INVALID, "request_id",
            "request_id has %zu characters or some that are not visible ASCII; 1 to "
            "%d visible ASCII characters are accepted",
            len, HTTP_ID_MAX);
    exchange_set_id(x, id);
    return 0;
}

static int read_mode(const json_t *root, enum logprobs_mode *mode, struct json_error *e)
{
    static const char *const names[] = {"none", "next", "all"};
    const char *name = "next";
    size_t len = 4;
    int rc = json_get_string(root, "logprobs", &name, &len, e);
    if (rc != 0)
        return json_fail(e, rc, "logprobs",
                         "logprobs is %s; \"none\", \"next\" and \"all\" are accepted",
                         json_kind(json_object_get(root, "logprobs")));
    for (int i = 0; i < 3; i++) {
        if (len == strlen(names[i]) && memcmp(name, names[i], len) == 0) {
            *mode = (enum logprobs_mode)i;
            return 0;
        }
    }
    return json_fail(e, ERR_INVALID, "logprobs",
                     "logprobs is another string; \"none\", \"next\" and \"all\" are accepted");
}

static int read_options(const json_t *root, struct question *q, struct json_error *e)
{
    static const char *const later[] = {"session", "fork", "keep"};
    for (size_t i = 0; i < sizeof(later) / sizeof(later[0]); i++) {
        const json_t *v = json_object_get(root, later[i]);
        if (v && !json_is_null(v))
            return json_fail(
                e, ERR_INVALID, later[i],
                "%s is %s; sessions are not served by this version, only its absence "
                "is accepted",
                later[i], json_kind(v));
    }
    q->n_top = DEFAULT_TOP;
    int rc = read_mode(root, &q->mode, e);
    if (rc == 0)
        rc = json_get_int(root, "top_logprobs", 0, TOP_MAX, &q->n_top, e);
    if (rc == 0)
        rc = json_get_int(root, "priority", -MAX_PRIORITY, MAX_PRIORITY, &q->priority, e);
    if (rc == 0)
        rc = json_get_int(root, "deadline_ms", 1, MAX_DEADLINE_MS, &q->deadline_ms, e);
    if (rc == 0)
        rc = json_get_bool(root, "return_token_ids", &q->with_ids, e);
    return rc;
}

static int fail_long_text(struct api *a, const char *text, size_t len, struct json_error *e)
{
    int32_t *ids = NULL, n_ids = 0;
    size_t max_bytes = COUNT_BYTES + COUNT_BYTES_A_TOKEN * (size_t)a->max_prompt_tokens;
    bool is_counted = len <= max_bytes &&
                      tokenizer_encode(a->tokenizer, text, len, 0, &ids, &n_ids, NULL) == 0;
    free(ids);
    if (is_counted)
        return json_fail(e, ERR_TOO_LARGE, "prompt",
                         "prompt has %d tokens; at most %d are accepted", n_ids,
                         a->max_prompt_tokens);
    return json_fail(
        e, ERR_TOO_LARGE, "prompt",
        "prompt has %zu bytes of text and more than %d tokens; at most %d are accepted", len,
        a->max_prompt_tokens, a->max_prompt_tokens);
}

static int read_prompt(struct api *a, struct json_body *body, struct question *q,
                       struct json_error *e)
{
    const json_t *v = json_object_get(body->root, "prompt");
    if (body->has_ids) {
        q->ids = body->ids;
        q->n_ids = body->n_ids;
        body->ids = NULL;
    } else if (!json_is_string(v)) {
        return json_fail(e, ERR_INVALID, "prompt",
                         "prompt is %s; a string or a list of ids is accepted",
                         json_is_null(v) ? "null"
                         : v             ? json_kind(v)
                                         : "missing");
    } else if (!a->tokenizer) {
        return json_fail(
            e, ERR_INVALID, "prompt",
            "prompt is a string, but the model has no tokenizer.json; a list of ids "
            "is accepted");
    } else {
        struct errmsg why;
        const char *text = json_string_value(v);
        size_t len = json_string_length(v);
        int rc = tokenizer_encode(a->tokenizer, text, len, a->max_prompt_tokens, &q->ids,
                                  &q->n_ids, &why);
        if (rc == ERR_TOO_LARGE)
            return fail_long_text(a, text, len, e);
        if (rc != 0)
            return json_fail(e, rc, "prompt", "prompt: %s", why.text);
    }
    if (q->n_ids == 0)
        return json_fail(e, ERR_INVALID, "prompt",
                         "prompt is empty; at least one token is needed");
    return 0;
}

static int read_question(struct api *a, struct exchange *x, struct question *q,
                         struct json_error *e)
{
    const struct json_rules rules = {fields, "prompt", a->vocab, a->max_prompt_tokens};
    struct json_body body;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    /* First, so that the other refusals carry it. */
    rc = read_request_id(x, body.root, e);
    if (rc == 0)
        rc = api_check_model(a, body.root, e);
    if (rc == 0)
        rc = read_options(body.root, q, e);
    if (rc == 0)
        rc = read_prompt(a, &body, q, e);
    json_fini(&body);
    return rc;
}

/* ---- to the engine ---- */

static void on_hangup(void *arg)
{
    struct call *c = arg;
    c->api->cancel(c->api->cancel_arg, c->request);
}

static void free_call(void *arg)
{
    struct call *c = arg;
    request_unref(c->request);
    free(c);
}

static void answer(struct exchange *x);

/* Engine thread. */
static void on_done(struct request *r, void *arg)
{
    (void)r; /* the call has it */
    exchange_post(arg, answer);
}

static struct call *make_call(struct api *a, struct exchange *x, struct question *q)
{
    struct call *c = calloc(1, sizeof(*c));
    if (!c) {
        free(q->ids);
        return NULL;
    }
    struct request *r =
        request_new(q->ids, q->n_ids, q->mode, (int32_t)q->n_top, a->page_tokens);
    if (!r) {
        free(c);
        return NULL;
    }
    memcpy(r->id, exchange_id(x), strlen(exchange_id(x)) + 1);
    r->arrival_us = exchange_arrival_us(x);
    r->item.arrival_us = r->arrival_us;
    r->item.priority = (int32_t)q->priority;
    r->item.deadline_us = q->deadline_ms ? r->arrival_us + q->deadline_ms * 1000 : 0;
    r->done = on_done;
    r->done_arg = x;
    *c = (struct call){.api = a, .request = r, .with_ids = q->with_ids};
    return c;
}

static void refuse_unqueued(struct api *a, struct exchange *x, int rc)
{
    char text[128];
    snprintf(text, sizeof(text), "the queue is full: %d requests with %lld tokens wait",
             queue_n_waiting(a->queue), (long long)queue_waiting_tokens(a->queue));
    refuse(a, x, 503, NULL, rc == ERR_FULL ? text : "draining: this server is about to stop");
}

void api_prefill(struct api *a, struct exchange *x)
{
    struct question q = {0};
    struct json_error e;
    if (exchange_is_gone(x)) {
        drop(a, x, NULL);
        return;
    }
    int rc = read_question(a, x, &q, &e);
    if (rc != 0) {
        free(q.ids);
        api_prefill_refused(a, x, api_status_of(rc));
        api_bad_body(a, x, rc, &e);
        return;
    }
    struct call *c = make_call(a, x, &q);
    if (!c) {
        refuse(a, x, 500, NULL, "memory is short");
        return;
    }
    struct request *r = c->request;
    if (!exchange_set_call(x, c, on_hangup, free_call)) {
        drop(a, x, NULL);
        return;
    }
    /* From a successful push on x is the engine's: it may be answered and gone by now. */
    rc = queue_push(a->queue, r);
    if (rc != 0)
        refuse_unqueued(a, x, rc);
}

/* ---- the answer ---- */

static void add_token(struct api *a, struct buf *b, int32_t id)
{
    bool is_text = true;
    buf_printf(b, "{\"id\": %d, \"token\": ", id);
    if (a->tokenizer)
        is_text = tokenizer_json_token(a->tokenizer, id, b);
    else
        buf_adds(b, "\"\"");
    if (is_text)
        return;
    size_t len;
    const char *bytes = tokenizer_token_bytes(a->tokenizer, id, &len);
    buf_adds(b, ", \"bytes\": [");
    for (size_t i = 0; i < len; i++)
        buf_printf(b, "%s%d", i ? ", " : "", (unsigned char)bytes[i]);
    buf_adds(b, "]");
}

static void add_logprob(struct buf *b, float logprob)
{
    buf_adds(b, ", \"logprob\": ");
    buf_json_f32(b, logprob);
}

static void add_next(struct api *a, struct buf *b, const struct request *r)
{
    buf_adds(b, ", \"next\": ");
    add_token(a, b, r->next_top[0].id);
    add_logprob(b, r->next_top[0].logprob);
    buf_adds(b, ", \"top\": [");
    for (int32_t i = 0; i < r->n_top && r->next_top[i].id >= 0; i++) {
        buf_adds(b, i ? ", " : "");
        add_token(a, b, r->next_top[i].id);
        add_logprob(b, r->next_top[i].logprob);
        buf_adds(b, "}");
    }
    buf_adds(b, "]}");
}

static void add_prompt_logprobs(struct buf *b, const struct request *r)
{
    buf_adds(b, ", \"prompt_logprobs\": [null");
    for (int32_t t = 1; t < r->n_ids; t++) {
        buf_adds(b, ", ");
        buf_json_f32(b, r->prompt_logprobs[t]);
    }
    buf_adds(b, "]");
    if (r->n_top == 0)
        return;
    buf_adds(b, ", \"prompt_top\": [null");
    for (int32_t t = 1; t < r->n_ids; t++) {
        const struct top_entry *top = r->prompt_top + (size_t)t * (size_t)r->n_top;
        buf_adds(b, ", [");
        for (int32_t i = 0; i < r->n_top && top[i].id >= 0; i++) {
            buf_adds(b, i ? ", {\"id\": " : "{\"id\": ");
            buf_json_i64(b, top[i].id);
            add_logprob(b, top[i].logprob);
            buf_adds(b, "}");
        }
        buf_adds(b, "]");
    }
    buf_adds(b, "]");
}

static void add_ids(struct buf *b, const struct request *r)
{
    buf_adds(b, ", \"prompt_token_ids\": [");
    for (int32_t t = 0; t < r->n_ids; t++) {
        buf_adds(b, t ? ", " : "");
        buf_json_i64(b, r->ids[t]);
    }
    buf_adds(b, "]");
}

static void add_timings(struct buf *b, const struct request *r)
{
    int64_t prefill_us = r->ended_us - r->started_us;
    double rate =
        (double)(r->n_ids - r->n_cached) * 1e6 / (double)(prefill_us > 0 ? prefill_us : 1);
    buf_printf(b,
               ", \"timings\": {\"queue_ms\": %.3f, \"prefill_ms\": %.3f, \"total_ms\": %.3f, "
               "\"tokens_per_s\": %.1f}",
               (double)(r->started_us - r->arrival_us) / 1e3, (double)prefill_us / 1e3,
               (double)(request_now_us() - r->arrival_us) / 1e3, rate);
    buf_adds(b, ", \"pieces\": [");
    for (int32_t i = 0; i < r->n_pieces; i++)
        buf_printf(b, "%s{\"step\": %lld, \"start\": %d, \"tokens\": %d}", i ? ", " : "",
                   (long long)r->pieces[i].step, r->pieces[i].start, r->pieces[i].n_tokens);
    buf_adds(b, "]");
}

static void format(struct api *a, struct buf *b, const struct call *c)
{
    const struct request *r = c->request;
    buf_adds(b, "{\"id\": ");
    buf_json_string(b, r->id, strlen(r->id));
    buf_printf(
        b, ", \"object\": \"prefill\", \"created\": %lld, \"model\": ", (long long)time(NULL));
    buf_json_string(b, a->model_id, strlen(a->model_id));
    buf_printf(b,
               ", \"usage\": {\"prompt_tokens\": %d, \"cached_tokens\": %d, "
               "\"total_tokens\": %d}",
               r->n_ids, r->n_cached, r->n_ids);
    if (r->logprobs != LOGPROBS_NONE)
        add_next(a, b, r);
    if (r->logprobs == LOGPROBS_ALL)
        add_prompt_logprobs(b, r);
    if (c->with_ids)
        add_ids(b, r);
    add_timings(b, r);
    buf_adds(b, "}");
}

/* A worker, after the engine's done(). */
static void answer(struct exchange *x)
{
    struct call *c = exchange_call(x);
    struct api *a = c->api;
    const struct request *r = c->request;
    if (exchange_is_gone(x)) {
        drop(a, x, r);
        return;
    }
    bool is_ending = atomic_load(&a->phase) == PHASE_DRAINING;
    if (is_ending)
        exchange_set_close(x);
    if (r->outcome == OUTCOME_OK) {
        struct buf b;
        buf_init(&b);
        format(a, &b, c);
        finish_line(a, x, b.failed ? 500 : 200, b.failed ? OUTCOME_ERROR : OUTCOME_OK, r);
        api_reply(x, 200, &b);
        return;
    }
    bool is_lost = atomic_load(&a->metrics->device_lost);
    int status = r->outcome == OUTCOME_DEADLINE   ? 504
                 : r->outcome == OUTCOME_OVERLOAD ? 503
                 : is_lost || is_ending           ? 503
                                                  : 500;
    const char *param = r->outcome == OUTCOME_DEADLINE ? "deadline_ms" : NULL;
    finish_line(a, x, status, r->outcome, r);
    api_error(a, x, status, param, r->error.text);
}
