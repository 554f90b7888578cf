/* What is parallel over the chunks of the gated delta rule: gates, the unit lower triangular
 * inverse, the masked Q K^T. One group of 4 warps, one (chunk, key head) and its value heads.
 *
 * gdn.md 1.2, gated form. With gamma the inclusive sum of g inside the chunk and
 * D_ij = exp(gamma_i - gamma_j), i >= j:
 *   P = (Q K^T) o D, diagonal included;  L = strictly lower part of diag(beta) (K K^T) o D;
 *   A = (I + L)^-1 diag(beta);  eg_i = exp(gamma_i);  el_i = exp(gamma_last - gamma_i).
 * The inverse T (derived here): block rows of 16, warp w owns row w. T_ww by forward
 * substitution in f32, a column a lane; M_wj = -T_ww L_wj; T_wc = sum_{j=c}^{w-1} M_wj T_jc.
 * Block products take both operands as bf16 high + low parts (3 products, 16 bits of mantissa),
 * f32 sums in a fixed order. Never powers of L.
 * Rows past the chunk's end have q = k = 0, g = beta = 0: rows and columns of A become 0. */
#ifndef PREFILLD_GDN_SOLVE_CUH
#define PREFILLD_GDN_SOLVE_CUH

#include "tile.cuh"

enum { SOLVE_LD = 20 }; /* row of a diagonal block in floats: stores fall in 32 banks */

/* Private to warp w each: its own copy saves barriers. */
struct gate_smem {
    float gamma[4][64]; /* sum of g times log2 e */
    float beta[4][64];
    float col[4][2][64]; /* 2^(gamma_r - gamma_j) for block rows w and 3 - w */
};

struct solve_smem {
    float diag[4][16 * SOLVE_LD]; /* L_ww transposed, private to warp w */
    uint8_t block[10][1024];      /* T_wc at w (w + 1) / 2 + c: 4 8x8 of high, 4 of low parts,
                                     each of T_ww transposed */
};

/* Two rows of a chunk a lane: 2 lane, 2 lane + 1. */
struct gate_regs {
    float g[2], beta[2];
};

/* g, beta: at the chunk's first token and the head; rows HV apart; 0 from row n on. */
__device__ static inline struct gate_regs gates_load(const float *g, const float *beta, int HV,
                                                     int n)
{
    struct gate_regs r;
    for (int e = 0; e < 2; e++) {
        int i = 2 * (threadIdx.x & 31) + e;
        r.g[e] = i < n ? g[(int64_t)i * HV] : 0.0f;
        r.beta[e] = i < n ? beta[(int64_t)i * HV] : 0.0f;
    }
    return r;
}

/* Fills this warp's gamma, beta and column factors of block rows W and 3 - W; warp 0 also
 * writes eg [64] | el [64]. */
__device__ static inline void gates_scan(struct gate_smem *s, int W, struct gate_regs r,
                                         float *eg_el)
{
    const float log2e = 1.4426950408889634f;
    int lane = threadIdx.x & 31;
    float g0 = __fmul_rn(r.g[0], log2e);
    float scan =
        __fadd_rn(g0, __fmul_rn(r.g[1], log2e)); /* never fused: one result everywhere */
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
        float up = __shfl_up_sync(0xffffffffu, scan, m);
        scan += lane >= m ? up : 0.0f;
    }
    float before = __shfl_up_sync(0xffffffffu, scan, 1);
    g0 += lane == 0 ? 0.0f : before;
    float last = __shfl_sync(0xffffffffu, scan, 31);
    float ref_a = __shfl_sync(0xffffffffu, g0, 8 * W);
    float ref_p = __shfl_sync(0xffffffffu, g0, 8 * (3 - W));
    __syncwarp();
    *(float2 *)&s->gamma[W][2 * lane] = make_float2(g0, scan);
    *(float2 *)&s->beta[W][2 * lane] = make_float2(r.beta[0], r.beta[1]);
    *(float2 *)&s->col[W][0][2 * lane] =
        make_float2(exp2_fast(fminf(ref_a - g0, 0.0f)), exp2_fast(fminf(ref_a - scan, 0.0f)));
    *(float2 *)&s->col[W][1][2 * lane] =
        make_float2(exp2_fast(fminf(ref_p - g0, 0.0f)), exp2_fast(fminf(ref_p - scan, 0.0f)));
    if (W == 0) {
        *(float2 *)&eg_el[2 * lane] = make_float2(exp2_fast(g0), exp2_fast(scan));
        *(float2 *)&eg_el[64 + 2 * lane] =
            make_float2(exp2_fast(fminf(last - g0, 0.0f)), exp2_fast(fminf(last - scan, 0.0f)));
    }
    __syncwarp();
}

