/* The gated delta rule on the CPU, against f64, and the faults of gdn.md 4 by their numbers. */
#include <criterion/criterion.h>

#include "gdn_ref.h"

/* An output is a chain of sums of at most K = 128 and twice 64 terms, each rounded; |k| <= 1
 * and beta <= 1 make the chain non-expansive, so roundings add and do not grow. Their worst
 * case is (128 + 64 + 64) u = 1.5e-5 of the largest value, and they mostly cancel. */
#define TOLERANCE (256 * UNIT_ROUNDOFF)

/* What a run of the operation gave. */
struct gdn_result {
    float *o; /* [T, HV, V] */
    float *S; /* [HV, K, V] */
};

static size_t state_size(const struct gdn_dims *d)
{
    return (size_t)d->HV * d->K * d->V;
}

typedef void delta_fn(struct backend *b, const struct op_gdn_delta *a);

/* Runs in, in pieces cut at cuts (ascending, then T), each piece a batch of its own. S0 NULL: a
 * fresh request in a slot full of NaN. */
static struct gdn_result run_pieces(struct backend *b, delta_fn *fn, const struct gdn_input *in,
                                    const int32_t *cuts, int32_t n_cuts, const float *S0)
{
    const struct gdn_dims *d = &in->d;
    struct gdn_result out = {poisoned(((size_t)in->T + GUARD_ROWS) * d->HV * d->V),
                             poisoned(state_size(d))};
    float *conv = poisoned((size_t)3 * d->conv_dim);
    struct state_pool pool;
    cr_assert_eq(b->ops->state_pool_make(b, d, 2, &pool), 0);
    b->ops->state_poison(b, d, &pool, 0);
    b->ops->state_poison(b, d, &pool, 1);
    if (S0)
        b->ops->state_write(b, d, &pool, 1, S0, conv);
    int32_t start = 0;
    for (int32_t i = 0; i <= n_cuts; i++) {
        int32_t end = i < n_cuts ? cuts[i] : in->T;
        struct piece piece = {0, (S0 ? 1000 : 0) + start, end - start, 1};
        struct pack p;
        pack_make(b, &p, &piece, 1, NULL, 0);
        poison_workspace(b);
        struct op_gdn_delta a = {.b = &p.b,
                                 .d = *d,
                                 .q = in->q + (size_t)start * d->H * d->K,
                                 .k = in->k + (size_t)start * d->H * d->K,
                                 .v = in->v + (size_t)start * d->HV * d->V,
                                 .g = in->g + (size_t)start * d->HV,
                                 .beta = in->beta + (size_t)start * d->HV,
                                 .pool = &pool,
                                 .o = out.o + (size_t)start * d->HV * d->V};
        fn(b, &a);
        pack_free(&p);
        start = end;
    }
    b->ops->state_read(b, d, &pool, 1, out.S, conv);
    for (size_t i = (size_t)in->T * d->HV * d->V; i < (size_t)GUARD_ROWS * d->HV * d->V; i++)
        cr_assert(isnan(out.o[i]), "wrote past the last row");
    b->ops->state_pool_free(b, &pool);
    free(conv);
    return out;
}

static void result_free(struct gdn_result *r)
{
    free(r->o);
    free(r->S);
}

/* Compares both bodies with f64, relative to the largest value; returns the chunked one's
 * largest error over its bound. */
