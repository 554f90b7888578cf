/* A backend: the operations of a hybrid model's forward pass on one kind of device.
 *
 * One table of operations, with a plain CPU body for each (cpu_*.c), which is the reference for
 * the others. An operation exists because the model's mathematics has that step; fusions live
 * inside a launcher. Only the engine thread calls a backend after start-up. Operations enqueue
 * work in order and do not wait (the CPU backend runs them at once); the only waits are step
 * completion and the set-up and debug calls that say so.
 *
 * Glossary, used for every shape in the program:
 *   T tokens in the batch        N sequences (pieces) in the batch   C chunk length, 64
 *   H key heads (GDN)            HV value heads (GDN)                HQ query heads (attention)
 *   HK KV heads (attention)      D attention head dim, 256           K, V GDN head dims, 128
 *   M model (hidden) dim         F feed-forward hidden dim           E experts
 *   P page tokens                L layers                            R rows asked for (head)
 *   NC chunks in the batch
 * Tensors are row-major, innermost last. `act` is the backend's activation dtype (f32 on the
 * CPU, bf16 on CUDA). The residual stream, gates, decay, state and all reductions are f32.
 *
 * Bits: every operation gives a row (token, sequence) the same bits whatever else is in the
 * batch, wherever it stands in it, whatever slot and pages it has, and however its prompt was
 * cut at multiples of 64. */
#ifndef PREFILLD_BACKEND_H
#define PREFILLD_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum { CHUNK_TOKENS = 64, TOP_MAX = 20, LABELS_MAX = 32, COPY_MARKS = 16 };

enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_F16 };

static inline size_t dtype_bytes(enum dtype d)
{
    return d == DTYPE_F32 ? 4 : 2;
}

/* ---- weights ----------------------------------------------------------------------------- */

/* A run of whole rows of a weight, in host memory (usually a mapped file). */
struct weight_part {
    const void *rows; /* [n_rows, cols] dtype, borrowed until weight_make returns; for
                         WEIGHT_EMBED | WEIGHT_BORROW until weight_free */
    enum dtype dtype;
    int64_t n_rows;
};

/* What a weight is used for; both for a tied embedding. WEIGHT_BORROW, with WEIGHT_EMBED: the
 * rows outlive the weight, so a backend that shares the host's memory may keep the embedding of
 * a single part where it is. weight_make clears the bit in out->use when it copied. */
enum weight_use { WEIGHT_MATMUL = 1, WEIGHT_EMBED = 2, WEIGHT_BORROW = 4 };

/* n_mats matrices [rows, cols] (n_mats > 1: experts), in a layout private to the backend. */
struct weight {
    int32_t n_mats;
    int32_t rows; /* outputs of the product */
    int32_t cols; /* inputs of the product */
    enum dtype dtype;
    unsigned use;
    void *data;  /* matmul form; private */
    void *embed; /* [rows, cols] dtype row-major, when use has WEIGHT_EMBED; private */
    size_t bytes;
};

/* ---- one step's metadata, in backend memory ---------------------------------------------- */

/* Flat list of the chunks of a batch. lengths 130, 20, 300 give 9 entries:
 * (0,0) (0,1) (0,2) (1,0) (2,0) (2,1) (2,2) (2,3) (2,4). */
struct chunk_map {
    int32_t *seq;       /* [NC] which sequence */
    int32_t *index;     /* [NC] which chunk of it */
    int32_t *tok;       /* [NC] first token of the chunk in the batch */
    int32_t *seq_first; /* [N + 1] first flat chunk of each sequence; last entry NC */
};

/* A change to a token's logit before one is sampled: x > 0 becomes x / scale, x <= 0 x * scale;
 * then add is added, -INFINITY to exclude it. */
struct row_adjust {
    int32_t id;
    float scale, add;
};

/* Of all samples of a step, adjustments. */
enum { SAMPLE_MAX_ADJUST = 1 << 18 };

/* One token to sample from a row's logits: adjusted, times inv_temperature, cut to the top_k
 * largest, of those to what is at least min_p times the largest probability, of those to the
 * largest that sum to top_p; then the first, in order of ids, at which the sum of probabilities
 * passes u of the whole. Equal ones are cut together. */
