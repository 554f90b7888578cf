/* The gated delta rule on Hopper for few long sequences: the chain of gdn_delta.cu, same bits;
 * and the choice's other Hopper body, gdn_hopper_fused.cu.
 *
 * Formula, operands and the order of every sum are those of gdn_delta.cu, and gdn_prep goes
 * before; here products are wgmma with A from registers and tiles come by TMA, 3 stages deep.
 * Derived here; ../shared/facts.md.
 *
 * split: a block a (sequence, value head, half of V). Warpgroup 0 runs the state chain (W, Vn,
 *   S) and hands S and Vn, as A operand registers, to warpgroup 1 through shared memory; that
 *   one makes O, up to a chunk behind; a warp of warpgroup 2 loads.
 *   Grid N * HV * 2, block 384, shared 215 KB, registers 240 + 216 + 48. Limit: latency of
 *   three dependent products a chunk. Seen: 1.07 us a chunk; tensor cores 53% and shared memory
 *   71% busy on the multiprocessors that have a block. When half of the card is free, gdn_prep
 *   runs there and this kernel starts beside it, waiting unit by unit.
 *
 * A chunk's tail: rows past the sequence's end belong to another request, so they are zeroed in
 * shared memory after the copy; its rows of O are not stored. */
#include "gdn_hopper.cuh"

// ---- kernels

enum { STAGES = 3, HOPPER_THREADS = 384 };

/* ---- loads */

struct chain_stage {
    uint8_t K[2 * TILE_BYTES];
    uint8_t Q[2 * TILE_BYTES];
    uint8_t V[TILE_BYTES]; /* this half's 64 columns */
    uint8_t A[TILE_BYTES];
    uint8_t P[TILE_BYTES];
};

struct split_smem {
    struct chain_stage stage[STAGES];
    uint4 sb[8][128];           /* S as A operand, thread by thread */
    uint4 vb[4][128];           /* Vn likewise */
    uint8_t out[2][TILE_BYTES]; /* O on its way to memory */
    __align__(16) float gates[STAGES][128];
    uint64_t full[STAGES];     /* 1 arrival and the copy's bytes */
    uint64_t clean[STAGES];    /* 32: tail rows are zeroed; used by the last chunk alone */
    uint64_t empty[STAGES];    /* 256: state and output are done with the stage */
    uint64_t sb_full, sb_free; /* 128 each */
    uint64_t vb_full, vb_free;
};

__device__ static inline void barriers_init(struct split_smem *s)
{
    for (int i = 0; i < STAGES; i++) {
        mbar_init(&s->full[i], 1);
        mbar_init(&s->clean[i], 32);
        mbar_init(&s->empty[i], 256);
    }
    fence_async();
}

__device__ static inline void chain_load(const struct k_gdn_delta *a, const struct gdn_maps *m,
                                         const struct hopper_ctx *c, struct split_smem *s,
                                         int half, int chunk)
{
    int i = chunk % STAGES, t = c->tok + chunk * K_CHUNK;
    struct chain_stage *st = &s->stage[i];
    const struct gdn_unit *u =
        (const struct gdn_unit *)a->work + c->unit + (int64_t)chunk * a->d.HV;
    mbar_expect(&s->full[i], sizeof(struct chain_stage) + sizeof u->gates);
    tma_load3(st->K, &m->k, &s->full[i], 0, c->kh, t);
    tma_load3(st->K + TILE_BYTES, &m->k, &s->full[i], 64, c->kh, t);
    tma_load3(st->V, &m->v, &s->full[i], half * 64, c->h, t);
    bulk_load(st->A, u->A, TILE_BYTES, &s->full[i]);
    bulk_load(s->gates[i], u->gates, sizeof u->gates, &s->full[i]);
    tma_load3(st->Q, &m->q, &s->full[i], 0, c->kh, t);
    tma_load3(st->Q + TILE_BYTES, &m->q, &s->full[i], 64, c->kh, t);
    bulk_load(st->P, u->P, TILE_BYTES, &s->full[i]);
}

/* How many chunks from `chunk` on gdn_prep, running beside, has written: 0 to 32 by one look of
 * the whole warp, so that its latency is paid once for all of them. Their flags are then free
 * for the next call. */
