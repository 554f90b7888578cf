/* Checkpoints into weights: every row where the layer loop wants it, in every layout, and all
 * that is wrong with a checkpoint said by name. Faults are numbered as in gdn.md 4. */
#include <criterion/criterion.h>

#include <math.h>

#include "leaks.h"
#include "weights_oracle.h"

TestSuite(weights, .fini = leaks_check);

struct rig {
    struct fake fake;
    struct backend b;
    struct arch a;
    struct st_set *set;
    struct weights w;
};

static void rig_open(struct rig *r, int i_config, const struct variant *v)
{
    memset(r, 0, sizeof(*r));
    r->b = (struct backend){.ops = &fake_ops, .impl = &r->fake};
    r->fake.keeps_borrowed = true;
    r->a = config(i_config);
    r->set = checkpoint(&r->a, v);
}

/* Loads, checks sizes and use of the backend. */
static void rig_load(struct rig *r)
{
    struct errmsg e = {{0}};
    size_t want = weights_bytes(&r->a, r->set, &r->b);
    int rc = weights_load(&r->a, r->set, 1, &r->b, NULL, NULL, &r->w, &e);
    cr_assert(rc == 0, "%d %s", rc, e.text);
    cr_assert(r->w.bytes == want && r->fake.live_bytes == want,
              "%zu said, %zu counted, %zu taken", want, r->w.bytes, r->fake.live_bytes);
    cr_assert(!r->fake.is_misused);
}

static void rig_unload(struct rig *r)
{
    weights_free(&r->a, &r->b, &r->w);
    cr_assert(r->fake.n_live == 0 && r->fake.live_bytes == 0 && !r->w.layers);
}

static void rig_close(struct rig *r)
{
    rig_unload(r);
    if (r->set)
        st_close(r->set);
    arch_fini(&r->a);
}

/* Families x experts one by one or fused x prefixes x head there or not (whatever the flag
 * says) x dtypes x alignments of the data x a backend that keeps mapped embeddings or
 * copies. */
Test(weights, every_layout)
{
    int n_mapped = 0, n_unaligned = 0;
    for (int i = 0; i < 4 * 2 * 2 * 2 * 4 * 2; i++) {
        struct variant v = {.dtypes = (enum dtypes)(i / 32 % 4),
                            .fused = i / 4 % 2,
                            .nested = i / 8 % 2,
                            .no_head = i / 16 % 2,
                            .extras = i % 3 == 0,
                            .skew = i / 128 ? (size_t)i % 7 + 1 : 0};
        struct rig r;
        rig_open(&r, i % 4, &v);
        r.fake.keeps_borrowed = i % 5 != 0;
        rig_load(&r);
        check_weights(&r.a, r.set, &r.w, v.nested, v.fused);
        const struct st_tensor *t =
            st_find(r.set, v.nested ? "model.language_model.embed_tokens.weight"
                                    : "model.embed_tokens.weight");
        bool is_aligned = (uintptr_t)t->data % st_dtype_bytes(t->dtype) == 0;
        bool is_mapped = r.w.embed.embed == t->data;
        cr_assert(is_mapped == (r.fake.keeps_borrowed && is_aligned));
        n_mapped += is_mapped;
        n_unaligned += !is_aligned;
        rig_close(&r);
    }
    cr_assert(n_mapped > 50 && n_unaligned > 50, "%d, %d", n_mapped, n_unaligned);
}

static struct st_tensor *mutable_tensor(struct rig *r, const char *name, float *data, size_t n)
{
    struct st_tensor *t = (struct st_tensor *)st_find(r->set, name);
    cr_assert(t && t->bytes == n * sizeof(float));
    t->data = data;
    return t;
}

/* Fault 29: A_log rounded to bf16 on the way changes g. Stored as F32 it must arrive in all its
 * bits; stored as BF16, as the value that bf16 has. */
