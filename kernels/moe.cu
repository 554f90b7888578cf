/* Mixture of experts without its products: routing, the sort of rows by expert, the sum.
 *
 * gdn.md 1.6.
 *   route    p = softmax(logits) over E; the top_k largest, ties to the lower id; weights p, or
 *            p / sum of the chosen
 *   sort     places (row, choice) by expert, rows ascending inside one; tiles of 128 places
 *   combine  y = sum over choices j, ascending, weight[j] * down[place[j]]
 *                + shared * sigmoid(h . shared_gate)
 * All sums f32 in a fixed order; a row's results depend on nothing but the row.
 *
 * route:   a warp a row, E / 32 logits a lane. Limit: latency; 8 rounds of a warp's maximum.
 * sort:    three launches: counts of each 2048 places by expert (atomics on integers), one
 * block
 *   that scans them (a thread an expert) and lists the tiles, and the placing: a warp ranks its
 *   256 places 32 at a time by matching lanes, after the places before it. Limit: latency.
 * combine: a block a row. Limit: bytes, 2 * (top_k + 3) * M a row. */
#include "common.cuh"

// ---- kernels

enum { ROUTE_THREADS = 128, LANE_EXPERTS = K_MOE_MAX_EXPERTS / 32 };

__device__ static inline float warp_max(float x)
{
#pragma unroll
    for (int m = 16; m > 0; m >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
    return x;
}

/* A probability as a number whose order is that of the choice: NaN is less than any, so that
 * ids are good ones even then, and 0 is no candidate. */
__device__ static inline uint32_t route_key(float p)
{
    return p >= 0 ? __float_as_uint(p) + 2 : 1;
}

__device__ static inline float route_weight(uint32_t key)
{
    return key >= 2 ? __uint_as_float(key - 2) : NAN;
}

/* Expert 32 j + lane lies in p[j]. */
__global__ static void __launch_bounds__(ROUTE_THREADS) route_kernel(struct k_moe_route a)
{
    int row = blockIdx.x * (ROUTE_THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (row >= a.n_rows)
        return;
    const float *logits = a.logits + (int64_t)row * a.E;
    float p[LANE_EXPERTS], max = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++)
        p[j] = 32 * j + lane < a.E ? logits[32 * j + lane] : -INFINITY;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++)
        max = fmaxf(max, p[j]);
    max = warp_max(max);
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) {
        p[j] = 32 * j + lane < a.E ? expf(p[j] - max) : 0;
        sum += p[j];
    }
    sum = warp_sum(sum);
    uint32_t key[LANE_EXPERTS];
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++)
        key[j] = 32 * j + lane < a.E ? route_key(p[j] / sum) : 0;
    float mine = 0, chosen = 0; /* lane i keeps choice i */
    int id = 0;
    for (int i = 0; i < a.top_k; i++) {
        uint32_t best = 0;
        int at = 0;
#pragma unroll
        for (int j = 0; j < LANE_EXPERTS; j++)
            if (key[j] > best) {
                best = key[j];
                at = 32 * j + lane;
            }
        uint32_t most = __reduce_max_sync(0xffffffffu, best);
        at = __reduce_min_sync(0xffffffffu, best == most ? at : K_MOE_MAX_EXPERTS);
#pragma unroll
        for (int j = 0; j < LANE_EXPERTS; j++)
            key[j] = 32 * j + lane == at ? 0 : key[j];
        chosen += route_weight(most);
        if (lane == i) {
            mine = route_weight(most);
            id = at;
        }
    }
    if (lane < a.top_k) {
        a.ids[(int64_t)row * a.top_k + lane] = id;
        a.weights[(int64_t)row * a.top_k + lane] = a.renorm ? mine / chosen : mine;
    }
}

enum {
    SORT_THREADS = 256,
    SORT_WARPS = SORT_THREADS / 32,
    WARP_PLACES = 256,
    SORT_PLACES = SORT_WARPS * WARP_PLACES
};

__device__ static inline int64_t live_rows(const struct k_moe_list *l)
{
    return l->n_live ? *l->n_live : l->n_rows;
}

