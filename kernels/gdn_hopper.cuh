/* What the Hopper bodies of the gated delta rule share: where a block works, the state in
 * registers, the steps between products, the way of the output to memory. */
#ifndef PREFILLD_GDN_HOPPER_CUH
#define PREFILLD_GDN_HOPPER_CUH

#include "gdn_delta.cuh"
#include "hopper.cuh"

/* Tensor maps over [T, heads, 128]; boxes of 64 columns x 1 head x 64 tokens. */
struct gdn_maps {
    CUtensorMap q, k, v, o;
};

/* Where a block works. */
struct hopper_ctx {
    int h, kh;
    int tok; /* first token of the sequence in the batch */
    int len, n_chunks;
    int first;    /* flat chunk, the sequence's first */
    int64_t unit; /* first * HV + h */
    bf16 *o;      /* token 0, head h */
    float *S;     /* slot, head h */
    bool fresh;
};

__device__ static inline struct hopper_ctx hopper_context(const struct k_gdn_delta *a, int seq,
                                                          int h)
{
    struct hopper_ctx c;
    c.h = h;
    c.kh = h / (a->d.HV / a->d.H);
    c.tok = a->b.cu_seqlens[seq];
    c.len = a->b.cu_seqlens[seq + 1] - c.tok;
    c.n_chunks = (c.len + K_CHUNK - 1) / K_CHUNK;
    c.first = a->b.seq_first[seq];
    c.unit = (int64_t)c.first * a->d.HV + h;
    c.o = (bf16 *)a->o + ((int64_t)c.tok * a->d.HV + h) * GDN_D;
    c.S = gdn_state(a, a->b.slots[seq], h);
    c.fresh = a->b.start[seq] == 0;
    return c;
}

__device__ static inline int rows_of(const struct hopper_ctx *c, int chunk)
{
    return min(c->len - chunk * K_CHUNK, (int)K_CHUNK);
}

/* This warpgroup's S^T, [64 V, 128 K], of a head's; t: thread of the warpgroup. */
__device__ static inline float *state_at(float *S, int half, int t)
{
    return S + (half * 64 + (t >> 5) * 16 + ((t & 31) >> 2)) * GDN_D + 2 * (t & 3);
}

__device__ static inline void state_load(float S[16][4], const struct hopper_ctx *c, int half,
                                         int t)
{
    const float *p = state_at(c->S, half, t);
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
        float2 x = make_float2(0, 0), y = x;
        if (!c->fresh) {
            x = *(const float2 *)(p + nt * 8);
            y = *(const float2 *)(p + nt * 8 + 8 * GDN_D);
        }
        S[nt][0] = x.x, S[nt][1] = x.y, S[nt][2] = y.x, S[nt][3] = y.y;
    }
}

__device__ static inline void state_store(const float S[16][4], float *to, int half, int t)
{
    float *p = state_at(to, half, t);
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
        *(float2 *)(p + nt * 8) = make_float2(S[nt][0], S[nt][1]);
        *(float2 *)(p + nt * 8 + 8 * GDN_D) = make_float2(S[nt][2], S[nt][3]);
    }
}

/* Accumulators whose columns are two tokens, each times its factor. */
__device__ static inline void scale2(float x[4], float2 by)
{
    x[0] = __fmul_rn(x[0], by.x), x[1] = __fmul_rn(x[1], by.y);
    x[2] = __fmul_rn(x[2], by.x), x[3] = __fmul_rn(x[3], by.y);
}

/* Factors of this thread's two tokens 8 nt + 2 t and + 1, from registers or from a table. */
__device__ static inline float2 factor_at(const float2 e[8], int nt)
{
    return e[nt];
}

__device__ static inline float2 factor_at(const float *table, int nt)
{
    return *(const float2 *)&table[8 * nt + 2 * (threadIdx.x & 3)];
}

/* x's columns are tokens: each times its factor. */
template <typename E> __device__ static inline void scale_tokens(float x[8][4], E by)
{
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
        scale2(x[nt], factor_at(by, nt));
}

