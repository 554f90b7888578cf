/* The tokenizer as a whole: the reference's ids and text, and what callers rely on. The
 * pitfalls of the fixtures' README that show in ids are here and in the cases; those of the
 * split, of NFC and of merging have files of their own. */
#include "tokenizer/util.h"

#include <sys/resource.h>

#include "leaks.h"
#include "tokenizer/sha256.h"

TestSuite(tokenizer, .fini = leaks_check);

/* ---- cases: text, ids, text */

static void check_case(void *arg, const json_t *line)
{
    const struct tokenizer *t = arg;
    size_t len, name_len, decoded_len;
    const char *text = text_of(line, "text", &len);
    const char *name = text_of(line, "name", &name_len);
    const char *decoded = text_of(line, "decoded", &decoded_len);
    const json_t *want = json_object_get(line, "ids");
    int32_t n, *ids = encode(t, text, len, &n);

    bool same = (size_t)n == json_array_size(want);
    for (int32_t i = 0; i < n && same; i++)
        same = ids[i] == json_integer_value(json_array_get(want, (size_t)i));
    cr_expect(same, "%s: ids", name);
    struct buf out;
    buf_init(&out);
    tokenizer_decode(t, ids, (size_t)n, false, &out);
    cr_expect(out.len == decoded_len && (out.len == 0 || !memcmp(out.data, decoded, out.len)),
              "%s: decoded", name);
    buf_fini(&out);
    free(ids);
}

static void check_stream(void *arg, const json_t *line)
{
    const struct tokenizer *t = arg;
    size_t len, name_len;
    const char *text = text_of(line, "text", &len);
    const char *name = text_of(line, "name", &name_len);
    const json_t *ids = json_object_get(line, "ids");
    const json_t *pieces = json_object_get(line, "pieces");
    size_t n = json_array_size(ids), before = 0;
    struct tokenizer_stream s;
    struct buf out;

    buf_init(&out);
    tokenizer_stream_init(&s, t, json_is_true(json_object_get(line, "skip_special_tokens")));
    cr_expect_eq(json_array_size(pieces), n + 1, "%s", name);
    for (size_t i = 0; i <= n; i++) {
        const json_t *piece = json_array_get(pieces, i);
        if (i < n)
            tokenizer_stream_push(&s, (int32_t)json_integer_value(json_array_get(ids, i)),
                                  &out);
        else
            tokenizer_stream_finish(&s, &out);
        cr_expect(out.len - before == json_string_length(piece) &&
                      (out.len == before ||
                       !memcmp(out.data + before, json_string_value(piece), out.len - before)),
                  "%s: piece %zu", name, i);
        before = out.len;
    }
    cr_expect(out.len == len && (len == 0 || !memcmp(out.data, text, len)), "%s: text", name);
    buf_fini(&out);
}

Test(tokenizer, demo_cases)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    cr_expect_eq(each_case("tests/tokenizer/cases_demo.jsonl", check_case, t), 436);
    cr_expect_gt(each_case("tests/tokenizer/decode_cases_demo.jsonl", check_stream, t), 40);
    tokenizer_free(t);
}

static void check_fixture(const char *tokenizer, const char *cases, const char *streams)
{
    if (!is_there(cases))
        cr_skip_test("no fixtures beside the source tree");
    struct tokenizer *t = load_tokenizer(tokenizer);
    cr_expect_eq(each_case(cases, check_case, t), 1366);
    cr_expect_gt(each_case(streams, check_stream, t), 40);
    tokenizer_free(t);
}

Test(tokenizer, fixture_demo)
{
    check_fixture(DEMO, FIXTURES "cases_demo.jsonl", FIXTURES "decode_cases_demo.jsonl");
}

Test(tokenizer, fixture_qwen)
{
    check_fixture(FIXTURES "qwen/tokenizer.json", FIXTURES "cases_qwen.jsonl",
                  FIXTURES "decode_cases_qwen.jsonl");
}

