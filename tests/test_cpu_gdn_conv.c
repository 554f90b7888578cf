/* Convolution, normalisation and gates on the CPU, against f64. */
#include <criterion/criterion.h>

#include "gdn_ref.h"

/* A sum of 4 products, then SiLU, a norm over 128 and a scale: some 4 + 2 (exp) + 3 + 7 (sum of
 * squares, halved by the root) + 4 roundings of values of size 1, few of them in the same
 * direction. */
#define TOLERANCE (16 * UNIT_ROUNDOFF)

/* What one layer's weights are. */
struct conv_weights {
    struct gdn_dims d;
    float *conv_w, *A_log, *dt_bias;
};

static struct conv_weights weights_make(struct rng *r, struct gdn_dims d)
{
    struct conv_weights w = {d, normals(r, (size_t)d.conv_dim * 4, 0.5), normals(r, d.HV, 1),
                             normals(r, d.HV, 1)};
    return w;
}

/* Outputs of the operation for T rows, with guard rows. */
struct conv_out {
    float *q, *k, *v, *g, *beta;
};

static struct conv_out out_make(const struct gdn_dims *d, int32_t T)
{
    size_t n = (size_t)T + GUARD_ROWS;
    return (struct conv_out){poisoned(n * d->H * d->K), poisoned(n * d->H * d->K),
                             poisoned(n * d->HV * d->V), poisoned(n * d->HV),
                             poisoned(n * d->HV)};
}

static void run_conv(struct backend *b, const struct conv_weights *w, const struct batch *batch,
                     const float *p, const struct state_pool *pool, const struct conv_out *out)
{
    poison_workspace(b);
    struct op_gdn_conv a = {.b = batch,
                            .d = w->d,
                            .p = p,
                            .conv_w = w->conv_w,
                            .A_log = w->A_log,
                            .dt_bias = w->dt_bias,
                            .pool = pool,
                            .q = out->q,
                            .k = out->k,
                            .v = out->v,
                            .g = out->g,
                            .beta = out->beta};
    b->ops->gdn_conv(b, &a);
}

static double silu(double x)
{
    return x / (1 + exp(-x));
}

/* Row t of a sequence's projection p, in f64; window [3, conv_dim] stands before row 0. */
static void ref_row(const struct conv_weights *w, const float *p, const double *window,
                    int32_t t, double *qkv, double *g, double *beta)
{
    const struct gdn_dims *d = &w->d;
    for (int32_t c = 0; c < d->conv_dim; c++) {
        double sum = 0;
        for (int32_t j = 0; j < 4; j++) {
            int32_t i = t - 3 + j;
            double x =
                i >= 0 ? p[(size_t)i * d->ld + c] : window[(size_t)(3 + i) * d->conv_dim + c];
            sum += w->conv_w[(size_t)c * 4 + j] * x;
        }
        qkv[c] = silu(sum);
    }
    for (int32_t h = 0; h < 2 * d->H; h++) {
        double ss = 1e-6, *x = qkv + (size_t)h * d->K;
        for (int32_t i = 0; i < d->K; i++)
            ss += x[i] * x[i];
        for (int32_t i = 0; i < d->K; i++)
            x[i] *= (h < d->H ? 1 / sqrt(d->K) : 1) / sqrt(ss);
    }
    const float *b = p + (size_t)t * d->ld + d->conv_dim + d->HV * d->V;
    for (int32_t h = 0; h < d->HV; h++) {
        double x = (double)b[d->HV + h] + w->dt_bias[h];
        beta[h] = 1 / (1 + exp(-b[h]));
        g[h] = -exp(w->A_log[h]) * (x > 20 ? x : log1p(exp(x)));
    }
}

/* Compares row t of out (the batch's) with the reference row; returns the largest error of q, k
 * and v, and checks g and beta to a few roundings of their own size. */
static double row_error(const struct gdn_dims *d, const struct conv_out *out, int32_t t,
                        const double *qkv, const double *g, const double *beta)
{
    size_t HK = (size_t)d->H * d->K, HVV = (size_t)d->HV * d->V;
    double e = max_diff(out->q + t * HK, qkv, HK);
    e = fmax(e, max_diff(out->k + t * HK, qkv + HK, HK));
    /* v is not normalised: relative to its size when that is above 1. */
    e = fmax(e, max_diff(out->v + t * HVV, qkv + 2 * HK, HVV) /
                    fmax(1, max_abs(qkv + 2 * HK, HVV)));
    for (int32_t h = 0; h < d->HV; h++) {
        size_t at = (size_t)t * d->HV + h;
        cr_expect(fabs(out->g[at] - g[h]) <= 8 * UNIT_ROUNDOFF * fabs(g[h]) + 1e-37);
        cr_expect(fabs(out->beta[at] - beta[h]) <= 8 * UNIT_ROUNDOFF * beta[h]);
        cr_expect(out->g[at] <= 0);
    }
    return e;
}

