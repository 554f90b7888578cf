/* Grouped product over the experts' rows: c = a w[expert]^T, with or without SwiGLU.
 *
 * gdn.md 1.6. Block: 128 places of one expert (a tile of the list) by 128 rows of its weight; 4
 * warps of 64 x 64, bf16 operands, f32 sums over k in ascending steps of 16. With SwiGLU the
 * 128 weight rows are 64 gate rows and the 64 up rows of the same outputs, and the block gives
 * 64 outputs silu(gate) * up; a warp has both rows of an output. A place's bits depend on its
 * row and expert alone.
 *
 * Rows come by cp.async, 64 columns of k a stage, 3 stages of 32 KB; places past the expert's
 * last are zeros, and warps with no place skip the products. Grid max_tiles * column blocks,
 * columns fastest so that the blocks in flight share rows of a; the blocks past n_tiles end at
 * once. Block 128, shared 97 KB, two a multiprocessor on sm_90.
 * Limit: the L2 (64 FLOP a byte of tiles; seen: 5 TB/s) for many rows an expert, the bytes of
 * the weights for few. Hopper has its own body, moe_hopper.cu. */
#include "moe_gemm.cuh"

// ---- kernels

enum {
    GEMM_THREADS = 128,
    GEMM_ROWS = K_MOE_TILE,
    GEMM_COLS = 128,
    GEMM_STAGES = 3,
    OPERAND_BYTES = 2 * TILE_BYTES
};

struct __align__(1024) gemm_smem
{
    struct {
        uint8_t A[OPERAND_BYTES], B[OPERAND_BYTES];
    } stage[GEMM_STAGES];
    int32_t row[GEMM_ROWS]; /* row of a of each place */
};

struct gemm_block {
    int place, n_places;
    int col;            /* first output column */
    int n_cols;         /* output columns of c */
    const bf16 *w;      /* the expert's weight */
    int lane_row, unit; /* this thread copies rows lane_row + 16 j, 16-byte unit `unit` */
};

/* Row of the weight that row r of the B tile holds; -1: none. */
__device__ static inline int weight_row(const struct k_moe_gemm *a, const struct gemm_block *g,
                                        int r)
{
    int col = g->col + (a->swiglu ? r & 63 : r);
    if (col >= g->n_cols)
        return -1;
    return a->swiglu && r >= 64 ? g->n_cols + col : col;
}

__device__ static inline void load_stage(const struct k_moe_gemm *a, const struct gemm_block *g,
                                         struct gemm_smem *s, int step)
{
    int k = step * 64 + g->unit * 8;
    bool live = k < a->cols;
    k = live ? k : 0;
    uint32_t to_a = smem_addr(s->stage[step % GEMM_STAGES].A);
    uint32_t to_b = smem_addr(s->stage[step % GEMM_STAGES].B);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int r = g->lane_row + 16 * j;
        uint32_t off = tile_off(r, g->unit);
        cp16(to_a + off, (const bf16 *)a->a + (int64_t)s->row[r] * a->cols + k,
             live && r < g->n_places);
        int w = weight_row(a, g, r);
        cp16(to_b + off, g->w + (int64_t)(w < 0 ? 0 : w) * a->cols + k, live && w >= 0);
    }
}

/* acc += A B^T of one stage; acc[mt][nt]: rows 16 mt, columns 8 nt of the warp's B rows, which
 * are b_row .. + 31 and b_row + 64 .. + 95. */
__device__ static inline void multiply_stage(float acc[4][8][4], uint32_t ta, uint32_t tb,
                                             int a_row, int b_row)
{
    int lane = threadIdx.x & 31, m = lane >> 3, l7 = lane & 7;
    a_row += (m & 1) * 8 + l7;
    b_row += (m >> 1) * 8 + l7;
#pragma unroll
    for (int ks = 0; ks < 4; ks++) {
        uint32_t f[4][4], b[4][4];
#pragma unroll
        for (int mt = 0; mt < 4; mt++)
            ldsm4(f[mt], ta + tile_off(a_row + 16 * mt, 2 * ks + (m >> 1)));
#pragma unroll
        for (int np = 0; np < 4; np++)
            ldsm4(b[np],
                  tb + tile_off(b_row + (np >> 1) * 64 + (np & 1) * 16, 2 * ks + (m & 1)));
#pragma unroll
        for (int mt = 0; mt < 4; mt++)
#pragma unroll
            for (int np = 0; np < 4; np++) {
                mma16816(acc[mt][2 * np], f[mt], b[np][0], b[np][1]);
                mma16816(acc[mt][2 * np + 1], f[mt], b[np][2], b[np][3]);
            }
    }
}

