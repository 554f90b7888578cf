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
 * scores, and outputs leave from there. Q, gates and outputs move by tensor copies when the
 * ratio divides 64, else row by row, as do the outputs of fewer than 64 rows.
 * Grid: a block a job (attn_split.cuh); NC * HK * ceil(ratio / 2) where there is no second
 * segment. Block 384, shared 193 KB, registers 24 + 2 * 240.
 * Limit: tensor cores, 2 * 1024 cycles a block of keys for a tile, and as much of shared memory
 * bandwidth while scores are made (Q and K both from there). Seen: 2220 cycles a block in long
 * sequences; what surrounds the loop takes a tile some 16,000 cycles, and an end of a segment
 * inside a job some 14,000 (no tensor core works meanwhile). */
#include "attn_split.cuh"
#include "hopper.cuh"

// ---- kernels

enum { HOPPER_THREADS = 384, KV_STAGES = 2 };

/* Over [T, 2 HQ, 256] (q | gate) and [T, HQ, 256] (o); boxes of 64 columns x ratio heads x
 * 64 / ratio tokens, 64 rows of a tile. Only when the ratio divides 64. */
struct attn_maps {
    CUtensorMap p, o;
};

struct __align__(1024) hopper_smem
{
    uint8_t Q[2][KV_BYTES]; /* of each warpgroup; then gates, then outputs */
    uint8_t K[KV_STAGES][KV_BYTES];
    uint8_t V[KV_STAGES][KV_BYTES];
    uint64_t k_full[KV_STAGES], v_full[KV_STAGES];   /* 1 arrival and the copy's bytes */
    uint64_t k_empty[KV_STAGES], v_empty[KV_STAGES]; /* 4 for each warpgroup with rows */
    uint64_t rows_full[2]; /* as k_full, of each warpgroup: first Q, then gates */
    int total[2];          /* the place of each warpgroup's sums so far */
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

/* One warp. The stage of a block and its parity follow from its number: jobs begin at multiples
 * of SEGMENT_BLOCKS. */
static_assert(SEGMENT_BLOCKS % (2 * KV_STAGES) == 0, "stages begin anew with a segment");
__device__ static inline void produce(const struct k_attn *a, const struct attn_job *job,
                                      struct hopper_smem *s, int lane)
{
    const struct attn_tile *t = &job->t;
    const int32_t *pages = a->kv.page_table + (int64_t)t->seq * a->kv.max_pages;
    const bf16 *keys = (const bf16 *)a->kv.k, *values = (const bf16 *)a->kv.v;
    for (int j = job->from; j < job->to; j++) {
        int i = j % KV_STAGES, free_parity = (j / KV_STAGES - 1) & 1;
        int key0 = j * KV_BLOCK;
        bool is_used = j >= job->from + KV_STAGES;
        int n = min(t->last + 1 - key0, (int)KV_BLOCK);
        int64_t at =
            kv_block_at(&a->kv, &a->d, pages[key0 / a->kv.page_tokens], t->kv_head, key0);
        if (is_used)
            mbar_wait(&s->k_empty[i], free_parity);
        if (lane == 0)
            block_load(s->K[i], keys + at, n, &s->k_full[i]);
        if (is_used)
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

/* Where a warpgroup's rows lie. */
struct row_group {
    int wg, r0, n; /* its first row in the tile, how many there are */
    int tok, head; /* of the first row */
    bool by_map;   /* whole boxes, else row by row */
};

/* Starts to bring q (gate: the gates) to `tiles`. Boxes may bring rows of other tokens past the
 * n rows; row by row those become zeros. */
__device__ static inline void rows_start(const struct k_attn *a, const struct attn_maps *m,
                                         const struct attn_tile *t, const struct row_group *g,
                                         struct hopper_smem *s, bool gate, int tid)
{
    uint8_t *tiles = s->Q[g->wg];
    if (g->by_map) {
        if (tid > 0)
            return;
        mbar_expect(&s->rows_full[g->wg], KV_BYTES);
        for (int i = 0; i < PANELS; i++)
            tma_load3(tiles + i * TILE_BYTES, &m->p, &s->rows_full[g->wg], i * 64,
                      g->head + (gate ? a->d.HQ : 0), g->tok);
        return;
    }
    uint32_t to = smem_addr(tiles);
    const bf16 *p = (const bf16 *)a->p + (gate ? a->d.HQ * ATTN_D : 0);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        int r = j * 4 + (tid >> 5), unit = tid & 31;
        bool live = r < g->n;
        const bf16 *row = p + attn_row_at(t, a->d.ld, g->r0 + (live ? r : 0));
        cp16(to + (unit >> 3) * TILE_BYTES + tile_off(r, unit & 7), row + unit * 8, live);
    }
    cp_commit();
}

/* They are there, for every thread of the warpgroup and for wgmma. */
__device__ static inline void rows_wait(const struct row_group *g, struct hopper_smem *s,
                                        bool gate)
{
    if (g->by_map) {
        mbar_wait(&s->rows_full[g->wg], gate);
        return;
    }
    cp_wait<0>();
    fence_async();
    group_sync(1 + g->wg);
}

/* O / total * sigmoid(gate) in the place of the gates, a panel at a time so that the latency of
 * its reads is paid once. */
__device__ static inline void gate_outputs(const float O[32][4], float inv0, float inv1,
                                           uint32_t tiles, int warp, int lane)
{
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        uint32_t g[4][4], at[4];
#pragma unroll
        for (int np = 0; np < 4; np++) {
            at[np] = tiles + panel * TILE_BYTES +
                     tile_off(warp * 16 + (lane & 15), 2 * np + (lane >> 4));
            ldsm4(g[np], at[np]);
        }
#pragma unroll
        for (int np = 0; np < 4; np++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *o = &O[panel * 8 + 2 * np + (i >> 1)][2 * (i & 1)];
                g[np][i] = attn_output(o[0], o[1], i & 1 ? inv1 : inv0, g[np][i]);
            }
            stsm4(at[np], g[np]);
        }
    }
}

