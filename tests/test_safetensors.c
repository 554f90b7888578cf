/* Checkpoint files: what is in them is found, and no file, however wrong, does more than get an
 * error. */
#include <criterion/criterion.h>

#include "ckpt.h"
#include "leaks.h"
#include "rng.h"

TestSuite(safetensors, .fini = leaks_check);

static const int64_t two[] = {3, 5, 0}, one[] = {7, 0}, three[] = {2, 3, 4, 0};

/* Reads every byte of every tensor: under ASan or past the mapping this would not end well. */
static unsigned touch(const struct st_set *s)
{
    unsigned sum = 0;
    for (size_t i = 0; i < st_count(s); i++) {
        const struct st_tensor *t = st_at(s, i);
        const unsigned char *data = t->data;
        for (size_t k = 0; k<t->bytes; k += t->bytes> 4096 ? 997 : 1)
            sum += data[k];
        if (t->bytes)
            sum += data[t->bytes - 1];
        cr_assert(st_find(s, t->name) == t);
    }
    return sum;
}

static void check_tensor(const struct st_set *s, const char *name, enum st_dtype dtype,
                         const int64_t *dims)
{
    const struct st_tensor *t = st_find(s, name);
    cr_assert(t != NULL, "%s", name);
    cr_assert(strcmp(t->name, name) == 0 && t->dtype == dtype, "%s", name);
    size_t n = 1;
    for (int i = 0; i < t->n_dims; i++) {
        cr_assert(t->dims[i] == dims[i], "%s", name);
        n *= (size_t)dims[i];
    }
    cr_assert(dims[t->n_dims] == 0, "%s", name);
    cr_assert(t->bytes == n * st_dtype_bytes(dtype), "%s", name);
    for (size_t i = 0; i < n; i++)
        cr_assert(ckpt_element(t, i) == ckpt_value(name, i), "%s %zu", name, i);
}

Test(safetensors, one_file_at_any_alignment)
{
    struct ckpt_dir d;
    ckpt_dir_open(&d);
    for (size_t skew = 0; skew < 8; skew++) {
        struct ckpt c;
        struct st_set *s;
        struct errmsg e;
        ckpt_init(&c);
        ckpt_add(&c, "b.weight", ST_BF16, two);
        ckpt_add(&c, "a", ST_F32, one);
        ckpt_add(&c, "c.weight", ST_F16, three);
        ckpt_write(&c, ckpt_dir_file(&d, "model.safetensors"), skew);
        cr_assert(st_open_file(d.file, &s, &e) == 0, "%s", e.text);
        cr_assert(st_count(s) == 3);
        cr_assert(strcmp(st_at(s, 0)->name, "a") == 0 && st_at(s, 2) == st_at(s, 0) + 2);
        check_tensor(s, "a", ST_F32, one);
        check_tensor(s, "b.weight", ST_BF16, two);
        check_tensor(s, "c.weight", ST_F16, three);
        cr_assert(!st_find(s, "b") && !st_find(s, "") && !st_find(s, "__metadata__"));
        st_close(s);
        ckpt_fini(&c);
    }
    ckpt_dir_close(&d);
}

/* ---- headers ---- */

struct header_case {
    const char *header;
    size_t n_data;
    const char *words; /* of the message, separated by '|'; NULL: accepted */
};

#define ENTRY(dtype, shape, from, to)                                                          \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #from "," #to "]}"

