/* The gated delta rule on Hopper for few long sequences: the chain of gdn_delta.cu, same bits;
 * and the choice's other Hopper body, gdn_hopper_fused.cu.
 *
 * Formula, operands and the order of every sum are those of gdn_delta.cu, and gdn_prep goes
 * before; here products are wgmma with A from registers and tiles come by TMA, 3 stages deep.
 * Derived here; ../shared/facts.md.
 *
 * split: a block a (sequence, value head, half of V). A warpgroup runs chain and output, a warp
 *   loads, another one takes the output to memory.
 *   Grid N * HV * 2, block 192, shared 198 KB, registers 240. Limit: latency of three dependent
 *   products a chunk. Seen: 1.0 us a chunk alone, 1.1 to 1.2 with gdn_prep beside it: one warp
 *   a scheduler, whose 550 instructions a chunk follow one another at three to four cycles.
 *   When half of the card is free, gdn_prep runs there and this kernel starts beside it,
 *   waiting unit by unit.
 *
 * A chunk's tail: rows past the sequence's end belong to another request, so they are zeroed in
 * shared memory after the copy; its rows of O are not stored. */
#include "gdn_hopper.cuh"

// ---- kernels

/* Threads: a warpgroup for the chain, a warp for loads, a warp for the output. */
enum { STAGES = 3, SPLIT_THREADS = 192 };

/* ---- loads */

struct chain_stage {
    uint8_t K[2 * TILE_BYTES];
    uint8_t Q[2 * TILE_BYTES];
    uint8_t V[TILE_BYTES]; /* this half's 64 columns */
    uint8_t P[TILE_BYTES];
    uint8_t A[TRI_BYTES];
};

struct split_smem {
    struct chain_stage stage[STAGES];
    uint8_t out[2][TILE_BYTES]; /* O on its way to memory */
    __align__(16) float gates[STAGES][128];
    uint64_t full[STAGES];  /* 1 arrival and the copy's bytes */
    uint64_t clean[STAGES]; /* 32: tail rows are zeroed; used by the last chunk alone */
    uint64_t empty[STAGES]; /* 128 */
    uint64_t out_full[2];   /* 128 */
    uint64_t out_free[2];   /* 1 */
};

