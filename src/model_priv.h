/* What model.c and model_size.c share. */
#ifndef PREFILLD_MODEL_PRIV_H
#define PREFILLD_MODEL_PRIV_H

#include "model.h"

/* The layer loop's buffers, [max_step_tokens, ...] each. */
enum scratch {
    SCRATCH_X,      /* [T, M] f32 residual */
    SCRATCH_H,      /* [T, M] act: normalised input of a block */
    SCRATCH_Y,      /* [T, M] act: output of a block, not yet added to x */
    SCRATCH_P,      /* [T, widest projection] act */
    SCRATCH_O,      /* [T, widest block inside] act */
    SCRATCH_Q,      /* [T, H, K] act */
    SCRATCH_K,      /* [T, H, K] act */
    SCRATCH_V,      /* [T, HV, V] act */
    SCRATCH_G,      /* [T, HV] f32 */
    SCRATCH_BETA,   /* [T, HV] f32 */
    SCRATCH_IDS,    /* [T, top_k] i32 */
    SCRATCH_GATES,  /* [T, top_k] f32 */
    SCRATCH_SHARED, /* [T, M] act */
    SCRATCH_ROWS,   /* [T] struct row_result */
    SCRATCH_FREQ,   /* [rot_dim / 2] f32 */
    SCRATCH_COUNT
};

/* Bytes of each for steps of max_tokens; 0: the model has no use for it. */
void model_scratch_list(const struct arch *a, enum dtype act, int32_t max_tokens,
                        size_t bytes[SCRATCH_COUNT]);

struct gdn_dims model_gdn_dims(const struct arch *a);
struct attn_dims model_attn_dims(const struct arch *a);
struct backend_limits model_limits(const struct arch *a, const struct model_sizes *s);

#endif
