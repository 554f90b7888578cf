/* The experts' products on Hopper: formula and the order of every sum as moe_gemm.cu, same
 * bits.
 *
 * A cluster of two blocks takes a pair of tiles of the list, 2 * 128 places of one expert, by
 * 256 rows of its weight (with SwiGLU 128 gate rows and the 128 up rows of the same outputs).
 * Each block copies half of the weight rows to both: what the L2 gives is 128 FLOP a byte, and
 * it is the limit. Warpgroup 0 of a block gathers its 128 rows of a by cp.async and issues the
 * weight copies, 64 columns of k a stage, 4 stages of 48 KB; warpgroups 1 and 2 multiply 64
 * rows each by wgmma, both operands from shared memory, and hand 64 columns at a time to the
 * copy engine, from two tiles each. A warpgroup or block without places passes its stages on
 * and multiplies nothing.
 *
 * A stage is full when the rows of 128 threads and the 32 KB of weights are there; it is empty
 * when the 8 multiplying warps of both blocks are done with it. Clusters take (pair, column
 * block) items in turn, columns fastest, and the loading warpgroup runs ahead into the next
 * item. Grid 2 a pair of multiprocessors, block 384, shared 225 KB, registers 56 + 2 * 224.
 * Limit: L2 and tensor cores for many rows an expert, the bytes of the weights for few. */
#include "hopper.cuh"
#include "moe_gemm.cuh"

// ---- kernels

enum {
    HOPPER_THREADS = 384,
    GEMM_STAGES = 4,
    CLUSTER = 2,
    A_BYTES = 2 * TILE_BYTES, /* 128 rows */
    B_BYTES = 4 * TILE_BYTES, /* 256 rows */
    B_HALF_ROWS = 128
};

struct __align__(1024) hopper_smem
{
    struct {
        uint8_t A[A_BYTES], B[B_BYTES];
    } stage[GEMM_STAGES];
    uint8_t out[2][2 * TILE_BYTES]; /* outputs on their way to memory */
    uint64_t full[GEMM_STAGES];     /* 128 + 1 arrivals and the copy's bytes */
    uint64_t empty[GEMM_STAGES];    /* 8 for each block */
};

/* Boxes of 64 columns by 128 rows of all experts' weights, and by 64 rows of c. */
struct gemm_maps {
    CUtensorMap w, c;
};

struct gemm_item {
    int expert, place, n_places; /* n_places: of this block's tile, may be <= 0 */
    int col;                     /* first output column */
};

__device__ static inline int cols_per_item(const struct k_moe_gemm *a)
{
    return a->swiglu ? 128 : 256;
}

__device__ static inline int outputs(const struct k_moe_gemm *a)
{
    return a->swiglu ? a->rows / 2 : a->rows;
}

__device__ static inline struct gemm_item item_at(const struct k_moe_gemm *a, int i,
                                                  int n_col_blocks, int rank)
{
    const int32_t *tile = a->list.tiles + 2 * (i / n_col_blocks * CLUSTER + rank);
    struct gemm_item m;
    m.expert = tile[0];
    m.place = tile[1];
    m.n_places = min(a->list.first[m.expert + 1] - m.place, (int)K_MOE_TILE);
    m.col = i % n_col_blocks * cols_per_item(a);
    return m;
}

/* Stage `it` of the block's sequence: which slot, and the parity of its use. */
__device__ static inline int slot_of(int it)
{
    return it % GEMM_STAGES;
}

__device__ static inline int parity_of(int it)
{
    return it / GEMM_STAGES & 1;
}

