/* Products with a packed weight: every kernel this machine has, against sums in f64, and bit by
 * bit against themselves in other company. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_gemm.h"
#include "leaks.h"
#include "rng.h"

TestSuite(cpu_gemm, .fini = leaks_check);

enum { SEED = 20, MAX_ROWS = 130, MAX_THREADS = 4, POISON = 0x7b };

struct made {
    struct weight w;
    float *rows; /* [n_mats * rows, cols], what the packed weight stands for */
};

static void *make(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    cr_assert_not_null(p);
    memset(p, POISON, bytes);
    return p;
}

/* Random, of either sign, over some orders of magnitude. */
static float draw(struct rng *r)
{
    return ldexpf(rng_normal(r), rng_int(r, 7) - 3);
}

static uint16_t to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}

/* Cuts f to f16's 11 bits. */
static uint16_t to_f16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    int32_t exponent = (int32_t)(u >> 23 & 255) - 112;
    uint32_t sign = u >> 16 & 0x8000;
    if (exponent <= 0)
        return (uint16_t)(sign | (uint32_t)(fabsf(f) * 0x1p24f));
    return (uint16_t)(sign | (uint32_t)exponent << 10 | (u >> 13 & 1023));
}

static float put_element(enum dtype dtype, float f, void *row, int32_t k)
{
    if (dtype == DTYPE_F32)
        return ((float *)row)[k] = f;
    uint16_t h = dtype == DTYPE_BF16 ? to_bf16(f) : to_f16(f);
    ((uint16_t *)row)[k] = h;
    return dtype == DTYPE_BF16 ? cpu_bf16_to_f32(h) : cpu_f16_to_f32(h);
}

/* A weight in parts of uneven size, each at an odd address. */
static struct made make_weight(struct cpu_pool *pool, struct rng *r, enum dtype dtype,
                               int32_t n_mats, int32_t rows, int32_t cols)
{
    struct made m = {{.n_mats = n_mats, .rows = rows, .cols = cols, .dtype = dtype}, NULL};
    enum { MAX_PARTS = 5 };
    struct weight_part parts[MAX_PARTS];
    uint8_t *part_mem[MAX_PARTS];
    int64_t n = (int64_t)n_mats * rows, at = 0;
    size_t row_bytes = (size_t)cols * dtype_bytes(dtype);
    m.rows = make((size_t)n * (size_t)cols * sizeof(float));
    void *row = make(row_bytes);
    int32_t n_parts = 0;
    for (; at < n; n_parts++) {
        int64_t take =
            n_parts == MAX_PARTS - 1 ? n - at : 1 + rng_int(r, (int32_t)((n - at + 1) / 2));
        part_mem[n_parts] = make((size_t)take * row_bytes + 1);
        for (int64_t i = 0; i < take; i++) {
            for (int32_t k = 0; k < cols; k++)
                m.rows[(at + i) * cols + k] = put_element(dtype, draw(r), row, k);
            memcpy(part_mem[n_parts] + 1 + (size_t)i * row_bytes, row, row_bytes);
        }
        parts[n_parts] = (struct weight_part){part_mem[n_parts] + 1, dtype, take};
        at += take;
    }
    m.w.data = make(cpu_pack_bytes(n_mats, rows, cols, dtype));
    cpu_pack(pool, parts, n_parts, n_mats, rows, cols, dtype, m.w.data);
    for (int32_t i = 0; i < n_parts; i++)
        free(part_mem[i]);
    free(row);
    return m;
}

static void drop_weight(struct made *m)
{
    free(m->rows);
    free(m->w.data);
}

static float *draw_rows(struct rng *r, int32_t n_rows, int64_t ld)
{
    float *a = make((size_t)n_rows * (size_t)ld * sizeof(float));
    for (int64_t i = 0; i < n_rows * ld; i++)
        a[i] = draw(r);
    return a;
}

static bool is_poison(const float *p, int64_t n)
{
    for (int64_t i = 0; i < n * 4; i++)
        if (((const uint8_t *)p)[i] != POISON)
            return false;
    return true;
}

static const char *const dtype_names[] = {"f32", "bf16", "f16"};
static const int32_t shapes[][2] = {/* N, K */
                                    {1, 1},     {7, 2},     {31, 31},   {33, 64},  {320, 100},
                                    {64, 1024}, {2048, 33}, {17, 2100}, {100, 512}};
enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

