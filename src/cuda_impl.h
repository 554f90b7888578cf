/* Inside the CUDA backend: what cuda*.c share. Engine thread only, after set-up on the main
 * thread.
 *
 * Activations and weights are bf16; the residual stream, gates, decay, state and all sums f32.
 * One stream computes, one copies metadata in, one copies results out. */
#ifndef PREFILLD_CUDA_IMPL_H
#define PREFILLD_CUDA_IMPL_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <string.h>

#include "../kernels/kernels.h"
#include "backend.h"
#include "bf16.h"
#include "gemm_cache.h"

enum {
    CUDA_STEPS = 2,   /* between step_begin and step_done */
    CUDA_ALIGN = 1024 /* of every allocation: the KV pages' tiles need it */
};

/* ---- matrix products (cuda_matmul.c) ---- */

/* Rows of a step are rounded up to a power of two to find the algorithm; larger steps use the
 * last. */
enum {
    GEMM_BUCKETS = GEMM_CACHE_BUCKETS,
    GEMM_SMALLEST_LOG2 = 4,
    GEMM_WORKSPACE_BYTES = 32 << 20
};

/* How products with one shape of weight are made. Every algorithm in it gives a row the same
 * bits. */
struct gemm_plan {
    int32_t rows, cols; /* of the weight */
    bool is_f32;        /* the output's type, else bf16 */
    bool has_algo[GEMM_BUCKETS];
    cublasLtMatmulAlgo_t algo[GEMM_BUCKETS];
    cublasLtMatmulAlgo_t common; /* works for any number of rows */
};

struct gemm_lib; /* cuBLASLt's functions */

struct gemm {
    struct gemm_lib *lib;
    cublasLtHandle_t lt;
    cublasLtMatmulDescOpaque_t op; /* w transposed, f32 sums */
    void *workspace;               /* GEMM_WORKSPACE_BYTES */
    struct gemm_plan **plans;
    int32_t n_plans, plans_cap;
    int32_t n_timed; /* plans that were not recalled from the file */
    struct gemm_cache cache;
    bool is_cache_bad; /* it could not be written, and that was said */
};

/* struct weight's data. */
struct cuda_weight {
    void *rows;                /* device, [n_mats, rows, cols] bf16 */
    struct gemm_plan *plan[2]; /* bf16 and f32 output; NULL: none made */
};

/* ---- steps (cuda_step.c) ---- */

/* Operations of a traced step, and how many ends of steps are remembered: an entry of the ring
 * is begun anew before the step after it has ended, and its end still counts then. */
enum { TRACE_SPANS = 2048, CUDA_ENDS = 3 };

/* Counts that size a step's grids and place its metadata. */
struct cuda_shape {
    int32_t n_tokens, n_seqs, n_chunks, max_len, max_pages;
};

/* Shapes that are remembered, recorded or not; well over CUDA_STEPS. */
enum { CUDA_GRAPHS = 64 };

/* A shape of step and its recorded launches, one for each entry of the ring (cuda_graph.c). */
struct cuda_graph {
    struct cuda_shape shape; /* rounded up */
    cudaGraphExec_t exec[CUDA_STEPS];
    int64_t n_seen, last_seen; /* last_seen: in cuda_impl's n_seen; 0: the entry is free */
    bool is_bad;               /* could not be recorded: never again */
};

struct cuda_step {
    char *host;                 /* pinned: the packed metadata */
    char *dev;                  /* its copy, and behind it the chunk map */
    struct row_result *results; /* pinned, [max_rows] */
    struct row_result *dst;     /* the caller's, filled by step_done */
    int32_t n_rows;
    int32_t i_end; /* in cuda_impl's ends */
    bool is_ended; /* step_end was called */
    bool follows;  /* launched while the step before it ran */
    bool is_traced;
    bool is_replayed;
    struct cuda_graph *graph; /* its counts are rounded up, to be replayed; or NULL */
    const int32_t *n_live;    /* device: the tokens it has, where graph; else NULL */
    cudaEvent_t copied_in;    /* the metadata is there */
    cudaEvent_t begun;        /* with the time, as the ends */
    cudaEvent_t copied_out;   /* the results are on the host */
    cudaEvent_t *marks;       /* [TRACE_SPANS + 1], once tracing was on */
    struct step_span *spans;  /* [TRACE_SPANS], from marks[i] to marks[i + 1] */
    int64_t marked_ns;        /* host time behind the latest mark */
    int32_t n_spans;
};

struct cuda_block {
    void *p, *raw;
};

/* Pinned buffers that weights go through. */
enum { CUDA_STAGES = 2 };
struct cuda_stages {
    uint16_t *host[CUDA_STAGES];
    cudaEvent_t copied[CUDA_STAGES];
};

