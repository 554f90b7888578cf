/* Fills: poison, and random weights for a model without files.
 *
 * normal(seed, i): two 32-bit halves of splitmix64 of (seed, i) through Box and Muller; derived
 * here. Limit: arithmetic, some 60 instructions an element. */
#include "common.cuh"

// ---- kernels

enum { FILL_THREADS = 256 };

__device__ static inline float normal_at(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    float u = ((uint32_t)z + 1.0f) * 2.3283064e-10f, v = (uint32_t)(z >> 32) * 2.3283064e-10f;
    return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}

__global__ static void __launch_bounds__(FILL_THREADS)
    fill_normal_kernel(bf16 *p, int64_t n, int64_t first, uint64_t seed, float std)
{
    int64_t i = ((int64_t)blockIdx.x * FILL_THREADS + threadIdx.x) * 2;
    if (i + 1 < n)
        *(uint32_t *)(p + i) =
            pack2(std * normal_at(seed, first + i), std * normal_at(seed, first + i + 1));
    else if (i < n)
        p[i] = __float2bfloat16(std * normal_at(seed, first + i));
}

// ---- launchers

extern "C" cudaError_t k_fill_nan(void *p, size_t bytes, cudaStream_t stream)
{
    return cudaMemsetAsync(p, 0xff, bytes, stream);
}

extern "C" cudaError_t k_fill_normal(void *p, int64_t n, int64_t first, uint64_t seed,
                                     float std, cudaStream_t stream)
{
    int64_t blocks = ceil_div(n, 2 * FILL_THREADS);
    if (n < 0 || blocks > INT32_MAX)
        return cudaErrorInvalidValue;
    if (n == 0)
        return cudaSuccess;
    fill_normal_kernel<<<(unsigned)blocks, FILL_THREADS, 0, stream>>>((bf16 *)p, n, first, seed,
                                                                      std);
    return cudaGetLastError();
}
