/* What tokenizer_load refuses, and how it says so; and that no file makes it crash. */
#include "leaks.h"
#include "tokenizer/random_vocab.h"

#include <sys/stat.h>

TestSuite(tokenizer_load, .fini = leaks_check);

static int load_text(const char *text, size_t len, struct tokenizer **t, struct errmsg *e)
{
    char path[64];
    write_temporary(path, text, len);
    int code = tokenizer_load(path, t, e);
    unlink(path);
    return code;
}

/* A file with the 256 bytes and the merges "a b" and "ab c". */
static void small_file(struct buf *out)
{
    struct vocab *v = malloc(sizeof(*v));
    v->n = 258;
    for (int i = 0; i < 256; i++)
        v->tokens[i] = (struct vocab_token){{(unsigned char)i}, 1};
    v->tokens[256] = (struct vocab_token){"ab", 2};
    v->tokens[257] = (struct vocab_token){"abc", 3};
    v->merges[0] = (struct merge){'a', 'b', 256};
    v->merges[1] = (struct merge){256, 'c', 257};
    v->n_merges = 2;
    buf_init(out);
    write_vocab(v, out);
    cr_assert_not_null(buf_cstr(out));
    free(v);
}

/* out = text with the first `from` in it replaced by `to`. */
static void replace(const char *text, const char *from, const char *to, struct buf *out)
{
    const char *at = strstr(text, from);
    cr_assert_not_null(at, "%s is not in the file", from);
    buf_init(out);
    buf_add(out, text, (size_t)(at - text));
    buf_adds(out, to);
    buf_adds(out, at + strlen(from));
    cr_assert_not_null(buf_cstr(out));
}

static void expect_refused(const char *from, const char *to, int want, const char *message)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    struct buf file, changed;

    small_file(&file);
    replace(file.data, from, to, &changed);
    int code = load_text(changed.data, changed.len, &t, &e);
    cr_expect_eq(code, want, "%s: %d, %s", to, code, e.text);
    cr_expect(strstr(e.text, message) != NULL, "%s: %s", to, e.text);
    if (code == 0)
        tokenizer_free(t);
    buf_fini(&file);
    buf_fini(&changed);
}

static void expect_loaded(const char *from, const char *to)
{
    struct tokenizer *t = NULL;
    struct errmsg e = {""};
    struct buf file, changed;

    small_file(&file);
    replace(file.data, from, to, &changed);
    cr_expect_eq(load_text(changed.data, changed.len, &t, &e), 0, "%s: %s", to, e.text);
    if (t) {
        expect_ids(t, "abcab<end>", 10, (int32_t[]){257, 256, 5000}, 3);
        tokenizer_free(t);
    }
    buf_fini(&file);
    buf_fini(&changed);
}

#define U ERR_UNSUPPORTED
#define I ERR_INVALID

/* A post-processor whose `single` is so. */
#define TEMPLATE(single)                                                                       \
    "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[" single "],\"pair\":[]," \
    "\"special_tokens\":{}}"
#define TEXT "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}"