/* acc_ij *= f_i D_ij for j <= i (j < i when strict), else 0, in block row R: column tiles 0 ..
 * 2 R + 1. f: this thread's two rows. Off the diagonal D_ij = 2^(gamma_i - gamma_r)
 * 2^(gamma_r - gamma_j) with r the block row's first row, j < r <= i: both factors <= 1, the
 * second one from `col`. */
template <int R>
__device__ static inline void decay_mask(const float *gamma, const float *col,
                                         float acc[2 * R + 2][4], const float f[2], bool strict)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float gr = gamma[16 * R];
    float gi[2] = {gamma[16 * R + g], gamma[16 * R + g + 8]};
    float fi[2] = {f[0] * exp2_fast(fminf(gi[0] - gr, 0.0f)),
                   f[1] * exp2_fast(fminf(gi[1] - gr, 0.0f))};
#pragma unroll
    for (int nt = 0; nt < 2 * R; nt++) {
        float2 c = *(const float2 *)&col[8 * nt + 2 * t];
        acc[nt][0] = __fmul_rn(__fmul_rn(acc[nt][0], fi[0]), c.x);
        acc[nt][1] = __fmul_rn(__fmul_rn(acc[nt][1], fi[0]), c.y);
        acc[nt][2] = __fmul_rn(__fmul_rn(acc[nt][2], fi[1]), c.x);
        acc[nt][3] = __fmul_rn(__fmul_rn(acc[nt][3], fi[1]), c.y);
    }
    int edge = strict ? 1 : 0;
#pragma unroll
    for (int nt = 0; nt < 2; nt++) {
        float2 gj = *(const float2 *)&gamma[16 * R + 8 * nt + 2 * t];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float d = exp2_fast(fminf(gi[e >> 1] - (e & 1 ? gj.y : gj.x), 0.0f));
            float x = __fmul_rn(__fmul_rn(acc[2 * R + nt][e], f[e >> 1]), d);
            acc[2 * R + nt][e] = 8 * nt + 2 * t + (e & 1) + edge <= g + (e >> 1) * 8 ? x : 0.0f;
        }
    }
}

/* Block row R, column tiles 0 .. 2 R + 1, into a swizzled tile; the others become 0. x: pairs
 * of bf16 for row g and row g + 8. */
template <int R>
__device__ static inline void tile_store(uint32_t tile, const uint32_t x[2 * R + 2][2])
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    uint32_t base = tile + (16 * R + g) * 128 + (g << 4) + t * 4;
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        bool zero = nt > 2 * R + 1;
        uint32_t at = base ^ (nt << 4);
        st_shared2(at, zero ? 0 : x[nt][0]);
        st_shared2(at + 8 * 128, zero ? 0 : x[nt][1]);
    }
}

template <int N>
__device__ static inline void pack_rows(uint32_t x[N][2], const float acc[N][4])
{
#pragma unroll
    for (int nt = 0; nt < N; nt++) {
        x[nt][0] = pack2(acc[nt][0], acc[nt][1]);
        x[nt][1] = pack2(acc[nt][2], acc[nt][3]);
    }
}

/* A 16x16 f32 block in accumulator layout as high and low bf16 parts in A operand order. */
__device__ static inline void split_block(const float c[2][4], uint32_t hi[4], uint32_t lo[4])
{
    frag_pack(hi, c[0], c[1]);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const float *v = &c[q >> 1][2 * (q & 1)];
        lo[q] = pack2(v[0] - lo2(hi[q]), v[1] - hi2(hi[q]));
    }
}

/* acc += A B, each operand in two parts; b in B operand order. */
__device__ static inline void block_mma(float acc[2][4], const uint32_t ahi[4],
                                        const uint32_t alo[4], const uint32_t bhi[4],
                                        const uint32_t blo[4])
{
#pragma unroll
    for (int c = 0; c < 2; c++) {
        mma16816(acc[c], alo, bhi[2 * c], bhi[2 * c + 1]);
        mma16816(acc[c], ahi, blo[2 * c], blo[2 * c + 1]);
        mma16816(acc[c], ahi, bhi[2 * c], bhi[2 * c + 1]);
    }
}

__device__ static inline uint32_t block_addr(struct solve_smem *s, int w, int c)
{
    return smem_addr(s->block[w * (w + 1) / 2 + c]);
}

