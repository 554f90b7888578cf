/* The files of sessions, read: what was written comes back; whatever was altered, cut,
 * lengthened or made up is refused with words, and never read past its end. Plain program. */
#include <jansson.h>
#include <stdlib.h>

#include "rng.h"
#include "state_file.h"
#include "tap.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_FLIPS = 4000, N_JSON = 2000, N_RANDOM = 2000 };
#else
enum { N_FLIPS = 20000, N_JSON = 10000, N_RANDOM = 10000 };
#endif

enum { MAX_TOKENS = 200 };

static enum layer_kind layers[] = {LAYER_GDN, LAYER_ATTN, LAYER_GDN};
static struct arch arch = {
    .n_layers = 3, .vocab = 50, .layers = layers, .n_gdn = 2, .n_attn = 1};

static struct state_shape shape_of(int32_t part_pages)
{
    return (struct state_shape){.a = &arch,
                                .gd = {.HV = 2, .K = 3, .V = 5, .conv_dim = 7},
                                .ad = {.HK = 2, .D = 4},
                                .act = DTYPE_F32,
                                .page_tokens = 64,
                                .slot_bytes = 1,
                                .half_page_bytes = 1,
                                .part_pages = part_pages,
                                .fingerprint = 0x0123456789abcdef,
                                .model = "m\"\xc3\xa4",
                                .backend = "cpu"};
}

/* A file of random numbers. */
static void make(const struct state_shape *z, const struct state_info *f, struct rng *rng,
                 struct buf *b)
{
    struct state_sum sum;
    state_head_write(z, f, b);
    int64_t n = state_data_bytes(z, f) - 8;
    for (int64_t i = 0; i < n; i += 4) {
        int32_t x = rng_int(rng, i < 4 * (int64_t)f->n_tokens ? arch.vocab : 1 << 30);
        buf_add(b, &x, n - i < 4 ? (size_t)(n - i) : 4);
    }
    state_sum_start(&sum);
    state_sum_add(&sum, b->data, b->len);
    uint64_t s = state_sum_of(&sum);
    buf_add(b, &s, 8);
}

/* Reads it in pieces of up to max bytes, each in memory of its own, so that reading past one
 * shows. Returns 0 or what failed. data (may be NULL) gets the parts one behind the other. */
static int read_file(const struct state_shape *z, const char *data, size_t len, size_t max,
                     struct rng *rng, struct buf *parts, struct state_info *info,
                     struct errmsg *e)
{
    struct state_reader r;
    int rc = 0, n_heads = 0, n_dones = 0;
    e->text[0] = '\0';
    state_reader_init(&r, z, MAX_TOKENS);
    for (size_t at = 0; at < len && rc >= 0;) {
        size_t n = 1 + (size_t)rng_int(rng, (int32_t)max), n_taken;
        n = n < len - at ? n : len - at;
        char *piece = malloc(n);
        memcpy(piece, data + at, n);
        for (size_t i = 0; i < n && rc >= 0; i += n_taken) {
            rc = state_reader_take(&r, piece + i, n - i, &n_taken, e);
            n_heads += rc == STATE_HEAD;
            n_dones += rc == STATE_DONE;
            if (rc == STATE_PART && parts)
                buf_add(parts, r.data, r.part.bytes);
        }
        free(piece);
        at += n;
    }
    if (rc >= 0)
        rc = state_reader_end(&r, e);
    if (rc == 0 && (n_heads != 1 || n_dones != 1))
        rc = -100;
    *info = r.info;
    state_reader_fini(&r);
    return rc;
}