struct row_sample {
    int32_t row;           /* index into rows; rising from one sample to the next */
    float inv_temperature; /* INFINITY: the largest adjusted logit, ties to the lower id */
    int32_t top_k;         /* 0: all */
    float top_p, min_p;    /* 1 and 0: all */
    float u;               /* [0, 1) */
    int32_t n_adjust;
    const struct row_adjust *adjust; /* [n_adjust] host memory, distinct ids */
};

/* Counts are host values; pointers are backend memory, valid until the step's end. */
struct batch {
    int32_t n_tokens;          /* T */
    int32_t n_seqs;            /* N */
    int32_t n_chunks;          /* NC, from host arithmetic: sum of ceil(len / 64) */
    int32_t n_rows;            /* R */
    int32_t max_pages;         /* row length of page_table */
    int32_t max_len;           /* longest piece in the batch */
    const int32_t *tokens;     /* [T] */
    const int32_t *positions;  /* [T] absolute position in its request */
    const int32_t *cu_seqlens; /* [N + 1]; empty pieces are allowed */
    const int32_t *start;      /* [N] tokens of the request before this piece; 0: the slot's
                                  content is not read, fresh state is written */
    const int32_t *slots;      /* [N] state slot */
    const int32_t
        *save_slots; /* [NC] state slot that also gets the sequence's state and window as
                                  they are behind that chunk, which is whole; -1: none. No
                                  sequence's and no other chunk's. NULL: none at all */
    const int32_t *page_table; /* [N, max_pages] page ids */
    const int32_t *rows;       /* [R] token index in the batch whose logits are wanted */
    const int32_t *targets;    /* [R] token whose logprob is wanted, or -1 */
    const int32_t *row_top;    /* [R] candidates wanted, 0..TOP_MAX */
    int32_t n_samples;
    const struct row_sample *samples; /* [n_samples] host memory */
    struct chunk_map map;
};

/* A state slot that becomes a copy of another, in every GDN layer; or a page, in every
 * attention layer. */
struct slot_copy {
    int32_t from, to;
};

/* Host arrays that step_upload copies; same meaning and shapes as in struct batch. Copies,
 * which the model makes before the first layer, are the host's alone: no slot is written that
 * another of them reads or writes. */
struct batch_host {
    int32_t n_tokens, n_seqs, n_chunks, n_rows, max_pages, max_len;
    const int32_t *tokens, *positions, *cu_seqlens, *start, *slots, *save_slots, *page_table;
    const int32_t *rows, *targets, *row_top;
    int32_t n_samples;
    const struct row_sample *samples;
    bool may_pad; /* the counts of the batch may be rounded up (not n_rows): buffers of the
                     caller have room for the limits' max_tokens, and what is computed in rows
                     beyond n_tokens means nothing */
    int32_t n_copies, n_page_copies;
    const struct slot_copy *copies;      /* [n_copies] */
    const struct slot_copy *page_copies; /* [n_page_copies] */
};

/* What the head gives for one row. Unused candidates have id -1. */
struct row_result {
    float lse;               /* log of the sum of exp(logits) */
    float target_logprob;    /* of targets[r]; 0 when that is -1 */
    int32_t top_id[TOP_MAX]; /* by logprob, ties by lower id; at least 1 when row_top >= 1 */
    float top_logprob[TOP_MAX];
    int32_t n_bad;         /* logits that are NaN or infinite: the row is not to be trusted */
    int32_t sampled_id;    /* with a sample, else -1 */
    float sampled_logprob; /* of the logits before adjusting */
};

/* ---- pools ------------------------------------------------------------------------------- */

/* One GDN layer's part of every state slot. */
struct state_pool {
    int32_t n_slots;
    void *S;    /* [n_slots, HV, K*V] f32, inner layout private to the backend */
    void *conv; /* [n_slots, conv_dim, 3] act, private layout */
};

/* One attention layer's part of every KV page. */
struct kv_pool {
    int32_t n_pages;
    int32_t page_tokens; /* P, a multiple of 64 */
    void *k;             /* [n_pages, HK, P, D] act, private layout */
    void *v;             /* same */
};

/* ---- operation arguments ----------------------------------------------------------------- */

