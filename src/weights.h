/* The weights of a model, in backend memory, in the forms the layer loop uses.
 *
 * Loaded once by the main thread. The differences between families end here: Qwen3-Next's
 * grouped projection rows are permuted into the flat order of Qwen3.5, per-expert and fused
 * mixtures become one form, zero-centred norms become 1 + w. Everything is checked by name,
 * dtype and shape, all at once, before anything is allocated on the backend. */
#ifndef PREFILLD_WEIGHTS_H
#define PREFILLD_WEIGHTS_H

#include "arch.h"
#include "backend.h"
#include "safetensors.h"

/* One layer; only the members of its kind are set. Vectors are f32 in backend memory. */
struct layer_weights {
    float *in_norm;   /* [M], 1 + w */
    float *post_norm; /* [M], 1 + w */

    /* GDN: rows q | k | v | z | b | a */
    struct weight gdn_in;   /* [2*H*K + 2*HV*V + 2*HV, M] */
    struct weight gdn_out;  /* [M, HV*V] */
    float *conv;            /* [conv_dim, 4] */
    float *A_log, *dt_bias; /* [HV] */
    float *gdn_norm;        /* [V], plain */

    /* attention: rows q [HQ*D] | gate [HQ*D] | k [HK*D] | v [HK*D] */
    struct weight attn_in;  /* [(2*HQ + 2*HK) * D, M] */
    struct weight attn_out; /* [M, HQ*D] */
    float *q_norm, *k_norm; /* [D], 1 + w */

    /* dense MLP, or the shared expert of a mixture */
    struct weight gate_up; /* [2*F, M], gate rows first */
    struct weight down;    /* [M, F] */

    /* mixture */
    struct weight router;         /* [E, M] */
    struct weight expert_gate_up; /* E x [2*moe_F, M] */
    struct weight expert_down;    /* E x [M, moe_F] */
    float *shared_gate;           /* [M] */
};

struct weights {
    struct weight embed;          /* [vocab, M]; also the head when tied */
    struct weight head;           /* [vocab, M]; unused when tied */
    bool tied;                    /* the checkpoint has no lm_head.weight */
    float *final_norm;            /* [M], 1 + w */
    struct layer_weights *layers; /* [n_layers] */
    float *vectors;               /* the memory that all vectors point into */
    size_t bytes;                 /* backend memory taken */
};

/* Backend memory that loading will take, from shapes and dtypes alone; w->bytes afterwards. set
 * NULL: dummy (bf16, tied as the config says). SIZE_MAX when host memory is short. */
size_t weights_bytes(const struct arch *a, const struct st_set *set, struct backend *b);

/* Checks that set holds exactly the tensors a needs (mtp.* and visual.* skipped), with their
 * shapes and a dtype of F32, F16 or BF16. Reports every missing, extra and mis-shaped tensor in
 * one message (as many names as fit, and how many more). Returns 0, ERR_INVALID,
 * ERR_UNSUPPORTED when a tensor or the scales of one are of a type that is not read, as FP8, or
 * ERR_NOMEM. */
int weights_check(const struct arch *a, const struct st_set *set, struct errmsg *e);

/* Called now and then while loading, done in [0, 1], never less than before, at last 1. */
typedef void (*weights_progress)(void *arg, double done);

/* Loads from set (which must outlive *w: embeddings may stay mapped), or, when set is NULL,
 * seeded random bf16 weights (load = dummy) scaled so that activations stay finite. Checks
 * first (weights_check). Takes host memory for a while: a dummy the size of its largest weight,
 * a file whose data is not aligned to its elements the size of that weight. progress may be
 * NULL. Returns 0, or what weights_check and the backend return, with e filled and nothing left
 * behind. Ends with weights_free. */
int weights_load(const struct arch *a, const struct st_set *set, uint64_t seed,
                 struct backend *b, weights_progress progress, void *arg, struct weights *w,
                 struct errmsg *e);
void weights_free(const struct arch *a, struct backend *b, struct weights *w);

#endif
