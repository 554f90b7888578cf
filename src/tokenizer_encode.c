/* Text to ids: added tokens in the raw text; each stretch between them in NFC by itself; in
 * that the added tokens with normalized; what is between split by itself; each piece merged.
 * The order is the reference's, and it shows in the ids. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_internal.h"

/* Offsets in a piece are 31 bits, and NFC makes at most three bytes of one. */
#define MAX_TEXT_BYTES ((size_t)1 << 29)

/* One call of tokenizer_encode. */
struct encoding {
    const struct tokenizer *t;
    size_t max_ids;
    struct id_list ids;
    struct nfc_scratch nfc;
    struct bpe_scratch bpe;
};

/* A piece is at least so many ids. */
static size_t least_ids(const struct bpe *b, size_t piece_bytes)
{
    return (piece_bytes + b->max_made_bytes - 1) / b->max_made_bytes;
}

static int add_id(struct encoding *x, int32_t id)
{
    if (x->ids.n == x->max_ids)
        return ERR_TOO_LARGE;
    if (id_list_reserve(&x->ids, 1) != 0)
        return ERR_NOMEM;
    x->ids.ids[x->ids.n++] = id;
    return 0;
}

/* Text in NFC, without added tokens. */
static int encode_plain(struct encoding *x, const char *text, size_t len)
{
    const struct tokenizer *t = x->t;
    const unsigned char *p = (const unsigned char *)text;
    const unsigned char *end = p + len;
    while (p < end) {
        size_t n = split_next(&t->chars, t->family, p, end);
        if (least_ids(&t->bpe, n) > x->max_ids - x->ids.n)
            return ERR_TOO_LARGE;
        int code = bpe_encode(&t->bpe, &x->bpe, p, n, &x->ids);
        if (code != 0)
            return code;
        if (x->ids.n > x->max_ids)
            return ERR_TOO_LARGE;
        p += n;
    }
    return 0;
}

/* Cuts text at the tokens of a set and gives what is between them to encode. */
static int encode_between(struct encoding *x, const struct added_set *added, const char *text,
                          size_t len,
                          int (*encode)(struct encoding *x, const char *text, size_t len))
{
    size_t done = 0, at;
    ptrdiff_t found;

    while (added->n > 0 && (found = added_set_find(added, text, len, done, &at)) >= 0) {
        int code = encode(x, text + done, at - done);
        if (code == 0)
            code = add_id(x, added->tokens[found].id);
        if (code != 0)
            return code;
        done = at + added->tokens[found].len;
    }
    return encode(x, text + done, len - done);
}

/* Raw text without the tokens that are searched there. */
static int encode_stretch(struct encoding *x, const char *text, size_t len)
{
    const char *nfc;
    size_t nfc_len;

    if (nfc_normalize(&x->t->chars, &x->nfc, text, len, &nfc, &nfc_len) != 0)
        return ERR_NOMEM;
    return encode_between(x, &x->t->added_nfc, nfc, nfc_len, encode_plain);
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, int32_t max_ids,
                     int32_t **ids, int32_t *n_ids, struct errmsg *e)
{
    struct encoding x = {.t = t, .max_ids = max_ids > 0 ? (size_t)max_ids : INT32_MAX};
    size_t bad_at;

    *ids = NULL;
    *n_ids = 0;
    if (len > MAX_TEXT_BYTES)
        return errmsg_set(e, ERR_TOO_LARGE, "text has %zu bytes, at most %zu are accepted", len,
                          MAX_TEXT_BYTES);
    if (!utf8_is_valid(text, len, &bad_at))
        return errmsg_set(e, ERR_INVALID, "text is not UTF-8 at byte %zu", bad_at);
    int code = encode_between(&x, &t->added, text, len, encode_stretch);
    nfc_scratch_fini(&x.nfc);
    bpe_scratch_fini(&x.bpe);
    if (code != 0) {
        free(x.ids.ids);
        if (code == ERR_TOO_LARGE)
            return errmsg_set(e, code, "text has more than %zu tokens", x.max_ids);
        return errmsg_set(e, code, "no memory to tokenize %zu bytes", len);
    }
    *ids = x.ids.ids;
    *n_ids = (int32_t)x.ids.n;
    return 0;
}
