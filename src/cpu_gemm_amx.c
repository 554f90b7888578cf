/* The matrix kernel on AMX, exact to f32.
 *
 * An f32 is exactly the sum of three bf16 (8 significant bits each): hi, the next 8 bits, the
 * last 8. So a product with a bf16 weight is three bf16 products, each exact in f32, summed in
 * f32 by TDPBF16PS. An f16 weight is two parts and an f32 weight three; products of parts i and
 * j with i + j > 2 are below 2^-24 of the whole (parts are rounded to nearest, so part i is at
 * most 2^-9i of it) and are left out: 5 and 6 products.
 *
 * Order: each 32 of k in turn; inside, smallest products first, each adding 16 pairs to the
 * accumulator as the instruction does. The instruction takes subnormal bf16 for zero, which
 * loses at most 2^-126 of an operand.
 *
 * Infinity splits into infinity and NaN parts: what was not finite stays so. */
#include "cpu_gemm.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_TARGET                                                                             \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

enum {
    ROWS = 16,
    PANELS = 4,
    STEP = 32, /* k of one instruction */
    TILE_BYTES = 1024,
    A_PARTS = 3,
    K_BLOCK = 1024
};

/* Asks Linux for the right to use tile data (since 5.16), once for the whole process. */
static bool amx_is_available(void)
{
    enum { REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 22 & 1))
        return false;
    return syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XTILEDATA) == 0;
}

static size_t amx_a_bytes(int32_t n_rows, int32_t n_k)
{
    (void)n_rows;
    return (size_t)ceil_div(n_k, STEP) * A_PARTS * TILE_BYTES;
}

/* The bf16 nearest to each x, as f32; the one below in size where that would overflow, so that
 * finite stays finite. */
AMX_TARGET static inline __m512 round_bf16(__m512 x)
{
    __m512i bits = _mm512_castps_si512(x);
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 fits = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0x7f7f8000));
    bits = _mm512_mask_add_epi32(bits, fits, bits, _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(bits, high));
}

/* [16][2] bf16: the high halves of x and y. */
AMX_TARGET static inline __m512i pair_up(__m512 x, __m512 y)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
    /* low | (y & high) */
    return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(y), high, 0xf8);
}

/* The parts of 16 pairs, part i to dst + i tiles. Cut short instead of rounded, they are as
 * exact while no product is left out, and cheaper. */
AMX_TARGET static inline __attribute__((always_inline)) void
split_pairs(__m512 x, __m512 y, int parts, bool round, uint8_t *dst)
{
    const __m512 high = _mm512_castsi512_ps(_mm512_set1_epi32((int)0xffff0000));
    for (int i = 0; i < parts; i++) {
        _mm512_store_si512(dst + i * TILE_BYTES, i < parts - 1 && round
                                                     ? pair_up(round_bf16(x), round_bf16(y))
                                                     : pair_up(x, y));
        x = _mm512_sub_ps(x, round ? round_bf16(x) : _mm512_and_ps(x, high));
        y = _mm512_sub_ps(y, round ? round_bf16(y) : _mm512_and_ps(y, high));
    }
}

