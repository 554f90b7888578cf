/* The gated delta rule on Hopper for many sequences: chain, output and gdn_prep's work in one
 * kernel, the same bits as gdn_delta.cu and gdn_hopper.cu.
 *
 * A block takes (sequence, value head) items in turn, longest sequences first, as one stream of
 * chunks. Four warpgroups:
 *   0, gram: loads (TMA), K K^T and P;
 *   1, inverse: two warps a chunk make its gates' factors, and A in the place of K K^T;
 *   2 and 3, chain: chain and output of one half of V each, on the same K, Q, A, P.
 * K K^T, A and P never leave shared memory. K and Q of a chunk are a ring of 4, A one of 3, V
 * and P of 2: when the chain is done with chunk g - 2, P of g is made, V of g and K and Q of g
 * + 2 are loaded. The gates' factors are a ring of 5: K K^T of g - 2 was there, so the chain is
 * done with g - 5.
 *
 * Grid one a multiprocessor, block 512, shared 227 KB, registers 2 * 64 + 2 * 192: exactly what
 * there is, and none spilled, for L1 is all shared memory and a spill would come from the L2.
 * Limit: tensor cores, 2560 cycles a chunk. Seen: 2.75 us a chunk with all multiprocessors busy,
 * half of that limit's rate; all four warpgroups work most of the time and wait for their turn
 * on the tensor cores and for their own latency (RESULTS-gpu.md).
 *
 * A chunk's tail: rows past the sequence's end belong to another request, so gram zeroes them
 * in shared memory; its rows of O are not stored. */
#include "gdn_hopper.cuh"

// ---- kernels

enum { STAGES = 4, INVERSES = 3, TABLES = 5, FUSED_THREADS = 512, ITEMS = 8, ITEMS_AHEAD = 3 };

struct fused_stage {
    uint8_t K[2 * TILE_BYTES];
    uint8_t Q[2 * TILE_BYTES];
};

/* Chunk i of item k; k -1 behind the last. */
struct chunk_at {
    int k, i;
};

struct fused_smem {
    struct fused_stage stage[STAGES];
    uint8_t V[2][2][TILE_BYTES];     /* a half each */
    uint8_t A[INVERSES][TILE_BYTES]; /* K K^T before */
    uint8_t P[2][TILE_BYTES];
    uint8_t out[2][TILE_BYTES]; /* O of each half on its way to memory */
    __align__(16) struct gate_table gates[TABLES];
    float g[2][64], beta[2][64]; /* of each two warps' next chunk */
    uint32_t corner[256];        /* of the chain's threads: their place in a tile of V or O */
    struct hopper_ctx item[ITEMS];
    struct chunk_at at[STAGES]; /* which chunk is there; comes with it */
    uint64_t full[STAGES];      /* 1 */
    uint64_t v_full[2];         /* 1 */
    uint64_t gates_full[2];     /* 32 */
    uint64_t kk_full[INVERSES]; /* 128 */
    uint64_t a_full[INVERSES];  /* 64 */
    uint64_t p_full[2];         /* 128 */
    uint64_t free[2];           /* 256: the chain is done with the chunk */
    uint64_t item_full[ITEMS];  /* 1 */
    uint64_t item_free[ITEMS];  /* 16: one a warp */
    int n_put;                  /* items put so far */
};

/* The k-th item of this block, or -1. Rounds go to and fro, so that who has a long one in one
 * round has a short one in the next. */
__device__ static inline int item_at(const struct k_gdn_delta *a, int k)
{
    int n = gridDim.x, i = k * n + (k & 1 ? n - 1 - (int)blockIdx.x : (int)blockIdx.x);
    return i < a->b.n_seqs * a->d.HV ? i : -1;
}

/* The block's k-th item; n_chunks is -1 when there is nothing to do for it and -2 when the
 * block has none. */
__device__ static inline struct hopper_ctx item_find(const struct k_gdn_delta *a, int k)
{
    struct hopper_ctx c = {};
    int item = item_at(a, k);
    c.n_chunks = -2;
    if (item >= 0) {
        int seq = item / a->d.HV;
        c = hopper_context(a, a->b.seq_order[seq], item - seq * a->d.HV);
        if (c.n_chunks == 0 && !c.fresh)
            c.n_chunks = -1;
    }
    return c;
}

