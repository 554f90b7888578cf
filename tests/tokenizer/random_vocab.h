/* Vocabularies for tests: small enough to load a thousand times, and stranger than released
 * ones. */
#ifndef PREFILLD_TESTS_RANDOM_VOCAB_H
#define PREFILLD_TESTS_RANDOM_VOCAB_H

#include "../rng.h"
#include "util.h"

#define QWEN2_REGEX                                                                            \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}|"           \
    " ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"

/* All of tokenizer.json before the vocabulary's members, and after the last merge. */
#define FILE_HEAD                                                                              \
    "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":"     \
    "5000,"                                                                                    \
    "\"content\":\"<end>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"           \
    "\"normalized\":false,\"special\":true}],\"normalizer\":{\"type\":\"NFC\"},"               \
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","         \
    "\"pattern\":{\"Regex\":\"" QWEN2_REGEX "\"},\"behavior\":\"Isolated\",\"invert\":false}," \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":false,"               \
    "\"use_regex\":false}]},\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\","      \
    "\"add_prefix_space\":true,\"trim_offsets\":true,\"use_regex\":true},\"model\":{"          \
    "\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null," \
    "\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,"                  \
    "\"ignore_merges\":false,\"vocab\":{"
#define FILE_MIDDLE "},\"merges\":["
#define FILE_TAIL "]}}"

/* The merges in the making, as the tests know them: bytes, not spellings. */
struct vocab_token {
    unsigned char bytes[32];
    size_t len;
};

struct vocab {
    struct vocab_token tokens[1024]; /* the id is the index; 0..255 are the bytes themselves */
    int32_t n;
    struct merge merges[2048]; /* by rank */
    int32_t n_merges;
};

static inline void add_spelling(struct buf *out, const unsigned char *bytes, size_t len)
{
    struct buf text;
    buf_init(&text);
    for (size_t i = 0; i < len; i++) {
        char c[4];
        buf_add(&text, c, utf8_encode(byte_alphabet_code(bytes[i]), c));
    }
    buf_json_string(out, text.data ? text.data : "", text.len);
    buf_fini(&text);
}

/* The file of a vocabulary. */
static inline void write_vocab(const struct vocab *v, struct buf *out)
{
    buf_adds(out, FILE_HEAD);
    for (int32_t id = 0; id < v->n; id++) {
        add_spelling(out, v->tokens[id].bytes, v->tokens[id].len);
        buf_printf(out, ":%d%s", id, id + 1 < v->n ? "," : "");
    }
    buf_adds(out, FILE_MIDDLE);
    for (int32_t i = 0; i < v->n_merges; i++) {
        const struct vocab_token *left = &v->tokens[v->merges[i].left];
        const struct vocab_token *right = &v->tokens[v->merges[i].right];
        buf_adds(out, i > 0 ? ",[" : "[");
        add_spelling(out, left->bytes, left->len);
        buf_addc(out, ',');
        add_spelling(out, right->bytes, right->len);
        buf_addc(out, ']');
    }
    buf_adds(out, FILE_TAIL);
}

static inline int32_t vocab_find(const struct vocab *v, const unsigned char *bytes, size_t len)
{
    for (int32_t id = 0; id < v->n; id++)
        if (v->tokens[id].len == len && memcmp(v->tokens[id].bytes, bytes, len) == 0)
            return id;
    return -1;
}

static inline bool vocab_merges(const struct vocab *v, int32_t left, int32_t right)
{
    for (int32_t i = 0; i < v->n_merges; i++)
        if (v->merges[i].left == left && v->merges[i].right == right)
            return true;
    return false;
}

/* Characters of one to four bytes, with first and last bytes in common, so that tokens begin
 * and end inside them. */
static const char *const vocab_chars[] = {"a",
                                          "b",
                                          "c",
                                          " ",
                                          "\xc3\xa9",
                                          "\xc3\xa8",
                                          "\xd0\xa9",
                                          "\xe4\xbd\xa0",
                                          "\xe5\xbd\xa0",
                                          "\xe4\xbd\xa9",
                                          "\xf0\x9f\x98\x80",
                                          "\xf0\x9f\x98\x81"};
#define N_VOCAB_CHARS 12

/* Text of n characters. */
static inline size_t random_chars(struct rng *r, int32_t n, char *out)
{
    size_t len = 0;
    int32_t n_kinds = 1 + rng_int(r, N_VOCAB_CHARS), first = rng_int(r, N_VOCAB_CHARS);
    for (; n > 0; n--) {
        const char *c = vocab_chars[(first + rng_int(r, n_kinds)) % N_VOCAB_CHARS];
        memcpy(out + len, c, strlen(c));
        len += strlen(c);
    }
    return len;
}

static inline bool vocab_has_part(const struct vocab *v, int32_t id)
{
    for (int32_t i = 0; i < v->n_merges; i++)
        if (v->merges[i].left == id || v->merges[i].right == id)
            return true;
    return false;
}

/* Merges of random neighbours in random text, so that they occur. A token may be made by
 * several, and its own bytes may merge to something else. Each comes after those that make its
 * parts; when `orderly` is false some change places then. */
static inline void random_vocab(struct rng *r, bool orderly, struct vocab *v)
{
    v->n = 256;
    v->n_merges = 0;
    for (int i = 0; i < 256; i++)
        v->tokens[i] = (struct vocab_token){{(unsigned char)i}, 1};
    int32_t want = 1 + rng_int(r, 200);
    for (int tries = 0; tries < 4000 && v->n_merges < want; tries++) {
        char text[128];
        size_t len = random_chars(r, 8, text);
        size_t at = (size_t)rng_int(r, (int32_t)len);
        /* A token that starts at `at`, of those there are, and one after it. */
        int32_t parts[2];
        size_t end = at;
        for (int k = 0; k < 2 && end < len; k++) {
            size_t n = 1 + (size_t)rng_int(r, 8);
            do
                parts[k] = end + n <= len ? vocab_find(v, (unsigned char *)text + end, n) : -1;
            while (parts[k] < 0 && --n > 0);
            end += n;
            if (k == 0 && end == len)
                end = len + 1;
        }
        if (end > len || end - at < 2 || vocab_merges(v, parts[0], parts[1]))
            continue;
        int32_t made = vocab_find(v, (unsigned char *)text + at, end - at);
        if (made >= 0 && vocab_has_part(v, made))
            continue;
        if (made < 0) {
            made = v->n++;
            memcpy(v->tokens[made].bytes, text + at, end - at);
            v->tokens[made].len = end - at;
        }
        v->merges[v->n_merges++] = (struct merge){parts[0], parts[1], made};
    }
    for (int n = 0; n < 3 && !orderly; n++) {
        int32_t i = rng_int(r, v->n_merges), k = rng_int(r, v->n_merges);
        struct merge swap = v->merges[i];
        v->merges[i] = v->merges[k];
        v->merges[k] = swap;
    }
}

#endif