static const struct header_case header_cases[] = {
    {"{\"a\":" ENTRY("F32", "[2]", 0, 8) "}", 8, NULL},
    {"{\"a\":" ENTRY("F32", "[2]", 0, 8) "}     \n\t ", 8, NULL},
    {"{\"s\":" ENTRY("F32", "[]", 0, 4) "}", 4, NULL},
    {"{\"z\":" ENTRY("F32", "[0]", 0, 0) ",\"a\":" ENTRY("U8", "[3]", 0, 3) "}", 3, NULL},
    {"{\"z\":" ENTRY("F64", "[9223372036854775807,2,0]", 1, 1) ",\"a\":" ENTRY("U8", "[1]", 0,
                                                                               1) "}",
     1, NULL},
    {"{\"b\":" ENTRY("I8", "[2]", 2, 4) ",\"a\":" ENTRY("BOOL", "[2]", 0, 2) "}", 4, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"more\":{}}}", 1, NULL},
    {"{}", 0, "no tensors"},
    {"{\"__metadata__\":{\"format\":\"pt\"}}", 0, "no tensors"},
    {"", 0, "not JSON"},
    {"[]", 0, "not a JSON object"},
    {"{\"a\":", 0, "not JSON"},
    {"{} {}", 0, "not JSON"},
    {"{\"a\":" ENTRY("F32", "[2]", 0, 8) ",\"a\":" ENTRY("F32", "[2]", 8, 16) "}", 16, "twice"},
    {"{\"a\":" ENTRY("F32", "[2]", 0, 8) "}", 7, "tensor a|outside|7 bytes"},
    {"{\"a\":" ENTRY("F32", "[2]", 0, 8) "}", 9, "1 bytes at the end"},
    {"{\"a\":" ENTRY("F32", "[2]", 4, 12) "}", 12, "4 bytes before|tensor a"},
    {"{\"a\":" ENTRY("U8", "[4]", 0, 4) ",\"b\":" ENTRY("U8", "[4]", 5, 9) "}", 9,
     "1 bytes before|tensor b"},
    {"{\"a\":" ENTRY("U8", "[4]", 0, 4) ",\"b\":" ENTRY("U8", "[4]", 3, 7) "}", 7,
     "tensors a and b overlap"},
    {"{\"a\":" ENTRY("U8", "[4]", 0, 4) ",\"b\":" ENTRY("U8", "[4]", 0, 4) "}", 4, "overlap"},
    {"{\"a\":" ENTRY("U8", "[4]", 0, 4) ",\"b\":" ENTRY("U8", "[2]", 1, 3) "}", 4, "overlap"},
    {"{\"a\":" ENTRY("U8", "[4]", 4, 0) "}", 4, "tensor a|outside"},
    {"{\"a\":" ENTRY("U8", "[4]", -4, 0) "}", 4, "tensor a|outside"},
    {"{\"a\":" ENTRY("U8", "[4]", 9223372036854775804, 9223372036854775807) "}", 4, "outside"},
    {"{\"a\":" ENTRY("U8", "[4]", 0, 18446744073709551616) "}", 4, "not JSON"},
    {"{\"a\":" ENTRY("F32", "[3]", 0, 8) "}", 8, "tensor a|hold 8 bytes, shape and dtype 12"},
    {"{\"a\":" ENTRY("F32", "[4294967296,4294967296]", 0, 0) "}", 0, "tensor a|more elements"},
    {"{\"a\":" ENTRY("F32", "[4611686018427387904]", 0, 0) "}", 0, "tensor a|more elements"},
    {"{\"a\":" ENTRY("F32", "[-1]", 0, 4) "}", 4, "tensor a|dim"},
    {"{\"a\":" ENTRY("F32", "[1.0]", 0, 4) "}", 4, "tensor a|dim"},
    {"{\"a\":" ENTRY("F32", "[\"1\"]", 0, 4) "}", 4, "tensor a|dim"},
    {"{\"a\":" ENTRY("F32", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", 4, "tensor a|at most 8"},
    {"{\"a\":" ENTRY("F32", "1", 0, 4) "}", 4, "tensor a|shape"},
    {"{\"a\":" ENTRY("F4", "[2]", 0, 1) "}", 1, "tensor a|F4|accepted|BF16"},
    {"{\"a\":" ENTRY("b\\nf16", "[2]", 0, 1) "}", 1, "tensor a|not printable"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "tensor a|dtype"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "tensor a|shape"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "tensor a|data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1, "data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1.0]}}", 1, "data_offsets"},
    {"{\"a\":[]}", 0, "tensor a|object"},
    {"{\"\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "printable"},
    {"{\"a\\u0007\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "printable"},
    {"{\"a\\u0000b\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "not JSON"},
    {"{\"\\u00e4\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "printable"},
    {"{\"__metadata__\":[],\"a\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "__metadata__"},
    {"{\"__metadata__\":{\"n\":1},\"a\":" ENTRY("U8", "[1]", 0, 1) "}", 1, "__metadata__"},
};

static void has_words(const char *text, const char *words, const char *of)
{
    char copy[256], *save;
    snprintf(copy, sizeof(copy), "%s", words);
    for (char *w = strtok_r(copy, "|", &save); w; w = strtok_r(NULL, "|", &save))
        cr_assert(strstr(text, w) != NULL, "%s: \"%s\" does not say %s", of, text, w);
    for (const char *c = text; *c; c++)
        cr_assert((*c >= 0x20 && *c < 0x7f), "%s: a message that is not printable", of);
}

Test(safetensors, headers)
{
    static const char zeros[64];
    struct ckpt_dir d;
    ckpt_dir_open(&d);
    for (size_t i = 0; i < sizeof(header_cases) / sizeof(header_cases[0]); i++) {
        const struct header_case *h = &header_cases[i];
        struct st_set *s;
        struct errmsg e = {{0}};
        ckpt_write_raw(ckpt_dir_file(&d, "x.safetensors"), strlen(h->header), h->header,
                       strlen(h->header), zeros, h->n_data);
        int rc = st_open_file(d.file, &s, &e);
        if (!h->words) {
            cr_assert(rc == 0, "%s: %s", h->header, e.text);
            cr_assert(touch(s) == 0);
            st_close(s);
        } else {
            cr_assert(rc == ERR_INVALID, "%s: %d", h->header, rc);
            has_words(e.text, h->words, h->header);
        }
    }
    ckpt_dir_close(&d);
}

Test(safetensors, file_lengths)
{
    static const struct {
        uint64_t header_len;
        size_t file_len;
        const char *words;
    } rows[] = {
        {0, 0, "0 bytes are too few"},
        {0, 7, "7 bytes are too few"},
        {0, 8, "not JSON"},
        {1, 8, "cut short"},
        {100, 60, "cut short|100"},
        {100000000, 60, "cut short"},
        {100000001, 60, "at most 100000000"},
        {UINT64_MAX, 60, "at most 100000000"},
        {UINT64_MAX - 7, 60, "at most 100000000"},
    };
    struct ckpt_dir d;
    ckpt_dir_open(&d);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct st_set *s;
        struct errmsg e;
        char fill[64];
        memset(fill, ' ', sizeof(fill));
        ckpt_write_raw(ckpt_dir_file(&d, "x.safetensors"), rows[i].header_len, fill,
                       sizeof(fill), NULL, 0);
        cr_assert(truncate(d.file, (off_t)rows[i].file_len) == 0);
        cr_assert(st_open_file(d.file, &s, &e) == ERR_INVALID);
        has_words(e.text, rows[i].words, "a file's length");
    }
    ckpt_dir_close(&d);
}

/* Damage to a real header: bytes replaced, runs cut out or doubled, the length field or the
 * file's end moved. What still opens must be readable to the last byte. */
Test(safetensors, damaged_headers)
{
    char path[512];
    const char *top = getenv("SRCDIR");
    snprintf(path, sizeof(path), "%s/tests/models/demo/model.safetensors", top ? top : ".");
    FILE *f = fopen(path, "rb");
    uint64_t len;
    cr_assert(f != NULL && fread(&len, 8, 1, f) == 1 && len < 1 << 20);
    char *good = malloc(len), *bad = malloc(2 * len);
    cr_assert(fread(good, 1, len, f) == len && fseek(f, 0, SEEK_END) == 0);
    size_t n_data = (size_t)ftell(f) - 8 - len;
    fclose(f);

    struct ckpt_dir d;
    struct rng rng = {2};
    int n_opened = 0, n_tries = 400;
    ckpt_dir_open(&d);
    for (int i = 0; i < n_tries; i++) {
        static const char pool[] = "\"{}[],:0123456789-.eE\\ \0\x80\xff";
        size_t n = len, tail = n_data;
        uint64_t said = n;
        memcpy(bad, good, n);
        size_t at = (size_t)rng_int(&rng, (int32_t)n), run = (size_t)rng_int(&rng, 200);
        switch (rng_int(&rng, 6)) {
        case 0: /* cut out */
            run = run < n - at ? run : n - at;
            memmove(bad + at, bad + at + run, n - at - run);
            said = n -= run;
            break;
        case 1: /* doubled */
            run = run < n - at ? run : n - at;
            memmove(bad + at + run, bad + at, n - at);
            said = n += run;
            break;
        case 2:
            said = n + (uint64_t)rng_int(&rng, 64) - 32;
            break;
        case 3:
            tail -= (size_t)rng_int(&rng, 4096);
            break;
        default:
            /* Digits for digits keep it JSON: offsets and shapes that lie. */
            while (bad[at] < '0' || bad[at] > '9')
                at = (at + 1) % n;
            bad[at] = rng_int(&rng, 2) ? (char)('0' + rng_int(&rng, 10))
                                       : pool[rng_int(&rng, sizeof(pool) - 1)];
        }
        struct st_set *s;
        struct errmsg e = {{0}};
        ckpt_write_raw(ckpt_dir_file(&d, "x.safetensors"), said, bad, n, NULL, tail);
        int rc = st_open_file(d.file, &s, &e);
        if (rc == 0) {
            touch(s);
            st_close(s);
            n_opened++;
        } else {
            cr_assert(rc == ERR_INVALID, "%d", rc);
            has_words(e.text, "x.safetensors", "damage");
        }
    }
    /* Damage inside names or a digit replaced by itself opens; most does not. */
    cr_assert(n_opened > 5 && n_opened < n_tries / 2, "%d of %d opened", n_opened, n_tries);
    free(good);
    free(bad);
    ckpt_dir_close(&d);
}

/* As many tensors as the largest published checkpoint (122B, FP8: 76,656). */
Test(safetensors, many_tensors)
{
    enum { N = 76656 };
    struct ckpt_dir d;
    struct ckpt c;
    struct st_set *s;
    struct errmsg e;
    char name[128];
    static const int64_t dims[] = {2, 0};
    ckpt_dir_open(&d);
    ckpt_init(&c);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof(name),
                 "model.language_model.layers.%d.mlp.experts.%d.gate_proj.weight", i % 48,
                 i / 48);
        ckpt_add(&c, name, ST_BF16, dims);
    }
    ckpt_write(&c, ckpt_dir_file(&d, "model.safetensors"), 0);
    cr_assert(st_open_dir(d.path, &s, &e) == 0, "%s", e.text);
    cr_assert(st_count(s) == N);
    for (int i = 0; i < N; i += 1000) {
        snprintf(name, sizeof(name),
                 "model.language_model.layers.%d.mlp.experts.%d.gate_proj.weight", i % 48,
                 i / 48);
        check_tensor(s, name, ST_BF16, dims);
    }
    st_close(s);
    ckpt_fini(&c);
    ckpt_dir_close(&d);
}

/* ---- directories ---- */

/* a in the first shard, b and c in the second. */
static void write_shards(struct ckpt_dir *d)
{
    struct ckpt c;
    ckpt_init(&c);
    ckpt_add(&c, "a", ST_F32, one);
    ckpt_write(&c, ckpt_dir_file(d, "model-00001-of-00002.safetensors"), 0);
    ckpt_fini(&c);
    ckpt_init(&c);
    ckpt_add(&c, "b", ST_BF16, two);
    ckpt_add(&c, "c", ST_F16, three);
    ckpt_write(&c, ckpt_dir_file(d, "model-00002-of-00002.safetensors"), 0);
    ckpt_fini(&c);
}

#define INDEX "model.safetensors.index.json"
#define ONE "\"model-00001-of-00002.safetensors\""
#define TWO "\"model-00002-of-00002.safetensors\""
#define MAP(entries) "{\"metadata\":{\"total_size\":1},\"weight_map\":{" entries "}}"

Test(safetensors, shards)
{
    static const struct {
        const char *index;
        int rc;
        const char *words;
    } rows[] = {
        {MAP("\"a\":" ONE ",\"b\":" TWO ",\"c\":" TWO), 0, NULL},
        {MAP("\"c\":" TWO ",\"a\":" ONE ",\"b\":" TWO), 0, NULL},
        {MAP("\"a\":" ONE ",\"b\":" TWO), ERR_INVALID, "tensor c|model-00002|nowhere"},
        {MAP("\"a\":" TWO ",\"b\":" TWO ",\"c\":" TWO), ERR_INVALID, "1 tensors|files: a"},
        {MAP("\"a\":" ONE ",\"b\":" ONE ",\"c\":" TWO), ERR_INVALID,
         "tensor b|model-00002|into"},
        {MAP("\"a\":" ONE ",\"b\":" TWO ",\"c\":" TWO ",\"d\":" TWO ",\"e\":" ONE), ERR_INVALID,
         "2 tensors|d|e"},
        {MAP("\"a\":\"m-3.safetensors\",\"b\":" TWO ",\"c\":\"m-4.safetensors\""), ERR_IO,
         "2 of 3 files|missing|m-3.safetensors|m-4.safetensors"},
        {MAP("\"a\":\"../a.safetensors\""), ERR_INVALID, "tensor a|same directory"},
        {MAP("\"a\":\"/etc/a.safetensors\""), ERR_INVALID, "tensor a|same directory"},
        {MAP("\"a\":\"x\\\\a.safetensors\""), ERR_INVALID, "tensor a|same directory"},
        {MAP("\"a\":\"..safetensors\""), ERR_INVALID, "tensor a|same directory"},
        {MAP("\"a\":\"x\\n.safetensors\""), ERR_INVALID, "tensor a|same directory"},
        {MAP("\"a\":\"pytorch_model.bin\""), ERR_INVALID, "tensor a|.safetensors"},
        {MAP("\"a\":1"), ERR_INVALID, "tensor a"},
        {MAP("\"a\\u0001\":" ONE), ERR_INVALID, "printable"},
        {MAP("\"a\":" ONE ",\"a\":" TWO), ERR_INVALID, "twice"},
        {MAP(""), ERR_INVALID, "weight_map is empty"},
        {"{}", ERR_INVALID, "weight_map"},
        {"[]", ERR_INVALID, "weight_map"},
        {"", ERR_INVALID, "not JSON"},
    };
    struct ckpt_dir d;
    ckpt_dir_open(&d);
    write_shards(&d);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct st_set *s;
        struct errmsg e = {{0}};
        ckpt_dir_put(&d, INDEX, rows[i].index);
        int rc = st_open_dir(d.path, &s, &e);
        cr_assert(rc == rows[i].rc, "%s: %d %s", rows[i].index, rc, e.text);
        if (rc == 0) {
            cr_assert(st_count(s) == 3);
            check_tensor(s, "a", ST_F32, one);
            check_tensor(s, "b", ST_BF16, two);
            check_tensor(s, "c", ST_F16, three);
            st_close(s);
        } else {
            has_words(e.text, rows[i].words, rows[i].index);
        }
    }
    /* The same name in two shards, whichever of them the index means. */
    struct ckpt c;
    struct st_set *s;
    struct errmsg e;
    ckpt_init(&c);
    ckpt_add(&c, "b", ST_F32, one);
    ckpt_add(&c, "a", ST_F32, one);
    ckpt_write(&c, ckpt_dir_file(&d, "model-00001-of-00002.safetensors"), 0);
    ckpt_fini(&c);
    ckpt_dir_put(&d, INDEX, MAP("\"a\":" ONE ",\"b\":" TWO ",\"c\":" TWO));
    cr_assert(st_open_dir(d.path, &s, &e) == ERR_INVALID);
    has_words(e.text, "tensor b|model-00001", "two shards");
    ckpt_dir_close(&d);
}

/* So many files are taken and one more is not, wherever their tensors stand in the index. */
Test(safetensors, many_shards)
{
    struct ckpt_dir d;
    ckpt_dir_open(&d);
    for (int n = 4096; n <= 4097; n++) {
        struct st_set *s;
        struct errmsg e = {{0}};
        struct buf index;
        buf_init(&index);
        buf_adds(&index, "{\"weight_map\":{");
        for (int i = 0; i < n; i++)
            buf_printf(&index, "\"t%d\":\"m-%d.safetensors\",", i, i);
        buf_adds(&index, "\"last\":\"m-0.safetensors\"}}");
        ckpt_dir_put(&d, INDEX, buf_cstr(&index));
        int rc = st_open_dir(d.path, &s, &e);
        cr_expect(rc == (n == 4096 ? ERR_IO : ERR_INVALID), "%d: %s", n, e.text);
        has_words(e.text, n == 4096 ? "4096 of 4096 files|missing" : "more than 4096 files",
                  "many shards");
        buf_fini(&index);
    }
    ckpt_dir_close(&d);
}

/* Shards with their index and a model.safetensors: which of the two is the model is not
 * guessed. An index may name that file, too. */
Test(safetensors, shards_beside_a_single_file)
{
    struct ckpt_dir d;
    struct ckpt c;
    struct st_set *s;
    struct errmsg e;
    ckpt_dir_open(&d);
    write_shards(&d);
    ckpt_dir_put(&d, INDEX, MAP("\"a\":" ONE ",\"b\":" TWO ",\"c\":" TWO));
    ckpt_init(&c);
    ckpt_add(&c, "a", ST_F32, two);
    ckpt_write(&c, ckpt_dir_file(&d, "model.safetensors"), 0);
    ckpt_fini(&c);
    cr_assert(st_open_dir(d.path, &s, &e) == ERR_INVALID);
    has_words(e.text, "model.safetensors beside " INDEX "|accepted: one", "both");
    ckpt_dir_put(&d, INDEX, MAP("\"a\":\"model.safetensors\""));
    cr_assert(st_open_dir(d.path, &s, &e) == 0 && st_count(s) == 1);
    check_tensor(s, "a", ST_F32, two);
    st_close(s);
    ckpt_dir_close(&d);
}

Test(safetensors, directories)
{
    struct ckpt_dir d;
    struct st_set *s;
    struct errmsg e;
    ckpt_dir_open(&d);
    cr_assert(st_open_dir("/nonexistent", &s, &e) == ERR_IO);
    cr_assert(st_open_dir(d.path, &s, &e) == ERR_IO);
    has_words(e.text, "no model.safetensors|" INDEX, "an empty directory");
    cr_assert(st_open_file(ckpt_dir_file(&d, "x"), &s, &e) == ERR_IO);
    /* The only one, by any name; of several, the usual name; never a guess. */
    write_shards(&d);
    cr_assert(st_open_dir(d.path, &s, &e) == ERR_INVALID);
    has_words(e.text, "2 .safetensors files", "two files");
    cr_assert(unlink(ckpt_dir_file(&d, "model-00001-of-00002.safetensors")) == 0);
    cr_assert(st_open_dir(d.path, &s, &e) == 0 && st_count(s) == 2);
    st_close(s);
    struct ckpt c;
    ckpt_init(&c);
    ckpt_add(&c, "a", ST_F32, one);
    ckpt_write(&c, ckpt_dir_file(&d, "model.safetensors"), 0);
    ckpt_fini(&c);
    cr_assert(st_open_dir(d.path, &s, &e) == 0 && st_count(s) == 1);
    st_close(s);
    /* Neither a FIFO nor a directory is opened, nor waited for. */
    cr_assert(unlink(ckpt_dir_file(&d, "model.safetensors")) == 0);
    cr_assert(mkfifo(d.file, 0600) == 0);
    cr_assert(st_open_dir(d.path, &s, &e) == ERR_IO);
    has_words(e.text, "not a regular file", "a FIFO");
    cr_assert(unlink(d.file) == 0 && mkdir(d.file, 0700) == 0);
    cr_assert(st_open_dir(d.path, &s, &e) == ERR_IO);
    ckpt_dir_close(&d);
}

/* tensors.txt of each fixture lists "file  name  dtype  [shape]" for every tensor. */
Test(safetensors, fixtures)
{
    static const char *const names[] = {"next-moe-r2", "q35-dense-r1", "q35-dense-r3",
                                        "q35-moe-r2"};
    const char *top = getenv("SRCDIR");
    for (size_t i = 0; i < 4; i++) {
        char dir[512], path[600], line[1024], file[256], name[256], dtype[16], shape[128];
        snprintf(dir, sizeof(dir), "%s/../shared/fixtures/%s", top ? top : ".", names[i]);
        snprintf(path, sizeof(path), "%s/tensors.txt", dir);
        FILE *f = fopen(path, "r");
        if (!f)
            cr_skip_test("../shared/fixtures is not here");
        struct st_set *model, *goldens;
        struct errmsg e;
        size_t n_lines = 0;
        cr_assert(st_open_dir(dir, &model, &e) == 0, "%s", e.text);
        snprintf(path, sizeof(path), "%s/goldens.safetensors", dir);
        cr_assert(st_open_file(path, &goldens, &e) == 0, "%s", e.text);
        while (fgets(line, sizeof(line), f)) {
            cr_assert(sscanf(line, "%255s %255s %15s %127[^\n]", file, name, dtype, shape) ==
                      4);
            const struct st_tensor *t =
                st_find(strcmp(file, "goldens.safetensors") == 0 ? goldens : model, name);
            cr_assert(t && strcmp(st_dtype_name(t->dtype), dtype) == 0, "%s", name);
            char found[128] = "[";
            for (int k = 0; k < t->n_dims; k++)
                sprintf(found + strlen(found), "%s%lld", k ? ", " : "", (long long)t->dims[k]);
            strcat(found, "]");
            cr_assert(strcmp(found, shape) == 0, "%s %s %s", name, found, shape);
            n_lines++;
        }
        fclose(f);
        cr_assert(n_lines == st_count(model) + st_count(goldens));
        touch(model);
        touch(goldens);
        st_close(model);
        st_close(goldens);
    }
}
