/* The header of a session's file, and the walk over its data; see state_file.h. */
#include "state_file.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

static const char format_name[] = "prefilld-session";

const char *state_dtype_name(enum dtype d)
{
    return d == DTYPE_F32 ? "F32" : "BF16";
}

void state_shape_seal(struct state_shape *z)
{
    size_t n = z->half_page_bytes ? STATE_PART_BYTES / z->half_page_bytes : 1;
    z->part_pages = n < 1 ? 1 : (int32_t)n;
}

/* ---- tensors ---- */

struct tensor {
    char name[48];
    const char *dtype;
    int32_t n_dims;
    int64_t dims[3];
    int64_t bytes;
};

static int32_t n_tensors(const struct state_shape *z)
{
    return 2 + 2 * z->a->n_layers;
}

/* Tensor i in the order of the data. */
static struct tensor tensor_at(const struct state_shape *z, const struct state_info *f,
                               int32_t i)
{
    struct tensor t = {.name = "token_ids", .dtype = "I32", .n_dims = 1};
    const struct gdn_dims *gd = &z->gd;
    int64_t size = 4;
    if (i == 0) {
        t.dims[0] = f->n_tokens;
    } else if (i == n_tensors(z) - 1) {
        t = (struct tensor){.name = "checksum", .dtype = "U64", .n_dims = 1, .dims = {1}};
        size = 8;
    } else {
        int32_t l = (i - 1) / 2;
        bool is_second = (i - 1) % 2;
        bool is_gdn = z->a->layers[l] == LAYER_GDN;
        const char *what =
            is_gdn ? (is_second ? "gdn.conv" : "gdn.state") : (is_second ? "attn.v" : "attn.k");
        bool is_state = is_gdn && !is_second;
        snprintf(t.name, sizeof(t.name), "layers.%d.%s", l, what);
        t.dtype = is_state ? "F32" : state_dtype_name(f->dtype);
        size = is_state ? 4 : (int64_t)dtype_bytes(f->dtype);
        t.n_dims = is_gdn && is_second ? 2 : 3;
        t.dims[0] = is_state ? gd->HV : is_gdn ? gd->conv_dim : f->n_tokens;
        t.dims[1] = is_state ? gd->K : is_gdn ? 3 : z->ad.HK;
        t.dims[2] = is_state ? gd->V : z->ad.D;
    }
    t.bytes = size;
    for (int32_t d = 0; d < t.n_dims; d++)
        t.bytes *= t.dims[d];
    return t;
}

int64_t state_data_bytes(const struct state_shape *z, const struct state_info *f)
{
    int64_t n = 0;
    for (int32_t i = 0; i < n_tensors(z); i++)
        n += tensor_at(z, f, i).bytes;
    return n;
}

/* ---- writing ---- */

static void add_text(struct buf *b, const char *name, const char *value)
{
    buf_printf(b, ", \"%s\": ", name);
    buf_json_string(b, value, strlen(value));
}

static void add_number(struct buf *b, const char *name, int64_t value)
{
    buf_printf(b, ", \"%s\": \"%" PRId64 "\"", name, value);
}

static void add_metadata(const struct state_shape *z, const struct state_info *f, struct buf *b)
{
    char print[17];
    snprintf(print, sizeof(print), "%016" PRIx64, z->fingerprint);
    buf_printf(b, "{\"__metadata__\": {\"format\": \"%s\"", format_name);
    add_number(b, "version", STATE_VERSION);
    add_text(b, "fingerprint", print);
    add_number(b, "position", f->n_tokens);
    add_text(b, "dtype", state_dtype_name(f->dtype));
    add_text(b, "model", z->model);
    add_text(b, "backend", z->backend);
    if (f->has_terms) {
        add_text(b, "id", f->id);
        add_number(b, "ttl_s", f->ttl_s);
        add_text(b, "pinned", f->is_pinned ? "true" : "false");
        add_number(b, "created", f->created_unix_s);
        add_number(b, "idle_s", f->idle_s);
        add_number(b, "saved", f->saved_unix_s);
    }
    buf_addc(b, '}');
}

