/* In front of attention: norm of q and k, partial rotation, keys and values to their pages.
 *
 * gdn.md 1.5. For token t at position s = start + its index in the piece, and each head of q
 * and k: y = x * rsqrt(mean over D x^2 + eps) * w (w holds 1 + w); then for i < R / 2, R =
 * rot_dim,
 *   y[i], y[i + R/2] = y[i] cos - y[i + R/2] sin, y[i + R/2] cos + y[i] sin, angle s * f[i].
 * bf16 in and out, f32 arithmetic, one rounding; sine and cosine to f32 accuracy at any
 * position.
 *
 * A warp has a token, 8 dims of a head a lane; block 8 tokens of one chunk of the map, grid
 * NC * 8, shared 8 KB of angles. A row's bits depend on the row and its position alone.
 * Limit: bytes, 2 * (2 HQ + 4 HK) * D a token. */
#include "attn.cuh"

// ---- kernels

/* HEADS: loaded together, to hide their latency. */
enum { PREP_THREADS = 256, PREP_TOKENS = PREP_THREADS / 32, HEADS = 4 };

struct prep_smem {
    float cos[PREP_TOKENS][ATTN_D / 2], sin[PREP_TOKENS][ATTN_D / 2];
};

/* This lane's 8 dims of a head, normed and rotated. */
__device__ static inline uint4 norm_rotate(uint4 x, const float w[8], const float *cos,
                                           const float *sin, int half, float eps)
{
    int lane = threadIdx.x & 31, lanes = half / 8;
    float f[8], sum = 0;
    unpack8(x, f);
    for (int e = 0; e < 8; e++)
        sum = fmaf(f[e], f[e], sum);
    float scale = rsqrtf(warp_sum(sum) * (1.0f / ATTN_D) + eps);
    for (int e = 0; e < 8; e++)
        f[e] *= scale * w[e];
    bool is_low = lane < lanes, is_turning = lane < 2 * lanes;
    int partner = is_low ? lane + lanes : is_turning ? lane - lanes : lane;
    int at = is_turning ? (is_low ? lane : lane - lanes) * 8 : 0;
    for (int e = 0; e < 8; e++) {
        float other = __shfl_sync(0xffffffffu, f[e], partner);
        float turned = f[e] * cos[at + e] + (is_low ? -other : other) * sin[at + e];
        f[e] = is_turning ? turned : f[e];
    }
    return pack8(f);
}

__global__ static void __launch_bounds__(PREP_THREADS) attn_prep_kernel(struct k_attn_prep a)
{
    __shared__ struct prep_smem s;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int chunk = blockIdx.x / (K_CHUNK / PREP_TOKENS), seq = a.b.chunk_seq[chunk];
    int i = a.b.chunk_index[chunk] * K_CHUNK +
            blockIdx.x % (K_CHUNK / PREP_TOKENS) * PREP_TOKENS + warp;
    int tok = a.b.cu_seqlens[seq] + i;
    if (tok >= a.b.cu_seqlens[seq + 1])
        return;
    int pos = a.b.start[seq] + i, half = a.d.rot_dim / 2;
    for (int k = lane; k < half; k += 32)
        sincosf((float)pos * a.inv_freq[k], &s.sin[warp][k], &s.cos[warp][k]);
    __syncwarp();

    uint4 *row = (uint4 *)((bf16 *)a.p + (int64_t)tok * a.d.ld) + lane;
    float w[8];
    load8(a.q_norm + lane * 8, w);
    for (int h = 0; h < a.d.HQ; h += HEADS) {
        uint4 x[HEADS];
#pragma unroll
        for (int j = 0; j < HEADS; j++)
            x[j] = row[min(h + j, a.d.HQ - 1) * 32];
#pragma unroll
        for (int j = 0; j < HEADS; j++)
            x[j] = norm_rotate(x[j], w, s.cos[warp], s.sin[warp], half, a.eps);
#pragma unroll
        for (int j = 0; j < HEADS; j++)
            if (h + j < a.d.HQ)
                row[(h + j) * 32] = x[j];
    }

    int P = a.kv.page_tokens;
    int page = a.kv.page_table[(int64_t)seq * a.kv.max_pages + pos / P];
    const uint4 *k = row + 2 * a.d.HQ * 32, *v = k + a.d.HK * 32;
    load8(a.k_norm + lane * 8, w);
    for (int h = 0; h < a.d.HK; h++) {
        int64_t at = k_kv_offset(&a.d, P, page, h, pos % P, lane * 8);
        uint4 value = v[h * 32];
        *(uint4 *)((bf16 *)a.kv.k + at) =
            norm_rotate(k[h * 32], w, s.cos[warp], s.sin[warp], half, a.eps);
        *(uint4 *)((bf16 *)a.kv.v + at) = value;
    }
}

// ---- launchers

extern "C" cudaError_t k_attn_prep(const struct k_attn_prep *a, cudaStream_t stream)
{
    if (!attn_dims_ok(&a->d, &a->kv) || a->d.rot_dim < 0 || a->d.rot_dim % 16 ||
        a->d.rot_dim > ATTN_D)
        return cudaErrorInvalidValue;
    int64_t n = (int64_t)a->b.n_chunks * (K_CHUNK / PREP_TOKENS);
    if (n > INT32_MAX)
        return cudaErrorInvalidValue;
    if (n == 0)
        return cudaSuccess;
    attn_prep_kernel<<<(unsigned)n, PREP_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