/* The outputs in `tiles` to memory. */
__device__ static inline void rows_store(const struct k_attn *a, const struct attn_maps *m,
                                         const struct attn_tile *t, const struct row_group *g,
                                         const uint8_t *tiles, int tid)
{
    int warp = tid >> 5, lane = tid & 31;
    if (g->by_map && g->n == 64) {
        fence_async();
        group_sync(1 + g->wg);
        if (tid > 0)
            return;
        for (int i = 0; i < PANELS; i++)
            tma_store3(&m->o, tiles + i * TILE_BYTES, i * 64, g->head, g->tok);
        bulk_read_done<0>();
        return;
    }
    __syncwarp(); /* a warp stores the rows that it made */
    for (int r = warp * 16; r < min(warp * 16 + 16, g->n); r++)
        *(uint4 *)((bf16 *)a->o + attn_row_at(t, a->d.HQ * ATTN_D, g->r0 + r) + lane * 8) =
            *(const uint4 *)(tiles + (lane >> 3) * TILE_BYTES + tile_off(r, lane & 7));
}

/* The thread's place in the sums so far of its warpgroup, which exist from the first segment's
 * end on. */
__device__ static inline float4 *sums_at(const struct attn_work *w, const struct hopper_smem *s,
                                         int wg, int tid)
{
    return w->totals + (int64_t)s->total[wg] * GROUP_SUMS + tid;
}

/* A segment has ended and another follows: O goes to the sums so far and begins afresh. */
__device__ static inline void segment_end(const struct attn_work *w, struct hopper_smem *s,
                                          float O[32][4], struct attn_sums *ended,
                                          const struct attn_row row[2], int segment, int wg,
                                          int tid)
{
    if (segment == 0 && tid == 0)
        s->total[wg] = attn_total_take(w);
    group_sync(1 + wg);
    float4 *at = sums_at(w, s, wg, tid);
    if (segment > 0)
        attn_sums_join(O, ended, row, segment, at);
    attn_sums_store(at, O, ended);
#pragma unroll
    for (int i = 0; i < 128; i++)
        O[i >> 2][i & 3] = 0.0f;
}

/* Block j: its scores and weights while the values of the block before are summed. is_first:
 * of a segment that follows another in the same job. */
