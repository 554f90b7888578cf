/* Full attention on Hopper: formula, blocks of keys and order of every sum as attn.cu.
 *
 * A tile is 128 rows, (token, query head of the group) token first, of one chunk and KV head.
 * Warpgroup 0 loads: blocks of 64 keys and 64 values, 2 stages each, a block being 32 KB in one
 * piece of its page, so one bulk copy each. Warpgroups 1 and 2 have 64 rows each: S = Q K^T by
 * wgmma with both operands in shared memory, weights as A operand registers, O in registers.
 * A warpgroup starts the scores of block j and then the values of block j - 1, and makes the
 * weights of j while the latter run. Factors of 1 (exact) are not multiplied.
 *
 * Rows of a block past the tile's last position are not copied: keys there give scores that are
 * dropped, value rows are zeroed by the loading warp. Gates come into Q's place after the last
 * scores, and outputs leave through it in whole rows.
 * Grid NC * HK * ceil(ratio / 2), block 384, shared 193 KB, registers 24 + 2 * 240.
 * Limit: tensor cores, 2 * 1024 cycles a block of keys for a tile, and as much of shared memory
 * bandwidth while scores are made (Q and K both from there). */
#include "attn.cuh"
#include "hopper.cuh"

// ---- kernels

enum { HOPPER_THREADS = 384, HOPPER_ROWS = 128, KV_STAGES = 2 };

struct __align__(1024) hopper_smem
{
    uint8_t Q[2][KV_BYTES]; /* of each warpgroup; then gates, then outputs */
    uint8_t K[KV_STAGES][KV_BYTES];
    uint8_t V[KV_STAGES][KV_BYTES];
    uint64_t k_full[KV_STAGES], v_full[KV_STAGES];   /* 1 arrival and the copy's bytes */
    uint64_t k_empty[KV_STAGES], v_empty[KV_STAGES]; /* 4 for each warpgroup with rows */
};

__device__ static inline void block_load(uint8_t *dst, const bf16 *src, int n, uint64_t *full)
{
    mbar_expect(full, n * ATTN_D * 2);
    if (n == KV_BLOCK) {
        bulk_load(dst, src, KV_BYTES, full);
        return;
    }
    for (int i = 0; i < PANELS; i++)
        bulk_load(dst + i * TILE_BYTES, (const uint8_t *)src + i * TILE_BYTES, n * 128, full);
}

/* One warp. */
__device__ static inline void produce(const struct k_attn *a, const struct attn_tile *t,
                                      struct hopper_smem *s, int lane)
{
    const int32_t *pages = a->kv.page_table + (int64_t)t->seq * a->kv.max_pages;
    const bf16 *keys = (const bf16 *)a->kv.k, *values = (const bf16 *)a->kv.v;
    for (int j = 0, key0 = 0; key0 <= t->last; j++, key0 += KV_BLOCK) {
        int i = j % KV_STAGES, free_parity = (j / KV_STAGES - 1) & 1;
        int n = min(t->last + 1 - key0, (int)KV_BLOCK);
        int64_t at =
            kv_block_at(&a->kv, &a->d, pages[key0 / a->kv.page_tokens], t->kv_head, key0);
        if (j >= KV_STAGES)
            mbar_wait(&s->k_empty[i], free_parity);
        if (lane == 0)
            block_load(s->K[i], keys + at, n, &s->k_full[i]);
        if (j >= KV_STAGES)
            mbar_wait(&s->v_empty[i], free_parity);
        if (n < KV_BLOCK) {
            zero_rows(s->V[i], PANELS, n, lane, 32);
            fence_async();
            __syncwarp();
        }
        if (lane == 0)
            block_load(s->V[i], values + at, n, &s->v_full[i]);
    }
}

/* S = Q K^T, started. */
__device__ static inline void scores_start(float S[8][4], uint64_t q, uint64_t k)
{
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < ATTN_D / 16; ks++) {
        int step = (ks >> 2) * (TILE_BYTES >> 4) + (ks & 3) * 2;
        wg_ss64(S, q + step, k + step, ks > 0);
    }
    wg_commit();
}

