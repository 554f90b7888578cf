#include "api_fields.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum {
    /* A text that is too long is counted to its end, so that the refusal can say how long it
     * is, unless it has more bytes than these and these for each accepted token (prose has
     * 4). */
    COUNT_BYTES = 1 << 20,
    COUNT_BYTES_A_TOKEN = 16
};

/* ---- single fields ---- */

static const json_t *get(const json_t *root, const char *field)
{
    const json_t *v = json_object_get(root, field);
    return json_is_null(v) ? NULL : v;
}

int api_get_number(const json_t *root, const char *field, double min, double max, double *out,
                   struct json_error *e)
{
    const json_t *v = get(root, field);
    if (!v)
        return 0;
    if (!json_is_number(v))
        return json_fail(e, ERR_INVALID, field, "%s is %s; a number from %g to %g is accepted",
                         field, json_kind(v), min, max);
    double n = json_number_value(v);
    if (!(n >= min && n <= max))
        return json_fail(e, ERR_INVALID, field,
                         "%s is out of range; a number from %g to %g is accepted", field, min,
                         max);
    *out = n;
    return 0;
}

/* Clients send fields that they do not use as null, false or empty. But no token would be
 * allowed by an empty list of those that are. */
static bool asks_for_nothing(const json_t *v, const char *field)
{
    bool is_empty = (json_is_array(v) && json_array_size(v) == 0) ||
                    (json_is_object(v) && json_object_size(v) == 0);
    return !v || json_is_false(v) || (is_empty && strcmp(field, "allowed_token_ids") != 0);
}

int api_refuse_fields(const json_t *root, const char *const *fields, struct json_error *e)
{
    for (; *fields; fields++) {
        const json_t *v = get(root, *fields);
        if (!asks_for_nothing(v, *fields))
            return json_fail(e, ERR_INVALID, *fields,
                             "%s is %s; this version does not serve it, only its absence is "
                             "accepted",
                             *fields, json_kind(v));
    }
    return 0;
}

int api_read_request_id(struct exchange *x, const json_t *root, struct json_error *e)
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

static int read_salt(const json_t *root, struct api_common *c, struct json_error *e)
{
    const char *salt = NULL;
    size_t len = 0;
    int rc = json_get_string(root, "cache_salt", &salt, &len, e);
    if (rc != 0 || !salt)
        return rc;
    if (len < 1 || len > API_MAX_SALT)
        return json_fail(e, ERR_INVALID, "cache_salt",
                         "cache_salt has %zu bytes; 1 to %d are accepted", len, API_MAX_SALT);
    memcpy(c->salt, salt, len);
    c->salt_len = len;
    return 0;
}

int api_read_common(const struct api *a, struct exchange *x, const json_t *root,
                    struct api_common *c, struct json_error *e)
{
    *c = (struct api_common){0};
    int rc = api_read_request_id(x, root, e);
    if (rc == 0)
        rc = api_check_model(a, root, e);
    if (rc == 0)
        rc = json_get_int(root, "priority", -MAX_PRIORITY, MAX_PRIORITY, &c->priority, e);
    if (rc == 0)
        rc = json_get_int(root, "deadline_ms", 1, MAX_DEADLINE_MS, &c->deadline_ms, e);
    return rc ? rc : read_salt(root, c, e);
}

void api_join_fields(const char *out[API_MAX_FIELDS], const char *const *a,
                     const char *const *b, const char *const *c)
{
    const char *const *const lists[] = {a, b, c};
    int n = 0;
    for (int i = 0; i < 3; i++)
        for (const char *const *field = lists[i]; *field && n + 1 < API_MAX_FIELDS; field++)
            out[n++] = *field;
    out[n] = NULL;
}

/* ---- prompts ---- */

static int fail_long_text(const struct api *a, const char *field, const char *text, size_t len,
                          int32_t max_ids, struct json_error *e)
{
    int32_t *ids = NULL, n_ids = 0;
    size_t max_bytes = COUNT_BYTES + COUNT_BYTES_A_TOKEN * (size_t)max_ids;
    bool is_counted = len <= max_bytes &&
                      tokenizer_encode(a->tokenizer, text, len, 0, &ids, &n_ids, NULL) == 0;
    free(ids);
    if (is_counted)
        return json_fail(e, ERR_TOO_LARGE, field, "%s has %d tokens; at most %d are accepted",
                         field, n_ids, max_ids);
    return json_fail(e, ERR_TOO_LARGE, field,
                     "%s has %zu bytes of text and more than %d tokens; at most %d are "
                     "accepted",
                     field, len, max_ids, max_ids);
}

