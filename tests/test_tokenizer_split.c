/* The split, held to PCRE2, and the character classes under it. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer/util.h"

#include <pcre2.h>

#include "leaks.h"
#include "rng.h"

TestSuite(tokenizer_split, .fini = leaks_check);

/* Neither random texts nor contexts are long; past this PCRE2 is broken, not slow. */
#define MATCH_LIMIT 1000000

/* PCRE2 tries classes of hundreds of ranges one by one; 200,000 agreed too, in 10 s. */
#define N_ROUNDS 8000

/* ---- classes */

static void check_ranges(const struct char_table *c, const json_t *ranges, uint8_t flag,
                         const char *name)
{
    uint32_t code = 0;
    size_t i;
    const json_t *range;
    json_array_foreach(ranges, i, range)
    {
        uint32_t first = (uint32_t)json_integer_value(json_array_get(range, 0));
        uint32_t last = (uint32_t)json_integer_value(json_array_get(range, 1));
        for (; code < first; code++)
            cr_assert_not(char_flags_of(c, code) & flag, "U+%04X is in %s", code, name);
        for (; code <= last; code++)
            cr_assert(char_flags_of(c, code) & flag, "U+%04X is not in %s", code, name);
    }
    for (; code < 0x110000; code++)
        cr_assert_not(char_flags_of(c, code) & flag, "U+%04X is in %s", code, name);
}

Test(tokenizer_split, classes_are_the_reference_s)
{
    if (!is_there(FIXTURES "unicode.json"))
        cr_skip_test("no fixtures beside the source tree");
    struct char_table c;
    json_error_t error;
    json_t *all = json_load_file(source_path(FIXTURES "unicode.json"), 0, &error);
    const json_t *classes = json_object_get(all, "classes");

    cr_assert_eq(char_table_init(&c), 0);
    check_ranges(&c, json_object_get(classes, "L"), CHAR_LETTER, "L");
    check_ranges(&c, json_object_get(classes, "M"), CHAR_MARK, "M");
    check_ranges(&c, json_object_get(classes, "N"), CHAR_NUMBER, "N");
    check_ranges(&c, json_object_get(classes, "space"), CHAR_SPACE, "space");
    check_ranges(&c, json_object_get(all, "nfc_inert"), CHAR_NFC_INERT, "nfc_inert");
    json_decref(all);
    char_table_fini(&c);
}

/* White_Space, all 25 of it; U+180E, U+200B, U+FEFF, U+2060 and U+001C..001F are not blanks. */
Test(tokenizer_split, blanks)
{
    static const uint32_t blanks[] = {0x09,   0x0a,   0x0b,   0x0c,   0x0d,   0x20,   0x85,
                                      0xa0,   0x1680, 0x2000, 0x2001, 0x2002, 0x2003, 0x2004,
                                      0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200a, 0x2028,
                                      0x2029, 0x202f, 0x205f, 0x3000};
    struct char_table c;
    size_t n = 0;
    cr_assert_eq(char_table_init(&c), 0);
    for (uint32_t code = 0; code < 0x110000; code++)
        n += (char_flags_of(&c, code) & CHAR_SPACE) != 0;
    cr_expect_eq(n, 25);
    for (size_t i = 0; i < 25; i++)
        cr_expect(char_flags_of(&c, blanks[i]) & CHAR_SPACE, "U+%04X", blanks[i]);
    char_table_fini(&c);
}

/* ---- PCRE2 */

static void add_class(struct buf *out, const struct char_table *c, uint8_t flags)
{
    for (uint32_t code = 0; code < 0x110000; code++) {
        uint32_t first = code;
        while (code < 0x110000 && (char_flags_of(c, code) & flags))
            code++;
        if (code > first)
            buf_printf(out, "\\x{%x}-\\x{%x}", first, code - 1);
    }
}

/* The pattern with \p{L}, \p{M}, \p{N}, \s and \S as the table has them: \p{L} becomes ranges,
 * in or out of brackets. */