__device__ static inline void produce(const struct k_moe_gemm *a, const CUtensorMap *map,
                                      struct hopper_smem *s, int first, int step, int n_items,
                                      int n_col_blocks, int rank, int tid)
{
    int it = 0, n_steps = (a->cols + 63) / 64, unit = tid & 7, row0 = tid >> 3;
    for (int item = first; item < n_items; item += step) {
        struct gemm_item m = item_at(a, item, n_col_blocks, rank);
        const bf16 *row[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int place = row0 + 16 * j < m.n_places ? m.place + row0 + 16 * j : 0;
            int64_t r = a->gather ? a->list.rows[place] : place;
            row[j] = (const bf16 *)a->a + r * a->cols + unit * 8;
        }
        int w =
            m.expert * a->rows + m.col + (rank ? (a->swiglu ? a->rows / 2 : B_HALF_ROWS) : 0);
        for (int i = 0; i < n_steps; i++, it++) {
            int slot = slot_of(it), k = i * 64;
            if (it >= GEMM_STAGES)
                mbar_wait(&s->empty[slot], parity_of(it) ^ 1);
            if (tid == 0) {
                mbar_expect(&s->full[slot], B_BYTES);
                tma_load2_to(s->stage[slot].B + rank * (B_BYTES / 2), map, &s->full[slot], k, w,
                             (1 << CLUSTER) - 1);
            }
            uint32_t to = smem_addr(s->stage[slot].A);
            bool live = k + unit * 8 < a->cols;
#pragma unroll
            for (int j = 0; j < 8; j++)
                cp16(to + tile_off(row0 + 16 * j, unit), row[j] + (live ? k : 0),
                     live && row0 + 16 * j < m.n_places);
            cp_arrive(&s->full[slot]);
        }
    }
}

/* The warp is done with the stage, in both blocks' eyes. */
__device__ static inline void release(struct hopper_smem *s, int it)
{
    int lane = threadIdx.x & 31;
    if (lane < CLUSTER)
        mbar_arrive_at(&s->empty[slot_of(it)], lane);
}

/* 64 outputs of 16 rows, low[nt] or silu(low[nt]) * high[nt], into this warp's part of a
 * tile. */
__device__ static inline void stage_rows(bool swiglu, const float low[8][4],
                                         const float high[8][4], uint32_t tile, int warp)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int nt = 0; nt < 8; nt += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = nt + (i >> 1), e = 2 * (i & 1);
            float x = low[t][e], y = low[t][e + 1];
            if (swiglu) {
                float2 sig = sigmoid2(x, y);
                x = x * sig.x * high[t][e];
                y = y * sig.y * high[t][e + 1];
            }
            r[i] = pack2(x, y);
        }
        stsm4(tile + tile_off(warp * 16 + (lane & 15), nt + (lane >> 4)), r);
    }
}

/* What a warpgroup stores with. */
struct gemm_out {
    uint8_t *tiles; /* two of 64 rows by 64 outputs, used in turn */
    int n_used;     /* tiles so far */
};

/* 64 outputs of the warpgroup's 64 rows, n of which are places, from column `col`. A tile of 64
 * places goes by the copy engine, while the warpgroup goes on; of fewer, row by row: what
 * follows them in memory is another expert's. */
__device__ static inline void store_tile(const struct k_moe_gemm *a, const CUtensorMap *map,
                                         const struct gemm_item *m, struct gemm_out *o,
                                         const float low[8][4], const float high[8][4], int r0,
                                         int n, int col, int tid, int barrier)
{
    int warp = tid >> 5, lane = tid & 31, n_cols = outputs(a);
    uint8_t *tile = o->tiles + (o->n_used++ & 1) * TILE_BYTES;
    /* The tile's last copy has been read, that of the other may be under way. */
    if (tid == 0)
        bulk_read_done<1>();
    group_sync(barrier);
    stage_rows(a->swiglu, low, high, smem_addr(tile), warp);
    if (n == 64) {
        fence_async();
        group_sync(barrier);
        if (tid == 0)
            tma_store2(map, tile, col, m->place + r0);
        return;
    }
    __syncwarp();
    bf16 *c = (bf16 *)a->c + (int64_t)(m->place + r0) * n_cols + col + (lane & 7) * 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int r = warp * 16 + 4 * j + (lane >> 3);
        if (r < n && col + (lane & 7) * 8 < n_cols)
            *(uint4 *)(c + (int64_t)r * n_cols) =
                *(const uint4 *)(tile + tile_off(r, lane & 7));
    }
    if (tid == 0)
        bulk_commit(); /* an empty group, so that every tile has one */
}