__device__ static inline void store_pair(const struct k_moe_gemm *a, const struct gemm_block *g,
                                         int r, int col, float x, float y)
{
    if (r < g->n_places && col < g->n_cols)
        *(uint32_t *)((bf16 *)a->c + (int64_t)(g->place + r) * g->n_cols + col) = pack2(x, y);
}

__device__ static inline void store_block(const struct k_moe_gemm *a,
                                          const struct gemm_block *g, const float acc[4][8][4],
                                          int a_row, int b_row)
{
    int lane = threadIdx.x & 31;
    int row = a_row + (lane >> 2), col = g->col + b_row + 2 * (lane & 3);
#pragma unroll
    for (int mt = 0; mt < 4; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int nt = 0; nt < 4; nt++) {
                int r = row + 16 * mt + 8 * h, c = col + 8 * nt;
                const float *low = &acc[mt][nt][2 * h], *high = &acc[mt][nt + 4][2 * h];
                if (a->swiglu) {
                    float2 sig = sigmoid2(low[0], low[1]);
                    store_pair(a, g, r, c, low[0] * sig.x * high[0], low[1] * sig.y * high[1]);
                } else {
                    store_pair(a, g, r, c, low[0], low[1]);
                    store_pair(a, g, r, c + 64, high[0], high[1]);
                }
            }
}

__global__ static void __launch_bounds__(GEMM_THREADS, 2)
    moe_gemm_kernel(struct k_moe_gemm a, int n_col_blocks)
{
    extern __shared__ uint8_t raw[];
    struct gemm_smem *s = (struct gemm_smem *)raw;
    int tile = blockIdx.x / n_col_blocks;
    if (tile >= *a.list.n_tiles)
        return;
    int expert = a.list.tiles[2 * tile], warp = threadIdx.x >> 5;
    struct gemm_block g;
    g.place = a.list.tiles[2 * tile + 1];
    g.n_places = min(a.list.first[expert + 1] - g.place, (int)GEMM_ROWS);
    if (g.n_places <= 0)
        return;
    g.col = blockIdx.x % n_col_blocks * (a.swiglu ? 64 : GEMM_COLS);
    g.n_cols = a.swiglu ? a.rows / 2 : a.rows;
    g.w = (const bf16 *)a.w + (int64_t)expert * a.rows * a.cols;
    g.lane_row = threadIdx.x >> 3;
    g.unit = threadIdx.x & 7;
    int r = threadIdx.x, place = g.place + (r < g.n_places ? r : 0);
    s->row[r] = a.gather ? a.list.rows[place] : place;
    __syncthreads();

    int a_row = (warp & 1) * 64, b_row = (warp >> 1) * 32;
    int n_steps = (a.cols + 63) / 64;
    float acc[4][8][4];
#pragma unroll
    for (int i = 0; i < 128; i++)
        acc[i >> 5][i >> 2 & 7][i & 3] = 0.0f;
    for (int i = 0; i < GEMM_STAGES - 1; i++) {
        if (i < n_steps)
            load_stage(&a, &g, s, i);
        cp_commit();
    }
    for (int i = 0; i < n_steps; i++) {
        cp_wait<GEMM_STAGES - 2>();
        __syncthreads();
        if (i + GEMM_STAGES - 1 < n_steps)
            load_stage(&a, &g, s, i + GEMM_STAGES - 1);
        cp_commit();
        if (a_row < g.n_places)
            multiply_stage(acc, smem_addr(s->stage[i % GEMM_STAGES].A),
                           smem_addr(s->stage[i % GEMM_STAGES].B), a_row, b_row);
    }
    store_block(&a, &g, acc, a_row, b_row);
}

// ---- launchers

extern "C" cudaError_t k_moe_gemm(const struct k_moe_gemm *a, cudaStream_t stream)
{
    if (a->rows <= 0 || a->rows % (a->swiglu ? 16 : 8) || a->cols <= 0 || a->cols % 8)
        return cudaErrorInvalidValue;
    if (a->list.max_tiles == 0)
        return cudaSuccess;
    if (a->body == K_MOE_HOPPER || (a->body == K_MOE_AUTO && a->dev && a->dev->cc == 90))
        return moe_gemm_hopper(a, stream);
    int64_t cols = a->swiglu ? ceil_div(a->rows / 2, 64) : ceil_div(a->rows, GEMM_COLS);
    int64_t n = a->list.max_tiles * cols;
    if (n > INT32_MAX)
        return cudaErrorInvalidValue;
    cudaError_t e = cudaFuncSetAttribute(
        moe_gemm_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(struct gemm_smem));
    if (e != cudaSuccess)
        return e;
    moe_gemm_kernel<<<(unsigned)n, GEMM_THREADS, sizeof(struct gemm_smem), stream>>>(*a,
                                                                                     (int)cols);
    return cudaGetLastError();
}
