/* Elementwise helpers of the CPU backend, sixteen at a time. A last, shorter vector is filled
 * up, so an element's bits do not depend on where it stands. */
#include "cpu.h"

#include <math.h>
#include <string.h>

#include "cpu_simd.h"

/* exp by x = n ln2 + r, |r| <= ln2 / 2: the Taylor series of e^r to r^7 (its rest is under
 * 0.35^8 / 8! = 6e-9), times 2^n in two factors, so that n may be 128. ln2 is split in two, the
 * first with 9 trailing zeros, so that n * ln2_high is exact. */
CPU_INLINE void vec_exp16(vf *v)
{
    vf x = *v;
    const float log2e = 0x1.715476p0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    const float to_int = 0x1.8p23f;
    vf t = x * log2e + to_int;
    vf n = t - to_int;
    vf r = x - n * ln2_high;
    r = r - n * ln2_low;
    vf p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi i = __builtin_convertvector(n, vi);
    vi half = i >> 1;
    vf y = p * (vf)((half + 127) << 23) * (vf)((i - half + 127) << 23);
    y = VF_SELECT(x > 88.72283f, VF_SET(INFINITY), y);
    *v = VF_SELECT(x < -87.0f, VF_SET(0.0f), y);
}

CPU_INLINE void vec_silu16(vf *v)
{
    vf e = -*v;
    vec_exp16(&e);
    *v = *v / (1.0f + e);
}

/* n < 16 floats of x, then zeros. */
CPU_INLINE void vec_load_part(vf *v, const float *x, int32_t n)
{
    float part[VEC] = {0};
    memcpy(part, x, (size_t)n * sizeof(float));
    *v = VF_LOAD(part);
}

#define VEC_MAP(fn16)                                                                          \
    int32_t i = 0;                                                                             \
    vf v;                                                                                      \
    for (; i + VEC <= n; i += VEC) {                                                           \
        v = VF_LOAD(x + i);                                                                    \
        fn16(&v);                                                                              \
        VF_STORE(y + i, v);                                                                    \
    }                                                                                          \
    if (i < n) {                                                                               \
        float part[VEC];                                                                       \
        vec_load_part(&v, x + i, n - i);                                                       \
        fn16(&v);                                                                              \
        VF_STORE(part, v);                                                                     \
        memcpy(y + i, part, (size_t)(n - i) * sizeof(float));                                  \
    }

CPU_INLINE void vec_exp_body(int32_t n, const float *x, float *y){VEC_MAP(vec_exp16)}

CPU_INLINE void vec_silu_body(int32_t n, const float *x, float *y){VEC_MAP(vec_silu16)}

CPU_INLINE void vec_dot_body(int32_t n, const float *x, const float *y, float *sum)
{
    vf s = {0};
    int32_t i = 0;
    for (; i + VEC <= n; i += VEC)
        s += VF_LOAD(x + i) * VF_LOAD(y + i);
    if (i < n) {
        vf a, b;
        vec_load_part(&a, x + i, n - i);
        vec_load_part(&b, y + i, n - i);
        s += a * b;
    }
    float lane[VEC];
    VF_STORE(lane, s);
    for (int half = VEC / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    }
    *sum = lane[0];
}

CPU_KERNEL(vec_exp, (int32_t n, const float *x, float *y), (n, x, y))
CPU_KERNEL(vec_silu, (int32_t n, const float *x, float *y), (n, x, y))
CPU_KERNEL(vec_dot, (int32_t n, const float *x, const float *y, float *sum), (n, x, y, sum))

void cpu_vec_exp(int32_t n, const float *x, float *y)
{
    vec_exp(n, x, y);
}

void cpu_vec_silu(int32_t n, const float *x, float *y)
{
    vec_silu(n, x, y);
}

float cpu_vec_dot(int32_t n, const float *x, const float *y)
{
    float sum;
    vec_dot(n, x, y, &sum);
    return sum;
}
