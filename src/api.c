#include "api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "api_error.h"
#include "api_group.h"
#include "api_priv.h"
#include "log.h"

enum {
    LOADING_RETRY_S = 2,
    DRAINING_RETRY_S = 1,
    MAX_IGNORED = 16,
    BULK_BYTES = 2 << 20 /* more than the ids of any prompt take, or 0.1 s of tokenizing */
};

struct route {
    const char *method, *path;
    bool when_loading; /* answered before the model is there */
    bool counts;       /* needs the engine: its end is an outcome in the metrics */
    void (*run)(struct api *a, struct exchange *x);
};

static const struct route routes[] = {
    {"POST", "/v1/prefill", false, true, api_prefill},
    {"POST", "/v1/completions", false, true, api_completions},
    {"POST", "/v1/chat/completions", false, true, api_chat},
    {"POST", "/v1/score", false, true, api_score},
    {"POST", "/generative_scoring", false, true, api_generative_scoring},
    {"POST", "/rerank", false, true, api_rerank},
    {"POST", "/v1/rerank", false, true, api_rerank},
    {"POST", "/generate", false, true, api_generate},
    {"GET", "/v1/models", false, false, api_models},
    {"GET", "/v1/models/", false, false, api_model},
    {"GET", "/v1/trace", false, false, api_trace},
    {"GET", "/v1/steps", false, false, api_steps},
    {"GET", "/v1/sessions", false, false, api_sessions},
    {"GET", "/v1/sessions/", false, false, api_session},
    {"POST", "/v1/sessions", false, false, api_session_import},
    {"POST", "/v1/sessions/", false, false, api_session_renew},
    {"DELETE", "/v1/sessions/", false, false, api_session_delete},
    {"POST", "/v1/debug/stall", false, false, api_stall},
    {"GET", "/", true, false, api_page},
    {"GET", "/health", true, false, api_health},
    {"GET", "/ready", true, false, api_ready},
    {"GET", "/version", true, false, api_version},
    {"GET", "/metrics", true, false, api_metrics},
    {"POST", "/tokenize", false, false, api_tokenize},
    {"POST", "/detokenize", false, false, api_detokenize},
    {"GET", "/tokenizer_info", false, false, api_tokenizer_info},
};

/* A path but "/" that ends in a slash stands for all that begin with it, and have more. */
static bool takes_path(const struct route *r, const char *path)
{
    size_t len = strlen(r->path);
    bool takes_more = len > 1 && r->path[len - 1] == '/';
    return takes_more ? strncmp(r->path, path, len) == 0 && path[len]
                      : strcmp(r->path, path) == 0;
}

static bool takes_method(const struct route *r, const char *method)
{
    return strcmp(r->method, method) == 0 ||
           (strcmp(r->method, "GET") == 0 && strcmp(method, "HEAD") == 0);
}

/* The call of this path and method; of another method when there is none; NULL: no such
 * path. */
static const struct route *find_route(const char *path, const char *method)
{
    const struct route *other = NULL;
    for (size_t i = 0; i < sizeof(routes) / sizeof(routes[0]); i++) {
        if (!takes_path(&routes[i], path))
            continue;
        if (takes_method(&routes[i], method))
            return &routes[i];
        other = other ? other : &routes[i];
    }
    return other;
}

/* What Allow says of the path. */
static void list_methods(const char *path, char out[64])
{
    out[0] = '\0';
    for (size_t i = 0; i < sizeof(routes) / sizeof(routes[0]); i++) {
        if (!takes_path(&routes[i], path))
            continue;
        strcat(out, out[0] ? ", " : "");
        strcat(out, strcmp(routes[i].method, "GET") == 0 ? "GET, HEAD" : routes[i].method);
    }
}

/* Does x's end count in the metrics? */
static bool is_counted(const struct exchange *x)
{
    const struct route *r = find_route(exchange_path(x), exchange_method(x));
    return r && r->counts && strcmp(exchange_method(x), "POST") == 0;
}

int api_read_keys(struct api *a, const char *api_key_file, struct errmsg *e)
{
    if (!a->keys)
        a->keys = api_keys_new();
    return a->keys ? api_keys_read(a->keys, api_key_file, e)
                   : errmsg_set(e, ERR_NOMEM, "no memory for keys");
}

void api_close(struct api *a)
{
    api_keys_free(a->keys);
    a->keys = NULL;
}

/* ---- answers ---- */

int32_t api_retry_after_s(const struct api *a)
{
    return queue_retry_after_s(atomic_load(&a->metrics->backlog_tokens),
                               (double)atomic_load(&a->metrics->rate_tokens_per_s));
}

void api_reply(struct exchange *x, int status, struct buf *body)
{
    exchange_reply(x, status, "application/json", body);
}

/* 503 while loading or draining; else by the backlog. */
static int32_t retry_after_s(const struct api *a)
{
    switch (atomic_load(&a->phase)) {
    case PHASE_LOADING:
        return LOADING_RETRY_S;
    case PHASE_DRAINING:
        return DRAINING_RETRY_S;
    default:
        return api_retry_after_s(a);
    }
}

static void add_error_headers(struct api *a, struct exchange *x, int status)
{
    char seconds[16];
    if (status == 503 || status == 429) {
        snprintf(seconds, sizeof(seconds), "%d", retry_after_s(a));
        exchange_add_header(x, "Retry-After", seconds);
    } else if (status == 401) {
        exchange_add_header(x, "WWW-Authenticate", "Bearer");
    }
    if (atomic_load(&a->phase) == PHASE_DRAINING)
        exchange_set_close(x);
}