/* O += P V, started. */
__device__ static inline void values_start(float O[32][4], const uint32_t p[4][4], uint64_t v)
{
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        wg_n256(O, p[ks], v + ks * 128);
    wg_commit();
}

__device__ static inline void rescale(float O[32][4], float shift0, float shift1)
{
    if (!__any_sync(0xffffffffu, shift0 != 1 || shift1 != 1))
        return;
#pragma unroll
    for (int nt = 0; nt < 32; nt++) {
        O[nt][0] *= shift0, O[nt][1] *= shift0;
        O[nt][2] *= shift1, O[nt][3] *= shift1;
    }
}

/* The warp's last use of a stage is over. */
__device__ static inline void release(uint64_t *empty)
{
    if ((threadIdx.x & 31) == 0)
        mbar_arrive(empty);
}

/* 64 rows of p (offset `col` elements after the row's q) to tiles; rows past n become zeros. */
__device__ static inline void rows_load(uint8_t *dst, const struct k_attn *a,
                                        const struct attn_tile *t, int r0, int n, int col,
                                        int tid)
{
    uint32_t to = smem_addr(dst);
#pragma unroll 8
    for (int j = 0; j < 16; j++) {
        int r = j * 4 + (tid >> 5), unit = tid & 31;
        bool live = r < n;
        const bf16 *row =
            (const bf16 *)a->p + attn_row_at(t, a->d.ld, r0 + (live ? r : 0)) + col;
        cp16(to + (unit >> 3) * TILE_BYTES + tile_off(r, unit & 7), row + unit * 8, live);
    }
}

/* o = O / total * sigmoid(gate) over the gates in `tile`. */
__device__ static inline void gate_outputs(const float O[32][4], float inv0, float inv1,
                                           uint8_t *tile, int warp, int lane)
{
#pragma unroll
    for (int nt = 0; nt < 32; nt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = warp * 16 + (lane >> 2) + 8 * h;
            uint32_t *at = (uint32_t *)(tile + (nt >> 3) * TILE_BYTES + tile_off(r, nt & 7) +
                                        (lane & 3) * 4);
            float inv = h ? inv1 : inv0;
            *at = pack2(O[nt][2 * h] * inv * sigmoid(lo2(*at)),
                        O[nt][2 * h + 1] * inv * sigmoid(hi2(*at)));
        }
}

/* One warpgroup, rows r0 .. r0 + n - 1 of the tile. */
__device__ static inline void consume(const struct k_attn *a, const struct attn_tile *t,
                                      struct hopper_smem *s, int wg, int n, int tid)
{
    int warp = tid >> 5, lane = tid & 31, r0 = wg * 64, barrier = 1 + wg;
    int mine = r0 + warp * 16 + (lane >> 2), n_blocks = t->last / KV_BLOCK + 1;
    int low = t->pos + (t->row0 + r0) / t->ratio; /* the first row's position */
    uint8_t *Q = s->Q[wg];
    rows_load(Q, a, t, r0, n, 0, tid);
    cp_commit();
    float O[32][4], S[8][4];
    uint32_t p[4][4];
    struct attn_row row[2] = {attn_row_new(t, mine), attn_row_new(t, mine + 8)};
#pragma unroll
    for (int i = 0; i < 128; i++)
        O[i >> 2][i & 3] = 0.0f;
    cp_wait<0>();
    fence_async();
    group_sync(barrier);

