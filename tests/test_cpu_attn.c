/* Full attention on the CPU: norm, rotation and paged keys and values, against f64 and bit by
 * bit; the faults of gdn.md 4 that concern it by their numbers. */
#include <criterion/criterion.h>

#include "cpu_gemm.h"
#include "cpu_impl.h"
#include "cpu_ops.h"

/* A score is a sum of D = 256 products with partial sums of a few units: 16 u by random walk;
 * norm and rotation add some 8 u of each factor. Weights carry that as a relative error, and
 * the weighted mean of values no more than it: 4 times 64 u of the largest value. */
#define TOLERANCE (256 * UNIT_ROUNDOFF)

/* Requests of one attention layer: a projection [len, ld] for each. */
struct layer {
    struct attn_dims d;
    float *q_norm, *k_norm, *inv_freq;
    int32_t n_requests, len[SCHED_MAX_REQUESTS];
    float *p[SCHED_MAX_REQUESTS];
};

/* Pages of a run: a pool, and each request's table. */
struct paged {
    struct kv_pool pool;
    int32_t max_pages;
    int32_t *tables; /* [n_requests, max_pages] */
};

static struct attn_dims dims_of(int32_t HQ, int32_t HK, int32_t D, int32_t rot_dim)
{
    return (struct attn_dims){HQ, HK, D, rot_dim, (2 * HQ + 2 * HK) * D};
}

static struct layer layer_make(struct rng *r, struct attn_dims d, int32_t n,
                               const int32_t *lens)
{
    struct layer w = {.d = d, .n_requests = n};
    w.q_norm = normals(r, d.D, 1);
    w.k_norm = normals(r, d.D, 1);
    w.inv_freq = poisoned((size_t)d.rot_dim / 2);
    for (int32_t i = 0; i < d.rot_dim / 2; i++)
        w.inv_freq[i] = 1 / powf(1e4f, (float)(2 * i) / (float)d.rot_dim);
    for (int32_t i = 0; i < n; i++) {
        w.len[i] = lens[i];
        w.p[i] = normals(r, (size_t)lens[i] * d.ld + 1, 1);
    }
    return w;
}

/* The kernels of the products of every test from here on; NULL: the machine's best. */
static const char *kernels;

static void open_for(struct backend *b, const struct layer *w, int32_t n_threads,
                     int32_t max_tokens, int32_t max_seqs)
{
    struct backend_limits l = {
        .max_tokens = max_tokens, .max_seqs = max_seqs, .max_rows = 1, .HQ = w->d.HQ};
    open_cpu(b, n_threads, &l);
    if (kernels)
        cpu_gemm_select(cpu_impl_pool(b), kernels);
}

/* Every page NaN, tables over a shuffle of them. */
static struct paged pages_make(struct backend *b, const struct layer *w, struct rng *r,
                               int32_t page_tokens)
{
    struct paged k = {.max_pages = 1};
    int32_t n_pages = 2;
    for (int32_t i = 0; i < w->n_requests; i++) {
        int32_t n = (w->len[i] + page_tokens - 1) / page_tokens;
        k.max_pages = n > k.max_pages ? n : k.max_pages;
        n_pages += n;
    }
    cr_assert_eq(b->ops->kv_pool_make(b, &w->d, n_pages, page_tokens, &k.pool), 0);
    for (int32_t i = 0; i < n_pages; i++)
        b->ops->page_poison(b, &w->d, &k.pool, i);
    int32_t *order = must(calloc(n_pages, sizeof(int32_t))), used = 0;
    shuffled(r, n_pages, order);
    k.tables = must(calloc((size_t)w->n_requests * k.max_pages, sizeof(int32_t)));
    for (int32_t i = 0; i < w->n_requests; i++)
        for (int32_t j = 0; j * page_tokens < w->len[i]; j++)
            k.tables[i * k.max_pages + j] = order[used++];
    return k;
}