Test(tokenizer, fixture_qwen35)
{
    check_fixture(FIXTURES "qwen35/tokenizer.json", FIXTURES "cases_qwen35.jsonl",
                  FIXTURES "decode_cases_qwen35.jsonl");
}

/* ---- the bytes of every token */

static void check_token_bytes(const char *tokenizer, const char *name)
{
    if (!is_there(FIXTURES "token_bytes.json"))
        cr_skip_test("no fixtures beside the source tree");
    json_error_t error;
    json_t *all = json_load_file(source_path(FIXTURES "token_bytes.json"), 0, &error);
    const json_t *want = json_object_get(all, name);
    cr_assert_not_null(want);
    struct tokenizer *t = load_tokenizer(tokenizer);
    struct buf bytes;
    char hex[65];

    buf_init(&bytes);
    size_t total = 0;
    for (int32_t id = 0; id < tokenizer_size(t); id++) {
        size_t len;
        const char *token = tokenizer_token_bytes(t, id, &len);
        const unsigned char prefix[4] = {(unsigned char)len, (unsigned char)(len >> 8), 0, 0};
        buf_add(&bytes, prefix, 4);
        buf_add(&bytes, token, len);
        total += len;
    }
    sha256_hex(bytes.data, bytes.len, hex);
    cr_expect_str_eq(hex, json_string_value(json_object_get(want, "sha256")), "%s", name);
    cr_expect_eq(tokenizer_size(t), json_integer_value(json_object_get(want, "tokens")));
    cr_expect_eq((json_int_t)total, json_integer_value(json_object_get(want, "bytes")));
    buf_fini(&bytes);
    json_decref(all);
    tokenizer_free(t);
}

Test(tokenizer, token_bytes_demo)
{
    check_token_bytes(DEMO, "demo");
}

Test(tokenizer, token_bytes_qwen)
{
    check_token_bytes(FIXTURES "qwen/tokenizer.json", "qwen");
}

Test(tokenizer, token_bytes_qwen35)
{
    check_token_bytes(FIXTURES "qwen35/tokenizer.json", "qwen35");
}

Test(tokenizer, sha256_is_sha256)
{
    char hex[65];
    sha256_hex("abc", 3, hex);
    cr_expect_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

/* ---- added tokens and NFC */

enum { ENDOFTEXT = 2045, IM_START, IM_END };

Test(tokenizer, added_tokens_are_found_before_nfc)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    /* '>' U+0338 is U+226F in NFC; e U+0301 must not compose over a token. */
    int32_t n, *mark = encode(t, "\xcc\xb8", 2, &n), want[16] = {IM_END};
    memcpy(want + 1, mark, (size_t)n * sizeof(*mark));
    expect_ids(t, "<|im_end|>\xcc\xb8", 12, want, n + 1);
    free(mark);
    int32_t *e = encode(t, "e", 1, &n);
    cr_assert_eq(n, 1);
    want[0] = e[0];
    want[1] = IM_END;
    mark = encode(t, "\xcc\x81", 2, &n);
    memcpy(want + 2, mark, (size_t)n * sizeof(*mark));
    expect_ids(t, "e<|im_end|>\xcc\x81", 13, want, n + 2);
    free(mark);
    free(e);
    tokenizer_free(t);
}

Test(tokenizer, added_tokens_at_any_place)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    const int32_t a = 64, less = 27;
    cr_expect_eq(tokenizer_token_bytes(t, a, &(size_t){0})[0], 'a');
    cr_expect_eq(tokenizer_token_bytes(t, less, &(size_t){0})[0], '<');
    expect_ids(t, "a<|im_end|>a", 12, (int32_t[]){a, IM_END, a}, 3);
    expect_ids(t, "<|im_end|>", 10, (int32_t[]){IM_END}, 1);
    expect_ids(t, "<|im_end|><|im_end|>", 20, (int32_t[]){IM_END, IM_END}, 2);
    expect_ids(t, "<<|im_end|>", 11, (int32_t[]){less, IM_END}, 2);
    /* The lookahead of the split sees the end of the stretch: two blanks stay one piece. */
    int32_t n, *blanks = encode(t, "  ", 2, &n), want[4];
    memcpy(want, blanks, (size_t)n * sizeof(*blanks));
    want[n] = IM_END;
    expect_ids(t, "  <|im_end|>", 12, want, n + 1);
    free(blanks);
    tokenizer_free(t);
}

