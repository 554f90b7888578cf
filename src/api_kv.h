/* kv_transfer_params, as proxies of disaggregated servers hand it from a prefill server to a
 * decode server: with do_remote_decode the prompt's end is kept as a session for a lease, and
 * the answer names it; with do_remote_prefill, and a name that is ours, the prompt begins at
 * that session.
 *
 * A handle that cannot be used is no error: the prompt is computed. Its caller would hand a
 * refusal on to its client, and the numbers are the same. Workers. */
#ifndef PREFILLD_API_KV_H
#define PREFILLD_API_KV_H

#include "api_fields.h"

/* What a body asks for. */
struct kv_terms {
    bool is_given;                   /* an object: the answer has one, too */
    bool keeps;                      /* do_remote_decode */
    char source[SESSION_ID_MAX + 1]; /* of do_remote_prefill; "": none that is ours */
};

/* Returns 0 or ERR_INVALID with e filled. */
int api_kv_read(const struct api *a, const json_t *root, struct kv_terms *kv,
                struct json_error *e);
/* Gives r, the only request of its call, not queued, its sessions. Returns 0 or ERR_NOMEM. */
int api_kv_bind(struct api *a, const struct kv_terms *kv, struct request *r);
/* The answer's member, with a comma before it; r NULL: the call had several requests. */
void api_kv_add(const struct api *a, const struct kv_terms *kv, const struct request *r,
                struct buf *b);
/* What handles say of this daemon: addresses as http_addresses gives them. Main thread. */
void api_kv_set_address(struct api *a, const char *addresses);

#endif
