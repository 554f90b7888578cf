#include <criterion/criterion.h>
#include <string.h>

#include "leaks.h"
#include "rng.h"
#include "utf8.h"

TestSuite(utf8, .fini = leaks_check);

/* Table 3-7 of the Unicode standard, row by row: the ranges of up to four bytes. */
static const unsigned char table_3_7[][8] = {
    {0x00, 0x7f},
    {0xc2, 0xdf, 0x80, 0xbf},
    {0xe0, 0xe0, 0xa0, 0xbf, 0x80, 0xbf},
    {0xe1, 0xec, 0x80, 0xbf, 0x80, 0xbf},
    {0xed, 0xed, 0x80, 0x9f, 0x80, 0xbf},
    {0xee, 0xef, 0x80, 0xbf, 0x80, 0xbf},
    {0xf0, 0xf0, 0x90, 0xbf, 0x80, 0xbf, 0x80, 0xbf},
    {0xf1, 0xf3, 0x80, 0xbf, 0x80, 0xbf, 0x80, 0xbf},
    {0xf4, 0xf4, 0x80, 0x8f, 0x80, 0xbf, 0x80, 0xbf},
};

/* The length that a row of the table has, and how many of the n bytes at p are in its
 * ranges. */
static size_t match_row(const unsigned char *row, const unsigned char *p, size_t n,
                        size_t *length)
{
    size_t matched = 0;
    *length = row[1] < 0x80 ? 1 : row[1] < 0xe0 ? 2 : row[1] < 0xf0 ? 3 : 4;
    while (matched < *length && matched < n && p[matched] >= row[2 * matched] &&
           p[matched] <= row[2 * matched + 1])
        matched++;
    return matched;
}

/* utf8_scan by the table: the row that takes the most bytes. */
static enum utf8_kind scan_slowly(const unsigned char *p, size_t n, size_t *used)
{
    size_t length;
    *used = 1;
    for (size_t i = 0; i < sizeof(table_3_7) / sizeof(table_3_7[0]); i++) {
        size_t matched = match_row(table_3_7[i], p, n, &length);
        if (matched == 0)
            continue;
        *used = matched;
        return matched == length ? UTF8_WHOLE : matched == n ? UTF8_CUT : UTF8_BAD;
    }
    return UTF8_BAD;
}

/* Bytes at the edges of the table's ranges. */
static const unsigned char edges[] = {0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf,
                                      0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed, 0xee,
                                      0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff};
#define N_EDGES (sizeof(edges))

Test(utf8, scan_agrees_with_the_table)
{
    unsigned char p[4];
    for (size_t n = 1; n <= 4; n++) {
        size_t count = 1;
        for (size_t i = 0; i < n; i++)
            count *= N_EDGES;
        for (size_t k = 0; k < count; k++) {
            for (size_t i = 0, rest = k; i < n; i++, rest /= N_EDGES)
                p[i] = edges[rest % N_EDGES];
            size_t used, want_used;
            enum utf8_kind want = scan_slowly(p, n, &want_used);
            enum utf8_kind kind = utf8_scan((char *)p, n, &used);
            if (kind != want || used != want_used)
                cr_assert_fail("%zu bytes %02x %02x %02x %02x: kind %d used %zu", n, p[0], p[1],
                               p[2], p[3], kind, used);
        }
    }
}

Test(utf8, every_code_point_goes_there_and_back)
{
    for (uint32_t code = 0; code < 0x110000; code++) {
        char bytes[4];
        size_t n = utf8_encode(code, bytes), used;
        bool surrogate = code >= 0xd800 && code <= 0xdfff;
        cr_assert_eq(utf8_is_valid(bytes, n, NULL), !surrogate, "U+%04X", code);
        if (!surrogate) {
            cr_assert_eq(utf8_decode((unsigned char *)bytes, &used), code);
            cr_assert_eq(used, n);
        }
    }
}

Test(utf8, the_first_bad_byte_is_told)
{
    size_t at;
    const char text[] = "0123456789abcdef\xe4\xbd\xa0\0x\xff tail";
    cr_assert_not(utf8_is_valid(text, sizeof(text) - 1, &at));
    cr_assert_eq(at, 21);
    cr_assert(utf8_is_valid(text, 21, &at));
    cr_assert_not(utf8_is_valid(text, 18, &at));
    cr_assert_eq(at, 16);
    cr_assert(utf8_is_valid("", 0, NULL));
}

static void decode_slowly(const unsigned char *p, size_t n, struct buf *out)
{
    for (size_t i = 0, used; i < n; i += used) {
        if (scan_slowly(p + i, n - i, &used) == UTF8_WHOLE)
            buf_add(out, p + i, used);
        else
            buf_adds(out, "\xef\xbf\xbd");
    }
}

static void expect_decoded(const char *bytes, size_t n, const char *want)
{
    struct utf8_lossy l = {0};
    struct buf out;
    buf_init(&out);
    utf8_lossy_add(&l, bytes, n, &out);
    utf8_lossy_end(&l, &out);
    cr_expect_str_eq(buf_cstr(&out), want);
    buf_fini(&out);
}

#define EXPECT_DECODED(bytes, want) expect_decoded(bytes, sizeof(bytes) - 1, want)
#define R "\xef\xbf\xbd"

Test(utf8, maximal_subparts)
{
    EXPECT_DECODED("\xe4\xbd\x41", R "A");
    EXPECT_DECODED("\xf0\x80\x80", R R R);
    EXPECT_DECODED("\xed\xa0\x80", R R R);
    EXPECT_DECODED("\xf0\x9f\x98", R);
    EXPECT_DECODED("\xf4\x90\x80\x80", R R R R);
    EXPECT_DECODED("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", R R R R R R R R "A");
    EXPECT_DECODED("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", R R R R "A");
    EXPECT_DECODED(R, R);
}

/* Bytes in pieces of any size decode as the whole. Only a cut character is ever held, and the
 * two bytes of a surrogate that Python's incremental decoder holds too. */
Test(utf8, any_cut_gives_the_same_text)
{
    struct rng r = {7};
    for (int round = 0; round < 20000; round++) {
        unsigned char bytes[24];
        size_t n = (size_t)rng_int(&r, 25), done = 0;
        for (size_t i = 0; i < n; i++)
            bytes[i] = edges[rng_int(&r, N_EDGES)];
        struct buf want, got;
        buf_init(&want);
        buf_init(&got);
        decode_slowly(bytes, n, &want);
        struct utf8_lossy l = {0};
        while (done < n) {
            size_t step = 1 + (size_t)rng_int(&r, (int32_t)(n - done));
            utf8_lossy_add(&l, (char *)bytes + done, step, &got);
            done += step;
            /* All that is not held has been given. */
            struct buf so_far;
            buf_init(&so_far);
            decode_slowly(bytes, done - l.n_held, &so_far);
            cr_assert_eq(so_far.len, got.len, "seed 7 round %d", round);
            bool half = l.n_held == 2 && (unsigned char)l.held[0] == 0xed &&
                        (unsigned char)l.held[1] >= 0xa0;
            if (l.n_held > 0 && !half) {
                size_t used;
                cr_assert_eq(utf8_scan(l.held, l.n_held, &used), UTF8_CUT);
                cr_assert_eq(used, l.n_held);
            }
            buf_fini(&so_far);
        }
        utf8_lossy_end(&l, &got);
        cr_assert_eq(want.len, got.len, "seed 7 round %d", round);
        cr_assert(want.len == 0 || memcmp(want.data, got.data, want.len) == 0);
        buf_fini(&want);
        buf_fini(&got);
    }
}
