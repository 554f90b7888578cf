/* Merging, held to the plainest program for it: over and over, look at all neighbours, find
 * each pair in the list of merges, and join the first of the lowest rank. */
#include "leaks.h"
#include "tokenizer/random_vocab.h"

TestSuite(tokenizer_bpe, .fini = leaks_check);

struct slow {
    const struct merge *merges;
    int32_t n_merges;
    const int32_t *byte_id;
};

static int32_t slow_rank(const struct slow *m, int32_t left, int32_t right)
{
    for (int32_t rank = 0; rank < m->n_merges; rank++)
        if (m->merges[rank].left == left && m->merges[rank].right == right)
            return rank;
    return INT32_MAX;
}

/* The ids of a piece, in ids, which has room for len. Returns how many. */
static size_t merge_slowly(const struct slow *m, const char *piece, size_t len, int32_t *ids)
{
    size_t n = len;
    for (size_t i = 0; i < len; i++)
        ids[i] = m->byte_id[(unsigned char)piece[i]];
    for (;;) {
        int32_t best = INT32_MAX;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            int32_t rank = slow_rank(m, ids[i], ids[i + 1]);
            if (rank < best) {
                best = rank;
                at = i;
            }
        }
        if (best == INT32_MAX)
            return n;
        ids[at] = m->merges[best].made;
        for (size_t i = at + 1; i + 1 < n; i++)
            ids[i] = ids[i + 1];
        n--;
    }
}

typedef int (*body)(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
                    size_t len, struct id_list *out);

static int scan_body(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
                     size_t len, struct id_list *out)
{
    (void)s;
    return bpe_merge_scan(b, piece, len, out);
}

static void expect_same(const struct bpe *b, body f, const char *name, const char *piece,
                        size_t len, const int32_t *want, size_t n_want)
{
    struct bpe_scratch s = {0};
    struct id_list got = {0};
    cr_assert_eq(f(b, &s, (const unsigned char *)piece, len, &got), 0);
    bool same = got.n == n_want && memcmp(got.ids, want, n_want * sizeof(*want)) == 0;
    if (!same) {
        for (size_t i = 0; i < len; i++)
            fprintf(stderr, "\\x%02x", (unsigned char)piece[i]);
        cr_assert_fail(" has other ids by %s", name);
    }
    bpe_scratch_fini(&s);
    free(got.ids);
}

static void compare(const struct bpe *b, const struct slow *m, const char *piece, size_t len)
{
    int32_t want[2048];
    size_t n = merge_slowly(m, piece, len, want);
    expect_same(b, bpe_merge_lists, "lists", piece, len, want, n);
    if (len <= BPE_MAX_SCAN_BYTES)
        expect_same(b, scan_body, "scanning", piece, len, want, n);
    if (utf8_is_valid(piece, len, NULL))
        expect_same(b, bpe_encode, "all ways together", piece, len, want, n);
}

static int try_vocab(const struct vocab *v, struct tokenizer **t, struct errmsg *e)
{
    struct buf file;
    char path[64];

    buf_init(&file);
    write_vocab(v, &file);
    write_temporary(path, file.data, file.len);
    int code = tokenizer_load(path, t, e);
    unlink(path);
    buf_fini(&file);
    return code;
}

static struct tokenizer *load_vocab(const struct vocab *v)
{
    struct tokenizer *t;
    struct errmsg e = {""};
    int code = try_vocab(v, &t, &e);
    cr_assert_eq(code, 0, "%s", e.text);
    return t;
}