/* Largest error over the sum of absolute products; its root mean square; and for the products
 * themselves root mean square over mean size, a measure of how uneven they are. */
static void compare_with_f64(const struct made *m, int32_t n_rows, const float *a,
                             const float *c, double *worst, double *rms, double *uneven)
{
    double squares = 0, sizes = 0;
    int32_t N = m->w.rows, K = m->w.cols;
    *worst = *rms = 0;
    for (int32_t i = 0; i < n_rows; i++) {
        for (int32_t j = 0; j < N; j++) {
            double sum = 0, size = 0;
            for (int32_t k = 0; k < K; k++) {
                double p = (double)a[(int64_t)i * K + k] * m->rows[(int64_t)j * K + k];
                sum += p;
                size += fabs(p);
                squares += p * p;
            }
            sizes += size;
            double e = fabs(sum - c[(int64_t)i * N + j]) / (size + 0x1p-100);
            *worst = e > *worst ? e : *worst;
            *rms += e * e;
        }
    }
    *rms = sqrt(*rms / ((double)n_rows * N));
    *uneven = sqrt(squares * n_rows * N * K) / sizes;
}

/* A sum of K products rounded to f32 at each step is off by at most K u of the sum of absolute
 * products, u = 2^-24 (K + 1 where product and sum round apart). The AMX order has fewer steps
 * in a row (17 inside an instruction, then one an instruction, at most 6 for 32 of k), so at
 * most K / 5 + 23; what its f32 form leaves out is under 3 * 2^-26 * 2 of each product, 4 u
 * with room. So (K + 32) u holds for all.
 *
 * In root mean square: a rounding is off by about 0.41 u of the sum so far, which has grown
 * like a random walk to sqrt(k) times the products' root mean square; over all K that is 0.29 u
 * times their unevenness. 0.5 is asked for, of a thousand sums or more. */
Test(cpu_gemm, is_right_to_f32)
{
    const double u = 0x1p-24;
    struct rng r = {SEED};
    struct cpu_pool *pool = cpu_pool_open(2);
    for (int i_isa = 0; i_isa < cpu_gemm_n_isas; i_isa++) {
        const char *isa = cpu_gemm_isas[i_isa]->name;
        if (!cpu_gemm_select(pool, isa))
            continue;
        for (int i = 0; i < N_SHAPES * 3; i++) {
            int32_t N = shapes[i / 3][0], K = shapes[i / 3][1], n_rows = 1 + rng_int(&r, 40);
            struct made m = make_weight(pool, &r, (enum dtype)(i % 3), 1, N, K);
            float *a = draw_rows(&r, n_rows, K);
            float *c = make((size_t)n_rows * (size_t)N * sizeof(float));
            cpu_gemm(pool, n_rows, a, K, NULL, &m.w, 0, c, N);
            double worst, rms, uneven;
            compare_with_f64(&m, n_rows, a, c, &worst, &rms, &uneven);
            cr_expect(worst <= (K + 32) * u, "%s %s [%d, %d]: %g", isa, dtype_names[i % 3], N,
                      K, worst);
            cr_expect(rms <= 0.5 * u * uneven || n_rows * N < 1000,
                      "%s %s [%d, %d]: %g in root mean square, %g allowed", isa,
                      dtype_names[i % 3], N, K, rms, 0.5 * u * uneven);
            cr_log_info("%s %s [%d, %d]: worst %g, root mean square %g", isa,
                        dtype_names[i % 3], N, K, worst, rms);
            free(c);
            free(a);
            drop_weight(&m);
        }
    }
    cpu_pool_close(pool);
}

/* With one product, three bf16 parts of a give its one correct rounding. */
Test(cpu_gemm, splits_exactly)
{
    enum { N = 40, ROWS = 60 };
    struct rng r = {SEED};
    struct cpu_pool *pool = cpu_pool_open(1);
    struct made m = make_weight(pool, &r, DTYPE_BF16, 1, N, 1);
    float a[ROWS], c[ROWS][N];
    for (int i = 0; i < ROWS; i++)
        a[i] = ldexpf(rng_normal(&r), rng_int(&r, 120) - 60);
    for (int i_isa = 0; i_isa < cpu_gemm_n_isas; i_isa++) {
        if (!cpu_gemm_select(pool, cpu_gemm_isas[i_isa]->name))
            continue;
        cpu_gemm(pool, ROWS, a, 1, NULL, &m.w, 0, c[0], N);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < N; j++)
                cr_assert_eq(c[i][j], a[i] * m.rows[j], "%s: %a * %a = %a, not %a",
                             cpu_gemm_isas[i_isa]->name, a[i], m.rows[j], a[i] * m.rows[j],
                             c[i][j]);
    }
    drop_weight(&m);
    cpu_pool_close(pool);
}

