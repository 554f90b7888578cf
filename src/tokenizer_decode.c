/* Ids to text: the bytes of all tokens, joined, then decoded as UTF-8. Tokens end inside
 * characters, so a token has no text of its own in general. */
#include <stdlib.h>
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

/* Bytes of no character as U+FFFD. */
static void write_lossy(struct buf *out, const char *bytes, size_t len)
{
    struct utf8_lossy lossy = {0};
    struct buf text;
    buf_init(&text);
    utf8_lossy_add(&lossy, bytes, len, &text);
    utf8_lossy_end(&lossy, &text);
    buf_json_string(out, text.data, text.len);
    out->failed |= text.failed;
    buf_fini(&text);
}

static uint8_t count_chars(const char *bytes, size_t len)
{
    size_t n = 0;
    for (size_t i = 0; i < len; i++)
        n += ((unsigned char)bytes[i] & 0xc0) != 0x80;
    return n < TOKEN_MANY_CHARS ? (uint8_t)n : TOKEN_MANY_CHARS;
}

int tokenizer_write_tokens(struct token_table *table)
{
    struct buf json;
    size_t n_bytes;
    buf_init(&json);
    table->json_offsets = malloc(((size_t)table->n + 1) * sizeof(*table->json_offsets));
    table->n_chars = calloc((size_t)table->n, 1);
    if (!table->json_offsets || !table->n_chars)
        return ERR_NOMEM;
    for (int32_t id = 0; id < table->n; id++) {
        const char *bytes = table->bytes + table->offsets[id];
        size_t len = table->offsets[id + 1] - table->offsets[id];
        table->json_offsets[id] = (uint32_t)json.len;
        table->n_chars[id] = count_chars(bytes, len);
        if (!(table->flags[id] & TOKEN_EXISTS))
            buf_adds(&json, "\"\"");
        else if (table->flags[id] & TOKEN_UTF8)
            buf_json_string(&json, bytes, len);
        else
            write_lossy(&json, bytes, len);
    }
    /* tokenizer.json is far below 2^32 / 6 bytes, of which none becomes more than six. */
    table->json_offsets[table->n] = (uint32_t)json.len;
    bool failed = json.failed;
    table->json = buf_take(&json, &n_bytes);
    return failed ? ERR_NOMEM : 0;
}

bool tokenizer_json_token(const struct tokenizer *t, int32_t id, struct buf *out)
{
    uint8_t flags = flags_of(t, id);
    if (!(flags & TOKEN_EXISTS)) {
        buf_adds(out, "\"\"");
        return true;
    }
    uint32_t at = t->tokens.json_offsets[id];
    buf_add(out, t->tokens.json + at, t->tokens.json_offsets[id + 1] - at);
    return flags & TOKEN_UTF8;
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

int32_t tokenizer_stream_skip(struct tokenizer_stream *s, int32_t id)
{
    uint8_t flags = flags_of(s->tokenizer, id);
    if (s->lossy.n_held > 0 || !(flags & TOKEN_UTF8) ||
        s->tokenizer->tokens.n_chars[id] == TOKEN_MANY_CHARS)
        return -1;
    return s->skip_special && (flags & TOKEN_SPECIAL) ? 0 : s->tokenizer->tokens.n_chars[id];
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