Test(weights, fault_29_A_log_keeps_its_dtype)
{
    static const float A_log[6] = {0.1f, 1.2345678f, 2.7f, -0.3333333f, 2.7725887f, 1e-3f};
    float stored[6];
    struct variant v = {.dtypes = ALL_F32};
    struct rig r;
    double worst = 0;
    memcpy(stored, A_log, sizeof(stored));
    rig_open(&r, 0, &v);
    mutable_tensor(&r, "model.layers.0.linear_attn.A_log", stored, 6);
    rig_load(&r);
    for (int h = 0; h < 6; h++) {
        uint32_t bits;
        float rounded;
        memcpy(&bits, &A_log[h], 4);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
        memcpy(&rounded, &bits, 4);
        /* g = -exp(A_log) softplus(.): the factor of the softplus. */
        double g = -exp((double)r.w.layers[0].A_log[h]), want = -exp((double)A_log[h]);
        worst = fmax(worst, fabs(exp((double)rounded) / exp((double)A_log[h]) - 1));
        cr_assert(g == want, "head %d: %g, %g", h, g, want);
    }
    /* The rounding that must not happen would have shown: half of bf16's 2^-8, times A_log. */
    cr_assert(worst > 1e-3);
    rig_unload(&r);

    struct st_tensor *t =
        (struct st_tensor *)st_find(r.set, "model.layers.0.linear_attn.A_log");
    uint16_t halves[6] = {0x3dcd, 0x3f9e, 0x402d, 0xbeab, 0x4031, 0x3a83};
    t->dtype = ST_BF16;
    t->bytes = sizeof(halves);
    t->data = halves;
    rig_load(&r);
    for (int h = 0; h < 6; h++)
        cr_assert(r.w.layers[0].A_log[h] == ckpt_element(t, (size_t)h));
    rig_close(&r);
}

/* Every f16 value that is a number, and infinities and NaNs as such, arrives exactly. */
Test(weights, all_halves)
{
    enum { N = 46 * 4 }; /* the convolution's taps */
    struct variant v = {.dtypes = ALL_F16};
    struct rig r;
    uint16_t halves[N];
    rig_open(&r, 1, &v);
    struct st_tensor *t =
        (struct st_tensor *)st_find(r.set, "model.layers.0.linear_attn.conv1d.weight");
    cr_assert(t && t->bytes == sizeof(halves));
    t->data = halves;
    for (int first = 0; first < 1 << 16; first += N) {
        for (int i = 0; i < N; i++)
            halves[i] = (uint16_t)(first + i);
        rig_load(&r);
        for (int i = 0; i < N; i++) {
            int h = (first + i) & 0xffff, exponent = h >> 10 & 31, frac = h & 0x3ff;
            double want = exponent ? ldexp(1024 + frac, exponent - 25) : ldexp(frac, -24);
            float found = r.w.layers[0].conv[i];
            if (exponent == 31)
                cr_assert(frac ? isnan(found) : isinf(found), "%04x", h);
            else
                cr_assert((double)fabsf(found) == want, "%04x: %g", h, (double)found);
            cr_assert(!signbit(found) == !(h & 0x8000), "%04x", h);
        }
        rig_unload(&r);
    }
    rig_close(&r);
}

/* Fault 32: query and gate are not the halves of q_proj. One head hot: its query rows are 1,
 * its gate rows 2, all others 0. */
Test(weights, fault_32_query_and_gate_by_head)
{
    struct variant v = {.dtypes = ALL_F32};
    struct rig r;
    rig_open(&r, 1, &v);
    int64_t D = r.a.D, HQ = r.a.HQ, M = r.a.M;
    size_t n = (size_t)(2 * HQ * D * M);
    float *q = calloc(n, sizeof(*q));
    mutable_tensor(&r, "model.layers.1.self_attn.q_proj.weight", q, n);
    for (int64_t hot = 0; hot < HQ; hot++) {
        memset(q, 0, n * sizeof(*q));
        for (int64_t i = 0; i < 2 * D * M; i++)
            q[hot * 2 * D * M + i] = i < D * M ? 1 : 2;
        rig_load(&r);
        const float *w = r.w.layers[1].attn_in.data;
        for (int64_t i = 0; i < 2 * HQ * D * M; i++) {
            int64_t head = i / (D * M) % HQ;
            float want = head != hot ? 0 : i < HQ * D * M ? 1 : 2;
            if (w[i] != want)
                cr_assert_fail("hot head %lld: row %lld is %g", (long long)hot,
                               (long long)(i / M), (double)w[i]);
        }
        rig_unload(&r);
    }
    rig_close(&r);
    free(q);
}

/* Fault 33: a head that is there is used, whatever tie_word_embeddings says; one that is not
 * there is the embedding. */
Test(weights, fault_33_the_file_decides_the_head)
{
    for (int i = 0; i < 4; i++) {
        struct variant v = {.no_head = i % 2};
        struct rig r;
        rig_open(&r, 2, &v);
        r.a.tie_flag = i / 2;
        rig_load(&r);
        cr_assert(r.w.tied == v.no_head);
        check_weights(&r.a, r.set, &r.w, false, false);
        rig_close(&r);
    }
}

