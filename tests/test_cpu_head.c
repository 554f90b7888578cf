/* The head, and the row-wise operations, on the CPU: against f64 and bit by bit. */
#include <criterion/criterion.h>

#include "cpu_ops.h"

struct head {
    int32_t M, vocab;
    float *w, *norm; /* [vocab, M], [M] */
    struct weight weight;
};

/* Rows of weights may be changed before this is called. */
static void head_open(struct backend *b, struct head *h, int32_t n_threads, int32_t max_rows)
{
    struct backend_limits l = {.max_tokens = max_rows,
                               .max_seqs = 1,
                               .max_rows = max_rows,
                               .M = h->M,
                               .vocab = h->vocab};
    open_cpu(b, n_threads, &l);
    struct weight_part part = {h->w, DTYPE_F32, h->vocab};
    struct errmsg e;
    cr_assert_eq(
        b->ops->weight_make(b, &part, 1, 1, h->vocab, h->M, WEIGHT_MATMUL, &h->weight, &e), 0);
}

static struct head head_make(struct rng *r, int32_t vocab)
{
    struct head h = {.M = 32, .vocab = vocab};
    h.w = normals(r, (size_t)vocab * h.M, 0.5);
    h.norm = normals(r, h.M, 1);
    return h;
}

static void head_close(struct backend *b, struct head *h)
{
    b->ops->weight_free(b, &h->weight);
    b->ops->close(b);
}

/* n rows of x: row_ids, targets and tops may be NULL: 0..n-1, none, 5. */
static struct row_result *run_head(struct backend *b, const struct head *h, int32_t n,
                                   const float *x, const int32_t *row_ids,
                                   const int32_t *targets, const int32_t *tops)
{
    int32_t *rows = must(calloc((size_t)n + 1, 4)), *wanted = must(calloc((size_t)n + 1, 4)),
            *top = must(calloc((size_t)n + 1, 4));
    for (int32_t i = 0; i < n; i++) {
        rows[i] = row_ids ? row_ids[i] : i;
        wanted[i] = targets ? targets[i] : -1;
        top[i] = tops ? tops[i] : 5;
    }
    struct batch batch = {.n_rows = n, .rows = rows, .targets = wanted, .row_top = top};
    struct row_result *out = must(malloc(((size_t)n + 1) * sizeof(*out)));
    memset(out, 0xff, ((size_t)n + 1) * sizeof(*out));
    struct op_head a = {.b = &batch,
                        .x = x,
                        .norm_w = h->norm,
                        .eps = 1e-6f,
                        .M = h->M,
                        .w = &h->weight,
                        .out = out};
    poison_workspace(b);
    b->ops->head(b, &a);
    return out;
}

/* Logits of a row of x in f64. */
static void ref_logits(const struct head *h, const float *x, double *logits)
{
    double ss = 0;
    for (int32_t i = 0; i < h->M; i++)
        ss += (double)x[i] * x[i];
    double scale = 1 / sqrt(ss / h->M + 1e-6);
    for (int32_t v = 0; v < h->vocab; v++) {
        logits[v] = 0;
        for (int32_t i = 0; i < h->M; i++)
            logits[v] += x[i] * scale * h->norm[i] * h->w[(size_t)v * h->M + i];
    }
}

static double ref_lse(const double *logits, int32_t n)
{
    double most = logits[0], sum = 0;
    for (int32_t v = 1; v < n; v++)
        most = fmax(most, logits[v]);
    for (int32_t v = 0; v < n; v++)
        sum += exp(logits[v] - most);
    return most + log(sum);
}

/* A logit is a sum of 32 products with partial sums of some 10 units, of factors with 8
 * roundings; exponentials of differences add 2 ulp: 64 u of 16. */
#define TOLERANCE (1024 * UNIT_ROUNDOFF)