static void test_round(struct rng *rng)
{
    int n_bad = 0;
    for (int i = 0; i < 300; i++) {
        struct state_shape z = shape_of(1 + rng_int(rng, 4));
        struct state_info f = {.n_tokens = 1 + rng_int(rng, MAX_TOKENS),
                               .dtype = rng_int(rng, 2) ? DTYPE_F32 : DTYPE_BF16,
                               .has_terms = rng_int(rng, 2),
                               .id = "s-0123456789abcdef01234567",
                               .ttl_s = 1 + rng_int(rng, 1000),
                               .created_unix_s = 1 + rng_int(rng, 1000),
                               .idle_s = rng_int(rng, 1000),
                               .saved_unix_s = rng_int(rng, 1000),
                               .is_pinned = rng_int(rng, 2)};
        struct state_info g;
        struct errmsg e;
        struct buf b, parts;
        buf_init(&b);
        buf_init(&parts);
        make(&z, &f, rng, &b);
        int rc =
            read_file(&z, b.data, b.len, 1 + (size_t)rng_int(rng, 3000), rng, &parts, &g, &e);
        bool is_good = rc == 0 && g.n_tokens == f.n_tokens && g.dtype == f.dtype &&
                       g.has_terms == f.has_terms &&
                       parts.len == (size_t)state_data_bytes(&z, &f) - 8 &&
                       memcmp(parts.data, b.data + b.len - 8 - parts.len, parts.len) == 0;
        if (f.has_terms)
            is_good &= strcmp(g.id, f.id) == 0 && g.ttl_s == f.ttl_s && g.idle_s == f.idle_s &&
                       g.created_unix_s == f.created_unix_s &&
                       g.saved_unix_s == f.saved_unix_s && g.is_pinned == f.is_pinned;
        n_bad += !is_good;
        if (!is_good)
            printf("# case %d: %d %s\n", i, rc, e.text);
        buf_fini(&b);
        buf_fini(&parts);
    }
    CHECK(n_bad == 0, "300 files come back as they were (%d do not)", n_bad);
}

/* Every bit of the header, and many of the data; every length; bytes behind the end. */
static void test_altered(struct rng *rng)
{
    struct state_shape z = shape_of(2);
    struct state_info f = {.n_tokens = 70, .dtype = DTYPE_F32}, g;
    struct errmsg e;
    struct buf b;
    int n_taken = 0, n_silent = 0, n = 0;
    uint64_t head;
    buf_init(&b);
    make(&z, &f, rng, &b);
    memcpy(&head, b.data, 8);
    size_t n_head = 8 * (8 + (size_t)head);
    for (size_t bit = 0; bit < n_head + N_FLIPS; bit++, n++) {
        size_t at = bit < n_head ? bit : (size_t)(rng_u64(rng) % (8 * b.len));
        b.data[at / 8] ^= (char)(1 << at % 8);
        n_taken += read_file(&z, b.data, b.len, 5000, rng, NULL, &g, &e) == 0;
        n_silent += !e.text[0];
        b.data[at / 8] ^= (char)(1 << at % 8);
    }
    for (size_t len = 0; len < b.len; len += len < 4000 ? 1 : 37, n++) {
        n_taken += read_file(&z, b.data, len, 5000, rng, NULL, &g, &e) == 0;
        n_silent += !e.text[0];
    }
    for (int i = 1; i < 20; i++, n++) {
        buf_add(&b, "x", 1);
        n_taken += read_file(&z, b.data, b.len, 5000, rng, NULL, &g, &e) == 0;
        n_silent += !e.text[0];
    }
    CHECK(n_taken == 0 && n_silent == 0, "%d altered files are refused with words (%d, %d)", n,
          n_taken, n_silent);
    buf_fini(&b);
}

static json_t *random_json(struct rng *rng, int depth)
{
    static const char *const words[] = {
        "I32",      "F32",   "BF16", "token_ids", "shape",
        "checksum", "dtype", "",     "-1",        "99999999999999999999"};
    switch (rng_int(rng, depth > 0 ? 8 : 6)) {
    case 0:
        return json_integer((json_int_t)rng_u64(rng));
    case 1:
        return json_integer(rng_int(rng, 300) - 20);
    case 2:
        return json_real(0.5);
    case 3:
        return json_null();
    case 4:
        return json_true();
    case 5:
        return json_string(words[rng_int(rng, 10)]);
    case 6: {
        json_t *list = json_array();
        for (int i = rng_int(rng, 4); i > 0; i--)
            json_array_append_new(list, random_json(rng, depth - 1));
        return list;
    }
    default: {
        json_t *o = json_object();
        for (int i = rng_int(rng, 4); i > 0; i--)
            json_object_set_new(o, words[rng_int(rng, 10)], random_json(rng, depth - 1));
        return o;
    }
    }
}

/* One thing in the header is another value, or gone, or there is more; the checksum is
 * right. */
