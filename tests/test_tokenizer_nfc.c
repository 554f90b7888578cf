/* NFC, held to utf8proc_map over the whole of each run between inert code points: no quick
 * check, no sorting of ours. The fixtures say that this gives the reference's text. */
#include "tokenizer/util.h"

#include <utf8proc.h>

#include "leaks.h"
#include "rng.h"

TestSuite(tokenizer_nfc, .fini = leaks_check);

static void normalize_slowly(const struct char_table *c, const char *text, size_t len,
                             struct buf *out)
{
    size_t used;
    for (size_t i = 0; i < len;) {
        size_t end = i;
        while (end < len &&
               !(char_flags(c, (const unsigned char *)text + end, &used) & CHAR_NFC_INERT))
            end += used;
        if (end > i) {
            utf8proc_uint8_t *nfc = NULL;
            utf8proc_ssize_t n =
                utf8proc_map((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(end - i),
                             &nfc, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
            cr_assert_geq(n, 0);
            buf_add(out, nfc, (size_t)n);
            free(nfc);
        }
        if (end < len) {
            utf8_decode((const unsigned char *)text + end, &used);
            buf_add(out, text + end, used);
            end += used;
        }
        i = end;
    }
}

/* Asserts that both ways agree; true when text is in NFC already. */
static bool check(const struct char_table *c, struct nfc_scratch *s, const char *text,
                  size_t len)
{
    struct buf want;
    const char *out;
    size_t out_len;

    buf_init(&want);
    normalize_slowly(c, text, len, &want);
    cr_assert_eq(nfc_normalize(c, s, text, len, &out, &out_len), 0);
    if (out_len != want.len || memcmp(out, want.data, out_len) != 0) {
        for (size_t i = 0; i < len; i++)
            fprintf(stderr, "\\x%02x", (unsigned char)text[i]);
        cr_assert_fail(" normalizes in another way");
    }
    buf_fini(&want);
    return out == text;
}

static uint32_t random_code(struct rng *r)
{
    /* Where combinations are: Latin and marks, Indic, Hangul, kana, CJK compatibility, the
     * later planes; and what came after the reference's data. */
    static const uint32_t starts[] = {
        0x40,    0xc0,    0x300,   0x320,   0x340,  0x5b0,  0x640,   0x7f0,   0x890,
        0x8ca,   0x930,   0x9be,   0xb47,   0xc3c,  0xdd0,  0xf40,   0x1025,  0x1100,
        0x1160,  0x11a0,  0x1ab0,  0x1b05,  0x1df0, 0x1e00, 0x1f00,  0x2126,  0x226e,
        0x3040,  0x3090,  0xac00,  0xd780,  0xf900, 0xfb1d, 0x11099, 0x11130, 0x11347,
        0x11930, 0x1d150, 0x1d1b0, 0x1e4e8, 0x2f800};
    uint32_t code;
    if (rng_int(r, 16) == 0) {
        do
            code = (uint32_t)rng_int(r, 0x110000);
        while (code >= 0xd800 && code <= 0xdfff);
        return code;
    }
    code = starts[rng_int(r, (int32_t)(sizeof(starts) / sizeof(starts[0])))];
    return code + (uint32_t)rng_int(r, 32);
}

Test(tokenizer_nfc, random_strings)
{
    struct char_table c;
    struct nfc_scratch s = {0};
    struct rng r = {5};
    char text[4 * 32];
    int already = 0;

    cr_assert_eq(char_table_init(&c), 0);
    for (int round = 0; round < 200000; round++) {
        size_t len = 0;
        for (int n = 1 + rng_int(&r, rng_int(&r, 8) ? 6 : 32); n > 0; n--)
            len += utf8_encode(random_code(&r), text + len);
        already += check(&c, &s, text, len);
    }
    /* Both outcomes are common. */
    cr_expect_gt(already, 20000);
    cr_expect_lt(already, 180000);
    nfc_scratch_fini(&s);
    char_table_fini(&c);
}

Test(tokenizer_nfc, every_code_point_in_context)
{
    static const char *const contexts[][2] = {
        {"", ""},
        {"e", "\xcc\x81"},                /* a letter and an acute */
        {"e\xcc\xa3", "\xcc\x81"},        /* between marks of classes 220 and 230 */
        {"\xea\xb0\x80", "\xe1\x86\xa8"}, /* after a Hangul LV, before a final */
    };
    struct char_table c;
    struct nfc_scratch s = {0};

    cr_assert_eq(char_table_init(&c), 0);
    for (uint32_t code = 0; code < 0x110000; code++) {
        char text[32];
        if (code >= 0xd800 && code <= 0xdfff)
            continue;
        for (size_t k = 0; k < 4; k++) {
            size_t len = strlen(contexts[k][0]);
            memcpy(text, contexts[k][0], len);
            len += utf8_encode(code, text + len);
            memcpy(text + len, contexts[k][1], strlen(contexts[k][1]));
            check(&c, &s, text, len + strlen(contexts[k][1]));
        }
        /* CJK, Hangul and the unassigned planes are long and uniform. */
        if (code >= 0x4e00 && code < 0xd700)
            code += 26;
        if (code >= 0x30000)
            code += 1021;
    }
    nfc_scratch_fini(&s);
    char_table_fini(&c);
}

static void expect_nfc(const char *text, size_t len, const char *want, size_t want_len)
{
    struct char_table c;
    struct nfc_scratch s = {0};
    const char *out;
    size_t out_len;

    cr_assert_eq(char_table_init(&c), 0);
    cr_assert_eq(nfc_normalize(&c, &s, text, len, &out, &out_len), 0);
    cr_expect(out_len == want_len && memcmp(out, want, want_len) == 0, "NFC of %s is %.*s",
              text, (int)out_len, out);
    nfc_scratch_fini(&s);
    char_table_fini(&c);
}

#define EXPECT_NFC(text, want) expect_nfc(text, sizeof(text) - 1, want, sizeof(want) - 1)

Test(tokenizer_nfc, changes_more_than_marks)
{
    EXPECT_NFC("e\xcc\x81", "\xc3\xa9");
    EXPECT_NFC("\xe2\x84\xab", "\xc3\x85");     /* ANGSTROM SIGN */
    EXPECT_NFC("\xcd\xbe", ";");                /* GREEK QUESTION MARK */
    EXPECT_NFC("\xe1\xbf\xaf", "`");            /* GREEK VARIA */
    EXPECT_NFC("\xe2\x80\x80", "\xe2\x80\x82"); /* EN QUAD */
    EXPECT_NFC("\xef\xa4\x80", "\xe8\xb1\x88"); /* CJK COMPATIBILITY IDEOGRAPH-F900 */
    EXPECT_NFC(">\xcc\xb8", "\xe2\x89\xaf");
    EXPECT_NFC("\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81");
}

Test(tokenizer_nfc, nul_is_a_character)
{
    EXPECT_NFC("a\0e\xcc\x81\0", "a\0\xc3\xa9\0");
}

Test(tokenizer_nfc, what_the_reference_s_data_do_not_know)
{
    /* U+11A7 after a Hangul LV syllable: utf8proc 2.8.0 loses it. */
    EXPECT_NFC("\xea\xb0\x80\xe1\x86\xa7", "\xea\xb0\x80\xe1\x86\xa7");
    /* U+11935 U+11930 stay two. */
    EXPECT_NFC("\xf0\x91\xa4\xb5\xf0\x91\xa4\xb0", "\xf0\x91\xa4\xb5\xf0\x91\xa4\xb0");
    /* U+08CA, class 230 since Unicode 14, is not moved behind U+0323, class 220. */
    EXPECT_NFC("a\xe0\xa3\x8a\xcc\xa3", "a\xe0\xa3\x8a\xcc\xa3");
    /* U+0301, class 230, is. */
    EXPECT_NFC("b\xcc\x81\xcc\xa3", "\xe1\xb8\x85\xcc\x81");
    EXPECT_NFC("x\xcc\x81\xcc\xa3", "x\xcc\xa3\xcc\x81");
}

Test(tokenizer_nfc, text_in_nfc_is_not_copied)
{
    static const char text[] =
        "plain, \xc3\xa9t\xc3\xa9, \xe4\xbd\xa0\xe5\xa5\xbd, "
        "\xed\x95\x9c\xea\xb8\x80, \xe0\xa4\xb9\xe0\xa4\xbf\xe0\xa4\xa8\xe0"
        "\xa5\x8d\xe0\xa4\xa6\xe0\xa5\x80";
    struct char_table c;
    struct nfc_scratch s = {0};
    cr_assert_eq(char_table_init(&c), 0);
    cr_expect(check(&c, &s, text, sizeof(text) - 1));
    nfc_scratch_fini(&s);
    char_table_fini(&c);
}

/* Marks in the wrong order, all on one letter. Sorting by insertion would take hours. */
Test(tokenizer_nfc, many_marks_are_not_quadratic)
{
    struct char_table c;
    struct nfc_scratch s = {0};
    struct buf text;
    const char *out;
    size_t out_len, n = 1000000;

    cr_assert_eq(char_table_init(&c), 0);
    buf_init(&text);
    buf_addc(&text, 'x');
    for (size_t i = 0; i < n; i++)
        buf_adds(&text, "\xcc\x81\xcc\xa3");
    cr_assert_eq(nfc_normalize(&c, &s, text.data, text.len, &out, &out_len), 0);
    cr_assert_eq(out_len, text.len);
    for (size_t i = 0; i < 2 * n; i++)
        cr_assert_eq((unsigned char)out[2 + 2 * i], i < n ? 0xa3 : 0x81);
    buf_fini(&text);
    nfc_scratch_fini(&s);
    char_table_fini(&c);
}
