/* The matrix kernel on AVX-512: 14 rows times 32 columns, one fused multiply-add an element
 * and k, in ascending k. bf16 and f16 weights become f32 once for a block of rows. */
#include "cpu_gemm.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))
#define AVX512_INLINE AVX512_TARGET static inline __attribute__((always_inline))

enum { ROWS = 14, PANELS = 2, COLS = PANELS * PANEL, K_BLOCK = 256, BLOCK_ROWS = 18 * ROWS };

static bool avx512_is_available(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static size_t avx512_a_bytes(int32_t n_rows, int32_t n_k)
{
    return (size_t)n_rows * (size_t)n_k * sizeof(float);
}

/* [n_k][n_rows] */
static void avx512_pack_a(enum dtype dtype, int32_t n_rows, int32_t n_k,
                          const float *const *rows, void *dst)
{
    (void)dtype;
    float *d = dst;
    for (int32_t k = 0; k < n_k; k++)
        for (int32_t i = 0; i < n_rows; i++)
            *d++ = rows[i][k];
}

static size_t avx512_unpacked_bytes(int32_t n_k)
{
    return (size_t)n_k * PANEL * sizeof(float);
}

/* [n_k][16] f32 */
AVX512_TARGET static void avx512_unpack_w(enum dtype dtype, int32_t n_k, const void *panel,
                                          void *dst)
{
    const uint16_t *s = panel;
    float *d = dst;
    if (dtype == DTYPE_F16) {
        for (int32_t k = 0; k < n_k; k++, s += PANEL, d += PANEL)
            _mm512_storeu_ps(d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)s)));
        return;
    }
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int32_t k = 0; k < n_k; k += 32, d += 32 * PANEL) {
        for (int32_t j = 0; j < 16 && k + j < n_k; j++, s += 2 * PANEL) {
            __m512i pairs = _mm512_loadu_si512(s);
            _mm512_storeu_si512(d + j * PANEL, _mm512_slli_epi32(pairs, 16));
            if (k + j + 16 < n_k)
                _mm512_storeu_si512(d + (j + 16) * PANEL, _mm512_and_si512(pairs, high));
        }
    }
}

/* n_rows is a constant of the caller's. */
AVX512_INLINE void multiply_rows(const struct cpu_gemm_tile *t, const int n_rows)
{
    __m512 sum[ROWS][PANELS];
#pragma GCC unroll 14
    for (int i = 0; i < n_rows; i++) {
        sum[i][0] = t->sums ? _mm512_loadu_ps(t->sums + i * COLS) : _mm512_setzero_ps();
        sum[i][1] = t->sums ? _mm512_loadu_ps(t->sums + i * COLS + 16) : _mm512_setzero_ps();
    }
    const float *a = t->a, *w0 = t->w[0], *w1 = t->w[1];
    for (int32_t k = 0; k < t->n_k; k++, a += n_rows, w0 += PANEL, w1 += PANEL) {
        __m512 b0 = _mm512_loadu_ps(w0), b1 = _mm512_loadu_ps(w1);
#pragma GCC unroll 14
        for (int i = 0; i < n_rows; i++) {
            __m512 x = _mm512_set1_ps(a[i]);
            sum[i][0] = _mm512_fmadd_ps(x, b0, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(x, b1, sum[i][1]);
        }
    }
    int32_t cols = t->is_whole ? COLS : t->n_cols;
    __mmask16 m0 = cols >= 16 ? 0xffff : (__mmask16)((1u << cols) - 1);
    __mmask16 m1 = cols <= 16 ? 0 : (__mmask16)((1u << (cols - 16)) - 1);
#pragma GCC unroll 14
    for (int i = 0; i < n_rows; i++) {
        _mm512_mask_storeu_ps(t->c + i * t->ldc, m0, sum[i][0]);
        _mm512_mask_storeu_ps(t->c + i * t->ldc + 16, m1, sum[i][1]);
    }
}

AVX512_TARGET static void avx512_kernel(enum dtype dtype, const struct cpu_gemm_tile *t)
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
        CASE(7);
        CASE(8);
        CASE(9);
        CASE(10);
        CASE(11);
        CASE(12);
        CASE(13);
        CASE(14);
    }
}

const struct cpu_gemm_isa cpu_gemm_isa_avx512 = {
    .name = "avx512",
    .is_available = avx512_is_available,
    .tile_rows = ROWS,
    .tile_panels = PANELS,
    .k_block = K_BLOCK,
    .block_rows = BLOCK_ROWS,
    .a_bytes = avx512_a_bytes,
    .pack_a = avx512_pack_a,
    .unpack_w = avx512_unpack_w,
    .unpacked_bytes = avx512_unpacked_bytes,
    .reads_stored = 1u << DTYPE_F32,
    .kernel = avx512_kernel,
};

#endif