/* Many pieces at once: fresh, continued and empty ones, each against its own reference. */
static void check_batch(uint64_t seed, const int32_t *lens, int32_t n_seqs)
{
    struct rng r = {seed};
    struct gdn_dims d = gdn_dims_of(2, 2, 128, 128);
    struct conv_weights w = weights_make(&r, d);
    struct piece pieces[64];
    int32_t T = 0, slots[64];
    shuffled(&r, n_seqs, slots);
    for (int32_t i = 0; i < n_seqs; i++) {
        pieces[i] = (struct piece){i, i % 2 ? 64 * i : 0, lens[i], slots[i]};
        T += lens[i];
    }
    struct backend b;
    struct backend_limits l = gdn_limits(&d, T, n_seqs);
    open_cpu(&b, 2, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &d, n_seqs, &pool), 0);
    size_t n_win = (size_t)3 * d.conv_dim;
    float *S = normals(&r, (size_t)d.HV * d.K * d.V, 1), *windows = normals(&r, n_win * 64, 1);
    for (int32_t i = 0; i < n_seqs; i++)
        b.ops->state_write(&b, &d, &pool, slots[i], S, windows + n_win * i);
    for (int32_t i = 0; i < n_seqs; i += 2)
        b.ops->state_poison(&b, &d, &pool, slots[i]);
    float *p = normals(&r, (size_t)T * d.ld, 2);
    struct pack pk;
    pack_make(&b, &pk, pieces, n_seqs, NULL, 0);
    struct conv_out out = out_make(&d, T);
    run_conv(&b, &w, &pk.b, p, &pool, &out);

    double *window = must(calloc(n_win, sizeof(double)));
    double *qkv = must(calloc(d.conv_dim, sizeof(double))), g[16], beta[16], worst = 0;
    float *S_after = poisoned((size_t)d.HV * d.K * d.V), *win_after = poisoned(n_win);
    for (int32_t i = 0; i < n_seqs; i++) {
        const float *rows = p + (size_t)pk.cu_seqlens[i] * d.ld;
        bool is_fresh = pieces[i].start == 0;
        for (int32_t c = 0; c < d.conv_dim; c++)
            for (int32_t j = 0; j < 3; j++)
                window[(size_t)j * d.conv_dim + c] =
                    is_fresh ? 0 : windows[n_win * i + (size_t)c * 3 + j];
        for (int32_t t = 0; t < lens[i]; t++) {
            ref_row(&w, rows, window, t, qkv, g, beta);
            worst = fmax(worst, row_error(&d, &out, pk.cu_seqlens[i] + t, qkv, g, beta));
        }
        b.ops->state_read(&b, &d, &pool, slots[i], S_after, win_after);
        for (int32_t c = 0; c < d.conv_dim; c++)
            for (int32_t j = 0; j < 3; j++) {
                int32_t t = lens[i] - 3 + j;
                float x = t >= 0 ? rows[(size_t)t * d.ld + c]
                                 : (float)window[(size_t)(3 + t) * d.conv_dim + c];
                float found = win_after[(size_t)c * 3 + j];
                if (is_fresh && lens[i] == 0)
                    cr_assert(isnan(found), "an empty first piece wrote its slot");
                else
                    cr_assert_eq(found, x, "window of piece %d (length %d)", i, lens[i]);
            }
    }
    cr_expect_leq(worst, TOLERANCE, "error %.3g", worst);
    for (size_t i = (size_t)T * d.HV; i < ((size_t)T + GUARD_ROWS) * d.HV; i++)
        cr_expect(isnan(out.g[i]) && isnan(out.beta[i]));
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

Test(gdn_conv, shapes_against_f64)
{
    int32_t one[] = {1}, many[] = {1, 2, 3, 1, 0, 2, 3, 3, 1, 2, 0, 1},
            long_ones[] = {63, 64, 65, 127, 130, 20, 300};
    check_batch(1, one, 1);
    check_batch(2, many, 12);
    check_batch(3, long_ones, 7);
}