static double check_f64(const struct gdn_input *in, const float *S0, const char *what)
{
    const struct gdn_dims *d = &in->d;
    struct backend b;
    struct backend_limits l = gdn_limits(d, in->T, 4);
    open_cpu(&b, 2, &l);
    size_t n_o = (size_t)in->T * d->HV * d->V, n_S = state_size(d);
    double *S = must(calloc(n_S, sizeof(double))), *o = must(calloc(n_o, sizeof(double)));
    for (size_t i = 0; S0 && i < n_S; i++)
        S[i] = S0[i];
    gdn_ref(in, S, o);
    double worst = 0;
    delta_fn *bodies[] = {cpu_gdn_delta_recurrent, cpu_gdn_delta};
    for (int i = 0; i < 2; i++) {
        struct gdn_result r = run_pieces(&b, bodies[i], in, NULL, 0, S0);
        double e_o = max_diff(r.o, o, n_o) / (max_abs(o, n_o) + 1e-30);
        double e_S = max_diff(r.S, S, n_S) / (max_abs(S, n_S) + 1e-30);
        cr_expect(e_o <= TOLERANCE && e_S <= TOLERANCE, "%s, %s: T %d: o %.3g, S %.3g", what,
                  i ? "chunks" : "recurrent", in->T, e_o, e_S);
        worst = fmax(e_o, e_S) / TOLERANCE;
        result_free(&r);
    }
    free(S);
    free(o);
    b.ops->close(&b);
    return worst;
}

/* The state behind the first 64 and 128 of 150 tokens, kept by both bodies. */
Test(gdn, kept_inside_a_piece)
{
    struct rng r = {11};
    struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 2, 64, 64), 150, 0.1, 0.5);
    const int32_t save_slots[] = {2, 0, -1}, ends[] = {128, 0, 64}; /* of slots */
    struct backend b;
    struct backend_limits l = gdn_limits(&in.d, in.T, 1);
    struct state_pool pool;
    open_cpu(&b, 1, &l);
    cr_assert_eq(b.ops->state_pool_make(&b, &in.d, 3, &pool), 0);
    struct piece piece = {0, 0, in.T, 1};
    struct pack p;
    pack_make(&b, &p, &piece, 1, NULL, 0);
    p.b.save_slots = save_slots;
    float *o = poisoned(((size_t)in.T + GUARD_ROWS) * in.d.HV * in.d.V);
    float *S = poisoned(state_size(&in.d)), *conv = poisoned((size_t)3 * in.d.conv_dim);
    delta_fn *bodies[] = {cpu_gdn_delta_recurrent, cpu_gdn_delta};
    for (int i = 0; i < 2; i++) {
        struct op_gdn_delta a = {.b = &p.b,
                                 .d = in.d,
                                 .q = in.q,
                                 .k = in.k,
                                 .v = in.v,
                                 .g = in.g,
                                 .beta = in.beta,
                                 .pool = &pool,
                                 .o = o};
        bodies[i](&b, &a);
        for (int32_t slot = 0; slot < 3; slot += 2) {
            struct gdn_input part = in;
            part.T = ends[slot];
            struct gdn_result cut = run_pieces(&b, bodies[i], &part, NULL, 0, NULL);
            b.ops->state_read(&b, &in.d, &pool, slot, S, conv);
            cr_expect_arr_eq(S, cut.S, state_size(&in.d) * sizeof(float), "body %d, slot %d", i,
                             slot);
            result_free(&cut);
        }
    }
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* Random inputs, then g is replaced. */
static void check_gates(int32_t T, float (*g)(int32_t t, int32_t h, struct rng *r),
                        const char *what)
{
    struct rng r = {42};
    struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 2, 128, 128), T, 0, 0.5);
    for (int32_t t = 0; t < T; t++)
        for (int32_t h = 0; h < 2; h++)
            in.g[t * 2 + h] = g(t, h, &r);
    float *S0 = normals(&r, state_size(&in.d), 1);
    check_f64(&in, NULL, what);
    check_f64(&in, S0, what);
    free(S0);
    gdn_input_free(&in);
}

Test(gdn, random_shapes_against_f64)
{
    struct rng r = {1};
    double worst = 0, gscales[] = {0, 0.1, 5, 50};
    int32_t lengths[] = {1, 63, 64, 65, 127, 130};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (size_t j = 0; j < 4; j++) {
            struct gdn_input in =
                gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), lengths[i], gscales[j], 1);
            float *S0 = normals(&r, state_size(&in.d), 1);
            worst = fmax(worst, check_f64(&in, NULL, "fresh"));
            worst = fmax(worst, check_f64(&in, S0, "continued"));
            free(S0);
            gdn_input_free(&in);
        }
    cr_log_info("largest error: %.3f of the bound", worst);
}