__device__ static inline int units_ready(const struct k_gdn_delta *a,
                                         const struct hopper_ctx *c, int chunk, int half,
                                         int lane)
{
    struct gdn_unit *u =
        (struct gdn_unit *)a->work + c->unit + (int64_t)(chunk + lane) * a->d.HV;
    int32_t ready = 0;
    if (chunk + lane < c->n_chunks)
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];"
                     : "=r"(ready)
                     : "l"(&u->ready[half])
                     : "memory");
    int n = __ffs(~__ballot_sync(0xffffffffu, ready == 1)) - 1;
    n = n < 0 ? 32 : n;
    if (lane < n)
        u->ready[half] = 0;
    __syncwarp();
    asm volatile("fence.proxy.async;" ::
                     : "memory"); /* before the copy engine reads the units */
    return n;
}

/* One warp. */
__device__ static inline void chain_producer(const struct k_gdn_delta *a,
                                             const struct gdn_maps *m,
                                             const struct hopper_ctx *c, struct split_smem *s,
                                             int half, int lane, bool beside)
{
    int ready = beside ? 0 : c->n_chunks;
    if (!beside)
        grid_wait();
    for (int i = 0; i < c->n_chunks; i++) {
        while (ready <= i)
            ready += units_ready(a, c, ready, half, lane);
        if (i >= STAGES)
            mbar_wait(&s->empty[i % STAGES], (i / STAGES - 1) & 1);
        if (lane == 0)
            chain_load(a, m, c, s, half, i);
    }
    if (beside)
        grid_wait();
    int last = c->n_chunks - 1, n = rows_of(c, last);
    if (n == K_CHUNK)
        return;
    mbar_wait(&s->full[last % STAGES], (last / STAGES) & 1);
    zero_rows(s->stage[last % STAGES].K, 5, n, lane, 32);
    fence_async();
    mbar_arrive(&s->clean[last % STAGES]);
}

/* Waits for chunk i's tiles. */
__device__ static inline void chunk_wait(const struct hopper_ctx *c, struct split_smem *s,
                                         int i)
{
    mbar_wait(&s->full[i % STAGES], (i / STAGES) & 1);
    if (rows_of(c, i) < K_CHUNK)
        mbar_wait(&s->clean[i % STAGES], 0);
}

/* ---- split */

/* This warp's V^T in accumulator layout: v[np][q] is (tokens 16 np + 8 (q / 2) .., rows
 * g + 8 (q & 1)). */
__device__ static inline void value_load(uint32_t v[4][4], uint32_t tile, int warp)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int np = 0; np < 4; np++)
        ldsm4_t(v[np], tile + tile_off(np * 16 + (lane >> 4) * 8 + (lane & 7),
                                       2 * warp + ((lane >> 3) & 1)));
}

/* f = V^T - eg * x as an A operand. */
__device__ static inline void residual(uint32_t f[4][4], const float x[8][4],
                                       const uint32_t v[4][4], const float2 eg[8])
{
#pragma unroll
    for (int np = 0; np < 4; np++)
#pragma unroll
        for (int q = 0; q < 4; q++)
            f[np][q] =
                residual2(&x[2 * np + (q >> 1)][2 * (q & 1)], v[np][q], eg[2 * np + (q >> 1)]);
}

/* The factors of this thread's tokens. */
__device__ static inline void tokens_load(float2 e[8], const float *by)
{
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
        e[nt] = *(const float2 *)&by[8 * nt + 2 * (threadIdx.x & 3)];
}

__device__ static inline void scale_tokens(float x[8][4], const float2 e[8])
{
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
        scale2(x[nt], e[nt]);
}

/* O^T of this warpgroup to `tile` as [64 tokens, 64], then n rows to memory: by one bulk copy
 * that runs on, or row by row when the tile has rows of another sequence. The caller's barrier
 * is free to use; before `tile` is written again, bulk_read_done by
 * thread 0. */
__device__ static inline void out_store(const float O[8][4], uint8_t *tile,
                                        const CUtensorMap *map, const struct hopper_ctx *c,
                                        int half, int chunk, int64_t row, int t, int barrier)
{
    int lane = t & 31, warp = t >> 5, n = rows_of(c, chunk);
    uint32_t base = smem_addr(tile);
#pragma unroll
    for (int np = 0; np < 4; np++) {
        uint32_t r[4];
        frag_pack(r, O[2 * np], O[2 * np + 1]);
        stsm4_t(base + tile_off(np * 16 + (lane >> 4) * 8 + (lane & 7),
                                2 * warp + ((lane >> 3) & 1)),
                r);
    }
    fence_async();
    group_sync(barrier);
    if (n == K_CHUNK) {
        if (t == 0)
            tma_store3(map, tile, half * 64, c->h, c->tok + chunk * K_CHUNK);
        return;
    }
    out_rows(tile, c, half, chunk, row, n, t);
}