static json_t *spoil(struct rng *rng, json_t *o)
{
    json_t *at = o;
    for (;;) {
        size_t n = json_object_size(at), i = n ? (size_t)rng_int(rng, (int32_t)n) : 0;
        void *it = json_object_iter(at);
        for (; i > 0; i--)
            it = json_object_iter_next(at, it);
        json_t *v = it ? json_object_iter_value(it) : NULL;
        if (json_is_object(v) && rng_int(rng, 6)) {
            at = v;
            continue;
        }
        int how = rng_int(rng, 8);
        if (how == 0 || !it)
            json_object_set_new(at, "more", random_json(rng, 3));
        else if (how == 1)
            json_object_del(at, json_object_iter_key(it));
        else if (json_is_array(v) && json_array_size(v) > 0 && how < 6)
            json_array_set_new(v, (size_t)rng_int(rng, (int32_t)json_array_size(v)),
                               random_json(rng, 1));
        else
            json_object_set_new(at, json_object_iter_key(it), random_json(rng, 3));
        return o;
    }
}

/* What names of the metadata may be anything. */
static bool is_harmless(json_t *was, json_t *is)
{
    static const char *const free_names[] = {"model", "backend", "more"};
    json_t *a = json_deep_copy(was), *b = json_deep_copy(is);
    for (int i = 0; i < 3; i++) {
        json_object_del(json_object_get(a, "__metadata__"), free_names[i]);
        json_object_del(json_object_get(b, "__metadata__"), free_names[i]);
    }
    bool same = json_equal(a, b);
    json_decref(a);
    json_decref(b);
    return same;
}

static void test_headers(struct rng *rng)
{
    struct state_shape z = shape_of(2);
    struct state_info f = {.n_tokens = 70, .dtype = DTYPE_F32}, g;
    struct buf b;
    int n_taken = 0, n_silent = 0, n_harmless = 0;
    uint64_t len;
    buf_init(&b);
    make(&z, &f, rng, &b);
    memcpy(&len, b.data, 8);
    json_t *good = json_loadb(b.data + 8, len, 0, NULL);
    for (int i = 0; i < N_JSON; i++) {
        struct errmsg e = {{0}};
        json_t *bad = spoil(rng, json_deep_copy(good));
        char *text = json_dumps(bad, JSON_COMPACT);
        int rc = state_head_read(&z, text, strlen(text), MAX_TOKENS, &g, &e);
        bool is_free = is_harmless(good, bad);
        n_harmless += is_free;
        n_taken += rc == 0 && !is_free;
        n_silent += rc != 0 && !e.text[0];
        if (rc == 0 && !is_free)
            printf("# %s\n", text);
        free(text);
        json_decref(bad);
    }
    CHECK(n_taken == 0 && n_silent == 0 && n_harmless < N_JSON / 4,
          "%d headers with another value are refused (%d, %d)", N_JSON - n_harmless, n_taken,
          n_silent);
    n_taken = 0;
    for (int i = 0; i < N_RANDOM; i++) {
        struct errmsg e = {{0}};
        char text[64];
        size_t n = (size_t)rng_int(rng, 64);
        for (size_t k = 0; k < n; k++)
            text[k] = (char)rng_int(rng, 256);
        n_taken += read_file(&z, text, n, 64, rng, NULL, &g, &e) == 0 || !e.text[0];
    }
    CHECK(n_taken == 0, "%d files of random bytes are refused", N_RANDOM);
    json_decref(good);
    buf_fini(&b);
}

static void refuse(const struct state_shape *z, const char *data, size_t len, int want,
                   const char *words)
{
    struct rng rng = {1};
    struct state_info g;
    struct errmsg e;
    int rc = read_file(z, data, len, 5000, &rng, NULL, &g, &e);
    CHECK(rc == want && strstr(e.text, words), "refused for %s: %s", words, e.text);
}

/* Good files of others, and for others. */
static void test_others(struct rng *rng)
{
    struct state_shape z = shape_of(2), other = z;
    struct state_info f = {.n_tokens = 70, .dtype = DTYPE_F32};
    struct buf b;
    buf_init(&b);
    make(&z, &f, rng, &b);
    other.fingerprint++;
    refuse(&other, b.data, b.len, ERR_UNSUPPORTED, "another model");
    other = z;
    other.gd.V = 6; /* the fingerprint would differ, too */
    refuse(&other, b.data, b.len, ERR_INVALID, "layers.0.gdn.state");
    other = z;
    other.ad.D = 2;
    refuse(&other, b.data, b.len, ERR_INVALID, "layers.1.attn.k");
    buf_fini(&b);
    f.n_tokens = MAX_TOKENS + 1;
    make(&z, &f, rng, &b);
    refuse(&z, b.data, b.len, ERR_TOO_LARGE, "at most 200");
    buf_fini(&b);
    f.n_tokens = 70;
    int32_t vocab = arch.vocab;
    arch.vocab = 100000;
    make(&z, &f, rng, &b);
    arch.vocab = vocab;
    refuse(&z, b.data, b.len, ERR_INVALID, "vocabulary");
    buf_fini(&b);
}

