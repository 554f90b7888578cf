/* One chunk of the gated delta rule, C = 64 (gdn.md 1.2, gated form, with a solve in place of
 * an inverse). Rows i, j of a chunk; c_i is the log-decay summed up to and including row i.
 *
 *   D_ij = e^(c_i - c_j), j <= i          L = strictly lower (beta_i k_i.k_j D_ij)
 *   (I + L) X = beta (V - e^c K S)        by forward substitution
 *   O = e^c Q S + (q_i.k_j D_ij) X
 *   S = e^c_last S + K^T (e^(c_last - c) X)
 *
 * Every exponential is of a difference <= 0, taken in f64 before it is rounded: decays of -100
 * a token next to decays of -0.001 lose nothing. The gated form keeps L no larger than
 * beta |k|^2, whatever the ungated one would be; no power or inverse of L is ever formed. */
#include <math.h>
#include <string.h>

#include "cpu_gdn.h"
#include "cpu_simd.h"

/* Rows of a triangular block: below it products, inside it substitution. */
enum { TRI = 16 };

/* Decays below e^-75 = 3e-33 are 0: nothing that they multiply is missed in f32, and subnormal
 * factors, a hundred times slower on many processors, cannot come from them. */
#define LEAST_LOG_DECAY -75.0f

typedef double vd __attribute__((vector_size(128)));

/* ---- kernels ---- */

/* d[j] = min(c_i - c[j], 0) for j in [0, n), n a multiple of 16; far ones are put where their
 * exponential is 0. */
CPU_INLINE void diff_body(int32_t n, double c_i, const double *c, float *d)
{
    for (int32_t j = 0; j < n; j += VEC) {
        vd diff;
        for (int32_t u = 0; u < VEC; u++)
            diff[u] = c_i - c[j + u];
        vf x = __builtin_convertvector(diff, vf);
        x = VF_KEEP(~(x > 0), x);
        VF_STORE(d + j, VF_SELECT(x < LEAST_LOG_DECAY, VF_SET(-INFINITY), x));
    }
}
CPU_KERNEL(diff, (int32_t n, double c_i, const double *c, float *d), (n, c_i, c, d))

/* Row i of L and P from the row of decays, whose tail past i is to be dropped. */
CPU_INLINE void gate_row_body(int32_t i, int32_t n, float beta, const float *D, const float *kk,
                              const float *qk, float *L, float *P)
{
    vi lane;
    for (int32_t u = 0; u < VEC; u++)
        lane[u] = u;
    for (int32_t j = 0; j < n; j += VEC) {
        vi is_kept = lane + j <= i;
        vf decay = VF_LOAD(D + j);
        VF_STORE(L + j, VF_LOAD(kk + j) * beta * decay);
        VF_STORE(P + j, VF_KEEP(is_kept, VF_LOAD(qk + j) * decay));
    }
}
CPU_KERNEL(gate_row,
           (int32_t i, int32_t n, float beta, const float *D, const float *kk, const float *qk,
            float *L, float *P),
           (i, n, beta, D, kk, qk, L, P))

/* x = beta (v - decay x). */
CPU_INLINE void delta_row_body(int32_t n, float beta, float decay, const float *v, float *x)
{
    for (int32_t j = 0; j < n; j += VEC)
        VF_STORE(x + j, (VF_LOAD(v + j) - VF_LOAD(x + j) * decay) * beta);
}
CPU_KERNEL(delta_row, (int32_t n, float beta, float decay, const float *v, float *x),
           (n, beta, decay, v, x))