/* One warpgroup. */
__device__ static inline void consume(const struct k_moe_gemm *a, const CUtensorMap *map,
                                      struct hopper_smem *s, int first, int step, int n_items,
                                      int n_col_blocks, int rank, int wg, int tid)
{
    int it = 0, n_steps = (a->cols + 63) / 64, r0 = wg * 64;
    struct gemm_out out = {s->out[wg], 0};
    for (int item = first; item < n_items; item += step) {
        struct gemm_item m = item_at(a, item, n_col_blocks, rank);
        int n = min(m.n_places - r0, 64);
        if (n <= 0) {
            for (int i = 0; i < n_steps; i++, it++) {
                mbar_wait(&s->full[slot_of(it)], parity_of(it));
                release(s, it);
            }
            continue;
        }
        float acc[32][4];
        for (int i = 0; i < n_steps; i++, it++) {
            int slot = slot_of(it);
            mbar_wait(&s->full[slot], parity_of(it));
            fence_async(); /* rows of a came through the generic proxy */
            uint64_t da = desc_kmajor(smem_addr(s->stage[slot].A) + wg * TILE_BYTES);
            uint64_t db = desc_kmajor(smem_addr(s->stage[slot].B));
            wg_fence();
#pragma unroll
            for (int ks = 0; ks < 4; ks++)
                wg_ss256(acc, da + ks * 2, db + ks * 2, i > 0 || ks > 0);
            wg_commit();
            if (i > 0) {
                wg_wait<1>();
                release(s, it - 1);
            }
        }
        wg_wait<0>();
        wg_pin<32>(acc);
        release(s, it - 1);
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (q < 2 || !a->swiglu)
                store_tile(a, map, &m, &out, acc + 8 * q, acc + 8 * (q & 1) + 16, r0, n,
                           m.col + 64 * q, tid, 1 + wg);
    }
    if (tid == 0)
        bulk_done();
}

__global__ static void __launch_bounds__(HOPPER_THREADS, 1)
    moe_hopper_kernel(const __grid_constant__ struct k_moe_gemm a,
                      const __grid_constant__ struct gemm_maps maps, int n_col_blocks)
{
    extern __shared__ uint8_t raw[];
    struct hopper_smem *s = (struct hopper_smem *)raw;
    int group = threadIdx.x >> 7, tid = threadIdx.x & 127, rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < GEMM_STAGES; i++) {
            mbar_init(&s->full[i], 128 + 1);
            mbar_init(&s->empty[i], 8 * CLUSTER);
        }
        fence_async();
    }
    cluster_sync();
    int n_items = *a.list.n_tiles / CLUSTER * n_col_blocks;
    int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    if (group == 0) {
        reg_dealloc<56>();
        produce(&a, &maps.w, s, first, step, n_items, n_col_blocks, rank, tid);
    } else {
        reg_alloc<224>();
        consume(&a, &maps.c, s, first, step, n_items, n_col_blocks, rank, group - 1, tid);
    }
    cluster_sync(); /* the other block may still copy to this one, and arrive here */
}

// ---- launchers

static cudaError_t make_maps(struct gemm_maps *m, const struct k_moe_gemm *a)
{
    uint64_t n_cols = (uint64_t)(a->swiglu ? a->rows / 2 : a->rows);
    cuuint64_t dims[2] = {(cuuint64_t)a->cols, (cuuint64_t)a->list.E * a->rows};
    cuuint64_t strides[1] = {(cuuint64_t)a->cols * 2};
    cuuint32_t box[2] = {64, B_HALF_ROWS};
    cuuint64_t out_dims[2] = {n_cols, (cuuint64_t)a->list.n_rows * a->list.top_k};
    cuuint64_t out_strides[1] = {n_cols * 2};
    cuuint32_t out_box[2] = {64, 64};
    cudaError_t e = tensor_map(&m->w, a->w, 2, dims, strides, box);
    return e == cudaSuccess ? tensor_map(&m->c, a->c, 2, out_dims, out_strides, out_box) : e;
}

cudaError_t moe_gemm_hopper(const struct k_moe_gemm *a, cudaStream_t stream)
{
    struct gemm_maps maps;
    cudaError_t e = make_maps(&maps, a);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(moe_hopper_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(struct hopper_smem));
    if (e != cudaSuccess)
        return e;
    int64_t cols = a->swiglu ? ceil_div(a->rows / 2, 128) : ceil_div(a->rows, 256);
    int64_t clusters = a->list.max_tiles / CLUSTER * cols;
    int64_t most = a->dev->n_sms / CLUSTER;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = CLUSTER;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)((clusters < most ? clusters : most) * CLUSTER));
    config.blockDim = dim3(HOPPER_THREADS);
    config.dynamicSmemBytes = sizeof(struct hopper_smem);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, moe_hopper_kernel, *a, maps, (int)cols);
}
