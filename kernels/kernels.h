/* The CUDA kernels as C sees them: one launcher and one argument struct for each operation.
 *
 * The contracts are those of src/backend.h with act = bf16; letters of the glossary there. A
 * launcher checks shapes, picks the body for the card, launches on `stream` and returns the
 * launch error. It never allocates, waits or prints, and keeps nothing between calls. All
 * pointers are device memory, 16-byte aligned, unless a field says otherwise; none may overlap
 * another unless it says so. One thread launches. */
#ifndef PREFILLD_KERNELS_H
#define PREFILLD_KERNELS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#define K_BOTH_SIDES __host__ __device__
#else
#define K_BOTH_SIDES
#endif

enum { K_CHUNK = 64, K_MAX_SEQS = 4096 };

/* What the launchers need to know of the card; filled once at start. */
struct k_device {
    int32_t cc;         /* compute capability, 10 * major + minor */
    int32_t n_sms;      /* multiprocessors */
    int32_t smem_bytes; /* shared memory one block may have */
};

cudaError_t k_device_query(int32_t device, struct k_device *out);

/* The packed step as kernels see it; device pointers, counts are host values. n_tokens,
 * n_chunks and max_len may be larger than the batch's own: entries of the map beyond its chunks
 * count on past the end of the last sequence, and what belongs to them is neither read nor
 * written. Empty sequences with start not 0 leave their slot alone and may share it. */
struct k_batch {
    int32_t n_tokens;          /* T */
    int32_t n_seqs;            /* N, 0..K_MAX_SEQS; empty sequences are allowed */
    int32_t n_chunks;          /* NC = sum of ceil(len / 64) */
    int32_t max_len;           /* longest sequence */
    const int32_t *cu_seqlens; /* [N + 1] */
    const int32_t *start;      /* [N] 0: the slot is not read, fresh state is written */
    const int32_t *slots;      /* [N] */
    const int32_t *save_slots; /* [NC] slot that also gets state and window as they are behind
                                  the chunk, which is whole; -1: none */
    int32_t *chunk_seq;        /* [NC] which sequence */
    int32_t *chunk_index;      /* [NC] which chunk of it */
    int32_t *chunk_tok;        /* [NC] first token of the chunk in the batch */
    int32_t *seq_first;        /* [N + 1] first flat chunk of each sequence; last entry NC */
    int32_t *seq_order;        /* [N] sequences by falling length in chunks, ties by index */
};

/* Fills chunk_* and seq_* of the batch from cu_seqlens. */
struct k_chunk_map {
    struct k_batch b;
};
cudaError_t k_chunk_map(const struct k_chunk_map *a, cudaStream_t stream);

/* x[t] = w[tokens[t]] as f32. */
struct k_embed {
    int32_t n_tokens;
    int32_t M;             /* a multiple of 8 */
    const int32_t *tokens; /* [T], valid rows of w */
    const void *w;         /* [vocab, M] bf16 */
    float *x;              /* out [T, M] */
};
cudaError_t k_embed(const struct k_embed *a, cudaStream_t stream);

/* x += y when y is not NULL; h = x * rsqrt(mean(x^2) + eps) * w when h is not NULL. */
struct k_rmsnorm {
    int32_t n_rows;
    int32_t dim; /* a multiple of 8, at most 8192 */
    float eps;
    float *x;       /* [n_rows, dim] f32, updated */
    const void *y;  /* [n_rows, dim] bf16, or NULL */
    const float *w; /* [dim] f32 */
    void *h;        /* out [n_rows, dim] bf16, or NULL */
};
cudaError_t k_rmsnorm(const struct k_rmsnorm *a, cudaStream_t stream);

/* c = silu(gate) * up. */
struct k_swiglu {
    int32_t n_rows;
    int32_t F;      /* a multiple of 8 */
    const void *gu; /* [n_rows, 2 F] bf16, gate | up */
    void *c;        /* out [n_rows, F] bf16 */
};
cudaError_t k_swiglu(const struct k_swiglu *a, cudaStream_t stream);

struct k_gdn_dims {
    int32_t H, HV; /* key and value heads; HV a multiple of H; head dims are 128 */
    int32_t ld;    /* row length of the projection, a multiple of 8 */
    int32_t n_slots;
};

/* Convolution, SiLU, l2norm, gates and the convolution state; backend.h op_gdn_conv. */
struct k_gdn_conv {
    struct k_batch b; /* with its chunk map */
    struct k_gdn_dims d;
    const void *p;        /* [T, ld] bf16: q | k | v | z | b | a */
    const float *conv_w;  /* [conv_dim, 4], conv_dim = (2 H + HV) * 128 */
    const float *A_log;   /* [HV] */
    const float *dt_bias; /* [HV] */
    void *conv_state; /* [n_slots, 3, conv_dim] bf16, oldest first, updated; save_slots, too */
    void *q, *k;      /* out [T, H, 128] bf16, normalised; q also * 128^-0.5 */
    void *v;          /* out [T, HV, 128] bf16 */
    float *g, *beta;  /* out [T, HV] */
};
cudaError_t k_gdn_conv(const struct k_gdn_conv *a, cudaStream_t stream);

