/* POST /v1/prefill: a body becomes a request, a finished request an answer. */
#include <stdio.h>
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
    char source[SESSION_ID_MAX + 2]; /* of session or fork; longer ones are none of ours */
    bool has_source, is_fork;
    struct session_terms terms; /* of keep; ttl_us 0: not */
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

/* true, or {"ttl_s": seconds, "pinned": bool}. */
static int read_keep(const struct api *a, const json_t *root, struct question *q,
                     struct json_error *e)
{
    const json_t *v = json_object_get(root, "keep");
    int64_t ttl_s = a->session_ttl_s;
    if (!v || json_is_null(v) || json_is_false(v))
        return 0;
    if (!json_is_true(v) && !json_is_object(v))
        return json_fail(e, ERR_INVALID, "keep",
                         "keep is %s; true, false and {\"ttl_s\": seconds, \"pinned\": true or "
                         "false} are accepted",
                         json_kind(v));
    int rc = 0;
    if (json_is_object(v)) {
        const json_t *pinned = json_object_get(v, "pinned");
        q->terms.has_pinning = pinned && !json_is_null(pinned);
        rc = json_get_int(v, "ttl_s", 1, SESSION_MAX_TTL_S, &ttl_s, e);
        if (rc == 0)
            rc = json_get_bool(v, "pinned", &q->terms.is_pinned, e);
    }
    q->terms.ttl_us = ttl_s * 1000000;
    return rc;
}

static int read_options(const struct api *a, const json_t *root, struct question *q,
                        struct json_error *e)
{
    const char *session = NULL, *fork = NULL;
    size_t len = 0;
    q->n_top = DEFAULT_TOP;
    int rc = read_mode(root, &q->mode, e);
    if (rc == 0)
        rc = json_get_int(root, "top_logprobs", 0, TOP_MAX, &q->n_top, e);
    if (rc == 0)
        rc = json_get_bool(root, "return_token_ids", &q->with_ids, e);
    if (rc == 0)
        rc = json_get_string(root, "session", &session, &len, e);
    if (rc == 0)
        rc = json_get_string(root, "fork", &fork, &len, e);
    if (rc == 0 && session && fork)
        rc = json_fail(e, ERR_INVALID, "fork",
                       "fork is given beside session; one of them is accepted");
    q->is_fork = fork != NULL;
    const char *source = fork ? fork : session;
    /* No name of ours has a NUL in it. */
    bool is_name = source && strlen(source) == len;
    snprintf(q->source, sizeof(q->source), "%s", is_name ? source : "");
    q->has_source = source != NULL;
    return rc ? rc : read_keep(a, root, q, e);
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
        rc = read_options(a, body.root, q, e);
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

/* The sessions of a request: the one it begins at, and the one it is to keep. */
struct bond {
    struct session *source, *keeps;
    int32_t n_source;
};

/* Puts the session's tokens before the prompt's. */
static int begin_source(const struct api *a, struct question *q, struct bond *bond,
                        struct json_error *e)
{
    const char *field = q->is_fork ? "fork" : "session";
    struct errmsg why;
    int32_t *ids = NULL, n = 0;
    int rc = sessions_begin(a->sessions, q->source, q->is_fork, &bond->source, &ids, &n, &why);
    if (rc != 0)
        return json_fail(e, rc, field, "%s: %s", field, why.text);
    bond->n_source = n;
    int64_t n_all = (int64_t)n + q->prompt.n_ids;
    if (n_all > a->max_prompt_tokens) {
        free(ids);
        return json_fail(e, ERR_TOO_LARGE, "prompt",
                         "prompt has, with the %d tokens of the session, %lld tokens; at most "
                         "%d are accepted",
                         n, (long long)n_all, a->max_prompt_tokens);
    }
    int32_t *all = realloc(ids, (size_t)n_all * sizeof(*all));
    if (!all) {
        free(ids);
        return json_fail(e, ERR_NOMEM, NULL, "memory is short");
    }
    memcpy(all + n, q->prompt.ids, (size_t)q->prompt.n_ids * sizeof(*all));
    free(q->prompt.ids);
    q->prompt = (struct prompt){all, (int32_t)n_all};
    return 0;
}

/* A continued session keeps its new end, for its ttl or another. */
static int bind_sessions(const struct api *a, struct question *q, struct bond *bond,
                         struct json_error *e)
{
    int rc = q->has_source ? begin_source(a, q, bond, e) : 0;
    if (rc != 0)
        return rc;
    if (q->has_source && !q->is_fork) {
        bond->keeps = bond->source;
        sessions_ref(a->sessions, bond->keeps);
    } else if (q->terms.ttl_us) {
        bond->keeps = sessions_new(q->terms.ttl_us);
        if (!bond->keeps)
            rc = json_fail(e, ERR_NOMEM, NULL, "memory is short");
    }
    return rc;
}

static void unbind(const struct api *a, const struct question *q, struct bond *bond)
{
    if (bond->source)
        sessions_end(a->sessions, bond->source, q->is_fork);
    sessions_unref(a->sessions, bond->keeps);
}

static struct call *new_call(struct api *a, struct exchange *x, struct question *q,
                             const struct bond *bond)
{
    struct call *c = calloc(1, sizeof(*c));
    if (!c)
        return NULL;
    c->with_ids = q->with_ids;
    c->group.format = format;
    c->group.release = release;
    if (group_init(&c->group, a, x, &q->common, 1) != 0 ||
        group_add(&c->group, &q->prompt, q->mode, (int32_t)q->n_top, NULL, 0, 0) != 0) {
        group_fini(&c->group);
        free(c);
        return NULL;
    }
    struct request *r = c->group.requests[0];
    r->source = bond->source;
    r->keeps = bond->keeps;
    r->n_source = bond->n_source;
    r->is_fork = q->is_fork;
    r->keep_terms = q->terms;
    /* The row of the first new token is the session's last one's, which is not computed
     * again. */
    r->logprobs_from = bond->n_source ? bond->n_source + 1 : 0;
    return c;
}

void api_prefill(struct api *a, struct exchange *x)
{
    struct question q = {0};
    struct bond bond = {0};
    struct json_error e;
    if (exchange_is_gone(x)) {
        api_drop(a, x);
        return;
    }
    int rc = read_question(a, x, &q, &e);
    if (rc == 0)
        rc = bind_sessions(a, &q, &bond, &e);
    struct call *c = rc == 0 ? new_call(a, x, &q, &bond) : NULL;
    if (c) {
        group_start(&c->group);
        return;
    }
    unbind(a, &q, &bond);
    free(q.prompt.ids);
    if (rc == 0)
        api_refuse(a, x, 500, NULL, "memory is short");
    else
        api_refuse_body(a, x, rc, &e);
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
    int32_t from = r->logprobs_from > 1 ? r->logprobs_from : 1;
    buf_adds(b, ", \"prompt_logprobs\": [null");
    for (int32_t t = 1; t < r->n_ids; t++) {
        buf_adds(b, t < from ? ", null" : ", ");
        if (t >= from)
            buf_json_f32(b, r->prompt_logprobs[t]);
    }
    buf_adds(b, "]");
    if (r->n_top == 0)
        return;
    buf_adds(b, ", \"prompt_top\": [null");
    for (int32_t t = 1; t < r->n_ids; t++) {
        if (t < from) {
            buf_adds(b, ", null");
            continue;
        }
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
    if (r->kept_as[0]) {
        buf_adds(b, ", \"session\": ");
        buf_json_string(b, r->kept_as, strlen(r->kept_as));
    }
    add_timings(b, r);
    buf_adds(b, "}");
}