static float g_strong(int32_t t, int32_t h, struct rng *r)
{
    (void)t;
    (void)h;
    return (float)(-50 - 50 * rng_unit(r));
}

Test(gdn, fault_01_strong_decay)
{
    check_gates(130, g_strong, "g -50 .. -100");
}

static float g_zero(int32_t t, int32_t h, struct rng *r)
{
    (void)t;
    (void)h;
    (void)r;
    return 0;
}

static float g_alternating(int32_t t, int32_t h, struct rng *r)
{
    (void)r;
    return (t + h) % 2 ? -80 : 0;
}

Test(gdn, fault_02_zero_and_alternating_gate)
{
    check_gates(130, g_zero, "g 0");
    check_gates(130, g_alternating, "g 0, -80, 0, ..");
}

/* Strong decays first: what is summed before must not blur the small differences after. */
static float g_strong_then_weak(int32_t t, int32_t h, struct rng *r)
{
    (void)h;
    (void)r;
    return t % 64 < 32 ? -100 : -0.001f;
}

Test(gdn, strong_decays_leave_weak_ones_exact)
{
    check_gates(128, g_strong_then_weak, "g -100 x 32, -0.001 x 32");
}

/* The rows behind the last one are NaN in every buffer (gdn_input_make, run_pieces). */
Test(gdn, fault_03_tail_rows)
{
    struct rng r = {3};
    int32_t lengths[] = {1, 2, 63, 65};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct gdn_input in = gdn_input_make(&r, gdn_dims_of(2, 2, 128, 128), lengths[i], 1, 1);
        check_f64(&in, NULL, "tail");
        gdn_input_free(&in);
    }
}

static float g_tiny_token(int32_t t, int32_t h, struct rng *r)
{
    (void)t;
    (void)h;
    (void)r;
    return logf(1e-12f);
}

static float g_tiny_chunk(int32_t t, int32_t h, struct rng *r)
{
    (void)t;
    (void)h;
    (void)r;
    return logf(1e-12f) / 64;
}

Test(gdn, fault_04_decay_1e_12_for_a_chunk)
{
    check_gates(128, g_tiny_token, "1e-12 a token");
    check_gates(128, g_tiny_chunk, "1e-12 a chunk");
}

/* A chunk's decay just above, in and below the f32 subnormals, and a subnormal state. */
static float g_subnormal(int32_t t, int32_t h, struct rng *r)
{
    (void)t;
    (void)r;
    return h ? -90.0f / 64 : -100.0f / 64;
}

Test(gdn, fault_05_subnormals)
{
    check_gates(130, g_subnormal, "decay e^-90, e^-100 a chunk");
    struct rng r = {5};
    struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), 65, 0.1, 0);
    float *S0 = normals(&r, state_size(&in.d), 1e-41);
    check_f64(&in, S0, "subnormal state");
    for (size_t i = 0; i < (size_t)65 * 128; i++)
        in.v[i] *= 1e-36f;
    double worst = check_f64(&in, NULL, "values of 1e-36");
    cr_expect(worst < 1);
    free(S0);
    gdn_input_free(&in);
}

/* One decaying token among others that do not: the token's own row and all later ones see it,
 * earlier ones do not. */
Test(gdn, fault_06_inclusive_sum)
{
    struct rng r = {6};
    int32_t places[] = {0, 1, 62, 63, 64, 65, 127};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), 129, 0, 1);
        in.g[places[i]] = -1;
        float *S0 = normals(&r, state_size(&in.d), 1);
        check_f64(&in, S0, "one decaying token");
        free(S0);
        gdn_input_free(&in);
    }
}

/* The operation takes q and k as they are: keys of length 1.2 and queries of length 3. */
Test(gdn, fault_08_keys_are_taken_as_they_are)
{
    struct rng r = {8};
    struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), 100, 0.5, 0);
    for (size_t i = 0; i < (size_t)100 * 128; i++) {
        in.q[i] *= 34;
        in.k[i] *= 1.2f;
    }
    check_f64(&in, NULL, "long keys");
    gdn_input_free(&in);
}