int api_encode(const struct api *a, const char *field, const char *text, size_t len,
               int32_t max_ids, struct prompt *out, struct json_error *e)
{
    struct errmsg why;
    *out = (struct prompt){0};
    if (!a->tokenizer)
        return json_fail(
            e, ERR_INVALID, field,
            "%s is a string, but the model has no tokenizer.json; a list of ids is accepted",
            field);
    int rc = tokenizer_encode(a->tokenizer, text, len, max_ids, &out->ids, &out->n_ids, &why);
    if (rc == ERR_TOO_LARGE)
        return fail_long_text(a, field, text, len, max_ids, e);
    if (rc != 0)
        return json_fail(e, rc, field, "%s: %s", field, why.text);
    return 0;
}

void prompts_free(struct prompt *p, int32_t n)
{
    for (int32_t i = 0; p && i < n; i++)
        free(p[i].ids);
    free(p);
}

/* Keeps what is asked for, and refuses what is still too long. name: prompt, or prompt[3]. */
static int fit_prompt(struct prompt *p, const struct prompt_rules *r, const char *name,
                      struct json_error *e)
{
    if (r->truncate > 0 && p->n_ids > r->truncate) {
        if (r->from_left)
            memmove(p->ids, p->ids + p->n_ids - r->truncate,
                    (size_t)r->truncate * sizeof(*p->ids));
        p->n_ids = r->truncate;
    }
    if (p->n_ids == 0)
        return json_fail(e, ERR_INVALID, r->field, "%s is empty; at least one token is needed",
                         name);
    if (p->n_ids > r->max_ids)
        return json_fail(e, ERR_TOO_LARGE, r->field,
                         "%s has %d tokens; at most %d are accepted", name, p->n_ids,
                         r->max_ids);
    return 0;
}

static int take_text(const struct api *a, const json_t *v, const struct prompt_rules *r,
                     const char *name, struct prompt *out, struct json_error *e)
{
    if (!json_is_string(v))
        return json_fail(e, ERR_INVALID, r->field,
                         "%s is %s; beside strings only such are accepted", name, json_kind(v));
    int rc = api_encode(a, name, json_string_value(v), json_string_length(v),
                        r->truncate ? 0 : r->max_ids, out, e);
    if (rc != 0)
        snprintf(e->field, sizeof(e->field), "%s", r->field);
    return rc ? rc : fit_prompt(out, r, name, e);
}

