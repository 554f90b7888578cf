/* Small products and elementwise helpers of the CPU backend, against f64 and against themselves
 * in another place. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "leaks.h"
#include "rng.h"

TestSuite(cpu_vec, .fini = leaks_check);
TestSuite(cpu_mm, .fini = leaks_check);

enum { SEED = 5, POISON = 0x7b };

/* |got - want| in units of the last place of want as a float. */
static double ulps(float got, double want)
{
    int exponent;
    frexp(want, &exponent);
    return fabs(got - want) / ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

Test(cpu_vec, exp_is_within_2_ulp)
{
    enum { N = 4096, ROUNDS = 100 };
    struct rng r = {SEED};
    static float x[N], y[N];
    double worst = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < N; i++)
            x[i] = (float)(rng_unit(&r) * 175 - 87);
        cpu_vec_exp(N, x, y);
        for (int i = 0; i < N; i++) {
            double e = ulps(y[i], exp((double)x[i]));
            worst = e > worst ? e : worst;
            cr_assert(e <= 2, "exp(%a) = %a: %g ulp", x[i], y[i], e);
        }
    }
    cr_log_info("worst %g ulp", worst);
}

Test(cpu_vec, exp_at_the_ends)
{
    const float x[] = {0, -0.0f, -87.0f, -87.5f, -1e30f, -INFINITY, 88.0f, 1e-30f, NAN};
    float y[9];
    cpu_vec_exp(9, x, y);
    cr_assert(y[0] == 1 && y[1] == 1 && y[7] == 1);
    cr_assert(ulps(y[2], exp(-87.0)) <= 2 && ulps(y[6], exp(88.0)) <= 2);
    cr_assert(y[3] == 0 && y[4] == 0 && y[5] == 0, "0 below -87");
    cr_assert(isnan(y[8]), "what is not a number is seen further on");
}

/* exp within 2 ulp, then a sum and a quotient, each within half. */
Test(cpu_vec, silu_is_within_4_ulp)
{
    enum { N = 4096 };
    struct rng r = {SEED};
    static float x[N], y[N];
    for (int i = 0; i < N; i++)
        x[i] = (float)(rng_unit(&r) * 160 - 80);
    cpu_vec_silu(N, x, y);
    for (int i = 0; i < N; i++) {
        double want = x[i] / (1 + exp(-(double)x[i]));
        cr_assert(ulps(y[i], want) <= 4, "silu(%a) = %a, not %a", x[i], y[i], want);
    }
    const float far[] = {-1e4f, 0, 1e4f, NAN};
    cpu_vec_silu(4, far, y);
    cr_assert(y[0] == 0 && y[1] == 0 && y[2] == 1e4f && isnan(y[3]));
}

/* The same bits wherever an element stands, and nothing past n is touched. */
Test(cpu_vec, keeps_bits_in_any_place)
{
    enum { N = 67 };
    struct rng r = {SEED};
    void (*const maps[])(int32_t, const float *, float *) = {cpu_vec_exp, cpu_vec_silu};
    float x[N], whole[N], part[N + 1], poison;
    memset(&poison, POISON, sizeof(poison));
    for (int i = 0; i < N; i++)
        x[i] = rng_normal(&r) * 20;
    for (int i_map = 0; i_map < 2; i_map++) {
        maps[i_map](N, x, whole);
        for (int from = 0; from < N; from++) {
            for (int n = 0; from + n <= N; n++) {
                memset(part, POISON, sizeof(part));
                maps[i_map](n, x + from, part);
                cr_assert(memcmp(part, whole + from, (size_t)n * sizeof(float)) == 0);
                cr_assert(memcmp(&part[n], &poison, sizeof(poison)) == 0);
            }
        }
    }
}

/* A sum of n fused terms is off by at most n u of the sum of absolute terms, u = 2^-24; one u
 * more where product and sum round apart. */
Test(cpu_vec, dot_is_a_sum_of_products)
{
    enum { N = 300 };
    struct rng r = {SEED};
    float x[N], y[N];
    for (int i = 0; i < N; i++) {
        x[i] = rng_normal(&r);
        y[i] = rng_normal(&r);
    }
    for (int n = 0; n <= N; n++) {
        double sum = 0, size = 0;
        for (int i = 0; i < n; i++) {
            sum += (double)x[i] * y[i];
            size += fabs((double)x[i] * y[i]);
        }
        float got = cpu_vec_dot(n, x, y), again = cpu_vec_dot(n, x, y);
        cr_assert(fabs(got - sum) <= (n + 1) * 0x1p-24 * size, "n %d: %g, not %g", n, got, sum);
        cr_assert(memcmp(&got, &again, sizeof(got)) == 0);
    }
}

struct mm_case {
    int32_t m, n, k;
    bool ta, tb;
    int64_t lda, ldb, ldc;
    float *A, *B, *C;
    void *scratch;
};

static float *draw(struct rng *r, int64_t n)
{
    float *p = calloc((size_t)n, sizeof(*p));
    for (int64_t i = 0; i < n; i++)
        p[i] = rng_normal(r);
    return p;
}