static const struct {
    const char *from, *to;
    const char *message;
} refusals[] = {
    {"\"version\":\"1.0\"", "\"version\":\"2.0\"",
     "version is \"2.0\"; prefilld takes \"1.0\""},
    {"\"normalizer\":{\"type\":\"NFC\"}", "\"normalizer\":{\"type\":\"NFKC\"}",
     "normalizer.type is \"NFKC\"; prefilld takes \"NFC\""},
    {"\"normalizer\":{\"type\":\"NFC\"}", "\"normalizer\":null", "normalizer is null"},
    {"\"normalizer\":{\"type\":\"NFC\"}", "\"normalizer\":{\"type\":\"NFC\",\"x\":1}",
     "normalizer has a member that prefilld does not know: \"x\""},
    {"\\\\p{L}+|", "\\\\p{L}*|", "pattern.Regex is neither"},
    {"\"Isolated\"", "\"Removed\"", "pretokenizers[0].behavior is \"Removed\""},
    {"\"invert\":false", "\"invert\":true", "pretokenizers[0].invert is true"},
    {"{\"Regex\"", "{\"String\"", "pattern.Regex is absent"},
    {"\"add_prefix_space\":false", "\"add_prefix_space\":true",
     "pretokenizers[1].add_prefix_space is true"},
    {"\"use_regex\":false}]", "\"use_regex\":true}]", "pretokenizers[1].use_regex is true"},
    {",\"use_regex\":false}]", "}]", "pretokenizers[1].use_regex is absent"},
    {"\"Sequence\"", "\"Other\"", "pre_tokenizer.type is \"Other\""},
    {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"WordPiece\"",
     "decoder.type is \"WordPiece\""},
    {"\"post_processor\":null", "\"post_processor\":{\"type\":\"BertProcessing\"}",
     "post_processor.type is \"BertProcessing\""},
    {"\"post_processor\":null", "\"post_processor\":{\"type\":\"TemplateProcessing\"}",
     "post_processor.single is absent"},
    {"\"post_processor\":null",
     TEMPLATE("{\"SpecialToken\":{\"id\":\"<end>\",\"type_id\":0}}," TEXT),
     "post_processor.single adds tokens"},
    {"\"post_processor\":null", TEMPLATE(TEXT "," TEXT), "post_processor.single adds tokens"},
    {"\"post_processor\":null", TEMPLATE(""), "post_processor.single adds tokens"},
    {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model.type is \"Unigram\""},
    {"\"dropout\":null", "\"dropout\":0.1", "model.dropout is a number"},
    {"\"unk_token\":null", "\"unk_token\":\"<unk>\"", "model.unk_token is \"<unk>\""},
    {"\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"",
     "model.continuing_subword_prefix is \"##\""},
    {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"",
     "model.end_of_word_suffix is \"</w>\""},
    {"\"byte_fallback\":false", "\"byte_fallback\":true", "model.byte_fallback is true"},
    {"\"ignore_merges\":false", "\"ignore_merges\":true", "model.ignore_merges is true"},
    {"\"model\":{", "\"model\":{\"cache\":7,",
     "model has a member that prefilld does not know: \"cache\""},
    {"{\"version\"", "{\"more\":nil,\"version\"",
     "the file has a member that prefilld does not know: \"more\""},
    {"{\"version\"", "{\"more\":[],\"version\"",
     "the file has a member that prefilld does not know: \"more\""},
    {"\"single_word\":false", "\"single_word\":true", "added_tokens[0].single_word is true"},
    {"\"lstrip\":false", "\"lstrip\":true", "added_tokens[0].lstrip is true"},
    {"\"rstrip\":false", "\"rstrip\":true", "added_tokens[0].rstrip is true"},
    {"\"normalized\":false", "\"normalized\":null", "added_tokens[0].normalized is null"},
    {"\"special\":true", "\"special\":1", "added_tokens[0].special is an integer"},
    {"[\"a\",\"b\"],[\"ab\",\"c\"]", "[\"ab\",\"c\"],[\"a\",\"b\"]",
     "model.merges[0] has a part that it or a later merge makes"},
    {"\"content\":\"<end>\"", "\"content\":\"abc\"",
     "added_tokens[0].id is 5000, but model.vocab has its content as 257"},
};

Test(tokenizer_load, parts_that_would_change_ids_are_refused_by_name)
{
    for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++)
        expect_refused(refusals[i].from, refusals[i].to, U, refusals[i].message);
}