struct op_embed {
    const struct batch *b;
    const struct weight *w; /* [vocab, M], made with WEIGHT_EMBED */
    float *x;               /* out [T, M] f32 residual */
};

/* x += y when y is not NULL; h = x * rsqrt(mean(x^2) + eps) * w. w already holds 1 + w for the
 * zero-centred norms. */
struct op_rmsnorm {
    int32_t n_rows;
    int32_t dim;
    float eps;
    float *x;       /* [n_rows, dim] f32, updated */
    const void *y;  /* [n_rows, dim] act, or NULL */
    const float *w; /* [dim] f32, backend memory */
    void *h;        /* out [n_rows, dim] act; NULL: only the sum */
};

/* c = a * w^T. */
struct op_matmul {
    int32_t n_rows;
    const struct weight *w; /* [rows, cols], n_mats 1 */
    const void *a;          /* [n_rows, w->cols] act */
    void *c;                /* out [n_rows, ldc] act; columns 0..w->rows-1 are written */
    int64_t ldc;            /* >= w->rows */
};

struct gdn_dims {
    int32_t H, HV, K, V;
    int32_t conv_dim; /* 2*H*K + HV*V */
    int32_t ld;       /* row length of the projection p */
};

/* Projection rows are q [H*K] | k [H*K] | v [HV*V] | z [HV*V] | b [HV] | a [HV].
 * Causal depthwise convolution (4 taps, the last multiplies the current token) over q|k|v,
 * SiLU, then q, k: x * rsqrt(sum x^2 + 1e-6) per head, q also * K^-0.5; beta = sigmoid(b);
 * g = -exp(A_log) * softplus(a + dt_bias). gdn.md 1.1. */
struct op_gdn_conv {
    const struct batch *b;
    struct gdn_dims d;
    const void *p;                 /* [T, ld] act */
    const float *conv_w;           /* [conv_dim, 4] */
    const float *A_log;            /* [HV] */
    const float *dt_bias;          /* [HV] */
    const struct state_pool *pool; /* conv: read unless start is 0, written: the last 3 inputs
                                      before the convolution, older ones shifted, oldest first;
                                      and so in save_slots */
    void *q;                       /* out [T, H, K] act */
    void *k;                       /* out [T, H, K] act */
    void *v;                       /* out [T, HV, V] act */
    float *g;                      /* out [T, HV], <= 0 */
    float *beta;                   /* out [T, HV] */
};

/* The gated delta rule, value head h reading key head h / (HV / H):
 * S = exp(g) S; S += k (beta (v - S^T k))^T; o = S^T q. Chunks of 64 from each piece's start.
 * Then, when z is not NULL, o = rmsnorm(o over V) * w * silu(z). gdn.md 1.2. */
struct op_gdn_delta {
    const struct batch *b;
    struct gdn_dims d;
    const void *q, *k, *v;         /* as op_gdn_conv gives them */
    const float *g, *beta;         /* [T, HV] */
    const struct state_pool *pool; /* S: read unless start is 0, written; and to save_slots */
    const void *z;                 /* act, row t at z + t * ld: [HV, V]; may be NULL */
    const float *norm_w;           /* [V], plain weight; with z */
    float eps;
    void *o; /* out [T, HV * V] act */
};

struct attn_dims {
    int32_t HQ, HK, D;
    int32_t rot_dim; /* leading dims that rotate, 64 */
    int32_t ld;      /* row length of the projection p */
};

/* Projection rows are q [HQ*D] | gate [HQ*D] | k [HK*D] | v [HK*D].
 * q, k: RMSNorm over D with weights that already hold 1 + w, then RoPE on the first rot_dim
 * dims (halves: i with i + rot_dim/2, angle = position * inv_freq[i]); k and v go to their
 * pages. */
struct op_attn_prep {
    const struct batch *b;
    struct attn_dims d;
    void *p;                      /* [T, ld] act; the q columns are replaced */
    const float *q_norm, *k_norm; /* [D] */
    const float *inv_freq;        /* [rot_dim / 2] */
    float eps;
    const struct kv_pool *pool;
};

