/* GDN, before the delta rule: convolution, SiLU, l2norm, gates, convolution state.
 *
 * gdn.md 1.1, steps 2 to 4. For channel c of q | k | v and token t of a sequence:
 *   y = silu(sum_{i=0..3} w[c, i] * p[t - 3 + i, c]), inputs before the sequence's start from
 *   its state (or 0 when the piece starts its request);
 *   q, k: y * rsqrt(sum over the head y^2 + 1e-6), q also * 128^-0.5; v: y;
 *   beta = sigmoid(b), g = -exp(A_log) * softplus(a + dt_bias), softplus linear above 20.
 * bf16 in and out, all arithmetic f32; q, k, v are rounded once, after the norm.
 *
 * Block: one chunk of 64 tokens x one head of 128 channels; 4 warps of 16 tokens, 4 channels a
 * lane, all 19 rows loaded before the first use. One more block a chunk does the gates, and N /
 * 4 more at the end write the states of empty sequences. The warp that reads a sequence's old
 * state (first 16 tokens of its first chunk) also writes the new one, from p itself: no race
 * between blocks. The warp of a chunk's last 16 tokens holds the window behind the chunk, and
 * writes it to the slot that is to keep it. Every lane computes all its tokens and stores those
 * that are there: sums over a head need the whole warp. Limit: bytes, 4 * conv_dim a token;
 * 3/16 more reads, and the weights, come from L1. */
#include "common.cuh"

// ---- kernels

enum { CONV_THREADS = 128, CONV_TOKENS = 16, CONV_DIM = 128 };

__device__ static void gates(const struct k_gdn_conv *a, int64_t tok, int n)
{
    const bf16 *p = (const bf16 *)a->p + (int64_t)(2 * a->d.H + 2 * a->d.HV) * CONV_DIM;
    for (int i = threadIdx.x; i < n * a->d.HV; i += CONV_THREADS) {
        int64_t t = tok + i / a->d.HV;
        int h = i % a->d.HV;
        float b = __bfloat162float(p[t * a->d.ld + h]);
        float x = __bfloat162float(p[t * a->d.ld + a->d.HV + h]) + a->dt_bias[h];
        float sp = x > 20.0f ? x : log1pf(expf(x));
        a->beta[t * a->d.HV + h] = 1.0f / (1.0f + expf(-b));
        a->g[t * a->d.HV + h] = -expf(a->A_log[h]) * sp;
    }
}

/* The first three inputs of a sequence of `len` tokens that begins at `tok`, from its state,
 * and its new state. For this lane's channels of p and of the slot. */
__device__ static inline void conv_state(const struct k_gdn_conv *a, int seq, int channel,
                                         int tok, int len, uint2 in[3])
{
    int64_t row = (int64_t)(2 * a->d.H + a->d.HV) * CONV_DIM;
    bf16 *state = (bf16 *)a->conv_state + a->b.slots[seq] * 3 * row + channel;
    const bf16 *p = (const bf16 *)a->p + channel;
    bool fresh = a->b.start[seq] == 0;
    uint2 last[3];
#pragma unroll
    for (int i = 0; i < 3; i++)
        in[i] = fresh ? make_uint2(0, 0) : *(const uint2 *)(state + i * row);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        int t = len - 3 + i;
        if (t >= 0)
            last[i] = *(const uint2 *)(p + (int64_t)(tok + t) * a->d.ld);
        else /* t is i - 2 or i - 1: the state's row behind this one */
            last[i] = len == 1 ? in[i + 1 < 3 ? i + 1 : 2] : in[2];
    }
#pragma unroll
    for (int i = 0; i < 3; i++)
        *(uint2 *)(state + i * row) = last[i];
}

/* The window behind a whole chunk to the slot that keeps it: the inputs of its last three
 * tokens, of this lane's channels. */
__device__ static inline void conv_save(const struct k_gdn_conv *a, int slot, int channel,
                                        const uint2 last[3])
{
    int64_t row = (int64_t)(2 * a->d.H + a->d.HV) * CONV_DIM;
    bf16 *state = (bf16 *)a->conv_state + slot * 3 * row + channel;
#pragma unroll
    for (int i = 0; i < 3; i++)
        *(uint2 *)(state + i * row) = last[i];
}

/* A sequence without tokens: its state becomes zeros when fresh, else it stays. */
__device__ static void empty_state(const struct k_gdn_conv *a, int seq)
{
    if (seq >= a->b.n_seqs || a->b.cu_seqlens[seq + 1] > a->b.cu_seqlens[seq] ||
        a->b.start[seq] != 0)
        return;
    int64_t n = 3LL * (2 * a->d.H + a->d.HV) * CONV_DIM;
    bf16 *s = (bf16 *)a->conv_state + a->b.slots[seq] * n;
    for (int64_t i = (threadIdx.x & 31) * 4; i < n; i += 128)
        *(uint2 *)(s + i) = make_uint2(0, 0);
}

