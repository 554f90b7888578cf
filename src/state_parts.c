/* The parts of a session's file: between the pools' layouts and the file's, and read as bytes
 * come; see state_file.h. */
#include <stdlib.h>

#include "bf16.h"
#include "state_file.h"

/* ---- dtypes ---- */

/* n numbers of dtype as numbers of the other one. */
static void convert(enum dtype dtype, size_t n, const void *in, void *out)
{
    if (dtype == DTYPE_F32) {
        const float *from = in;
        uint16_t *to = out;
        for (size_t i = 0; i < n; i++)
            to[i] = bf16_of(from[i]);
    } else {
        const uint16_t *from = in;
        uint32_t *to = out;
        for (size_t i = 0; i < n; i++)
            to[i] = (uint32_t)from[i] << 16;
    }
}

/* ---- layouts ---- */

static size_t state_elems(const struct state_shape *z)
{
    return (size_t)z->gd.HV * (size_t)z->gd.K * (size_t)z->gd.V;
}

/* Bytes of a token's keys, or values, in the pools' dtype. */
static size_t row_bytes(const struct state_shape *z)
{
    return (size_t)z->ad.HK * (size_t)z->ad.D * dtype_bytes(z->act);
}

void state_unpack(const struct state_shape *z, const struct backend_ops *ops,
                  const struct state_part *p, const void *raw, void *out)
{
    if (p->kind == STATE_SLOT) {
        float *S = out;
        ops->slot_unpack(&z->gd, raw, S, S + state_elems(z));
        return;
    }
    size_t page_rows = (size_t)z->page_tokens * row_bytes(z);
    for (int32_t i = 0; i < p->n_pages; i++) {
        int32_t left = p->n_tokens - i * z->page_tokens;
        ops->page_unpack(&z->ad, z->page_tokens, p->kind == STATE_VALUES,
                         left < z->page_tokens ? left : z->page_tokens,
                         (const char *)raw + (size_t)i * z->half_page_bytes,
                         (char *)out + (size_t)i * page_rows);
    }
}

void state_pack(const struct state_shape *z, const struct backend_ops *ops,
                const struct state_part *p, enum dtype dtype, const void *in, void *tmp,
                void *raw)
{
    if (p->kind == STATE_SLOT) {
        const float *S = in;
        const void *conv = S + state_elems(z);
        if (dtype != z->act) {
            convert(dtype, 3 * (size_t)z->gd.conv_dim, conv, tmp);
            conv = tmp;
        }
        ops->slot_pack(&z->gd, S, conv, raw);
        return;
    }
    if (dtype != z->act) {
        convert(dtype, (size_t)p->n_tokens * (size_t)z->ad.HK * (size_t)z->ad.D, in, tmp);
        in = tmp;
    }
    size_t page_rows = (size_t)z->page_tokens * row_bytes(z);
    for (int32_t i = 0; i < p->n_pages; i++) {
        int32_t left = p->n_tokens - i * z->page_tokens;
        ops->page_pack(&z->ad, z->page_tokens, p->kind == STATE_VALUES,
                       left < z->page_tokens ? left : z->page_tokens,
                       (const char *)in + (size_t)i * page_rows,
                       (char *)raw + (size_t)i * z->half_page_bytes);
    }
}

/* ---- reading ---- */

void state_reader_init(struct state_reader *r, const struct state_shape *z, int32_t max_tokens)
{
    *r = (struct state_reader){.z = z, .max_tokens = max_tokens};
    buf_init(&r->head);
    state_sum_start(&r->sum);
}

void state_reader_fini(struct state_reader *r)
{
    buf_fini(&r->head);
    free(r->data);
    free(r->ids);
    r->data = NULL;
    r->ids = NULL;
}

static int next_part(struct state_reader *r, struct errmsg *e)
{
    r->part = state_next(r->z, r->info.n_tokens, r->info.dtype, &r->walk);
    r->n_data = 0;
    if (r->part.bytes > r->data_cap) {
        free(r->data);
        r->data = malloc(r->part.bytes);
        r->data_cap = r->data ? r->part.bytes : 0;
        if (!r->data)
            return errmsg_set(e, ERR_NOMEM, "memory is short");
    }
    return 0;
}

