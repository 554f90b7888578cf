/* What is parallel over the chunks of the gated delta rule: gates, the unit lower triangular
 * inverse, the masked Q K^T. One group of 4 warps, one (chunk, value head).
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

struct solve_smem {
    float diag[4][16 * SOLVE_LD]; /* L_ww transposed, private to warp w */
    uint8_t block[10][1024];      /* T_wc at w (w + 1) / 2 + c: 4 8x8 of high, 4 of low parts,
                                     each of T_ww transposed */
    float gamma[4][64];           /* sum of g times log2 e; a copy for each warp */
    float row[4][64];             /* gamma + log2 beta */
    float beta[4][64];
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

__device__ static inline float exp2_fast(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ static inline float log2_fast(float x)
{
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* Fills this warp's gamma, row and beta; warp 0 also writes eg [64] | el [64]. */
__device__ static inline void gates_scan(struct solve_smem *s, int warp, struct gate_regs r,
                                         float *eg_el)
{
    const float log2e = 1.4426950408889634f;
    int lane = threadIdx.x & 31;
    float g0 = r.g[0] * log2e, g1 = r.g[1] * log2e;
    float scan = g0 + g1;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
        float up = __shfl_up_sync(0xffffffffu, scan, m);
        scan += lane >= m ? up : 0.0f;
    }
    float before = __shfl_up_sync(0xffffffffu, scan, 1);
    g0 += lane == 0 ? 0.0f : before;
    float last = __shfl_sync(0xffffffffu, scan, 31);
    __syncwarp();
    *(float2 *)&s->gamma[warp][2 * lane] = make_float2(g0, scan);
    *(float2 *)&s->row[warp][2 * lane] =
        make_float2(g0 + log2_fast(r.beta[0]), scan + log2_fast(r.beta[1]));
    *(float2 *)&s->beta[warp][2 * lane] = make_float2(r.beta[0], r.beta[1]);
    if (warp == 0) {
        *(float2 *)&eg_el[2 * lane] = make_float2(exp2_fast(g0), exp2_fast(scan));
        *(float2 *)&eg_el[64 + 2 * lane] = make_float2(exp2_fast(fminf(last - g0, 0.0f)),
                                                       exp2_fast(fminf(last - scan, 0.0f)));
    }
    __syncwarp();
}

/* acc_ij *= 2^(row_i - gamma_j) for j <= i (j < i when strict), else 0, in block row `w`:
 * column tiles up to 2 w + 1. row: gamma for D, gamma + log2 beta for diag(beta) D; both
 * differences are <= 0. */
__device__ static inline void decay_mask(const float *row, const float *gamma, int w,
                                         float acc[8][4], bool strict)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float ri[2] = {row[16 * w + g], row[16 * w + g + 8]};
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        if (nt > 2 * w + 1)
            continue;
        float2 gj = *(const float2 *)&gamma[8 * nt + 2 * t];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float d = exp2_fast(fminf(ri[e >> 1] - (e & 1 ? gj.y : gj.x), 0.0f));
            acc[nt][e] = __fmul_rn(acc[nt][e], d);
        }
    }
    int edge = strict ? 1 : 0;
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        if (nt >> 1 != w)
            continue;
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[nt][e] = 8 * (nt & 1) + 2 * t + (e & 1) + edge <= g + (e >> 1) * 8 ? acc[nt][e]
                                                                                  : 0.0f;
    }
}

/* Column tiles 0 .. 2 warp + 1 of this warp's rows, as bf16, into a swizzled tile. */
__device__ static inline void tile_store(uint32_t tile, int warp, const float acc[8][4])
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        if (nt > 2 * warp + 1)
            continue;
        uint32_t at = tile + tile_off(16 * warp + g, nt) + t * 4;
        st_shared2(at, pack2(acc[nt][0], acc[nt][1]));
        st_shared2(at + 8 * 128, pack2(acc[nt][2], acc[nt][3]));
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

/* acc: L in accumulator layout on entry, this warp's rows; T on exit, column tiles 0 ..
 * 2 warp + 1. All 4 warps of the group call it; `barrier` is the group's. */
