/* Places in a piece that no merge crosses.
 *
 * A merge across a place makes a token that holds the bytes on both of its sides. Where a piece
 * has the characters X and Y side by side, and no token of the vocabulary has an X with a Y
 * after it, the two sides merge as if alone, and the ids are those of one, then of the other.
 * In scripts without blanks between words this cuts a sentence into words, most of which are
 * tokens.
 *
 * Places between two ASCII characters are not looked at: nearly all of them are in some token.
 * Tokens may also begin or end inside of X or Y; for those the last byte of X and the first of
 * Y are noted. Both are noted in bits, of which one may stand for several pairs: then a cut is
 * missed, no more. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_internal.h"

/* Whole pairs: 2^20 bits by hash; 23,000 pairs for Qwen. Cut ones: 2^16 bits by two bytes. */
#define WHOLE_BITS 20
#define WHOLE_WORDS ((size_t)1 << (WHOLE_BITS - 6))
#define CUT_WORDS ((size_t)1 << (16 - 6))

static inline bool is_start(unsigned char byte)
{
    return (byte & 0xc0) != 0x80;
}

/* The length that the first byte of a character says it has. */
static inline size_t said_length(unsigned char lead)
{
    return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* The bit for a character of n_left bytes and the one after it, of n_right. */
static inline size_t whole_bit(const unsigned char *left, size_t n_left, size_t n_right)
{
    uint64_t pair = 0;
    for (size_t i = 0; i < n_left + n_right; i++)
        pair = pair << 8 | left[i];
    return (size_t)(pair * 0x9e3779b97f4a7c15ull >> (64 - WHOLE_BITS));
}

static inline size_t cut_bit(const unsigned char *at)
{
    return ((size_t)1 << WHOLE_BITS) + ((size_t)at[-1] << 8 | at[0]);
}

static void note_token(struct bpe *b, const unsigned char *bytes, size_t len)
{
    size_t left = 0; /* where the character before `at` starts */
    for (size_t at = 1; at < len; at++) {
        if (!is_start(bytes[at]))
            continue;
        size_t n_left = at - left, n_right = 1;
        while (at + n_right < len && !is_start(bytes[at + n_right]))
            n_right++;
        size_t bit = cut_bit(bytes + at);
        if (is_start(bytes[left]) && n_left == said_length(bytes[left]) &&
            n_right == said_length(bytes[at]))
            bit = whole_bit(bytes + left, n_left, n_right);
        b->joins[bit / 64] |= 1ull << bit % 64;
        left = at;
    }
}

int bpe_init_joins(struct bpe *b)
{
    b->joins = calloc(WHOLE_WORDS + CUT_WORDS, sizeof(*b->joins));
    if (!b->joins)
        return ERR_NOMEM;
    for (int32_t id = 0; id < b->tokens->n; id++)
        note_token(b, (const unsigned char *)b->tokens->bytes + b->tokens->offsets[id],
                   b->tokens->offsets[id + 1] - b->tokens->offsets[id]);
    return 0;
}

static inline bool has_bit(const struct bpe *b, size_t bit)
{
    return b->joins[bit / 64] >> bit % 64 & 1;
}

size_t bpe_next_cut(const struct bpe *b, const unsigned char *piece, size_t len)
{
    size_t n_left = said_length(piece[0]);
    for (size_t at = n_left; at < len;) {
        size_t n_right = said_length(piece[at]);
        if (n_left + n_right > 2 && !has_bit(b, cut_bit(piece + at)) &&
            !has_bit(b, whole_bit(piece + at - n_left, n_left, n_right)))
            return at;
        at += n_right;
        n_left = n_right;
    }
    return len;
}