/* What the state chain reads of a chunk besides its products' tiles. */
struct chunk_regs {
    uint32_t v[4][4];
    float2 eg[8], el[8];
    float last;
};

__device__ static inline void chunk_load(struct chunk_regs *r, const struct chain_stage *st,
                                         const float *gates, int warp)
{
    value_load(r->v, smem_addr(st->V), warp);
    tokens_load(r->eg, gates);
    tokens_load(r->el, gates + 64);
    r->last = gates[63];
}

__device__ static inline void split_state(const struct k_gdn_delta *a,
                                          const struct hopper_ctx *c, struct split_smem *s,
                                          int half, int t)
{
    float S[16][4];
    struct chunk_regs r;
    state_load(S, c, half, t);
    if (c->n_chunks > 0) {
        chunk_wait(c, s, 0);
        chunk_load(&r, &s->stage[0], s->gates[0], t >> 5);
    }
    int j = 0; /* stage of chunk i */
    for (int i = 0; i < c->n_chunks; i++) {
        struct chain_stage *st = &s->stage[j];
        int save = gdn_save_slot(a, c->first + i);
        uint32_t sb[8][4];
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
            frag_pack(sb[ks], S[2 * ks], S[2 * ks + 1]);
        float x[8][4];
        wg_fence();
        wg_kmajor<8>(x, sb, smem_addr(st->K), 0);
        wg_commit();
        if (i > 0)
            mbar_wait(&s->sb_free, (i - 1) & 1);
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
            s->sb[ks][t] = make_uint4(sb[ks][0], sb[ks][1], sb[ks][2], sb[ks][3]);
        mbar_arrive(&s->sb_full);
#pragma unroll
        for (int k = 0; k < 64; k++)
            S[k >> 2][k & 3] = __fmul_rn(S[k >> 2][k & 3], r.last);
        uint32_t f[4][4];
        wg_wait<0>();
        wg_pin<8>(x);
        residual(f, x, r.v, r.eg);
        wg_fence();
        wg_kmajor<4>(x, f, smem_addr(st->A), 0);
        wg_commit();
        if (i > 0)
            mbar_wait(&s->vb_free, (i - 1) & 1);
        wg_wait<0>();
        wg_pin<8>(x);
        uint32_t vn[4][4];
        pack64(vn, x);
        scale_tokens(x, r.el);
        pack64(f, x);
        wg_fence();
        wg_nmajor(S, f, smem_addr(st->K));
        wg_commit();
#pragma unroll
        for (int ks = 0; ks < 4; ks++)
            s->vb[ks][t] = make_uint4(vn[ks][0], vn[ks][1], vn[ks][2], vn[ks][3]);
        mbar_arrive(&s->vb_full);
        int next = j == STAGES - 1 ? 0 : j + 1;
        if (i + 1 < c->n_chunks) {
            chunk_wait(c, s, i + 1);
            chunk_load(&r, &s->stage[next], s->gates[next], t >> 5);
        }
        wg_wait<0>();
        wg_pin<16>(S);
        mbar_arrive(&s->empty[j]);
        if (save >= 0)
            state_store(S, gdn_state(a, save, c->h), half, t);
        j = next;
    }
    state_store(S, c->S, half, t);
}

__device__ static inline void frags_read(uint32_t f[4], const uint4 *p)
{
    uint4 u = *p;
    f[0] = u.x, f[1] = u.y, f[2] = u.z, f[3] = u.w;
}

