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

/* Two digits at once. */
static void add_pair(char *out, uint32_t n)
{
    static const char pairs[] = "00010203040506070809101112131415161718192021222324252627282930"
                                "31323334353637383940414243444546474849505152535455565758596061"
                                "62636465666768697071727374757677787980818283848586878889909192"
                                "93949596979899";
    memcpy(out, pairs + 2 * (size_t)n, 2);
}

/* %.9g for 1e-4 <= x < 1e9, the common case of answers with a million logprobs. With 24 bits in
 * x and at most 28 in 5^12, x * 10^12 is exact in a double, so rounding it once to nine digits
 * gives the digits that printf gives. Returns the length. */
static size_t format_f32(float x, char *out)
{
    static const double tens[] = {1e0, 1e1, 1e2, 1e3,  1e4,  1e5, 1e6,
                                  1e7, 1e8, 1e9, 1e10, 1e11, 1e12};
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    /* 1233 / 4096 is log10(2): of the decimals that leave nine digits, or one more. */
    int n_decimals = 8 - (((int)(bits >> 23) - 127) * 1233 >> 12);
    n_decimals = n_decimals < 12 ? n_decimals : 12;
    if ((double)x * tens[n_decimals] >= 1e9)
        n_decimals--;
    /* Rounds to even: the last bit of the sum is worth 1. */
    double rounded = (double)x * tens[n_decimals] + 0x1.8p52;
    uint64_t sum;
    memcpy(&sum, &rounded, sizeof(sum));
    uint32_t digits = (uint32_t)sum;
    /* Rounded up to a tenth digit. */
    if (digits == 1000000000) {
        digits = 100000000;
        n_decimals--;
    }
    char nine[9];
    uint32_t high = digits / 10000, low = digits % 10000;
    nine[0] = (char)('0' + high / 10000);
    add_pair(nine + 1, high % 10000 / 100);
    add_pair(nine + 3, high % 100);
    add_pair(nine + 5, low / 100);
    add_pair(nine + 7, low % 100);
    int n = 9, n_whole = 9 - n_decimals;
    while (nine[n - 1] == '0')
        n--;
    if (n_whole <= 0) {
        memcpy(out, "0.000", 5);
        memcpy(out + 2 - n_whole, nine, 9);
        return (size_t)(2 - n_whole + n);
    }
    memcpy(out, nine, 9);
    if (n <= n_whole)
        return (size_t)n_whole;
    memmove(out + n_whole + 1, out + n_whole, (size_t)n_decimals);
    out[n_whole] = '.';
    return (size_t)n + 1;
}

void buf_json_f32(struct buf *b, float x)
{
    enum { LONGEST = 32 };
    float size = fabsf(x);
    if (!isfinite(x)) {
        buf_adds(b, "null");
    } else if (buf_reserve(b, LONGEST) == 0) {
        char *out = b->data + b->len;
        if ((double)size >= 1e-4 && (double)size < 1e9) {
            *out = '-';
            b->len += format_f32(size, out + (x < 0)) + (x < 0);
        } else {
            b->len += (size_t)snprintf(out, LONGEST, "%.9g", (double)x);
        }
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