/* Keys that are nearly one vector, beta near 1: a solve through powers of L passes 1e8 here. */
Test(gdn, fault_11_correlated_keys)
{
    struct rng r = {11};
    double corrs[] = {1, 3, 10};
    for (size_t i = 0; i < 3; i++) {
        struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), 128, 0, corrs[i]);
        for (int32_t t = 0; t < 128; t++)
            in.beta[t] = 0.98f;
        check_f64(&in, NULL, "correlated keys");
        gdn_input_free(&in);
    }
}

/* The residual of the solve: with S = 0, q = k_j and no decay, o and the state follow from
 * X = (I + L)^-1 beta V alone. X itself is read off with orthonormal values: V = I. */
Test(gdn, fault_12_residual_of_the_solve)
{
    struct rng r = {12};
    struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), 64, 0, 3);
    memset(in.v, 0, (size_t)64 * 128 * sizeof(float));
    for (int32_t i = 0; i < 64; i++) {
        in.beta[i] = 0.98f;
        in.v[i * 128 + i] = 1;
    }
    struct backend b;
    struct backend_limits l = gdn_limits(&in.d, 64, 1);
    open_cpu(&b, 1, &l);
    struct gdn_result out = run_pieces(&b, cpu_gdn_delta, &in, NULL, 0, NULL);
    /* S = sum over i of k_i x_i^T, so K S = (K K^T) X. And (I + L) X = beta I: the part of K
     * K^T below the diagonal gives row i of (I + L) X as x_i + beta_i sum over j < i of
     * (k_i.k_j) x_j. x_i is found from the state after i + 1 tokens and after i. */
    static float X[64][64];
    float *before = poisoned(128 * 128);
    memset(before, 0, 128 * 128 * sizeof(float));
    for (int32_t n = 1; n <= 64; n++) {
        struct gdn_input part = in;
        part.T = n;
        struct gdn_result p = run_pieces(&b, cpu_gdn_delta, &part, NULL, 0, NULL);
        for (int32_t j = 0; j < 64; j++) {
            double x = 0; /* k.(S_n - S_{n-1}) = |k|^2 x, |k| = 1 */
            for (int32_t i = 0; i < 128; i++)
                x += in.k[(n - 1) * 128 + i] * ((double)p.S[i * 128 + j] - before[i * 128 + j]);
            X[n - 1][j] = (float)x;
        }
        memcpy(before, p.S, 128 * 128 * sizeof(float));
        result_free(&p);
    }
    double worst = 0;
    for (int32_t i = 0; i < 64; i++)
        for (int32_t j = 0; j < 64; j++) {
            double sum = X[i][j];
            for (int32_t m = 0; m < i; m++) {
                double dot = 0;
                for (int32_t c = 0; c < 128; c++)
                    dot += (double)in.k[i * 128 + c] * in.k[m * 128 + c];
                sum += 0.98f * dot * X[m][j];
            }
            worst = fmax(worst, fabs(sum - (i == j ? 0.98f : 0)));
        }
    /* |x| <= 1. Row i sums 64 terms with X read off through sums of 128: about 192 u; tf32
     * products would leave 64 x 2^-11 = 3e-2. */
    cr_expect(worst <= 192 * UNIT_ROUNDOFF, "residual %.3g", worst);
    result_free(&out);
    free(before);
    b.ops->close(&b);
}

Test(gdn, fault_13_large_state)
{
    struct rng r = {13};
    struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), 130, 0.01, 0.5);
    float *S0 = normals(&r, state_size(&in.d), 1e5);
    check_f64(&in, S0, "state of 1e5");
    free(S0);
    gdn_input_free(&in);
}

/* 8192 tokens, g about -1e-4: the state keeps what it got thousands of tokens ago. The error
 * against f64 is a sum of 128 chunks' roundings that decay slowly; the pieces must not add any:
 * same bits in 1, 16 and 256 of them (of 64-multiples: 8192 = 128 x 64, so 256 are cut at 32,
 * within tolerance). */