static void run_ops(struct backend *b, const struct layer *w, const struct batch *batch,
                    float *p, const struct kv_pool *pool, float *o)
{
    struct op_attn_prep prep = {.b = batch,
                                .d = w->d,
                                .p = p,
                                .q_norm = w->q_norm,
                                .k_norm = w->k_norm,
                                .inv_freq = w->inv_freq,
                                .eps = 1e-6f,
                                .pool = pool};
    struct op_attn attn = {.b = batch, .d = w->d, .p = p, .pool = pool, .o = o};
    b->ops->attn_prep(b, &prep);
    poison_workspace(b);
    b->ops->attn(b, &attn);
}

/* Runs a batch; outputs go to out[request] [len, HQ * D]. */
static void run_batch(struct backend *b, const struct layer *w, const struct paged *k,
                      const struct piece *pieces, int32_t n_pieces, float **out)
{
    struct pack pk;
    pack_make(b, &pk, pieces, n_pieces, k->tables, k->max_pages);
    size_t ld = w->d.ld, width = (size_t)w->d.HQ * w->d.D;
    float *p = poisoned(((size_t)pk.h.n_tokens + 1) * ld);
    float *o = poisoned(((size_t)pk.h.n_tokens + 1) * width);
    for (int32_t i = 0; i < n_pieces; i++)
        memcpy(p + (size_t)pk.cu_seqlens[i] * ld,
               w->p[pieces[i].request] + (size_t)pieces[i].start * ld,
               (size_t)pieces[i].len * ld * sizeof(float));
    run_ops(b, w, &pk.b, p, &k->pool, o);
    for (int32_t i = 0; i < n_pieces; i++)
        memcpy(out[pieces[i].request] + (size_t)pieces[i].start * width,
               o + (size_t)pk.cu_seqlens[i] * width,
               (size_t)pieces[i].len * width * sizeof(float));
    cr_assert(isnan(o[(size_t)pk.h.n_tokens * width]), "wrote past the last row");
    free(p);
    free(o);
    pack_free(&pk);
}

/* ---- f64 ---- */

/* Norm and rotation of one head. The angle is an f32 product, as transformers has it; at
 * position 262,143 the f64 one would be another angle. */
static void ref_norm_rotate(const struct layer *w, const float *weight, int32_t pos,
                            const float *x, double *y)
{
    int32_t D = w->d.D, half = w->d.rot_dim / 2;
    double ss = 0;
    for (int32_t i = 0; i < D; i++)
        ss += (double)x[i] * x[i];
    for (int32_t i = 0; i < D; i++)
        y[i] = x[i] / sqrt(ss / D + 1e-6f) * weight[i];
    for (int32_t i = 0; i < half; i++) {
        float angle = (float)pos * w->inv_freq[i];
        double low = y[i], high = y[i + half];
        y[i] = low * cos(angle) - high * sin(angle);
        y[i + half] = high * cos(angle) + low * sin(angle);
    }
}

/* Keys of request i: [HK, len, D]. */
static double *ref_keys(const struct layer *w, int32_t i)
{
    const struct attn_dims *d = &w->d;
    int32_t len = w->len[i];
    double *k = must(calloc((size_t)d->HK * len * d->D + 1, sizeof(double)));
    for (int32_t h = 0; h < d->HK; h++)
        for (int32_t t = 0; t < len; t++)
            ref_norm_rotate(w, w->k_norm, t,
                            w->p[i] + (size_t)t * d->ld + (size_t)(2 * d->HQ + h) * d->D,
                            k + ((size_t)h * len + t) * d->D);
    return k;
}

/* Output of request i, token t, query head h. */
static void ref_head(const struct layer *w, int32_t i, int32_t t, int32_t h, const double *keys,
                     double *o)
{
    const struct attn_dims *d = &w->d;
    int32_t D = d->D, hk = h / (d->HQ / d->HK), len = w->len[i];
    const float *row = w->p[i] + (size_t)t * d->ld;
    double q[256], total = 0, most = -INFINITY,
                   *s = must(calloc((size_t)t + 1, sizeof(double)));
    ref_norm_rotate(w, w->q_norm, t, row + (size_t)h * D, q);
    for (int32_t j = 0; j <= t; j++) {
        for (int32_t c = 0; c < D; c++)
            s[j] += q[c] * keys[((size_t)hk * len + j) * D + c];
        s[j] /= sqrt(D);
        most = s[j] > most ? s[j] : most;
    }
    for (int32_t c = 0; c < D; c++)
        o[c] = 0;
    for (int32_t j = 0; j <= t; j++) {
        double weight = exp(s[j] - most);
        const float *v = w->p[i] + (size_t)j * d->ld + (size_t)(2 * d->HQ + d->HK + hk) * D;
        total += weight;
        for (int32_t c = 0; c < D; c++)
            o[c] += weight * v[c];
    }
    for (int32_t c = 0; c < D; c++)
        o[c] *= 1 / total / (1 + exp(-(double)row[(size_t)(d->HQ + h) * D + c]));
}