__device__ static inline void chain_load(const struct k_gdn_delta *a, const struct gdn_maps *m,
                                         const struct hopper_ctx *c, struct split_smem *s,
                                         int half, int chunk)
{
    int i = chunk % STAGES, t = c->tok + chunk * K_CHUNK;
    struct chain_stage *st = &s->stage[i];
    const struct gdn_unit *u =
        (const struct gdn_unit *)a->work + c->unit + (int64_t)chunk * a->d.HV;
    mbar_expect(&s->full[i], sizeof *st - TRI_BYTES + TRI_PACKED + sizeof u->gates);
    tma_load3(st->K, &m->k, &s->full[i], 0, c->kh, t);
    tma_load3(st->K + TILE_BYTES, &m->k, &s->full[i], 64, c->kh, t);
    tma_load3(st->V, &m->v, &s->full[i], half * 64, c->h, t);
    tri_load(st->A, u->A, &s->full[i]);
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

/* ---- chain */

/* O^T of chunk i, packed, to its tile as [64 tokens, 64]. */
__device__ static inline void out_put(const uint32_t o[4][4], struct split_smem *s, int i)
{
    int t = threadIdx.x;
    uint32_t at = smem_addr(s->out[i & 1]) + corner_off(t & 31, t >> 5);
    mbar_wait(&s->out_free[i & 1], i >> 1 & 1 ^ 1);
#pragma unroll
    for (int np = 0; np < 4; np++)
        stsm4_t(at + np * 2048, o[np]);
    fence_async();
    mbar_arrive(&s->out_full[i & 1]);
}

/* And from there to memory, by one warp: a bulk copy a chunk, or row by row when the tile has
 * rows of another sequence. row: elements between two tokens. */
__device__ static inline void chain_output(const struct gdn_maps *m, const struct hopper_ctx *c,
                                           struct split_smem *s, int half, int64_t row,
                                           int lane)
{
    for (int i = 0; i < c->n_chunks; i++) {
        int n = rows_of(c, i);
        mbar_wait(&s->out_full[i & 1], i >> 1 & 1);
        if (n < K_CHUNK) {
            out_rows(s->out[i & 1], c, half, i, row, n, lane, 32);
        } else if (lane == 0) {
            tma_store3(&m->o, s->out[i & 1], half * 64, c->h, c->tok + i * K_CHUNK);
            bulk_read_done<0>();
            mbar_arrive(&s->out_free[i & 1]);
        }
    }
}

/* What a chunk needs in registers besides its products' tiles, read a chunk ahead. */
struct chunk_regs {
    uint32_t v[4][4]; /* V^T: tokens 16 np + 8 (q / 2) .., rows g + 8 (q & 1) */
    float last;
};

__device__ static inline void chunk_load(struct chunk_regs *r, const uint8_t *V,
                                         const float *gates)
{
    int t = threadIdx.x;
    uint32_t at = smem_addr(V) + corner_off(t & 31, t >> 5);
#pragma unroll
    for (int np = 0; np < 4; np++)
        ldsm4_t(r->v[np], at + np * 2048);
    r->last = gates[63];
}

/* Chain and output of a head's half of V. Q S is begun in two parts, each while registers are
 * packed for a product of the chain; P Vn runs while the next chunk's first product is packed,
 * and the output goes to memory behind that one. */
__device__ static inline void split_chain(const struct k_gdn_delta *a,
                                          const struct hopper_ctx *c, struct split_smem *s,
                                          int half)
{
    int t = threadIdx.x, j = 0; /* j: stage of chunk i */
    struct chunk_regs r;
    uint32_t o[4][4];
    float S[16][4], O[8][4] = {};
    state_load(S, c, half, t);
    if (c->n_chunks > 0) {
        chunk_wait(c, s, 0);
        chunk_load(&r, s->stage[0].V, s->gates[0]);
    }
    for (int i = 0; i < c->n_chunks; i++) {
        struct chain_stage *st = &s->stage[j];
        int next = j == STAGES - 1 ? 0 : j + 1;
        uint32_t sb[8][4];
        float x[8][4], y[8][4];
        const float *el = s->gates[j] + 64;
        float2 eg[8];
        int save = gdn_save_slot(a, c->first + i);
        wg_state(x, sb, S, smem_addr(st->K));
        wg_commit();
#pragma unroll
        for (int nt = 0; nt < 8; nt++)
            eg[nt] = factor_at(s->gates[j], nt);
        wg_wait<1>(); /* O of the chunk before */
        wg_pin<8>(O);
        pack64(o, O);
        if (i > 0)
            mbar_arrive(&s->empty[j == 0 ? STAGES - 1 : j - 1]);
        wg_fence();
        wg_kmajor_part<0, 4>(O, sb, smem_addr(st->Q), 0);
        wg_commit();
        if (i > 0)
            out_put(o, s, i - 1);
#pragma unroll
        for (int k = 0; k < 64; k++)
            S[k >> 2][k & 3] = __fmul_rn(S[k >> 2][k & 3], r.last);
        wg_wait<1>();
        wg_pin<8>(x);
        wg_solve<false>(y, x, r.v, 0, eg, smem_addr(st->A));
        wg_commit();
        wg_kmajor_part<4, 8>(O, sb, smem_addr(st->Q), 1);
        wg_commit();
        wg_wait<1>();
        wg_pin<8>(y);
        uint32_t vn[4][4], f[4][4];
        pack64(vn, y);
        wg_update(S, f, y, el, smem_addr(st->K));
        wg_commit();
        wg_wait<1>();
        wg_pin<8>(O);
        scale_tokens(O, eg);
        wg_fence();
        wg_kmajor<4>(O, vn, smem_addr(st->P), 1);
        wg_commit();
        if (i + 1 < c->n_chunks) {
            chunk_wait(c, s, i + 1);
            chunk_load(&r, s->stage[next].V, s->gates[next]);
        }
        wg_wait<1>();
        wg_pin<16>(S);
        if (save >= 0)
            state_store(S, gdn_state(a, save, c->h), half, t);
        j = next;
    }
    if (c->n_chunks > 0) {
        wg_wait<0>();
        wg_pin<8>(O);
        pack64(o, O);
        out_put(o, s, c->n_chunks - 1);
    }
    state_store(S, c->S, half, t);
}

__global__ static void __launch_bounds__(SPLIT_THREADS, 1)
    gdn_split_kernel(struct k_gdn_delta a, const __grid_constant__ struct gdn_maps maps,
                     bool beside)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct split_smem *s = (struct split_smem *)raw;
    int item = blockIdx.x >> 1, half = blockIdx.x & 1, lane = threadIdx.x & 31;
    struct hopper_ctx c =
        hopper_context(&a, a.b.seq_order[item / a.d.HV], item - item / a.d.HV * a.d.HV);
    if (c.n_chunks == 0 && !c.fresh)
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->full[i], 1);
            mbar_init(&s->clean[i], 32);
            mbar_init(&s->empty[i], 128);
        }
        for (int i = 0; i < 2; i++) {
            mbar_init(&s->out_full[i], 128);
            mbar_init(&s->out_free[i], 1);
        }
    }
    for (int i = 0; i < STAGES; i++)
        tri_clear(s->stage[i].A, threadIdx.x, SPLIT_THREADS);
    fence_async();
    __syncthreads();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); /* uniform for the compiler */
    if (warp < 4)
        split_chain(&a, &c, s, half);
    else if (warp == 5)
        chain_output(&maps, &c, s, half, (int64_t)a.d.HV * GDN_D, lane);
    else if (c.n_chunks > 0)
        chain_producer(&a, &maps, &c, s, half, lane, beside);
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
    config.blockDim = dim3(SPLIT_THREADS);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gdn_split_kernel, *a, m, beside);
}