/* Pieces of 1, 1, 1, 2, 1, 3: each shorter than the window it leaves behind. */
Test(gdn_conv, fault_19_pieces_shorter_than_the_window)
{
    struct rng r = {19};
    struct gdn_dims d = gdn_dims_of(1, 1, 128, 128);
    struct conv_weights w = weights_make(&r, d);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 9, 1);
    open_cpu(&b, 1, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &d, 2, &pool), 0);
    float *p = normals(&r, (size_t)9 * d.ld, 1);
    struct conv_out whole = out_make(&d, 9), cut = out_make(&d, 9);
    struct pack pk;
    struct piece all = {0, 0, 9, 0};
    b.ops->state_poison(&b, &d, &pool, 0);
    b.ops->state_poison(&b, &d, &pool, 1);
    pack_make(&b, &pk, &all, 1, NULL, 0);
    run_conv(&b, &w, &pk.b, p, &pool, &whole);
    int32_t lens[] = {1, 1, 1, 2, 1, 3}, at = 0;
    for (int i = 0; i < 6; at += lens[i++]) {
        struct piece piece = {0, at, lens[i], 1};
        struct conv_out part = {cut.q + (size_t)at * d.K, cut.k + (size_t)at * d.K,
                                cut.v + (size_t)at * d.V, cut.g + at, cut.beta + at};
        pack_make(&b, &pk, &piece, 1, NULL, 0);
        run_conv(&b, &w, &pk.b, p + (size_t)at * d.ld, &pool, &part);
    }
    cr_expect_arr_eq(cut.q, whole.q, (size_t)9 * d.K * sizeof(float));
    cr_expect_arr_eq(cut.k, whole.k, (size_t)9 * d.K * sizeof(float));
    cr_expect_arr_eq(cut.v, whole.v, (size_t)9 * d.V * sizeof(float));
    float *S = poisoned((size_t)d.K * d.V), *win[2];
    for (int i = 0; i < 2; i++) {
        win[i] = poisoned((size_t)3 * d.conv_dim);
        b.ops->state_read(&b, &d, &pool, i, S, win[i]);
    }
    cr_expect_arr_eq(win[0], win[1], (size_t)3 * d.conv_dim * sizeof(float));
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* One row through the operation with chosen b, a, A_log and dt_bias. */
static void gate_of(float b_in, float a_in, float A_log, float dt_bias, float *g, float *beta)
{
    struct rng r = {29};
    struct gdn_dims d = gdn_dims_of(1, 1, 16, 16);
    struct conv_weights w = weights_make(&r, d);
    w.A_log[0] = A_log;
    w.dt_bias[0] = dt_bias;
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 1, 1);
    open_cpu(&b, 1, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &d, 1, &pool), 0);
    float *p = normals(&r, d.ld, 1);
    p[d.ld - 2] = b_in;
    p[d.ld - 1] = a_in;
    struct piece piece = {0, 0, 1, 0};
    struct pack pk;
    pack_make(&b, &pk, &piece, 1, NULL, 0);
    struct conv_out out = out_make(&d, 1);
    run_conv(&b, &w, &pk.b, p, &pool, &out);
    *g = out.g[0];
    *beta = out.beta[0];
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* A_log keeps its f32 bits up to g: rounded to bf16 it would differ by up to 2^-9 of g. */
Test(gdn_conv, fault_29_A_log_is_f32)
{
    float A_log = 1.0f + 0x1p-9f + 0x1p-12f, g, beta;
    gate_of(0, 0.5f, A_log, 0.25f, &g, &beta);
    double right = -exp(A_log) * log1p(exp(0.75));
    cr_expect_leq(fabs(g - right), 8 * UNIT_ROUNDOFF * fabs(right));
}

/* One rounding point for a value: beta, g and the norms are f32 of f32, nothing between. */
Test(gdn_conv, fault_30_gates_at_their_ends)
{
    float xs[] = {-100, -87, -20, -1e-3f, 0, 1, 19.99f, 20, 20.01f, 87, 100}, g, beta;
    for (size_t i = 0; i < sizeof xs / sizeof *xs; i++) {
        gate_of(xs[i], xs[i], 0.5f, 0, &g, &beta);
        double x = xs[i], right_g = -exp(0.5) * (x > 20 ? x : log1p(exp(x)));
        double right_b = 1 / (1 + exp(-x));
        cr_expect(fabs(g - right_g) <= 8 * UNIT_ROUNDOFF * fabs(right_g) + 1e-37, "g of %g", x);
        cr_expect(fabs(beta - right_b) <= 8 * UNIT_ROUNDOFF * right_b + 1e-37, "beta of %g", x);
        cr_expect(g <= 0 && beta >= 0 && beta <= 1);
    }
}

/* q and k are normalised here, whatever their size, all-zero rows included. */
Test(gdn_conv, fault_08_norm_of_q_and_k)
{
    struct rng r = {8};
    struct gdn_dims d = gdn_dims_of(2, 1, 128, 128);
    struct conv_weights w = weights_make(&r, d);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 8, 1);
    open_cpu(&b, 1, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &d, 1, &pool), 0);
    struct piece piece = {0, 0, 8, 0};
    struct pack pk;
    pack_make(&b, &pk, &piece, 1, NULL, 0);
    struct conv_out out = out_make(&d, 8);
    double sizes[] = {10, 1000, 0};
    for (int i = 0; i < 3; i++) {
        float *p = normals(&r, (size_t)8 * d.ld, sizes[i]);
        run_conv(&b, &w, &pk.b, p, &pool, &out);
        for (int32_t row = 0; row < 8 * d.H; row++) {
            double qq = 0, kk = 0, right = sizes[i] > 0;
            for (int32_t c = 0; c < d.K; c++) {
                qq += (double)out.q[row * d.K + c] * out.q[row * d.K + c];
                kk += (double)out.k[row * d.K + c] * out.k[row * d.K + c];
            }
            cr_expect(fabs(kk - right) < 1e-6 && fabs(qq * d.K - right) < 1e-6);
        }
    }
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}