static void add_pattern(struct buf *out, const struct char_table *c, const char *pattern)
{
    static const struct {
        const char *text;
        uint8_t flags;
        const char *open;
    } names[] = {{"\\p{L}", CHAR_LETTER, "["},
                 {"\\p{M}", CHAR_MARK, "["},
                 {"\\p{N}", CHAR_NUMBER, "["},
                 {"\\s", CHAR_SPACE, "["},
                 {"\\S", CHAR_SPACE, "[^"}};
    bool inside = false;
    while (*pattern) {
        size_t i = 0;
        while (i < 5 && strncmp(pattern, names[i].text, strlen(names[i].text)) != 0)
            i++;
        if (i < 5) {
            buf_adds(out, inside ? "" : names[i].open);
            add_class(out, c, names[i].flags);
            buf_adds(out, inside ? "" : "]");
            pattern += strlen(names[i].text);
            continue;
        }
        inside = *pattern == '[' || (inside && *pattern != ']');
        buf_addc(out, *pattern++);
    }
}

struct matcher {
    pcre2_code *code;
    pcre2_match_data *data;
    pcre2_match_context *context;
};

static void matcher_open(struct matcher *m, const char *pattern, size_t len)
{
    int error;
    PCRE2_SIZE at;
    m->code = pcre2_compile((PCRE2_SPTR)pattern, len, PCRE2_UTF, &error, &at, NULL);
    cr_assert_not_null(m->code, "pattern: error %d at %zu", error, at);
    cr_assert_eq(pcre2_jit_compile(m->code, PCRE2_JIT_COMPLETE), 0);
    m->data = pcre2_match_data_create_from_pattern(m->code, NULL);
    m->context = pcre2_match_context_create(NULL);
    pcre2_set_match_limit(m->context, MATCH_LIMIT);
}

static void matcher_close(struct matcher *m)
{
    pcre2_match_context_free(m->context);
    pcre2_match_data_free(m->data);
    pcre2_code_free(m->code);
}

/* The length of the match at the start of text. An error, as a match limit, is a failure. */
static size_t match_length(const struct matcher *m, const char *text, size_t len)
{
    int n = pcre2_match(m->code, (PCRE2_SPTR)text, len, 0, PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK,
                        m->data, m->context);
    cr_assert_eq(n, 1, "PCRE2 answers %d", n);
    return pcre2_get_ovector_pointer(m->data)[1];
}

static bool same_split(const struct char_table *c, enum split_family family,
                       const struct matcher *m, const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + len;
    while (p < end) {
        size_t n = split_next(c, family, p, end);
        if (n != match_length(m, (const char *)p, (size_t)(end - p)))
            return false;
        p += n;
    }
    return true;
}

static void print_text(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        fprintf(stderr, "\\x%02x", (unsigned char)text[i]);
    fprintf(stderr, "\n");
}

static void assert_same(const struct char_table *c, enum split_family family,
                        const struct matcher *m, const char *text, size_t len)
{
    if (same_split(c, family, m, text, len))
        return;
    print_text(text, len);
    cr_assert_fail("family %d splits this in another way than PCRE2", family);
}

/* Characters that the alternatives tell apart, and some of each class from each length of
 * UTF-8. */
static const uint32_t specials[] = {
    '\'',   '\'',     's',     't',     'r',     'e',     'v',     'm',     'l',    'd',
    'S',    'L',      ' ',     ' ',     ' ',     '\t',    '\n',    '\n',    '\r',   '!',
    '.',    '0',      '9',     0,       0x7f,    0x85,    0xa0,    0xaa,    0xb2,   0xe9,
    0x17f,  0x2019,   0x301,   0x345,   0x180e,  0x200b,  0x2028,  0x3000,  0x4e00, 0xac00,
    0xbd,   0x2167,   0x663,   0x1c89,  0x897,   0x10d40, 0x1f600, 0x20000, 0xe000, 0xfffe,
    0xfeff, 0x10ffff, 0x11380, 0x113b8, 0x1ccf0, 0x212a};
#define N_SPECIALS ((int32_t)(sizeof(specials) / sizeof(specials[0])))