/* Returns how many of the vocabularies were refused for the order of their merges. */
static int compare_vocabs(uint64_t seed, bool orderly, int n_vocabs)
{
    int n_refused = 0;
    struct vocab *v = malloc(sizeof(*v));
    int32_t byte_id[256];
    struct rng r = {seed};

    for (int i = 0; i < 256; i++)
        byte_id[i] = i;
    for (int round = 0; round < n_vocabs; round++) {
        struct tokenizer *t;
        struct errmsg e = {""};
        random_vocab(&r, orderly, v);
        int code = try_vocab(v, &t, &e);
        if (code != 0) {
            cr_assert_eq(code, ERR_UNSUPPORTED, "%s", e.text);
            cr_assert_not_null(strstr(e.text, "in the order of their making"), "%s", e.text);
            n_refused++;
            continue;
        }
        struct slow m = {v->merges, v->n_merges, byte_id};
        char text[256];
        for (int k = 0; k < 60; k++)
            compare(&t->bpe, &m, text, random_chars(&r, 1 + rng_int(&r, 20), text));
        for (int k = 0; k < 20; k++) {
            /* Not UTF-8: a part of a text. */
            size_t len = random_chars(&r, 12, text);
            size_t from = (size_t)rng_int(&r, (int32_t)len);
            compare(&t->bpe, &m, text + from, len - from);
        }
        tokenizer_free(t);
    }
    free(v);
    return n_refused;
}

Test(tokenizer_bpe, random_vocabularies)
{
    cr_expect_eq(compare_vocabs(21, true, 60), 0);
}

/* In another order most are refused, and those that are not merge as ever. */
Test(tokenizer_bpe, disorderly_vocabularies)
{
    int n_refused = compare_vocabs(22, false, 200);
    cr_expect_gt(n_refused, 100);
    cr_expect_lt(n_refused, 190);
}

/* The merges of a real file, read by jansson. */
struct real {
    struct tokenizer *t;
    struct merge *merges;
    int32_t n_merges;
    int32_t byte_id[256];
};

static int32_t vocab_id(const json_t *vocab, const char *spelling)
{
    const json_t *id = json_object_get(vocab, spelling);
    cr_assert_not_null(id, "%s", spelling);
    return (int32_t)json_integer_value(id);
}

static void open_demo(struct real *x)
{
    json_error_t error;
    json_t *file = json_load_file(source_path(DEMO), 0, &error);
    const json_t *vocab = json_object_get(json_object_get(file, "model"), "vocab");
    const json_t *merges = json_object_get(json_object_get(file, "model"), "merges");

    x->t = load_tokenizer(DEMO);
    x->n_merges = (int32_t)json_array_size(merges);
    x->merges = malloc((size_t)x->n_merges * sizeof(*x->merges));
    for (int32_t i = 0; i < x->n_merges; i++) {
        const json_t *pair = json_array_get(merges, (size_t)i);
        const char *left = json_string_value(json_array_get(pair, 0));
        const char *right = json_string_value(json_array_get(pair, 1));
        char made[256];
        snprintf(made, sizeof(made), "%s%s", left, right);
        x->merges[i] = (struct merge){vocab_id(vocab, left), vocab_id(vocab, right),
                                      vocab_id(vocab, made)};
    }
    for (int i = 0; i < 256; i++) {
        char c[5] = {0};
        utf8_encode(byte_alphabet_code((unsigned char)i), c);
        x->byte_id[i] = vocab_id(vocab, c);
    }
    json_decref(file);
}

static void close_real(struct real *x)
{
    tokenizer_free(x->t);
    free(x->merges);
}

/* Soup of the vocabulary's own tokens, which makes merges meet; also longer than scanning
 * takes. */
Test(tokenizer_bpe, demo_vocabulary)
{
    struct real x;
    struct rng r = {23};
    open_demo(&x);
    struct slow m = {x.merges, x.n_merges, x.byte_id};
    for (int round = 0; round < 400; round++) {
        char text[2048];
        size_t len = 0, n;
        int32_t n_tokens = round % 100 == 0 ? 150 : 1 + rng_int(&r, 10);
        for (int32_t k = 0; k < n_tokens && len < 600; k++) {
            const char *bytes = tokenizer_token_bytes(x.t, rng_int(&r, 2045), &n);
            memcpy(text + len, bytes, n);
            len += n;
        }
        compare(&x.t->bpe, &m, text, len);
    }
    close_real(&x);
}

