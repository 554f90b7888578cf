#include "buf.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"

void buf_init(struct buf *b)
{
    memset(b, 0, sizeof(*b));
}

void buf_fini(struct buf *b)
{
    free(b->data);
    memset(b, 0, sizeof(*b));
}

int buf_reserve(struct buf *b, size_t extra_bytes)
{
    if (b->failed)
        return ERR_NOMEM;
    if (extra_bytes > SIZE_MAX / 4 || b->len > SIZE_MAX / 4) {
        b->failed = true;
        return ERR_NOMEM;
    }
    size_t need = b->len + extra_bytes;
    if (need <= b->cap)
        return 0;
    size_t cap = b->cap ? b->cap : 256;
    while (cap < need)
        cap *= 2;
    char *p = realloc(b->data, cap);
    if (!p) {
        b->failed = true;
        return ERR_NOMEM;
    }
    b->data = p;
    b->cap = cap;
    return 0;
}

void buf_add(struct buf *b, const void *data, size_t len)
{
    if (len == 0 || buf_reserve(b, len) != 0)
        return;
    memcpy(b->data + b->len, data, len);
    b->len += len;
}

void buf_adds(struct buf *b, const char *s)
{
    buf_add(b, s, strlen(s));
}

void buf_addc(struct buf *b, char c)
{
    buf_add(b, &c, 1);
}

void buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0 || buf_reserve(b, (size_t)n + 1) != 0)
        return;
    va_start(ap, fmt);
    vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)n;
}

const char *buf_cstr(struct buf *b)
{
    if (buf_reserve(b, 1) != 0)
        return NULL;
    b->data[b->len] = '\0';
    return b->data;
}

char *buf_take(struct buf *b, size_t *len)
{
    char *p = b->data;
    *len = b->len;
    buf_init(b);
    return p;
}

void buf_json_string(struct buf *b, const char *s, size_t len)
{
    static const char hex[] = "0123456789abcdef";
    buf_addc(b, '"');
    size_t from = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f)
            continue;
        buf_add(b, s + from, i - from);
        from = i + 1;
        char esc[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
        switch (c) {
        case '"':
        case '\\':
            esc[1] = (char)c;
            buf_add(b, esc, 2);
            break;
        case '\n':
            buf_adds(b, "\\n");
            break;
        case '\r':
            buf_adds(b, "\\r");
            break;
        case '\t':
            buf_adds(b, "\\t");
            break;
        default:
            buf_add(b, esc, 6);
        }
    }
    buf_add(b, s + from, len - from);
    buf_addc(b, '"');
}

/* %.9g for 1e-4 <= x < 1e9, the common case of answers with a million logprobs. With 24 bits in
 * x and at most 28 in 5^12, x * 10^12 is exact in a double, so rounding it once to nine digits
 * gives the digits that printf gives. Returns the length. */
static int format_f32(float x, char *out)
{
    static const double tens[] = {1e0, 1e1, 1e2, 1e3,  1e4,  1e5, 1e6,
                                  1e7, 1e8, 1e9, 1e10, 1e11, 1e12};
    int n_decimals = 12;
    while (n_decimals > 0 && (double)x * tens[n_decimals] >= 1e9)
        n_decimals--;
    int64_t digits = llrint((double)x * tens[n_decimals]);
    /* Rounding up to a tenth digit: 9.99..: one decimal less, and it ends in 0. */
    if (digits >= 1000000000 && n_decimals > 0) {
        digits /= 10;
        n_decimals--;
    }
    while (n_decimals > 0 && digits % 10 == 0) {
        digits /= 10;
        n_decimals--;
    }
    char text[16];
    int n = 0;
    /* At least one digit before the point. */
    while (digits > 0 || n <= n_decimals) {
        text[n++] = (char)('0' + digits % 10);
        digits /= 10;
    }
    int len = 0;
    while (n > 0) {
        out[len++] = text[--n];
        if (n == n_decimals && n > 0)
            out[len++] = '.';
    }
    return len;
}

void buf_json_f32(struct buf *b, float x)
{
    char text[32];
    float size = fabsf(x);
    if (!isfinite(x)) {
        buf_adds(b, "null");
    } else if ((double)size >= 1e-4 && (double)size < 1e9) {
        text[0] = '-';
        int n = format_f32(size, text + 1);
        buf_add(b, x < 0 ? text : text + 1, (size_t)(x < 0 ? n + 1 : n));
    } else {
        int n = snprintf(text, sizeof(text), "%.9g", (double)x);
        buf_add(b, text, (size_t)n);
    }
}

void buf_json_i64(struct buf *b, int64_t x)
{
    char text[24];
    char *p = text + sizeof(text);
    uint64_t u = x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
    do {
        *--p = (char)('0' + u % 10);
        u /= 10;
    } while (u);
    if (x < 0)
        *--p = '-';
    buf_add(b, p, (size_t)(text + sizeof(text) - p));
}
