/* Times one product at a time, on request, so that a driver can race it against another library
 * (gemm_torch.py). usage: gemm THREADS, then lines "M K N DTYPE KERNEL MATS RUNS" on stdin:
 * [M, K] times a DTYPE (f32, bf16, f16) weight [N, K] by KERNEL (plain, avx2, avx512, amx;
 * auto: the pool's own choice), going through MATS different weights. Each is answered by one
 * line: "KERNEL BEST MEDIAN" in seconds for one product, or "- 0 0" when the machine lacks the
 * kernel. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../rng.h"
#include "cpu_gemm.h"

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void *make_aligned(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) {
        fprintf(stderr, "gemm: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(p, 0, bytes);
    return p;
}

/* Rows of random weights: small integers over 64, exact in every dtype. */
static void fill_rows(struct rng *r, enum dtype dtype, size_t n, void *rows)
{
    for (size_t i = 0; i < n; i++) {
        union {
            float f;
            uint32_t u;
        } v = {.f = (float)(rng_int(r, 127) - 63) / 64};
        if (dtype == DTYPE_F32)
            ((float *)rows)[i] = v.f;
        else if (dtype == DTYPE_BF16)
            ((uint16_t *)rows)[i] = (uint16_t)(v.u >> 16);
        else
            ((uint16_t *)rows)[i] =
                v.f == 0 ? 0
                         : (uint16_t)((v.u >> 16 & 0x8000) |
                                      ((((v.u >> 23 & 255) - 112) << 10) + (v.u >> 13 & 1023)));
    }
}

static struct weight make_weight(struct cpu_pool *pool, struct rng *r, enum dtype dtype,
                                 int32_t n_mats, int32_t N, int32_t K)
{
    struct weight w = {.n_mats = n_mats, .rows = N, .cols = K, .dtype = dtype};
    size_t n = (size_t)N * (size_t)K;
    void *rows = make_aligned(n * dtype_bytes(dtype));
    fill_rows(r, dtype, n, rows);
    struct weight_part *parts = calloc((size_t)n_mats, sizeof(*parts));
    for (int32_t i = 0; i < n_mats; i++)
        parts[i] = (struct weight_part){rows, dtype, N};
    w.data = make_aligned(cpu_pack_bytes(n_mats, N, K, dtype));
    cpu_pack(pool, parts, n_mats, n_mats, N, K, dtype, w.data);
    free(parts);
    free(rows);
    return w;
}

int main(int argc, char **argv)
{
    struct cpu_pool *pool = cpu_pool_open(argc > 1 ? atoi(argv[1]) : 0);
    struct rng r = {1};
    char dtype_name[8], kernel[8], best_kernel[8];
    int M, K, N, mats, runs;
    snprintf(best_kernel, sizeof(best_kernel), "%s", cpu_gemm_name(pool));
    while (scanf("%d %d %d %7s %7s %d %d", &M, &K, &N, dtype_name, kernel, &mats, &runs) == 7) {
        enum dtype dtype = strcmp(dtype_name, "f32") == 0    ? DTYPE_F32
                           : strcmp(dtype_name, "bf16") == 0 ? DTYPE_BF16
                                                             : DTYPE_F16;
        if (!cpu_gemm_select(pool, strcmp(kernel, "auto") == 0 ? best_kernel : kernel)) {
            printf("- 0 0\n");
            fflush(stdout);
            continue;
        }
        struct weight w = make_weight(pool, &r, dtype, mats, N, K);
        float *a = make_aligned((size_t)M * (size_t)K * 4);
        float *c = make_aligned((size_t)M * (size_t)N * 4);
        for (int64_t i = 0; i < (int64_t)M * K; i++)
            a[i] = rng_normal(&r);
        double *times = calloc((size_t)runs, sizeof(*times));
        for (int i = -2; i < runs; i++) {
            double start = now_s();
            cpu_gemm(pool, M, a, K, NULL, &w, (i + 2) % mats, c, N);
            if (i >= 0)
                times[i] = now_s() - start;
        }
        qsort(times, (size_t)runs, sizeof(*times), compare_doubles);
        printf("%s %.9f %.9f\n", cpu_gemm_name(pool), times[0], times[runs / 2]);
        fflush(stdout);
        free(times);
        free(c);
        free(a);
        free(w.data);
    }
    cpu_pool_close(pool);
}