/* o = softmax(q k^T / sqrt(D), causal) v * sigmoid(gate), over the request's pages from
 * position 0. Never reads a page position past the token's own. */
struct op_attn {
    const struct batch *b;
    struct attn_dims d;
    const void *p; /* [T, ld] act, after op_attn_prep */
    const struct kv_pool *pool;
    void *o; /* out [T, HQ * D] act */
};

/* Router: softmax over all E experts in f32, the k largest (ties: lower id), weights divided by
 * their sum when renorm. */
struct op_moe_route {
    int32_t n_rows;
    int32_t top_k;
    bool renorm;
    const struct weight *router; /* [E, M] */
    const void *h;               /* [n_rows, M] act */
    int32_t *ids;                /* out [n_rows, top_k], by weight, largest first */
    float *weights;              /* out [n_rows, top_k] */
};

/* y = sum over chosen experts of weight * down(silu(gate) * up), in order of ids' places, plus
 * shared * sigmoid(h . shared_gate) when shared is not NULL. */
struct op_moe_experts {
    int32_t n_rows;
    int32_t top_k;
    const struct weight *gate_up; /* E x [2 F, M], gate rows first */
    const struct weight *down;    /* E x [M, F] */
    const void *h;                /* [n_rows, M] act */
    const int32_t *ids;
    const float *weights;
    const void *shared;       /* [n_rows, M] act, the shared expert's output, or NULL */
    const float *shared_gate; /* [M] f32; with shared */
    void *y;                  /* out [n_rows, M] act */
};

/* c = silu(gate) * up, rows gate [F] | up [F]. */
struct op_swiglu {
    int32_t n_rows;
    int32_t F;
    const void *gu; /* [n_rows, 2 F] act */
    void *c;        /* out [n_rows, F] act */
};

/* For each wanted row: final norm (w holds 1 + w), logits, log-sum-exp, target logprob,
 * candidates; logits in blocks of rows, R x vocab is never stored. */
struct op_head {
    const struct batch *b;
    const float *x;      /* [T, M] f32 residual, already summed */
    const float *norm_w; /* [M] */
    float eps;
    int32_t M;
    const struct weight *w; /* [vocab, M] */
    struct row_result *out; /* [R] backend memory */
};

/* ---- the table --------------------------------------------------------------------------- */

/* Limits that size an operation's workspace; fixed at start. */
struct backend_limits {
    int32_t max_tokens; /* T of a step */
    int32_t max_seqs;   /* N of a step */
    int32_t max_rows;   /* R of a step: one a token, and LABELS_MAX more a piece */
    int32_t max_pages;  /* pages of one request */
    /* 0 where the model has none. F: of the wider of dense and shared MLPs. */
    int32_t M, F, shared_F, moe_F, E, top_k, vocab, HQ, HV, conv_dim;
};

struct backend {
    const struct backend_ops *ops;
    enum dtype act;
    void *impl;       /* private */
    const char *lost; /* why the device was lost, in words; NULL: it was not. The backend's */
    const char *cache_dir; /* a folder for what start-up measures; NULL: none. Set by the caller
                              after open, borrowed */
};

/* One operation of a step. */
struct step_span {
    const char *name;
    float us;
    float host_us; /* the host took to enqueue it */
};

/* How a step ran, on the device's clock. */
struct step_times {
    float gap_us;     /* the device idle before it, since the step before it ended; negative: it
                        was launched after that, so idling was not the backend's doing */
    float device_us;  /* from the begin of its first operation to the end of its last */
    bool is_replayed; /* its layers were enqueued at once, as recorded */
    int32_t n_spans;  /* while tracing: its operations in order, back to back */
    const struct step_span *spans; /* borrowed until the next step_done */
};

struct backend_ops {
    const char *name;   /* "cpu", "cuda" */
    int32_t max_adjust; /* adjustments in all samples of a step; 0: any number */

    /* Opens the device: threads (0: all) for the CPU, device index for CUDA. Fills *b. */
    int (*open)(struct backend *b, int32_t device_or_threads, struct errmsg *e);
    void (*close)(struct backend *b);

