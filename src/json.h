/* JSON request bodies: one list of ids, or a list of such lists, by a scanner of our own, the
 * rest by jansson.
 *
 * Pure; worker threads. A prompt of 262,144 ids takes jansson 40 ms and 10 MB, a scanner 2 ms
 * and 1 MB: so the list under one top-level key is read by the scanner and cut out of the text
 * that jansson sees. The text is valid with the list exactly if it is valid with `null` in its
 * place, so nothing gets past jansson: syntax, UTF-8, lone surrogates, overflow, depth, keys
 * given twice (also by escapes). NUL in strings is text. Messages name fields and places, never
 * the input. */
#ifndef PREFILLD_JSON_H
#define PREFILLD_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum {
    JSON_FIELD_MAX = 64,
    JSON_MAX_VALUES =
        100000 /* beside the list of ids: jansson takes up to 230 bytes for each */
};

/* What a body may hold. */
struct json_rules {
    const char *const *fields; /* names that messages may say, NULL at the end */
    const char *ids_field;     /* the field whose list is read by the scanner; may be NULL */
    int32_t vocab;             /* ids are in [0, vocab) */
    int32_t max_ids;           /* more are refused; the message has both numbers */
    bool takes_lists; /* ids_field may also be a list of lists of ids, none of them empty, or of
                         strings: those are left to jansson */
};

struct json_body {
    json_t *root; /* an object; ids_field is null in it when has_ids */
    bool has_ids;
    int32_t *ids; /* [n_ids], owned; NULL when n_ids is 0 */
    int32_t n_ids;
    int32_t
        *list_ends; /* [n_lists], owned: where in ids each list ends; NULL: one plain list */
    int32_t n_lists;
};

struct json_error {
    char field[JSON_FIELD_MAX]; /* the top-level field at fault, or "" */
    struct errmsg message;
};

/* Returns 0, ERR_INVALID, ERR_TOO_LARGE (ids) or ERR_NOMEM, these with e filled. json_fini
 * after success. */
int json_parse(const char *text, size_t len, const struct json_rules *rules,
               struct json_body *out, struct json_error *e);
void json_fini(struct json_body *b);
/* The string under a top-level field of a text that json_parse refused, as far as it can be
 * told: for what a refusal has to carry. A new reference, or NULL. */
json_t *json_peek(const char *text, size_t len, const char *field);

/* "a string", "a list", "a number with a fraction", ... for messages. NULL: "nothing". */
const char *json_kind(const json_t *value);

/* Optional fields; null is the same as absent. Return 0, with *out left alone when absent, or
 * ERR_INVALID with e filled. */
int json_get_int(const json_t *object, const char *field, int64_t min, int64_t max,
                 int64_t *out, struct json_error *e);
int json_get_bool(const json_t *object, const char *field, bool *out, struct json_error *e);
/* *out is borrowed from object. Length in *len; may hold NUL. */
int json_get_string(const json_t *object, const char *field, const char **out, size_t *len,
                    struct json_error *e);

/* Fills e and returns code. */
int json_fail(struct json_error *e, int code, const char *field, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

#endif