Test(head, rows_against_f64)
{
    struct rng r = {1};
    int32_t vocabs[] = {5, 312, 1000, 4099}, n = 70;
    for (size_t k = 0; k < 4; k++) {
        struct head h = head_make(&r, vocabs[k]);
        struct backend b;
        head_open(&b, &h, 2, n);
        float *x = normals(&r, (size_t)n * h.M, 3);
        int32_t targets[70], tops[70];
        for (int32_t i = 0; i < n; i++) {
            targets[i] = rng_int(&r, h.vocab + 1) - 1;
            tops[i] = rng_int(&r, TOP_MAX + 1);
        }
        struct row_result *out = run_head(&b, &h, n, x, NULL, targets, tops);
        double *logits = must(calloc(h.vocab, sizeof(double)));
        for (int32_t i = 0; i < n; i++) {
            ref_logits(&h, x + (size_t)i * h.M, logits);
            double lse = ref_lse(logits, h.vocab);
            const struct row_result *o = &out[i];
            cr_expect_eq(o->n_bad, 0);
            cr_expect_leq(fabs(o->lse - lse), TOLERANCE);
            double right = targets[i] < 0 ? 0 : logits[targets[i]] - lse;
            cr_expect_leq(fabs(o->target_logprob - right), TOLERANCE);
            int32_t n_top = tops[i] < h.vocab ? tops[i] : h.vocab;
            for (int32_t j = 0; j < TOP_MAX; j++) {
                cr_expect_eq(o->top_id[j] >= 0, j < n_top);
                if (j >= n_top)
                    continue;
                double p = logits[o->top_id[j]] - lse;
                int32_t n_better = 0;
                for (int32_t v = 0; v < h.vocab; v++)
                    n_better += logits[v] - lse > p + 2 * TOLERANCE;
                cr_expect_leq(n_better, j);
                cr_expect_leq(fabs(o->top_logprob[j] - p), TOLERANCE);
                cr_expect(j == 0 || o->top_logprob[j] <= o->top_logprob[j - 1]);
            }
        }
        cr_expect_eq(out[n].n_bad, -1, "wrote past the last row");
        head_close(&b, &h);
    }
}

/* Equal rows of weights make equal logits: the lower id comes first, also across the spans that
 * the scan skips. */
Test(head, ties_go_to_lower_ids)
{
    struct rng r = {2};
    struct head h = head_make(&r, 2000);
    int32_t same[] = {3, 255, 256, 700, 701, 1999};
    for (int i = 0; i < 6; i++)
        for (int32_t c = 0; c < h.M; c++)
            h.w[(size_t)same[i] * h.M + c] = 10 * h.norm[c];
    for (int32_t c = 0; c < h.M; c++)
        h.norm[c] = 1;
    struct backend b;
    head_open(&b, &h, 1, 1);
    float *x = poisoned(h.M);
    memcpy(x, h.w + 3 * h.M, (size_t)h.M * sizeof(float));
    int32_t top = 6;
    struct row_result *out = run_head(&b, &h, 1, x, NULL, NULL, &top);
    cr_expect_arr_eq(out->top_id, same, sizeof same);
    for (int i = 1; i < 6; i++)
        cr_expect_eq(out->top_logprob[i], out->top_logprob[0]);
    top = 4;
    out = run_head(&b, &h, 1, x, NULL, NULL, &top);
    cr_expect_arr_eq(out->top_id, same, 4 * sizeof *same);
    cr_expect_eq(out->top_id[4], -1);
    head_close(&b, &h);
}

/* Candidates are in the order of what is reported: by (logprob, id), for nearly equal logits
 * whose logprobs round to the same number too. */
Test(head, order_is_that_of_the_reported_logprobs)
{
    struct rng r = {3};
    struct head h = head_make(&r, 600);
    for (int32_t v = 0; v < 600; v++)
        for (int32_t c = 0; c < h.M; c++)
            h.w[(size_t)v * h.M + c] = 1 + (float)(1e-6 * rng_unit(&r));
    struct backend b;
    head_open(&b, &h, 1, 20);
    float *x = normals(&r, (size_t)20 * h.M, 1);
    int32_t tops[20], n_equal = 0;
    for (int i = 0; i < 20; i++)
        tops[i] = TOP_MAX;
    struct row_result *out = run_head(&b, &h, 20, x, NULL, NULL, tops);
    for (int i = 0; i < 20; i++)
        for (int j = 1; j < TOP_MAX; j++) {
            float p = out[i].top_logprob[j], before = out[i].top_logprob[j - 1];
            cr_expect(p < before || (p == before && out[i].top_id[j] > out[i].top_id[j - 1]));
            n_equal += p == before;
        }
    cr_expect_gt(n_equal, 20, "the case should make ties");
    head_close(&b, &h);
}

