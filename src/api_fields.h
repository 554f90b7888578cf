/* What the bodies of several calls have in common: fields read by name, prompts, and how tokens
 * are chosen. Workers; pure but for exchange_set_id. */
#ifndef PREFILLD_API_FIELDS_H
#define PREFILLD_API_FIELDS_H

#include "api_priv.h"
#include "request.h"

enum {
    MAX_DEADLINE_MS = 86400000,
    MAX_PRIORITY = SCHED_MAX_PRIORITY,
    MAX_STOPS = 32,      /* strings */
    MAX_STOP_BYTES = 256 /* of each */
};

/* An optional number; null is the same as absent. As json_get_int. */
int api_get_number(const json_t *root, const char *field, double min, double max, double *out,
                   struct json_error *e);
/* Fails when one of fields (NULL at its end) asks for something: is given and neither null,
 * false nor empty. */
int api_refuse_fields(const json_t *root, const char *const *fields, struct json_error *e);
/* `request_id`: becomes the exchange's. Before the other fields, so that refusals carry it. */
int api_read_request_id(struct exchange *x, const json_t *root, struct json_error *e);

/* request_id, model, priority, deadline_ms, cache_salt. */
enum { API_MAX_SALT = 256 };
struct api_common {
    int64_t priority, deadline_ms; /* deadline_ms 0: none */
    char salt[API_MAX_SALT];       /* [salt_len], any bytes */
    size_t salt_len;               /* 0: none */
};
int api_read_common(const struct api *a, struct exchange *x, const json_t *root,
                    struct api_common *c, struct json_error *e);

/* ---- prompts */

struct prompt {
    int32_t *ids; /* [n_ids], owned */
    int32_t n_ids;
};

/* How a prompt is made of what the field holds. */
struct prompt_rules {
    const char *field;
    int32_t max_ids;  /* more are refused, unless truncated */
    int32_t truncate; /* keep so many ids; 0: all */
    bool from_left;   /* what is dropped is at the start */
    bool only_one;    /* a list of strings or of lists is refused */
};

/* The ids of a text; field is what messages call it. ERR_INVALID, ERR_TOO_LARGE, ERR_NOMEM. */
int api_encode(const struct api *a, const char *field, const char *text, size_t len,
               int32_t max_ids, struct prompt *out, struct json_error *e);
/* A string, a list of strings, ids or a list of lists of ids under r->field, which is body's
 * list of ids when that was one. *out ([*n], each not empty) is freed with prompts_free, also
 * after an error. */
int api_read_prompts(const struct api *a, struct json_body *body, const struct prompt_rules *r,
                     struct prompt **out, int32_t *n, struct json_error *e);
/* A string or a list of ids read by jansson: for lists that are not the body's large one. name
 * is what messages call it, field its top-level field. */
int api_read_text_or_ids(const struct api *a, const json_t *v, const char *field,
                         const char *name, struct prompt *out, struct json_error *e);
void prompts_free(struct prompt *p, int32_t n);

/* ---- how tokens are chosen and where they end */

struct stop_text {
    char *text; /* owned, NUL behind it */
    size_t len;
};

struct choosing {
    struct sampling sampling; /* without bias, which is below; max_new as asked, -1: not */
    struct token_bias *bias;  /* [n_bias], owned; each request gets a copy */
    int32_t n_bias;
    struct stop_text stops[MAX_STOPS];
    int32_t n_stops;
    bool skips_special;    /* special tokens are not in the text */
    bool with_stop;        /* the stop string is in the text */
    int32_t stop_ids_from; /* in sampling.stop_ids: before are the model's own end tokens */
    int32_t labels[LABELS_MAX]; /* ids whose numbers are wanted beside each token */
    int32_t n_labels;
};

/* The fields that all calls that generate have under the same names: temperature to stop. Their
 * names, NULL at the end, for json_rules: */
extern const char *const api_choosing_fields[];
int api_read_choosing(const struct api *a, const json_t *root, struct choosing *c,
                      struct json_error *e);
void choosing_fini(struct choosing *c);
/* `logprob_token_ids`: c->labels. After api_read_choosing. */
int api_read_labels(const struct api *a, const json_t *root, struct choosing *c,
                    struct json_error *e);

/* Names of three lists (NULL at each one's end) in one, for json_rules. */
enum { API_MAX_FIELDS = 96 };
void api_join_fields(const char *out[API_MAX_FIELDS], const char *const *a,
                     const char *const *b, const char *const *c);

#endif