/* Forward substitution in a block of n_rows rows: x_i -= sum over j < i of L_ij x_j. */
CPU_INLINE void solve_body(int32_t n_rows, int32_t n, const float *L, float *x, size_t ldx)
{
    for (int32_t j0 = 0; j0 < n; j0 += VEC)
        for (int32_t i = 1; i < n_rows; i++) {
            vf sum = VF_SET(0.0f);
            for (int32_t j = 0; j < i; j++)
                sum += VF_LOAD(x + j * ldx + j0) * L[i * CHUNK_TOKENS + j];
            VF_STORE(x + i * ldx + j0, VF_LOAD(x + i * ldx + j0) - sum);
        }
}
CPU_KERNEL(solve, (int32_t n_rows, int32_t n, const float *L, float *x, size_t ldx),
           (n_rows, n, L, x, ldx))

/* Row i of y is row i of x times s[i * s_step]. */
CPU_INLINE void scale_rows_body(int32_t n_rows, int32_t n, const float *s, int32_t s_step,
                                const float *x, size_t ldx, float *y, size_t ldy)
{
    for (int32_t i = 0; i < n_rows; i++)
        for (int32_t j = 0; j < n; j += VEC)
            VF_STORE(y + i * ldy + j, VF_LOAD(x + i * ldx + j) * s[i * s_step]);
}
CPU_KERNEL(scale_rows,
           (int32_t n_rows, int32_t n, const float *s, int32_t s_step, const float *x,
            size_t ldx, float *y, size_t ldy),
           (n_rows, n, s, s_step, x, ldx, y, ldy))

CPU_INLINE void mul_row_body(int32_t n, const float *x, float *y)
{
    for (int32_t j = 0; j < n; j += VEC)
        VF_STORE(y + j, VF_LOAD(y + j) * VF_LOAD(x + j));
}
CPU_KERNEL(mul_row, (int32_t n, const float *x, float *y), (n, x, y))

/* ---- the state-independent part ---- */

void gdn_keys_copy(const struct op_gdn_delta *a, struct gdn_chunk c, int32_t i_key_head,
                   struct gdn_keys *out)
{
    size_t K = a->d.K, ld = a->d.H * K, at = (size_t)c.tok * ld + (size_t)i_key_head * K;
    for (int32_t i = 0; i < c.n; i++) {
        memcpy(out->rows + i * K, (const float *)a->k + at + i * ld, K * sizeof(float));
        memcpy(out->rows + (c.n + i) * K, (const float *)a->q + at + i * ld, K * sizeof(float));
    }
}

void gdn_keys_multiply(int32_t n, int32_t K, struct gdn_keys *keys, void *mm)
{
    cpu_mm(CPU_MM_SET, false, true, 2 * n, n, K, keys->rows, K, keys->rows, K, keys->dots,
           CHUNK_TOKENS, mm);
}

void gdn_prep_make(const struct op_gdn_delta *a, struct gdn_chunk c, int32_t i_head,
                   const struct gdn_keys *keys, struct gdn_prep *out)
{
    double sum[CHUNK_TOKENS], total = 0;
    float beta[CHUNK_TOKENS];
    for (int32_t i = 0; i < c.n; i++) {
        size_t at = (size_t)(c.tok + i) * a->d.HV + i_head;
        total += a->g[at];
        sum[i] = total;
        beta[i] = a->beta[at];
    }
    for (int32_t i = c.n; i < CHUNK_TOKENS; i++)
        sum[i] = total;
    float D[CHUNK_TOKENS];
    for (int32_t i = 0; i < c.n; i++) {
        int32_t n = (int32_t)cpu_round_up(i + 1, VEC);
        size_t row = (size_t)i * CHUNK_TOKENS;
        diff(n, sum[i], sum, D);
        cpu_vec_exp(n, D, D);
        gate_row(i, n, beta[i], D, keys->dots + row,
                 keys->dots + (size_t)c.n * CHUNK_TOKENS + row, out->L + row, out->P + row);
    }
    /* e^c_i and e^(c_last - c_i): differences to a row before the first, and from the last. */
    double minus[CHUNK_TOKENS];
    for (int32_t i = 0; i < CHUNK_TOKENS; i++)
        minus[i] = -sum[i];
    diff(CHUNK_TOKENS, 0, minus, out->decay);
    cpu_vec_exp(CHUNK_TOKENS, out->decay, out->decay);
    diff(CHUNK_TOKENS, total, sum, out->rest);
    cpu_vec_exp(CHUNK_TOKENS, out->rest, out->rest);
}