static struct mm_case make_case(struct rng *r)
{
    static const int32_t sizes[] = {1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 128};
    struct mm_case c = {.m = sizes[rng_int(r, 11)],
                        .n = sizes[rng_int(r, 11)],
                        .k = sizes[rng_int(r, 11)],
                        .ta = rng_int(r, 2),
                        .tb = rng_int(r, 2)};
    c.lda = (c.ta ? c.m : c.k) + rng_int(r, 3);
    c.ldb = (c.tb ? c.k : c.n) + rng_int(r, 3);
    c.ldc = c.n + rng_int(r, 3);
    c.A = draw(r, c.lda * (c.ta ? c.k : c.m));
    c.B = draw(r, c.ldb * (c.tb ? c.n : c.k));
    c.C = draw(r, c.ldc * c.m);
    c.scratch = aligned_alloc(64, (cpu_mm_scratch_bytes(c.m, c.n, c.k) + 63) / 64 * 64);
    return c;
}

static void drop_case(struct mm_case *c)
{
    free(c->A);
    free(c->B);
    free(c->C);
    free(c->scratch);
}

static void run_case(const struct mm_case *c, enum cpu_mm_mode mode, float *C)
{
    cpu_mm(mode, c->ta, c->tb, c->m, c->n, c->k, c->A, c->lda, c->B, c->ldb, C, c->ldc,
           c->scratch);
}

static void check_f64(const struct mm_case *c, const float *C)
{
    for (int32_t i = 0; i < c->m; i++) {
        for (int32_t j = 0; j < c->n; j++) {
            double sum = 0, size = 0;
            for (int32_t l = 0; l < c->k; l++) {
                double p = (double)(c->ta ? c->A[l * c->lda + i] : c->A[i * c->lda + l]) *
                           (c->tb ? c->B[j * c->ldb + l] : c->B[l * c->ldb + j]);
                sum += p;
                size += fabs(p);
            }
            cr_assert(fabs(C[i * c->ldc + j] - sum) <= (c->k + 1) * 0x1p-24 * size,
                      "[%d, %d, %d] ta %d tb %d: [%d, %d] is %g, not %g", c->m, c->n, c->k,
                      c->ta, c->tb, i, j, C[i * c->ldc + j], sum);
        }
    }
}

/* Set, add and subtract form the same sum; add and subtract then round once more. */
Test(cpu_mm, is_right_in_every_form)
{
    enum { TRIALS = 300 };
    struct rng r = {SEED};
    for (int t = 0; t < TRIALS; t++) {
        struct mm_case c = make_case(&r);
        size_t bytes = (size_t)(c.ldc * c.m) * sizeof(float);
        float *set = malloc(bytes), *other = malloc(bytes);
        memcpy(set, c.C, bytes);
        run_case(&c, CPU_MM_SET, set);
        check_f64(&c, set);
        for (int mode = CPU_MM_ADD; mode <= CPU_MM_SUB; mode++) {
            memcpy(other, c.C, bytes);
            run_case(&c, (enum cpu_mm_mode)mode, other);
            for (int32_t i = 0; i < c.m; i++) {
                for (int32_t j = 0; j < c.n; j++) {
                    int64_t at = i * c.ldc + j;
                    float want = mode == CPU_MM_ADD ? c.C[at] + set[at] : c.C[at] - set[at];
                    cr_assert_eq(other[at], want);
                }
                for (int64_t j = c.n; j < c.ldc && i * c.ldc + j < c.ldc * c.m; j++)
                    cr_assert_eq(other[i * c.ldc + j], c.C[i * c.ldc + j], "past the columns");
            }
        }
        free(set);
        free(other);
        drop_case(&c);
    }
}

/* Any rectangle of C alone has the bits it has in the whole, also from transposed operands. */
Test(cpu_mm, keeps_bits_in_any_rectangle)
{
    enum { TRIALS = 300 };
    struct rng r = {SEED};
    for (int t = 0; t < TRIALS; t++) {
        struct mm_case c = make_case(&r);
        size_t bytes = (size_t)(c.ldc * c.m) * sizeof(float);
        float *whole = malloc(bytes), *part = malloc(bytes);
        run_case(&c, CPU_MM_SET, whole);
        int32_t i0 = rng_int(&r, c.m), j0 = rng_int(&r, c.n);
        struct mm_case p = c;
        p.m = 1 + rng_int(&r, c.m - i0);
        p.n = 1 + rng_int(&r, c.n - j0);
        p.A = c.A + (c.ta ? i0 : i0 * c.lda);
        p.B = c.B + (c.tb ? j0 * c.ldb : j0);
        p.ldc = p.n;
        run_case(&p, CPU_MM_SET, part);
        for (int32_t i = 0; i < p.m; i++)
            cr_assert(memcmp(part + i * p.n, whole + (i0 + i) * c.ldc + j0,
                             (size_t)p.n * sizeof(float)) == 0,
                      "[%d, %d, %d] ta %d tb %d: rows %d + %d, columns %d + %d", c.m, c.n, c.k,
                      c.ta, c.tb, i0, p.m, j0, p.n);
        free(whole);
        free(part);
        drop_case(&c);
    }
}
