#include "api_logprobs.h"

#include <string.h>

#include "backend.h"

enum { BYTES_A_ROW = 64, BYTES_A_CANDIDATE = 26 };

void text_offsets_init(struct text_offsets *o, const struct tokenizer *t, bool skip_special)
{
    memset(o, 0, sizeof(*o));
    o->tokenizer = t;
    buf_init(&o->scratch);
    if (t)
        tokenizer_stream_init(&o->stream, t, skip_special);
}

void text_offsets_fini(struct text_offsets *o)
{
    buf_fini(&o->scratch);
}

static void count_chars(struct text_offsets *o)
{
    for (size_t i = 0; i < o->scratch.len; i++)
        o->n_chars += ((unsigned char)o->scratch.data[i] & 0xc0) != 0x80;
    o->scratch.len = 0;
}

/* Where id, the next one, begins. */
static int64_t next_offset(struct text_offsets *o, int32_t id)
{
    int64_t at = o->n_chars;
    int32_t n_chars = o->tokenizer ? tokenizer_stream_skip(&o->stream, id) : 0;
    if (n_chars >= 0) {
        o->n_chars += n_chars;
    } else {
        tokenizer_stream_push(&o->stream, id, &o->scratch);
        count_chars(o);
    }
    return at;
}

/* The prompt is complete: what follows is a text of its own. */
static void turn_offsets(struct text_offsets *o, bool skip_special)
{
    if (!o->tokenizer)
        return;
    tokenizer_stream_finish(&o->stream, &o->scratch);
    count_chars(o);
    tokenizer_stream_init(&o->stream, o->tokenizer, skip_special);
}

float row_logprob(const struct request *r, int32_t t)
{
    return t < r->n_prompt ? r->prompt_logprobs[t] : r->new_logprobs[t - r->n_prompt];
}

const struct top_entry *row_top(const struct request *r, int32_t t)
{
    if (r->n_top == 0)
        return NULL;
    size_t n_top = (size_t)r->n_top;
    return t < r->n_prompt ? r->prompt_top + (size_t)t * n_top
                           : r->new_top + (size_t)(t - r->n_prompt) * n_top;
}

/* Of a generated row. */
static const float *row_labels(const struct request *r, int32_t t)
{
    return r->new_labels + (size_t)(t - r->n_prompt) * (size_t)r->n_labels;
}

bool write_token(const struct api *a, struct buf *b, int32_t id, bool as_ids)
{
    if (as_ids) {
        buf_adds(b, "\"token_id:");
        buf_json_i64(b, id);
        buf_addc(b, '"');
        return true;
    }
    if (!a->tokenizer) {
        buf_adds(b, "\"\"");
        return false;
    }
    size_t at = b->len;
    return tokenizer_json_token(a->tokenizer, id, b) && b->len - at > 2;
}

void open_candidate(const struct api *a, struct buf *b, const struct top_entry *e)
{
    buf_adds(b, "{\"id\": ");
    buf_json_i64(b, e->id);
    buf_adds(b, ", \"token\": ");
    if (!a->tokenizer) {
        buf_adds(b, "\"\"");
    } else if (!tokenizer_json_token(a->tokenizer, e->id, b)) {
        size_t len;
        const char *bytes = tokenizer_token_bytes(a->tokenizer, e->id, &len);
        buf_adds(b, ", \"bytes\": [");
        for (size_t i = 0; i < len; i++)
            buf_printf(b, "%s%d", i ? ", " : "", (unsigned char)bytes[i]);
        buf_addc(b, ']');
    }
    buf_adds(b, ", \"logprob\": ");
    buf_json_f32(b, e->logprob);
}

void write_candidates(const struct api *a, struct buf *b, const struct top_entry *top,
                      int32_t n)
{
    buf_addc(b, '[');
    for (int32_t i = 0; i < n && top[i].id >= 0; i++) {
        buf_adds(b, i ? ", " : "");
        open_candidate(a, b, &top[i]);
        buf_addc(b, '}');
    }
    buf_addc(b, ']');
}