static size_t random_text(struct rng *r, char *out, int32_t max_chars)
{
    size_t len = 0;
    int32_t n = 1 + rng_int(r, max_chars);
    uint32_t code = 0;
    while (n > 0) {
        /* Runs, so that what repeats in the pattern repeats in the text. */
        if (rng_int(r, 3) != 0)
            code = specials[rng_int(r, N_SPECIALS)];
        else if (rng_int(r, 8) == 0)
            do
                code = (uint32_t)rng_int(r, 0x110000);
            while (code >= 0xd800 && code <= 0xdfff);
        int32_t run = rng_int(r, 4) == 0 ? 1 + rng_int(r, 4) : 1;
        for (; run > 0 && n > 0; run--, n--)
            len += utf8_encode(code, out + len);
    }
    return len;
}

static void compare_random(enum split_family family, const char *pattern, size_t pattern_len,
                           const struct char_table *c)
{
    struct rng r = {family + 11};
    struct matcher m;
    char text[4 * 24];

    matcher_open(&m, pattern, pattern_len);
    for (int round = 0; round < N_ROUNDS; round++) {
        size_t len = random_text(&r, text, 24);
        assert_same(c, family, &m, text, len);
    }
    matcher_close(&m);
}

static void compare_with_classes(enum split_family family)
{
    struct char_table c;
    struct buf pattern;
    cr_assert_eq(char_table_init(&c), 0);
    buf_init(&pattern);
    add_pattern(&pattern, &c, split_patterns[family]);
    compare_random(family, pattern.data, pattern.len, &c);
    buf_fini(&pattern);
    char_table_fini(&c);
}

Test(tokenizer_split, qwen2_as_pcre2)
{
    compare_with_classes(SPLIT_QWEN2);
}

Test(tokenizer_split, qwen3_5_as_pcre2)
{
    compare_with_classes(SPLIT_QWEN3_5);
}

/* Code points of every run, where each alternative could take one or stop before it. */
static void compare_runs(enum split_family family)
{
    static const char *const contexts[][2] = {{"", ""},       {"a", "b"},   {" ", "!"},
                                              {"\n ", " \n"}, {"'", "s"},   {"!", "\xcc\x81"},
                                              {" ", "s"},     {"  ", "  x"}};
    struct char_table c;
    struct buf pattern;
    struct matcher m;

    cr_assert_eq(char_table_init(&c), 0);
    buf_init(&pattern);
    add_pattern(&pattern, &c, split_patterns[family]);
    matcher_open(&m, pattern.data, pattern.len);
    /* Of a run of equal flags the first stands for all. */
    for (uint32_t code = 0; code < 0x110000; code++) {
        if ((code >= 0xd800 && code <= 0xdfff) ||
            (code > 0x100 && char_flags_of(&c, code) == char_flags_of(&c, code - 1)))
            continue;
        for (size_t k = 0; k < sizeof(contexts) / sizeof(contexts[0]); k++) {
            char text[16], one[5] = {0};
            size_t before = strlen(contexts[k][0]), after = strlen(contexts[k][1]);
            size_t n = utf8_encode(code, one);
            memcpy(text, contexts[k][0], before);
            memcpy(text + before, one, n);
            memcpy(text + before + n, contexts[k][1], after);
            assert_same(&c, family, &m, text, before + n + after);
        }
    }
    matcher_close(&m);
    buf_fini(&pattern);
    char_table_fini(&c);
}

Test(tokenizer_split, every_run_of_code_points_qwen2)
{
    compare_runs(SPLIT_QWEN2);
}

Test(tokenizer_split, every_run_of_code_points_qwen3_5)
{
    compare_runs(SPLIT_QWEN3_5);
}

static void compare_with_fixture(enum split_family family, const char *name)
{
    if (!is_there(FIXTURES "unicode.json"))
        cr_skip_test("no fixtures beside the source tree");
    struct char_table c;
    json_error_t error;
    json_t *all = json_load_file(source_path(FIXTURES "unicode.json"), 0, &error);
    const json_t *pattern = json_object_get(json_object_get(all, "pcre2_patterns"), name);

    cr_assert_eq(char_table_init(&c), 0);
    compare_random(family, json_string_value(pattern), json_string_length(pattern), &c);
    char_table_fini(&c);
    json_decref(all);
}

Test(tokenizer_split, qwen2_as_the_fixture_s_pattern)
{
    compare_with_fixture(SPLIT_QWEN2, "qwen");
}

Test(tokenizer_split, qwen3_5_as_the_fixture_s_pattern)
{
    compare_with_fixture(SPLIT_QWEN3_5, "qwen35");
}