static const struct {
    const char *from, *to;
    const char *message;
} faults[] = {
    {"{\"version\"", "[\"version\"", "the file is no JSON object"},
    {"\"merges\":[", "\"vocab\":{},\"merges\":[", "model has vocab twice"},
    {"\"padding\":null", "\"padding\":null,\"padding\":null", "the file has padding twice"},
    {"\"model\":{", "\"modem\":{", "prefilld does not know"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":\"1\",", "the id of member 0 is no integer"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":-1,", "the id of member 0 is no integer"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":1.5,", "the id of member 0 is no integer"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":1e3,", "the id of member 0 is no integer"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":01,", "the id of member 0 is no integer"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":2147483647,", "is no integer in 0..2097150"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":2147483648,", "is no integer in 0..2097150"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":99999999999999999999,", "in 0..2097150"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":2097151,", "in 0..2097150"},
    {"\"vocab\":{", "\"vocab\":{\"xyz\":5,", "two tokens have id 5, one in model.vocab"},
    {"\"vocab\":{", "\"vocab\":{\"a\":600,", "model.vocab has the token of id 97 twice"},
    {"\"vocab\":{", "\"vocab\":{\"\\u0061\":600,", "model.vocab has the token of id 97 twice"},
    {"\"vocab\":{", "\"vocab\":{\"\\ud800\":600,", "the token of member 0 is ill-formed"},
    {"\"vocab\":{", "\"vocab\":{\"\\udc00\\ud800\":600,", "member 0 is ill-formed"},
    {"\"vocab\":{", "\"vocab\":{\"\\q\":600,", "the token of member 0 is ill-formed"},
    {"\"vocab\":{", "\"vocab\":{\"x\ty\":600,", "the token of member 0 is ill-formed"},
    {"\"vocab\":{", "\"vocab\":{,", "the token of member 0 is ill-formed"},
    {"\"vocab\":{", "\"vocab\":[", "model"},
    {"\"a\":97,", "", "model.vocab has no token for byte 0x61"},
    {"\"\xc4\x80\":0,", "", "model.vocab has no token for byte 0x00"},
    {"[\"a\",\"b\"]", "[\"a\",\"xyz\"]",
     "model.merges[0]: the right part is not in model.vocab"},
    {"[\"a\",\"b\"]", "[\"xyz\",\"b\"]",
     "model.merges[0]: the left part is not in model.vocab"},
    {"[\"a\",\"b\"]", "[\"b\",\"a\"]", "model.merges[0]: what it makes is not in model.vocab"},
    {"[\"a\",\"b\"]", "[\"a\",\"b\"],[\"a\",\"b\"]", "model.merges has a pair twice"},
    {"[\"a\",\"b\"]", "[\"a\",\"b\",\"c\"]", "model.merges[0] is neither"},
    {"[\"a\",\"b\"]", "[\"a\"]", "model.merges[0] is neither"},
    {"[\"a\",\"b\"]", "\"ab\"", "model.merges[0] is neither"},
    {"[\"a\",\"b\"]", "\"a b c\"", "model.merges[0] is neither"},
    {"[\"a\",\"b\"]", "\"\"", "model.merges[0] is neither"},
    {"[\"a\",\"b\"]", "7", "model.merges[0] is neither"},
    {"[\"a\",\"b\"]", "[[[[]]]]", "model.merges[0] is neither"},
    {"\"merges\":[", "\"merges\":null,\"x\":[", "does not know"},
    {"\"id\":5000", "\"id\":97", "two tokens have id 97, one in added_tokens"},
    {"\"id\":5000", "\"id\":-1", "added_tokens[0].id is not in 0..2097150"},
    {"\"id\":5000", "\"id\":2147483647", "added_tokens[0].id is not in 0..2097150"},
    {"\"id\":5000", "\"id\":1e400", "added_tokens"},
    {"\"id\":5000", "\"id\":\"5000\"", "added_tokens[0].id is \"5000\""},
    {"\"content\":\"<end>\"", "\"content\":\"\"", "added_tokens[0].content is empty"},
    {"\"content\":\"<end>\"", "\"content\":\"\\ud800\"", "added_tokens"},
    {"\"added_tokens\":[", "\"added_tokens\":[7,", "added_tokens[0] is an integer"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":6,\"id\":7},", "added_tokens"},
    {"\"added_tokens\":[",
     "\"added_tokens\":[{\"id\":5001,\"content\":\"<end>\",\"normalized\":false,"
     "\"special\":"
     "false},",
     "added_tokens: ids 500"},
};

Test(tokenizer_load, faults_are_named)
{
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
        struct tokenizer *t;
        struct errmsg e = {""};
        struct buf file, changed;
        small_file(&file);
        replace(file.data, faults[i].from, faults[i].to, &changed);
        int code = load_text(changed.data, changed.len, &t, &e);
        cr_expect(code == I || code == U, "%s: %d, %s", faults[i].to, code, e.text);
        cr_expect(strstr(e.text, faults[i].message) != NULL, "%s: %s", faults[i].to, e.text);
        if (code == 0)
            tokenizer_free(t);
        buf_fini(&file);
        buf_fini(&changed);
    }
}

