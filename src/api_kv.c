#include "config.h"

#include "api_kv.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "log.h"
#include "random_name.h"

/* ---- where a decode server finds this one ---- */

void api_kv_set_address(struct api *a, const char *addresses)
{
    size_t len = strcspn(addresses, ",");
    random_name(a->engine_id, "e-");
    while (len > 5 && memcmp(addresses, "unix:", 5) == 0) {
        addresses += len + (addresses[len] == ',');
        len = strcspn(addresses, ",");
    }
    const char *colon = memrchr(addresses, ':', len);
    if (!colon || (size_t)(colon - addresses) >= sizeof(a->kv_host))
        return;
    memcpy(a->kv_host, addresses, (size_t)(colon - addresses));
    a->kv_port = atoi(colon + 1);
    if (strcmp(a->kv_host, "0.0.0.0") == 0 || strcmp(a->kv_host, "[::]") == 0)
        gethostname(a->kv_host, sizeof(a->kv_host) - 1);
}

/* ---- what is asked ---- */

int api_kv_read(const struct api *a, const json_t *root, struct kv_terms *kv,
                struct json_error *e)
{
    const json_t *o = json_object_get(root, "kv_transfer_params");
    if (!o || json_is_null(o))
        return 0;
    if (!json_is_object(o))
        return json_fail(e, ERR_INVALID, "kv_transfer_params",
                         "kv_transfer_params is %s; an object is accepted", json_kind(o));
    const char *engine = json_string_value(json_object_get(o, "remote_engine_id"));
    const char *session = json_string_value(json_object_get(o, "session"));
    kv->is_given = true;
    kv->keeps = a->kv_lease_s > 0 && json_is_true(json_object_get(o, "do_remote_decode"));
    if (json_is_true(json_object_get(o, "do_remote_prefill")) && engine && session &&
        strcmp(engine, a->engine_id) == 0 && strlen(session) <= SESSION_ID_MAX)
        memcpy(kv->source, session, strlen(session) + 1);
    return 0;
}

/* r begins at the session where that has the tokens it begins with, and numbers of these are
 * not asked for. */
static void begin_source(struct api *a, const struct kv_terms *kv, struct request *r)
{
    struct session *s;
    struct errmsg why;
    int32_t *ids, n;
    if (sessions_begin(a->sessions, kv->source, true, &s, &ids, &n, &why) != 0) {
        log_info("id=%s event=kv_recomputed why=\"%s\"", r->id, why.text);
        return;
    }
    bool fits = n < r->n_prompt && memcmp(ids, r->ids, (size_t)n * sizeof(*ids)) == 0 &&
                r->logprobs != LOGPROBS_ALL;
    free(ids);
    if (!fits) {
        sessions_end(a->sessions, s, true);
        return;
    }
    r->source = s;
    r->n_source = n;
    r->is_fork = true;
}

int api_kv_bind(struct api *a, const struct kv_terms *kv, struct request *r)
{
    if (kv->source[0])
        begin_source(a, kv, r);
    if (!kv->keeps)
        return 0;
    r->keep_terms = (struct session_terms){.ttl_us = (int64_t)a->kv_lease_s * 1000000};
    r->keeps = sessions_new(r->keep_terms.ttl_us);
    return r->keeps ? 0 : ERR_NOMEM;
}

void api_kv_add(const struct api *a, const struct kv_terms *kv, const struct request *r,
                struct buf *b)
{
    bool is_kept = r && r->kept_as[0];
    if (!kv->is_given)
        return;
    buf_printf(b,
               ", \"kv_transfer_params\": {\"do_remote_prefill\": %s, "
               "\"do_remote_decode\": false, \"remote_engine_id\": \"%s\", "
               "\"remote_block_ids\": [], \"remote_host\": ",
               is_kept ? "true" : "false", a->engine_id);
    if (is_kept && a->kv_host[0]) {
        buf_json_string(b, a->kv_host, strlen(a->kv_host));
        buf_printf(b, ", \"remote_port\": %d", a->kv_port);
    } else {
        buf_adds(b, "null, \"remote_port\": null");
    }
    if (is_kept)
        buf_printf(b, ", \"session\": \"%s\", \"lease_s\": %d", r->kept_as, a->kv_lease_s);
    buf_addc(b, '}');
}