void api_error(struct api *a, struct exchange *x, int status, const char *param,
               const char *message)
{
    struct buf body;
    buf_init(&body);
    bool is_lost = status == 503 && atomic_load(&a->metrics->device_lost);
    api_error_write(&body, status, is_lost ? "server_error" : NULL, param, message);
    add_error_headers(a, x, status);
    api_reply(x, status, &body);
}

int api_status_of(int rc)
{
    return rc == ERR_NOMEM ? 500 : rc == ERR_NOT_FOUND ? 404 : rc == ERR_FULL ? 409 : 400;
}

void api_bad_body(struct api *a, struct exchange *x, int rc, const struct json_error *e)
{
    api_error(a, x, api_status_of(rc), e->field[0] ? e->field : NULL, e->message.text);
}

/* ---- what bodies have in common ---- */

static bool is_plain_name(const char *name)
{
    size_t len = strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                              "0123456789_.-");
    return len >= 1 && len <= 64 && name[len] == '\0';
}

static void name_ignored(struct exchange *x, const json_t *root, const struct json_rules *rules)
{
    struct buf list;
    buf_init(&list);
    int n = 0;
    /* The iterator's interface has no const; nothing is changed. */
    for (void *i = json_object_iter((json_t *)root); i && n < MAX_IGNORED;
         i = json_object_iter_next((json_t *)root, i)) {
        const char *name = json_object_iter_key(i);
        const char *const *f = rules->fields;
        while (*f && strcmp(*f, name) != 0)
            f++;
        if (*f)
            continue;
        buf_adds(&list, n++ ? "," : "");
        buf_adds(&list, is_plain_name(name) ? name : "?");
    }
    if (n > 0 && buf_cstr(&list))
        exchange_add_header(x, "X-Prefilld-Ignored", list.data);
    buf_fini(&list);
}

/* The refusal of a body carries its id too. */
static void carry_request_id(struct exchange *x, const struct buf *text)
{
    json_t *v = json_peek(text->data, text->len, "request_id");
    if (json_is_string(v) && exchange_id_is_valid(json_string_value(v), json_string_length(v)))
        exchange_set_id(x, json_string_value(v));
    json_decref(v);
}

int api_read_body(struct exchange *x, const struct json_rules *rules, struct json_body *body,
                  struct json_error *e)
{
    struct buf text;
    buf_init(&text);
    exchange_take_body(x, &text);
    int rc = json_parse(text.data, text.len, rules, body, e);
    if (rc != 0)
        carry_request_id(x, &text);
    buf_fini(&text);
    if (rc == 0)
        name_ignored(x, body->root, rules);
    return rc;
}

int api_check_model(const struct api *a, const json_t *root, struct json_error *e)
{
    const char *name = NULL;
    size_t len = 0;
    int rc = json_get_string(root, "model", &name, &len, e);
    if (rc == 0 && name && (len != strlen(a->model_id) || memcmp(name, a->model_id, len) != 0))
        rc = json_fail(e, ERR_NOT_FOUND, "model", "model is not served here; served is %s",
                       a->model_id);
    return rc;
}

/* ---- the callbacks of http ---- */

static bool needs_key(const struct api *a, const struct route *r)
{
    if (r->run == api_health || r->run == api_ready)
        return a->key_scope == API_KEY_ALL;
    return a->key_scope != API_KEY_CALLS || r->counts || strncmp(r->path, "/v1/", 4) == 0;
}

/* The refusal that needs no body, as a status and a message; 0: none. */
static int refusal(const struct api *a, const struct exchange *x, const struct route *r,
                   const char **message)
{
    int phase = atomic_load(&a->phase);
    if (phase == PHASE_LOADING && !(r && r->when_loading)) {
        *message = "loading: the model is not ready yet";
        return 503;
    }
    if (!r || (r->run == api_stall && !a->stall)) {
        *message = "no such call here; POST /v1/prefill computes a prompt";
        return 404;
    }
    if (!takes_method(r, exchange_method(x))) {
        *message = "this call takes another method; see Allow";
        return 405;
    }
    if (needs_key(a, r) && !api_keys_allow(a->keys, exchange_authorization(x))) {
        *message = "a key is needed: Authorization: Bearer KEY";
        return 401;
    }
    if (phase == PHASE_DRAINING && !a->hands_over && strcmp(r->method, "POST") == 0) {
        *message = "draining: this server is about to stop";
        return 503;
    }
    return 0;
}

void api_admit(void *arg, struct exchange *x)
{
    struct api *a = arg;
    const char *message;
    const struct route *r = find_route(exchange_path(x), exchange_method(x));
    int status = refusal(a, x, r, &message);
    if (status == 0)
        return;
    if (status == 405) {
        char methods[64];
        list_methods(exchange_path(x), methods);
        exchange_add_header(x, "Allow", methods);
    }
    if (is_counted(x))
        api_count_refused(a, x, status);
    api_error(a, x, status, NULL, message);
}

enum work_lane api_lane(void *arg, const struct exchange *x)
{
    (void)arg;
    if (strcmp(exchange_method(x), "POST") != 0)
        return WORK_QUICK;
    return exchange_body_len(x) > BULK_BYTES ? WORK_BULK : WORK_REQUEST;
}

void api_handle(void *arg, struct exchange *x)
{
    struct api *a = arg;
    /* There is one: api_admit has looked. */
    const struct route *r = find_route(exchange_path(x), exchange_method(x));
    log_debug("id=%s call=%s", exchange_id(x), r->path);
    if (atomic_load(&a->phase) == PHASE_DRAINING)
        exchange_set_close(x);
    r->run(a, x);
}

void api_refused(void *arg, const struct exchange *x, int status)
{
    if (is_counted(x))
        api_count_refused(arg, x, status);
    else
        log_debug("id=%s status=%d", exchange_id(x), status);
}