__device__ static inline void block_store(struct solve_smem *s, int w, int c,
                                          const uint32_t hi[4], const uint32_t lo[4])
{
    uint32_t at = block_addr(s, w, c) + (threadIdx.x & 31) * 4;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        st_shared2(at + q * 128, hi[q]);
        st_shared2(at + 512 + q * 128, lo[q]);
    }
}

/* acc += (mhi, mlo) T_jc with T_jc from shared memory. */
__device__ static inline void block_step(struct solve_smem *s, float acc[2][4],
                                         const uint32_t mhi[4], const uint32_t mlo[4], int j,
                                         int c)
{
    uint32_t bhi[4], blo[4];
    uint32_t at = block_addr(s, j, c) + (threadIdx.x & 31) * 16;
    if (j == c) {
        ldsm4(bhi, at);
        ldsm4(blo, at + 512);
    } else {
        ldsm4_t(bhi, at);
        ldsm4_t(blo, at + 512);
    }
    block_mma(acc, mhi, mlo, bhi, blo);
}

/* T_ww = (I + L_ww)^-1 by forward substitution, column lane & 15; both half-warps do the same,
 * the first writes high parts, the second low parts. */
__device__ static inline void solve_diag(struct solve_smem *s, int warp, const float c[2][4])
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float *d = s->diag[warp];
#pragma unroll
    for (int nt = 0; nt < 2; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            d[(8 * nt + 2 * t + (e & 1)) * SOLVE_LD + g + (e >> 1) * 8] = c[nt][e];
    __syncwarp();
    int col = lane & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
        x[i] = i == col ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < 15; j++) {
#pragma unroll
        for (int q = (j + 1) / 4; q < 4; q++) {
            float4 l = *(const float4 *)&d[j * SOLVE_LD + 4 * q];
            const float lv[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (4 * q + e > j)
                    x[4 * q + e] = fmaf(-lv[e], x[j], x[4 * q + e]);
        }
    }
    uint32_t out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t hi = pack2(x[2 * i], x[2 * i + 1]);
        uint32_t lo = pack2(x[2 * i] - lo2(hi), x[2 * i + 1] - hi2(hi));
        out[i] = lane < 16 ? hi : lo;
    }
    uint4 *at = (uint4 *)(s->block[warp * (warp + 1) / 2 + warp] + (lane >> 4) * 512 +
                          (col >> 3) * 256 + (col & 7) * 16);
    at[0] = make_uint4(out[0], out[1], out[2], out[3]);
    at[8] = make_uint4(out[4], out[5], out[6], out[7]);
    __syncwarp();
}

/* acc: L in accumulator layout on entry, block row W, T_WW solved already; T on exit. All 4
 * warps of the group call it; `barrier` is the group's. */
template <int W>
__device__ static inline void solve_inverse(struct solve_smem *s, float acc[8][4], int barrier)
{
    uint32_t thi[4], tlo[4], mhi[W + 1][4], mlo[W + 1][4];
    uint32_t at = block_addr(s, W, W) + (threadIdx.x & 31) * 16;
    ldsm4_t(thi, at);
    ldsm4_t(tlo, at + 512);
#pragma unroll
    for (int j = 0; j < W; j++) {
        uint32_t hi[4], lo[4];
        split_block(acc + 2 * j, hi, lo);
#pragma unroll
        for (int q = 0; q < 4; q++)
            hi[q] = movm_t(hi[q]), lo[q] = movm_t(lo[q]);
        float m[2][4] = {};
        block_mma(m, thi, tlo, hi, lo);
        split_block(m, mhi[j], mlo[j]);
#pragma unroll
        for (int q = 0; q < 4; q++)
            mhi[j][q] ^= 0x80008000u, mlo[j][q] ^= 0x80008000u;
#pragma unroll
        for (int e = 0; e < 8; e++)
            acc[2 * j + (e >> 2)][e & 3] = 0.0f;
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
        acc[2 * W + (q >> 1)][2 * (q & 1)] = lo2(thi[q]) + lo2(tlo[q]);
        acc[2 * W + (q >> 1)][2 * (q & 1) + 1] = hi2(thi[q]) + hi2(tlo[q]);
    }
    /* Step d forms the terms with j - c = d: T_jc of the step before is then complete. */
#pragma unroll
    for (int d = 0; d < 3; d++) {
        group_sync(barrier);
#pragma unroll
        for (int c = 0; c + d < W; c++) {
            block_step(s, acc + 2 * c, mhi[c + d], mlo[c + d], c + d, c);
            if (c + d == W - 1 && W < 3) {
                uint32_t hi[4], lo[4];
                split_block(acc + 2 * c, hi, lo);
                block_store(s, W, c, hi, lo);
            }
        }
    }
}