/* The sum is one of the bytes, not of how they came; and of each bit. */
static void test_sum(struct rng *rng)
{
    unsigned char data[1000];
    struct state_sum s;
    int n_bad = 0, n_same = 0;
    for (int i = 0; i < 1000; i++)
        data[i] = (unsigned char)rng_int(rng, 256);
    for (size_t len = 0; len < 400; len++) {
        state_sum_start(&s);
        state_sum_add(&s, data, len);
        uint64_t want = state_sum_of(&s);
        state_sum_start(&s);
        for (size_t at = 0, n; at < len; at += n) {
            n = 1 + (size_t)rng_int(rng, 150);
            n = n < len - at ? n : len - at;
            state_sum_add(&s, data + at, n);
        }
        n_bad += state_sum_of(&s) != want;
        for (size_t bit = 0; bit < 8 * len; bit += 1 + len / 30) {
            data[bit / 8] ^= (unsigned char)(1 << bit % 8);
            state_sum_start(&s);
            state_sum_add(&s, data, len);
            n_same += state_sum_of(&s) == want;
            data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
        state_sum_start(&s);
        state_sum_add(&s, data, len);
        state_sum_add(&s, "", 1);
        n_same += state_sum_of(&s) == want;
    }
    CHECK(n_bad == 0 && n_same == 0, "the checksum: %d, %d", n_bad, n_same);
}

static void copy_slot(const struct gdn_dims *d, const float *S, const void *conv, void *raw)
{
    size_t n = (size_t)(d->HV * d->K * d->V);
    memcpy(raw, S, n * sizeof(float));
    memcpy((float *)raw + n, conv, 3 * (size_t)d->conv_dim * 2);
}

static void copy_page(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                      int32_t n_tokens, const void *rows, void *raw)
{
    (void)is_value;
    memset(raw, 0, (size_t)(page_tokens * d->HK * d->D) * 2);
    memcpy(raw, rows, (size_t)(n_tokens * d->HK * d->D) * 2);
}

/* Numbers of f32 for pools of bf16: to the nearest, of two as near the even one. */
static void test_narrowed(void)
{
    static const struct {
        uint32_t f32;
        uint16_t bf16;
    } cases[] = {{0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81},
                 {0x3f818000, 0x3f82}, {0xbf807fff, 0xbf80}, {0x00000000, 0x0000},
                 {0x80000000, 0x8000}, {0x7f7fffff, 0x7f80}, {0x7f800000, 0x7f80}};
    enum { N_CASES = sizeof(cases) / sizeof(cases[0]), TOKENS = 70 };
    const struct backend_ops ops = {.slot_pack = copy_slot, .page_pack = copy_page};
    struct state_shape z = shape_of(2);
    uint32_t in[TOKENS * 8];
    uint16_t tmp[TOKENS * 8], raw[2 * 64 * 8];
    int n_bad = 0;
    z.act = DTYPE_BF16;
    z.half_page_bytes = 64 * 8 * 2;
    for (int i = 0; i < TOKENS * 8; i++)
        in[i] = cases[i % N_CASES].f32;
    const struct state_part keys = {.kind = STATE_KEYS, .n_pages = 2, .n_tokens = TOKENS};
    state_pack(&z, &ops, &keys, DTYPE_F32, in, tmp, raw);
    for (int i = 0; i < 2 * 64 * 8; i++)
        n_bad += raw[i] != (i < TOKENS * 8 ? cases[i % N_CASES].bf16 : 0);
    const struct state_part slot = {.kind = STATE_SLOT};
    state_pack(&z, &ops, &slot, DTYPE_F32, in, tmp, raw);
    n_bad += memcmp(raw, in, 30 * 4) != 0;
    for (int i = 0; i < 21; i++)
        n_bad += raw[60 + i] != cases[(30 + i) % N_CASES].bf16;
    CHECK(n_bad == 0, "f32 becomes bf16, states stay (%d)", n_bad);
}

int main(int argc, char **argv)
{
    struct rng rng = {argc > 1 ? strtoull(argv[1], NULL, 10) : 20261130};
    printf("# seed %llu\n", (unsigned long long)rng.s);
    test_sum(&rng);
    test_round(&rng);
    test_altered(&rng);
    test_headers(&rng);
    test_others(&rng);
    test_narrowed();
    return tap_done();
}