/* counts[block, e] */
__global__ static void __launch_bounds__(SORT_THREADS) count_kernel(struct k_moe_sort a)
{
    __shared__ int32_t n[K_MOE_MAX_EXPERTS];
    for (int e = threadIdx.x; e < a.list.E; e += SORT_THREADS)
        n[e] = 0;
    __syncthreads();
    int64_t n_places = live_rows(&a.list) * a.list.top_k;
    int64_t i = (int64_t)blockIdx.x * SORT_PLACES + threadIdx.x;
#pragma unroll
    for (int j = 0; j < SORT_PLACES / SORT_THREADS; j++, i += SORT_THREADS)
        if (i < n_places)
            atomicAdd(&n[a.ids[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < a.list.E; e += SORT_THREADS)
        a.list.counts[(int64_t)blockIdx.x * a.list.E + e] = n[e];
}

/* Sum of x over the threads before this one; total of all in *total. */
__device__ static inline int block_scan(int x, int *total)
{
    __shared__ int32_t part[K_MOE_MAX_EXPERTS / 32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, scan = x;
    for (int m = 1; m < 32; m <<= 1) {
        int up = __shfl_up_sync(0xffffffffu, scan, m);
        if (lane >= m)
            scan += up;
    }
    if (lane == 31)
        part[warp] = scan;
    __syncthreads();
    int before = 0, sum = 0;
    for (int w = 0; w < K_MOE_MAX_EXPERTS / 32; w++) {
        before += w < warp ? part[w] : 0;
        sum += part[w];
    }
    __syncthreads();
    *total = sum;
    return before + scan - x;
}

/* counts[block, e] becomes the first place of the block's rows of e. */
__global__ static void __launch_bounds__(K_MOE_MAX_EXPERTS)
    scan_kernel(struct k_moe_list l, int n_blocks)
{
    int e = threadIdx.x, mine = 0, total;
    int32_t *counts = l.counts + e;
    if (e < l.E)
#pragma unroll 8
        for (int b = 0; b < n_blocks; b++)
            mine += counts[(int64_t)b * l.E];
    int first = block_scan(mine, &total);
    int n_tiles = (mine + 2 * K_MOE_TILE - 1) / (2 * K_MOE_TILE) * 2;
    int tile = block_scan(n_tiles, &total);
    if (e == 0)
        *l.n_tiles = total;
    if (e >= l.E)
        return;
    l.first[e] = first;
    if (e == l.E - 1)
        l.first[l.E] = first + mine;
    for (int i = 0; i < n_tiles; i++) {
        l.tiles[2 * (tile + i)] = e;
        l.tiles[2 * (tile + i) + 1] = first + i * K_MOE_TILE;
    }
    for (int b0 = 0; b0 < n_blocks; b0 += 8) {
        int32_t n[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            n[j] = b0 + j < n_blocks ? counts[(int64_t)(b0 + j) * l.E] : 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (b0 + j < n_blocks)
                counts[(int64_t)(b0 + j) * l.E] = first;
            first += n[j];
        }
    }
}

__global__ static void __launch_bounds__(SORT_THREADS) place_kernel(struct k_moe_sort a)
{
    __shared__ int32_t next[SORT_WARPS][K_MOE_MAX_EXPERTS]; /* place of a warp's next row */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, E = a.list.E;
    int64_t n_places = live_rows(&a.list) * a.list.top_k;
    int64_t i0 = (int64_t)blockIdx.x * SORT_PLACES + warp * WARP_PLACES + lane;
    int id[WARP_PLACES / 32];
#pragma unroll
    for (int j = 0; j < WARP_PLACES / 32; j++)
        id[j] = i0 + 32 * j < n_places ? a.ids[i0 + 32 * j] : -1;
    for (int e = threadIdx.x; e < SORT_WARPS * K_MOE_MAX_EXPERTS; e += SORT_THREADS)
        next[0][e] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WARP_PLACES / 32; j++)
        if (id[j] >= 0)
            atomicAdd(&next[warp][id[j]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += SORT_THREADS) {
        int at = a.list.counts[(int64_t)blockIdx.x * E + e];
        for (int w = 0; w < SORT_WARPS; w++) {
            int n = next[w][e];
            next[w][e] = at;
            at += n;
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WARP_PLACES / 32; j++) {
        uint32_t same = __match_any_sync(0xffffffffu, id[j]);
        int rank = __popc(same & ((1u << lane) - 1)), at = 0;
        if (id[j] >= 0)
            at = next[warp][id[j]] + rank;
        __syncwarp();
        if (id[j] >= 0 && rank == 0)
            next[warp][id[j]] += __popc(same);
        __syncwarp();
        if (id[j] >= 0) {
            a.list.place[i0 + 32 * j] = at;
            a.list.rows[at] = (int32_t)((i0 + 32 * j) / a.list.top_k);
        }
    }
}

enum { COMBINE_THREADS = 256 };

/* h . shared_gate of the block's row, the same in every thread. */
__device__ static inline float gate_dot(const struct k_moe_combine *a, int64_t row)
{
    __shared__ float part[COMBINE_THREADS / 32];
    float sum = 0;
    for (int i = threadIdx.x * 8; i < a->M; i += COMBINE_THREADS * 8) {
        float h[8], w[8];
        unpack8(*(const uint4 *)((const bf16 *)a->h + row * a->M + i), h);
        load8(a->shared_gate + i, w);
        for (int e = 0; e < 8; e++)
            sum = fmaf(h[e], w[e], sum);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0)
        part[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < COMBINE_THREADS / 32; w++)
        sum += part[w];
    return sum;
}

__global__ static void __launch_bounds__(COMBINE_THREADS) combine_kernel(struct k_moe_combine a)
{
    int64_t row = blockIdx.x;
    int top_k = a.list.top_k;
    if (row >= live_rows(&a.list))
        return;
    const int32_t *place = a.list.place + row * top_k;
    const float *weights = a.weights + row * top_k;
    float gate = a.shared ? 1.0f / (1.0f + expf(-gate_dot(&a, row))) : 0;
    for (int i = threadIdx.x * 8; i < a.M; i += COMBINE_THREADS * 8) {
        float y[8] = {0}, x[8];
#pragma unroll 8
        for (int j = 0; j < top_k; j++) {
            float w = weights[j];
            unpack8(*(const uint4 *)((const bf16 *)a.down + (int64_t)place[j] * a.M + i), x);
            for (int e = 0; e < 8; e++)
                y[e] = fmaf(w, x[e], y[e]);
        }
        if (a.shared) {
            unpack8(*(const uint4 *)((const bf16 *)a.shared + row * a.M + i), x);
            for (int e = 0; e < 8; e++)
                y[e] = fmaf(gate, x[e], y[e]);
        }
        *(uint4 *)((bf16 *)a.y + row * a.M + i) = pack8(y);
    }
}

// ---- launchers

static int64_t sort_blocks(int64_t n_rows, int32_t top_k)
{
    return ceil_div(n_rows * top_k, SORT_PLACES);
}

/* Every expert with rows adds at most one pair of tiles that is not full. */
static int64_t max_tiles(int64_t n_rows, int32_t top_k, int32_t E)
{
    int64_t n = n_rows * top_k;
    return 2 * (n / (2 * K_MOE_TILE) + (n < E ? n : E));
}

/* Takes n int32 at *at on, in whole 128 bytes. */
static size_t carve(size_t *at, int64_t n)
{
    size_t here = *at;
    *at += ((size_t)n * 4 + 127) / 128 * 128;
    return here;
}

struct list_at {
    size_t first, rows, place, tiles, n_tiles, counts, end;
};

static struct list_at lay_out(int64_t n_rows, int32_t top_k, int32_t E)
{
    size_t at = 0;
    struct list_at l;
    l.first = carve(&at, E + 1);
    l.n_tiles = carve(&at, 1);
    l.rows = carve(&at, n_rows * top_k);
    l.place = carve(&at, n_rows * top_k);
    l.tiles = carve(&at, 2 * max_tiles(n_rows, top_k, E));
    l.counts = carve(&at, sort_blocks(n_rows, top_k) * E);
    l.end = at;
    return l;
}

extern "C" size_t k_moe_list_bytes(int64_t n_rows, int32_t top_k, int32_t E)
{
    return lay_out(n_rows, top_k, E).end;
}

extern "C" void k_moe_list_make(struct k_moe_list *list, void *work, int32_t n_rows,
                                int32_t top_k, int32_t E)
{
    struct list_at at = lay_out(n_rows, top_k, E);
    uint8_t *base = (uint8_t *)work;
    list->n_rows = n_rows;
    list->top_k = top_k;
    list->E = E;
    list->n_live = NULL;
    list->max_tiles = (int32_t)max_tiles(n_rows, top_k, E);
    list->first = (int32_t *)(base + at.first);
    list->rows = (int32_t *)(base + at.rows);
    list->place = (int32_t *)(base + at.place);
    list->tiles = (int32_t *)(base + at.tiles);
    list->n_tiles = (int32_t *)(base + at.n_tiles);
    list->counts = (int32_t *)(base + at.counts);
}

static bool sizes_ok(int32_t n_rows, int32_t top_k, int32_t E)
{
    return n_rows >= 0 && E > 0 && E <= K_MOE_MAX_EXPERTS && top_k > 0 && top_k <= E &&
           top_k <= K_MOE_MAX_TOP && (int64_t)n_rows * top_k <= INT32_MAX;
}

extern "C" cudaError_t k_moe_route(const struct k_moe_route *a, cudaStream_t stream)
{
    if (!sizes_ok(a->n_rows, a->top_k, a->E))
        return cudaErrorInvalidValue;
    if (a->n_rows == 0)
        return cudaSuccess;
    route_kernel<<<(unsigned)ceil_div(a->n_rows, ROUTE_THREADS / 32), ROUTE_THREADS, 0,
                   stream>>>(*a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_moe_sort(const struct k_moe_sort *a, cudaStream_t stream)
{
    if (!sizes_ok(a->list.n_rows, a->list.top_k, a->list.E))
        return cudaErrorInvalidValue;
    int n = (int)sort_blocks(a->list.n_rows, a->list.top_k);
    if (n > 0)
        count_kernel<<<(unsigned)n, SORT_THREADS, 0, stream>>>(*a);
    scan_kernel<<<1, K_MOE_MAX_EXPERTS, 0, stream>>>(a->list, n);
    if (n > 0)
        place_kernel<<<(unsigned)n, SORT_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_moe_combine(const struct k_moe_combine *a, cudaStream_t stream)
{
    if (!sizes_ok(a->list.n_rows, a->list.top_k, a->list.E) || a->M <= 0 || a->M % 8)
        return cudaErrorInvalidValue;
    if (a->list.n_rows == 0)
        return cudaSuccess;
    combine_kernel<<<(unsigned)a->list.n_rows, COMBINE_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