/* ---- by hand */

/* pieces are separated by U+001F, which no text here has. */
static void expect_split(enum split_family family, const char *pieces)
{
    struct char_table c;
    char text[256];
    size_t ends[64], n = 0, len = 0;

    for (const char *p = pieces;; p++) {
        if (*p == '\x1f' || *p == '\0')
            ends[n++] = len;
        else
            text[len++] = *p;
        if (*p == '\0')
            break;
    }
    text[len] = '\0';
    cr_assert_eq(char_table_init(&c), 0);
    size_t at = 0;
    for (size_t i = 0; i < n && at < len; i++) {
        at += split_next(&c, family, (unsigned char *)text + at, (unsigned char *)text + len);
        cr_expect_eq(at, ends[i], "piece %zu of %s ends at %zu", i, text, at);
    }
    cr_expect_eq(at, len);
    char_table_fini(&c);
}

#define S "\x1f"

Test(tokenizer_split, contractions)
{
    for (int f = 0; f < SPLIT_N_FAMILIES; f++) {
        expect_split(f, "it" S "'s" S "'S" S "'ve" S "'LL" S "'d");
        expect_split(f, "'ll" S "ama");        /* before anything else, at the start too */
        expect_split(f, "a" S " '" S "llama"); /* a blank takes the apostrophe along */
        expect_split(f, "'\xc5\xbf" S "t");    /* U+017F is an s to (?i:) */
        expect_split(f, "\xe2\x80\x99s");      /* U+2019 is no apostrophe */
        expect_split(f, "'\xe2\x84\xaa");      /* KELVIN SIGN: a letter like others */
        expect_split(f, "'rx" S "'v");
        expect_split(f, "'");
    }
}

Test(tokenizer_split, numbers_are_one_code_point)
{
    for (int f = 0; f < SPLIT_N_FAMILIES; f++)
        expect_split(f, "1" S "2" S "\xc2\xbd" S "\xe2\x85\xa7" S "\xc2\xb2" S "\xd9\xa3");
}

Test(tokenizer_split, blanks_and_line_ends)
{
    for (int f = 0; f < SPLIT_N_FAMILIES; f++) {
        expect_split(f, "a" S "  " S " b" S "   ");
        expect_split(f, " \n \n" S "  " S " x");
        expect_split(f, "!!\r\n\n" S " " S " y");
        expect_split(f, "\n" S "x");
        expect_split(f, "\tx" S "\xc2\xa0y");
        expect_split(f, "\xe3\x80\x80" S "\xe3\x80\x80z");
    }
}

/* Where the families differ: \p{M} joins words and leaves signs in Qwen3.5, but may also be the
 * one character before a word. */
Test(tokenizer_split, marks)
{
    expect_split(SPLIT_QWEN2, "a" S "\xcc\x81"
                              "b" S "\xcc\x81\xcc\x81");
    expect_split(SPLIT_QWEN3_5, "a\xcc\x81"
                                "b\xcc\x81\xcc\x81");
    expect_split(SPLIT_QWEN2, " \xcc\x81!");
    expect_split(SPLIT_QWEN3_5, " \xcc\x81" S "!");
}

/* Unicode 16: letters that PCRE2 10.42 does not know. */
Test(tokenizer_split, new_letters)
{
    expect_split(SPLIT_QWEN2, "\xe1\xb2\x89" S "'s");
    expect_split(SPLIT_QWEN2, "\xe1\xb2\x89" S "(int");
}

/* 20 million blanks before something else: PCRE2's default match limit would be an error
 * here. */
Test(tokenizer_split, long_runs)
{
    struct char_table c;
    size_t len = 20000000;
    char *text = malloc(len + 1);
    cr_assert_eq(char_table_init(&c), 0);
    memset(text, ' ', len);
    text[len] = 'x';
    const unsigned char *p = (unsigned char *)text, *end = p + len + 1;
    for (int f = 0; f < SPLIT_N_FAMILIES; f++) {
        cr_expect_eq(split_next(&c, f, p, end), len - 1);
        cr_expect_eq(split_next(&c, f, p + len - 1, end), 2);
        cr_expect_eq(split_next(&c, f, p, end - 1), len);
    }
    free(text);
    char_table_fini(&c);
}