/* Takes up to `want` bytes of the header in all. */
static size_t take_head(struct state_reader *r, const void *bytes, size_t len, size_t want)
{
    size_t n = want - r->head.len < len ? want - r->head.len : len;
    buf_add(&r->head, bytes, n);
    return n;
}

static int read_head(struct state_reader *r, const char *bytes, size_t len, size_t *n_taken,
                     struct errmsg *e)
{
    size_t n = 0;
    if (r->head.len < 8) {
        n = take_head(r, bytes, len, 8);
        if (r->head.len == 8)
            memcpy(&r->head_len, r->head.data, 8);
    }
    if (r->head.len >= 8 && (r->head_len < 2 || r->head_len > STATE_MAX_HEAD))
        return errmsg_set(e, ERR_INVALID,
                          "the first 8 bytes are no length of a safetensors header; 2 to %d is "
                          "accepted",
                          STATE_MAX_HEAD);
    if (r->head.len >= 8)
        n += take_head(r, bytes + n, len - n, 8 + (size_t)r->head_len);
    *n_taken = n;
    if (r->head.failed)
        return errmsg_set(e, ERR_NOMEM, "memory is short");
    if (r->head.len < 8 || r->head.len < 8 + (size_t)r->head_len)
        return STATE_MORE;
    int rc = state_head_read(r->z, r->head.data + 8, (size_t)r->head_len, r->max_tokens,
                             &r->info, e);
    state_sum_add(&r->sum, r->head.data, r->head.len);
    r->has_head = true;
    if (rc == 0)
        rc = next_part(r, e);
    return rc ? rc : STATE_HEAD;
}

/* The ids stay: they are looked at, and kept apart. */
static int take_ids(struct state_reader *r, struct errmsg *e)
{
    r->ids = malloc(r->part.bytes);
    if (!r->ids)
        return errmsg_set(e, ERR_NOMEM, "memory is short");
    memcpy(r->ids, r->data, r->part.bytes);
    for (int32_t i = 0; i < r->info.n_tokens; i++)
        if (r->ids[i] < 0 || r->ids[i] >= r->z->a->vocab)
            return errmsg_set(e, ERR_INVALID,
                              "token_ids[%d] is no id of the vocabulary; 0 to %d is accepted",
                              i, r->z->a->vocab - 1);
    return 0;
}

int state_reader_take(struct state_reader *r, const void *bytes, size_t len, size_t *n_taken,
                      struct errmsg *e)
{
    int rc = 0;
    *n_taken = 0;
    if (!r->has_head)
        return read_head(r, bytes, len, n_taken, e);
    if (r->is_done)
        return len > 0 ? errmsg_set(e, ERR_INVALID,
                                    "the file has more bytes than its tensors: it is too long")
                       : STATE_MORE;
    if (r->n_data == r->part.bytes) { /* it was taken */
        rc = next_part(r, e);
        if (rc != 0)
            return rc;
    }
    size_t n = r->part.bytes - r->n_data < len ? r->part.bytes - r->n_data : len;
    memcpy(r->data + r->n_data, bytes, n);
    r->n_data += n;
    *n_taken = n;
    if (r->n_data < r->part.bytes)
        return STATE_MORE;
    if (r->part.kind == STATE_SUM) {
        uint64_t sum;
        memcpy(&sum, r->data, sizeof(sum));
        r->is_done = true;
        return sum == state_sum_of(&r->sum)
                   ? STATE_DONE
                   : errmsg_set(e, ERR_INVALID,
                                "the checksum is not that of the bytes: the file was altered");
    }
    state_sum_add(&r->sum, r->data, r->part.bytes);
    if (r->part.kind == STATE_IDS)
        rc = take_ids(r, e);
    return rc ? rc : STATE_PART;
}

int state_reader_end(const struct state_reader *r, struct errmsg *e)
{
    if (r->is_done)
        return 0;
    return errmsg_set(e, ERR_INVALID, "the file is cut short: it ends in %s",
                      !r->has_head ? "its header" : "its tensors");
}
