/* The regular expressions that cut text into pieces, by hand: one pass, no backtracking, no
 * limit to run into, and the reference's character classes. tests/test_tokenizer_split.c holds
 * it to PCRE2 with the same classes.
 *
 * The alternatives in order, w being \p{L} (Qwen2) or [\p{L}\p{M}] (Qwen3.5):
 *
 *     (?i:'s|'t|'re|'ve|'m|'ll|'d)     contraction()
 *     [^\r\n\p{L}\p{N}]?w+             a word, with one character of another kind before it
 *     \p{N}                            one digit
 *      ?[^\s w \p{N}]+[\r\n]*          signs, with a blank before and line ends after
 *     \s*[\r\n]+                       blanks up to the last line end among them
 *     \s+(?!\S)                        blanks, but for the last before something else
 *     \s+
 *
 * Every character is a blank, a digit, in w, or a sign, so one alternative always matches. */
#include "tokenizer_internal.h"

const char *const split_patterns[SPLIT_N_FAMILIES] = {
    [SPLIT_QWEN2] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
                    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    [SPLIT_QWEN3_5] =
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
        "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
};

/* Past the characters from p on that have a flag of mask (want) or none of it (!want). */
static inline const unsigned char *skip(const struct char_table *c, const unsigned char *p,
                                        const unsigned char *end, uint8_t mask, bool want)
{
    size_t used;
    while (p < end && ((char_flags(c, p, &used) & mask) != 0) == want)
        p += used;
    return p;
}

static bool is_line_end(unsigned char byte)
{
    return byte == '\r' || byte == '\n';
}

/* The length of a contraction at p, which is an apostrophe; 0 when there is none. The
 * case-blind 's also takes U+017F, the long s; nothing else beyond ASCII folds to these
 * letters. */
static size_t contraction(const unsigned char *p, const unsigned char *end)
{
    size_t left = (size_t)(end - p);
    if (left < 2)
        return 0;
    unsigned char first = p[1] | 0x20;
    unsigned char second = left > 2 ? p[2] | 0x20 : 0;
    if (first == 's' || first == 't' || first == 'm' || first == 'd')
        return 2;
    if (((first == 'r' || first == 'v') && second == 'e') || (first == 'l' && second == 'l'))
        return 3;
    if (left > 2 && p[1] == 0xc5 && p[2] == 0xbf)
        return 3;
    return 0;
}

/* The blanks at p, of which there is one at least. */
static size_t blanks(const struct char_table *c, const unsigned char *p,
                     const unsigned char *end)
{
    const unsigned char *q = p, *last = p, *line_end = NULL;
    size_t used;
    while (q < end && (char_flags(c, q, &used) & CHAR_SPACE)) {
        last = q;
        q += used;
        if (is_line_end(*last))
            line_end = q;
    }
    if (line_end)
        return (size_t)(line_end - p);
    if (q < end && last > p)
        return (size_t)(last - p);
    return (size_t)(q - p);
}

size_t split_next(const struct char_table *c, enum split_family family, const unsigned char *p,
                  const unsigned char *end)
{
    const uint8_t word =
        family == SPLIT_QWEN3_5 ? (uint8_t)(CHAR_LETTER | CHAR_MARK) : (uint8_t)CHAR_LETTER;
    const uint8_t not_sign = word | CHAR_NUMBER | CHAR_SPACE;
    size_t used, used_next;
    uint8_t flags = char_flags(c, p, &used);

    if (flags & word)
        return (size_t)(skip(c, p + used, end, word, true) - p);
    if (flags & CHAR_NUMBER)
        return used;
    if (*p == '\'') {
        size_t n = contraction(p, end);
        if (n > 0)
            return n;
    }
    const unsigned char *q = p + used;
    if (q < end) {
        uint8_t next = char_flags(c, q, &used_next);
        if ((next & word) && !is_line_end(*p))
            return (size_t)(skip(c, q + used_next, end, word, true) - p);
        if (*p == ' ' && !(next & not_sign))
            flags = 0;
    }
    if (flags & CHAR_SPACE)
        return blanks(c, p, end);
    q = skip(c, q, end, not_sign, false);
    while (q < end && is_line_end(*q))
        q++;
    return (size_t)(q - p);
}
