/* Inside the CPU backend: its threads, its matrix products, and the bodies of its operations.
 *
 * Only cpu_*.c and their tests include this. The engine thread calls everything here; bodies
 * fan out over the pool's threads by independent outputs, so no sum ever depends on the number
 * of threads. Activations are f32; weights stay as stored. */
#ifndef PREFILLD_CPU_H
#define PREFILLD_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend.h"

/* ---- threads (cpu_threads.c) ---- */

struct cpu_pool;

/* n_threads 0: one a CPU this process may use. The calling thread is one of them. Returns NULL
 * when threads cannot be made. */
struct cpu_pool *cpu_pool_open(int32_t n_threads);
void cpu_pool_close(struct cpu_pool *pool);
int32_t cpu_pool_threads(const struct cpu_pool *pool);

/* Calls fn(arg, item, thread) once for every item in [0, n_items), thread in [0, threads), and
 * returns when all are done. Items are taken in ascending order by whichever thread is free.
 * Idle threads sleep after a short spin. */
void cpu_pool_run(struct cpu_pool *pool, int64_t n_items,
                  void (*fn)(void *arg, int64_t item, int32_t thread), void *arg);

/* ---- products with a packed weight (cpu_gemm*.c) ---- */

/* Bytes of the packed form of n_mats matrices [rows, cols]. */
size_t cpu_pack_bytes(int32_t n_mats, int32_t rows, int32_t cols, enum dtype dtype);

/* Packs rows given by parts in order (as weight_make) into dst (64-byte aligned), in the
 * stored dtype. */
void cpu_pack(struct cpu_pool *pool, const struct weight_part *parts, int32_t n_parts,
              int32_t n_mats, int32_t rows, int32_t cols, enum dtype dtype, void *dst);

/* c[i, j] = sum over k of a[i, k] * w[i_mat][j, k], f32 arithmetic, in one order for a weight
 * and a machine's kernel (cpu_gemm.h). A row's bits depend on nothing but its own a row and the
 * weight: not on n_rows, not on the thread count. a [n_rows, lda], c [n_rows, ldc]. a_rows,
 * when not NULL, gives the row of a for each output row (gather). What is not finite in a makes
 * its row not finite; subnormal parts of a may count as zero. Runs on the pool. */
void cpu_gemm(struct cpu_pool *pool, int32_t n_rows, const float *a, int64_t lda,
              const int32_t *a_rows, const struct weight *w, int32_t i_mat, float *c,
              int64_t ldc);

/* Many products in one fan-out (experts): job j multiplies its rows with matrix i_mat. */
struct cpu_gemm_job {
    int32_t n_rows;
    int32_t i_mat;
    const float *a;        /* [.., lda] */
    const int32_t *a_rows; /* [n_rows] or NULL */
    float *c;              /* [n_rows, ldc] */
};
void cpu_gemm_jobs(struct cpu_pool *pool, const struct cpu_gemm_job *jobs, int32_t n_jobs,
                   int64_t lda, const struct weight *w, int64_t ldc);

/* Bytes of the pool's scratch for these products, taken when the pool opens. */
size_t cpu_gemm_bytes(struct cpu_pool *pool);

/* ---- small products of two f32 matrices, on the calling thread (cpu_mm.c) ---- */

enum cpu_mm_mode { CPU_MM_SET, CPU_MM_ADD, CPU_MM_SUB };

/* C (SET: =, ADD: +=, SUB: -=) op(A) op(B). op(A) is [m, k]: A[i * lda + l], or A[l * lda + i]
 * when ta; op(B) is [k, n]: B[l * ldb + j], or B[j * ldb + l] when tb. Element (i, j) sums
 * l = 0..k-1 in one fixed order that does not depend on m, n, i or j, and every term is fused
 * into the sum (in ADD and SUB mode the terms' sum is formed first, then added once). m, n, k
 * are up to some hundreds; scratch is cpu_mm_scratch_bytes(m, n, k) for the calling thread. */
void cpu_mm(enum cpu_mm_mode mode, bool ta, bool tb, int32_t m, int32_t n, int32_t k,
            const float *A, int64_t lda, const float *B, int64_t ldb, float *C, int64_t ldc,
            void *scratch);
size_t cpu_mm_scratch_bytes(int32_t m, int32_t n, int32_t k);

/* ---- elementwise helpers (cpu_vec.c) ---- */

/* y[i] = exp(x[i]); within 2 ulp for x in [-87, 88], 0 below, the same bits for the same x
 * wherever it stands. */
void cpu_vec_exp(int32_t n, const float *x, float *y);
/* y[i] = x[i] / (1 + exp(-x[i])). */
void cpu_vec_silu(int32_t n, const float *x, float *y);
/* Sum of x[i] * y[i] in one fixed order for a given n. */
float cpu_vec_dot(int32_t n, const float *x, const float *y);

/* ---- bodies of the operations ---- */

struct cpu_impl; /* cpu_backend.c: pool, workspace, the step in flight */

struct cpu_pool *cpu_impl_pool(struct backend *b);
/* The operations' workspace, and its size; free for use inside one operation. */
void *cpu_impl_workspace(struct backend *b, size_t *bytes);

void cpu_embed(struct backend *b, const struct op_embed *a);
void cpu_rmsnorm(struct backend *b, const struct op_rmsnorm *a);
void cpu_matmul(struct backend *b, const struct op_matmul *a);
void cpu_gdn_conv(struct backend *b, const struct op_gdn_conv *a);
/* Chunks of 64. */
void cpu_gdn_delta(struct backend *b, const struct op_gdn_delta *a);
/* The same, token by token: the oracle. Differs from it by rounding only. */
void cpu_gdn_delta_recurrent(struct backend *b, const struct op_gdn_delta *a);
void cpu_attn_prep(struct backend *b, const struct op_attn_prep *a);
void cpu_attn(struct backend *b, const struct op_attn *a);
void cpu_moe_route(struct backend *b, const struct op_moe_route *a);
void cpu_moe_experts(struct backend *b, const struct op_moe_experts *a);
void cpu_swiglu(struct backend *b, const struct op_swiglu *a);
void cpu_head(struct backend *b, const struct op_head *a);

/* Workspace each body needs for these limits. */
size_t cpu_gdn_workspace_bytes(const struct backend_limits *l, int32_t n_threads);
size_t cpu_attn_workspace_bytes(const struct backend_limits *l, int32_t n_threads);
size_t cpu_moe_workspace_bytes(const struct backend_limits *l, int32_t n_threads);
size_t cpu_head_workspace_bytes(const struct backend_limits *l, int32_t n_threads);

#endif