/* The gated delta rule without its norm; backend.h op_gdn_delta with z NULL. The bits of a
 * sequence depend on nothing but the sequence and its entry state: not on the batch, the slot,
 * a cut at a multiple of 64, nor on the body or the split that the launcher picks. */
struct k_gdn_delta {
    const struct k_device *dev; /* host memory */
    struct k_batch b;           /* with its chunk map */
    struct k_gdn_dims d;
    const void *q, *k, *v; /* as k_gdn_conv gives them */
    const float *g, *beta; /* [T, HV] */
    float *S;     /* [n_slots, HV, V, K] f32 (S transposed), updated; save_slots, too */
    void *o;      /* out [T, HV, V] bf16 */
    void *work;   /* k_gdn_delta_work_bytes, 128-byte aligned, through k_gdn_work_init
                              once; contents are private */
    int32_t body; /* a K_GDN_ value; tests and benchmarks pick one, else AUTO */
};
/* SPLIT (a block has half a value head) and FUSED (both halves, and what the others do in a
 * kernel before) need compute capability 9.0. */
enum { K_GDN_AUTO, K_GDN_PORTABLE, K_GDN_SPLIT, K_GDN_FUSED };
cudaError_t k_gdn_delta(const struct k_gdn_delta *a, cudaStream_t stream);

/* Workspace for n_chunks chunks and HV value heads. */
size_t k_gdn_delta_work_bytes(int64_t n_chunks, int32_t HV);

/* Once for a new workspace of that many bytes, before the first k_gdn_delta. */
cudaError_t k_gdn_work_init(void *work, size_t bytes, cudaStream_t stream);

/* o = rmsnorm(o over V) * w * silu(z), in place. */
struct k_gdn_norm {
    int32_t n_tokens;
    int32_t HV;
    int32_t ld; /* distance of two rows of z, a multiple of 8 */
    float eps;
    const void *z;  /* bf16, row t at z + t * ld: [HV, V] */
    const float *w; /* [V] */
    void *o;        /* [T, HV, V] bf16, updated */
};
cudaError_t k_gdn_norm(const struct k_gdn_norm *a, cudaStream_t stream);

struct k_attn_dims {
    int32_t HQ, HK;  /* query and KV heads; HQ a multiple of HK, HQ / HK at most 64 */
    int32_t D;       /* head dim, 256 */
    int32_t rot_dim; /* leading dims that rotate, a multiple of 16, at most D */
    int32_t ld;      /* row length of the projection, a multiple of 8 */
};

/* One attention layer's pages: for each page and KV head, blocks of 64 positions, each of D /
 * 64 panels of 64 dims: [n_pages, HK, P / 64, D / 64, 64, 64] bf16, 16-byte unit u of a panel's
 * row r lying at u ^ (r & 7) (the tile of tile.cuh). k_kv_offset says where a position's dim
 * is. */
struct k_kv_pages {
    int32_t n_pages;
    int32_t page_tokens;       /* P, a multiple of 64 */
    int32_t max_pages;         /* row length of page_table */
    const int32_t *page_table; /* [N, max_pages] page ids, good for every position in use */
    void *k, *v;               /* 1024-byte aligned */
};

/* Element of (page, KV head, position in the page, dim) in k or v. */
K_BOTH_SIDES static inline int64_t k_kv_offset(const struct k_attn_dims *d, int32_t page_tokens,
                                               int32_t page, int32_t head, int32_t pos,
                                               int32_t dim)
{
    int64_t panel =
        (((int64_t)page * d->HK + head) * (page_tokens / 64) + pos / 64) * (d->D / 64) +
        dim / 64;
    return panel * 4096 + (pos % 64) * 64 + (((dim % 64 / 8) ^ (pos % 8)) * 8) + dim % 8;
}

/* q and k: norm over D, then rotation by start + index in the piece; k and v go to their pages;
 * backend.h op_attn_prep. */
struct k_attn_prep {
    struct k_batch b; /* with its chunk map */
    struct k_attn_dims d;
    struct k_kv_pages kv; /* written at the batch's positions */
    float eps;
    void *p; /* [T, ld] bf16: q | gate | k | v; the q columns are replaced */
    const float *q_norm, *k_norm; /* [D], hold 1 + w */
    const float *inv_freq;        /* [rot_dim / 2] */
};
cudaError_t k_attn_prep(const struct k_attn_prep *a, cudaStream_t stream);

