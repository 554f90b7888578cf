/* The mixture of experts on the CPU: routing and experts against f64 and bit by bit. */
#include <criterion/criterion.h>

#include "cpu_ops.h"

enum { MAX_E = 16 };

struct moe {
    int32_t M, F, E, top_k;
    float *router, *gate_up, *down, *shared_gate; /* f32, as given to weight_make */
    struct weight w_router, w_gate_up, w_down;
};

static struct weight weight_of(struct backend *b, const float *rows, int32_t n_mats, int32_t n,
                               int32_t cols)
{
    struct weight_part part = {rows, DTYPE_F32, (int64_t)n_mats * n};
    struct weight w;
    struct errmsg e;
    cr_assert_eq(b->ops->weight_make(b, &part, 1, n_mats, n, cols, WEIGHT_MATMUL, &w, &e), 0);
    return w;
}

static struct moe moe_make_sized(struct backend *b, struct rng *r, int32_t n_threads,
                                 int32_t max_tokens, struct moe m)
{
    struct backend_limits l = {.max_tokens = max_tokens,
                               .max_seqs = 1,
                               .max_rows = 1,
                               .M = m.M,
                               .moe_F = m.F,
                               .E = m.E,
                               .top_k = m.top_k};
    open_cpu(b, n_threads, &l);
    m.router = normals(r, (size_t)m.E * m.M, 0.3);
    m.gate_up = normals(r, (size_t)m.E * 2 * m.F * m.M, 0.2);
    m.down = normals(r, (size_t)m.E * m.M * m.F, 0.2);
    m.shared_gate = normals(r, m.M, 0.3);
    m.w_router = weight_of(b, m.router, 1, m.E, m.M);
    m.w_gate_up = weight_of(b, m.gate_up, m.E, 2 * m.F, m.M);
    m.w_down = weight_of(b, m.down, m.E, m.M, m.F);
    return m;
}

static struct moe moe_make(struct backend *b, struct rng *r, int32_t n_threads,
                           int32_t max_tokens)
{
    struct moe m = {.M = 48, .F = 24, .E = MAX_E, .top_k = 4};
    return moe_make_sized(b, r, n_threads, max_tokens, m);
}

static void moe_close(struct backend *b, struct moe *m)
{
    b->ops->weight_free(b, &m->w_router);
    b->ops->weight_free(b, &m->w_gate_up);
    b->ops->weight_free(b, &m->w_down);
    b->ops->close(b);
}

/* What the two operations give for n rows. */
struct moe_out {
    int32_t *ids;
    float *weights, *y;
};

static struct moe_out run_moe(struct backend *b, const struct moe *m, int32_t n, const float *h,
                              const float *shared, bool renorm)
{
    size_t k = (size_t)n * m->top_k;
    struct moe_out out = {must(calloc(k + 1, sizeof(int32_t))), poisoned(k),
                          poisoned((size_t)n * m->M)};
    struct op_moe_route route = {.n_rows = n,
                                 .top_k = m->top_k,
                                 .renorm = renorm,
                                 .router = &m->w_router,
                                 .h = h,
                                 .ids = out.ids,
                                 .weights = out.weights};
    struct op_moe_experts experts = {.n_rows = n,
                                     .top_k = m->top_k,
                                     .gate_up = &m->w_gate_up,
                                     .down = &m->w_down,
                                     .h = h,
                                     .ids = out.ids,
                                     .weights = out.weights,
                                     .shared = shared,
                                     .shared_gate = m->shared_gate,
                                     .y = out.y};
    poison_workspace(b);
    b->ops->moe_route(b, &route);
    poison_workspace(b);
    b->ops->moe_experts(b, &experts);
    return out;
}

static double dot(const float *x, const float *y, int32_t n)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += (double)x[i] * y[i];
    return sum;
}

