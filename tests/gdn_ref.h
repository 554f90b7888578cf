/* The gated delta rule in f64, token by token (gdn.md 1.1, step 6), and inputs for it. */
#ifndef PREFILLD_TESTS_GDN_REF_H
#define PREFILLD_TESTS_GDN_REF_H

#include "cpu_ops.h"

/* The inputs of one sequence, as op_gdn_delta takes them; rows past T are NaN. */
struct gdn_input {
    struct gdn_dims d;
    int32_t T;
    float *q, *k, *v, *g, *beta;
};

enum { GUARD_ROWS = 80 };

__attribute__((unused)) static struct gdn_dims gdn_dims_of(int32_t H, int32_t ratio, int32_t K,
                                                           int32_t V)
{
    int32_t HV = H * ratio, conv_dim = 2 * H * K + HV * V;
    return (struct gdn_dims){H, HV, K, V, conv_dim, conv_dim + HV * V + 2 * HV};
}

__attribute__((unused)) static struct backend_limits
gdn_limits(const struct gdn_dims *d, int32_t max_tokens, int32_t max_seqs)
{
    return (struct backend_limits){.max_tokens = max_tokens,
                                   .max_seqs = max_seqs,
                                   .max_rows = 1,
                                   .HV = d->HV,
                                   .conv_dim = d->conv_dim};
}

/* Unit keys that share a mean of weight corr, queries of length K^-0.5, beta around 0.73, and
 * g = -gscale |normal|. */
__attribute__((unused)) static struct gdn_input
gdn_input_make(struct rng *r, struct gdn_dims d, int32_t T, double gscale, double corr)
{
    size_t n = (size_t)T + GUARD_ROWS, HK = (size_t)d.H * d.K;
    struct gdn_input in = {d,
                           T,
                           poisoned(n * HK),
                           poisoned(n * HK),
                           poisoned(n * d.HV * d.V),
                           poisoned(n * d.HV),
                           poisoned(n * d.HV)};
    double *mean = must(calloc(HK, sizeof(double)));
    for (size_t i = 0; i < HK; i++)
        mean[i] = corr * rng_normal(r);
    for (size_t row = 0; row < (size_t)T * d.H; row++) {
        float *q = in.q + row * d.K, *k = in.k + row * d.K;
        double qq = 0, kk = 0;
        for (int32_t i = 0; i < d.K; i++) {
            q[i] = rng_normal(r);
            k[i] = (float)(rng_normal(r) + mean[row % d.H * d.K + i]);
            qq += (double)q[i] * q[i];
            kk += (double)k[i] * k[i];
        }
        for (int32_t i = 0; i < d.K; i++) {
            q[i] = (float)(q[i] / sqrt(qq * d.K));
            k[i] = (float)(k[i] / sqrt(kk));
        }
    }
    for (size_t i = 0; i < (size_t)T * d.HV * d.V; i++)
        in.v[i] = rng_normal(r);
    for (size_t i = 0; i < (size_t)T * d.HV; i++) {
        in.g[i] = (float)(-gscale * fabs(rng_normal(r)));
        in.beta[i] = (float)(1 / (1 + exp(-2 * rng_normal(r) - 1)));
    }
    free(mean);
    return in;
}

__attribute__((unused)) static void gdn_input_free(struct gdn_input *in)
{
    free(in->q);
    free(in->k);
    free(in->v);
    free(in->g);
    free(in->beta);
}

/* One token of one head on S [K, V]; o [V]. */
__attribute__((unused)) static void gdn_ref_token(const struct gdn_input *in, int32_t t,
                                                  int32_t h, double *S, double *o)
{
    int32_t K = in->d.K, V = in->d.V;
    size_t at_k = ((size_t)t * in->d.H + h / (in->d.HV / in->d.H)) * K;
    size_t at_h = (size_t)t * in->d.HV + h;
    const float *q = in->q + at_k, *k = in->k + at_k, *v = in->v + at_h * V;
    double decay = exp(in->g[at_h]), delta[256] = {0};
    for (int32_t i = 0; i < K; i++)
        for (int32_t j = 0; j < V; j++)
            delta[j] += (S[i * V + j] *= decay) * k[i];
    for (int32_t j = 0; j < V; j++) {
        delta[j] = in->beta[at_h] * (v[j] - delta[j]);
        o[j] = 0;
    }
    for (int32_t i = 0; i < K; i++)
        for (int32_t j = 0; j < V; j++)
            o[j] += (S[i * V + j] += k[i] * delta[j]) * q[i];
}

/* All tokens and heads. S [HV, K, V] updated, o [T, HV, V] out. */
__attribute__((unused)) static void gdn_ref(const struct gdn_input *in, double *S, double *o)
{
    for (int32_t t = 0; t < in->T; t++)
        for (int32_t h = 0; h < in->d.HV; h++)
            gdn_ref_token(in, t, h, S + (size_t)h * in->d.K * in->d.V,
                          o + ((size_t)t * in->d.HV + h) * in->d.V);
}

#endif