/* A step's samples, on the device. */
struct cuda_samples {
    int32_t n;
    const struct k_sample_row *rows;
    struct k_adjust *adjust;
};

/* Copies for export and import (cuda_copy.c). */
struct cuda_copy {
    cudaStream_t stream;
    cudaEvent_t follows, marks[COPY_MARKS];
};

struct cuda_impl {
    int32_t device;
    struct k_device dev;
    cudaStream_t stream, in, out;
    struct gemm gemm;
    struct cuda_stages stages;
    struct cuda_copy copy;
    struct backend_limits limits;
    bool has_workspace;
    int32_t page_tokens; /* of the KV pools; 0: none made yet */
    struct cuda_step ring[CUDA_STEPS];
    struct cuda_samples samples[CUDA_STEPS]; /* of the same steps */
    int32_t i_oldest, n_flights;
    cudaEvent_t ends[CUDA_ENDS]; /* of the latest steps' work */
    int32_t i_end;
    struct step_times times; /* of the step that step_done gave last */
    bool is_tracing;
    struct cuda_graph graphs[CUDA_GRAPHS];
    int64_t n_seen;     /* steps looked up in graphs */
    bool is_recording;  /* launches are recorded, not run */
    bool is_record_bad; /* one of them failed */
    void *gdn_work;     /* private to k_gdn_delta from call to call */
    char *work;         /* free for use inside one operation */
    size_t work_bytes;
    struct cuda_block *blocks; /* allocations that had to be shifted to CUDA_ALIGN */
    int32_t n_blocks, blocks_cap;
    cudaError_t error; /* the first that a step met: the device is lost */
    char why[256];
};

static inline struct cuda_impl *cuda_impl_of(struct backend *b)
{
    return b->impl;
}

/* Chunks of the largest step. */
static inline int64_t cuda_max_chunks(const struct backend_limits *l)
{
    return (int64_t)l->max_tokens / CHUNK_TOKENS + l->max_seqs;
}