/* Where a chunk's preparation works; shared memory addresses of tiles. */
struct prep_places {
    struct gate_smem *gates;
    struct solve_smem *solve; /* may lie over Q */
    uint32_t K, Q;            /* tail rows are 0 */
    uint32_t A, P;            /* out; may lie over K */
    float *eg_el;             /* out */
};

/* K K^T and Q K^T of warp W, before any gate: what the value heads of a key head share. Block row W
 * of K K^T at xp[0], block row 3 - W of Q K^T behind it. */
template <int W>
__device__ static inline void prep_products(const struct prep_places *s, float xp[10][4])
{
    mm_lower<3 - W>(xp + 2 * W + 2, s->Q, s->K);
    mm_lower<W>(xp, s->K, s->K);
}

/* Masks of warp W, and its part of P: L to x, its diagonal block to diag. */
template <int W>
__device__ static inline void prep_masks(const struct prep_places *s, const float xp[10][4],
                                         float x[8][4], float diag[2][4])
{
    {
        const float one[2] = {1.0f, 1.0f};
        uint32_t pp[2 * (3 - W) + 2][2];
        float p[2 * (3 - W) + 2][4];
#pragma unroll
        for (int i = 0; i < 4 * (2 * (3 - W) + 2); i++)
            p[i >> 2][i & 3] = xp[2 * W + 2 + (i >> 2)][i & 3];
        decay_mask<3 - W>(s->gates->gamma[W], s->gates->col[W][1], p, one, false);
        pack_rows<2 * (3 - W) + 2>(pp, p);
        tile_store<3 - W>(s->P, pp);
    }
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4 * (2 * W + 2); i++)
        x[i >> 2][i & 3] = xp[i >> 2][i & 3];
    const float *b = s->gates->beta[W];
    const float beta[2] = {b[16 * W + (lane >> 2)], b[16 * W + (lane >> 2) + 8]};
    decay_mask<W>(s->gates->gamma[W], s->gates->col[W][0], x, beta, true);
#pragma unroll
    for (int e = 0; e < 8; e++)
        diag[e >> 2][e & 3] = x[2 * W + (e >> 2)][e & 3];
}

/* The inverse and A of warp W. */
template <int W>
__device__ static inline void prep_inverse(const struct prep_places *s, float x[8][4],
                                           int barrier)
{
    solve_inverse<W>(s->solve, x, barrier);
    const float *b = s->gates->beta[W];
#pragma unroll
    for (int nt = 0; nt < 2 * W + 2; nt++) {
        float2 bj = *(const float2 *)&b[8 * nt + 2 * (threadIdx.x & 3)];
        x[nt][0] *= bj.x, x[nt][2] *= bj.x;
        x[nt][1] *= bj.y, x[nt][3] *= bj.y;
    }
    uint32_t xx[2 * W + 2][2];
    pack_rows<2 * W + 2>(xx, x);
    tile_store<W>(s->A, xx);
}

/* The products of a chunk and key head, by 4 warps, in registers. Warp w has block row w of
 * A and 3 - w of P: the same work for each. Where bounds depend on the warp there is a copy of the
 * code for each; what does not is shared, because the instruction cache is what this kernel is
 * short of. On return K and Q have been read. */
__device__ static inline void prep_shared(struct prep_places s, int warp, float xp[10][4],
                                          int barrier)
{
    if (warp == 0)
        prep_products<0>(&s, xp);
    else if (warp == 1)
        prep_products<1>(&s, xp);
    else if (warp == 2)
        prep_products<2>(&s, xp);
    else
        prep_products<3>(&s, xp);
    group_sync(barrier);
}

/* A, P and gates of one value head from them. Tiles of A and P above the diagonal are written
 * as 0. */
__device__ static inline void prep_head(struct prep_places s, int warp, struct gate_regs r,
                                        const float xp[10][4], int barrier)
{
    float x[8][4], diag[2][4];
    gates_scan(s.gates, warp, r, s.eg_el);
    if (warp == 0)
        prep_masks<0>(&s, xp, x, diag);
    else if (warp == 1)
        prep_masks<1>(&s, xp, x, diag);
    else if (warp == 2)
        prep_masks<2>(&s, xp, x, diag);
    else
        prep_masks<3>(&s, xp, x, diag);
    solve_diag(s.solve, warp, diag);
    if (warp == 0)
        prep_inverse<0>(&s, x, barrier);
    else if (warp == 1)
        prep_inverse<1>(&s, x, barrier);
    else if (warp == 2)
        prep_inverse<2>(&s, x, barrier);
    else
        prep_inverse<3>(&s, x, barrier);
}

#endif
