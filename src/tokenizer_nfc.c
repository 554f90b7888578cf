/* Unicode normalization form C, as the reference has it: data of about Unicode 9, so that the
 * code points of CHAR_NFC_INERT are copied, and the runs between them normalized by themselves.
 * With that, utf8proc of any version gives the reference's text (also where it would lose
 * U+11A7).
 *
 * The quick check of UAX #15 finds the few places that may change; only from the last starter
 * before such a place to the next starter does text go through decompose, sort, compose. The
 * sort is ours because utf8proc's takes quadratic time, which a prompt of marks could ask
 * for. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "tokenizer_internal.h"

/* Runs of marks up to this long are sorted by insertion. */
#define SHORT_RUN 16
/* A code point decomposes into four at most (UAX #15, table of expansion factors). */
#define MAX_PARTS 4

static int combining_class(int32_t code)
{
    return utf8proc_get_property(code)->combining_class;
}

void nfc_scratch_fini(struct nfc_scratch *s)
{
    buf_fini(&s->text);
    free(s->codes);
    memset(s, 0, sizeof(*s));
}

/* Sorts n marks by combining class, equals in the order they have. */
static int sort_marks(int32_t *codes, size_t n)
{
    if (n <= SHORT_RUN) {
        for (size_t i = 1; i < n; i++) {
            int32_t code = codes[i];
            size_t j = i;
            for (; j > 0 && combining_class(codes[j - 1]) > combining_class(code); j--)
                codes[j] = codes[j - 1];
            codes[j] = code;
        }
        return 0;
    }
    int32_t *sorted = malloc(n * sizeof(*sorted));
    if (!sorted)
        return ERR_NOMEM;
    size_t start[257] = {0};
    for (size_t i = 0; i < n; i++)
        start[(combining_class(codes[i]) & 255) + 1]++;
    for (size_t k = 0; k < 256; k++)
        start[k + 1] += start[k];
    for (size_t i = 0; i < n; i++)
        sorted[start[combining_class(codes[i]) & 255]++] = codes[i];
    memcpy(codes, sorted, n * sizeof(*codes));
    free(sorted);
    return 0;
}

/* Sets s->codes to the full canonical decomposition of text, marks not yet sorted. */
static int decompose(struct nfc_scratch *s, const char *text, size_t len, size_t *n_codes)
{
    size_t n = 0, used;
    for (size_t i = 0; i < len; i += used) {
        if (n + MAX_PARTS > s->cap) {
            size_t cap = s->cap ? 2 * s->cap : 64;
            int32_t *codes = realloc(s->codes, cap * sizeof(*codes));
            if (!codes)
                return ERR_NOMEM;
            s->codes = codes;
            s->cap = cap;
        }
        uint32_t code = utf8_decode((const unsigned char *)text + i, &used);
        n += (size_t)utf8proc_decompose_char((int32_t)code, s->codes + n, MAX_PARTS,
                                             UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, NULL);
    }
    *n_codes = n;
    return 0;
}

/* Appends the NFC of text, which has no inert code point, to s->text. */
static int normalize_run(struct nfc_scratch *s, const char *text, size_t len)
{
    size_t n;

    if (decompose(s, text, len, &n) != 0)
        return ERR_NOMEM;
    for (size_t i = 0; i < n;) {
        size_t first = i;
        while (i < n && combining_class(s->codes[i]) != 0)
            i++;
        if (i - first > 1 && sort_marks(s->codes + first, i - first) != 0)
            return ERR_NOMEM;
        i += i == first;
    }
    n = (size_t)utf8proc_normalize_utf32(s->codes, (utf8proc_ssize_t)n,
                                         UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    for (size_t i = 0; i < n; i++) {
        char bytes[4];
        buf_add(&s->text, bytes, utf8_encode((uint32_t)s->codes[i], bytes));
    }
    return 0;
}

/* The end of the run at i of characters that a composition may reach into. */
static size_t run_end(const struct char_table *c, const char *text, size_t len, size_t i)
{
    size_t used;
    while (i < len && (char_flags(c, (const unsigned char *)text + i, &used) &
                       (CHAR_NFC_CHECK | CHAR_NFC_CCC)))
        i += used;
    return i;
}

/* The place where the next run to normalize starts, from `from` on, which is a place where one
 * may start; *check is the character in it that made it one. len when there is none. */
static size_t next_run(const struct char_table *c, const char *text, size_t len, size_t from,
                       size_t *check)
{
    size_t start = from, used;
    int last_class = 0;

    for (size_t i = from; i < len; i += used) {
        const unsigned char *p = (const unsigned char *)text + i;
        uint8_t flags = char_flags(c, p, &used);
        if (flags & CHAR_NFC_CHECK) {
            *check = i;
            return start;
        }
        if (flags & CHAR_NFC_CCC) {
            int class = combining_class((int32_t)utf8_decode(p, &used));
            if (class < last_class) {
                *check = i;
                return start;
            }
            last_class = class;
        } else {
            start = flags & CHAR_NFC_INERT ? i + used : i;
            last_class = 0;
        }
    }
    return len;
}

int nfc_normalize(const struct char_table *c, struct nfc_scratch *s, const char *text,
                  size_t len, const char **out, size_t *out_len)
{
    size_t done = 0, check = 0;
    size_t start = next_run(c, text, len, 0, &check);

    *out = text;
    *out_len = len;
    if (start == len)
        return 0;
    s->text.len = 0;
    while (start < len) {
        size_t end = run_end(c, text, len, check);
        buf_add(&s->text, text + done, start - done);
        if (normalize_run(s, text + start, end - start) != 0)
            return ERR_NOMEM;
        done = end;
        start = next_run(c, text, len, end, &check);
    }
    buf_add(&s->text, text + done, len - done);
    if (s->text.failed)
        return ERR_NOMEM;
    *out = s->text.data;
    *out_len = s->text.len;
    return 0;
}