/* o = softmax(q k^T / sqrt(D), causal) v * sigmoid(gate); backend.h op_attn. Positions past a
 * sequence's last token are never read. The bits of a token depend on its own position and what
 * the pages hold up to it alone (all of it finite): not on the batch, the pages, any cut, the
 * body, nor on how the keys are shared out. */
struct k_attn {
    const struct k_device *dev; /* host memory */
    struct k_batch b;           /* with its chunk map */
    struct k_attn_dims d;
    struct k_kv_pages kv;
    const void *p; /* [T, ld] bf16, after k_attn_prep */
    void *o;       /* out [T, HQ * D] bf16 */
    void *work;    /* k_attn_work_bytes, 256-byte aligned; nothing in it is kept between calls.
                      May be NULL where max_pages hold at most K_ATTN_SEGMENT keys */
    int32_t body;  /* a K_ATTN_ value; tests and benchmarks pick one, else AUTO */
    int32_t whole; /* 1: no keys are shared out; likewise, else 0 */
};
enum { K_ATTN_AUTO, K_ATTN_PORTABLE, K_ATTN_HOPPER };
/* Keys are summed a segment at a time; the segments of rows that would leave multiprocessors
 * idle are shared out. */
enum { K_ATTN_SEGMENT = 8192 };
cudaError_t k_attn(const struct k_attn *a, cudaStream_t stream);

/* Workspace for n_chunks chunks and HQ query heads on a card with n_sms multiprocessors. */
size_t k_attn_work_bytes(int32_t n_sms, int64_t n_chunks, int32_t HQ);

enum { K_MOE_MAX_EXPERTS = 512, K_MOE_MAX_TOP = 16, K_MOE_TILE = 128 };

/* Softmax over E in f32, the top_k largest (ties: lower id), renormed or not; op_moe_route. The
 * caller makes the logits (h times the router's weight, f32 out). */
struct k_moe_route {
    int32_t n_rows;
    int32_t E;           /* at most K_MOE_MAX_EXPERTS */
    int32_t top_k;       /* at most E and K_MOE_MAX_TOP */
    int32_t renorm;      /* 0, 1 */
    const float *logits; /* [n_rows, E] f32 */
    int32_t *ids;        /* out [n_rows, top_k], by weight, largest first */
    float *weights;      /* out [n_rows, top_k] */
};
cudaError_t k_moe_route(const struct k_moe_route *a, cudaStream_t stream);

/* Which rows each expert has. A place is a (row, choice) pair; places are sorted by expert, in
 * row order inside one. A tile is up to K_MOE_TILE places of one expert; tiles come in pairs of
 * one expert, of which the second may be empty. */
struct k_moe_list {
    int32_t n_rows, top_k, E;
    const int32_t *n_live; /* device: the rows that count, at most n_rows; NULL: all */
    int32_t max_tiles;     /* the most there can be; sizes the grids */
    int32_t *first;        /* [E + 1] first place of each expert */
    int32_t *rows;         /* [n_rows * top_k] row of each place */
    int32_t *place;        /* [n_rows, top_k] place of each choice */
    int32_t *tiles;        /* [max_tiles, 2] expert, first place */
    int32_t *n_tiles;      /* [1] */
    int32_t *counts;       /* private */
};

/* Workspace of a list, and the list laid out in such a workspace (nothing is launched; n_live
 * is NULL). */
size_t k_moe_list_bytes(int64_t n_rows, int32_t top_k, int32_t E);
void k_moe_list_make(struct k_moe_list *list, void *work, int32_t n_rows, int32_t top_k,
                     int32_t E);

/* Fills the list from the chosen ids. */
struct k_moe_sort {
    struct k_moe_list list;
    const int32_t *ids; /* [n_rows, top_k], 0 .. E - 1 */
};
cudaError_t k_moe_sort(const struct k_moe_sort *a, cudaStream_t stream);

/* c[i] = a[i or rows[i]] w[expert of place i]^T for every place i of the list. With swiglu, w
 * is gate rows | up rows and c = silu(gate) * up from the f32 sums, rows / 2 columns. A place's
 * bits depend on its own row and expert alone: k in ascending steps of 16, never split. */
struct k_moe_gemm {
    const struct k_device *dev; /* host memory; NULL: the portable body */
    int32_t body;               /* a K_MOE_ value; tests and benchmarks pick one, else AUTO */
    struct k_moe_list list;     /* filled */
    int32_t gather; /* 1: a is [n_rows, cols], place i reads row rows[i]; 0: [places, cols] */
    int32_t swiglu; /* 0, 1 */
    int32_t rows;   /* outputs; a multiple of 8, with swiglu of 16 */
    int32_t cols;   /* inputs; a multiple of 8 */
    const void *a;  /* bf16 */
    const void *w;  /* [E, rows, cols] bf16 */
    void *c;        /* out [places, swiglu ? rows / 2 : rows] bf16 */
};
enum { K_MOE_AUTO, K_MOE_PORTABLE, K_MOE_HOPPER };
cudaError_t k_moe_gemm(const struct k_moe_gemm *a, cudaStream_t stream);