/* ---- the interface */

Test(tokenizer, nothing_gives_nothing)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    int32_t n, *ids = encode(t, "", 0, &n);
    cr_expect_eq(n, 0);
    cr_expect_null(ids);
    ids = encode(t, NULL, 0, &n);
    cr_expect_eq(n, 0);
    cr_expect_null(ids);
    tokenizer_free(t);
    tokenizer_free(NULL);
}

Test(tokenizer, text_that_is_not_utf8_is_refused)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    static const char *const bad[] = {"secret\xff", "secret\xed\xa0\x80", "secret\xe4\xbd",
                                      "secret\xc0\x80"};
    for (size_t i = 0; i < 4; i++) {
        struct errmsg e = {""};
        int32_t *ids, n;
        cr_expect_eq(tokenizer_encode(t, bad[i], strlen(bad[i]), 0, &ids, &n, &e), ERR_INVALID);
        cr_expect_str_eq(e.text, "text is not UTF-8 at byte 6");
    }
    tokenizer_free(t);
}

static int encode_at_most(const struct tokenizer *t, const char *text, size_t len, int32_t max)
{
    struct errmsg e = {""};
    int32_t *ids, n;
    int code = tokenizer_encode(t, text, len, max, &ids, &n, &e);
    if (code == 0)
        free(ids);
    else
        cr_expect(strstr(e.text, "more than") != NULL, "%s", e.text);
    return code;
}

Test(tokenizer, max_ids_is_exact)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    static const char *const texts[] = {"And God said, Let there be light",
                                        "<|im_end|><|im_end|>",
                                        "a<|im_end|>",
                                        "\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xb8\x96\xe7\x95\x8c",
                                        "1234567890",
                                        "a"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        size_t len = strlen(texts[i]);
        int32_t n, *ids = encode(t, texts[i], len, &n);
        free(ids);
        for (int32_t max = 1; max < n; max++)
            cr_expect_eq(encode_at_most(t, texts[i], len, max), ERR_TOO_LARGE, "text %zu", i);
        cr_expect_eq(encode_at_most(t, texts[i], len, n), 0, "text %zu", i);
        cr_expect_eq(encode_at_most(t, texts[i], len, n + 1), 0, "text %zu", i);
    }
    tokenizer_free(t);
}

static long peak_kb(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

/* 16 MB of one letter are refused by their length alone; merging them would take 200 MB. */
Test(tokenizer, max_ids_spares_the_work)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    size_t len = (size_t)16 << 20;
    char *text = malloc(len);
    memset(text, 'a', len);
    long before_kb = peak_kb();
    cr_expect_eq(encode_at_most(t, text, len, 1000), ERR_TOO_LARGE);
    cr_expect_lt(peak_kb() - before_kb, 32 << 10);
    free(text);
    tokenizer_free(t);
}

Test(tokenizer, ids_without_a_token)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    static const int32_t none[] = {-1, 2048, INT32_MIN, INT32_MAX, 248319};
    struct buf out;
    buf_init(&out);
    cr_expect_eq(tokenizer_size(t), 2048);
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        size_t len = 1;
        cr_expect_null(tokenizer_token_bytes(t, none[i], &len));
        cr_expect_eq(len, 0);
        cr_expect_not(tokenizer_is_special(t, none[i]));
        out.len = 0;
        cr_expect(tokenizer_json_token(t, none[i], &out));
        tokenizer_json_spelling(t, none[i], &out);
        cr_expect_str_eq(buf_cstr(&out), "\"\"\"\"");
    }
    out.len = 0;
    tokenizer_decode(t, none, 5, false, &out);
    cr_expect_eq(out.len, 0);
    buf_fini(&out);
    tokenizer_free(t);
}