/* Rows first, first + step, .. of request i against f64; the largest error over the largest
 * value (values are normal: 4 or so). */
static double rows_error(const struct layer *w, int32_t i, const float *out, int32_t first,
                         int32_t step)
{
    double *keys = ref_keys(w, i), o[256], most = 0, error = 0;
    for (int32_t t = first; t < w->len[i]; t += step)
        for (int32_t h = 0; h < w->d.HQ; h++) {
            ref_head(w, i, t, h, keys, o);
            error = fmax(error,
                         max_diff(out + ((size_t)t * w->d.HQ + h) * w->d.D, o, (size_t)w->d.D));
            most = fmax(most, max_abs(o, (size_t)w->d.D));
        }
    return error / most;
}

static float **outs_make(const struct layer *w)
{
    float **out = must(calloc(SCHED_MAX_REQUESTS, sizeof(*out)));
    for (int32_t i = 0; i < w->n_requests; i++)
        out[i] = poisoned((size_t)w->len[i] * w->d.HQ * w->d.D + 1);
    return out;
}

static void check_batch(uint64_t seed, struct attn_dims d, int32_t page_tokens, int32_t n,
                        const int32_t *lens)
{
    struct rng r = {seed};
    struct layer w = layer_make(&r, d, n, lens);
    struct backend b;
    int32_t T = 0;
    struct piece pieces[SCHED_MAX_REQUESTS];
    for (int32_t i = 0; i < n; i++) {
        pieces[i] = (struct piece){i, 0, lens[i], 0};
        T += lens[i];
    }
    open_for(&b, &w, 2, T, n);
    struct paged k = pages_make(&b, &w, &r, page_tokens);
    float **out = outs_make(&w);
    run_batch(&b, &w, &k, pieces, n, out);
    for (int32_t i = 0; i < n; i++) {
        if (lens[i] == 0)
            continue;
        cr_expect_leq(rows_error(&w, i, out[i], 0, 1 + lens[i] / 40), TOLERANCE,
                      "length %d: error %.3g", lens[i],
                      rows_error(&w, i, out[i], 0, 1 + lens[i] / 40));
        /* Keys: a norm, a product and a rotation; values are copies. */
        size_t n_kv = (size_t)d.HK * lens[i] * d.D;
        float *keys = poisoned(n_kv), *values = poisoned(n_kv);
        cr_assert_eq(b.ops->kv_read(&b, &d, &k.pool, k.tables + (size_t)i * k.max_pages,
                                    lens[i], keys, values),
                     0);
        double *right = ref_keys(&w, i);
        cr_expect_leq(max_diff(keys, right, n_kv), 16 * UNIT_ROUNDOFF * max_abs(right, n_kv));
        for (int32_t h = 0; h < d.HK; h++)
            for (int32_t t = 0; t < lens[i]; t++)
                cr_expect_arr_eq(values + ((size_t)h * lens[i] + t) * d.D,
                                 w.p[i] + (size_t)t * d.ld +
                                     (size_t)(2 * d.HQ + d.HK + h) * d.D,
                                 (size_t)d.D * sizeof(float));
    }
    b.ops->kv_pool_free(&b, &k.pool);
    b.ops->close(&b);
}

Test(attn, shapes_against_f64)
{
    int32_t lens[] = {130, 20, 300}, edges[] = {1, 63, 64, 65, 127, 0, 128, 129},
            many[] = {1, 2, 3, 1, 2, 3, 1, 1};
    for (int i = 0; i < cpu_gemm_n_isas; i++) {
        if (!cpu_gemm_isas[i]->is_available())
            continue;
        kernels = cpu_gemm_isas[i]->name;
        check_batch(1, dims_of(8, 2, 256, 64), 64, 3, lens);
        check_batch(2, dims_of(4, 2, 256, 64), 128, 8, edges);
        check_batch(3, dims_of(3, 1, 128, 32), 192, 8, edges);
        check_batch(4, dims_of(2, 2, 64, 64), 64, 8, many);
        /* 16 query heads to a KV head: tiles of 16 tokens. */
        check_batch(5, dims_of(16, 1, 64, 16), 64, 3, lens);
    }
}