template <bool is_first>
__device__ static inline void block_step(const struct attn_work *w, struct hopper_smem *s,
                                         float O[32][4], float S[8][4], uint32_t p[4][4],
                                         struct attn_row row[2], uint64_t q, int j, int low,
                                         int wg, int tid)
{
    int i = j % KV_STAGES, before = (j - 1) % KV_STAGES;
    bool is_edge = (j + 1) * KV_BLOCK > low + 1;
    struct attn_sums ended;
    mbar_wait(&s->k_full[i], j / KV_STAGES & 1);
    scores_start(S, q, desc_kmajor(smem_addr(s->K[i])));
    mbar_wait(&s->v_full[before], (j - 1) / KV_STAGES & 1);
    values_start(O, p, desc_nmajor(smem_addr(s->V[before])));
    wg_wait<1>();
    wg_pin<8>(S);
    release(&s->k_empty[i]);
    if (is_first)
        ended = attn_rows_end(row);
    float max0 = row_max(S, &row[0], 0, j * KV_BLOCK, is_edge);
    float max1 = row_max(S, &row[1], 2, j * KV_BLOCK, is_edge);
    wg_wait<0>();
    wg_pin<32>(O);
    release(&s->v_empty[before]);
    float shift0 = row_weights(S, &row[0], 0, max0), shift1 = row_weights(S, &row[1], 2, max1);
    if (is_first)
        segment_end(w, s, O, &ended, row, j / SEGMENT_BLOCKS - 1, wg, tid);
    else
        rescale(O, shift0, shift1);
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        frag_pack(p[ks], S[2 * ks], S[2 * ks + 1]);
}

/* One warpgroup. */
__device__ static inline void consume(const struct k_attn *a, const struct attn_work *w,
                                      const struct attn_maps *m, const struct attn_job *job,
                                      const struct row_group *g, struct hopper_smem *s, int tid)
{
    const struct attn_tile *t = &job->t;
    const int from = job->from, to = job->to;
    int warp = tid >> 5, lane = tid & 31;
    int mine = g->r0 + warp * 16 + (lane >> 2);
    int low = t->pos + attn_token_of(t, g->r0); /* the first row's position */
    uint32_t tiles = smem_addr(s->Q[g->wg]);
    rows_start(a, m, t, g, s, false, tid);
    float O[32][4], S[8][4];
    uint32_t p[4][4];
    struct attn_row row[2] = {attn_row_new(t, mine), attn_row_new(t, mine + 8)};
#pragma unroll
    for (int i = 0; i < 128; i++)
        O[i >> 2][i & 3] = 0.0f;
    rows_wait(g, s, false);

    uint64_t q = desc_kmajor(tiles);
    mbar_wait(&s->k_full[0], 0);
    scores_start(S, q, desc_kmajor(smem_addr(s->K[0])));
    wg_wait<0>();
    wg_pin<8>(S);
    release(&s->k_empty[0]);
    soften(S, &row[0], 0, from * KV_BLOCK, (from + 1) * KV_BLOCK > low + 1);
    soften(S, &row[1], 2, from * KV_BLOCK, (from + 1) * KV_BLOCK > low + 1);
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        frag_pack(p[ks], S[2 * ks], S[2 * ks + 1]);
    for (int j = from + 1; j < to;) {
        if (j % SEGMENT_BLOCKS == 0)
            block_step<true>(w, s, O, S, p, row, q, j++, low, g->wg, tid);
        int end = min(to, (j / SEGMENT_BLOCKS + 1) * SEGMENT_BLOCKS);
        for (; j < end; j++)
            block_step<false>(w, s, O, S, p, row, q, j, low, g->wg, tid);
    }
    int last = (to - 1) % KV_STAGES, segment = (to - 1) / SEGMENT_BLOCKS;
    int part = job->part;
    mbar_wait(&s->v_full[last], (to - 1) / KV_STAGES & 1);
    values_start(O, p, desc_nmajor(smem_addr(s->V[last])));
    group_sync(1 + g->wg); /* all scores are made: Q is free */
    if (part < 0)
        rows_start(a, m, t, g, s, true, tid);
    struct attn_sums ended = attn_rows_end(row);
    wg_wait<0>();
    wg_pin<32>(O);
    if (part >= 0) {
        attn_sums_store(w->parts + (int64_t)(part + g->wg) * GROUP_SUMS + tid, O, &ended);
        return;
    }
    if (segment > 0) {
        attn_sums_join(O, &ended, row, segment, sums_at(w, s, g->wg, tid));
        group_sync(1 + g->wg);
        if (tid == 0)
            attn_total_give(w, s->total[g->wg]);
    }
    rows_wait(g, s, true);
    gate_outputs(O, 1.0f / ended.total[0], 1.0f / ended.total[1], tiles, warp, lane);
    rows_store(a, m, t, g, s->Q[g->wg], tid);
}