__device__ static inline void split_output(const struct k_gdn_delta *a,
                                           const struct gdn_maps *m, const struct hopper_ctx *c,
                                           struct split_smem *s, int half, int t)
{
    int j = 0; /* stage of chunk i */
    for (int i = 0; i < c->n_chunks; i++) {
        struct chain_stage *st = &s->stage[j];
        uint32_t sb[8][4], vn[4][4];
        float2 e[8];
        chunk_wait(c, s, i);
        tokens_load(e, s->gates[j]);
        mbar_wait(&s->sb_full, i & 1);
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
            frags_read(sb[ks], &s->sb[ks][t]);
        mbar_arrive(&s->sb_free);
        float O[8][4];
        wg_fence();
        wg_kmajor<8>(O, sb, smem_addr(st->Q), 0);
        wg_commit();
        wg_wait<0>();
        wg_pin<8>(O);
        scale_tokens(O, e);
        mbar_wait(&s->vb_full, i & 1);
#pragma unroll
        for (int ks = 0; ks < 4; ks++)
            frags_read(vn[ks], &s->vb[ks][t]);
        mbar_arrive(&s->vb_free);
        wg_fence();
        wg_kmajor<4>(O, vn, smem_addr(st->P), 1);
        wg_commit();
        if (t == 0)
            bulk_read_done<1>();
        group_sync(2);
        wg_wait<0>();
        wg_pin<8>(O);
        mbar_arrive(&s->empty[j]);
        out_store(O, s->out[i & 1], &m->o, c, half, i, (int64_t)a->d.HV * GDN_D, t, 1);
        j = j == STAGES - 1 ? 0 : j + 1;
    }
    if (t == 0)
        bulk_read_done<0>();
}

__global__ static void __launch_bounds__(HOPPER_THREADS, 1)
    gdn_split_kernel(struct k_gdn_delta a, const __grid_constant__ struct gdn_maps maps,
                     bool beside)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct split_smem *s = (struct split_smem *)raw;
    int warp = threadIdx.x >> 5, half = blockIdx.x & 1;
    struct hopper_ctx c = hopper_context(&a, a.b.seq_order[(blockIdx.x >> 1) / a.d.HV],
                                         (blockIdx.x >> 1) % a.d.HV);
    if (c.n_chunks == 0 && !c.fresh)
        return;
    if (threadIdx.x == 0) {
        barriers_init(s);
        mbar_init(&s->sb_full, 128);
        mbar_init(&s->sb_free, 128);
        mbar_init(&s->vb_full, 128);
        mbar_init(&s->vb_free, 128);
        fence_async();
    }
    __syncthreads();
    if (warp < 4) {
        reg_alloc<240>();
        split_state(&a, &c, s, half, threadIdx.x);
    } else if (warp < 8) {
        reg_alloc<216>();
        split_output(&a, &maps, &c, s, half, threadIdx.x - 128);
    } else {
        reg_dealloc<48>();
        if (warp == 8 && c.n_chunks > 0)
            chain_producer(&a, &maps, &c, s, half, threadIdx.x & 31, beside);
    }
}

// ---- launchers

/* Rows past T read as zeros. */
static cudaError_t make_map(CUtensorMap *m, const void *p, int32_t n_tokens, int32_t heads)
{
    cuuint64_t dims[3] = {GDN_D, (cuuint64_t)heads, (cuuint64_t)n_tokens};
    cuuint64_t strides[2] = {GDN_D * 2, (cuuint64_t)heads * GDN_D * 2};
    cuuint32_t box[3] = {64, 1, K_CHUNK};
    return tensor_map(m, p, 3, dims, strides, box);
}

cudaError_t gdn_delta_hopper(const struct k_gdn_delta *a, int32_t body, bool beside,
                             cudaStream_t stream)
{
    struct gdn_maps m;
    int32_t T = a->b.n_tokens > 0 ? a->b.n_tokens : 1;
    cudaError_t e = make_map(&m.q, a->q, T, a->d.H);
    if (e == cudaSuccess)
        e = make_map(&m.k, a->k, T, a->d.H);
    if (e == cudaSuccess)
        e = make_map(&m.v, a->v, T, a->d.HV);
    if (e == cudaSuccess)
        e = make_map(&m.o, a->o, T, a->d.HV);
    if (e != cudaSuccess)
        return e;
    if (body == K_GDN_FUSED)
        return gdn_fused(a, &m.o, stream);
    size_t smem = sizeof(struct split_smem);
    e = cudaFuncSetAttribute(gdn_split_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)smem);
    if (e != cudaSuccess)
        return e;
    /* Begins beside gdn_prep; the loading warp waits for its end, or unit by unit. */
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(a->b.n_seqs * a->d.HV * 2));
    config.blockDim = dim3(HOPPER_THREADS);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gdn_split_kernel, *a, m, beside);
}