Test(gdn, fault_14_state_drift)
{
    struct rng r = {14};
    struct gdn_dims d = gdn_dims_of(1, 1, 64, 64);
    struct gdn_input in = gdn_input_make(&r, d, 8192, 1e-4, 0.5);
    double *S = must(calloc(state_size(&d), sizeof(double)));
    double *o = must(calloc((size_t)8192 * 64, sizeof(double)));
    gdn_ref(&in, S, o);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 8192, 1);
    open_cpu(&b, 2, &l);
    int32_t cuts[255], n_pieces[] = {1, 16, 256};
    struct gdn_result first = {0};
    for (int k = 0; k < 3; k++) {
        for (int32_t i = 1; i < n_pieces[k]; i++)
            cuts[i - 1] = i * (8192 / n_pieces[k]);
        struct gdn_result out = run_pieces(&b, cpu_gdn_delta, &in, cuts, n_pieces[k] - 1, NULL);
        double e = max_diff(out.S, S, state_size(&d)) / max_abs(S, state_size(&d));
        double e_o = max_diff(out.o, o, (size_t)8192 * 64) / max_abs(o, (size_t)8192 * 64);
        cr_expect(e <= TOLERANCE && e_o <= TOLERANCE, "%d pieces: S %.3g, o %.3g", n_pieces[k],
                  e, e_o);
        if (k == 0)
            first = out;
        else if (k == 1)
            cr_expect_arr_eq(out.S, first.S, state_size(&d) * sizeof(float));
    }
    b.ops->close(&b);
}

/* Any split point, not only multiples of 64: other chunks, so equal within rounding. */
Test(gdn, fault_15_continued_equals_whole)
{
    struct rng r = {15};
    struct gdn_dims d = gdn_dims_of(1, 2, 64, 64);
    struct gdn_input in = gdn_input_make(&r, d, 150, 0.2, 1);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 150, 1);
    open_cpu(&b, 1, &l);
    size_t n_S = state_size(&d), n_o = (size_t)150 * d.HV * d.V;
    double *S = must(calloc(n_S, sizeof(double))), *o = must(calloc(n_o, sizeof(double)));
    gdn_ref(&in, S, o);
    for (int32_t cut = 1; cut <= 130; cut++) {
        struct gdn_result out = run_pieces(&b, cpu_gdn_delta, &in, &cut, 1, NULL);
        cr_expect_leq(max_diff(out.S, S, n_S), TOLERANCE * max_abs(S, n_S), "cut %d", cut);
        cr_expect_leq(max_diff(out.o, o, n_o), TOLERANCE * max_abs(o, n_o), "cut %d", cut);
        result_free(&out);
    }
    b.ops->close(&b);
}

Test(gdn, fault_17_token_by_token)
{
    struct rng r = {17};
    struct gdn_dims d = gdn_dims_of(1, 1, 128, 128);
    struct gdn_input in = gdn_input_make(&r, d, 300, 0.2, 1);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 300, 1);
    open_cpu(&b, 1, &l);
    int32_t cuts[299];
    for (int32_t i = 0; i < 299; i++)
        cuts[i] = i + 1;
    struct gdn_result whole = run_pieces(&b, cpu_gdn_delta, &in, NULL, 0, NULL);
    struct gdn_result single = run_pieces(&b, cpu_gdn_delta, &in, cuts, 299, NULL);
    double most = 0, diff = 0;
    for (size_t i = 0; i < (size_t)300 * 128; i++) {
        most = fmax(most, fabs((double)whole.o[i]));
        diff = fmax(diff, fabs((double)whole.o[i] - single.o[i]));
    }
    cr_expect_leq(diff, TOLERANCE * most);
    b.ops->close(&b);
}