static inline size_t cuda_round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static inline float cuda_f32_of(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Remembers the first error of a step: nothing after it is to be trusted. Operations have no
 * other way to tell; step_end and step_done return ERR_DEVICE from then on. */
void cuda_note(struct backend *b, const char *what, cudaError_t error);

/* Waits for what was enqueued; 0 or ERR_DEVICE. Set-up, tests, export. */
int cuda_wait(struct backend *b);

/* ---- cuda.c ---- */
void *cuda_alloc(struct backend *b, size_t bytes);
void cuda_free(struct backend *b, void *p);
int cuda_upload(struct backend *b, void *dst, const void *src_host, size_t bytes);
int cuda_download(struct backend *b, void *dst_host, const void *src, size_t bytes);

/* ---- cuda_matmul.c ---- */
int gemm_open(struct backend *b, struct errmsg *e);
void gemm_close(struct backend *b);
/* cuBLASLt's. */
int64_t gemm_version(struct backend *b);
/* Finds or makes the plan of a weight's shape; times algorithms on `rows` [rows, cols] bf16 for
 * up to max_rows rows. Set-up only: waits. NULL: memory is short or no algorithm fits. */
struct gemm_plan *gemm_plan_make(struct backend *b, const void *w, int32_t rows, int32_t cols,
                                 bool is_f32, int32_t max_rows);
/* c [n_rows, ldc] = a [n_rows, cols] w^T, enqueued; c is bf16 or f32 as the plan says. */
void gemm_run(struct backend *b, const struct gemm_plan *plan, const void *w, int32_t n_rows,
              const void *a, void *c, int64_t ldc);
void cuda_matmul(struct backend *b, const struct op_matmul *a);

/* ---- cuda_weights.c ---- */
size_t cuda_weight_bytes(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                         enum dtype dtype, unsigned use);
int cuda_weight_make(struct backend *b, const struct weight_part *parts, int32_t n_parts,
                     int32_t n_mats, int32_t rows, int32_t cols, unsigned use,
                     struct weight *out, struct errmsg *e);
int cuda_weight_random(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                       unsigned use, uint64_t seed, float std, struct weight *out,
                       struct errmsg *e);
void cuda_weight_free(struct backend *b, struct weight *w);
void cuda_stages_close(struct cuda_stages *s);

/* ---- cuda_step.c ---- */
size_t cuda_workspace_bytes(struct backend *b, const struct backend_limits *l);
int cuda_workspace_make(struct backend *b, const struct backend_limits *l, struct errmsg *e);
void cuda_workspace_free(struct backend *b);
int cuda_step_begin(struct backend *b, const struct batch_host *h, struct batch *out);
void cuda_chunk_map(struct backend *b, struct batch *batch);
int cuda_step_end(struct backend *b, const struct batch *batch, const struct row_result *src,
                  struct row_result *dst_host);
int cuda_step_done(struct backend *b, bool wait);
int cuda_trace(struct backend *b, bool on);
void cuda_step_times(struct backend *b, struct step_times *out);
/* The batch as kernels take it. */
struct k_batch cuda_batch(const struct batch *b);
/* While tracing: what ran since the last mark is called `name`. */
void cuda_mark(struct backend *b, const char *name);
/* The step being launched. */
struct cuda_step *cuda_newest(struct backend *b);

/* ---- cuda_graph.c ---- */
/* Rounds counts up to those that are recorded, within the limits. */
void cuda_shape_round(const struct backend_limits *l, struct cuda_shape *s);
/* Notes that a step of this shape came. With a record, or when one is to be made: rounds *shape
 * up and returns its entry; else NULL. Launch order. */
struct cuda_graph *cuda_graph_find(struct backend *b, struct cuda_shape *shape);
void cuda_graphs_free(struct backend *b);
bool cuda_replay(struct backend *b);
bool cuda_record_begin(struct backend *b);
void cuda_record_end(struct backend *b, bool is_whole);

/* ---- cuda_ops.c ---- */
/* Rows of the head's logits block, and the workspace that operations share. */
int32_t cuda_head_rows(const struct backend_limits *l);
size_t cuda_ops_bytes(struct backend *b, const struct backend_limits *l);
void cuda_embed(struct backend *b, const struct op_embed *a);
void cuda_rmsnorm(struct backend *b, const struct op_rmsnorm *a);
void cuda_gdn_conv(struct backend *b, const struct op_gdn_conv *a);
void cuda_gdn_delta(struct backend *b, const struct op_gdn_delta *a);
void cuda_attn_prep(struct backend *b, const struct op_attn_prep *a);
void cuda_attn(struct backend *b, const struct op_attn *a);
void cuda_moe_route(struct backend *b, const struct op_moe_route *a);
void cuda_moe_experts(struct backend *b, const struct op_moe_experts *a);
void cuda_swiglu(struct backend *b, const struct op_swiglu *a);
void cuda_head(struct backend *b, const struct op_head *a);

/* ---- cuda_pools.c ---- */
int cuda_check(struct backend *b, const struct gdn_dims *gd, const struct attn_dims *ad,
               const struct backend_limits *l, struct errmsg *e);
size_t cuda_state_bytes(struct backend *b, const struct gdn_dims *d);
size_t cuda_page_bytes(struct backend *b, const struct attn_dims *d, int32_t page_tokens);
int cuda_state_pool_make(struct backend *b, const struct gdn_dims *d, int32_t n_slots,
                         struct state_pool *out);
int cuda_kv_pool_make(struct backend *b, const struct attn_dims *d, int32_t n_pages,
                      int32_t page_tokens, struct kv_pool *out);
void cuda_state_pool_free(struct backend *b, struct state_pool *p);
void cuda_kv_pool_free(struct backend *b, struct kv_pool *p);
int cuda_state_read(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    int32_t slot, float *S, float *conv);
int cuda_state_write(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                     int32_t slot, const float *S, const float *conv);
int cuda_kv_read(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 const int32_t *pages, int32_t n_tokens, float *k, float *v);
int cuda_kv_write(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                  const int32_t *pages, int32_t n_tokens, const float *k, const float *v);
void cuda_state_copy(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                     const struct slot_copy *copies, int32_t n);
void cuda_page_copy(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                    const struct slot_copy *copies, int32_t n);
void cuda_state_poison(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                       int32_t slot);
void cuda_page_poison(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                      int32_t page);

/* ---- cuda_copy.c ---- */
int cuda_copy_open(struct backend *b);
void cuda_copy_close(struct backend *b);
void *cuda_stage_alloc(struct backend *b, size_t bytes);
void cuda_stage_free(struct backend *b, void *p);
int cuda_slot_get(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                  int32_t slot, void *stage);
int cuda_slot_put(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                  int32_t slot, const void *stage);
int cuda_page_get(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                  int32_t page, bool is_value, void *stage);
int cuda_page_put(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                  int32_t page, bool is_value, const void *stage);
void cuda_copies_follow(struct backend *b);
int cuda_copies_mark(struct backend *b, int32_t i);
int cuda_copies_done(struct backend *b, int32_t i, bool wait);
void cuda_slot_unpack(const struct gdn_dims *d, const void *raw, float *S, void *conv);
void cuda_slot_pack(const struct gdn_dims *d, const float *S, const void *conv, void *raw);
void cuda_page_unpack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                      int32_t n_tokens, const void *raw, void *rows);
void cuda_page_pack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                    int32_t n_tokens, const void *rows, void *raw);

#endif
