/* The chunk map: cu_seqlens -> flat list of (sequence, chunk, first token), first chunk of each
 * sequence, and the sequences by falling length.
 *
 * Derived here. For sequence s of length n_s: c_s = ceil(n_s / 64); seq_first = exclusive sum of
 * c_s; flat chunk f belongs to the last s with seq_first[s] <= f. Every block sums all counts
 * in shared memory (16 KB of cu_seqlens from L2), then its threads search their own chunk and
 * rank their own sequence: no second pass, no atomics, nothing read back.
 *
 * Grid ceil(max(NC, N + 1) / 256), block 256, shared 16.4 KB. Limit: latency, some microseconds;
 * N^2 comparisons for the order (N <= 4096, spread over the blocks). */
#include "common.cuh"

// ---- kernels

enum { MAP_THREADS = 256 };

__device__ static int n_chunks_of(const int32_t *cu, int s)
{
    return (cu[s + 1] - cu[s] + K_CHUNK - 1) / K_CHUNK;
}

__global__ static void __launch_bounds__(MAP_THREADS) chunk_map_kernel(struct k_batch b)
{
    __shared__ int32_t first[K_MAX_SEQS + 1];
    __shared__ int32_t warp_total[MAP_THREADS / 32];
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int per = (b.n_seqs + MAP_THREADS - 1) / MAP_THREADS;
    int s0 = min(tid * per, b.n_seqs), s1 = min(s0 + per, b.n_seqs);

    int sum = 0;
    for (int s = s0; s < s1; s++)
        sum += n_chunks_of(b.cu_seqlens, s);
    int scan = sum;
    for (int m = 1; m < 32; m <<= 1) {
        int up = __shfl_up_sync(0xffffffffu, scan, m);
        if (lane >= m)
            scan += up;
    }
    if (lane == 31)
        warp_total[warp] = scan;
    __syncthreads();
    int at = scan - sum;
    for (int w = 0; w < warp; w++)
        at += warp_total[w];
    for (int s = s0; s < s1; s++) {
        first[s] = at;
        at += n_chunks_of(b.cu_seqlens, s);
    }
    if (tid == MAP_THREADS - 1)
        first[b.n_seqs] = at;
    __syncthreads();

    int i = blockIdx.x * MAP_THREADS + tid;
    if (i <= b.n_seqs)
        b.seq_first[i] = first[i];
    if (i < b.n_seqs) {
        int mine = first[i + 1] - first[i], rank = 0;
        for (int s = 0; s < b.n_seqs; s++) {
            int c = first[s + 1] - first[s];
            rank += c > mine || (c == mine && s < i);
        }
        b.seq_order[rank] = i;
    }
    if (i < b.n_chunks) {
        int lo = 0, hi = b.n_seqs;
        while (hi - lo > 1) {
            int mid = (lo + hi) / 2;
            if (first[mid] <= i)
                lo = mid;
            else
                hi = mid;
        }
        b.chunk_seq[i] = lo;
        b.chunk_index[i] = i - first[lo];
        b.chunk_tok[i] = b.cu_seqlens[lo] + (i - first[lo]) * K_CHUNK;
    }
}

// ---- launchers

extern "C" cudaError_t k_chunk_map(const struct k_chunk_map *a, cudaStream_t stream)
{
    if (a->b.n_seqs < 0 || a->b.n_seqs > K_MAX_SEQS || a->b.n_chunks < 0)
        return cudaErrorInvalidValue;
    int64_t n = a->b.n_chunks > a->b.n_seqs ? a->b.n_chunks : a->b.n_seqs + 1;
    chunk_map_kernel<<<(unsigned)ceil_div(n, MAP_THREADS), MAP_THREADS, 0, stream>>>(a->b);
    return cudaGetLastError();
}

extern "C" cudaError_t k_device_query(int32_t device, struct k_device *out)
{
    int major = 0, minor = 0, n = 0, smem = 0;
    cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    out->cc = 10 * major + minor;
    out->n_sms = n;
    out->smem_bytes = smem;
    return e;
}