void write_ids(struct buf *b, const int32_t *ids, int32_t from, int32_t to)
{
    buf_addc(b, '[');
    for (int32_t t = from; t < to; t++) {
        if (t > from)
            buf_adds(b, ", ");
        buf_json_i64(b, ids[t]);
    }
    buf_addc(b, ']');
}

/* Does id's text stand at [at, at + len) of b? */
static bool is_text_at(const struct api *a, struct buf *b, int32_t id, size_t at, size_t len)
{
    size_t end = b->len;
    write_token(a, b, id, false);
    bool is_same =
        !b->failed && b->len - end == len && memcmp(b->data + at, b->data + end, len) == 0;
    b->len = end;
    return is_same;
}

/* Names of a row's numbers, as they stand in the buffer. */
struct row_names {
    size_t at[1 + TOP_MAX + LABELS_MAX], len[1 + TOP_MAX + LABELS_MAX];
    int32_t n;
};

/* ", name: logprob", unless the name is there. */
static void add_named(const struct api *a, struct buf *b, struct row_names *names, int32_t id,
                      float logprob, bool as_ids)
{
    size_t start = b->len;
    buf_adds(b, ", ");
    size_t at = b->len;
    bool is_text = write_token(a, b, id, as_ids);
    if (b->failed)
        return;
    size_t len = b->len - at;
    for (int32_t j = 0; j < names->n && !is_text; j++) {
        if (names->len[j] == len && memcmp(b->data + names->at[j], b->data + at, len) == 0) {
            b->len = start;
            return;
        }
    }
    names->at[names->n] = at;
    names->len[names->n++] = len;
    buf_adds(b, ": ");
    buf_json_f32(b, logprob);
}

/* {token: logprob, ...}: the row's own token first, then the best n_top, or for a generated one
 * the labels. Two tokens may have one text (bytes of no character are all U+FFFD, ids without a
 * token are ""): then the name is written once, with the larger number, so that the row's own
 * seems the best only if it is. */
static void write_top(const struct api *a, struct buf *b, const struct request *r, int32_t t,
                      const struct row_style *s)
{
    struct row_names names = {.n = 1};
    bool has_labels = r->n_labels > 0 && t >= r->n_prompt;
    const struct top_entry *top = row_top(r, t);
    float own = row_logprob(r, t);
    int32_t n_top = 0;
    while (!has_labels && n_top < s->n_top && top[n_top].id >= 0)
        n_top++;
    buf_addc(b, '{');
    names.at[0] = b->len;
    bool is_text = write_token(a, b, r->ids[t], s->as_ids);
    names.len[0] = b->len - names.at[0];
    for (int32_t i = 0; !is_text && i < n_top; i++)
        if (top[i].logprob > own && is_text_at(a, b, top[i].id, names.at[0], names.len[0]))
            own = top[i].logprob;
    buf_adds(b, ": ");
    buf_json_f32(b, own);
    for (int32_t i = 0; i < n_top; i++)
        if (top[i].id != r->ids[t])
            add_named(a, b, &names, top[i].id, top[i].logprob, s->as_ids);
    for (int32_t i = 0; has_labels && i < r->n_labels; i++)
        if (r->labels[i] != r->ids[t])
            add_named(a, b, &names, r->labels[i], row_labels(r, t)[i], s->as_ids);
    buf_addc(b, '}');
}