/* Puts the block's items up to k into the ring, those that are not there yet. Always by the
 * same thread. */
__device__ static inline void items_put(const struct k_gdn_delta *a, struct fused_smem *s,
                                        int k)
{
    for (; s->n_put <= k; s->n_put++) {
        struct hopper_ctx c = item_find(a, s->n_put);
        int at = s->n_put % ITEMS;
        mbar_wait(&s->item_free[at], s->n_put / ITEMS & 1 ^ 1);
        s->item[at] = c;
        mbar_arrive(&s->item_full[at]);
    }
}

/* Item k, once it is there. */
__device__ static inline const struct hopper_ctx *item_wait(struct fused_smem *s, int k)
{
    mbar_wait(&s->item_full[k % ITEMS], k / ITEMS & 1);
    return &s->item[k % ITEMS];
}

/* A warp is done with item k. */
__device__ static inline void item_leave(struct fused_smem *s, int k)
{
    __syncwarp();
    if ((tid_again() & 31) == 0)
        mbar_arrive(&s->item_free[k % ITEMS]);
}

/* The same as item_wait, waited for before: its place is computed anew. */
__device__ static inline const struct hopper_ctx *item_again(struct fused_smem *s, int k)
{
    int i;
    asm volatile("and.b32 %0, %1, 7;" : "=r"(i) : "r"(k));
    return &s->item[i];
}

/* Where a flat count of chunks stands in a ring of N, at most 8: the place | parity << 3. */
template <int N> struct place {
    uint32_t v = 0;

    __device__ int at(void) const
    {
        return v & 7;
    }
    __device__ uint32_t parity(void) const
    {
        return v >> 3;
    }
    __device__ void next(void)
    {
        v = (v & 7) == N - 1 ? (v & 8) ^ 8 : v + 1;
    }
};

/* From chunk *i of item *k to the next chunk; false after the last: items come longest first,
 * so behind one without chunks there are none. leaves: this walk is the warp's last look at
 * items. */
__device__ static inline bool walk_next(struct fused_smem *s, int *k, int *i, bool leaves)
{
    if (++*i < item_wait(s, *k)->n_chunks)
        return true;
    if (*i > 0) {
        if (leaves)
            item_leave(s, *k);
        ++*k, *i = 0;
    }
    return item_wait(s, *k)->n_chunks > 0;
}

/* ---- loads */

__device__ static inline void copy4(float *dst, const float *src, bool live)
{
    int n = live ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_addr(dst)), "l"(src),
                 "r"(n)
                 : "memory");
}

/* Moves *ahead to the next chunk and begins the copies of its K and Q into stage j; one
 * thread. */
__device__ static inline void load_kq(const struct gdn_maps *m, struct fused_smem *s,
                                      struct chunk_at *ahead, int j)
{
    if (ahead->k >= 0 && !walk_next(s, &ahead->k, &ahead->i, false))
        ahead->k = -1;
    s->at[j] = *ahead;
    if (ahead->k < 0) {
        mbar_arrive(&s->full[j]);
        return;
    }
    const struct hopper_ctx *c = item_again(s, ahead->k);
    int tok = c->tok + ahead->i * K_CHUNK;
    mbar_expect(&s->full[j], sizeof s->stage[j]);
    tma_load4(s->stage[j].K, &m->k, &s->full[j], tok, 0, c->kh);
    tma_load4(s->stage[j].Q, &m->q, &s->full[j], tok, 0, c->kh);
}

/* The same for V of the chunk in stage j, to place g & 1. */
__device__ static inline void load_v(const struct gdn_maps *m, struct fused_smem *s, int j,
                                     int g)
{
    const struct hopper_ctx *c = item_again(s, s->at[j].k);
    mbar_expect(&s->v_full[g & 1], sizeof s->V[g & 1]);
    tma_load4(s->V[g & 1], &m->v, &s->v_full[g & 1], c->tok + s->at[j].i * K_CHUNK, 0, c->h);
}

