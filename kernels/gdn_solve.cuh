/* What is parallel over the chunks of the gated delta rule: gates, the unit lower triangular
 * inverse, the masked Q K^T, of one (chunk, value head). Products and masks by 4 warps, a block
 * row each; the inverse by 4 or by 2, same bits.
 *
 * gdn.md 1.2, gated form. With gamma the inclusive sum of g inside the chunk and
 * D_ij = exp(gamma_i - gamma_j), i >= j:
 *   P = (Q K^T) o D, diagonal included;  L = strictly lower part of diag(beta) (K K^T) o D;
 *   A = (I + L)^-1 diag(beta);  eg_i = exp(gamma_i);  el_i = exp(gamma_last - gamma_i).
 * The inverse T (derived here), in blocks of 16x16, w a block row. Its diagonal block: two 8x8
 * by forward substitution in f32, merged. Then M_wj = -T_ww L_wj; T_wc = sum_{j=c}^{w-1} M_wj
 * T_jc. Below the diagonal D_ij = 2^(gamma_i - gamma_r) 2^(gamma_r - gamma_j) with r the block
 * row's first row, j < r <= i, both factors <= 1: so M_wj = -(T_ww diag(beta row)) (K K^T)_wj
 * diag(col), and L itself is formed on the diagonal alone. K K^T, T and M are f16 operands (11
 * bits: entries of K K^T and T are at most 1 for unit keys and beta <= 1), sums f32 in a fixed
 * order. Never powers of L. A is tf32 (triangle.cuh), P bf16.
 * Rows past the chunk's end have q = k = 0, g = beta = 0: rows and columns of A become 0.
 *
 * What this part waits for is latency and instruction fetches, not arithmetic: few
 * instructions, and one copy of the code for all warps but where it is masked. */
#ifndef PREFILLD_GDN_SOLVE_CUH
#define PREFILLD_GDN_SOLVE_CUH

#include <cuda_fp16.h>

#include "triangle.cuh"

/* The tensor cores cut A down to tf32, on average by 2^-11 ln 2: so much it is larger here. */
#define TF32_CUT (1.0f + 3.4e-4f)

/* The gates of a chunk; gamma is the sum of g times log2 e. */
struct gate_table {
    float gamma[64];
    float beta[64];
    float cut[64]; /* beta times TF32_CUT */
    float row[64]; /* 2^(gamma_i - gamma_r), r the first row of i's block row */
    float col[96]; /* 2^(gamma_r - gamma_j), j < r; r = 16, 32, 48 at 0, 16, 48 */
    float eg[64], el[64];
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

__device__ static inline float2 exp2_below(float2 x)
{
    return make_float2(exp2_fast(fminf(x.x, 0.0f)), exp2_fast(fminf(x.y, 0.0f)));
}

/* One warp fills a chunk's table. */
__device__ static inline void gates_scan(struct gate_table *s, struct gate_regs r)
{
    const float log2e = 1.4426950408889634f;
    int lane = threadIdx.x & 31;
    float g0 = __fmul_rn(r.g[0], log2e);
    float g1 = __fadd_rn(g0, __fmul_rn(r.g[1], log2e)); /* never fused: one result everywhere */
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
        float up = __shfl_up_sync(0xffffffffu, g1, m);
        g1 += lane >= m ? up : 0.0f;
    }
    float before = __shfl_up_sync(0xffffffffu, g1, 1);
    g0 += lane == 0 ? 0.0f : before;
    float last = __shfl_sync(0xffffffffu, g1, 31);
    float ref = __shfl_sync(0xffffffffu, g0, lane & 24);
    *(float2 *)&s->gamma[2 * lane] = make_float2(g0, g1);
    *(float2 *)&s->beta[2 * lane] = make_float2(r.beta[0], r.beta[1]);
    *(float2 *)&s->cut[2 * lane] =
        make_float2(__fmul_rn(r.beta[0], TF32_CUT), __fmul_rn(r.beta[1], TF32_CUT));
    *(float2 *)&s->row[2 * lane] = exp2_below(make_float2(g0 - ref, g1 - ref));
#pragma unroll
    for (int w = 1; w < 4; w++) {
        ref = __shfl_sync(0xffffffffu, g0, 8 * w);
        if (lane < 8 * w)
            *(float2 *)&s->col[8 * w * (w - 1) + 2 * lane] =
                exp2_below(make_float2(ref - g0, ref - g1));
    }
    *(float2 *)&s->eg[2 * lane] = make_float2(exp2_fast(g0), exp2_fast(g1));
    *(float2 *)&s->el[2 * lane] = exp2_below(make_float2(last - g0, last - g1));
}

