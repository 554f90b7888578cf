/* Elementwise helpers of the CPU backend. */
#include "cpu.h"

#include <math.h>

void cpu_vec_exp(int32_t n, const float *x, float *y)
{
    for (int32_t i = 0; i < n; i++)
        y[i] = x[i] < -87 ? 0 : expf(x[i]);
}

void cpu_vec_silu(int32_t n, const float *x, float *y)
{
    for (int32_t i = 0; i < n; i++)
        y[i] = x[i] / (1 + expf(-x[i]));
}

float cpu_vec_dot(int32_t n, const float *x, const float *y)
{
    float sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}
