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

/* This warp's V^T in accumulator layout: v[np][q] is (tokens 16 np + 8 (q / 2) .., rows
 * g + 8 (q & 1)). */
__device__ static inline void value_load(uint32_t v[4][4], uint32_t tile, int warp)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int np = 0; np < 4; np++)
        ldsm4_t(v[np], tile + tile_off(np * 16 + (lane >> 4) * 8 + (lane & 7),
                                       2 * warp + ((lane >> 3) & 1)));
}

/* f = V^T - eg * x as an A operand; the same arithmetic as gdn_delta.cu's residual. */
__device__ static inline void residual(uint32_t f[4][4], const float x[8][4],
                                       const uint32_t v[4][4], const float2 eg[8])
{
#pragma unroll
    for (int np = 0; np < 4; np++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float *w = &x[2 * np + (q >> 1)][2 * (q & 1)];
            float2 e = eg[2 * np + (q >> 1)];
            f[np][q] = pack2(fmaf(-e.x, w[0], lo2(v[np][q])), fmaf(-e.y, w[1], hi2(v[np][q])));
        }
}

/* The factors of this thread's tokens. */
__device__ static inline void tokens_load(float2 e[8], const float *by)
{
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
        e[nt] = *(const float2 *)&by[8 * nt + 2 * (threadIdx.x & 3)];
}

__device__ static inline void scale_tokens(float x[8][4], const float2 e[8])
{
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        x[nt][0] = __fmul_rn(x[nt][0], e[nt].x), x[nt][1] = __fmul_rn(x[nt][1], e[nt].y);
        x[nt][2] = __fmul_rn(x[nt][2], e[nt].x), x[nt][3] = __fmul_rn(x[nt][3], e[nt].y);
    }
}

__device__ static inline void pack64(uint32_t f[4][4], const float x[8][4])
{
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        frag_pack(f[ks], x[2 * ks], x[2 * ks + 1]);
}

/* O^T of this warpgroup to `tile` as [64 tokens, 64], then n rows to memory: by one bulk copy
 * that runs on, or row by row when the tile has rows of another sequence. The caller's barrier
 * is free to use; before `tile` is written again, out_reusable. */
__device__ static inline void out_store(const float O[8][4], uint8_t *tile,
                                        const CUtensorMap *map, const struct hopper_ctx *c,
                                        int half, int chunk, int64_t row, int t, int barrier)
{
    int lane = t & 31, warp = t >> 5, n = rows_of(c, chunk);
    uint32_t base = smem_addr(tile);
#pragma unroll
    for (int np = 0; np < 4; np++) {
        uint32_t r[4];
        frag_pack(r, O[2 * np], O[2 * np + 1]);
        stsm4_t(base + tile_off(np * 16 + (lane >> 4) * 8 + (lane & 7),
                                2 * warp + ((lane >> 3) & 1)),
                r);
    }
    fence_async();
    group_sync(barrier);
    if (n == K_CHUNK) {
        if (t == 0)
            tma_store3(map, tile, half * 64, c->h, c->tok + chunk * K_CHUNK);
        return;
    }
    bf16 *o = c->o + half * 64 + (int64_t)chunk * K_CHUNK * row;
    for (int i = t; i < n * 8; i += 128)
        *(uint4 *)(o + (i >> 3) * row + (i & 7) * 8) =
            *(const uint4 *)(tile + tile_off(i >> 3, i & 7));
}

/* All but the `PENDING` newest bulk stores of thread 0 have read their tiles. */
template <int PENDING> __device__ static inline void out_reusable(int t)
{
    if (t == 0)
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Body K_GDN_FUSED; o: the map of the output. */
cudaError_t gdn_fused(const struct k_gdn_delta *a, const CUtensorMap *o, cudaStream_t stream);

#endif