Test(tokenizer_load, forms_that_mean_the_same)
{
    expect_loaded("[\"a\",\"b\"]", "\"a b\"");
    expect_loaded("[\"a\",\"b\"]", " [ \"\\u0061\" , \"b\"\n]");
    expect_loaded("\"post_processor\":null", TEMPLATE(TEXT));
    expect_loaded("\"truncation\":null",
                  "\"truncation\":{\"direction\":\"Right\",\"max_length\":1,"
                  "\"strategy\":\"LongestFirst\",\"stride\":0}");
    expect_loaded("\"padding\":null", "\"padding\":{\"strategy\":{\"Fixed\":9},\"pad_id\":0}");
    expect_loaded("\"normalized\":false", "\"normalized\":true");
    expect_loaded("\"post_processor\":null",
                  "\"post_processor\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                  "\"trim_offsets\":false,\"use_regex\":false}");
    expect_loaded("\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"\"");
    expect_loaded("\"end_of_word_suffix\":null,", "");
    expect_loaded("\"ignore_merges\":false,", "");
    expect_loaded("\"vocab\":{", "\"new_option\":null,\"vocab\":{");
    expect_loaded("\"vocab\":{", "\"vocab\":{\"\":300,\"\xe4\xbd\xa0 \":2097150,");
    expect_loaded("{\"version\":\"1.0\",", "\n{ ");
    expect_loaded("\"special\":true", "\"special\":false");
}

/* An id far beyond the others: the table is as long, within its bound, and the gap has no
 * tokens. */
Test(tokenizer_load, gaps_between_ids)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    struct buf file, changed;
    size_t len;
    small_file(&file);
    replace(file.data, "\"id\":5000", "\"id\":2097150", &changed);
    cr_assert_eq(load_text(changed.data, changed.len, &t, &e), 0, "%s", e.text);
    cr_expect_eq(tokenizer_size(t), 2097151);
    cr_expect_null(tokenizer_token_bytes(t, 2000000, &len));
    cr_expect_not_null(tokenizer_token_bytes(t, 2097150, &len));
    cr_expect(tokenizer_is_special(t, 2097150));
    expect_ids(t, "<end>", 5, (int32_t[]){2097150}, 1);
    tokenizer_free(t);
    buf_fini(&file);
    buf_fini(&changed);
}

Test(tokenizer_load, an_added_token_of_the_vocabulary)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    struct buf file, changed;
    small_file(&file);
    replace(file.data, "\"id\":5000,\"content\":\"<end>\"", "\"id\":257,\"content\":\"abc\"",
            &changed);
    cr_assert_eq(load_text(changed.data, changed.len, &t, &e), 0, "%s", e.text);
    cr_expect_eq(tokenizer_size(t), 258);
    cr_expect(tokenizer_is_special(t, 257));
    expect_ids(t, "aabc", 4, (int32_t[]){'a', 257}, 2);
    tokenizer_free(t);
    buf_fini(&file);
    buf_fini(&changed);
}

/* Ids of tokenizers 0.23.3. Such tokens are searched last, in NFC, where a mark may have become
 * part of their end; what is spelt as one, too, is one. */
Test(tokenizer_load, added_tokens_that_are_normalized)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    struct buf file, changed;
#define NORMALIZED(id, content)                                                                \
    "{\"id\":" id ",\"content\":\"" content "\",\"normalized\":true,\"special\":false},"
    small_file(&file);
    replace(file.data, "\"added_tokens\":[",
            "\"added_tokens\":[" NORMALIZED("5001", "<b>") NORMALIZED("5002", "e\\u0301x")
                NORMALIZED("5003", "<e") NORMALIZED("5004", "x<end"),
            &changed);
    cr_assert_eq(load_text(changed.data, changed.len, &t, &e), 0, "%s", e.text);
    expect_ids(t, "a<b>c", 5, (int32_t[]){'a', 5001, 'c'}, 3);
    expect_ids(t, "<b>\xcc\xb8", 5, (int32_t[]){'<', 'b', 0xe2, 0x89, 0xaf}, 5);
    expect_ids(t, "\xc3\xa9xe\xcc\x81x", 7, (int32_t[]){5002, 5002}, 2);
    expect_ids(t, "x<end><e", 8, (int32_t[]){'x', 5000, 5003}, 3);
    expect_ids(t, "x<end", 5, (int32_t[]){5004}, 1);
    tokenizer_free(t);
    buf_fini(&changed);
    replace(file.data, "\"added_tokens\":[",
            "\"added_tokens\":[" NORMALIZED("5001", "\\u00e9y") NORMALIZED("5002", "e\\u0301y"),
            &changed);
    cr_expect_eq(load_text(changed.data, changed.len, &t, &e), ERR_INVALID);
    cr_expect(strstr(e.text, "have one content") != NULL, "%s", e.text);
    buf_fini(&file);
    buf_fini(&changed);
}