/* The gates of chunk i of item k to place p, a warp. */
__device__ static inline void load_gates(const struct k_gdn_delta *a, struct fused_smem *s,
                                         int k, int i, int p)
{
    const struct hopper_ctx *c = &s->item[k % ITEMS];
    int tok = c->tok + i * K_CHUNK, n = rows_of(c, i);
#pragma unroll
    for (int r = tid_again() & 31; r < K_CHUNK; r += 32) {
        int64_t at = (int64_t)(tok + (r < n ? r : 0)) * a->d.HV + c->h;
        copy4(&s->g[p][r], a->g + at, r < n);
        copy4(&s->beta[p][r], a->beta + at, r < n);
    }
    cp_commit();
}

/* ---- gram */

__device__ static inline void fused_gram(const struct gdn_maps *m, struct fused_smem *s)
{
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), n_left = 0; /* items */
    struct chunk_at ahead = {0, -1};
    struct place<STAGES> at;
    struct place<INVERSES> inv;
    struct place<TABLES> table;
    for (int j = 0; j < 2 && tid_again() == 0; j++)
        load_kq(m, s, &ahead, j);
    for (int g = 0;; g++) {
        struct fused_stage *st = &s->stage[at.at()];
        mbar_wait(&s->full[at.at()], at.parity());
        int k = s->at[at.at()].k;
        if (k < 0)
            break;
        if (k > n_left)
            item_leave(s, n_left++);
        int n = rows_of(item_again(s, k), s->at[at.at()].i);
        if (n < K_CHUNK) {
            zero_rows(st->K, 4, n, tid_again(), 128);
            fence_async();
            group_sync(1);
        }
        float acc[8][4];
        prep_product(acc, smem_addr(st->K), smem_addr(st->K), warp);
        prep_product_wait(acc);
        prep_store_kk(smem_addr(s->A[inv.at()]), warp, acc);
        /* Before those of g + 2 can come, which K K^T lets through. */
        mbar_wait(&s->gates_full[g & 1], g >> 1 & 1);
        mbar_arrive(&s->kk_full[inv.at()]);
        prep_product(acc, smem_addr(st->Q), smem_addr(st->K), warp);
        mbar_wait(&s->free[g & 1], g >> 1 & 1 ^ 1);
        if (tid_again() == 0) {
            load_v(m, s, at.at(), g);
            load_kq(m, s, &ahead, at.at() ^ 2);
        }
        prep_product_wait(acc);
        prep_mask_qk(&s->gates[table.at()], smem_addr(s->P[g & 1]), warp, acc);
        fence_async();
        mbar_arrive(&s->p_full[g & 1]);
        at.next(), inv.next(), table.next();
    }
    for (; item_wait(s, n_left)->n_chunks != -2; n_left++)
        item_leave(s, n_left);
}

/* ---- inverse */

