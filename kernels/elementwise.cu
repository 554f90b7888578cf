/* Row-wise operations: embedding, residual sum with RMSNorm, SwiGLU, the gated norm of GDN.
 *
 *   embed    x = w[token]                                         gdn.md 1.9
 *   rmsnorm  x += y; h = x * rsqrt(mean x^2 + eps) * w            gdn.md 1.5
 *   swiglu   c = silu(gate) * up                                  gdn.md 1.6
 *   gdn_norm o = o * rsqrt(mean over V o^2 + eps) * w * silu(z)   gdn.md 1.1, step 7
 *
 * bf16 in and out, f32 arithmetic, one rounding at the end. All are limited by bytes: 16-byte
 * accesses, each tensor read and written once. A row's sum has one fixed order for a dim. */
#include "common.cuh"

// ---- kernels

enum { ROW_THREADS = 256, ROW_MAX_VEC = 4 };

__global__ static void __launch_bounds__(ROW_THREADS) embed_kernel(struct k_embed a)
{
    size_t t = blockIdx.x;
    const uint4 *src = (const uint4 *)((const bf16 *)a.w + (size_t)a.tokens[t] * a.M);
    for (int i = threadIdx.x; i < a.M / 8; i += ROW_THREADS) {
        float f[8];
        unpack8(src[i], f);
        store8(a.x + t * a.M + i * 8, f);
    }
}

/* One row a block; the row stays in registers between the sum and the scale. */
__global__ static void __launch_bounds__(ROW_THREADS) rmsnorm_kernel(struct k_rmsnorm a)
{
    __shared__ float part[ROW_THREADS / 32];
    size_t row = blockIdx.x;
    float *x = a.x + row * a.dim;
    float f[ROW_MAX_VEC][8], sum = 0;
#pragma unroll
    for (int j = 0; j < ROW_MAX_VEC; j++) {
        int i = (j * ROW_THREADS + threadIdx.x) * 8;
        if (i >= a.dim)
            continue;
        load8(x + i, f[j]);
        if (a.y) {
            float y[8];
            unpack8(*(const uint4 *)((const bf16 *)a.y + row * a.dim + i), y);
            for (int e = 0; e < 8; e++)
                f[j][e] += y[e];
            store8(x + i, f[j]);
        }
        for (int e = 0; e < 8; e++)
            sum = fmaf(f[j][e], f[j][e], sum);
    }
    if (!a.h)
        return;
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0)
        part[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < ROW_THREADS / 32; w++)
        sum += part[w];
    float scale = rsqrtf(sum / a.dim + a.eps);
#pragma unroll
    for (int j = 0; j < ROW_MAX_VEC; j++) {
        int i = (j * ROW_THREADS + threadIdx.x) * 8;
        if (i >= a.dim)
            continue;
        float w[8];
        load8(a.w + i, w);
        for (int e = 0; e < 8; e++)
            w[e] *= f[j][e] * scale;
        *(uint4 *)((bf16 *)a.h + row * a.dim + i) = pack8(w);
    }
}

__global__ static void __launch_bounds__(ROW_THREADS) swiglu_kernel(struct k_swiglu a)
{
    int64_t n_vec = a.F / 8;
    int64_t i = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    if (i >= a.n_rows * n_vec)
        return;
    int64_t row = i / n_vec, col = i - row * n_vec;
    const uint4 *gu = (const uint4 *)a.gu + row * 2 * n_vec;
    float g[8], u[8];
    unpack8(gu[col], g);
    unpack8(gu[n_vec + col], u);
    for (int e = 0; e < 8; e++)
        u[e] *= silu(g[e]);
    ((uint4 *)a.c)[i] = pack8(u);
}

/* Half a warp holds one head of one token, 8 values a lane. */
__global__ static void __launch_bounds__(ROW_THREADS) gdn_norm_kernel(struct k_gdn_norm a)
{
    int64_t unit = ((int64_t)blockIdx.x * ROW_THREADS + threadIdx.x) / 16;
    int sub = threadIdx.x & 15;
    bool live = unit < (int64_t)a.n_tokens * a.HV;
    int64_t t = unit / a.HV, h = unit - t * a.HV;
    uint4 *o = (uint4 *)a.o + unit * 16 + sub;
    float f[8] = {0}, z[8] = {0}, w[8], sum = 0;
    if (live) {
        unpack8(*o, f);
        unpack8(*(const uint4 *)((const bf16 *)a.z + t * a.ld + h * 128 + sub * 8), z);
    }
    for (int e = 0; e < 8; e++)
        sum = fmaf(f[e], f[e], sum);
#pragma unroll
    for (int m = 8; m > 0; m >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, m);
    float scale = rsqrtf(sum * (1.0f / 128) + a.eps);
    load8(a.w + sub * 8, w);
    for (int e = 0; e < 8; e++)
        f[e] *= scale * w[e] * silu(z[e]);
    if (live)
        *o = pack8(f);
}

// ---- launchers

extern "C" cudaError_t k_embed(const struct k_embed *a, cudaStream_t stream)
{
    if (a->M <= 0 || a->M % 8 || a->n_tokens < 0)
        return cudaErrorInvalidValue;
    if (a->n_tokens == 0)
        return cudaSuccess;
    embed_kernel<<<(unsigned)a->n_tokens, ROW_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_rmsnorm(const struct k_rmsnorm *a, cudaStream_t stream)
{
    if (a->dim <= 0 || a->dim % 8 || a->dim > ROW_THREADS * ROW_MAX_VEC * 8 || a->n_rows < 0)
        return cudaErrorInvalidValue;
    if (a->n_rows == 0)
        return cudaSuccess;
    rmsnorm_kernel<<<(unsigned)a->n_rows, ROW_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_swiglu(const struct k_swiglu *a, cudaStream_t stream)
{
    if (a->F <= 0 || a->F % 8 || a->n_rows < 0)
        return cudaErrorInvalidValue;
    int64_t n = (int64_t)a->n_rows * (a->F / 8);
    if (n == 0)
        return cudaSuccess;
    swiglu_kernel<<<(unsigned)ceil_div(n, ROW_THREADS), ROW_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_gdn_norm(const struct k_gdn_norm *a, cudaStream_t stream)
{
    if (a->HV <= 0 || a->ld % 8 || a->n_tokens < 0)
        return cudaErrorInvalidValue;
    int64_t n = (int64_t)a->n_tokens * a->HV * 16;
    if (n == 0)
        return cudaSuccess;
    gdn_norm_kernel<<<(unsigned)ceil_div(n, ROW_THREADS), ROW_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