/* The longest of several at one place, the leftmost of all. */
Test(tokenizer_load, added_tokens_that_overlap)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    struct buf file, changed;
#define MORE(id, content)                                                                      \
    "{\"id\":" id ",\"content\":\"" content "\",\"normalized\":false,\"special\":false},"
    small_file(&file);
    replace(file.data, "\"added_tokens\":[",
            "\"added_tokens\":[" MORE("5001", "<e") MORE("5002", "<en") MORE("5003", "<end>x")
                MORE("5004", "nd") MORE("5005", "\\u0000z"),
            &changed);
    cr_assert_eq(load_text(changed.data, changed.len, &t, &e), 0, "%s", e.text);
    expect_ids(t, "<end>y", 6, (int32_t[]){5000, 'y'}, 2);
    expect_ids(t, "<end>x", 6, (int32_t[]){5003}, 1);
    expect_ids(t, "<enx", 4, (int32_t[]){5002, 'x'}, 2);
    expect_ids(t, "<e", 2, (int32_t[]){5001}, 1);
    expect_ids(t, "<<e", 3, (int32_t[]){'<', 5001}, 2);
    expect_ids(t, "end<end", 7, (int32_t[]){'e', 5004, 5002, 'd'}, 4);
    expect_ids(t, "\0z", 2, (int32_t[]){5005}, 1);
    tokenizer_free(t);
    buf_fini(&file);
    buf_fini(&changed);
}

/* ---- hostile files */

static void load_and_drop(const char *text, size_t len)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    if (load_text(text, len, &t, &e) == 0) {
        int32_t *ids, n;
        if (tokenizer_encode(t, "abc abcab<end>\n", 15, 0, &ids, &n, &e) == 0)
            free(ids);
        tokenizer_free(t);
    } else {
        cr_assert_neq(e.text[0], '\0');
    }
}

Test(tokenizer_load, cut_files)
{
    struct buf file;
    small_file(&file);
    for (size_t len = 0; len < file.len; len += len < 1500 ? 5 : 23) {
        struct tokenizer *t;
        struct errmsg e = {""};
        cr_expect_neq(load_text(file.data, len, &t, &e), 0, "cut at %zu", len);
        cr_expect_neq(e.text[0], '\0');
    }
    buf_fini(&file);
}

Test(tokenizer_load, random_changes)
{
    static const char tokens[] = "{}[]\",:\\0123456789-.eunltrfabc \x80\xff\xc4\x01";
    struct rng r = {31};
    struct buf file;
    small_file(&file);
    char *changed = malloc(file.len);
    for (int round = 0; round < 800; round++) {
        memcpy(changed, file.data, file.len);
        /* Half of them where the structure is: the first 1,200 bytes and the last 200. */
        int32_t span = round % 2 ? (int32_t)file.len : 1200;
        for (int n = 1 + rng_int(&r, 3); n > 0; n--)
            changed[rng_int(&r, span)] = tokens[rng_int(&r, sizeof(tokens) - 1)];
        if (round % 4 == 2)
            changed[file.len - 1 - (size_t)rng_int(&r, 200)] =
                tokens[rng_int(&r, sizeof(tokens) - 1)];
        load_and_drop(changed, file.len);
    }
    free(changed);
    buf_fini(&file);
}

/* Levels upon levels, in each part that is skipped or parsed. */
Test(tokenizer_load, deep_nesting)
{
    struct buf deep;
    buf_init(&deep);
    buf_adds(&deep, "\"padding\":");
    for (int i = 0; i < 100000; i++)
        buf_addc(&deep, '[');
    expect_refused("\"padding\":null", buf_cstr(&deep), ERR_INVALID, "\"padding\"");
    buf_fini(&deep);
}

Test(tokenizer_load, files_that_are_not_there)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    cr_expect_eq(tokenizer_load("/nowhere/tokenizer.json", &t, &e), ERR_NOT_FOUND);
    cr_expect_not_null(strstr(e.text, "/nowhere/tokenizer.json"));
    cr_expect_null(t);
    cr_expect_eq(tokenizer_load("/", &t, &e), ERR_IO);
    cr_expect_eq(tokenizer_load("/nowhere", &t, NULL), ERR_NOT_FOUND);
    load_and_drop("", 0);
}

