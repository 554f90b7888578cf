/* The matrix kernel in plain C, for processors without AVX2 and as the reference of the
 * others. Product and sum are rounded apart where the processor has no fused form. */
#include "cpu_gemm.h"

#include <string.h>

enum { ROWS = 4, K_BLOCK = 256 };

static bool plain_is_available(void)
{
    return true;
}

static size_t plain_a_bytes(int32_t n_rows, int32_t n_k)
{
    (void)n_rows;
    return (size_t)ROWS * (size_t)n_k * sizeof(float);
}

/* [n_k][ROWS], missing rows zero: a short tile runs the same code as a full one. */
static void plain_pack_a(enum dtype dtype, int32_t n_rows, int32_t n_k,
                         const float *const *rows, void *dst)
{
    (void)dtype;
    float *d = dst;
    for (int32_t k = 0; k < n_k; k++)
        for (int32_t i = 0; i < ROWS; i++)
            *d++ = i < n_rows ? rows[i][k] : 0;
}

static size_t plain_unpacked_bytes(int32_t n_k)
{
    return (size_t)n_k * PANEL * sizeof(float);
}

static void plain_unpack_w(enum dtype dtype, int32_t n_k, const void *panel, void *dst)
{
    const uint16_t *s = panel;
    float *d = dst;
    for (int32_t k = 0; k < n_k; k++) {
        for (int32_t j = 0; j < PANEL; j++) {
            if (dtype == DTYPE_BF16)
                *d++ = cpu_bf16_to_f32(s[cpu_bf16_at(k, j)]);
            else
                *d++ = cpu_f16_to_f32(s[(size_t)k * PANEL + j]);
        }
    }
}

static void plain_kernel(enum dtype dtype, const struct cpu_gemm_tile *t)
{
    (void)dtype;
    float sum[ROWS][PANEL] = {0};
    const float *a = t->a, *w = t->w[0];
    if (t->sums)
        memcpy(sum, t->sums, sizeof(sum));
    for (int32_t k = 0; k < t->n_k; k++, a += ROWS, w += PANEL)
        for (int32_t i = 0; i < ROWS; i++)
            for (int32_t j = 0; j < PANEL; j++)
                sum[i][j] += a[i] * w[j];
    for (int32_t i = 0; i < t->n_rows; i++)
        memcpy(t->c + i * t->ldc, sum[i], (size_t)t->n_cols * sizeof(float));
}

const struct cpu_gemm_isa cpu_gemm_isa_plain = {
    .name = "plain",
    .is_available = plain_is_available,
    .tile_rows = ROWS,
    .tile_panels = 1,
    .k_block = K_BLOCK,
    .block_rows = 128,
    .a_bytes = plain_a_bytes,
    .pack_a = plain_pack_a,
    .unpack_w = plain_unpack_w,
    .unpacked_bytes = plain_unpacked_bytes,
    .reads_stored = 1u << DTYPE_F32,
    .kernel = plain_kernel,
};