/* ---- 16x16 blocks of f16 pairs in A operand order ---- */

__device__ static inline uint32_t pack2h(float a, float b)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

__device__ static inline float2 unpack2h(uint32_t x)
{
    return __half22float2(*(const __half2 *)&x);
}

__device__ static inline void mma16816h(float c[4], const uint32_t a[4], uint32_t b0,
                                        uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c = A B of 8x8 blocks; a: pairs of row g; b: pairs of row g of B. Rows 8 .. 15 are unused. */
__device__ static inline float2 mma8h(uint32_t a, uint32_t b)
{
    float c[4] = {};
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a), "r"(0), "r"(movm_t(b)));
    return make_float2(c[0], c[1]);
}

/* This lane's address for block (row, col) of a tile: exclusive or with col << 5 goes to
 * another column. */
__device__ static inline uint32_t tile_block(uint32_t tile, int row)
{
    int lane = tid_again() & 31;
    return tile + (16 * row + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
}

/* This lane's row of an f16 block of K K^T or T, which lies in the first half of A's place for
 * it (triangle.cuh): its four 8x8 matrices in A operand order. */
__device__ static inline uint32_t block_at(uint32_t tri, int w, int c)
{
    return tri + tri_block(w, c) + (tid_again() & 31) * 16;
}

__device__ static inline void block_store(uint32_t at, const uint32_t r[4])
{
#if __CUDA_ARCH__ >= 900
    stsm4(at, r);
#else
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint32_t row = __shfl_sync(0xffffffffu, at, 8 * q + (lane >> 2));
        st_shared2(row + (lane & 3) * 4, r[q]);
    }
#endif
}

/* acc += M T_jc, the latter at `at`. */
__device__ static inline void block_step(float acc[2][4], const uint32_t m[4], uint32_t at)
{
    uint32_t b[4];
    ldsm4_t(b, at);
    mma16816h(acc[0], m, b[0], b[1]);
    mma16816h(acc[1], m, b[2], b[3]);
}

__device__ static inline void block_pack(uint32_t r[4], const float c[2][4])
{
    r[0] = pack2h(c[0][0], c[0][1]), r[1] = pack2h(c[0][2], c[0][3]);
    r[2] = pack2h(c[1][0], c[1][1]), r[3] = pack2h(c[1][2], c[1][3]);
}

/* ---- a unit ---- */

/* X K^T, this warp's 16 rows; X, K [64, 128], tail rows 0. Columns right of its block row are
 * not defined. Hopper: by all 4 warps, begun here and over after prep_product_wait. */
__device__ static inline void prep_product(float acc[8][4], uint32_t X, uint32_t K, int warp)
{
#if __CUDA_ARCH__ >= 900
    uint64_t x = desc_kmajor(X), k = desc_kmajor(K);
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < 8; ks++) {
        uint64_t at = (ks >> 2) * 512 + (ks & 3) * 2;
        wg_ss64(acc, x + at, k + at, ks > 0);
    }
    wg_commit();