void write_logprobs(const struct api *a, struct buf *b, const struct request *r, int32_t from,
                    int32_t to, const struct row_style *s, struct text_offsets *o)
{
    /* What rows take, about: to grow on the way is to copy. */
    buf_reserve(b, (size_t)(to - from) * (size_t)(BYTES_A_ROW + BYTES_A_CANDIDATE * s->n_top));
    buf_adds(b, "{\"text_offset\": [");
    for (int32_t t = from; t < to; t++) {
        if (t > from)
            buf_adds(b, ", ");
        if (t == r->n_prompt && t > 0)
            turn_offsets(o, s->skips_special);
        buf_json_i64(b, next_offset(o, r->ids[t]));
    }
    buf_adds(b, "], \"token_logprobs\": [");
    for (int32_t t = from; t < to; t++) {
        if (t > from)
            buf_adds(b, ", ");
        if (t == 0)
            buf_adds(b, "null");
        else
            buf_json_f32(b, row_logprob(r, t));
    }
    buf_adds(b, "], \"tokens\": [");
    for (int32_t t = from; t < to; t++) {
        if (t > from)
            buf_adds(b, ", ");
        write_token(a, b, r->ids[t], s->as_ids);
    }
    buf_adds(b, "], \"top_logprobs\": [");
    for (int32_t t = from; t < to; t++) {
        if (t > from)
            buf_adds(b, ", ");
        if (t == 0)
            buf_adds(b, "null");
        else
            write_top(a, b, r, t, s);
    }
    buf_adds(b, "]}");
}

static void write_ranked(const struct api *a, struct buf *b, int32_t id, float logprob,
                         int32_t rank)
{
    buf_addc(b, '"');
    buf_json_i64(b, id);
    buf_adds(b, "\": {\"logprob\": ");
    buf_json_f32(b, logprob);
    buf_adds(b, ", \"rank\": ");
    if (rank > 0)
        buf_json_i64(b, rank);
    else
        buf_adds(b, "null");
    buf_adds(b, ", \"decoded_token\": ");
    write_token(a, b, id, false);
    buf_addc(b, '}');
}

void write_prompt_logprobs(const struct api *a, struct buf *b, const struct request *r,
                           int32_t n_top)
{
    buf_adds(b, "[null");
    for (int32_t t = 1; t < r->n_prompt; t++) {
        const struct top_entry *top = row_top(r, t);
        int32_t rank = 0;
        for (int32_t i = 0; i < n_top && top[i].id >= 0; i++)
            if (top[i].id == r->ids[t])
                rank = i + 1;
        buf_adds(b, ", {");
        write_ranked(a, b, r->ids[t], r->prompt_logprobs[t], rank);
        for (int32_t i = 0; i < n_top && top[i].id >= 0; i++) {
            if (top[i].id == r->ids[t])
                continue;
            buf_adds(b, ", ");
            write_ranked(a, b, top[i].id, top[i].logprob, i + 1);
        }
        buf_addc(b, '}');
    }
    buf_addc(b, ']');
}

/* Without the brace that ends it. */
static void write_chat_token(const struct api *a, struct buf *b, int32_t id, float logprob)
{
    size_t len = 0;
    const char *bytes = a->tokenizer ? tokenizer_token_bytes(a->tokenizer, id, &len) : NULL;
    buf_adds(b, "{\"token\": ");
    write_token(a, b, id, false);
    buf_adds(b, ", \"logprob\": ");
    buf_json_f32(b, logprob);
    buf_adds(b, ", \"bytes\": [");
    for (size_t i = 0; i < len; i++) {
        buf_adds(b, i ? ", " : "");
        buf_json_i64(b, (unsigned char)bytes[i]);
    }
    buf_addc(b, ']');
}

void write_chat_logprobs(const struct api *a, struct buf *b, const struct request *r,
                         int32_t from, int32_t to, int32_t n_top)
{
    buf_adds(b, "{\"content\": [");
    for (int32_t t = from; t < to; t++) {
        const struct top_entry *top = row_top(r, t);
        buf_adds(b, t > from ? ", " : "");
        write_chat_token(a, b, r->ids[t], row_logprob(r, t));
        buf_adds(b, ", \"top_logprobs\": [");
        for (int32_t i = 0; i < r->n_labels; i++) {
            buf_adds(b, i ? ", " : "");
            write_chat_token(a, b, r->labels[i], row_labels(r, t)[i]);
            buf_addc(b, '}');
        }
        for (int32_t i = 0; r->n_labels == 0 && i < n_top && top[i].id >= 0; i++) {
            buf_adds(b, i ? ", " : "");
            write_chat_token(a, b, top[i].id, top[i].logprob);
            buf_addc(b, '}');
        }
        buf_adds(b, "]}");
    }
    buf_adds(b, "]}");
}
