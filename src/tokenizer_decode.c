/* Ids to text: the bytes of all tokens, joined, then decoded as UTF-8. Tokens end inside
 * characters, so a token has no text of its own in general. */
#include <string.h>

#include "tokenizer_internal.h"

int32_t tokenizer_size(const struct tokenizer *t)
{
    return t->tokens.n;
}

static uint8_t flags_of(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->tokens.n ? t->tokens.flags[id] : 0;
}

const char *tokenizer_token_bytes(const struct tokenizer *t, int32_t id, size_t *len)
{
    *len = 0;
    if (!(flags_of(t, id) & TOKEN_EXISTS))
        return NULL;
    *len = t->tokens.offsets[id + 1] - t->tokens.offsets[id];
    return t->tokens.bytes + t->tokens.offsets[id];
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id)
{
    return flags_of(t, id) & TOKEN_SPECIAL;
}

bool tokenizer_json_token(const struct tokenizer *t, int32_t id, struct buf *out)
{
    size_t len;
    const char *bytes = tokenizer_token_bytes(t, id, &len);

    if (!bytes) {
        buf_adds(out, "\"\"");
        return true;
    }
    if (flags_of(t, id) & TOKEN_UTF8) {
        buf_json_string(out, bytes, len);
        return true;
    }
    struct utf8_lossy lossy = {0};
    struct buf text;
    buf_init(&text);
    utf8_lossy_add(&lossy, bytes, len, &text);
    utf8_lossy_end(&lossy, &text);
    buf_json_string(out, text.data, text.len);
    out->failed |= text.failed;
    buf_fini(&text);
    return false;
}

void tokenizer_json_spelling(const struct tokenizer *t, int32_t id, struct buf *out)
{
    size_t len;
    const char *bytes = tokenizer_token_bytes(t, id, &len);

    if (!(flags_of(t, id) & TOKEN_ALPHABET)) {
        buf_json_string(out, bytes ? bytes : "", len);
        return;
    }
    buf_addc(out, '"');
    for (size_t i = 0; i < len; i++) {
        char c[4];
        size_t n = utf8_encode(byte_alphabet_code((unsigned char)bytes[i]), c);
        if (c[0] == '"' || c[0] == '\\')
            buf_addc(out, '\\');
        buf_add(out, c, n);
    }
    buf_addc(out, '"');
}

void tokenizer_stream_init(struct tokenizer_stream *s, const struct tokenizer *t,
                           bool skip_special)
{
    *s = (struct tokenizer_stream){.tokenizer = t, .skip_special = skip_special};
}

void tokenizer_stream_push(struct tokenizer_stream *s, int32_t id, struct buf *out)
{
    size_t len;
    const char *bytes = tokenizer_token_bytes(s->tokenizer, id, &len);

    if (s->skip_special && tokenizer_is_special(s->tokenizer, id))
        return;
    utf8_lossy_add(&s->lossy, bytes, len, out);
}

void tokenizer_stream_finish(struct tokenizer_stream *s, struct buf *out)
{
    utf8_lossy_end(&s->lossy, out);
}

void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n_ids,
                      bool skip_special, struct buf *out)
{
    struct tokenizer_stream s;

    tokenizer_stream_init(&s, t, skip_special);
    for (size_t i = 0; i < n_ids; i++)
        tokenizer_stream_push(&s, ids[i], out);
    tokenizer_stream_finish(&s, out);
}