/* Chunks p, p + 2, .. by warps 2 p and 2 p + 1 of the warpgroup. */
__device__ static inline void fused_inverse(const struct k_gdn_delta *a, struct fused_smem *s)
{
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5 & 3, 0), k = 0, i = -1, g = warp >> 1;
    struct place<INVERSES> inv;
    struct place<TABLES> table;
    if ((tid_again() & 127) == 0) {
        for (int j = 0; j <= ITEMS_AHEAD; j++)
            mbar_arrive(&s->item_full[j]);
    }
    bool more = walk_next(s, &k, &i, true);
    if (g) {
        more = more && walk_next(s, &k, &i, true);
        inv.next(), table.next();
    }
    if (more && (warp & 1))
        load_gates(a, s, k, i, g);
    for (; more; g += 2) {
        int p = g & 1;
        if ((tid_again() & 127) == 0)
            items_put(a, s, k + ITEMS_AHEAD);
        more = walk_next(s, &k, &i, true) && walk_next(s, &k, &i, true);
        if (warp & 1) {
            int lane = tid_again() & 31;
            cp_wait<0>();
            __syncwarp();
            float2 x = *(const float2 *)&s->g[p][2 * lane],
                   y = *(const float2 *)&s->beta[p][2 * lane];
            struct gate_regs r = {{x.x, x.y}, {y.x, y.y}};
            gates_scan(&s->gates[table.at()], r);
            __syncwarp();
            mbar_arrive(&s->gates_full[p]);
            if (more)
                load_gates(a, s, k, i, p);
        }
        mbar_wait(&s->gates_full[p], g >> 1 & 1);
        mbar_wait(&s->kk_full[inv.at()], inv.parity());
        prep_inverse_pair(&s->gates[table.at()], smem_addr(s->A[inv.at()]), warp & 1,
                          p ? 7 : 2);
        fence_async();
        mbar_arrive(&s->a_full[inv.at()]);
        inv.next(), inv.next();
        table.next(), table.next();
    }
    for (;; k++) {
        if ((tid_again() & 127) == 0)
            items_put(a, s, k + ITEMS_AHEAD);
        if (item_wait(s, k)->n_chunks == -2)
            return;
        item_leave(s, k);
    }
}

/* ---- chain */

/* Read where it is used, not kept: registers are what a chain is short of. */
__device__ static inline uint32_t corner_of(const struct fused_smem *s)
{
    uint32_t v;
    asm volatile("ld.volatile.shared.u32 %0, [%1];"
                 : "=r"(v)
                 : "r"(smem_addr(&s->corner[threadIdx.x & 255])));
    return v;
}

/* This warp's V^T in accumulator layout: v[np][q] is (tokens 16 np + 8 (q / 2) .., rows
 * g + 8 (q & 1)). */
__device__ static inline void value_at(uint32_t v[4][4], uint32_t at)
{
#pragma unroll
    for (int np = 0; np < 4; np++)
        ldsm4_t(v[np], at + np * 2048);
}

/* f = V^T - eg * x as an A operand. */
__device__ static inline void residual_from(uint32_t f[4][4], const float x[8][4],
                                            const uint32_t v[4][4], const float *eg)
{
    eg += 2 * (threadIdx.x & 3);
#pragma unroll
    for (int np = 0; np < 4; np++) {
#pragma unroll
        for (int q = 0; q < 4; q++)
            f[np][q] = residual2(&x[2 * np + (q >> 1)][2 * (q & 1)], v[np][q],
                                 *(const float2 *)&eg[16 * np + 8 * (q >> 1)]);
    }
}

/* Of tokens from n on, which are another request's. */
__device__ static inline void zero_tail(uint32_t f[4][4], int n)
{
    if (n >= K_CHUNK)
        return;
#pragma unroll
    for (int np = 0; np < 4; np++) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            int tok = 16 * np + 8 * (q >> 1) + 2 * (threadIdx.x & 3);
            f[np][q] &= (tok < n ? 0xffffu : 0) | (tok + 1 < n ? 0xffff0000u : 0);
        }
    }
}

/* x's columns are tokens: each times its factor. */
__device__ static inline void scale_from(float x[8][4], const float *by)
{
    by += 2 * (threadIdx.x & 3);
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
        scale2(x[nt], *(const float2 *)&by[8 * nt]);
}

/* O^T of this warpgroup to its tile as [64 tokens, 64]. */
__device__ static inline void out_put(const float O[8][4], struct fused_smem *s)
{
    uint32_t at = smem_addr(s->out[threadIdx.x >> 7 & 1]) + corner_of(s);
#pragma unroll
    for (int np = 0; np < 4; np++) {
        uint32_t r[4];
        frag_pack(r, O[2 * np], O[2 * np + 1]);
        stsm4_t(at + np * 2048, r);
    }
}