    /* Free and total bytes of the memory that alloc draws from. */
    void (*memory)(struct backend *b, size_t *free_bytes, size_t *total_bytes);
    /* Set-up only. Contents are undefined. NULL when there is no room. */
    void *(*alloc)(struct backend *b, size_t bytes);
    void (*free)(struct backend *b, void *p);
    /* Set-up, tests, export: waits until done. */
    int (*upload)(struct backend *b, void *dst, const void *src_host, size_t bytes);
    int (*download)(struct backend *b, void *dst_host, const void *src, size_t bytes);

    /* Whether the operations take these sizes (gd, ad NULL: the model has no such layer).
     * Returns 0, or ERR_UNSUPPORTED with what was found and what is accepted. */
    int (*check)(struct backend *b, const struct gdn_dims *gd, const struct attn_dims *ad,
                 const struct backend_limits *l, struct errmsg *e);

    /* Makes the private form of n_mats * rows rows given by parts in order. Set-up only. Parts
     * of different dtypes make an f32 weight (an embedding's parts must be of one).
     * weight_bytes: what it will take, before anything is allocated. */
    size_t (*weight_bytes)(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                           enum dtype dtype, unsigned use);
    int (*weight_make)(struct backend *b, const struct weight_part *parts, int32_t n_parts,
                       int32_t n_mats, int32_t rows, int32_t cols, unsigned use,
                       struct weight *out, struct errmsg *e);
    /* The same with seeded random bf16 rows of that standard deviation, made where the weight
     * lies. NULL: the caller makes rows on the host. */
    int (*weight_random)(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                         unsigned use, uint64_t seed, float std, struct weight *out,
                         struct errmsg *e);
    void (*weight_free)(struct backend *b, struct weight *w);

    /* Workspace of the operations and of the metadata ring, for these limits. */
    size_t (*workspace_bytes)(struct backend *b, const struct backend_limits *l);
    int (*workspace_make)(struct backend *b, const struct backend_limits *l, struct errmsg *e);

    /* Starts a step: copies the metadata (one transfer) and builds the chunk map. Fills *out.
     * At most two steps are between step_begin and step_done. h is borrowed until the step is
     * done. */
    int (*step_begin)(struct backend *b, const struct batch_host *h, struct batch *out);
    void (*chunk_map)(struct backend *b, struct batch *batch);
    /* Enqueuing all layers at once, for a step begun with may_pad. replay: true when the layers
     * (embed to the last sum) were enqueued as recorded for an earlier step; else the caller
     * enqueues them, and calls record_begin. When that is true it enqueues them once more, to
     * be recorded and not run, and calls record_end with whether it did so to the end. NULL:
     * the backend replays nothing. */
    bool (*replay)(struct backend *b);
    bool (*record_begin)(struct backend *b);
    void (*record_end)(struct backend *b, bool is_whole);
    /* Ends it: enqueues the copy of R results to host memory. */
    int (*step_end)(struct backend *b, const struct batch *batch, const struct row_result *src,
                    struct row_result *dst_host);
    /* 1: the oldest step's results are in host memory; 0: not yet (only when !wait); negative
     * enum err: the device is lost. */
    int (*step_done)(struct backend *b, bool wait);
    /* Times of the step that step_done gave last. NULL: the backend keeps none. Tracing adds
     * spans; it costs device time and is for looking. Returns 0 or ERR_NOMEM. */
    void (*step_times)(struct backend *b, struct step_times *out);
    int (*trace)(struct backend *b, bool on);

    void (*embed)(struct backend *b, const struct op_embed *a);
    void (*rmsnorm)(struct backend *b, const struct op_rmsnorm *a);
    void (*matmul)(struct backend *b, const struct op_matmul *a);
    void (*gdn_conv)(struct backend *b, const struct op_gdn_conv *a);
    void (*gdn_delta)(struct backend *b, const struct op_gdn_delta *a);
    void (*attn_prep)(struct backend *b, const struct op_attn_prep *a);
    void (*attn)(struct backend *b, const struct op_attn *a);
    void (*moe_route)(struct backend *b, const struct op_moe_route *a);
    void (*moe_experts)(struct backend *b, const struct op_moe_experts *a);
    void (*swiglu)(struct backend *b, const struct op_swiglu *a);
    void (*head)(struct backend *b, const struct op_head *a);

