/* POST /v1/prefill: a body becomes a request, a finished request an answer. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api_group.h"
#include "api_logprobs.h"
#include "backend.h"

enum { DEFAULT_TOP = 5 };

static const char *const fields[] = {
    "prompt",     "model",       "logprobs",   "top_logprobs",
    "priority",   "deadline_ms", "request_id", "return_token_ids",
    "cache_salt", "session",     "fork",       "keep",
    NULL};

struct call {
    struct group group;
    bool with_ids;
};

/* The question, as it is read from the body. */
struct question {
    struct prompt prompt; /* owned until group_add takes its ids */
    struct api_common common;
    enum logprobs_mode mode;
    int64_t n_top;
    bool with_ids;
};

/* ---- reading the body ---- */

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
        rc = json_get_bool(root, "return_token_ids", &q->with_ids, e);
    return rc;
}

static int read_question(struct api *a, struct exchange *x, struct question *q,
                         struct json_error *e)
{
    const struct json_rules rules = {.fields = fields,
                                     .ids_field = "prompt",
                                     .vocab = a->vocab,
                                     .max_ids = a->max_prompt_tokens};
    const struct prompt_rules one = {
        .field = "prompt", .max_ids = a->max_prompt_tokens, .only_one = true};
    struct prompt *prompts = NULL;
    int32_t n = 0;
    struct json_body body;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    rc = api_read_common(a, x, body.root, &q->common, e);
    if (rc == 0)
        rc = read_options(body.root, q, e);
    if (rc == 0)
        rc = api_read_prompts(a, &body, &one, &prompts, &n, e);
    if (rc == 0) {
        q->prompt = prompts[0];
        prompts[0].ids = NULL;
    }
    prompts_free(prompts, n);
    json_fini(&body);
    return rc;
}

static void release(struct group *g)
{
    group_fini(g);
    free((struct call *)g);
}

static void format(struct group *g, struct buf *b);

void api_prefill(struct api *a, struct exchange *x)
{
    struct question q = {0};
    struct json_error e;
    if (exchange_is_gone(x)) {
        api_drop(a, x);
        return;
    }
    int rc = read_question(a, x, &q, &e);
    if (rc != 0) {
        api_refuse_body(a, x, rc, &e);
        return;
    }
    struct call *c = calloc(1, sizeof(*c));
    if (c) {
        c->with_ids = q.with_ids;
        c->group.format = format;
        c->group.release = release;
    }
    if (!c || group_init(&c->group, a, x, &q.common, 1) != 0 ||
        group_add(&c->group, &q.prompt, q.mode, (int32_t)q.n_top, NULL, 0, 0) != 0) {
        free(q.prompt.ids);
        if (c)
            release(&c->group);
        api_refuse(a, x, 500, NULL, "memory is short");
        return;
    }
    group_start(&c->group);
}

/* ---- the answer ---- */

static void add_logprob(struct buf *b, float logprob)
{
    buf_adds(b, ", \"logprob\": ");
    buf_json_f32(b, logprob);
}

static void add_next(struct api *a, struct buf *b, const struct request *r)
{
    buf_adds(b, ", \"next\": ");
    open_candidate(a, b, &r->next_top[0]);
    buf_adds(b, ", \"top\": ");
    write_candidates(a, b, r->next_top, r->n_top);
    buf_addc(b, '}');
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

static void format(struct group *g, struct buf *b)
{
    const struct call *c = (const struct call *)g;
    struct api *a = g->api;
    const struct request *r = g->requests[0];
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