__device__ static inline void solve_inverse(struct solve_smem *s, int warp, float acc[8][4],
                                            int barrier)
{
    float diag[2][4];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        float x = acc[e >> 2][e & 3];
        x = warp == 1 ? acc[2 + (e >> 2)][e & 3] : x;
        x = warp == 2 ? acc[4 + (e >> 2)][e & 3] : x;
        diag[e >> 2][e & 3] = warp == 3 ? acc[6 + (e >> 2)][e & 3] : x;
    }
    solve_diag(s, warp, diag);
    uint32_t thi[4], tlo[4], mhi[3][4], mlo[3][4];
    uint32_t at = block_addr(s, warp, warp) + (threadIdx.x & 31) * 16;
    ldsm4_t(thi, at);
    ldsm4_t(tlo, at + 512);
#pragma unroll
    for (int j = 0; j < 3; j++) {
        if (j >= warp)
            continue;
        uint32_t hi[4], lo[4];
        split_block(acc + 2 * j, hi, lo);
#pragma unroll
        for (int q = 0; q < 4; q++)
            hi[q] = movm_t(hi[q]), lo[q] = movm_t(lo[q]);
        float m[2][4] = {};
        block_mma(m, thi, tlo, hi, lo);
#pragma unroll
        for (int e = 0; e < 8; e++)
            m[e >> 2][e & 3] = -m[e >> 2][e & 3], acc[2 * j + (e >> 2)][e & 3] = 0.0f;
        split_block(m, mhi[j], mlo[j]);
    }
#pragma unroll
    for (int w = 0; w < 4; w++)
        if (w == warp)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                acc[2 * w + (q >> 1)][2 * (q & 1)] = lo2(thi[q]) + lo2(tlo[q]);
                acc[2 * w + (q >> 1)][2 * (q & 1) + 1] = hi2(thi[q]) + hi2(tlo[q]);
            }
    /* Step d forms the terms with j - c = d: T_jc of the step before is then complete. */
#pragma unroll
    for (int d = 0; d < 3; d++) {
        group_sync(barrier);
#pragma unroll
        for (int c = 0; c + d < 3; c++) {
            if (c + d >= warp)
                continue;
            block_step(s, acc + 2 * c, mhi[c + d], mlo[c + d], c + d, c);
            if (c + d == warp - 1 && warp < 3) {
                uint32_t hi[4], lo[4];
                split_block(acc + 2 * c, hi, lo);
                block_store(s, warp, c, hi, lo);
            }
        }
    }
}

/* acc_ij *= beta_j. */
__device__ static inline void scale_columns(const struct solve_smem *s, int warp,
                                            float acc[8][4])
{
    int t = threadIdx.x & 3;
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        if (nt > 2 * warp + 1)
            continue;
        float2 b = *(const float2 *)&s->beta[warp][8 * nt + 2 * t];
        acc[nt][0] *= b.x, acc[nt][2] *= b.x;
        acc[nt][1] *= b.y, acc[nt][3] *= b.y;
    }
}

/* A, P and gates of one chunk and head, by 4 warps, from K and Q tiles whose tail rows are 0.
 * Upper tiles of A and P must be 0 already. Warp w has block row w of A and 3 - w of P: the same
 * work for each. */
__device__ static inline void prep_chunk(struct solve_smem *s, int warp, struct gate_regs r,
                                         uint32_t K, uint32_t Q, uint32_t A, uint32_t P,
                                         float *eg_el, int barrier)
{
    gates_scan(s, warp, r, eg_el);
    float x[8][4];
    mm_lower(x, Q, K, 3 - warp);
    decay_mask(s->gamma[warp], s->gamma[warp], 3 - warp, x, false);
    tile_store(P, 3 - warp, x);
    mm_lower(x, K, K, warp);
    decay_mask(s->row[warp], s->gamma[warp], warp, x, true);
    solve_inverse(s, warp, x, barrier);
    scale_columns(s, warp, x);
    tile_store(A, warp, x);
}

#endif