#else
    int lane = threadIdx.x & 31, m = lane >> 3;
    uint32_t at_x = tile_block(X, warp);
    uint32_t at_k = K + ((m >> 1) * 8 + (lane & 7)) * 128 + (((m & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 32; i++)
        acc[i >> 2][i & 3] = 0.0f;
#pragma unroll 2
    for (int ks = 0; ks < 8; ks++) {
        uint32_t a[4], b[4], x = (ks & 3) << 5, panel = (ks >> 2) * TILE_BYTES;
        ldsm4(a, (at_x ^ x) + panel);
#pragma unroll
        for (int np = 0; np < 4; np++) {
            if (np > warp)
                continue;
            ldsm4(b, (at_k ^ x) + panel + np * 2048);
            mma16816(acc[2 * np], a, b[0], b[1]);
            mma16816(acc[2 * np + 1], a, b[2], b[3]);
        }
    }
#endif
}

__device__ static inline void prep_product_wait(float acc[8][4])
{
#if __CUDA_ARCH__ >= 900
    wg_wait<0>();
    wg_pin<8>(acc);
#endif
}

/* This warp's rows of K K^T as f16 to A's place. */
__device__ static inline void prep_store_kk(uint32_t tri, int warp, const float acc[8][4])
{
    uint32_t at = block_at(tri, warp, 0), r[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (c > warp)
            continue;
        block_pack(r, acc + 2 * c);
        block_store(at + tri_block(0, c), r);
    }
}

/* This warp's rows of P from Q K^T, into a tile whose blocks above the diagonal are not
 * touched. */
template <int W>
__device__ static inline void mask_rows(const struct gate_table *s, uint32_t tile,
                                        const float acc[8][4])
{
    int lane = tid_again() & 31, g = lane >> 2, t = lane & 3, row = 16 * W + g;
    float f[2] = {s->row[row], s->row[row + 8]};
    uint32_t at = tile_block(tile, W), r[4];
    const float *col = s->col + 8 * W * (W - 1) + 2 * t;
#pragma unroll
    for (int c = 0; c < W; c++) {
        float x[2][4];
#pragma unroll
        for (int nt = 0; nt < 2; nt++) {
            float2 cj = *(const float2 *)&col[16 * c + 8 * nt];
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[nt][e] =
                    __fmul_rn(__fmul_rn(acc[2 * c + nt][e], f[e >> 1]), e & 1 ? cj.y : cj.x);
        }
        frag_pack(r, x[0], x[1]);
        block_store(at ^ (c << 5), r);
    }
    float gi[2] = {s->gamma[row], s->gamma[row + 8]}, d[2][4];
#pragma unroll
    for (int nt = 0; nt < 2; nt++) {
        float2 gj = *(const float2 *)&s->gamma[16 * W + 8 * nt + 2 * t];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = g + (e >> 1) * 8, j = 8 * nt + 2 * t + (e & 1);
            float x = exp2_fast(fminf(gi[e >> 1] - (e & 1 ? gj.y : gj.x), 0.0f));
            d[nt][e] = j <= i ? __fmul_rn(acc[2 * W + nt][e], x) : 0.0f;
        }
    }
    frag_pack(r, d[0], d[1]);
    block_store(at ^ (W << 5), r);
}

/* A copy of the code for each warp: a bound known at compile time is worth more than one
 * copy. */
__device__ static inline void prep_mask_qk(const struct gate_table *s, uint32_t tile, int warp,
                                           const float acc[8][4])
{
    if (warp == 0)
        mask_rows<0>(s, tile, acc);
    else if (warp == 1)
        mask_rows<1>(s, tile, acc);
    else if (warp == 2)
        mask_rows<2>(s, tile, acc);
    else
        mask_rows<3>(s, tile, acc);
}

/* ---- the inverse ---- */

/* k beta_i D_ij of two neighbours of row i and columns from j on; 0 from the diagonal on. */
__device__ static inline float2 diag_mask(uint32_t k, float gi, float beta, float2 gj, int i,
                                          int j)
{
    float2 x = unpack2h(k);
    float2 d = exp2_below(make_float2(gi - gj.x, gi - gj.y));
    x.x = __fmul_rn(__fmul_rn(x.x, beta), d.x), x.y = __fmul_rn(__fmul_rn(x.y, beta), d.y);
    return make_float2(j < i ? x.x : 0.0f, j + 1 < i ? x.y : 0.0f);
}

__device__ static inline uint32_t pack_by(float2 x, float2 f)
{
    return pack2h(__fmul_rn(x.x, f.x), __fmul_rn(x.y, f.y));
}

/* N diagonal blocks, at `at`, of block rows w: T in their place, T diag(beta row) as A operands
 * in f. Each 8x8: a lane has row g, columns 2 q and 2 q + 1; step j takes row j, then final,
 * from the rows below. */