/* Where the config says that the head is not the embedding, none is a lack, not a choice. */
Test(weights, a_head_that_the_config_says_is_there)
{
    struct variant v = {.no_head = true};
    struct rig r;
    struct errmsg e;
    rig_open(&r, 2, &v);
    r.a.needs_head = true;
    cr_assert(weights_check(&r.a, r.set, &e) == ERR_INVALID);
    cr_assert(strstr(e.text, "1 missing: lm_head.weight") &&
                  strstr(e.text, "tie_word_embeddings is false"),
              "%s", e.text);
    rig_close(&r);
    v.no_head = false;
    rig_open(&r, 2, &v);
    r.a.needs_head = true;
    rig_load(&r);
    cr_assert(!r.w.tied);
    rig_close(&r);
}

/* ---- what is wrong with a checkpoint ---- */

static void has_words(const char *text, const char *words)
{
    char copy[512], *save;
    snprintf(copy, sizeof(copy), "%s", words);
    for (char *w = strtok_r(copy, "|", &save); w; w = strtok_r(NULL, "|", &save))
        cr_assert(strstr(text, w) != NULL, "\"%s\" does not say %s", text, w);
}

Test(weights, one_wrong_tensor)
{
    static const struct {
        int i_config;
        struct variant v;
        int rc;
        const char *words;
    } rows[] = {
        {0,
         {.name = "model.norm.weight", .drop = true},
         ERR_INVALID,
         "1 missing: model.norm.weight"},
        {0,
         {.name = "model.embed_tokens.weight", .drop = true},
         ERR_INVALID,
         "1 missing: model.embed_tokens.weight"},
        {0,
         {.name = "model.layers.0.linear_attn.in_proj_ba.weight", .more_rows = 1},
         ERR_INVALID,
         "1 of another shape: model.layers.0.linear_attn.in_proj_ba.weight [13, 10] for [12, "
         "10]"},
        {0,
         {.name = "model.layers.1.mlp.experts.2.up_proj.weight", .drop = true},
         ERR_INVALID,
         "1 missing: model.layers.1.mlp.experts.2.up_proj.weight"},
        {1,
         {.name = "model.layers.0.linear_attn.conv1d.weight", .more_rows = -1},
         ERR_INVALID,
         "conv1d.weight [45, 1, 4] for [46, 1, 4]"},
        {2,
         {.name = "model.layers.0.mlp.experts.down_proj", .fused = true, .more_rows = 1},
         ERR_INVALID,
         "experts.down_proj [4, 10, 7] for [3, 10, 7]"},
        {2,
         {.name = "lm_head.weight", .more_rows = 3},
         ERR_INVALID,
         "lm_head.weight [16, 10] for [13, 10]"},
        {1,
         {.name = "model.layers.1.self_attn.k_proj.weight", .dtype = ST_F8_E4M3},
         ERR_UNSUPPORTED,
         "accepted: BF16, F16, F32: model.layers.1.self_attn.k_proj.weight F8_E4M3"},
        {1,
         {.name = "model.layers.0.linear_attn.A_log", .dtype = ST_F64},
         ERR_UNSUPPORTED,
         "A_log F64"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct rig r;
        struct errmsg e = {{0}};
        rig_open(&r, rows[i].i_config, &rows[i].v);
        int rc = weights_check(&r.a, r.set, &e);
        cr_assert(rc == rows[i].rc, "%d %s", rc, e.text);
        has_words(e.text, rows[i].words);
        /* Loading finds the same before it asks the backend for anything. */
        cr_assert(weights_load(&r.a, r.set, 1, &r.b, NULL, NULL, &r.w, &e) == rc);
        has_words(e.text, rows[i].words);
        cr_assert(r.fake.n_calls == 0);
        rig_close(&r);
    }
}

/* All at once: another model's config for a checkpoint. */
Test(weights, everything_wrong_in_one_message)
{
    struct variant v = {.extras = true};
    struct rig r;
    struct errmsg e;
    rig_open(&r, 0, &v);
    struct arch other = config(1);
    other.M = 12;
    cr_assert(weights_check(&other, r.set, &e) == ERR_INVALID);
    has_words(e.text,
              "10 missing: model.layers.0.linear_attn.in_proj_qkv.weight"
              "|model.layers.1.mlp.down_proj.weight"
              "|of another shape: model.embed_tokens.weight [13, 10] for [13, 12], "
              "|that this model does not have: model.layers.0.linear_attn.in_proj_ba.weight"
              "| more");
    cr_assert(!strstr(e.text, "mtp.") && !strstr(e.text, "visual"));
    cr_assert(strlen(e.text) < sizeof(e.text) - 1);
    /* weights_bytes of what was not checked is a number, not a crash. */
    cr_assert(weights_bytes(&other, r.set, &r.b) > 0);
    arch_fini(&other);
    rig_close(&r);
}

Test(weights, fp8_scales_are_named)
{
    struct ckpt c;
    struct ckpt_dir d;
    struct st_set *set;
    struct errmsg e;
    struct arch a = config(1);
    ckpt_init(&c);
    ckpt_add(&c, "model.layers.0.mlp.up_proj.weight_scale_inv", ST_F32, (int64_t[]){1, 1, 0});
    ckpt_add(&c, "model.layers.0.mlp.up_proj.weight", ST_F8_E4M3, (int64_t[]){9, 10, 0});
    ckpt_dir_open(&d);
    ckpt_write(&c, ckpt_dir_file(&d, "model.safetensors"), 0);
    cr_assert(st_open_dir(d.path, &set, &e) == 0);
    cr_assert(weights_check(&a, set, &e) == ERR_UNSUPPORTED);
    has_words(e.text, "up_proj.weight F8_E4M3|up_proj.weight_scale_inv (scales|missing");
    st_close(set);
    ckpt_fini(&c);
    ckpt_dir_close(&d);
    arch_fini(&a);
}

/* ---- failures of the backend ---- */

Test(weights, every_allocation_fails_once)
{
    for (int i = 0; i < 3; i++) {
        struct variant v = {.no_head = i == 1, .skew = (size_t)i};
        struct rig r;
        struct errmsg e;
        rig_open(&r, i, &v);
        r.fake.keeps_borrowed = i == 0;
        if (i == 2) { /* a dummy */
            st_close(r.set);
            r.set = NULL;
        }
        rig_load(&r);
        int n_calls = r.fake.n_calls;
        rig_unload(&r);
        for (int k = 1; k <= n_calls; k++) {
            r.fake.n_calls = 0;
            r.fake.fail_at = k;
            memset(e.text, 0, sizeof(e.text));
            int rc = weights_load(&r.a, r.set, 1, &r.b, NULL, NULL, &r.w, &e);
            cr_assert(rc == ERR_NOMEM && e.text[0], "call %d of %d: %d", k, n_calls, rc);
            cr_assert(r.fake.n_live == 0 && r.fake.live_bytes == 0, "call %d of %d", k,
                      n_calls);
            cr_assert(!r.w.layers && !r.w.vectors && !r.w.embed.data && !r.w.bytes);
        }
        r.fake.fail_at = 0;
        r.fake.fail_upload = true;
        cr_assert(weights_load(&r.a, r.set, 1, &r.b, NULL, NULL, &r.w, &e) == ERR_DEVICE);
        r.fake.fail_upload = false;
        rig_load(&r);
        rig_close(&r);
    }
}

static void note_progress(void *arg, double done)
{
    double *last = arg;
    cr_assert(done >= *last && done <= 1, "%g after %g", done, *last);
    *last = done;
}

Test(weights, progress_ends_at_one)
{
    struct variant v = {0};
    struct rig r;
    struct errmsg e;
    double last = 0;
    rig_open(&r, 0, &v);
    cr_assert(weights_load(&r.a, r.set, 1, &r.b, note_progress, &last, &r.w, &e) == 0);
    cr_assert(last == 1);
    rig_close(&r);
}

/* ---- real files ---- */

static void load_dir(const char *dir, bool nested, bool fused)
{
    struct rig r = {.fake.keeps_borrowed = true};
    struct errmsg e;
    r.b = (struct backend){.ops = &fake_ops, .impl = &r.fake};
    cr_assert(arch_read(dir, &r.a, &e) == 0, "%s", e.text);
    cr_assert(st_open_dir(dir, &r.set, &e) == 0, "%s", e.text);
    rig_load(&r);
    check_weights(&r.a, r.set, &r.w, nested, fused);
    rig_close(&r);
}

Test(weights, demo_model)
{
    char dir[512];
    const char *top = getenv("SRCDIR");
    snprintf(dir, sizeof(dir), "%s/tests/models/demo", top ? top : ".");
    load_dir(dir, false, false);
}

Test(weights, fixtures)
{
    static const struct {
        const char *name;
        bool nested, fused;
    } rows[] = {{"next-moe-r2", false, false},
                {"q35-dense-r1", false, false},
                {"q35-dense-r3", true, false},
                {"q35-moe-r2", true, true}};
    const char *top = getenv("SRCDIR");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char dir[512];
        snprintf(dir, sizeof(dir), "%s/../shared/fixtures/%s", top ? top : ".", rows[i].name);
        if (access(dir, R_OK) != 0)
            cr_skip_test("../shared/fixtures is not here");
        load_dir(dir, rows[i].nested, rows[i].fused);
    }
}

