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

enum { K_CHUNK = 64, K_MAX_SEQS = 4096 };

/* What the launchers need to know of the card; filled once at start. */
struct k_device {
    int32_t cc;         /* compute capability, 10 * major + minor */
    int32_t n_sms;      /* multiprocessors */
    int32_t smem_bytes; /* shared memory one block may have */
};

cudaError_t k_device_query(int32_t device, struct k_device *out);

/* The packed step as kernels see it; device pointers, counts are host values. */
struct k_batch {
    int32_t n_tokens;          /* T */
    int32_t n_seqs;            /* N, 0..K_MAX_SEQS; empty sequences are allowed */
    int32_t n_chunks;          /* NC = sum of ceil(len / 64) */
    int32_t max_len;           /* longest sequence */
    const int32_t *cu_seqlens; /* [N + 1] */
    const int32_t *start;      /* [N] 0: the slot is not read, fresh state is written */
    const int32_t *slots;      /* [N] */
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
    void *conv_state;     /* [n_slots, 3, conv_dim] bf16, oldest first, updated */
    void *q, *k;          /* out [T, H, 128] bf16, normalised; q also * 128^-0.5 */
    void *v;              /* out [T, HV, 128] bf16 */
    float *g, *beta;      /* out [T, HV] */
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
    float *S;              /* [n_slots, HV, V, K] f32 (S transposed), updated */
    void *o;               /* out [T, HV, V] bf16 */
    void *work;            /* k_gdn_delta_work_bytes, 128-byte aligned, through k_gdn_work_init
                              once; contents are private */
    int32_t body;          /* a K_GDN_ value; tests and benchmarks pick one, else AUTO */
};
/* SPLIT and PAIR are the Hopper body's two shapes (a block has half a value head, or both
 * halves); they need compute capability 9.0. */
enum { K_GDN_AUTO, K_GDN_PORTABLE, K_GDN_SPLIT, K_GDN_PAIR };
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

#ifdef __cplusplus
}
#endif
#endif
