/* What the bodies of the gated delta rule share: the workspace of one (chunk, value head) and
 * how a launcher reaches each body. */
#ifndef PREFILLD_GDN_DELTA_CUH
#define PREFILLD_GDN_DELTA_CUH

#include "gdn_solve.cuh"

enum { GDN_D = 128 };

/* At work + (flat chunk * HV + value head) * sizeof; A and P as swizzled tiles. */
struct gdn_unit {
    uint8_t A[TILE_BYTES];
    uint8_t P[TILE_BYTES];
    float gates[128]; /* eg [64] | el [64] */
};

/* Hopper bodies; body is K_GDN_SPLIT (after gdn_prep) or K_GDN_FUSED. */
cudaError_t gdn_delta_hopper(const struct k_gdn_delta *a, int32_t body, cudaStream_t stream);

#endif