/* One drawn way to compute some rows: gathered, cut into jobs, into a wider c. */
static void check_schedule(struct cpu_pool *pool, struct rng *r, const struct made *m,
                           int32_t n_rows, const float *a, int64_t lda, const float *want)
{
    enum { MAX_JOBS = 6 };
    int32_t N = m->w.rows;
    int64_t ldc = N + rng_int(r, 3);
    bool is_gathered = rng_int(r, 2);
    int32_t rows[MAX_ROWS], first = rng_int(r, MAX_ROWS + 1 - n_rows);
    for (int32_t i = 0; i < n_rows; i++)
        rows[i] = is_gathered ? rng_int(r, MAX_ROWS) : first + i;
    float *c = make((size_t)(n_rows + 1) * (size_t)ldc * sizeof(float));
    struct cpu_gemm_job jobs[MAX_JOBS];
    int32_t n_jobs = 0, done = 0, mats[MAX_ROWS];
    while (done < n_rows && n_jobs < MAX_JOBS) {
        int32_t n = n_jobs == MAX_JOBS - 1 ? n_rows - done : rng_int(r, n_rows - done + 1);
        jobs[n_jobs] = (struct cpu_gemm_job){
            .n_rows = n,
            .i_mat = rng_int(r, m->w.n_mats),
            .a = is_gathered ? a : a + rows[done] * lda,
            .a_rows = is_gathered ? rows + done : NULL,
            .c = c + done * ldc,
        };
        for (int32_t i = 0; i < n; i++)
            mats[done++] = jobs[n_jobs].i_mat;
        n_jobs++;
    }
    cpu_gemm_jobs(pool, jobs, n_jobs, lda, &m->w, ldc);
    for (int32_t i = 0; i < n_rows; i++) {
        const float *w = want + ((int64_t)mats[i] * MAX_ROWS + rows[i]) * N;
        cr_assert(memcmp(c + i * ldc, w, (size_t)N * sizeof(float)) == 0,
                  "row %d of %d, %d jobs, %d threads", i, n_rows, n_jobs,
                  cpu_pool_threads(pool));
        cr_assert(is_poison(c + i * ldc + N, ldc - N), "past the columns");
    }
    cr_assert(is_poison(c + n_rows * ldc, ldc), "past the rows");
    free(c);
}

static void check_schedules(const char *isa, struct cpu_pool *const *pools, struct rng *r)
{
    enum { MATS = 2, TRIALS = 5 };
    for (int i = 0; i < N_SHAPES * 3; i++) {
        int32_t N = shapes[i / 3][0], K = shapes[i / 3][1];
        int64_t lda = K + rng_int(r, 4);
        struct made m = make_weight(pools[0], r, (enum dtype)(i % 3), MATS, N, K);
        float *a = draw_rows(r, MAX_ROWS, lda);
        float *want = make((size_t)MATS * MAX_ROWS * (size_t)N * sizeof(float));
        for (int32_t j = 0; j < MATS; j++)
            cpu_gemm(pools[0], MAX_ROWS, a, lda, NULL, &m.w, j,
                     want + (int64_t)j * MAX_ROWS * N, N);
        for (int t = 0; t < TRIALS; t++)
            check_schedule(pools[rng_int(r, MAX_THREADS)], r, &m,
                           t == 0 ? 1 : 1 + rng_int(r, MAX_ROWS), a, lda, want);
        free(want);
        free(a);
        drop_weight(&m);
    }
    cr_log_info("%s: %d schedules", isa, N_SHAPES * 3 * TRIALS);
}

Test(cpu_gemm, keeps_a_rows_bits_in_any_company)
{
    struct rng r = {SEED};
    struct cpu_pool *pools[MAX_THREADS];
    for (int i = 0; i < MAX_THREADS; i++)
        pools[i] = cpu_pool_open(i + 1);
    for (int i = 0; i < cpu_gemm_n_isas; i++) {
        const char *isa = cpu_gemm_isas[i]->name;
        bool has = true;
        for (int j = 0; j < MAX_THREADS; j++)
            has = cpu_gemm_select(pools[j], isa) && has;
        if (has)
            check_schedules(isa, pools, &r);
    }
    for (int i = 0; i < MAX_THREADS; i++)
        cpu_pool_close(pools[i]);
}