template <int N>
__device__ static inline void solve_diag(const struct gate_table *s, const int w[N],
                                         const uint32_t at[N], uint32_t f[N][4])
{
    int lane = tid_again() & 31, g = lane >> 2, q = lane & 3;
    float2 l[N][2], x[N][2];
    uint32_t below[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float *gamma = s->gamma + 16 * w[n], *beta = s->beta + 16 * w[n];
        float2 g0 = *(const float2 *)&gamma[2 * q], g1 = *(const float2 *)&gamma[8 + 2 * q];
        uint32_t d[4];
        ldsm4(d, at[n]);
        l[n][0] = diag_mask(d[0], gamma[g], beta[g], g0, g, 2 * q);
        l[n][1] = diag_mask(d[3], gamma[g + 8], beta[g + 8], g1, g, 2 * q);
        float2 y = diag_mask(d[1], gamma[g + 8], beta[g + 8], g0, 8, 0);
        below[n] = pack2h(y.x, y.y);
        x[n][0] = make_float2(g == 2 * q ? 1.0f : 0.0f, g == 2 * q + 1 ? 1.0f : 0.0f);
        x[n][1] = x[n][0];
    }
#pragma unroll 2
    for (int j = 0; j < 7; j++) {
        int in_row = (lane & 28) | (j >> 1), row_j = 4 * j | q;
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            float2 *y = &x[i >> 1][i & 1];
            float2 m = l[i >> 1][i & 1];
            float e = __shfl_sync(0xffffffffu, j & 1 ? m.y : m.x, in_row);
            float u = __shfl_sync(0xffffffffu, y->x, row_j);
            float v = __shfl_sync(0xffffffffu, y->y, row_j);
            y->x = fmaf(-e, u, y->x), y->y = fmaf(-e, v, y->y);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 x0 = x[n][0], x1 = x[n][1];
        uint32_t t[4] = {pack2h(x0.x, x0.y), 0, 0, pack2h(x1.x, x1.y)};
        float2 z = mma8h(below[n], t[0]);
        float2 y = mma8h(t[3] ^ 0x80008000u, pack2h(z.x, z.y));
        t[1] = pack2h(y.x, y.y);
        block_store(at[n], t);
        const float *row = s->row + 16 * w[n] + 2 * q, *beta = s->beta + 16 * w[n] + 2 * q;
        float2 f0 = *(const float2 *)row, f1 = *(const float2 *)(row + 8);
        float2 b0 = *(const float2 *)beta, b1 = *(const float2 *)(beta + 8);
        f0 = make_float2(__fmul_rn(f0.x, b0.x), __fmul_rn(f0.y, b0.y));
        f1 = make_float2(__fmul_rn(f1.x, b1.x), __fmul_rn(f1.y, b1.y));
        f[n][0] = pack_by(x0, f0), f[n][1] = pack_by(y, f0);
        f[n][2] = 0, f[n][3] = pack_by(x1, f1);
    }
}

