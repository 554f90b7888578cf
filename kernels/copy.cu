/* Copies of state slots within a pool: a checkpoint taken, or a request that begins at one.
 *
 * grid (blocks of a slot, entries), COPY_THREADS threads, COPY_EACH times 16 bytes a thread.
 * Limit: memory, each byte read and written once. */
#include "common.cuh"

// ---- kernels

enum { COPY_THREADS = 256, COPY_EACH = 8 };

__global__ static void __launch_bounds__(COPY_THREADS)
    copy_slots_kernel(const struct k_copy_slots a)
{
    const int64_t n = a.slot_bytes / (int64_t)sizeof(uint4);
    uint4 *pool = (uint4 *)a.pool;
    const uint4 *from = pool + a.from[blockIdx.y] * n;
    uint4 *to = pool + a.to[blockIdx.y] * n;
    int64_t first = (int64_t)blockIdx.x * COPY_THREADS * COPY_EACH + threadIdx.x;
#pragma unroll
    for (int i = 0; i < COPY_EACH; i++) {
        int64_t at = first + (int64_t)i * COPY_THREADS;
        if (at < n)
            to[at] = from[at];
    }
}

// ---- launchers

extern "C" cudaError_t k_copy_slots(const struct k_copy_slots *a, cudaStream_t stream)
{
    int64_t blocks = ceil_div(a->slot_bytes, (int64_t)sizeof(uint4) * COPY_THREADS * COPY_EACH);
    if (a->n < 0 || a->n > K_COPY_MAX || a->slot_bytes < 0 || a->slot_bytes % sizeof(uint4) ||
        blocks > INT32_MAX)
        return cudaErrorInvalidValue;
    if (a->n == 0 || blocks == 0)
        return cudaSuccess;
    dim3 grid((unsigned)blocks, (unsigned)a->n);
    copy_slots_kernel<<<grid, COPY_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