/* One expert's output for one row, in f64. */
static void ref_expert(const struct moe *m, int32_t e, const float *h, double *y)
{
    double hidden[64];
    const float *gate_up = m->gate_up + (size_t)e * 2 * m->F * m->M;
    const float *down = m->down + (size_t)e * m->M * m->F;
    for (int32_t f = 0; f < m->F; f++) {
        double gate = dot(gate_up + (size_t)f * m->M, h, m->M);
        hidden[f] = gate / (1 + exp(-gate)) * dot(gate_up + (size_t)(m->F + f) * m->M, h, m->M);
    }
    for (int32_t i = 0; i < m->M; i++) {
        y[i] = 0;
        for (int32_t f = 0; f < m->F; f++)
            y[i] += down[(size_t)i * m->F + f] * hidden[f];
    }
}

/* Softmax over all experts of one row, in f64; ids in order of probability. */
static void ref_route(const struct moe *m, const float *h, double *p, int32_t *ids)
{
    double sum = 0;
    for (int32_t e = 0; e < m->E; e++)
        sum += p[e] = exp(dot(m->router + (size_t)e * m->M, h, m->M));
    for (int32_t e = 0; e < m->E; e++) {
        p[e] /= sum;
        int32_t at = e;
        for (; at > 0 && p[e] > p[ids[at - 1]]; at--)
            ids[at] = ids[at - 1];
        ids[at] = e;
    }
}

/* Sums of 48 and 24 products of size 1, two in a row, and 5 terms: about (48 + 24 + 16) u of
 * partial sums of a few units. */
#define TOLERANCE (256 * UNIT_ROUNDOFF)

static void check_rows(int32_t n, bool renorm, bool has_shared)
{
    struct rng r = {(uint64_t)n};
    struct backend b;
    struct moe m = moe_make(&b, &r, 2, n);
    float *h = normals(&r, (size_t)n * m.M, 1);
    float *shared = has_shared ? normals(&r, (size_t)n * m.M, 1) : NULL;
    struct moe_out out = run_moe(&b, &m, n, h, shared, renorm);
    for (int32_t i = 0; i < n; i++) {
        double p[MAX_E], y[64] = {0}, part[64], total = 0;
        int32_t ids[MAX_E];
        const float *row = h + (size_t)i * m.M;
        ref_route(&m, row, p, ids);
        for (int32_t j = 0; j < m.top_k; j++)
            total += p[ids[j]];
        for (int32_t j = 0; j < m.top_k; j++) {
            size_t at = (size_t)i * m.top_k + j;
            double weight = renorm ? p[ids[j]] / total : p[ids[j]];
            cr_expect_eq(out.ids[at], ids[j], "row %d place %d", i, j);
            cr_expect_leq(fabs(out.weights[at] - weight), TOLERANCE * weight);
            ref_expert(&m, ids[j], row, part);
            for (int32_t c = 0; c < m.M; c++)
                y[c] += weight * part[c];
        }
        double gate = 1 / (1 + exp(-dot(m.shared_gate, row, m.M)));
        for (int32_t c = 0; c < m.M && has_shared; c++)
            y[c] += gate * shared[(size_t)i * m.M + c];
        cr_expect_leq(max_diff(out.y + (size_t)i * m.M, y, (size_t)m.M),
                      TOLERANCE * fmax(1, max_abs(y, (size_t)m.M)));
    }
    moe_close(&b, &m);
}

Test(moe, rows_against_f64)
{
    int32_t counts[] = {1, 2, 63, 64, 65, 130};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        check_rows(counts[i], i % 2 == 0, i % 3 != 2);
}