static int take_id_lists(struct json_body *body, const struct prompt_rules *r,
                         struct prompt *out, struct json_error *e)
{
    char name[JSON_FIELD_MAX + 16];
    for (int32_t i = 0; i < body->n_lists; i++) {
        int32_t from = i ? body->list_ends[i - 1] : 0;
        int32_t n_ids = body->list_ends[i] - from;
        out[i].ids = malloc((size_t)n_ids * sizeof(*out[i].ids));
        if (!out[i].ids)
            return json_fail(e, ERR_NOMEM, NULL, "memory is short");
        memcpy(out[i].ids, body->ids + from, (size_t)n_ids * sizeof(*out[i].ids));
        out[i].n_ids = n_ids;
        snprintf(name, sizeof(name), "%s[%d]", r->field, i);
        int rc = fit_prompt(&out[i], r, name, e);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int take_texts(const struct api *a, const json_t *v, const struct prompt_rules *r,
                      struct prompt *out, int32_t n, struct json_error *e)
{
    char name[JSON_FIELD_MAX + 16];
    int rc = 0;
    for (int32_t i = 0; i < n && rc == 0; i++) {
        snprintf(name, sizeof(name), "%s[%d]", r->field, i);
        rc = take_text(a, json_array_get(v, (size_t)i), r, name, &out[i], e);
    }
    return rc;
}

int api_read_prompts(const struct api *a, struct json_body *body, const struct prompt_rules *r,
                     struct prompt **out, int32_t *n, struct json_error *e)
{
    const json_t *v = get(body->root, r->field);
    size_t n_all = body->list_ends    ? (size_t)body->n_lists
                   : json_is_array(v) ? json_array_size(v)
                                      : 1;
    bool is_list = body->list_ends || json_is_array(v);
    *out = NULL;
    *n = 0;
    const char *kind = v                                       ? json_kind(v)
                       : json_object_get(body->root, r->field) ? "null"
                                                               : "missing";
    if (!body->has_ids && !json_is_string(v) && !json_is_array(v))
        return json_fail(e, ERR_INVALID, r->field,
                         r->only_one ? "%s is %s; a string or a list of ids is accepted"
                                     : "%s is %s; a string, a list of strings or of ids, or a "
                                       "list of lists of ids is accepted",
                         r->field, kind);
    if (is_list && r->only_one)
        return json_fail(e, ERR_INVALID, r->field,
                         "%s is a list of prompts; a string or a list of ids is accepted",
                         r->field);
    if (n_all == 0)
        return json_fail(e, ERR_INVALID, r->field, "%s is empty; at least one token is needed",
                         r->field);
    if (n_all > (size_t)queue_max_waiting(a->queue))
        return json_fail(e, ERR_INVALID, r->field,
                         "%s has %zu prompts; at most %d, which is queue-length, are accepted",
                         r->field, n_all, queue_max_waiting(a->queue));
    *out = calloc(n_all, sizeof(**out));
    if (!*out)
        return json_fail(e, ERR_NOMEM, NULL, "memory is short");
    *n = (int32_t)n_all;
    if (body->list_ends)
        return take_id_lists(body, r, *out, e);
    if (is_list)
        return take_texts(a, v, r, *out, *n, e);
    if (!body->has_ids)
        return take_text(a, v, r, r->field, *out, e);
    (*out)[0] = (struct prompt){body->ids, body->n_ids};
    body->ids = NULL;
    return fit_prompt(&(*out)[0], r, r->field, e);
}

int api_read_text_or_ids(const struct api *a, const json_t *v, const char *field,
                         const char *name, struct prompt *out, struct json_error *e)
{
    *out = (struct prompt){0};
    if (json_is_string(v)) {
        int rc = api_encode(a, name, json_string_value(v), json_string_length(v),
                            a->max_prompt_tokens, out, e);
        if (rc != 0)
            snprintf(e->field, sizeof(e->field), "%s", field);
        return rc;
    }
    if (!json_is_array(v))
        return json_fail(e, ERR_INVALID, field,
                         "%s is %s; a string or a list of ids is accepted", name, json_kind(v));
    size_t n = json_array_size(v);
    out->ids = malloc((n ? n : 1) * sizeof(*out->ids));
    if (!out->ids)
        return json_fail(e, ERR_NOMEM, NULL, "memory is short");
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(v, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= a->vocab)
            return json_fail(e, ERR_INVALID, field,
                             "%s[%zu] is %s; ids are integers in [0, %d)", name, i,
                             json_is_integer(id) ? "out of range" : json_kind(id), a->vocab);
        out->ids[i] = (int32_t)json_integer_value(id);
    }
    out->n_ids = (int32_t)n;
    return 0;
}

/* ---- how tokens are chosen ---- */

const char *const api_choosing_fields[] = {"temperature",
                                           "top_p",
                                           "top_k",
                                           "min_p",
                                           "presence_penalty",
                                           "frequency_penalty",
                                           "repetition_penalty",
                                           "seed",
                                           "logit_bias",
                                           "stop",
                                           "stop_token_ids",
                                           "ignore_eos",
                                           "min_tokens",
                                           "skip_special_tokens",
                                           "include_stop_str_in_output",
                                           NULL};

static int read_numbers(const json_t *root, struct sampling *s, struct json_error *e)
{
    double temperature = 1, top_p = 1, min_p = 0, presence = 0, frequency = 0, repetition = 1;
    int64_t top_k = 0, min_new = 0;
    int rc = api_get_number(root, "temperature", 0, 100, &temperature, e);
    if (rc == 0)
        rc = api_get_number(root, "top_p", 0, 1, &top_p, e);
    if (rc == 0 && top_p == 0)
        rc = json_fail(e, ERR_INVALID, "top_p",
                       "top_p is 0; a number above 0 and up to 1 is accepted");
    if (rc == 0)
        rc = json_get_int(root, "top_k", -1, INT32_MAX, &top_k, e);
    if (rc == 0)
        rc = api_get_number(root, "min_p", 0, 1, &min_p, e);
    if (rc == 0)
        rc = api_get_number(root, "presence_penalty", -2, 2, &presence, e);
    if (rc == 0)
        rc = api_get_number(root, "frequency_penalty", -2, 2, &frequency, e);
    if (rc == 0)
        rc = api_get_number(root, "repetition_penalty", 1e-2, 100, &repetition, e);
    if (rc == 0)
        rc = json_get_int(root, "min_tokens", 0, INT32_MAX, &min_new, e);
    s->temperature = (float)temperature;
    s->top_p = (float)top_p;
    s->top_k = top_k > 0 ? (int32_t)top_k : 0;
    s->min_p = (float)min_p;
    s->presence_penalty = (float)presence;
    s->frequency_penalty = (float)frequency;
    s->repetition_penalty = (float)repetition;
    s->min_new = (int32_t)min_new;
    return rc;
}

/* Without one, each request is another throw. */
static int read_seed(const json_t *root, uint64_t *seed, struct json_error *e)
{
    int64_t given = 0;
    if (!get(root, "seed")) {
        if (getrandom(seed, sizeof(*seed), 0) != (ssize_t)sizeof(*seed))
            return json_fail(e, ERR_IO, "seed", "seed: no random number to be had; give one");
        return 0;
    }
    int rc = json_get_int(root, "seed", INT64_MIN, INT64_MAX, &given, e);
    *seed = (uint64_t)given;
    return rc;
}

/* {"id": bias}, as OpenAI has it. */
static int read_bias(const struct api *a, const json_t *root, struct choosing *c,
                     struct json_error *e)
{
    const json_t *v = get(root, "logit_bias");
    if (!v)
        return 0;
    if (!json_is_object(v))
        return json_fail(e, ERR_INVALID, "logit_bias",
                         "logit_bias is %s; an object of ids and numbers is accepted",
                         json_kind(v));
    size_t n = json_object_size(v);
    c->bias = malloc((n ? n : 1) * sizeof(*c->bias));
    if (!c->bias)
        return json_fail(e, ERR_NOMEM, NULL, "memory is short");
    for (void *i = json_object_iter((json_t *)v); i;
         i = json_object_iter_next((json_t *)v, i)) {
        char *end;
        const char *key = json_object_iter_key(i);
        const json_t *bias = json_object_iter_value(i);
        long id = strtol(key, &end, 10);
        if (*key < '0' || *key > '9' || *end || id >= a->vocab)
            return json_fail(e, ERR_INVALID, "logit_bias",
                             "logit_bias: a name in it is no id in [0, %d)", a->vocab);
        if (!json_is_number(bias) || fabs(json_number_value(bias)) > 100)
            return json_fail(e, ERR_INVALID, "logit_bias",
                             "logit_bias: the value of %ld is %s; a number from -100 to 100 "
                             "is accepted",
                             id, json_is_number(bias) ? "out of range" : json_kind(bias));
        c->bias[c->n_bias++] = (struct token_bias){(int32_t)id, (float)json_number_value(bias)};
    }
    return 0;
}

static int add_stop(struct choosing *c, const json_t *v, struct json_error *e)
{
    if (!json_is_string(v))
        return json_fail(e, ERR_INVALID, "stop",
                         "stop is or holds %s; a string or a list of strings is accepted",
                         json_kind(v));
    size_t len = json_string_length(v);
    if (len == 0 || len > MAX_STOP_BYTES)
        return json_fail(e, ERR_INVALID, "stop",
                         "stop has a string of %zu bytes; 1 to %d bytes are accepted", len,
                         MAX_STOP_BYTES);
    struct stop_text *s = &c->stops[c->n_stops];
    s->text = malloc(len + 1);
    if (!s->text)
        return json_fail(e, ERR_NOMEM, NULL, "memory is short");
    memcpy(s->text, json_string_value(v), len);
    s->text[len] = '\0';
    s->len = len;
    c->n_stops++;
    return 0;
}

static int read_stops(const struct api *a, const json_t *root, struct choosing *c,
                      struct json_error *e)
{
    const json_t *v = get(root, "stop");
    if (!v)
        return 0;
    if (!a->tokenizer)
        return json_fail(e, ERR_INVALID, "stop",
                         "stop: the model has no tokenizer.json, so there is no text");
    if (!json_is_array(v))
        return add_stop(c, v, e);
    if (json_array_size(v) > MAX_STOPS)
        return json_fail(e, ERR_INVALID, "stop",
                         "stop has %zu strings; at most %d are accepted", json_array_size(v),
                         MAX_STOPS);
    int rc = 0;
    for (size_t i = 0; i < json_array_size(v) && rc == 0; i++)
        rc = add_stop(c, json_array_get(v, i), e);
    return rc;
}

static int read_stop_ids(const struct api *a, const json_t *root, struct choosing *c,
                         struct json_error *e)
{
    struct sampling *s = &c->sampling;
    const int32_t max = SAMPLING_MAX_STOPS - 1; /* one is a chat's */
    const json_t *v = get(root, "stop_token_ids");
    bool ignores_end = false;
    int rc = json_get_bool(root, "ignore_eos", &ignores_end, e);
    if (rc != 0)
        return rc;
    if (a->tokenizer && !ignores_end) {
        const struct tokenizer_info *info = tokenizer_get_info(a->tokenizer);
        for (int32_t i = 0; i < info->n_end_ids; i++)
            s->stop_ids[s->n_stop++] = info->end_ids[i];
    }
    c->stop_ids_from = s->n_stop;
    if (!v)
        return 0;
    struct prompt ids;
    if (!json_is_array(v))
        return json_fail(e, ERR_INVALID, "stop_token_ids",
                         "stop_token_ids is %s; a list of ids is accepted", json_kind(v));
    rc = api_read_text_or_ids(a, v, "stop_token_ids", "stop_token_ids", &ids, e);
    if (rc == 0 && ids.n_ids > max - s->n_stop)
        rc = json_fail(e, ERR_INVALID, "stop_token_ids",
                       "stop_token_ids has %d ids; at most %d are accepted beside the model's "
                       "own end tokens",
                       ids.n_ids, max - s->n_stop);
    for (int32_t i = 0; rc == 0 && i < ids.n_ids; i++)
        s->stop_ids[s->n_stop++] = ids.ids[i];
    free(ids.ids);
    return rc;
}

int api_read_choosing(const struct api *a, const json_t *root, struct choosing *c,
                      struct json_error *e)
{
    memset(c, 0, sizeof(*c));
    c->skips_special = true;
    c->sampling.max_new = -1;
    int rc = read_numbers(root, &c->sampling, e);
    if (rc == 0)
        rc = read_seed(root, &c->sampling.seed, e);
    if (rc == 0)
        rc = read_bias(a, root, c, e);
    if (rc == 0)
        rc = read_stops(a, root, c, e);
    if (rc == 0)
        rc = read_stop_ids(a, root, c, e);
    if (rc == 0)
        rc = json_get_bool(root, "skip_special_tokens", &c->skips_special, e);
    if (rc == 0)
        rc = json_get_bool(root, "include_stop_str_in_output", &c->with_stop, e);
    return rc;
}

int api_read_labels(const struct api *a, const json_t *root, struct choosing *c,
                    struct json_error *e)
{
    static const char field[] = "logprob_token_ids";
    const json_t *v = get(root, field);
    struct prompt ids;
    if (!v)
        return 0;
    size_t n = json_array_size(v);
    if (!json_is_array(v) || n < 1 || n > LABELS_MAX)
        return json_fail(e, ERR_INVALID, field, "%s is %s%s; a list of 1 to %d ids is accepted",
                         field, json_kind(v), json_is_array(v) ? " of another length" : "",
                         LABELS_MAX);
    int rc = api_read_text_or_ids(a, v, field, field, &ids, e);
    for (int32_t i = 0; rc == 0 && i < ids.n_ids; i++) {
        int32_t j = 0;
        while (j < c->n_labels && c->labels[j] != ids.ids[i])
            j++;
        if (j == c->n_labels)
            c->labels[c->n_labels++] = ids.ids[i];
    }
    free(ids.ids);
    return rc;
}

void choosing_fini(struct choosing *c)
{
    for (int32_t i = 0; i < c->n_stops; i++)
        free(c->stops[i].text);
    free(c->bias);
    c->n_stops = 0;
    c->bias = NULL;
}