/* Angles of large positions are f32 products too. */
Test(attn, rotation_at_large_positions)
{
    struct rng r = {8};
    int32_t len = 1, pos = 262143;
    struct layer w = layer_make(&r, dims_of(1, 1, 256, 64), 1, &len);
    struct backend b;
    open_for(&b, &w, 1, 1, 1);
    struct kv_pool pool;
    cr_assert_eq(b.ops->kv_pool_make(&b, &w.d, 1, 64, &pool), 0);
    int32_t *table = must(calloc(4096, sizeof(int32_t)));
    struct piece piece = {0, pos, 1, 0};
    struct pack pk;
    pack_make(&b, &pk, &piece, 1, table, 4096);
    double q[256];
    ref_norm_rotate(&w, w.q_norm, pos, w.p[0], q);
    struct op_attn_prep prep = {.b = &pk.b,
                                .d = w.d,
                                .p = w.p[0],
                                .q_norm = w.q_norm,
                                .k_norm = w.k_norm,
                                .inv_freq = w.inv_freq,
                                .eps = 1e-6f,
                                .pool = &pool};
    b.ops->attn_prep(&b, &prep);
    cr_expect_leq(max_diff(w.p[0], q, 256), 16 * UNIT_ROUNDOFF * max_abs(q, 256));
    b.ops->kv_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* One head's queries are hot: only that head's outputs change. One head's gate is shut: only
 * that head's are 0. q and gate are two flat halves of the row. */
Test(attn, fault_32_one_head_hot)
{
    struct rng r = {32};
    int32_t len = 70;
    struct attn_dims d = dims_of(4, 2, 64, 16);
    struct layer w = layer_make(&r, d, 1, &len);
    struct backend b;
    open_for(&b, &w, 1, len, 1);
    struct paged k = pages_make(&b, &w, &r, 64);
    struct piece piece = {0, 0, len, 0};
    float **plain = outs_make(&w), **hot = outs_make(&w), **shut = outs_make(&w);
    run_batch(&b, &w, &k, &piece, 1, plain);
    struct rng hot_rng = {33};
    for (int32_t t = 0; t < len; t++)
        for (int32_t c = 0; c < d.D; c++)
            w.p[0][(size_t)t * d.ld + 2 * d.D + c] = 3 * rng_normal(&hot_rng);
    run_batch(&b, &w, &k, &piece, 1, hot);
    for (int32_t t = 0; t < len; t++)
        for (int32_t c = 0; c < d.D; c++)
            w.p[0][(size_t)t * d.ld + (size_t)(d.HQ + 1) * d.D + c] = -1000;
    run_batch(&b, &w, &k, &piece, 1, shut);
    for (int32_t t = 0; t < len; t++)
        for (int32_t h = 0; h < 4; h++) {
            size_t at = ((size_t)t * 4 + h) * d.D, bytes = (size_t)d.D * sizeof(float);
            bool is_same = memcmp(hot[0] + at, plain[0] + at, bytes) == 0;
            cr_expect_eq(is_same, h != 2 || t == 0, "token %d head %d", t, h);
            bool is_same_shut = memcmp(shut[0] + at, hot[0] + at, bytes) == 0;
            cr_expect_eq(is_same_shut, h != 1);
            for (int32_t c = 0; c < d.D && h == 1; c++)
                cr_expect(fabsf(shut[0][at + c]) < 1e-30f);
        }
    b.ops->kv_pool_free(&b, &k.pool);
    b.ops->close(&b);
}

/* ---- bits ---- */

static float **run_alone(const struct layer *w, int32_t page_tokens)
{
    float **out = outs_make(w);
    struct rng r = {1};
    for (int32_t i = 0; i < w->n_requests; i++) {
        struct backend b;
        open_for(&b, w, 1, w->len[i], 1);
        struct paged k = pages_make(&b, w, &r, page_tokens);
        struct piece piece = {i, 0, w->len[i], 0};
        run_batch(&b, w, &k, &piece, 1, out);
        b.ops->kv_pool_free(&b, &k.pool);
        b.ops->close(&b);
    }
    return out;
}

static int32_t count_different(const struct layer *w, float **x, float **y)
{
    int32_t n = 0;
    for (int32_t i = 0; i < w->n_requests; i++)
        n += memcmp(x[i], y[i], (size_t)w->len[i] * w->d.HQ * w->d.D * sizeof(float)) != 0;
    return n;
}

static int32_t run_schedule(struct rng *r, const struct layer *w, float **alone,
                            int32_t n_threads, int32_t page_tokens)
{
    struct backend b;
    open_for(&b, w, n_threads, 4096, w->n_requests);
    struct paged k = pages_make(&b, w, r, page_tokens);
    struct sched_run s = {.n_requests = w->n_requests};
    memcpy(s.len, w->len, sizeof s.len);
    float **out = outs_make(w);
    struct piece pieces[SCHED_MAX_REQUESTS];
    int32_t n_pieces;
    while ((n_pieces = sched_next(&s, r, pieces)) > 0)
        run_batch(&b, w, &k, pieces, n_pieces, out);
    int32_t n_bad = count_different(w, out, alone);
    for (int32_t i = 0; i < w->n_requests; i++)
        free(out[i]);
    b.ops->kv_pool_free(&b, &k.pool);
    b.ops->close(&b);
    return n_bad;
}

Test(attn, fault_31_random_schedules)
{
    const uint64_t seed = 31;
    struct rng r = {seed};
    int32_t n_compared = 0, ratios[] = {1, 4, 3, 16};
    for (int round = 0; round < 4; round++) {
        const struct cpu_gemm_isa *isa = cpu_gemm_isas[round % cpu_gemm_n_isas];
        kernels = isa->is_available() ? isa->name : NULL;
        int32_t lens[5], n = 1 + rng_int(&r, 5);
        for (int32_t i = 0; i < n; i++)
            lens[i] = 1 + rng_int(&r, i % 2 ? 70 : 400);
        struct layer w =
            layer_make(&r, dims_of(2 * ratios[round], 2, round % 2 ? 64 : 128, 32), n, lens);
        float **alone = run_alone(&w, 64);
        for (int i = 0; i < 8; i++) {
            n_compared += n;
            cr_expect_eq(run_schedule(&r, &w, alone, 1 + i % 3, 64 * (1 + i % 4)), 0,
                         "seed %d round %d run %d", (int)seed, round, i);
        }
    }
    cr_log_info("seed %d: %d requests compared", (int)seed, n_compared);
}

/* Cut anywhere, one token at a time included. Only the batching of rows differs from the whole:
 * a row's own sums are taken at absolute positions, so here too the bits are the same. */
Test(attn, fault_15_17_cut_anywhere)
{
    struct rng r = {15};
    int32_t len = 150;
    struct layer w = layer_make(&r, dims_of(4, 2, 64, 16), 1, &len);
    float **alone = run_alone(&w, 64);
    struct backend b;
    open_for(&b, &w, 2, len, 1);
    struct paged k = pages_make(&b, &w, &r, 128);
    float **out = outs_make(&w);
    for (int32_t cut = 1; cut <= 130; cut++) {
        struct piece head = {0, 0, cut, 0}, tail = {0, cut, len - cut, 0};
        run_batch(&b, &w, &k, &head, 1, out);
        run_batch(&b, &w, &k, &tail, 1, out);
        cr_expect_eq(count_different(&w, out, alone), 0, "cut %d", cut);
    }
    for (int32_t t = 0; t < len; t++) {
        struct piece one = {0, t, 1, 0};
        run_batch(&b, &w, &k, &one, 1, out);
    }
    cr_expect_eq(count_different(&w, out, alone), 0, "token by token");
    b.ops->kv_pool_free(&b, &k.pool);
    b.ops->close(&b);
}

/* Positions past a token's own hold NaN, in its page and in later ones: 0 x NaN must not get
 * into its sums. Rows before the poisoned position keep their bits. */
Test(attn, fault_26_nothing_read_past_the_own_position)
{
    struct rng r = {26};
    int32_t len = 200, lasts[] = {0, 1, 15, 16, 62, 63, 64, 127, 130, 198};
    struct attn_dims d = dims_of(4, 2, 64, 16);
    struct layer w = layer_make(&r, d, 1, &len);
    struct backend b;
    open_for(&b, &w, 2, len, 1);
    struct paged k = pages_make(&b, &w, &r, 64);
    size_t n_kv = (size_t)d.HK * len * d.D, width = (size_t)d.HQ * d.D;
    float *keys = poisoned(n_kv), *values = poisoned(n_kv), **alone = outs_make(&w);
    float *p = poisoned((size_t)len * d.ld), *o = poisoned((size_t)len * width);
    memcpy(p, w.p[0], (size_t)len * d.ld * sizeof(float));
    struct piece piece = {0, 0, len, 0};
    struct pack pk;
    pack_make(&b, &pk, &piece, 1, k.tables, k.max_pages);
    run_ops(&b, &w, &pk.b, p, &k.pool, alone[0]);
    for (size_t i = 0; i < sizeof lasts / sizeof *lasts; i++) {
        b.ops->kv_read(&b, &d, &k.pool, k.tables, len, keys, values);
        for (int32_t h = 0; h < d.HK; h++)
            for (int32_t t = lasts[i] + 1; t < len; t++)
                for (int32_t c = 0; c < d.D; c++) {
                    keys[((size_t)h * len + t) * d.D + c] = NAN;
                    values[((size_t)h * len + t) * d.D + c] = NAN;
                }
        float *keys_before = poisoned(n_kv), *values_before = poisoned(n_kv);
        b.ops->kv_read(&b, &d, &k.pool, k.tables, len, keys_before, values_before);
        b.ops->kv_write(&b, &d, &k.pool, k.tables, len, keys, values);
        struct op_attn attn = {.b = &pk.b, .d = d, .p = p, .pool = &k.pool, .o = o};
        poison_workspace(&b);
        b.ops->attn(&b, &attn);
        size_t rows = (size_t)lasts[i] + 1;
        cr_expect_arr_eq(o, alone[0], rows * width * sizeof(float), "NaN after %d", lasts[i]);
        cr_expect(isnan(o[rows * width]), "a NaN key must show");
        b.ops->kv_write(&b, &d, &k.pool, k.tables, len, keys_before, values_before);
    }
    b.ops->kv_pool_free(&b, &k.pool);
    b.ops->close(&b);
}

/* Pages of 2 x 64 x 256 elements: page 70,000 lies past 2^31. Rows of 2^14 and more columns:
 * row 140,000 does too. */
Test(attn, fault_27_offsets_past_31_bits)
{
    struct rng r = {27};
    int32_t len = 70, first = 140000, n_pages = 70002;
    struct attn_dims d = dims_of(32, 2, 256, 64);
    struct layer w = layer_make(&r, d, 1, &len);
    float **alone = run_alone(&w, 64);
    struct backend b;
    open_for(&b, &w, 2, len, 1);
    size_t n_kv = (size_t)n_pages * 2 * 64 * 256, n = (size_t)first + len;
    struct kv_pool pool = {n_pages, 64, reserve(n_kv), reserve(n_kv)};
    float *p = reserve(n * d.ld), *o = reserve(n * 32 * 256);
    int32_t table[] = {n_pages - 1, n_pages - 2};
    struct piece piece = {0, 0, len, 0};
    struct pack pk;
    pack_make(&b, &pk, &piece, 1, table, 2);
    pk.cu_seqlens[0] = first;
    pk.cu_seqlens[1] = first + len;
    pk.b.positions = pk.positions - first;
    b.ops->chunk_map(&b, &pk.b);
    memcpy(p + (size_t)first * d.ld, w.p[0], (size_t)len * d.ld * sizeof(float));
    run_ops(&b, &w, &pk.b, p, &pool, o);
    cr_expect_arr_eq(o + (size_t)first * 32 * 256, alone[0],
                     (size_t)len * 32 * 256 * sizeof(float));
    b.ops->close(&b);
}
