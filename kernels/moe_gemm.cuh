/* The bodies of the experts' products. */
#ifndef PREFILLD_MOE_GEMM_CUH
#define PREFILLD_MOE_GEMM_CUH

#include "tile.cuh"

/* The body for compute capability 9.0; shapes are checked and there are tiles. */
cudaError_t moe_gemm_hopper(const struct k_moe_gemm *a, cudaStream_t stream);

#endif