Test(tokenizer_bpe, runs_of_one_letter)
{
    struct real x;
    char text[1200];
    open_demo(&x);
    struct slow m = {x.merges, x.n_merges, x.byte_id};
    static const char letters[] = "ae \n-.0";
    for (size_t k = 0; k < sizeof(letters) - 1; k++) {
        memset(text, letters[k], sizeof(text));
        for (size_t len = 1; len <= 64; len++)
            compare(&x.t->bpe, &m, text, len);
        for (size_t len = BPE_MAX_SCAN_BYTES - 1; len <= BPE_MAX_SCAN_BYTES + 1; len++)
            compare(&x.t->bpe, &m, text, len);
    }
    close_real(&x);
}

/* Every token that is looked up whole is what merging its bytes gives; and so is no other. */
static void check_whole(const struct tokenizer *t)
{
    struct bpe_scratch s = {0};
    struct id_list merged = {0}, looked_up = {0};
    for (int32_t id = 0; id < tokenizer_size(t); id++) {
        size_t len;
        const char *bytes = tokenizer_token_bytes(t, id, &len);
        if (len == 0 || !utf8_is_valid(bytes, len, NULL))
            continue;
        merged.n = looked_up.n = 0;
        cr_assert_eq(bpe_merge_lists(&t->bpe, &s, (const unsigned char *)bytes, len, &merged),
                     0);
        cr_assert_eq(bpe_encode(&t->bpe, &s, (const unsigned char *)bytes, len, &looked_up), 0);
        cr_assert_eq(merged.n, looked_up.n, "id %d", id);
        cr_assert(memcmp(merged.ids, looked_up.ids, merged.n * sizeof(*merged.ids)) == 0);
    }
    bpe_scratch_fini(&s);
    free(merged.ids);
    free(looked_up.ids);
}

Test(tokenizer_bpe, tokens_looked_up_whole)
{
    struct tokenizer *t = load_tokenizer(DEMO);
    check_whole(t);
    tokenizer_free(t);
}

Test(tokenizer_bpe, tokens_looked_up_whole_qwen)
{
    if (!is_there(FIXTURES "qwen/tokenizer.json"))
        cr_skip_test("no fixtures beside the source tree");
    struct tokenizer *t = load_tokenizer(FIXTURES "qwen/tokenizer.json");
    check_whole(t);
    tokenizer_free(t);
}

/* A token that its own merges do not make: "ab" has a rank after "bc", so "abc" is never made
 * from its text. Lookup of a whole piece would find it, were it not left out. */
Test(tokenizer_bpe, a_token_that_merges_do_not_make)
{
    struct vocab *v = malloc(sizeof(*v));
    v->n = 259;
    for (int i = 0; i < 256; i++)
        v->tokens[i] = (struct vocab_token){{(unsigned char)i}, 1};
    v->tokens[256] = (struct vocab_token){"bc", 2};
    v->tokens[257] = (struct vocab_token){"ab", 2};
    v->tokens[258] = (struct vocab_token){"abc", 3};
    v->merges[0] = (struct merge){'b', 'c', 256};
    v->merges[1] = (struct merge){'a', 'b', 257};
    v->merges[2] = (struct merge){257, 'c', 258};
    v->n_merges = 3;
    struct tokenizer *t = load_vocab(v);
    expect_ids(t, "abc", 3, (int32_t[]){'a', 256}, 2);
    expect_ids(t, "ab", 2, (int32_t[]){257}, 1);
    tokenizer_free(t);
    free(v);
}

/* Vocabulary by vocabulary, the pieces of a cut have the ids of the whole. That bpe_encode
 * agrees with merging is above; here, that cuts are found at all, so that the test above tests
 * them. */
Test(tokenizer_bpe, cuts_are_found)
{
    struct vocab *v = malloc(sizeof(*v));
    struct rng r = {24};
    size_t n_cut = 0, n_whole = 0;
    for (int round = 0; round < 20; round++) {
        random_vocab(&r, true, v);
        struct tokenizer *t = load_vocab(v);
        for (int k = 0; k < 50; k++) {
            char text[128];
            size_t len = random_chars(&r, 10, text);
            size_t at = bpe_next_cut(&t->bpe, (unsigned char *)text, len);
            cr_assert(at > 0 && at <= len);
            n_cut += at < len;
            n_whole += at == len;
        }
        tokenizer_free(t);
    }
    cr_expect_gt(n_cut, 100);
    cr_expect_gt(n_whole, 100);
    free(v);
}