/* And from there to memory, n rows: by one bulk copy that runs on, or row by row. */
__device__ static inline void out_send(struct fused_smem *s, const struct k_gdn_delta *a,
                                       const struct gdn_maps *m, const struct hopper_ctx *c,
                                       int chunk)
{
    int n = rows_of(c, chunk), t = tid_again(), half = t >> 7 & 1;
    const uint8_t *tile = s->out[half];
    t &= 127;
    fence_async();
    group_sync(5 + half);
    if (n == K_CHUNK) {
        if (t == 0)
            tma_store3(&m->o, tile, half * 64, c->h, c->tok + chunk * K_CHUNK);
        return;
    }
    out_rows(tile, c, half, chunk, (int64_t)a->d.HV * GDN_D, n, t);
}

/* Chain and output of one half of V. The output of a chunk is sent while the next one's first
 * product runs. */
__device__ static inline void fused_chain(const struct k_gdn_delta *a, const struct gdn_maps *m,
                                          struct fused_smem *s)
{
    struct place<STAGES> at;
    struct place<INVERSES> inv;
    struct place<TABLES> table;
    for (int k = 0, g = 0;; k++) {
        const struct hopper_ctx *c = item_wait(s, k);
        if (c->n_chunks == -2)
            break;
        if (c->n_chunks == -1) {
            item_leave(s, k);
            continue;
        }
        float S[16][4];
        state_load(S, c, tid_again() >> 7 & 1, tid_again() & 127);
        for (int i = 0; i < item_again(s, k)->n_chunks; i++, g++) {
            struct fused_stage *st = &s->stage[at.at()];
            uint32_t sb[8][4], f[4][4];
            float x[8][4], O[8][4];
#pragma unroll
            for (int ks = 0; ks < 8; ks++)
                frag_pack(sb[ks], S[2 * ks], S[2 * ks + 1]);
            mbar_wait(&s->full[at.at()], at.parity());
            mbar_wait(&s->a_full[inv.at()], inv.parity());
            wg_fence();
            wg_kmajor<8>(x, sb, smem_addr(st->K), 0);
            wg_commit();
            if (i > 0)
                out_send(s, a, m, item_again(s, k), i - 1);
            wg_kmajor<8>(O, sb, smem_addr(st->Q), 0);
            wg_commit();
            int save = gdn_save_slot(a, item_again(s, k)->first + i);
            uint32_t v[4][4];
            mbar_wait(&s->v_full[g & 1], g >> 1 & 1);
            value_at(v, smem_addr(s->V[g & 1][threadIdx.x >> 7 & 1]) + corner_of(s));
            wg_wait<0>();
            wg_pin<8>(x);
            wg_pin<8>(O);
            residual_from(f, x, v, s->gates[table.at()].eg);
            zero_tail(f, rows_of(item_again(s, k), i));
            wg_fence();
            wg_kmajor<4>(x, f, smem_addr(s->A[inv.at()]), 0);
            wg_commit();
            float last = s->gates[table.at()].eg[63];
#pragma unroll
            for (int j = 0; j < 64; j++)
                S[j >> 2][j & 3] = __fmul_rn(S[j >> 2][j & 3], last);
            scale_from(O, s->gates[table.at()].eg);
            mbar_wait(&s->p_full[g & 1], g >> 1 & 1);
            wg_wait<0>();
            wg_pin<8>(x);
            uint32_t vn[4][4];
            pack64(vn, x);
            scale_from(x, s->gates[table.at()].el);
            pack64(f, x);
            wg_fence();
            wg_kmajor<4>(O, vn, smem_addr(s->P[g & 1]), 1);
            wg_commit();
            wg_nmajor(S, f, smem_addr(st->K));
            wg_commit();
            if ((threadIdx.x & 127) == 0)
                bulk_read_done<0>(); /* the tile is free again */
            group_sync(5 + (threadIdx.x >> 7 & 1));
            wg_wait<1>();
            wg_pin<8>(O);
            out_put(O, s);
            wg_wait<0>();
            wg_pin<16>(S);
            mbar_arrive(&s->free[g & 1]);
            at.next(), inv.next(), table.next();
            if (save >= 0)
                state_store(S, gdn_state(a, save, item_again(s, k)->h), tid_again() >> 7 & 1,
                            tid_again() & 127);
        }
        c = item_again(s, k);
        if (c->n_chunks > 0)
            out_send(s, a, m, c, c->n_chunks - 1);
        state_store(S, c->S, tid_again() >> 7 & 1, tid_again() & 127);
        item_leave(s, k);
    }
    if ((threadIdx.x & 127) == 0)
        bulk_read_done<0>();
}

