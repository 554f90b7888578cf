#include "utf8.h"

#include <string.h>

static const char replacement[] = "\xef\xbf\xbd";

enum utf8_kind utf8_scan(const char *s, size_t len, size_t *used)
{
    const unsigned char *p = (const unsigned char *)s;
    unsigned char lead = p[0];
    /* The range of the second byte rules out overlong forms, surrogates and > U+10FFFF. */
    unsigned char low = 0x80, high = 0xbf;
    size_t want;

    *used = 1;
    if (lead < 0x80)
        return UTF8_WHOLE;
    if (lead >= 0xc2 && lead <= 0xdf) {
        want = 2;
    } else if (lead >= 0xe0 && lead <= 0xef) {
        want = 3;
        low = lead == 0xe0 ? 0xa0 : 0x80;
        high = lead == 0xed ? 0x9f : 0xbf;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
        want = 4;
        low = lead == 0xf0 ? 0x90 : 0x80;
        high = lead == 0xf4 ? 0x8f : 0xbf;
    } else {
        return UTF8_BAD;
    }
    for (; *used < want; ++*used) {
        if (*used == len)
            return UTF8_CUT;
        if (p[*used] < low || p[*used] > high)
            return UTF8_BAD;
        low = 0x80;
        high = 0xbf;
    }
    return UTF8_WHOLE;
}

/* The length of the well-formed characters at the start of s. */
static size_t valid_prefix(const char *s, size_t len)
{
    size_t i = 0;
    while (i < len) {
        while (i + 8 <= len) {
            uint64_t w;
            memcpy(&w, s + i, 8);
            if (w & 0x8080808080808080ull)
                break;
            i += 8;
        }
        if (i == len)
            break;
        size_t used;
        if (utf8_scan(s + i, len - i, &used) != UTF8_WHOLE)
            break;
        i += used;
    }
    return i;
}

bool utf8_is_valid(const char *s, size_t len, size_t *bad_at)
{
    size_t n = valid_prefix(s, len);
    if (bad_at)
        *bad_at = n;
    return n == len;
}

/* The two first bytes of what would be a surrogate. They can start no character, yet they are
 * held until the next byte: Python's incremental decoder does so, and streams are compared with
 * it. */
static bool is_half_surrogate(const char *s, size_t len)
{
    return len == 2 && (unsigned char)s[0] == 0xed && (unsigned char)s[1] >= 0xa0 &&
           (unsigned char)s[1] <= 0xbf;
}

void utf8_lossy_end(struct utf8_lossy *l, struct buf *out)
{
    if (l->n_held > 0)
        buf_add(out, replacement, 3);
    if (is_half_surrogate(l->held, l->n_held))
        buf_add(out, replacement, 3);
    l->n_held = 0;
}

void utf8_lossy_add(struct utf8_lossy *l, const char *bytes, size_t len, struct buf *out)
{
    /* Finish the held character one byte at a time. A byte that does not fit it leaves the
     * loop, and is looked at again below. */
    while (l->n_held > 0 && len > 0) {
        char joined[4];
        size_t used;
        memcpy(joined, l->held, l->n_held);
        joined[l->n_held] = bytes[0];
        enum utf8_kind kind = utf8_scan(joined, l->n_held + 1u, &used);
        if (kind == UTF8_BAD && !is_half_surrogate(joined, l->n_held + 1u)) {
            utf8_lossy_end(l, out);
            break;
        }
        bytes++;
        len--;
        if (kind == UTF8_WHOLE) {
            buf_add(out, joined, used);
            l->n_held = 0;
        } else {
            l->held[l->n_held] = joined[l->n_held];
            l->n_held++;
        }
    }
    while (len > 0) {
        size_t n = valid_prefix(bytes, len);
        buf_add(out, bytes, n);
        bytes += n;
        len -= n;
        if (len == 0)
            break;
        size_t used;
        if (utf8_scan(bytes, len, &used) == UTF8_CUT || is_half_surrogate(bytes, len)) {
            memcpy(l->held, bytes, len);
            l->n_held = (uint8_t)len;
            break;
        }
        buf_add(out, replacement, 3);
        bytes += used;
        len -= used;
    }
}

size_t utf8_encode(uint32_t code, char *out)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3f));
    out[2] = (char)(0x80 | (code >> 6 & 0x3f));
    out[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}
