/* GET /v1/sessions; GET, POST and DELETE /v1/sessions/ID: what is kept under a name. */
#include <stdlib.h>
#include <string.h>

#include "api_priv.h"

enum { MAX_LISTED = 1000 };

void api_add_session(struct buf *b, const struct session_info *i)
{
    buf_adds(b, "{\"id\": ");
    buf_json_string(b, i->id, strlen(i->id));
    buf_printf(b,
               ", \"object\": \"session\", \"created\": %lld, \"tokens\": %d, \"busy\": %s, "
               "\"pinned\": %s, "
               "\"idle_s\": %.3f, \"expires_in_s\": %.3f}",
               (long long)i->created_unix_s, i->n_tokens, i->is_busy ? "true" : "false",
               i->is_pinned ? "true" : "false", (double)i->idle_us / 1e6,
               i->expires_us > 0 ? (double)i->expires_us / 1e6 : 0.0);
}

void api_sessions(struct api *a, struct exchange *x)
{
    struct buf b;
    struct session_info *list = calloc(MAX_LISTED, sizeof(*list));
    if (!list) {
        api_error(a, x, 500, NULL, "memory is short");
        return;
    }
    int32_t n = sessions_list(a->sessions, list, MAX_LISTED);
    buf_init(&b);
    buf_printf(&b, "{\"object\": \"list\", \"total\": %d, \"data\": [", n);
    for (int32_t i = 0; i < n && i < MAX_LISTED; i++) {
        buf_adds(&b, i ? ", " : "");
        api_add_session(&b, &list[i]);
    }
    buf_adds(&b, "]}");
    free(list);
    api_reply(x, 200, &b);
}

static const char *id_of(const struct exchange *x)
{
    return exchange_path(x) + strlen("/v1/sessions/");
}

static bool is_state(const char *path)
{
    size_t len = strlen(path), n = strlen("/state");
    return len > n && strcmp(path + len - n, "/state") == 0;
}

void api_session(struct api *a, struct exchange *x)
{
    struct buf b;
    if (is_state(id_of(x))) {
        api_session_export(a, x);
        return;
    }
    struct errmsg why;
    struct session_info info;
    if (sessions_get(a->sessions, id_of(x), &info, &why) != 0) {
        api_error(a, x, 404, "session", why.text);
        return;
    }
    buf_init(&b);
    api_add_session(&b, &info);
    api_reply(x, 200, &b);
}

/* POST /v1/sessions/ID: its time begins anew. */
void api_session_renew(struct api *a, struct exchange *x)
{
    static const char *const fields[] = {"ttl_s", "pinned", NULL};
    static const struct json_rules rules = {.fields = fields};
    struct session_terms terms = {0};
    struct session_info info;
    struct json_body body;
    struct json_error e;
    struct errmsg why;
    struct buf b;
    int64_t ttl_s = 0;
    int rc = api_read_body(x, &rules, &body, &e);
    if (rc == 0) {
        const json_t *pinned = json_object_get(body.root, "pinned");
        rc = json_get_int(body.root, "ttl_s", 1, SESSION_MAX_TTL_S, &ttl_s, &e);
        if (rc == 0)
            rc = json_get_bool(body.root, "pinned", &terms.is_pinned, &e);
        terms.has_pinning = json_is_boolean(pinned);
        terms.ttl_us = ttl_s * 1000000;
        json_fini(&body);
    }
    if (rc != 0) {
        api_bad_body(a, x, rc, &e);
        return;
    }
    if (sessions_renew(a->sessions, id_of(x), &terms, &info, &why) != 0) {
        api_error(a, x, 404, "session", why.text);
        return;
    }
    queue_wake(a->queue); /* it may expire earlier than before */
    buf_init(&b);
    api_add_session(&b, &info);
    api_reply(x, 200, &b);
}

void api_session_delete(struct api *a, struct exchange *x)
{
    struct buf b;
    struct errmsg why;
    const char *id = id_of(x);
    if (sessions_delete(a->sessions, id, &why) != 0) {
        api_error(a, x, 404, "session", why.text);
        return;
    }
    queue_wake(a->queue);
    buf_init(&b);
    buf_adds(&b, "{\"id\": ");
    buf_json_string(&b, id, strlen(id));
    buf_adds(&b, ", \"object\": \"session\", \"deleted\": true}");
    api_reply(x, 200, &b);
}