/* y = sum over choices, in order, of weight * down[place], + shared * sigmoid(h . shared_gate);
 * f32 until y. */
struct k_moe_combine {
    struct k_moe_list list;   /* filled */
    int32_t M;                /* a multiple of 8 */
    const float *weights;     /* [n_rows, top_k] */
    const void *down;         /* [places, M] bf16 */
    const void *shared;       /* [n_rows, M] bf16, or NULL */
    const void *h;            /* [n_rows, M] bf16; with shared */
    const float *shared_gate; /* [M]; with shared */
    void *y;                  /* out [n_rows, M] bf16; may be shared itself */
};
cudaError_t k_moe_combine(const struct k_moe_combine *a, cudaStream_t stream);

enum { K_TOP_MAX = 20 };

/* struct row_result of backend.h. */
struct k_row_result {
    float lse;
    float target_logprob;
    int32_t top_id[K_TOP_MAX];
    float top_logprob[K_TOP_MAX];
    int32_t n_bad;
    int32_t sampled_id; /* k_head_reduce: -1; k_sample: the token */
    float sampled_logprob;
};

/* h[r] = rmsnorm(x[rows[r]]) * w. */
struct k_head_norm {
    int32_t n_rows;
    int32_t M; /* a multiple of 8, at most 8192 */
    float eps;
    const int32_t *rows; /* [n_rows] */
    const float *x;      /* [T, M] f32 */
    const float *w;      /* [M], holds 1 + w */
    void *h;             /* out [n_rows, M] bf16 */
};
cudaError_t k_head_norm(const struct k_head_norm *a, cudaStream_t stream);

/* Log-sum-exp, the target's logprob, candidates and the count of NaN and infinite logits for a
 * block of rows; backend.h op_head. A row's bits do not depend on its block. The caller makes
 * the logits in blocks of rows (h times the head's weight, f32 out). */
struct k_head_reduce {
    int32_t n_rows;
    int32_t vocab;
    int32_t ld;               /* row length of logits, a multiple of 4, >= vocab */
    const float *logits;      /* [n_rows, ld] f32 */
    const int32_t *targets;   /* [n_rows] token, or -1 */
    const int32_t *row_top;   /* [n_rows] candidates wanted, 0..K_TOP_MAX */
    struct k_row_result *out; /* [n_rows] */
};
cudaError_t k_head_reduce(const struct k_head_reduce *a, cudaStream_t stream);

/* struct row_adjust and struct row_sample of backend.h, with the adjustments in one array. */
struct k_adjust {
    int32_t id;
    float scale, add;
};
struct k_sample_row {
    int32_t row; /* of the step's rows */
    float inv_temperature;
    int32_t top_k;
    float top_p, min_p, u;
    int32_t n_adjust, adjust0;
};

/* A token for each sample whose row is among these, after k_head_reduce of the same rows:
 * sampled_id and sampled_logprob of out. Changes the logits of those rows, and add of their
 * adjustments. A row's token does not depend on the others. */
struct k_sample {
    int32_t n_samples;
    int32_t row0, n_rows; /* the step's rows that logits and out hold */
    int32_t vocab, ld;
    float *logits;                      /* [n_rows, ld] */
    const struct k_sample_row *samples; /* [n_samples] */
    struct k_adjust *adjust;
    struct k_row_result *out; /* [n_rows] */
};
cudaError_t k_sample(const struct k_sample *a, cudaStream_t stream);

/* Every byte 0xff: NaN as f32 and bf16, -1 as int32. */
cudaError_t k_fill_nan(void *p, size_t bytes, cudaStream_t stream);

/* copy.cu: slot to[i] of a pool becomes a copy of slot from[i]; no slot is written that another
 * entry reads or writes. By value, so that the list needs no copy to the device. */
enum { K_COPY_MAX = 64 };
struct k_copy_slots {
    void *pool;         /* [n_slots, slot_bytes], 16-byte aligned */
    int64_t slot_bytes; /* a multiple of 16 */
    int32_t n;          /* 0..K_COPY_MAX */
    int32_t from[K_COPY_MAX], to[K_COPY_MAX];
};
cudaError_t k_copy_slots(const struct k_copy_slots *a, cudaStream_t stream);

/* bf16 p[i] = std * normal(seed, first + i), a counter-based hash: parts can be made alone. */
cudaError_t k_fill_normal(void *p, int64_t n, int64_t first, uint64_t seed, float std,
                          cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
