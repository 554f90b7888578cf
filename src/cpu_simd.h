/* Sixteen floats at a time, and kernels compiled for several instruction sets.
 *
 * A kernel is a static function k_body(...) marked CPU_INLINE; CPU_KERNEL(k, params, args)
 * defines k(...), which runs the body compiled for AVX-512, AVX2 or the baseline, whichever the
 * machine has. The choice is the machine's alone, so bits never depend on the data. Plain
 * branches instead of ifunc resolvers: those run before a sanitizer's start-up. */
#ifndef PREFILLD_CPU_SIMD_H
#define PREFILLD_CPU_SIMD_H

#include <stdint.h>

enum { VEC = 16 };

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

/* In memory, at any float's address. */
typedef float vf_mem __attribute__((vector_size(64), aligned(4), may_alias));
#define VF_LOAD(p) ((vf) * (const vf_mem *)(p))
#define VF_STORE(p, v) (*(vf_mem *)(p) = (v))
/* All elements x: a broadcast, where (vf){0} + x would be an addition first. */
#define VF_SET(x)                                                                              \
    ({                                                                                         \
        float vf_x = (x);                                                                      \
        (vf){vf_x, vf_x, vf_x, vf_x, vf_x, vf_x, vf_x, vf_x,                                   \
             vf_x, vf_x, vf_x, vf_x, vf_x, vf_x, vf_x, vf_x};                                  \
    })
/* By element: a where the mask is all ones (as comparisons give it), else b; or else 0. */
#define VF_SELECT(mask, a, b) ((vf)(((vi)(a) & (mask)) | ((vi)(b) & ~(mask))))
#define VF_KEEP(mask, a) ((vf)((vi)(a) & (mask)))

#define CPU_INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
enum cpu_isa { CPU_ISA_BASE, CPU_ISA_AVX2, CPU_ISA_AVX512 };

static inline enum cpu_isa cpu_isa(void)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
        return CPU_ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return CPU_ISA_AVX2;
    return CPU_ISA_BASE;
}

#define CPU_KERNEL(name, params, args)                                                         \
    __attribute__((                                                                            \
        target("avx512f,avx512vl,avx512dq,avx512bw,fma"))) static void name##_avx512 params    \
    {                                                                                          \
        name##_body args;                                                                      \
    }                                                                                          \
    __attribute__((target("avx2,fma"))) static void name##_avx2 params                         \
    {                                                                                          \
        name##_body args;                                                                      \
    }                                                                                          \
    __attribute__((noinline)) static void name##_base params                                   \
    {                                                                                          \
        name##_body args;                                                                      \
    }                                                                                          \
    static inline void name params                                                             \
    {                                                                                          \
        enum cpu_isa isa = cpu_isa();                                                          \
        if (isa == CPU_ISA_AVX512)                                                             \
            name##_avx512 args;                                                                \
        else if (isa == CPU_ISA_AVX2)                                                          \
            name##_avx2 args;                                                                  \
        else                                                                                   \
            name##_base args;                                                                  \
    }
#else
#define CPU_KERNEL(name, params, args)                                                         \
    static void name params                                                                    \
    {                                                                                          \
        name##_body args;                                                                      \
    }
#endif

/* The sum of a vector's elements, in one fixed order. */
#define VF_SUM(v)                                                                              \
    ({                                                                                         \
        vf vf_sum_v = (v);                                                                     \
        float vf_sum = 0;                                                                      \
        for (int vf_i = 0; vf_i < VEC; vf_i++)                                                 \
            vf_sum += vf_sum_v[vf_i];                                                          \
        vf_sum;                                                                                \
    })

#endif
