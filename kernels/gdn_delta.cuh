/* What the bodies of the gated delta rule share: the workspace of one (chunk, value head) and
 * how a launcher reaches each body. */
#ifndef PREFILLD_GDN_DELTA_CUH
#define PREFILLD_GDN_DELTA_CUH

#include "gdn_solve.cuh"

enum { GDN_D = 128 };

/* At work + (flat chunk * HV + value head) * sizeof; A packed tf32 (triangle.cuh), P a tile. */
struct gdn_unit {
    uint8_t A[TRI_PACKED];
    uint8_t P[TILE_BYTES];
    float gates[128]; /* eg [64] | el [64] */
    int32_t ready[2]; /* for each half of V: 1 from gdn_prep, 0 again from its reader; only
                           when the chain runs beside gdn_prep */
    uint8_t pad[120];
};

/* A head's state in a slot. */
__device__ static inline float *gdn_state(const struct k_gdn_delta *a, int slot, int h)
{
    return a->S + ((int64_t)slot * a->d.HV + h) * GDN_D * GDN_D;
}

/* The slot that keeps the state behind a flat chunk, -1: none. To be asked a chunk ahead of its
 * use. */
__device__ static inline int gdn_save_slot(const struct k_gdn_delta *a, int chunk)
{
    return a->b.save_slots[chunk];
}

/* Hopper bodies: K_GDN_SPLIT, the chain after gdn_prep, or K_GDN_FUSED, which has all in one.
 * beside: gdn_prep is running on other multiprocessors and says by unit what is ready. */
cudaError_t gdn_delta_hopper(const struct k_gdn_delta *a, int32_t body, bool beside,
                             cudaStream_t stream);

#endif