/* What is not finite stays so and stays in its row; the largest floats stay finite. */
Test(cpu_gemm, keeps_infinities_in_their_row)
{
    enum { N = 35, K = 70, ROWS = 20 };
    struct rng r = {SEED};
    struct cpu_pool *pool = cpu_pool_open(2);
    for (int i = 0; i < cpu_gemm_n_isas * 3; i++) {
        const char *isa = cpu_gemm_isas[i / 3]->name;
        if (!cpu_gemm_select(pool, isa))
            continue;
        struct made m = make_weight(pool, &r, (enum dtype)(i % 3), 1, N, K);
        float *a = draw_rows(&r, ROWS, K), clean[ROWS][N], c[ROWS][N];
        cpu_gemm(pool, ROWS, a, K, NULL, &m.w, 0, clean[0], N);
        a[3 * K + 5] = INFINITY;
        a[4 * K + 69] = -INFINITY;
        a[17 * K] = NAN;
        uint32_t low_nan = 0x7f800001; /* its payload is all in the bits that are cut off */
        memcpy(&a[18 * K + 40], &low_nan, 4);
        cpu_gemm(pool, ROWS, a, K, NULL, &m.w, 0, c[0], N);
        for (int row = 0; row < ROWS; row++) {
            bool is_hurt = row == 3 || row == 4 || row == 17 || row == 18;
            for (int j = 0; j < N; j++)
                cr_assert(is_hurt ? !isfinite(c[row][j]) : c[row][j] == clean[row][j],
                          "%s %s: [%d, %d] is %g", isa, dtype_names[i % 3], row, j, c[row][j]);
        }
        free(a);
        drop_weight(&m);
    }
    cpu_pool_close(pool);
}

Test(cpu_gemm, keeps_the_largest_finite)
{
    enum { N = 2 };
    struct cpu_pool *pool = cpu_pool_open(1);
    const float a[2] = {3.4028234664e38f, -3.395e38f}; /* both round up to infinite bf16 */
    const float w_f32[N] = {0.25f, -0.5f};
    const uint16_t w_bf16[N] = {0x3e80, 0xbf00}, w_f16[N] = {0x3400, 0xb800};
    const void *const w_rows[] = {w_f32, w_bf16, w_f16};
    for (int i = 0; i < cpu_gemm_n_isas * 3; i++) {
        if (!cpu_gemm_select(pool, cpu_gemm_isas[i / 3]->name))
            continue;
        enum dtype dtype = (enum dtype)(i % 3);
        struct weight_part part = {w_rows[dtype], dtype, N};
        struct weight w = {.n_mats = 1, .rows = N, .cols = 1, .dtype = dtype};
        float c[2][N];
        w.data = make(cpu_pack_bytes(1, N, 1, dtype));
        cpu_pack(pool, &part, 1, 1, N, 1, dtype, w.data);
        cpu_gemm(pool, 2, a, 1, NULL, &w, 0, c[0], N);
        for (int j = 0; j < 4; j++)
            cr_assert_eq(c[j / 2][j % 2], a[j / 2] * w_f32[j % 2], "%s %s",
                         cpu_gemm_isas[i / 3]->name, dtype_names[dtype]);
        free(w.data);
    }
    cpu_pool_close(pool);
}

/* Every f16: its value is what the format says. */
Test(cpu_gemm, reads_every_f16)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        int exponent = (int)(h >> 10 & 31), mantissa = (int)(h & 1023);
        float f = exponent == 0    ? ldexpf((float)mantissa, -24)
                  : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                   : ldexpf((float)(1024 + mantissa), exponent - 25);
        f = h >> 15 ? -f : f;
        float got = cpu_f16_to_f32((uint16_t)h);
        cr_assert(isnan(f) ? isnan(got) : got == f && signbit(got) == signbit(f), "%x", h);
    }
}

Test(cpu_gemm, refuses_a_kernel_it_lacks)
{
    struct cpu_pool *pool = cpu_pool_open(1);
    cr_assert(!cpu_gemm_select(pool, "abacus"));
    cr_assert(cpu_gemm_select(pool, "plain"));
    cr_assert_str_eq(cpu_gemm_name(pool), "plain");
    cpu_pool_close(pool);
}