void state_head_write(const struct state_shape *z, const struct state_info *f, struct buf *out)
{
    struct buf b;
    int64_t at = 0;
    buf_init(&b);
    add_metadata(z, f, &b);
    for (int32_t i = 0; i < n_tensors(z); i++) {
        struct tensor t = tensor_at(z, f, i);
        buf_printf(&b, ", \"%s\": {\"dtype\": \"%s\", \"shape\": [", t.name, t.dtype);
        for (int32_t d = 0; d < t.n_dims; d++)
            buf_printf(&b, "%s%" PRId64, d ? ", " : "", t.dims[d]);
        buf_printf(&b, "], \"data_offsets\": [%" PRId64 ", %" PRId64 "]}", at, at + t.bytes);
        at += t.bytes;
    }
    buf_addc(&b, '}');
    while (b.len % 8 && !b.failed)
        buf_addc(&b, ' ');
    uint64_t len = b.len;
    buf_add(out, &len, sizeof(len));
    buf_add(out, b.data, b.len);
    out->failed |= b.failed;
    buf_fini(&b);
}

/* ---- reading ---- */

/* A decimal number of [min, max] under a name; missing is an error. */
static int read_number(const json_t *meta, const char *name, int64_t min, int64_t max,
                       int64_t *out, struct errmsg *e)
{
    const char *text = json_string_value(json_object_get(meta, name));
    char *end = NULL;
    size_t len = text ? strlen(text) : 0;
    bool is_number = len >= 1 && len <= 18 && strspn(text, "0123456789") == len;
    *out = is_number ? strtoll(text, &end, 10) : -1;
    if (!is_number || *out < min || *out > max)
        return errmsg_set(e, ERR_INVALID,
                          "__metadata__.%s is %s; a number from %" PRId64 " to %" PRId64
                          " as a string is accepted",
                          name,
                          !text       ? "no string"
                          : is_number ? "out of range"
                                      : "no number",
                          min, max);
    return 0;
}

static bool is_text(const json_t *meta, const char *name, const char *value)
{
    const json_t *v = json_object_get(meta, name);
    return json_is_string(v) && json_string_length(v) == strlen(value) &&
           memcmp(json_string_value(v), value, strlen(value)) == 0;
}

/* Format, version and model: what is of another kind is said first. */
static int read_identity(const struct state_shape *z, const json_t *meta, struct errmsg *e)
{
    char print[17];
    int64_t version;
    if (!is_text(meta, "format", format_name))
        return errmsg_set(e, ERR_INVALID, "__metadata__.format is not \"%s\": no saved session",
                          format_name);
    int rc = read_number(meta, "version", 1, INT32_MAX, &version, e);
    if (rc == 0 && version != STATE_VERSION)
        rc = errmsg_set(e, ERR_UNSUPPORTED, "the file has version %" PRId64 "; %d is accepted",
                        version, STATE_VERSION);
    if (rc != 0)
        return rc;
    snprintf(print, sizeof(print), "%016" PRIx64, z->fingerprint);
    if (is_text(meta, "fingerprint", print))
        return 0;
    const char *found = json_string_value(json_object_get(meta, "fingerprint"));
    bool is_print = found && strlen(found) == 16 && strspn(found, "0123456789abcdef") == 16;
    return errmsg_set(e, ERR_UNSUPPORTED,
                      "the file is of another model: its fingerprint is %s, the one of the "
                      "model served here is %s",
                      is_print ? found : "none", print);
}