__global__ static void __launch_bounds__(FUSED_THREADS, 1)
    gdn_fused_kernel(struct k_gdn_delta a, const __grid_constant__ struct gdn_maps maps)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct fused_smem *s = (struct fused_smem *)raw;
    int group = threadIdx.x >> 7;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            mbar_init(&s->full[i], 1);
        for (int i = 0; i < INVERSES; i++) {
            mbar_init(&s->kk_full[i], 128);
            mbar_init(&s->a_full[i], 64);
        }
        for (int i = 0; i < 2; i++) {
            mbar_init(&s->v_full[i], 1);
            mbar_init(&s->gates_full[i], 32);
            mbar_init(&s->p_full[i], 128);
            mbar_init(&s->free[i], 256);
        }
        for (int i = 0; i < ITEMS; i++) {
            mbar_init(&s->item_full[i], 1);
            mbar_init(&s->item_free[i], 16);
        }
        fence_async();
    }
    if (group == 1 && (threadIdx.x & 31) == 0) /* found before anything waits for them */
        s->item[threadIdx.x >> 5 & 3] = item_find(&a, threadIdx.x >> 5 & 3);
    if (threadIdx.x == 0)
        s->n_put = ITEMS_AHEAD + 1;
    if (threadIdx.x == 32) {
        map_prefetch(&maps.q);
        map_prefetch(&maps.k);
        map_prefetch(&maps.v);
        map_prefetch(&maps.o);
    }
    zero_rows(s->A[0], INVERSES + 2, 0, threadIdx.x, FUSED_THREADS);
    if (threadIdx.x < 256) {
        int lane = threadIdx.x & 31;
        s->corner[threadIdx.x] = tile_off((lane >> 4) * 8 + (lane & 7),
                                          2 * (threadIdx.x >> 5 & 3) + ((lane >> 3) & 1));
    }
    __syncthreads();
    if (group == 0) {
        reg_dealloc<64>();
        fused_gram(&maps, s);
    } else if (group == 1) {
        reg_dealloc<64>();
        fused_inverse(&a, s);
    } else {
        reg_alloc<192>();
        fused_chain(&a, &maps, s);
    }
}

// ---- launchers

/* Boxes of 64 tokens of a head: two tiles. */
static cudaError_t make_map(CUtensorMap *m, const void *p, int32_t n_tokens, int32_t heads)
{
    cuuint64_t dims[4] = {64, (cuuint64_t)n_tokens, 2, (cuuint64_t)heads};
    cuuint64_t strides[3] = {(cuuint64_t)heads * GDN_D * 2, 128, GDN_D * 2};
    cuuint32_t box[4] = {64, K_CHUNK, 2, 1};
    return tensor_map(m, p, 4, dims, strides, box);
}

cudaError_t gdn_fused(const struct k_gdn_delta *a, const CUtensorMap *o, cudaStream_t stream)
{
    struct gdn_maps m;
    int32_t T = a->b.n_tokens > 0 ? a->b.n_tokens : 1;
    m.o = *o;
    cudaError_t e = make_map(&m.q, a->q, T, a->d.H);
    if (e == cudaSuccess)
        e = make_map(&m.k, a->k, T, a->d.H);
    if (e == cudaSuccess)
        e = make_map(&m.v, a->v, T, a->d.HV);
    if (e != cudaSuccess)
        return e;
    int smem = sizeof(struct fused_smem), n_items = a->b.n_seqs * a->d.HV;
    e = cudaFuncSetAttribute(gdn_fused_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             smem);
    if (e != cudaSuccess)
        return e;
    int n_blocks = n_items < a->dev->n_sms ? n_items : a->dev->n_sms;
    gdn_fused_kernel<<<(unsigned)n_blocks, FUSED_THREADS, smem, stream>>>(*a, m);
    return cudaGetLastError();
}