    uint64_t q = desc_kmajor(smem_addr(Q));
    mbar_wait(&s->k_full[0], 0);
    scores_start(S, q, desc_kmajor(smem_addr(s->K[0])));
    wg_wait<0>();
    wg_pin<8>(S);
    release(&s->k_empty[0]);
    soften(S, &row[0], 0, 0, KV_BLOCK > low + 1);
    soften(S, &row[1], 2, 0, KV_BLOCK > low + 1);
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        frag_pack(p[ks], S[2 * ks], S[2 * ks + 1]);
    for (int j = 1; j < n_blocks; j++) {
        int i = j % KV_STAGES, before = (j - 1) % KV_STAGES;
        bool is_edge = (j + 1) * KV_BLOCK > low + 1;
        mbar_wait(&s->k_full[i], j / KV_STAGES & 1);
        scores_start(S, q, desc_kmajor(smem_addr(s->K[i])));
        mbar_wait(&s->v_full[before], (j - 1) / KV_STAGES & 1);
        values_start(O, p, desc_nmajor(smem_addr(s->V[before])));
        wg_wait<1>();
        wg_pin<8>(S);
        release(&s->k_empty[i]);
        float shift0 = soften(S, &row[0], 0, j * KV_BLOCK, is_edge);
        float shift1 = soften(S, &row[1], 2, j * KV_BLOCK, is_edge);
        wg_wait<0>();
        wg_pin<32>(O);
        release(&s->v_empty[before]);
        rescale(O, shift0, shift1);
#pragma unroll
        for (int ks = 0; ks < 4; ks++)
            frag_pack(p[ks], S[2 * ks], S[2 * ks + 1]);
    }
    int last = (n_blocks - 1) % KV_STAGES;
    mbar_wait(&s->v_full[last], (n_blocks - 1) / KV_STAGES & 1);
    values_start(O, p, desc_nmajor(smem_addr(s->V[last])));
    group_sync(barrier); /* all scores are made: Q is free */
    rows_load(Q, a, t, r0, n, a->d.HQ * ATTN_D, tid);
    cp_commit();
    float inv0 = 1.0f / row_total(&row[0]), inv1 = 1.0f / row_total(&row[1]);
    wg_wait<0>();
    wg_pin<32>(O);
    cp_wait<0>();
    group_sync(barrier);
    gate_outputs(O, inv0, inv1, Q, warp, lane);
    __syncwarp(); /* a warp stores the rows that it made */
    for (int j = 0; j < 16; j++) {
        int r = warp * 16 + j;
        if (r < n)
            *(uint4 *)((bf16 *)a->o + attn_row_at(t, a->d.HQ * ATTN_D, r0 + r) + lane * 8) =
                *(const uint4 *)(Q + (lane >> 3) * TILE_BYTES + tile_off(r, lane & 7));
    }
}

__global__ static void __launch_bounds__(HOPPER_THREADS, 1) attn_hopper_kernel(struct k_attn a)
{
    extern __shared__ uint8_t raw[];
    struct hopper_smem *s = (struct hopper_smem *)raw;
    struct attn_tile t = attn_tile_at(&a.b, &a.d, HOPPER_ROWS);
    if (t.n_rows <= 0)
        return;
    if (threadIdx.x == 0) {
        int n_warps = t.n_rows > 64 ? 8 : 4;
        for (int i = 0; i < KV_STAGES; i++) {
            mbar_init(&s->k_full[i], 1);
            mbar_init(&s->v_full[i], 1);
            mbar_init(&s->k_empty[i], n_warps);
            mbar_init(&s->v_empty[i], n_warps);
        }
        fence_async();
    }
    __syncthreads();
    int group = threadIdx.x >> 7, tid = threadIdx.x & 127;
    if (group == 0) {
        reg_dealloc<24>();
        if (tid < 32)
            produce(&a, &t, s, tid);
    } else {
        reg_alloc<240>();
        int n = min(t.n_rows - (group - 1) * 64, 64);
        if (n > 0)
            consume(&a, &t, s, group - 1, n, tid);
    }
}

// ---- launchers

cudaError_t attn_hopper(const struct k_attn *a, cudaStream_t stream)
{
    int64_t n = attn_grid(&a->b, &a->d, HOPPER_ROWS);
    cudaError_t e =
        cudaFuncSetAttribute(attn_hopper_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(struct hopper_smem));
    if (e != cudaSuccess)
        return e;
    attn_hopper_kernel<<<(unsigned)n, HOPPER_THREADS, sizeof(struct hopper_smem), stream>>>(*a);
    return cudaGetLastError();
}