static int read_terms(const json_t *meta, struct state_info *f, struct errmsg *e)
{
    const int64_t most = INT64_MAX / 1000000000;
    const char *id = json_string_value(json_object_get(meta, "id"));
    if (!id)
        return 0;
    if (strlen(id) > SESSION_ID_MAX || strncmp(id, "s-", 2) != 0 ||
        strspn(id + 2, "0123456789abcdef") != strlen(id) - 2)
        return errmsg_set(e, ERR_INVALID, "__metadata__.id is no name of a session");
    memcpy(f->id, id, strlen(id) + 1);
    int rc = read_number(meta, "ttl_s", 1, SESSION_MAX_TTL_S, &f->ttl_s, e);
    if (rc == 0)
        rc = read_number(meta, "created", 1, most, &f->created_unix_s, e);
    if (rc == 0)
        rc = read_number(meta, "idle_s", 0, most, &f->idle_s, e);
    if (rc == 0)
        rc = read_number(meta, "saved", 0, most, &f->saved_unix_s, e);
    f->is_pinned = is_text(meta, "pinned", "true");
    f->has_terms = true;
    return rc;
}

static int read_metadata(const struct state_shape *z, const json_t *meta, int32_t max_tokens,
                         struct state_info *f, struct errmsg *e)
{
    int64_t n = 0;
    int rc = read_identity(z, meta, e);
    if (rc == 0)
        rc = read_number(meta, "position", 1, INT32_MAX, &n, e);
    if (rc == 0 && n > max_tokens)
        rc = errmsg_set(e, ERR_TOO_LARGE,
                        "the session has %" PRId64 " tokens; at most %d are accepted", n,
                        max_tokens);
    if (rc != 0)
        return rc;
    *f = (struct state_info){.n_tokens = (int32_t)n, .dtype = DTYPE_F32};
    if (is_text(meta, "dtype", "BF16"))
        f->dtype = DTYPE_BF16;
    else if (!is_text(meta, "dtype", "F32"))
        return errmsg_set(e, ERR_INVALID,
                          "__metadata__.dtype is neither \"F32\" nor \"BF16\"; these are "
                          "accepted");
    return read_terms(meta, f, e);
}

static bool is_int(const json_t *list, size_t i, int64_t value)
{
    const json_t *v = json_array_get(list, i);
    return json_is_integer(v) && json_integer_value(v) == value;
}

/* The tensor whose bytes begin at `at` of the data. */
static int check_tensor(const json_t *root, const struct tensor *t, int64_t at,
                        struct errmsg *e)
{
    const json_t *o = json_object_get(root, t->name);
    const json_t *shape = json_object_get(o, "shape");
    const json_t *offsets = json_object_get(o, "data_offsets");
    if (!json_is_object(o) || json_object_size(o) != 3)
        return errmsg_set(e, ERR_INVALID,
                          "the tensor %s is %s; an object of dtype, shape and data_offsets is "
                          "accepted",
                          t->name, o ? "another thing" : "missing");
    if (!is_text(o, "dtype", t->dtype))
        return errmsg_set(e, ERR_INVALID, "the tensor %s has another dtype than %s", t->name,
                          t->dtype);
    bool is_good = json_is_array(shape) && json_array_size(shape) == (size_t)t->n_dims;
    for (int32_t d = 0; d < t->n_dims && is_good; d++)
        is_good = is_int(shape, (size_t)d, t->dims[d]);
    if (!is_good) {
        errmsg_set(e, ERR_INVALID, "the tensor %s has another shape than [", t->name);
        for (int32_t d = 0; d < t->n_dims; d++)
            errmsg_add(e, "%s%" PRId64, d ? ", " : "", t->dims[d]);
        errmsg_add(e, "]");
        return ERR_INVALID;
    }
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !is_int(offsets, 0, at) ||
        !is_int(offsets, 1, at + t->bytes))
        return errmsg_set(e, ERR_INVALID,
                          "the tensor %s has other data_offsets than [%" PRId64 ", %" PRId64
                          "]: tensors lie in a fixed order, without holes",
                          t->name, at, at + t->bytes);
    return 0;
}