/* ---- the part with the state ---- */

/* X [n, n_v] becomes (I + L)^-1 X. */
static void solve_chunk(const float *L, int32_t n, int32_t n_v, float *X, void *mm)
{
    for (int32_t i = 0; i < n; i += TRI) {
        int32_t m = n - i < TRI ? n - i : TRI;
        float *x = X + (size_t)i * n_v;
        if (i)
            cpu_mm(CPU_MM_SUB, false, false, m, n_v, i, L + (size_t)i * CHUNK_TOKENS,
                   CHUNK_TOKENS, X, n_v, x, n_v, mm);
        solve(m, n_v, L + (size_t)i * (CHUNK_TOKENS + 1), x, n_v);
    }
}

void gdn_chunk_apply(const struct op_gdn_delta *a, struct gdn_chunk c, int32_t i_head,
                     int32_t v0, int32_t n_v, const struct gdn_prep *prep, bool is_fresh,
                     float *S, struct gdn_scratch *s)
{
    int32_t HV = a->d.HV, K = a->d.K, V = a->d.V;
    size_t ldv = (size_t)HV * V, at_v = (size_t)c.tok * ldv + (size_t)i_head * V + v0;
    const float *v = (const float *)a->v + at_v;
    float *o = (float *)a->o + at_v, *X = s->R, *QS = s->R + (size_t)c.n * n_v;
    S += v0;

    /* The product with zeros is zeros: same bits. */
    if (is_fresh)
        memset(s->R, 0, (size_t)2 * c.n * n_v * sizeof(float));
    else
        cpu_mm(CPU_MM_SET, false, false, 2 * c.n, n_v, K, s->keys.rows, K, S, V, s->R, n_v,
               s->mm);
    for (int32_t i = 0; i < c.n; i++)
        delta_row(n_v, a->beta[(size_t)(c.tok + i) * HV + i_head], prep->decay[i], v + i * ldv,
                  X + (size_t)i * n_v);
    solve_chunk(prep->L, c.n, n_v, X, s->mm);

    scale_rows(c.n, n_v, prep->decay, 1, QS, n_v, QS, n_v);
    for (int32_t i = 0; i < c.n; i += TRI) {
        int32_t m = c.n - i < TRI ? c.n - i : TRI;
        cpu_mm(CPU_MM_ADD, false, false, m, n_v, i + m, prep->P + (size_t)i * CHUNK_TOKENS,
               CHUNK_TOKENS, X, n_v, QS + (size_t)i * n_v, n_v, s->mm);
    }
    for (int32_t i = 0; i < c.n; i++)
        memcpy(o + i * ldv, QS + (size_t)i * n_v, (size_t)n_v * sizeof(float));

    scale_rows(c.n, n_v, prep->rest, 1, X, n_v, X, n_v);
    scale_rows(K, n_v, prep->decay + c.n - 1, 0, S, V, S, V);
    cpu_mm(CPU_MM_ADD, true, false, K, n_v, c.n, s->keys.rows, K, X, n_v, S, V, s->mm);
}

void gdn_gate_rows(const struct op_gdn_delta *a, int32_t i_head, int32_t tok, int32_t n)
{
    int32_t V = a->d.V;
    float gate[GDN_DIM_MAX];
    for (int32_t t = tok; t < tok + n; t++) {
        size_t head = (size_t)i_head * V;
        float *o = (float *)a->o + (size_t)t * a->d.HV * V + head;
        cpu_rmsnorm_row(V, a->eps, o, a->norm_w, o);
        cpu_vec_silu(V, (const float *)a->z + (size_t)t * a->d.ld + head, gate);
        mul_row(V, gate, o);
    }
}
