/* UTF-8: validation, and decoding that replaces what is not UTF-8.
 *
 * Pure functions over the caller's memory, callable from any thread. They never allocate but
 * through the struct buf they are given. "Well-formed" is table 3-7 of the Unicode standard: no
 * surrogates, no overlong forms, nothing above U+10FFFF. */
#ifndef PREFILLD_UTF8_H
#define PREFILLD_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"

/* What the bytes at one place are. */
enum utf8_kind {
    UTF8_WHOLE, /* a well-formed character */
    UTF8_CUT,   /* the end of the bytes, and a proper prefix of a well-formed character */
    UTF8_BAD    /* part of no character */
};

/* Looks at the first character of s, len > 0 bytes. *used is the length of the character, of
 * the cut prefix, or of the maximal subpart that one U+FFFD stands for (Unicode standard,
 * 3.9). */
enum utf8_kind utf8_scan(const char *s, size_t len, size_t *used);

/* True when all len bytes are well-formed; else *bad_at (may be NULL) is the offset of the
 * first that are not. NUL is a character. */
bool utf8_is_valid(const char *s, size_t len, size_t *bad_at);

/* A decoder of bytes that come in pieces of any size. Zero-initialised is empty. */
struct utf8_lossy {
    char held[3]; /* the start of a character whose rest may still come */
    uint8_t n_held;
};

/* Appends to out what the bytes so far say for sure: characters as they are, each maximal
 * subpart of an ill-formed one as U+FFFD. Only a cut character is held back, and the first two
 * bytes of a surrogate, as long as they are the last two. */
void utf8_lossy_add(struct utf8_lossy *l, const char *bytes, size_t len, struct buf *out);

/* Nothing follows: appends U+FFFD for what is held. l is empty again. */
void utf8_lossy_end(struct utf8_lossy *l, struct buf *out);

/* The code point at p, which is the start of a well-formed character. *used is its length. */
static inline uint32_t utf8_decode(const unsigned char *p, size_t *used)
{
    if (p[0] < 0x80) {
        *used = 1;
        return p[0];
    }
    if (p[0] < 0xe0) {
        *used = 2;
        return (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f);
    }
    if (p[0] < 0xf0) {
        *used = 3;
        return (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
    }
    *used = 4;
    return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3f) << 12 |
           (uint32_t)(p[2] & 0x3f) << 6 | (p[3] & 0x3f);
}

/* Writes the code point, a scalar value, to out (room for 4 bytes). Returns the length. */
size_t utf8_encode(uint32_t code, char *out);

#endif