int state_head_read(const struct state_shape *z, const char *text, size_t len,
                    int32_t max_tokens, struct state_info *out, struct errmsg *e)
{
    int64_t at = 0;
    json_t *root =
        len > 0 && text[0] == '{' ? json_loadb(text, len, JSON_REJECT_DUPLICATES, NULL) : NULL;
    if (!root)
        return errmsg_set(e, ERR_INVALID, "the header is no JSON object of a safetensors file");
    int rc = read_metadata(z, json_object_get(root, "__metadata__"), max_tokens, out, e);
    for (int32_t i = 0; i < n_tensors(z) && rc == 0; i++) {
        struct tensor t = tensor_at(z, out, i);
        rc = check_tensor(root, &t, at, e);
        at += t.bytes;
    }
    if (rc == 0 && json_object_size(root) != (size_t)n_tensors(z) + 1)
        rc = errmsg_set(e, ERR_INVALID, "the file has %zu tensors; %d are accepted",
                        json_object_size(root) - 1, n_tensors(z));
    json_decref(root);
    return rc;
}

/* ---- parts ---- */

static struct state_part page_part(const struct state_shape *z, int32_t n_tokens,
                                   enum dtype dtype, struct state_walk *w)
{
    int32_t P = z->page_tokens, n_pages = (n_tokens - 1) / P + 1;
    int32_t n = n_pages - w->i_page < z->part_pages ? n_pages - w->i_page : z->part_pages;
    struct state_part p = {.kind = w->is_values ? STATE_VALUES : STATE_KEYS,
                           .i_layer = w->i_attn,
                           .i_page = w->i_page,
                           .n_pages = n};
    int64_t left = (int64_t)n_tokens - (int64_t)w->i_page * P;
    p.n_tokens = left < (int64_t)n * P ? (int32_t)left : n * P;
    p.bytes = (size_t)p.n_tokens * (size_t)z->ad.HK * (size_t)z->ad.D * dtype_bytes(dtype);
    p.raw_bytes = (size_t)n * z->half_page_bytes;
    w->i_page += n;
    if (w->i_page < n_pages)
        return p;
    w->i_page = 0;
    if (w->is_values) {
        w->i_attn++;
        w->layer++;
    }
    w->is_values = !w->is_values;
    return p;
}

static size_t state_elems(const struct state_shape *z)
{
    return (size_t)z->gd.HV * (size_t)z->gd.K * (size_t)z->gd.V;
}

static size_t slot_part_bytes(const struct state_shape *z, enum dtype dtype)
{
    return state_elems(z) * sizeof(float) + 3 * (size_t)z->gd.conv_dim * dtype_bytes(dtype);
}

struct state_part state_next(const struct state_shape *z, int32_t n_tokens, enum dtype dtype,
                             struct state_walk *w)
{
    if (!w->has_ids) {
        w->has_ids = true;
        return (struct state_part){.kind = STATE_IDS, .bytes = (size_t)n_tokens * 4};
    }
    if (w->layer == z->a->n_layers) {
        bool is_over = w->is_over;
        w->is_over = true;
        return (struct state_part){.kind = is_over ? STATE_END : STATE_SUM,
                                   .bytes = is_over ? 0 : 8};
    }
    if (z->a->layers[w->layer] == LAYER_ATTN)
        return page_part(z, n_tokens, dtype, w);
    w->layer++;
    return (struct state_part){.kind = STATE_SLOT,
                               .i_layer = w->i_gdn++,
                               .bytes = slot_part_bytes(z, dtype),
                               .raw_bytes = z->slot_bytes};
}

size_t state_max_raw(const struct state_shape *z)
{
    size_t slot = z->a->n_gdn ? z->slot_bytes : 0;
    size_t pages = z->a->n_attn ? (size_t)z->part_pages * z->half_page_bytes : 0;
    return slot > pages ? slot : pages;
}

size_t state_max_bytes(const struct state_shape *z, enum dtype dtype)
{
    size_t slot = z->a->n_gdn ? slot_part_bytes(z, dtype) : 0;
    size_t pages = z->a->n_attn ? (size_t)z->part_pages * (size_t)z->page_tokens *
                                      (size_t)z->ad.HK * (size_t)z->ad.D * dtype_bytes(dtype)
                                : 0;
    return slot > pages ? slot : pages;
}
