#include "json.h"

#include <endian.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buf.h"

static const char placeholder[] = "null";

int json_fail(struct json_error *e, int code, const char *field, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->message.text, sizeof(e->message.text), fmt, ap);
    va_end(ap);
    snprintf(e->field, sizeof(e->field), "%s", field ? field : "");
    return code;
}

/* ---- the top-level keys of an object, without understanding what is in it ---- */

struct cursor {
    const char *p, *end;
    int64_t depth;
    int64_t n_values;          /* about: what starts a list, an object or another value */
    char full[JSON_FIELD_MAX]; /* the key under which they got too many */
    const char *key_at;        /* the key's opening quote */
    char key[JSON_FIELD_MAX];  /* decoded; "" when it is longer or not ASCII */
};

static const char *skip_blanks(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t'))
        p++;
    return p;
}

/* p is behind the opening quote; returns the closing quote, or end. */
static const char *find_quote(const char *p, const char *end)
{
    while (p < end && *p != '"')
        p += *p == '\\' ? 2 : 1;
    return p < end ? p : end;
}

static int hex4(const char *p, const char *end)
{
    int value = 0;
    if (end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* Field names are ASCII, but may come with escapes. */
static void decode_key(const char *p, const char *end, char *key)
{
    size_t n = 0;
    for (; p < end; p++) {
        int c = (unsigned char)*p;
        if (c == '\\' && ++p < end) {
            c = *p == 'u' ? hex4(p + 1, end) : *p == '/' ? '/' : -1;
            p += *p == 'u' ? 4 : 0;
        }
        if (c < 0x20 || c > 0x7e || n + 1 >= JSON_FIELD_MAX) {
            n = 0;
            break;
        }
        key[n++] = (char)c;
    }
    key[n] = '\0';
}

static void cursor_init(struct cursor *c, const char *text, size_t len)
{
    memset(c, 0, sizeof(*c));
    c->p = text;
    c->end = text + len;
}

/* Moves to the next top-level key, behind its colon. Garbage in, garbage out: whatever is not
 * JSON is found by jansson afterwards. */
static bool cursor_next(struct cursor *c)
{
    while (c->p < c->end) {
        char ch = *c->p++;
        c->n_values += ch == ',' || ch == '{' || ch == '[';
        if (c->n_values == JSON_MAX_VALUES + 1)
            memcpy(c->full, c->key, sizeof(c->full));
        if (ch == '{' || ch == '[') {
            c->depth++;
        } else if (ch == '}' || ch == ']') {
            if (--c->depth <= 0)
                c->p = c->end; /* what follows is no part of it; jansson says so */
        } else if (ch == '"') {
            const char *open = c->p;
            const char *close = find_quote(open, c->end);
            c->p = close < c->end ? close + 1 : c->end;
            const char *colon = skip_blanks(c->p, c->end);
            if (c->depth != 1 || colon >= c->end || *colon != ':')
                continue;
            c->p = colon + 1;
            c->key_at = open - 1;
            decode_key(open, close, c->key);
            return true;
        }
    }
    return false;
}

/* ---- the list of ids ---- */

struct id_list {
    int32_t *ids;
    int64_t n_seen; /* also those past the limit, which are not stored */
    int32_t cap;
    int64_t list_start; /* n_seen where the list that is being read began */
    int32_t *list_ends; /* [n_lists]; NULL: a plain list */
    int32_t n_lists, lists_cap;
    bool is_nested;
};

static int id_list_grow(struct id_list *l, int32_t max_ids)
{
    int64_t cap = l->cap ? 4 * (int64_t)l->cap : 1024;
    if (cap > max_ids)
        cap = max_ids;
    int32_t *p = realloc(l->ids, (size_t)cap * sizeof(*p));
    if (!p)
        return ERR_NOMEM;
    l->ids = p;
    l->cap = (int32_t)cap;
    return 0;
}

/* What stands at p, where an id should. */
static const char *kind_at(const char *p, const char *end)
{
    switch (p < end ? *p : '\0') {
    case '"':
        return "a string";
    case '[':
        return "a list";
    case '{':
        return "an object";
    case 't':
    case 'f':
        return "a boolean";
    case 'n':
        return "null";
    case '-':
        return "negative";
    default:
        return "not JSON";
    }
}

/* The list that is being read, as messages call it: prompt, or prompt[3]. */
static const char *list_name(const struct json_rules *r, const struct id_list *l,
                             char text[JSON_FIELD_MAX + 16])
{
    snprintf(text, JSON_FIELD_MAX + 16, l->is_nested ? "%s[%d]" : "%s", r->ids_field,
             l->n_lists);
    return text;
}

static int bad_id(struct json_error *e, const struct json_rules *r, const struct id_list *l,
                  const char *kind)
{
    char name[JSON_FIELD_MAX + 16];
    return json_fail(e, ERR_INVALID, r->ids_field,
                     "%s[%lld] is %s; ids are integers in [0, %d)", list_name(r, l, name),
                     (long long)(l->n_seen - l->list_start), kind, r->vocab);
}

/* Eight bytes at a time: a loop over digits mispredicts its end on every id. */
static const char *read_id(const char *p, const char *end, uint32_t *id)
{
    const uint64_t ones = 0x0101010101010101;
    uint64_t v = 0;
    int n = 8;
    if (end - p >= 8) {
        memcpy(&v, p, 8);
        v = le64toh(v) ^ 0x30 * ones;
        uint64_t not_digits = (((v & 0x7f * ones) + 0x76 * ones) | v) & 0x80 * ones;
        n = not_digits ? __builtin_ctzll(not_digits) / 8 : 8;
    }
    if (n > 0 && n < 8) {
        /* Leading zeros, then pairs of digits, of pairs, and of fours. */
        v <<= 64 - 8 * n;
        v = (v * 10 + (v >> 8)) & 0x00ff00ff00ff00ff;
        v = (v * 100 + (v >> 16)) & 0x0000ffff0000ffff;
        *id = (uint32_t)(v * 10000 + (v >> 32));
        return p + n;
    }
    /* The end of the text is near, or the number is long. Past 2^31 it stays there: out of any
     * vocabulary. */
    *id = 0;
    for (; p < end && *p >= '0' && *p <= '9'; p++)
        *id = *id >= 214748364 ? INT32_MAX : *id * 10 + (uint32_t)(*p - '0');
    return p;
}

/* p is behind the opening bracket; *after is set behind the closing one. */
static int scan_ids(const char *p, const char *end, const struct json_rules *r,
                    struct id_list *l, const char **after, struct json_error *e)
{
    p = skip_blanks(p, end);
    if (p < end && *p == ']') {
        *after = p + 1;
        return 0;
    }
    for (;;) {
        p = skip_blanks(p, end);
        const char *start = p;
        bool is_minus_zero = end - p >= 2 && p[0] == '-' && p[1] == '0';
        p += is_minus_zero;
        const char *first = p;
        uint32_t id;
        p = read_id(p, end, &id);
        if (p == first)
            return bad_id(e, r, l, kind_at(start, end));
        if (*first == '0' && p - first > 1)
            return bad_id(e, r, l, "not JSON: a number with a leading zero");
        if (p < end && (*p == '.' || *p == 'e' || *p == 'E'))
            return bad_id(e, r, l, "a number with a fraction or an exponent");
        if (id >= (uint32_t)r->vocab)
            return bad_id(e, r, l, "out of range");
        if (l->n_seen < r->max_ids) {
            if (l->n_seen == l->cap && id_list_grow(l, r->max_ids) != 0)
                return json_fail(e, ERR_NOMEM, NULL, "memory is short");
            l->ids[l->n_seen] = (int32_t)id;
        }
        l->n_seen++;
        p = skip_blanks(p, end);
        if (p < end && *p == ',') {
            p++;
        } else if (p < end && *p == ']') {
            *after = p + 1;
            return 0;
        } else {
            char name[JSON_FIELD_MAX + 16];
            return json_fail(e, ERR_INVALID, r->ids_field,
                             p < end ? "%s: not JSON behind %s[%lld]"
                                     : "%s: the body ends behind %s[%lld]",
                             r->ids_field, list_name(r, l, name),
                             (long long)(l->n_seen - l->list_start) - 1);
        }
    }
}

static int end_list(struct id_list *l)
{
    if (l->n_lists == l->lists_cap) {
        int32_t cap = l->lists_cap ? 2 * l->lists_cap : 64;
        int32_t *p = realloc(l->list_ends, (size_t)cap * sizeof(*p));
        if (!p)
            return ERR_NOMEM;
        l->list_ends = p;
        l->lists_cap = cap;
    }
    l->list_ends[l->n_lists++] = (int32_t)l->n_seen;
    l->list_start = l->n_seen;
    return 0;
}

/* As scan_ids, for a list of lists; p is at the first of them. */
static int scan_lists(const char *p, const char *end, const struct json_rules *r,
                      struct id_list *l, const char **after, struct json_error *e)
{
    l->is_nested = true;
    for (;;) {
        if (p >= end || *p != '[')
            return json_fail(
                e, ERR_INVALID, r->ids_field,
                "%s[%d] is %s; beside lists of ids only such are accepted", r->ids_field,
                l->n_lists, p < end && *p >= '0' && *p <= '9' ? "an integer" : kind_at(p, end));
        int rc = scan_ids(p + 1, end, r, l, &p, e);
        if (rc == 0 && l->n_seen == l->list_start)
            rc = json_fail(e, ERR_INVALID, r->ids_field,
                           "%s[%d] is empty; at least one id is needed", r->ids_field,
                           l->n_lists);
        /* Past max_ids the whole is refused anyway, and what is not stored needs no ends. */
        if (rc == 0 && l->n_seen <= r->max_ids && end_list(l) != 0)
            rc = json_fail(e, ERR_NOMEM, NULL, "memory is short");
        if (rc != 0)
            return rc;
        p = skip_blanks(p, end);
        if (p < end && *p == ',') {
            p = skip_blanks(p + 1, end);
        } else if (p < end && *p == ']') {
            *after = p + 1;
            return 0;
        } else {
            return json_fail(e, ERR_INVALID, r->ids_field,
                             p < end ? "%s: not JSON behind %s[%d]"
                                     : "%s: the body ends behind %s[%d]",
                             r->ids_field, r->ids_field, l->n_lists - 1);
        }
    }
}

/* ---- the whole body ---- */

/* The list that was cut out of a text. */
struct cut {
    const char *from, *to; /* NULL: none */
};

static bool is_known(const struct json_rules *r, const char *key)
{
    for (const char *const *f = r->fields; *f; f++)
        if (strcmp(*f, key) == 0)
            return true;
    return false;
}

static const char *explain(enum json_error_code code)
{
    switch (code) {
    case json_error_premature_end_of_input:
        return "the text ends too early";
    case json_error_end_of_input_expected:
        return "something follows the object";
    case json_error_invalid_utf8:
        return "bytes that are not UTF-8";
    case json_error_stack_overflow:
        return "nested deeper than 2048";
    case json_error_duplicate_key:
        return "a field is given twice";
    case json_error_numeric_overflow:
        return "a number is too large";
    case json_error_null_byte_in_key:
        return "a field name holds NUL";
    default:
        return "a syntax error";
    }
}

/* Says what jansson found, at the place in the text as the client sent it. */
static int fail_syntax(const char *text, size_t len, const struct cut *cut,
                       const struct json_rules *r, const json_error_t *je, struct json_error *e)
{
    enum json_error_code code = json_error_code(je);
    size_t at = je->position > 0 ? (size_t)je->position : 0;
    if (cut->from && at > (size_t)(cut->from - text))
        at += (size_t)(cut->to - cut->from) - (sizeof(placeholder) - 1);
    /* jansson says nothing when malloc fails. */
    if (code == json_error_out_of_memory || !je->text[0])
        return json_fail(e, ERR_NOMEM, NULL, "memory is short");
    char field[JSON_FIELD_MAX] = "";
    struct cursor c;
    cursor_init(&c, text, len);
    while (cursor_next(&c) && c.key_at < text + at)
        memcpy(field, c.key, sizeof(field));
    if (code == json_error_end_of_input_expected || !is_known(r, field))
        field[0] = '\0';
    return json_fail(e, ERR_INVALID, field,
                     "%s%sthe body is not JSON that is accepted: %s, at byte %zu", field,
                     field[0] ? ": " : "", explain(code), at);
}

static json_t *load(const char *text, size_t len, const struct cut *cut, json_error_t *je)
{
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY;
    if (!cut->from)
        return json_loadb(text, len, flags, je);
    struct buf rest;
    buf_init(&rest);
    buf_add(&rest, text, (size_t)(cut->from - text));
    buf_adds(&rest, placeholder);
    buf_add(&rest, cut->to, (size_t)(text + len - cut->to));
    json_t *root = NULL;
    if (rest.failed) {
        je->text[0] = '\0';
    } else {
        root = json_loadb(rest.data, rest.len, flags, je);
    }
    buf_fini(&rest);
    return root;
}

int json_parse(const char *text, size_t len, const struct json_rules *rules,
               struct json_body *out, struct json_error *e)
{
    struct id_list list = {0};
    struct cut cut = {0};
    struct cursor c;
    memset(out, 0, sizeof(*out));
    if (len == 0)
        return json_fail(e, ERR_INVALID, NULL, "the body is empty; a JSON object is accepted");
    int rc = 0;
    cursor_init(&c, text, len);
    while (rc == 0 && cursor_next(&c)) {
        const char *value = skip_blanks(c.p, c.end);
        if (!rules->ids_field || strcmp(c.key, rules->ids_field) != 0 || value >= c.end ||
            *value != '[')
            continue;
        const char *first = skip_blanks(value + 1, c.end);
        if (rules->takes_lists && first < c.end && *first == '"')
            continue;
        if (cut.from) {
            rc = json_fail(e, ERR_INVALID, rules->ids_field, "%s is given twice",
                           rules->ids_field);
            break;
        }
        cut.from = value;
        if (rules->takes_lists && first < c.end && *first == '[')
            rc = scan_lists(first, c.end, rules, &list, &cut.to, e);
        else
            rc = scan_ids(value + 1, c.end, rules, &list, &cut.to, e);
        c.p = cut.to;
    }
    json_error_t je = {.line = 0};
    if (rc == 0 && c.n_values > JSON_MAX_VALUES)
        rc = json_fail(e, ERR_INVALID, is_known(rules, c.full) ? c.full : NULL,
                       "%s%sthe body has more than %d values beside a list of ids",
                       is_known(rules, c.full) ? c.full : "",
                       is_known(rules, c.full) ? ": " : "", JSON_MAX_VALUES);
    if (rc == 0) {
        out->root = load(text, len, &cut, &je);
        if (!out->root)
            rc = fail_syntax(text, len, &cut, rules, &je, e);
        else if (!json_is_object(out->root))
            rc = json_fail(e, ERR_INVALID, NULL, "the body is %s; a JSON object is accepted",
                           json_kind(out->root));
        else if (list.n_seen > rules->max_ids)
            rc = json_fail(e, ERR_TOO_LARGE, rules->ids_field,
                           "%s has %lld tokens; at most %d are accepted", rules->ids_field,
                           (long long)list.n_seen, rules->max_ids);
    }
    out->has_ids = cut.from != NULL;
    out->ids = list.ids;
    out->n_ids = (int32_t)list.n_seen;
    out->list_ends = list.list_ends;
    out->n_lists = list.n_lists;
    if (rc != 0)
        json_fini(out);
    return rc;
}

json_t *json_peek(const char *text, size_t len, const char *field)
{
    struct cursor c;
    cursor_init(&c, text, len);
    while (cursor_next(&c))
        if (strcmp(c.key, field) == 0) {
            const char *value = skip_blanks(c.p, c.end);
            const char *close =
                value < c.end && *value == '"' ? find_quote(value + 1, c.end) : c.end;
            return close < c.end ? json_loadb(value, (size_t)(close + 1 - value),
                                              JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL)
                                 : NULL;
        }
    return NULL;
}

void json_fini(struct json_body *b)
{
    json_decref(b->root);
    free(b->ids);
    free(b->list_ends);
    memset(b, 0, sizeof(*b));
}

/* ---- fields ---- */

const char *json_kind(const json_t *value)
{
    if (!value)
        return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction or an exponent";
    case JSON_NULL:
        return "null";
    default:
        return "a boolean";
    }
}

/* The value, or NULL when absent or null. */
static const json_t *get(const json_t *object, const char *field)
{
    const json_t *v = json_object_get(object, field);
    return json_is_null(v) ? NULL : v;
}

int json_get_int(const json_t *object, const char *field, int64_t min, int64_t max,
                 int64_t *out, struct json_error *e)
{
    const json_t *v = get(object, field);
    if (!v)
        return 0;
    if (!json_is_integer(v))
        return json_fail(e, ERR_INVALID, field,
                         "%s is %s; an integer from %lld to %lld is accepted", field,
                         json_kind(v), (long long)min, (long long)max);
    int64_t n = json_integer_value(v);
    if (n < min || n > max)
        return json_fail(e, ERR_INVALID, field,
                         "%s is out of range; an integer from %lld to %lld is accepted", field,
                         (long long)min, (long long)max);
    *out = n;
    return 0;
}

int json_get_bool(const json_t *object, const char *field, bool *out, struct json_error *e)
{
    const json_t *v = get(object, field);
    if (!v)
        return 0;
    if (!json_is_boolean(v))
        return json_fail(e, ERR_INVALID, field, "%s is %s; true or false is accepted", field,
                         json_kind(v));
    *out = json_is_true(v);
    return 0;
}

int json_get_string(const json_t *object, const char *field, const char **out, size_t *len,
                    struct json_error *e)
{
    const json_t *v = get(object, field);
    if (!v)
        return 0;
    if (!json_is_string(v))
        return json_fail(e, ERR_INVALID, field, "%s is %s; a string is accepted", field,
                         json_kind(v));
    *out = json_string_value(v);
    *len = json_string_length(v);
    return 0;
}