/* The daemon's own backend counts what it takes as it said it would. */
Test(weights, sizes_on_the_cpu_backend)
{
    for (int i = 0; i < 8; i++) {
        struct variant v = {.dtypes = (enum dtypes)(i % 4), .no_head = i % 2, .skew = i > 5};
        struct errmsg e;
        struct backend b = {.ops = backend_find("cpu", &e)};
        struct weights w;
        struct arch a = config(i % 4);
        struct st_set *set = i == 7 ? NULL : checkpoint(&a, &v);
        cr_assert(b.ops && b.ops->open(&b, 1, &e) == 0, "%s", e.text);
        size_t want = weights_bytes(&a, set, &b);
        cr_assert(weights_load(&a, set, 1, &b, NULL, NULL, &w, &e) == 0, "%s", e.text);
        cr_assert(w.bytes == want, "%zu, %zu", w.bytes, want);
        weights_free(&a, &b, &w);
        b.ops->close(&b);
        if (set)
            st_close(set);
        arch_fini(&a);
    }
}

/* ---- dummies ---- */

static double rms(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        cr_assert(isfinite(x[i]));
        sum += (double)x[i] * (double)x[i];
    }
    return sqrt(sum / (double)n);
}

Test(weights, dummies)
{
    struct rig r = {0}, same = {0}, other = {0};
    struct rig *rigs[] = {&r, &same, &other};
    struct errmsg e;
    for (int i = 0; i < 3; i++) {
        rigs[i]->b = (struct backend){.ops = &fake_ops, .impl = &rigs[i]->fake};
        rigs[i]->a = config(2); /* its flag says tied */
        size_t want = weights_bytes(&rigs[i]->a, NULL, &rigs[i]->b);
        cr_assert(weights_load(&rigs[i]->a, NULL, i == 2 ? 8 : 7, &rigs[i]->b, NULL, NULL,
                               &rigs[i]->w, &e) == 0);
        cr_assert(rigs[i]->w.bytes == want && rigs[i]->fake.live_bytes == want);
        cr_assert(rigs[i]->w.tied && rigs[i]->w.embed.dtype == DTYPE_BF16);
    }
    const struct weight *g = &r.w.layers[0].expert_gate_up, *l1 = &r.w.layers[1].expert_gate_up;
    size_t n = (size_t)g->n_mats * g->rows * g->cols;
    cr_assert(memcmp(g->data, same.w.layers[0].expert_gate_up.data, n * 4) == 0);
    cr_assert(memcmp(g->data, other.w.layers[0].expert_gate_up.data, n * 4) != 0);
    cr_assert(memcmp(r.w.vectors, same.w.vectors, 64 * 4) == 0);
    cr_assert(memcmp(g->data, l1->data, n * 4) != 0);
    /* No two rows alike. */
    const float *rows = g->data;
    for (int64_t i = 0; i < (int64_t)g->n_mats * g->rows; i++)
        for (int64_t k = 0; k < i; k++)
            cr_assert(memcmp(rows + i * g->cols, rows + k * g->cols, (size_t)g->cols * 4) != 0);
    /* Uniform draws: variance 1 / cols; 420 of them: its relative error is sqrt(0.8 / 420),
     * 4.4%, and half of that for the rms; four sigma. */
    cr_assert(fabs(rms(rows, n) * sqrt(g->cols) - 1) < 0.09, "%g", rms(rows, n));
    for (int h = 0; h < r.a.HV; h++) {
        float A = expf(r.w.layers[0].A_log[h]), dt = log1pf(expf(r.w.layers[0].dt_bias[h]));
        cr_assert(A >= 1 && A <= 16.001f && dt >= 0.00099f && dt <= 0.1001f, "%g %g", (double)A,
                  (double)dt);
    }
    cr_assert(fabs(rms(r.w.layers[0].in_norm, (size_t)r.a.M) - 1) < 0.1);
    for (int i = 0; i < 3; i++)
        rig_close(rigs[i]);
}
