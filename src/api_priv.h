/* Inside of api*.c: the table of calls, answers, and what bodies have in common.
 *
 * Handlers run on workers. Each ends in exactly one api_reply or api_error, or hands the
 * exchange to the engine, whose done() leads to one. */
#ifndef PREFILLD_API_PRIV_H
#define PREFILLD_API_PRIV_H

#include "api.h"
#include "json.h"

/* ---- api.c: answers ---- */

/* Takes the bytes of body. */
void api_reply(struct exchange *x, int status, struct buf *body);
/* param and message as in api_error_write. 503 and 429 get Retry-After, 401
 * WWW-Authenticate. */
void api_error(struct api *a, struct exchange *x, int status, const char *param,
               const char *message);
/* The status for an error of reading a body: 400, 404, 409 (ERR_FULL) or 500. */
int api_status_of(int rc);
/* The answer to a body that was refused with rc and e. */
void api_bad_body(struct api *a, struct exchange *x, int rc, const struct json_error *e);
/* Seconds until the backlog is computed. */
int32_t api_retry_after_s(const struct api *a);

/* Reads x's body, as json_parse. Sends X-Prefilld-Ignored for fields that are not in rules. */
int api_read_body(struct exchange *x, const struct json_rules *rules, struct json_body *body,
                  struct json_error *e);
/* Is the field `model`, when given, the one that is served? Else ERR_NOT_FOUND. */
int api_check_model(const struct api *a, const json_t *root, struct json_error *e);

/* ---- the calls ---- */
void api_prefill(struct api *a, struct exchange *x);     /* api_prefill.c */
void api_completions(struct api *a, struct exchange *x); /* api_completions.c */
void api_score(struct api *a, struct exchange *x);       /* api_score.c */
void api_generative_scoring(struct api *a, struct exchange *x);
void api_rerank(struct api *a, struct exchange *x);
void api_chat(struct api *a, struct exchange *x);     /* api_chat.c */
void api_generate(struct api *a, struct exchange *x); /* api_generate.c */
void api_tokenize(struct api *a, struct exchange *x); /* api_tokenize.c */
void api_detokenize(struct api *a, struct exchange *x);
void api_tokenizer_info(struct api *a, struct exchange *x);
void api_health(struct api *a, struct exchange *x); /* api_misc.c */
void api_ready(struct api *a, struct exchange *x);
void api_version(struct api *a, struct exchange *x);
void api_models(struct api *a, struct exchange *x);
void api_model(struct api *a, struct exchange *x);
void api_metrics(struct api *a, struct exchange *x);
void api_page(struct api *a, struct exchange *x);
void api_trace(struct api *a, struct exchange *x);
void api_stall(struct api *a, struct exchange *x);
void api_steps(struct api *a, struct exchange *x);    /* api_steps.c */
void api_sessions(struct api *a, struct exchange *x); /* api_sessions.c */
void api_session(struct api *a, struct exchange *x);
void api_session_renew(struct api *a, struct exchange *x);
void api_session_delete(struct api *a, struct exchange *x);
void api_session_export(struct api *a, struct exchange *x); /* api_export.c */
void api_session_import(struct api *a, struct exchange *x); /* api_import.c */

/* The object that stands for a session (api_sessions.c). */
void api_add_session(struct buf *b, const struct session_info *i);

#endif