/* NaN and infinities are counted wherever they stand, and reach the results. */
Test(head, bad_logits_are_counted)
{
    struct rng r = {5};
    struct head h = head_make(&r, 1003);
    int32_t bad[] = {0, 17, 512, 1002};
    float kinds[] = {NAN, INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 4; i++)
        for (int32_t c = 0; c < h.M; c++)
            h.w[(size_t)bad[i] * h.M + c] = c == 0 ? kinds[i] : 0;
    struct backend b;
    head_open(&b, &h, 1, 3);
    float *x = normals(&r, (size_t)3 * h.M, 1);
    for (int32_t c = 0; c < h.M; c++)
        x[2 * h.M + c] = NAN;
    struct row_result *out = run_head(&b, &h, 3, x, NULL, NULL, NULL);
    cr_expect_eq(out[0].n_bad, 4);
    cr_expect_eq(out[1].n_bad, 4);
    cr_expect_eq(out[2].n_bad, 1003);
    for (int i = 0; i < 3; i++)
        cr_expect(!isfinite(out[i].lse));
    head_close(&b, &h);
}

/* A row's results are the same bits alone, at any place of any list, in any number of blocks,
 * asked for twice, on any number of threads. */
Test(head, fault_31_rows_in_any_list)
{
    const uint64_t seed = 31;
    struct rng r = {seed};
    struct head h = head_make(&r, 777);
    int32_t T = 300;
    float *x = normals(&r, (size_t)T * h.M, 2);
    struct row_result alone[300];
    int32_t target = 7, top = TOP_MAX;
    struct backend b;
    head_open(&b, &h, 1, 1);
    for (int32_t t = 0; t < T; t++)
        alone[t] = *run_head(&b, &h, 1, x, &t, &target, &top);
    head_close(&b, &h);
    for (int32_t n_threads = 1; n_threads <= 3; n_threads++) {
        head_open(&b, &h, n_threads, 500);
        for (int k = 0; k < 6; k++) {
            int32_t n = 1 + rng_int(&r, 500), rows[500], targets[500], tops[500];
            for (int32_t i = 0; i < n; i++) {
                rows[i] = rng_int(&r, T);
                targets[i] = target;
                tops[i] = top;
            }
            struct row_result *out = run_head(&b, &h, n, x, rows, targets, tops);
            for (int32_t i = 0; i < n; i++)
                cr_expect_arr_eq(&out[i], &alone[rows[i]], sizeof *out);
        }
        head_close(&b, &h);
    }
}

/* ---- row-wise operations ---- */

static void open_plain(struct backend *b, int32_t n_threads)
{
    struct backend_limits l = {.max_tokens = 1, .max_seqs = 1, .max_rows = 1};
    open_cpu(b, n_threads, &l);
}

Test(rows, rmsnorm_against_f64)
{
    struct rng r = {6};
    struct backend b;
    open_plain(&b, 2);
    int32_t dims[] = {1, 15, 64, 100, 1024}, counts[] = {1, 16, 17, 70};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 8; j++) {
            int32_t D = dims[i], n = counts[j % 4];
            size_t size = (size_t)n * D;
            float *x = normals(&r, size, 3), *y = normals(&r, size, 1), *w = normals(&r, D, 1);
            float *sum = poisoned(size), *h = poisoned(size + 1);
            memcpy(sum, x, size * sizeof(float));
            struct op_rmsnorm a = {n, D, 1e-6f, sum, j < 4 ? y : NULL, w, h};
            b.ops->rmsnorm(&b, &a);
            for (int32_t row = 0; row < n; row++) {
                double ss = 0;
                for (int32_t c = 0; c < D; c++) {
                    size_t at = (size_t)row * D + c;
                    cr_assert_eq(sum[at], j < 4 ? x[at] + y[at] : x[at]);
                    ss += (double)sum[at] * sum[at];
                }
                for (int32_t c = 0; c < D; c++) {
                    size_t at = (size_t)row * D + c;
                    double right = sum[at] / sqrt(ss / D + 1e-6) * w[c];
                    /* Sums of squares do not cancel: D / 64 terms a lane, halved by the root,
                     * and 5 more roundings. */
                    cr_expect_leq(fabs(h[at] - right), 16 * UNIT_ROUNDOFF * fabs(right));
                }
            }
            cr_expect(isnan(h[size]));
            a.h = NULL;
            a.w = NULL;
            b.ops->rmsnorm(&b, &a);
        }
    b.ops->close(&b);
}