/* Where the 8x8 matrices of V or O of a lane of a warpgroup's warp begin in a tile [64 tokens,
 * 64]; 16 tokens further: + 2048. */
__device__ static inline uint32_t corner_off(int lane, int warp)
{
    return tile_off((lane >> 4) * 8 + (lane & 7), 2 * warp + ((lane >> 3) & 1));
}

__device__ static inline void pack64(uint32_t f[4][4], const float x[8][4])
{
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        frag_pack(f[ks], x[2 * ks], x[2 * ks + 1]);
}

/* x = S^T B^T, [64, 64]; sb: S^T packed on the way. B: two tiles. */
__device__ static inline void wg_state(float x[8][4], uint32_t sb[8][4], const float S[16][4],
                                       uint32_t tile)
{
#pragma unroll
    for (int ks = 0; ks < 8; ks++)
        frag_pack(sb[ks], S[2 * ks], S[2 * ks + 1]);
    wg_fence();
    wg_kmajor<8>(x, sb, tile, 0);
}

/* Tokens 16 C .. + 15 of R^T = V^T - eg W^T. x: W^T, then R^T; v: V^T as pairs of rows g and g
 * + 8, of tokens 8 further likewise. */
template <int C, typename E>
__device__ static inline void residual16(float x[8][4], const uint32_t v[4], E eg)
{
#pragma unroll
    for (int q = 0; q < 4; q++) {
        int nt = 2 * C + (q >> 1);
        float2 e = factor_at(eg, nt);
        float *w = &x[nt][2 * (q & 1)];
        w[0] = fmaf(-e.x, w[0], lo2(v[q])), w[1] = fmaf(-e.y, w[1], hi2(v[q]));
    }
}

/* Vn^T = R^T A^T, in steps of 16 tokens: their products begin while the next ones' R is formed.
 * x: W^T, then R^T. V^T of step C is v[C], or with FROM_TILE v[0], read from a tile a step
 * ahead, for the first step by the caller. */
template <bool FROM_TILE, int C = 0, typename E>
__device__ static inline void wg_solve(float y[8][4], float x[8][4], uint32_t v[][4],
                                       uint32_t tile, E eg, uint32_t A)
{
    residual16<C>(x, v[FROM_TILE ? 0 : C], eg);
    if constexpr (FROM_TILE && C < 3)
        ldsm4_t(v[0], tile + (C + 1) * 2048);
    wg_fence();
    wg_tri<C>(y, x + 2 * C, A);
    if constexpr (C < 3)
        wg_solve<FROM_TILE, C + 1>(y, x, v, tile, eg, A);
}

/* S^T += (el Vn)^T K; y: Vn^T, then el Vn^T; f: where it is packed. K: two tiles. */
__device__ static inline void wg_update(float S[16][4], uint32_t f[4][4], float y[8][4],
                                        const float *el, uint32_t K)
{
    uint64_t d = desc_nmajor(K);
#pragma unroll
    for (int ks = 0; ks < 4; ks++) {
        scale2(y[2 * ks], factor_at(el, 2 * ks));
        scale2(y[2 * ks + 1], factor_at(el, 2 * ks + 1));
        frag_pack(f[ks], y[2 * ks], y[2 * ks + 1]);
        wg_fence();
        wg_n128(S, f[ks], d + ks * 128);
    }
}

/* The first n of a chunk's rows from `tile` to memory, by thread t of n_threads: where the tile
 * also has rows of another sequence. row: elements between two tokens. */
__device__ static inline void out_rows(const uint8_t *tile, const struct hopper_ctx *c,
                                       int half, int chunk, int64_t row, int n, int t,
                                       int n_threads)
{
    bf16 *o = c->o + half * 64 + (int64_t)chunk * K_CHUNK * row;
    for (int i = t; i < n * 8; i += n_threads)
        *(uint4 *)(o + (i >> 3) * row + (i & 7) * 8) =
            *(const uint4 *)(tile + tile_off(i >> 3, i & 7));
}

/* Body K_GDN_FUSED; o: the map of the output. */
cudaError_t gdn_fused(const struct k_gdn_delta *a, const CUtensorMap *o, cudaStream_t stream);

#endif