template <int THREADS> __device__ static inline void part_sync(int barrier)
{
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

template <int THREADS> __device__ static inline void part_arrive(int barrier)
{
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

/* M_wj from f = T_ww diag(beta row); (K K^T)_wj at `at`. */
__device__ static inline void inverse_factor(const struct gate_table *s, int w, int j,
                                             uint32_t m[4], const uint32_t f[4], uint32_t at)
{
    float x[2][4] = {};
    block_step(x, f, at);
    const float *col = s->col + 8 * w * (w - 1) + 16 * j + 2 * (tid_again() & 3);
#pragma unroll
    for (int nt = 0; nt < 2; nt++) {
        float2 c = *(const float2 *)&col[8 * nt];
        m[2 * nt] = pack_by(make_float2(x[nt][0], x[nt][1]), c) ^ 0x80008000u;
        m[2 * nt + 1] = pack_by(make_float2(x[nt][2], x[nt][3]), c) ^ 0x80008000u;
    }
}

/* A block of A from T's: times the factors of its columns. at: as tri_store. */
template <typename P>
__device__ static inline void inverse_store(const float *cut, P at, const float t[2][4])
{
    float x[2][4];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float2 b = *(const float2 *)&cut[8 * e + 2 * (tid_again() & 3)];
        x[e][0] = __fmul_rn(t[e][0], b.x), x[e][1] = __fmul_rn(t[e][1], b.y);
        x[e][2] = __fmul_rn(t[e][2], b.x), x[e][3] = __fmul_rn(t[e][3], b.y);
    }
    tri_store(at, x);
}

/* The same for a diagonal block, whose T is f16. */
template <typename P>
__device__ static inline void inverse_store_diag(const float *cut, P at, const uint32_t r[4])
{
    float x[2][4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
        float2 t = unpack2h(r[q]);
        x[q >> 1][2 * (q & 1)] = t.x, x[q >> 1][2 * (q & 1) + 1] = t.y;
    }
    inverse_store(cut, at, x);
}

/* A, packed, from K K^T at `tri`, where T comes in its place; by 4 warps, which see all of it.
 * Takes barriers `barrier` and + 1. */
__device__ static inline void prep_inverse(const struct gate_table *s, uint32_t tri, uint8_t *A,
                                           int warp, int barrier)
{
    uint32_t f[1][4], m[3][4];
    float acc[3][2][4];
    const uint32_t at[1] = {block_at(tri, warp, warp)};
    const int w[1] = {warp};
    solve_diag<1>(s, w, at, f);
#pragma unroll
    for (int j = 0; j < 3; j++) {
#pragma unroll
        for (int e = 0; e < 8; e++)
            acc[j][e >> 2][e & 3] = 0.0f;
        if (j < warp)
            inverse_factor(s, warp, j, m[j], f[0], block_at(tri, warp, j));
    }
    /* Step d forms the terms with j - c = d: T_jc of the step before is then complete. */
#pragma unroll
    for (int d = 0; d < 3; d++) {
        if (d < 2)
            part_sync<128>(barrier);
        else if (warp > 0)
            part_sync<96>(barrier + 1);
#pragma unroll
        for (int c = 0; c + d < 3; c++) {
            if (c + d >= warp)
                continue;
            block_step(acc[c], m[c + d], block_at(tri, c + d, c));
            if (c + d == warp - 1 && d < 2) {
                uint32_t r[4];
                block_pack(r, acc[c]);
                block_store(block_at(tri, warp, c), r);
            }
        }
    }
    float *out = (float *)A + (threadIdx.x & 31);
#pragma unroll
    for (int c = 0; c < 3; c++)
        if (c < warp)
            inverse_store(s->cut + 16 * c, out + tri_packed(warp, c) / 4, acc[c]);
    uint32_t d[4];
    ldsm4(d, at[0]);
    inverse_store_diag(s->cut + 16 * warp, out + tri_packed(warp, warp) / 4, d);
}

/* The same by two warps, p of them 0 and 1, same bits, and A in the place of T: rows 0 and 3,
 * rows 1 and 2. Each has two diagonal blocks and three below: (3, 2), (3, 1), (3, 0); (1, 0),
 * (2, 1), (2, 0). Warp 1 needs only diagonals of warp 0, which then waits for it once. A block
 * is overwritten with A when the other warp does not read its T any more. Takes 3 barriers. */
__device__ static inline void prep_inverse_pair(const struct gate_table *s, uint32_t tri, int p,
                                                int barrier)
{
    asm volatile("" : "+r"(p)); /* what follows from it is not worth registers around a loop */
    const int row1 = tri_block(1, 0), row2 = tri_block(2, 0), col = tri_block(0, 1);
    uint32_t b0 = block_at(tri, 0, 0), lo = b0 + p * row1;
    uint32_t hi = b0 + tri_block(3, 0) - p * TRI_BLOCK, f[2][4], m[3][4];
    {
        const uint32_t at[2] = {lo + p * col, hi + (3 - p) * col};
        const int w[2] = {p, 3 - p};
        solve_diag<2>(s, w, at, f);
    }
    /* The columns of the three are col0, 1, 0. */
    int col0 = p ? 0 : 2;
    uint32_t at0 = p ? lo : hi + 2 * col;
#pragma unroll
    for (int q = 0; q < 4; q++)
        f[0][q] = p ? f[0][q] : f[1][q];
    inverse_factor(s, p ? 1 : 3, col0, m[0], f[0], at0);
    inverse_factor(s, 3 - p, 1, m[1], f[1], hi + col);
    inverse_factor(s, 3 - p, 0, m[2], f[1], hi);
    part_sync<64>(barrier);
    float acc[3][2][4] = {};
    block_step(acc[0], m[0], p ? b0 : b0 + row2 + 2 * col);
    block_step(acc[1], m[1], b0 + row1 + col);
    block_step(acc[2], m[2], b0);
    if (p) {
        uint32_t r[4];
        block_pack(r, acc[0]);
        block_store(at0, r);
        block_pack(r, acc[1]);
        block_store(hi + col, r);
        __syncwarp();
        block_step(acc[2], m[1], b0 + row1);
        block_pack(r, acc[2]);
        block_store(hi, r);
        part_arrive<64>(barrier + 1);
        part_sync<64>(barrier + 2); /* warp 0 has read them */
    } else {
        part_sync<64>(barrier + 1);
        block_step(acc[2], m[1], b0 + row1);
        block_step(acc[1], m[0], b0 + row2 + col);
        block_step(acc[2], m[0], b0 + row2);
        part_arrive<64>(barrier + 2);
    }
    int there = tri_lane() - (tid_again() & 31) * 16; /* from this lane's place in T */
    inverse_store(s->cut + 16 * col0, at0 + there, acc[0]);
    inverse_store(s->cut + 16, hi + col + there, acc[1]);
    inverse_store(s->cut, hi + there, acc[2]);
    lo += p * col, hi += (3 - p) * col;
    uint32_t d[4];
    ldsm4(d, lo);
    inverse_store_diag(s->cut + 16 * p, lo + there, d);
    ldsm4(d, hi);
    inverse_store_diag(s->cut + 16 * (3 - p), hi + there, d);
}

#endif