/* A row's bits do not depend on the others, their number or the threads. */
Test(moe, fault_31_rows_alone_and_together)
{
    const uint64_t seed = 31;
    struct rng r = {seed};
    struct backend b1, b3;
    struct moe one = moe_make(&b1, &r, 1, 700);
    r.s = seed;
    struct moe many = moe_make(&b3, &r, 3, 700);
    float *h = normals(&r, (size_t)700 * one.M, 1), *shared = normals(&r, (size_t)700 * 48, 1);
    struct moe_out all = run_moe(&b3, &many, 700, h, shared, true);
    for (int32_t i = 0; i < 700; i += 1 + rng_int(&r, 40)) {
        int32_t n = 1 + rng_int(&r, 700 - i < 70 ? 700 - i : 70);
        struct moe_out some =
            run_moe(&b1, &one, n, h + (size_t)i * 48, shared + (size_t)i * 48, true);
        size_t at = (size_t)i * one.top_k, k = (size_t)n * one.top_k;
        cr_expect_arr_eq(some.ids, all.ids + at, k * sizeof(int32_t));
        cr_expect_arr_eq(some.weights, all.weights + at, k * sizeof(float));
        cr_expect_arr_eq(some.y, all.y + (size_t)i * 48, (size_t)n * 48 * sizeof(float));
    }
    moe_close(&b1, &one);
    moe_close(&b3, &many);
}

/* Equal probabilities go to lower ids, in order. */
Test(moe, ties_go_to_lower_ids)
{
    struct rng r = {4};
    struct backend b;
    struct moe m = moe_make(&b, &r, 1, 1);
    float *h = normals(&r, m.M, 1);
    b.ops->weight_free(&b, &m.w_router);
    for (int32_t e = 0; e < m.E; e++)
        for (int32_t c = 0; c < m.M; c++)
            m.router[(size_t)e * m.M + c] = e == 9 ? h[c] : 0;
    m.w_router = weight_of(&b, m.router, 1, m.E, m.M);
    struct moe_out out = run_moe(&b, &m, 1, h, NULL, true);
    int32_t right[] = {9, 0, 1, 2};
    cr_expect_arr_eq(out.ids, right, sizeof right);
    moe_close(&b, &m);
}

/* A row of NaN gets ids that can be used, and an answer that shows it; its neighbours keep
 * their bits. */
Test(moe, fault_16_a_row_of_nan_stays_alone)
{
    struct rng r = {16};
    struct backend b;
    struct moe m = moe_make(&b, &r, 2, 3);
    float *h = normals(&r, (size_t)3 * m.M, 1);
    struct moe_out clean = run_moe(&b, &m, 3, h, NULL, true);
    for (int32_t c = 0; c < m.M; c++)
        h[m.M + c] = NAN;
    struct moe_out out = run_moe(&b, &m, 3, h, NULL, true);
    for (int32_t j = 0; j < m.top_k; j++)
        cr_expect(out.ids[m.top_k + j] >= 0 && out.ids[m.top_k + j] < m.E);
    for (int32_t c = 0; c < m.M; c++)
        cr_expect(isnan(out.y[m.M + c]));
    cr_expect_arr_eq(out.y, clean.y, (size_t)m.M * sizeof(float));
    cr_expect_arr_eq(out.y + 2 * m.M, clean.y + 2 * m.M, (size_t)m.M * sizeof(float));
    moe_close(&b, &m);
}

/* 8 x (2 x 2 + 4096) floats a row: a block of 256 MiB ends after row 2045. */
Test(moe, more_rows_than_a_block)
{
    struct rng r = {2046};
    struct backend b;
    struct moe m = {.M = 4096, .F = 2, .E = 8, .top_k = 8};
    m = moe_make_sized(&b, &r, 2, 2100, m);
    int32_t n = 2100, first = 2035, n_some = 30;
    float *h = normals(&r, (size_t)n * m.M, 0.1);
    struct moe_out all = run_moe(&b, &m, n, h, NULL, true);
    struct moe_out some = run_moe(&b, &m, n_some, h + (size_t)first * m.M, NULL, true);
    cr_expect_arr_eq(some.y, all.y + (size_t)first * m.M, (size_t)n_some * m.M * sizeof(float));
    moe_close(&b, &m);
}
