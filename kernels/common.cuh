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

__device__ static inline void unpack8(uint4 u, float f[8])
{
    f[0] = lo2(u.x), f[1] = hi2(u.x), f[2] = lo2(u.y), f[3] = hi2(u.y);
    f[4] = lo2(u.z), f[5] = hi2(u.z), f[6] = lo2(u.w), f[7] = hi2(u.w);
}

__device__ static inline uint4 pack8(const float f[8])
{
    return make_uint4(pack2(f[0], f[1]), pack2(f[2], f[3]), pack2(f[4], f[5]),
                      pack2(f[6], f[7]));
}

__device__ static inline void load8(const float *p, float f[8])
{
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    f[0] = a.x, f[1] = a.y, f[2] = a.z, f[3] = a.w;
    f[4] = b.x, f[5] = b.y, f[6] = b.z, f[7] = b.w;
}

__device__ static inline void store8(float *p, const float f[8])
{
    ((float4 *)p)[0] = make_float4(f[0], f[1], f[2], f[3]);
    ((float4 *)p)[1] = make_float4(f[4], f[5], f[6], f[7]);
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

/* 1 / (1 + e^-x), relative error some 2^-21. */
__device__ static inline float sigmoid(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(r)
        : "f"(1.0f + exp2_fast(x * -1.4426950408889634f)));
    return r;
}

/* The sigmoids of both for the price of three special functions. Below 2^-63 one stays there,
 * so that the product of the denominators is finite. Bits of either depend on the other's. */
__device__ static inline float2 sigmoid2(float x, float y)
{
    x *= -1.4426950408889634f, y *= -1.4426950408889634f;
    x = 1.0f + exp2_fast(x > 63.0f ? 63.0f : x);
    y = 1.0f + exp2_fast(y > 63.0f ? 63.0f : y);
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * y));
    return make_float2(r * y, r * x);
}

__device__ static inline float silu(float x)
{
    return x * sigmoid(x);
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

#endif