Test(tokenizer_load, the_fixture_with_flags_is_refused)
{
    if (!is_there(FIXTURES "flags/tokenizer.json"))
        cr_skip_test("no fixtures beside the source tree");
    struct tokenizer *t;
    struct errmsg e = {""};
    cr_expect_eq(tokenizer_load(source_path(FIXTURES "flags/tokenizer.json"), &t, &e), U);
    cr_expect_str_eq(e.text, "tokenizer.json: added_tokens[3].lstrip is true; prefilld takes "
                             "false");
}

/* ---- the files beside it */

static void write_beside(const char *dir, const char *name, const char *text, size_t len)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f);
    cr_assert_eq(fwrite(text, 1, len, f), len);
    fclose(f);
}

struct beside {
    const char *name;
    const char *text;
};

/* Loads the small tokenizer with these files beside it. */
static int load_beside(const struct beside *files, size_t n, struct tokenizer **t,
                       struct errmsg *e)
{
    char dir[] = "/tmp/prefilld-test-XXXXXX", path[128];
    struct buf file;
    cr_assert_not_null(mkdtemp(dir));
    small_file(&file);
    write_beside(dir, "tokenizer.json", file.data, file.len);
    buf_fini(&file);
    for (size_t i = 0; i < n; i++)
        write_beside(dir, files[i].name, files[i].text, strlen(files[i].text));
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    int code = tokenizer_load(path, t, e);
    unlink(path);
    for (size_t i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, files[i].name);
        unlink(path);
    }
    rmdir(dir);
    return code;
}

static bool same(const char *a, const char *b)
{
    return a && b ? strcmp(a, b) == 0 : a == b;
}

static void expect_info(const struct beside *files, size_t n, const char *eos, const char *bos,
                        const char *pad, const char *chat_template)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    cr_assert_eq(load_beside(files, n, &t, &e), 0, "%s", e.text);
    const struct tokenizer_info *info = tokenizer_get_info(t);
    cr_expect(same(info->eos_token, eos), "eos: %s", info->eos_token);
    cr_expect(same(info->bos_token, bos), "bos: %s", info->bos_token);
    cr_expect(same(info->pad_token, pad), "pad: %s", info->pad_token);
    cr_expect(same(info->chat_template, chat_template), "template: %s", info->chat_template);
    tokenizer_free(t);
}

Test(tokenizer_load, info_and_where_it_is_from)
{
    static const struct beside all[] = {
        {"config.json", "{\"eos_token_id\": 97, \"bos_token_id\": 98, \"pad_token_id\": 256}"},
        {"generation_config.json", "{\"eos_token_id\": [5000, 97]}"},
        {"tokenizer_config.json",
         "{\"eos_token\": {\"content\": \"<end>\", \"lstrip\": false}, \"bos_token\": null, "
         "\"pad_token\": \"x\", \"chat_template\": \"{{ old }}\"}"},
        {"chat_template.jinja", "{{ new }}\n"},
    };
    expect_info(all, 0, NULL, NULL, NULL, NULL);
    expect_info(all, 1, "a", "b", "ab", NULL);
    expect_info(all, 2, "<end>", "b", "ab", NULL);
    expect_info(all, 3, "<end>", NULL, "x", "{{ old }}");
    expect_info(all, 4, "<end>", NULL, "x", "{{ new }}\n");
    static const struct beside nested[] = {
        {"config.json", "{\"eos_token_id\": null, \"text_config\": {\"eos_token_id\": 5000}}"},
        {"tokenizer_config.json", "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": "
                                  "\"T\"}, {\"name\": \"default\", \"template\": \"D\"}]}"},
    };
    expect_info(nested, 2, "<end>", NULL, NULL, "D");
    static const struct beside odd[] = {
        {"config.json",
         "{\"eos_token_id\": 99999999999, \"bos_token_id\": -1, \"pad_token_id\": "
         "255}"},
        {"tokenizer_config.json", "{\"eos_token\": 7, \"chat_template\": 7}"},
    };
    expect_info(odd, 2, NULL, NULL, NULL, NULL);
}

