/* Small device helpers that every kernel file uses: bf16 packing, warp sums, vector loads. */
#ifndef PREFILLD_COMMON_CUH
#define PREFILLD_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels.h"

typedef __nv_bfloat16 bf16;

/* a in the low half: the element with the lower index. */
__device__ static inline uint32_t pack2(float a, float b)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

__device__ static inline float lo2(uint32_t x)
{
    return __uint_as_float(x << 16);
}

__device__ static inline float hi2(uint32_t x)
{
    return __uint_as_float(x & 0xffff0000u);
}

/* The same sum in every lane; the order is fixed. */
__device__ static inline float warp_sum(float x)
{
#pragma unroll
    for (int m = 16; m > 0; m >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, m);
    return x;
}

/* 2^x within 2 ulp, results below 2^-126 as 0. */
__device__ static inline float exp2_fast(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* x / (1 + e^-x), relative error some 2^-21. */
__device__ static inline float silu(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(r)
        : "f"(1.0f + exp2_fast(x * -1.4426950408889634f)));
    return x * r;
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

#endif