static void expect_json(const struct tokenizer *t, int32_t id, const char *want,
                        bool want_exact, const char *want_spelling)
{
    struct buf out;
    buf_init(&out);
    cr_expect_eq(tokenizer_json_token(t, id, &out), want_exact, "id %d", id);
    cr_expect_str_eq(buf_cstr(&out), want);
    out.len = 0;
    tokenizer_json_spelling(t, id, &out);
    cr_expect_str_eq(buf_cstr(&out), want_spelling);
    buf_fini(&out);
}

Test(tokenizer, tokens_as_json)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    expect_json(t, 64, "\"a\"", true, "\"a\"");
    expect_json(t, 1, "\"\\\"\"", true, "\"\\\"\"");
    expect_json(t, 59, "\"\\\\\"", true, "\"\\\\\"");
    expect_json(t, 188, "\"\\u0000\"", true, "\"\xc4\x80\"");
    expect_json(t, 198, "\"\\n\"", true, "\"\xc4\x8a\"");
    expect_json(t, 220, "\" \"", true, "\"\xc4\xa0\"");
    expect_json(t, 187, "\"\xef\xbf\xbd\"", false, "\"\xc3\xbf\""); /* byte FF */
    expect_json(t, 222, "\"\xef\xbf\xbd\"", false, "\"\xc4\xa2\""); /* byte 80 */
    expect_json(t, IM_END, "\"<|im_end|>\"", true, "\"<|im_end|>\"");
    cr_expect(tokenizer_is_special(t, IM_END));
    cr_expect_not(tokenizer_is_special(t, 64));
    tokenizer_free(t);
}

/* All spellings are the strings of the file, so that /tokenize answers as vLLM does. */
Test(tokenizer, spellings_are_those_of_the_file)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    json_error_t error;
    json_t *file = json_load_file(source_path(DEMO), 0, &error), *id;
    const char *spelling;
    struct buf got, want;
    buf_init(&got);
    buf_init(&want);
    json_object_foreach(json_object_get(json_object_get(file, "model"), "vocab"), spelling, id)
    {
        got.len = want.len = 0;
        tokenizer_json_spelling(t, (int32_t)json_integer_value(id), &got);
        buf_json_string(&want, spelling, strlen(spelling));
        cr_expect_str_eq(buf_cstr(&got), buf_cstr(&want));
    }
    buf_fini(&got);
    buf_fini(&want);
    json_decref(file);
    tokenizer_free(t);
}

/* ---- long pieces: none of these is quadratic */

static void encode_run(const struct tokenizer *t, const char *unit, size_t n)
{
    size_t len = strlen(unit);
    char *text = malloc(n * len);
    for (size_t i = 0; i < n; i++)
        memcpy(text + i * len, unit, len);
    int32_t n_ids, *ids = encode(t, text, n * len, &n_ids);
    cr_expect_gt(n_ids, 0);
    free(ids);
    free(text);
}

Test(tokenizer, long_pieces)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    encode_run(t, "a", 1000000);
    encode_run(t, " ", 1000000);
    encode_run(t, "\xe0\xb8\x81", 300000);             /* Thai */
    encode_run(t, "\xcc\x81\xcc\xa3", 250000);         /* marks that NFC sorts */
    encode_run(t, "\xe1\x84\x80\xe1\x85\xa1", 100000); /* Hangul that NFC joins */
    encode_run(t, "<|im_end|", 100000);                /* all but an added token */
    encode_run(t, "<|im_end|>", 100000);
    tokenizer_free(t);
}

/* ---- what the files beside tokenizer.json say */

Test(tokenizer, info_of_the_demo_model)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    const struct tokenizer_info *info = tokenizer_get_info(t);
    cr_expect_str_eq(info->eos_token, "<|endoftext|>");
    cr_expect_str_eq(info->bos_token, "<|endoftext|>");
    cr_expect_str_eq(info->pad_token, "<|endoftext|>");
    cr_expect_null(info->chat_template);
    tokenizer_free(t);
}