AMX_TARGET static inline __mmask16 mask_of(int32_t n)
{
    return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

/* [steps][3 parts][16 rows][16 pairs][2] bf16; missing rows are left as they are, since no
 * row's result depends on another. */
AMX_TARGET static inline __attribute__((always_inline)) void
pack_steps(bool round, int32_t n_rows, int32_t n_k, const float *const *rows, uint8_t *d)
{
    for (int32_t k = 0; k < n_k; k += STEP, d += A_PARTS * TILE_BYTES) {
        __mmask16 mx = mask_of(n_k - k), my = mask_of(n_k - k - 16);
        for (int32_t i = 0; i < n_rows; i++)
            split_pairs(_mm512_maskz_loadu_ps(mx, rows[i] + k),
                        _mm512_maskz_loadu_ps(my, rows[i] + k + 16), A_PARTS, round,
                        d + i * 64);
    }
}

AMX_TARGET static void amx_pack_a(enum dtype dtype, int32_t n_rows, int32_t n_k,
                                  const float *const *rows, void *dst)
{
    if (dtype == DTYPE_BF16)
        pack_steps(false, n_rows, n_k, rows, dst);
    else
        pack_steps(true, n_rows, n_k, rows, dst);
}

static size_t amx_unpacked_bytes(int32_t n_k)
{
    return (size_t)ceil_div(n_k, STEP) * 3 * TILE_BYTES;
}

/* Columns k.. of a panel; zeros past n_k. */
AMX_TARGET static inline __attribute__((always_inline)) __m512
load_w(enum dtype dtype, const void *panel, int32_t k, int32_t n_k)
{
    if (k >= n_k)
        return _mm512_setzero_ps();
    if (dtype == DTYPE_F32)
        return _mm512_loadu_ps((const float *)panel + (size_t)k * PANEL);
    const uint16_t *h = (const uint16_t *)panel + (size_t)k * PANEL;
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)h));
}

/* dtype is a constant of the caller's; [steps][parts][16 pairs][16][2] bf16. */
AMX_TARGET static inline __attribute__((always_inline)) void
unpack_steps(enum dtype dtype, int32_t n_k, const void *panel, uint8_t *d)
{
    enum { AHEAD = 4 * STEP }; /* the splitting leaves the processor no room to look ahead */
    const int parts = dtype == DTYPE_F16 ? 2 : 3;
    const int32_t row_bytes = PANEL * (int32_t)dtype_bytes(dtype);
    for (int32_t k = 0; k < n_k; k += STEP, d += parts * TILE_BYTES) {
        const char *ahead = (const char *)panel + (size_t)(k + AHEAD) * row_bytes;
        for (int32_t j = 0; j < STEP * row_bytes; j += 64)
            _mm_prefetch(ahead + j, _MM_HINT_T0);
        for (int32_t j = 0; j < 16; j++)
            split_pairs(load_w(dtype, panel, k + j, n_k), load_w(dtype, panel, k + j + 16, n_k),
                        parts, true, d + j * 64);
    }
}

AMX_TARGET static void amx_unpack_w(enum dtype dtype, int32_t n_k, const void *panel, void *dst)
{
    if (dtype == DTYPE_F16)
        unpack_steps(DTYPE_F16, n_k, panel, dst);
    else
        unpack_steps(DTYPE_F32, n_k, panel, dst);
}

/* Tiles 0-3 sums, 4-6 parts of a, 7 a part of w. Tiles that hold rows of a are as high as the
 * block has rows. */
AMX_TARGET static void amx_enter(int32_t n_rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = 64;
        c.rows[i] = i < 7 && n_rows < ROWS ? (uint8_t)n_rows : ROWS;
    }
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&c);
}

AMX_TARGET static void amx_leave(void)
{
    _tile_release();
}

/* The sums of n panels stand in tiles 0 to n - 1. */
#define EACH_PANEL(n, what)                                                                    \
    do {                                                                                       \
        what(0);                                                                               \
        if ((n) > 1)                                                                           \
            what(1);                                                                           \
        if ((n) > 2)                                                                           \
            what(2);                                                                           \
        if ((n) > 3)                                                                           \
            what(3);                                                                           \
    } while (0)

/* Part `part` of w, for each panel, times the parts of a that go with it. Going through the
 * panels for each part keeps apart the products that wait for each other. */
#define LOAD_W(p, part) _tile_loadd(7, w[p] + (part)*TILE_BYTES, 64)
#define PART_0(p)                                                                              \
    LOAD_W(p, 0);                                                                              \
    _tile_dpbf16ps(p, 6, 7);                                                                   \
    _tile_dpbf16ps(p, 5, 7);                                                                   \
    _tile_dpbf16ps(p, 4, 7)
#define PART_1(p)                                                                              \
    LOAD_W(p, 1);                                                                              \
    _tile_dpbf16ps(p, 5, 7);                                                                   \
    _tile_dpbf16ps(p, 4, 7)