Test(gdn, fault_23_one_past_a_chunk)
{
    struct rng r = {23};
    struct gdn_dims d = gdn_dims_of(1, 1, 16, 16);
    int32_t T = 64 * 40 + 1;
    struct gdn_input in = gdn_input_make(&r, d, T, 0.1, 1);
    double *S = must(calloc(256, sizeof(double)));
    double *o = must(calloc((size_t)T * 16, sizeof(double)));
    gdn_ref(&in, S, o);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, T, 1);
    open_cpu(&b, 1, &l);
    for (int32_t n = 1; n <= 40; n++) {
        struct gdn_input part = in;
        part.T = 64 * n + 1;
        struct gdn_result out = run_pieces(&b, cpu_gdn_delta, &part, NULL, 0, NULL);
        size_t row = (size_t)64 * n * 16;
        cr_expect_leq(max_diff(out.o + row, o + row, 16), TOLERANCE * max_abs(o, row),
                      "length %d", part.T);
        result_free(&out);
    }
    b.ops->close(&b);
}

/* Eight tokens, the demo's way to a NaN: every value is looked at. */
Test(gdn, fault_34_eight_tokens_are_finite)
{
    struct rng r = {34};
    for (int i = 0; i < 20; i++) {
        struct gdn_input in =
            gdn_input_make(&r, gdn_dims_of(2, 2, 128, 128), 8, i % 2 ? 20 : 0.01, i);
        check_f64(&in, NULL, "eight tokens");
        gdn_input_free(&in);
    }
}

/* A mask without the decay (a published mistake) would be off by about 1 here. */
Test(gdn, fault_35_decay_in_the_solve)
{
    struct rng r = {35};
    struct gdn_input in = gdn_input_make(&r, gdn_dims_of(1, 1, 128, 128), 64, 0.5, 3);
    check_f64(&in, NULL, "with decay");
    struct gdn_input other = gdn_input_make(&r, in.d, 64, 0, 3);
    memcpy(other.q, in.q, (size_t)64 * 128 * sizeof(float));
    memcpy(other.k, in.k, (size_t)64 * 128 * sizeof(float));
    memcpy(other.v, in.v, (size_t)64 * 128 * sizeof(float));
    memcpy(other.beta, in.beta, 64 * sizeof(float));
    double S[2][128 * 128] = {{0}}, o[2][64 * 128], diff = 0;
    gdn_ref(&in, S[0], o[0]);
    gdn_ref(&other, S[1], o[1]);
    for (int i = 0; i < 64 * 128; i++)
        diff = fmax(diff, fabs(o[0][i] - o[1][i]));
    cr_expect_gt(diff, 100 * TOLERANCE * max_abs(o[0], 64 * 128));
}

Test(gdn, fault_39_three_pieces)
{
    struct rng r = {39};
    struct gdn_dims d = gdn_dims_of(1, 1, 64, 64);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 768, 1);
    open_cpu(&b, 1, &l);
    int32_t sizes[] = {16, 64, 256};
    for (int i = 0; i < 3; i++) {
        int32_t T = 3 * sizes[i], cuts[] = {sizes[i], 2 * sizes[i]};
        struct gdn_input in = gdn_input_make(&r, d, T, 0.1, 1);
        size_t n_o = (size_t)T * 64;
        double *S = must(calloc(64 * 64, sizeof(double)));
        double *o = must(calloc(n_o, sizeof(double)));
        gdn_ref(&in, S, o);
        struct gdn_result out = run_pieces(&b, cpu_gdn_delta, &in, cuts, 2, NULL);
        cr_expect_leq(max_diff(out.o, o, n_o), TOLERANCE * max_abs(o, n_o));
        cr_expect_leq(max_diff(out.S, S, 64 * 64), TOLERANCE * max_abs(S, 64 * 64));
        if (sizes[i] % 64 == 0) {
            struct gdn_result whole = run_pieces(&b, cpu_gdn_delta, &in, NULL, 0, NULL);
            cr_expect_arr_eq(out.o, whole.o, n_o * sizeof(float));
        }
    }
    b.ops->close(&b);
}

Test(gdn, fault_40_heads_per_key_head)
{
    struct rng r = {40};
    for (int32_t ratio = 1; ratio <= 4; ratio++) {
        struct gdn_input in = gdn_input_make(&r, gdn_dims_of(2, ratio, 64, 64), 130, 0.3, 1);
        check_f64(&in, NULL, "ratio");
        gdn_input_free(&in);
    }
}