__global__ static void __launch_bounds__(HOPPER_THREADS, 1)
    attn_hopper_kernel(const __grid_constant__ struct k_attn a,
                       const __grid_constant__ struct attn_work w,
                       const __grid_constant__ struct attn_maps maps)
{
    extern __shared__ uint8_t raw[];
    struct hopper_smem *s = (struct hopper_smem *)raw;
    struct attn_job job;
    if (!attn_job_at(&a, &w, ATTN_HOPPER_ROWS, &job))
        return;
    if (threadIdx.x == 0) {
        int n_warps = job.t.n_rows > 64 ? 8 : 4;
        for (int i = 0; i < KV_STAGES; i++) {
            mbar_init(&s->k_full[i], 1);
            mbar_init(&s->v_full[i], 1);
            mbar_init(&s->k_empty[i], n_warps);
            mbar_init(&s->v_empty[i], n_warps);
        }
        for (int i = 0; i < 2; i++)
            mbar_init(&s->rows_full[i], 1);
        fence_async();
    }
    __syncthreads();
    int group = threadIdx.x >> 7, tid = threadIdx.x & 127;
    if (group == 0) {
        reg_dealloc<24>();
        if (tid < 32)
            produce(&a, &job, s, tid);
    } else {
        reg_alloc<240>();
        struct row_group g;
        g.wg = group - 1;
        g.r0 = g.wg * 64;
        g.n = min(job.t.n_rows - g.r0, 64);
        g.tok = job.t.tok + attn_token_of(&job.t, g.r0);
        g.head = job.t.kv_head * job.t.ratio;
        g.by_map = 64 % job.t.ratio == 0;
        if (g.n > 0)
            consume(&a, &w, &maps, &job, &g, s, tid);
    }
}

// ---- launchers

/* [T, heads, D] with rows of ld elements; tokens past T read as zeros and are not written. */
static cudaError_t make_map(CUtensorMap *map, const void *p, const struct k_attn *a,
                            int32_t heads, int32_t ld)
{
    int32_t ratio = a->d.HQ / a->d.HK;
    cuuint64_t dims[3] = {ATTN_D, (cuuint64_t)heads, (cuuint64_t)a->b.n_tokens};
    cuuint64_t strides[2] = {ATTN_D * 2, (cuuint64_t)ld * 2};
    cuuint32_t box[3] = {64, (cuuint32_t)ratio, 64 / (cuuint32_t)ratio};
    return tensor_map(map, p, 3, dims, strides, box);
}

cudaError_t attn_hopper(const struct k_attn *a, const struct attn_work *w, cudaStream_t stream)
{
    struct attn_maps maps = {};
    cudaError_t e =
        cudaFuncSetAttribute(attn_hopper_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(struct hopper_smem));
    if (e == cudaSuccess && 64 % (a->d.HQ / a->d.HK) == 0) {
        e = make_map(&maps.p, a->p, a, 2 * a->d.HQ, a->d.ld);
        if (e == cudaSuccess)
            e = make_map(&maps.o, a->o, a, a->d.HQ, a->d.HQ * ATTN_D);
    }
    if (e != cudaSuccess)
        return e;
    attn_hopper_kernel<<<(unsigned)w->max_jobs, HOPPER_THREADS, sizeof(struct hopper_smem),
                         stream>>>(*a, *w, maps);
    return cudaGetLastError();
}