    /* Pools. Canonical forms on the host: S [HV, K, V] f32, conv [conv_dim, 3] f32 oldest
     * first, k and v [HK, n_tokens, D] f32. They wait until done: tests. */
    size_t (*state_bytes)(struct backend *b,
                          const struct gdn_dims *d); /* of one slot, a layer */
    size_t (*page_bytes)(struct backend *b, const struct attn_dims *d, int32_t page_tokens);
    int (*state_pool_make)(struct backend *b, const struct gdn_dims *d, int32_t n_slots,
                           struct state_pool *out);
    int (*kv_pool_make)(struct backend *b, const struct attn_dims *d, int32_t n_pages,
                        int32_t page_tokens, struct kv_pool *out);
    void (*state_pool_free)(struct backend *b, struct state_pool *p);
    void (*kv_pool_free)(struct backend *b, struct kv_pool *p);
    int (*state_read)(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                      int32_t slot, float *S, float *conv);
    int (*state_write)(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                       int32_t slot, const float *S, const float *conv);
    int (*kv_read)(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                   const int32_t *pages, int32_t n_tokens, float *k, float *v);
    int (*kv_write)(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                    const int32_t *pages, int32_t n_tokens, const float *k, const float *v);
    /* Copies of parts as they lie, for export and import: of a slot in one layer (state_bytes),
     * or of the keys, or values, of a page in one layer (half of page_bytes), to and from host
     * memory of stage_alloc. They go beside the steps, to memory that no step under way reads
     * or writes; those behind copies_follow come after all that was enqueued before it.
     * copies_mark remembers what was enqueued as entry i, 0 to COPY_MARKS - 1; copies_done: 1:
     * that is done, 0: not yet (only when !wait), ERR_DEVICE. The three are NULL where copies
     * are made at once. */
    void *(*stage_alloc)(struct backend *b, size_t bytes); /* set-up; NULL: there is no room */
    void (*stage_free)(struct backend *b, void *p);
    int (*slot_get)(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    int32_t slot, void *stage);
    int (*slot_put)(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    int32_t slot, const void *stage);
    int (*page_get)(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                    int32_t page, bool is_value, void *stage);
    int (*page_put)(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                    int32_t page, bool is_value, const void *stage);
    void (*copies_follow)(struct backend *b);
    int (*copies_mark)(struct backend *b, int32_t i);
    int (*copies_done)(struct backend *b, int32_t i, bool wait);
    /* Between such bytes and canonical ones; on the host, any thread. S [HV, K, V] f32, conv
     * [conv_dim, 3] act oldest first, rows [n_tokens, HK, D] act, of a page's first tokens:
     * packed, the others become 0. */
    void (*slot_unpack)(const struct gdn_dims *d, const void *raw, float *S, void *conv);
    void (*slot_pack)(const struct gdn_dims *d, const float *S, const void *conv, void *raw);
    void (*page_unpack)(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                        int32_t n_tokens, const void *raw, void *rows);
    void (*page_pack)(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                      int32_t n_tokens, const void *rows, void *raw);
    /* In a step: makes n (>= 0) slots copies of others. copies is host memory, borrowed for the
     * call; no slot in it is written that another of them reads or writes. */
    void (*state_copy)(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                       const struct slot_copy *copies, int32_t n);
    /* The same for pages. */
    void (*page_copy)(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                      const struct slot_copy *copies, int32_t n);
    /* Fills a freed slot or page with NaN, enqueued; debug builds and wiping after a fault. */
    void (*state_poison)(struct backend *b, const struct gdn_dims *d,
                         const struct state_pool *p, int32_t slot);
    void (*page_poison)(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                        int32_t page);
};

/* The table of a backend by name: "cpu", "cuda" or "auto": cuda where this build has it and a
 * driver is installed, whether or not that works (open says), else cpu. NULL: not in this
 * build, and e says so. */
const struct backend_ops *backend_find(const char *name, struct errmsg *e);

extern const struct backend_ops backend_cpu_ops;
/* In builds with CUDA alone. */
extern const struct backend_ops backend_cuda_ops;
/* Whether an NVIDIA driver is installed, working or not. */
bool cuda_has_driver(void);

#endif