Test(rows, swiglu_against_f64)
{
    struct rng r = {7};
    struct backend b;
    open_plain(&b, 2);
    int32_t dims[] = {1, 17, 64, 3584};
    for (int i = 0; i < 4; i++) {
        int32_t F = dims[i], n = 35;
        float *gu = normals(&r, (size_t)n * 2 * F, 4), *c = poisoned((size_t)n * F + 1);
        struct op_swiglu a = {n, F, gu, c};
        b.ops->swiglu(&b, &a);
        for (int32_t row = 0; row < n; row++)
            for (int32_t f = 0; f < F; f++) {
                double g = gu[(size_t)row * 2 * F + f];
                double right = g / (1 + exp(-g)) * gu[(size_t)row * 2 * F + F + f];
                cr_expect_leq(fabs(c[(size_t)row * F + f] - right),
                              8 * UNIT_ROUNDOFF * fabs(right));
            }
        cr_expect(isnan(c[(size_t)n * F]));
    }
    b.ops->close(&b);
}

/* f32 to the nearest bf16 and f16; only values that are exact in them are used. */
static uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}

Test(rows, embed_every_dtype_copied_and_borrowed)
{
    struct rng r = {8};
    struct backend b;
    open_plain(&b, 2);
    enum { VOCAB = 50, M = 37, T = 40 };
    static float values[VOCAB * M];
    static uint16_t bf16[VOCAB * M + 1], f16[VOCAB * M];
    for (int i = 0; i < VOCAB * M; i++) {
        int32_t n = rng_int(&r, 255) - 127; /* 7 bits: exact in all three */
        values[i] = (float)n / 64;
        /* At an odd address, as a mapped file may have it. */
        uint16_t half = bf16_of(values[i]);
        memcpy((char *)bf16 + 1 + 2 * i, &half, 2);
        int32_t exponent;
        float m = frexpf(fabsf(values[i]), &exponent);
        f16[i] =
            n == 0
                ? 0
                : (uint16_t)((n < 0) << 15 | (exponent + 14) << 10 | ((int)(m * 2048) & 1023));
    }
    int32_t tokens[T];
    for (int i = 0; i < T; i++)
        tokens[i] = rng_int(&r, VOCAB);
    struct batch batch = {.n_tokens = T, .tokens = tokens};
    struct weight_part parts[] = {{values, DTYPE_F32, VOCAB},
                                  {(char *)bf16 + 1, DTYPE_BF16, VOCAB},
                                  {f16, DTYPE_F16, VOCAB}};
    for (int i = 0; i < 6; i++) {
        struct weight w;
        struct errmsg e;
        unsigned use = WEIGHT_EMBED | (i < 3 ? 0 : WEIGHT_BORROW);
        cr_assert_eq(b.ops->weight_make(&b, &parts[i % 3], 1, 1, VOCAB, M, use, &w, &e), 0);
        cr_expect_eq(w.bytes, b.ops->weight_bytes(&b, 1, VOCAB, M, parts[i % 3].dtype, use));
        cr_expect_eq(w.embed == parts[i % 3].rows, i >= 3);
        float *x = poisoned(T * M + 1);
        struct op_embed a = {&batch, &w, x};
        b.ops->embed(&b, &a);
        for (int t = 0; t < T; t++)
            cr_expect_arr_eq(x + t * M, values + tokens[t] * M, M * sizeof(float), "case %d",
                             i);
        cr_expect(isnan(x[T * M]));
        b.ops->weight_free(&b, &w);
    }
    b.ops->close(&b);
}
