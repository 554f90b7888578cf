/* The matrix kernel on AVX2: 6 rows times 16 columns, one fused multiply-add an element and k,
 * in ascending k. bf16 and f16 weights become f32 once for a block of rows. */
#include "cpu_gemm.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#define AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE AVX2_TARGET static inline __attribute__((always_inline))

enum { ROWS = 6, K_BLOCK = 256, BLOCK_ROWS = 24 * ROWS };

static bool avx2_is_available(void)
{
    unsigned a, b, c, d;
    bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static size_t avx2_a_bytes(int32_t n_rows, int32_t n_k)
{
    return (size_t)n_rows * (size_t)n_k * sizeof(float);
}

/* [n_k][n_rows] */
static void avx2_pack_a(enum dtype dtype, int32_t n_rows, int32_t n_k, const float *const *rows,
                        void *dst)
{
    (void)dtype;
    float *d = dst;
    for (int32_t k = 0; k < n_k; k++)
        for (int32_t i = 0; i < n_rows; i++)
            *d++ = rows[i][k];
}

static size_t avx2_unpacked_bytes(int32_t n_k)
{
    return (size_t)n_k * PANEL * sizeof(float);
}

/* [n_k][16] f32 */
AVX2_TARGET static void avx2_unpack_w(enum dtype dtype, int32_t n_k, const void *panel,
                                      void *dst)
{
    const uint16_t *s = panel;
    float *d = dst;
    if (dtype == DTYPE_F16) {
        for (int32_t i = 0; i < n_k * PANEL; i += 8)
            _mm256_storeu_ps(d + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
        return;
    }
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    for (int32_t k = 0; k < n_k; k += 32, d += 32 * PANEL) {
        for (int32_t j = 0; j < 16 && k + j < n_k; j++, s += 2 * PANEL) {
            for (int32_t c = 0; c < PANEL; c += 8) {
                __m256i pairs = _mm256_loadu_si256((const __m256i *)(s + 2 * c));
                _mm256_storeu_si256((__m256i *)(d + j * PANEL + c),
                                    _mm256_slli_epi32(pairs, 16));
                if (k + j + 16 < n_k)
                    _mm256_storeu_si256((__m256i *)(d + (j + 16) * PANEL + c),
                                        _mm256_and_si256(pairs, high));
            }
        }
    }
}

/* n_rows is a constant of the caller's. */
AVX2_INLINE void multiply_rows(const struct cpu_gemm_tile *t, const int n_rows)
{
    __m256 sum[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < n_rows; i++) {
        sum[i][0] = t->sums ? _mm256_loadu_ps(t->sums + i * PANEL) : _mm256_setzero_ps();
        sum[i][1] = t->sums ? _mm256_loadu_ps(t->sums + i * PANEL + 8) : _mm256_setzero_ps();
    }
    const float *a = t->a, *w = t->w[0];
    for (int32_t k = 0; k < t->n_k; k++, a += n_rows, w += PANEL) {
        __m256 b0 = _mm256_loadu_ps(w), b1 = _mm256_loadu_ps(w + 8);
#pragma GCC unroll 6
        for (int i = 0; i < n_rows; i++) {
            __m256 x = _mm256_broadcast_ss(a + i);
            sum[i][0] = _mm256_fmadd_ps(x, b0, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(x, b1, sum[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < n_rows; i++) {
        float row[PANEL];
        bool is_whole = t->is_whole || t->n_cols == PANEL;
        float *c = is_whole ? t->c + i * t->ldc : row;
        _mm256_storeu_ps(c, sum[i][0]);
        _mm256_storeu_ps(c + 8, sum[i][1]);
        if (!is_whole)
            memcpy(t->c + i * t->ldc, row, (size_t)t->n_cols * sizeof(float));
    }
}

AVX2_TARGET static void avx2_kernel(enum dtype dtype, const struct cpu_gemm_tile *t)
{
    (void)dtype;
    switch (t->n_rows) {
#define CASE(n)                                                                                \
    case n:                                                                                    \
        multiply_rows(t, n);                                                                   \
        break
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
    }
}

const struct cpu_gemm_isa cpu_gemm_isa_avx2 = {
    .name = "avx2",
    .is_available = avx2_is_available,
    .tile_rows = ROWS,
    .tile_panels = 1,
    .k_block = K_BLOCK,
    .block_rows = BLOCK_ROWS,
    .a_bytes = avx2_a_bytes,
    .pack_a = avx2_pack_a,
    .unpack_w = avx2_unpack_w,
    .unpacked_bytes = avx2_unpacked_bytes,
    .reads_stored = 1u << DTYPE_F32,
    .kernel = avx2_kernel,
};

#endif