#define PART_2(p)                                                                              \
    LOAD_W(p, 2);                                                                              \
    _tile_dpbf16ps(p, 4, 7)
#define ADVANCE(p) w[p] += parts * TILE_BYTES
AMX_TARGET static inline __attribute__((always_inline)) void
run_steps(const struct cpu_gemm_tile *t, int n, int parts)
{
    const uint8_t *a = t->a;
    const uint8_t *w[PANELS] = {t->w[0], t->w[1], t->w[2], t->w[3]};
    for (int32_t k = 0; k < t->n_k; k += STEP, a += A_PARTS * TILE_BYTES) {
        _tile_loadd(4, a, 64);
        _tile_loadd(5, a + TILE_BYTES, 64);
        _tile_loadd(6, a + 2 * TILE_BYTES, 64);
        if (parts > 2)
            EACH_PANEL(n, PART_2);
        if (parts > 1)
            EACH_PANEL(n, PART_1);
        EACH_PANEL(n, PART_0);
        EACH_PANEL(n, ADVANCE);
    }
}

AMX_TARGET static inline __attribute__((always_inline)) void
run_panels(const struct cpu_gemm_tile *t, float *c, int64_t ldc, int n, int parts)
{
#define CLEAR(p) _tile_zero(p)
#define LOAD_SUMS(p) _tile_loadd(p, t->sums + (p)*PANEL, PANELS * PANEL * 4)
#define STORE_C(p) _tile_stored(p, c + (p)*PANEL, ldc * 4)
    if (t->sums)
        EACH_PANEL(n, LOAD_SUMS);
    else
        EACH_PANEL(n, CLEAR);
    run_steps(t, n, parts);
    EACH_PANEL(n, STORE_C);
}

AMX_TARGET static inline __attribute__((always_inline)) void
run_parts(const struct cpu_gemm_tile *t, float *c, int64_t ldc, int parts)
{
    switch (ceil_div(t->n_cols, PANEL)) {
    case 1:
        run_panels(t, c, ldc, 1, parts);
        break;
    case 2:
        run_panels(t, c, ldc, 2, parts);
        break;
    case 3:
        run_panels(t, c, ldc, 3, parts);
        break;
    default:
        run_panels(t, c, ldc, 4, parts);
    }
}

AMX_TARGET static void amx_kernel(enum dtype dtype, const struct cpu_gemm_tile *t)
{
    _Alignas(64) float whole[ROWS][PANELS * PANEL];
    float *c = t->is_whole ? t->c : whole[0];
    int64_t ldc = t->is_whole ? t->ldc : PANELS * PANEL;
    __asm__ volatile("" ::: "memory"); /* the compiler does not see what tile loads read */
    if (dtype == DTYPE_BF16)
        run_parts(t, c, ldc, 1);
    else if (dtype == DTYPE_F16)
        run_parts(t, c, ldc, 2);
    else
        run_parts(t, c, ldc, 3);
    if (t->is_whole)
        return;
    for (int32_t i = 0; i < t->n_rows; i++)
        for (int32_t j = 0; j < t->n_cols; j += 16)
            _mm512_mask_storeu_ps(t->c + i * t->ldc + j, mask_of(t->n_cols - j),
                                  _mm512_load_ps(whole[i] + j));
}

const struct cpu_gemm_isa cpu_gemm_isa_amx = {
    .name = "amx",
    .is_available = amx_is_available,
    .tile_rows = ROWS,
    .tile_panels = PANELS,
    .k_block = K_BLOCK,
    .block_rows = 128,
    .a_bytes = amx_a_bytes,
    .pack_a = amx_pack_a,
    .unpack_w = amx_unpack_w,
    .unpacked_bytes = amx_unpacked_bytes,
    .reads_stored = 1u << DTYPE_BF16,
    .kernel = amx_kernel,
    .enter = amx_enter,
    .leave = amx_leave,
};

#endif