/* What would change ids is in tokenizer.json, or is refused: there is one reader of text. */
Test(tokenizer_load, tokens_that_only_tokenizer_config_has)
{
    static const struct {
        const char *text, *message; /* NULL: accepted */
    } rows[] = {
        {"{\"added_tokens_decoder\": {\"5000\": {\"content\": \"<end>\", \"special\": true, "
         "\"lstrip\": false, \"normalized\": false}}, \"add_bos_token\": false, "
         "\"additional_special_tokens\": [\"<end>\"], \"extra_special_tokens\": {}}",
         NULL},
        {"{\"model_max_length\": 1000000000000000019884624838656}", NULL},
        {"{\"added_tokens_decoder\": null, \"add_prefix_space\": null, "
         "\"additional_special_tokens\": [], \"extra_special_tokens\": {\"a\": \"<end>\"}}",
         NULL},
        {"{\"added_tokens_decoder\": {\"5000\": {\"content\": \"<end>\"}, \"5001\": "
         "{\"content\": \"<foo>\"}}}",
         "tokenizer_config.json: added_tokens_decoder has \"<foo>\", which"},
        {"{\"added_tokens_decoder\": {\"97\": {\"content\": \"a\"}}}", "has \"a\", which"},
        {"{\"added_tokens_decoder\": {\"97\": {\"content\": \"<end>x\"}}}", "\"<end>x\""},
        {"{\"added_tokens_decoder\": {\"1\": {}}}", "an entry without content"},
        {"{\"added_tokens_decoder\": {\"5000\": {\"content\": \"<end>\", \"rstrip\": true}}}",
         "\"<end>\" with rstrip true"},
        {"{\"additional_special_tokens\": [\"<end>\", {\"content\": \"<foo>\"}]}",
         "additional_special_tokens has \"<foo>\""},
        {"{\"extra_special_tokens\": [\"<foo>\"]}", "extra_special_tokens has \"<foo>\""},
        {"{\"extra_special_tokens\": {\"image\": \"<foo>\"}}",
         "extra_special_tokens has \"<foo>\""},
        {"{\"add_bos_token\": true}", "add_bos_token is not false"},
        {"{\"add_eos_token\": true}", "add_eos_token is not false"},
        {"{\"add_prefix_space\": true}", "add_prefix_space is not false"},
        {"{\"split_special_tokens\": true}", "split_special_tokens is not false"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct beside file = {"tokenizer_config.json", rows[i].text};
        struct tokenizer *t;
        struct errmsg e = {""};
        int code = load_beside(&file, 1, &t, &e);
        cr_expect_eq(code, rows[i].message ? ERR_UNSUPPORTED : 0, "%s: %s", file.text, e.text);
        cr_expect(!rows[i].message || strstr(e.text, rows[i].message), "%s: %s", file.text,
                  e.text);
        if (code == 0)
            tokenizer_free(t);
    }
}

/* Every one of them ends a text, or none is taken. */
Test(tokenizer_load, many_end_tokens)
{
    static const struct beside files[] = {
        {"generation_config.json", "{\"eos_token_id\": [97, 98, 99, 100, 101, 102, 103, 97]}"},
        {"config.json", "{\"eos_token_id\": 104}"},
        {"tokenizer_config.json", "{\"eos_token\": \"<end>\"}"},
    };
    struct tokenizer *t;
    struct errmsg e = {""};
    cr_assert_eq(load_beside(files, 2, &t, &e), 0, "%s", e.text);
    const struct tokenizer_info *info = tokenizer_get_info(t);
    cr_expect(info->n_end_ids == 8 && info->end_ids[0] == 97 && info->end_ids[7] == 104);
    tokenizer_free(t);
    cr_expect_eq(load_beside(files, 3, &t, &e), ERR_UNSUPPORTED);
    cr_expect(strstr(e.text, "eos_token") && strstr(e.text, "more than 8"), "%s", e.text);
}

Test(tokenizer_load, files_beside_it_that_are_broken)
{
    static const struct beside broken[] = {
        {"tokenizer_config.json", "{\"eos_token\": "},
        {"generation_config.json", "[]"},
        {"config.json", ""},
        {"chat_template.jinja", "\xff"},
    };
    for (size_t i = 0; i < 4; i++) {
        struct tokenizer *t;
        struct errmsg e = {""};
        cr_expect_eq(load_beside(&broken[i], 1, &t, &e), ERR_INVALID);
        cr_expect_not_null(strstr(e.text, broken[i].name), "%s", e.text);
    }
}
