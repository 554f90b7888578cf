/* The row-wise operations of the CPU backend: embedding, RMSNorm, SwiGLU, and the product with
 * a weight. Engine thread; rows are shared out over the pool. */
#include <math.h>
#include <string.h>

#include "cpu_gemm.h"
#include "cpu_impl.h"
#include "cpu_simd.h"

/* Rows that one item of a fan-out takes. */
enum { ROWS_PER_ITEM = 16 };

static int64_t row_items(int32_t n_rows)
{
    return ((int64_t)n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
}

static int32_t item_end(int64_t item, int32_t n_rows)
{
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    return end < n_rows ? (int32_t)end : n_rows;
}

/* ---- kernels ---- */

CPU_INLINE void bf16_row_body(int32_t n, const char *src, float *dst)
{
    for (int32_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, src + 2 * (size_t)i, 2);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(dst + i, &bits, 4);
    }
}
CPU_KERNEL(bf16_row, (int32_t n, const char *src, float *dst), (n, src, dst))

CPU_INLINE void add_square_body(int32_t n, float *x, const float *y, float *sum)
{
    vf acc[4] = {{0}};
    int32_t i = 0;
    for (; i + 4 * VEC <= n; i += 4 * VEC)
#pragma GCC unroll 4
        for (int32_t u = 0; u < 4; u++) {
            vf v = VF_LOAD(x + i + u * VEC);
            if (y) {
                v += VF_LOAD(y + i + u * VEC);
                VF_STORE(x + i + u * VEC, v);
            }
            acc[u] += v * v;
        }
    float rest = 0;
    for (; i < n; i++) {
        if (y)
            x[i] += y[i];
        rest += x[i] * x[i];
    }
    *sum = VF_SUM((acc[0] + acc[1]) + (acc[2] + acc[3])) + rest;
}
CPU_KERNEL(add_square, (int32_t n, float *x, const float *y, float *sum), (n, x, y, sum))

CPU_INLINE void scale_mul_body(int32_t n, float s, const float *x, const float *w, float *h)
{
    int32_t i = 0;
    for (; i + VEC <= n; i += VEC)
        VF_STORE(h + i, VF_LOAD(x + i) * s * VF_LOAD(w + i));
    for (; i < n; i++)
        h[i] = x[i] * s * w[i];
}
CPU_KERNEL(scale_mul, (int32_t n, float s, const float *x, const float *w, float *h),
           (n, s, x, w, h))

CPU_INLINE void mul_body(int32_t n, const float *x, float *c)
{
    int32_t i = 0;
    for (; i + VEC <= n; i += VEC)
        VF_STORE(c + i, VF_LOAD(c + i) * VF_LOAD(x + i));
    for (; i < n; i++)
        c[i] *= x[i];
}
CPU_KERNEL(mul, (int32_t n, const float *x, float *c), (n, x, c))

void cpu_rmsnorm_row(int32_t n, float eps, const float *x, const float *w, float *h)
{
    float sum;
    add_square(n, (float *)x, NULL, &sum);
    scale_mul(n, 1 / sqrtf(sum / (float)n + eps), x, w, h);
}

void cpu_swiglu_row(int32_t F, const float *gate, const float *up, float *c)
{
    cpu_vec_silu(F, gate, c);
    mul(F, up, c);
}

/* ---- operations ---- */

static void embed_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct op_embed *a = arg;
    size_t cols = a->w->cols;
    size_t row_bytes = cols * dtype_bytes(a->w->dtype);
    int32_t end = item_end(item, a->b->n_tokens);
    for (int32_t t = (int32_t)item * ROWS_PER_ITEM; t < end; t++) {
        const char *src = (const char *)a->w->embed + (size_t)a->b->tokens[t] * row_bytes;
        float *dst = a->x + (size_t)t * cols;
        if (a->w->dtype == DTYPE_F32) {
            memcpy(dst, src, row_bytes);
        } else if (a->w->dtype == DTYPE_BF16) {
            bf16_row((int32_t)cols, src, dst);
        } else {
            for (size_t i = 0; i < cols; i++) {
                uint16_t half;
                memcpy(&half, src + 2 * i, 2);
                dst[i] = cpu_f16_to_f32(half);
            }
        }
    }
}

void cpu_embed(struct backend *b, const struct op_embed *a)
{
    cpu_pool_run(cpu_impl_pool(b), row_items(a->b->n_tokens), embed_item, (void *)a);
}

static void rmsnorm_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct op_rmsnorm *a = arg;
    int32_t end = item_end(item, a->n_rows);
    for (int32_t r = (int32_t)item * ROWS_PER_ITEM; r < end; r++) {
        size_t at = (size_t)r * a->dim;
        float sum;
        add_square(a->dim, a->x + at, a->y ? (const float *)a->y + at : NULL, &sum);
        if (a->h)
            scale_mul(a->dim, 1 / sqrtf(sum / (float)a->dim + a->eps), a->x + at, a->w,
                      (float *)a->h + at);
    }
}

void cpu_rmsnorm(struct backend *b, const struct op_rmsnorm *a)
{
    cpu_pool_run(cpu_impl_pool(b), row_items(a->n_rows), rmsnorm_item, (void *)a);
}

static void swiglu_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct op_swiglu *a = arg;
    size_t F = a->F;
    int32_t end = item_end(item, a->n_rows);
    for (int32_t r = (int32_t)item * ROWS_PER_ITEM; r < end; r++) {
        const float *gu = (const float *)a->gu + 2 * F * r;
        cpu_swiglu_row(a->F, gu, gu + F, (float *)a->c + F * r);
    }
}

void cpu_swiglu(struct backend *b, const struct op_swiglu *a)
{
    cpu_pool_run(cpu_impl_pool(b), row_items(a->n_rows), swiglu_item, (void *)a);
}

void cpu_matmul(struct backend *b, const struct op_matmul *a)
{
    cpu_gemm(cpu_impl_pool(b), a->n_rows, a->a, a->w->cols, NULL, a->w, 0, a->c, a->ldc);
}
