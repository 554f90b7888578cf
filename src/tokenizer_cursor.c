#include "tokenizer_cursor.h"

#include <string.h>

#include "err.h"
#include "utf8.h"

#define MAX_DEPTH 64

static void skip_space(struct cursor *j)
{
    while (j->at < j->end &&
           (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t'))
        j->at++;
}

char cursor_peek(struct cursor *j)
{
    skip_space(j);
    return j->at < j->end ? *j->at : '\0';
}

bool cursor_take(struct cursor *j, char c)
{
    skip_space(j);
    if (j->at == j->end || *j->at != c)
        return false;
    j->at++;
    return true;
}

/* The four hexadecimal digits of a \u escape, or -1. */
static int32_t take_hex(struct cursor *j)
{
    int32_t value = 0;
    if (j->end - j->at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        char c = j->at[i];
        if (c >= '0' && c <= '9')
            value = value * 16 + (c - '0');
        else if (c >= 'a' && c <= 'f')
            value = value * 16 + (c - 'a' + 10);
        else if (c >= 'A' && c <= 'F')
            value = value * 16 + (c - 'A' + 10);
        else
            return -1;
    }
    j->at += 4;
    return value;
}

/* A \u escape, after the u: one, or two that are a surrogate pair. */
static int take_unicode(struct cursor *j, struct buf *out)
{
    char bytes[4];
    int32_t code = take_hex(j);
    if (code < 0 || (code >= 0xdc00 && code <= 0xdfff))
        return ERR_INVALID;
    if (code >= 0xd800 && code <= 0xdbff) {
        if (j->end - j->at < 2 || j->at[0] != '\\' || j->at[1] != 'u')
            return ERR_INVALID;
        j->at += 2;
        int32_t low = take_hex(j);
        if (low < 0xdc00 || low > 0xdfff)
            return ERR_INVALID;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    buf_add(out, bytes, utf8_encode((uint32_t)code, bytes));
    return 0;
}

static int take_escape(struct cursor *j, struct buf *out)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (j->at == j->end)
        return ERR_INVALID;
    char c = *j->at++;
    if (c == 'u')
        return take_unicode(j, out);
    const char *name = memchr(names, c, sizeof(names) - 1);
    if (!name)
        return ERR_INVALID;
    buf_addc(out, values[name - names]);
    return 0;
}

int cursor_string(struct cursor *j, struct buf *out)
{
    if (!cursor_take(j, '"'))
        return ERR_INVALID;
    for (;;) {
        const char *from = j->at;
        while (j->at < j->end && *j->at != '"' && *j->at != '\\' &&
               (unsigned char)*j->at >= 0x20)
            j->at++;
        buf_add(out, from, (size_t)(j->at - from));
        if (j->at == j->end || (unsigned char)*j->at < 0x20)
            return ERR_INVALID;
        if (*j->at++ == '"')
            return out->failed ? ERR_NOMEM : 0;
        if (take_escape(j, out) != 0)
            return ERR_INVALID;
    }
}

int cursor_int32(struct cursor *j, int32_t *value)
{
    int64_t v = 0;
    skip_space(j);
    const char *from = j->at;
    while (j->at < j->end && *j->at >= '0' && *j->at <= '9') {
        v = v * 10 + (*j->at++ - '0');
        if (v > INT32_MAX)
            return ERR_INVALID;
    }
    if (j->at == from || (*from == '0' && j->at - from > 1))
        return ERR_INVALID;
    if (j->at < j->end && (*j->at == '.' || *j->at == 'e' || *j->at == 'E'))
        return ERR_INVALID;
    *value = (int32_t)v;
    return 0;
}

/* Past a string, from its first quote on. */
static bool skip_string(struct cursor *j)
{
    for (j->at++; j->at < j->end; j->at++) {
        if (*j->at == '"') {
            j->at++;
            return true;
        }
        if (*j->at == '\\' && ++j->at == j->end)
            break;
    }
    return false;
}

int cursor_skip(struct cursor *j)
{
    char closers[MAX_DEPTH];
    int depth = 0;

    do {
        skip_space(j);
        if (j->at == j->end)
            return ERR_INVALID;
        char c = *j->at;
        if (c == '"') {
            if (!skip_string(j))
                return ERR_INVALID;
            continue;
        }
        if (c == '{' || c == '[') {
            if (depth == MAX_DEPTH)
                return ERR_INVALID;
            closers[depth++] = c == '{' ? '}' : ']';
        } else if (c == '}' || c == ']') {
            if (depth == 0 || closers[--depth] != c)
                return ERR_INVALID;
        } else if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                     memchr("+-.E:,", c, 6))) {
            return ERR_INVALID;
        } else if (depth == 0) {
            /* A number or a word by itself ends where something else begins. */
            const char *from = j->at;
            while (j->at < j->end && *j->at != '\0' && !strchr(" \n\r\t,]}:[{\"", *j->at))
                j->at++;
            return j->at > from ? 0 : ERR_INVALID;
        }
        j->at++;
    } while (depth > 0);
    return 0;
}

bool cursor_more(struct cursor *j, char close, size_t *n, int *code)
{
    *code = 0;
    if (cursor_take(j, close))
        return false;
    if (*n > 0 && !cursor_take(j, ',')) {
        *code = ERR_INVALID;
        return false;
    }
    ++*n;
    return true;
}
