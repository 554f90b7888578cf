/* The chunk map: cu_seqlens -> flat list of (sequence, chunk, first token), first chunk of each
 * sequence, and the sequences by falling length.
 *
 * Derived here. For sequence s of length n_s: c_s = ceil(n_s / 64); seq_first = exclusive sum
 * of c_s; flat chunk f belongs to the last s with seq_first[s] <= f. Every block sums all
 * counts in shared memory (16 KB of cu_seqlens from L2), then its threads search their own
 * chunk and rank their own sequence: no second pass, no atomics, nothing read back.
 *
 * Grid max(ceil(NC / 256), ceil((N + 1) / 16)), block 256, shared 16.4 KB. Limit: latency; N^2
 * comparisons for the order, spread over the blocks (20 us for N = 4096, 8 for N = 8). */
#include "common.cuh"

// ---- kernels

/* A block ranks RANK_SEQS sequences, RANK_THREADS threads each. */
enum { MAP_THREADS = 256, RANK_THREADS = 16, RANK_SEQS = MAP_THREADS / RANK_THREADS };

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

    int mine = blockIdx.x * RANK_SEQS + tid / RANK_THREADS, rank = 0;
    if (mine < b.n_seqs) {
        int c = first[mine + 1] - first[mine];
        for (int s = tid % RANK_THREADS; s < b.n_seqs; s += RANK_THREADS) {
            int other = first[s + 1] - first[s];
            rank += other > c || (other == c && s < mine);
        }
    }
    for (int k = RANK_THREADS / 2; k > 0; k >>= 1)
        rank += __shfl_xor_sync(0xffffffffu, rank, k);
    if (mine < b.n_seqs && tid % RANK_THREADS == 0)
        b.seq_order[rank] = mine;

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
    int64_t chunks = ceil_div(a->b.n_chunks, MAP_THREADS);
    int64_t ranks = ceil_div(a->b.n_seqs + 1, RANK_SEQS);
    chunk_map_kernel<<<(unsigned)(chunks > ranks ? chunks : ranks), MAP_THREADS, 0, stream>>>(
        a->b);
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