__device__ static inline void unpack4(uint2 u, float f[4])
{
    f[0] = lo2(u.x), f[1] = hi2(u.x), f[2] = lo2(u.y), f[3] = hi2(u.y);
}

/* silu(conv) of CONV_TOKENS tokens, n of which are there, in a lane's 4 channels; with scale
 * also normed over the head and times it. Token i of the head goes to out + i * row. */
__device__ static inline void conv_tokens(const uint2 in[CONV_TOKENS + 3], const float4 w[4],
                                          int n, float scale, bf16 *out, int64_t row)
{
    float x[4][4]; /* the taps' inputs; token i's own in [(i + 3) % 4] */
#pragma unroll
    for (int i = 0; i < 3; i++)
        unpack4(in[i], x[i]);
#pragma unroll
    for (int i = 0; i < CONV_TOKENS; i++) {
        float y[4];
        unpack4(in[i + 3], x[(i + 3) % 4]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float s = w[e].x * x[i % 4][e];
            s = fmaf(w[e].y, x[(i + 1) % 4][e], s);
            s = fmaf(w[e].z, x[(i + 2) % 4][e], s);
            y[e] = silu(fmaf(w[e].w, x[(i + 3) % 4][e], s));
        }
        if (scale != 0) {
            float sum = 0;
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum = fmaf(y[e], y[e], sum);
            float f = rsqrtf(warp_sum(sum) + 1e-6f) * scale;
#pragma unroll
            for (int e = 0; e < 4; e++)
                y[e] *= f;
        }
        if (i < n)
            *(uint2 *)(out + i * row) = make_uint2(pack2(y[0], y[1]), pack2(y[2], y[3]));
    }
}

__global__ static void __launch_bounds__(CONV_THREADS) gdn_conv_kernel(struct k_gdn_conv a)
{
    int n_heads = 2 * a.d.H + a.d.HV;
    int chunk = blockIdx.x / (n_heads + 1), head = blockIdx.x % (n_heads + 1);
    if (chunk >= a.b.n_chunks) {
        int extra = blockIdx.x - a.b.n_chunks * (n_heads + 1);
        empty_state(&a, extra * (CONV_THREADS / 32) + (threadIdx.x >> 5));
        return;
    }
    int seq = a.b.chunk_seq[chunk], first = a.b.chunk_tok[chunk];
    int index = a.b.chunk_index[chunk], save = a.b.save_slots[chunk];
    if (head == n_heads) {
        gates(&a, first, min(a.b.cu_seqlens[seq + 1] - first, K_CHUNK));
        return;
    }
    int lane4 = threadIdx.x % 32 * 4, channel = head * CONV_DIM + lane4,
        part = threadIdx.x / 32;
    int64_t tok = first + part * CONV_TOKENS;
    /* Before it is known where the sequence ends: rows of others are read and not used. */
    const bf16 *p = (const bf16 *)a.p + channel;
    uint2 in[CONV_TOKENS + 3];
#pragma unroll
    for (int i = 0; i < CONV_TOKENS + 3; i++) {
        int64_t t = min(max(tok - 3 + i, (int64_t)0), (int64_t)a.b.n_tokens - 1);
        in[i] = *(const uint2 *)(p + t * a.d.ld);
    }
    float4 w[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
        w[e] = ((const float4 *)a.conv_w)[channel + e];
    int end = a.b.cu_seqlens[seq + 1], n = min(end - (int)tok, (int)CONV_TOKENS);
    if (index == 0 && part == 0 && n > 0)
        conv_state(&a, seq, channel, first, end - first, in);
    if (save >= 0 && part == K_CHUNK / CONV_TOKENS - 1)
        conv_save(&a, save, channel, in + CONV_TOKENS);
    __syncwarp();
    if (head >= 2 * a.d.H) {
        bf16 *v = (bf16 *)a.v + (tok * a.d.HV + head - 2 * a.d.H) * CONV_DIM + lane4;
        conv_tokens(in, w, n, 0, v, (int64_t)a.d.HV * CONV_DIM);
        return;
    }
    bool is_q = head < a.d.H;
    bf16 *qk = (bf16 *)(is_q ? a.q : a.k);
    qk += (tok * a.d.H + head - (is_q ? 0 : a.d.H)) * CONV_DIM + lane4;
    conv_tokens(in, w, n, is_q ? 0.08838834764831845f : 1.0f, qk, (int64_t)a.d.H * CONV_DIM);
}

// ---- launchers

extern "C" cudaError_t k_gdn_conv(const struct k_gdn_conv *a, cudaStream_t stream)
{
    if (a->d.H <= 0 || a->d.HV <= 0 || a->d.HV % a->d.H || a->d.ld % 8)
        return cudaErrorInvalidValue;
    int64_t n = (int64_t)a->b.n_chunks * (2 * a->d.H + a->d.HV + 1) +
                ceil_div(a->b.n_seqs, CONV_THREADS / 32);
    if (n == 0)
        return cudaSuccess;
    if (n > INT32_MAX)
        return cudaErrorInvalidValue;
    gdn_conv_kernel<<<(unsigned)n, CONV_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
