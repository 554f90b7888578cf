/* The gated delta rule on Hopper for many sequences: chain, output and gdn_prep's work in one
 * kernel, the same bits as gdn_delta.cu and gdn_hopper.cu.
 *
 * A block takes (sequence, value head) items in turn, longest sequences first, as one stream of
 * chunks. Four warpgroups:
 *   0, gram: loads (TMA), K K^T and P;
 *   1, inverse: two warps a chunk make its gates' factors, and A in the place of K K^T;
 *   2 and 3, chain: chain and output of one half of V each, on the same K, Q, A, P.
 * K K^T, A and P never leave shared memory. K and Q of a chunk are a ring of 4, A one of 3, V
 * and P of 2: when the chain is done with chunk g - 2, P of g is made and K and Q of g + 2 are
 * loaded. O takes the place of V, so V of g + 2 comes when O of g has left. The gates' factors
 * are a ring of 5: K K^T of g - 2 was there, so the chain is done with g - 5.
 *
 * Grid one a multiprocessor, block 512, shared 225 KB, registers 2 * 64 + 2 * 192: exactly what
 * there is, and none spilled, for L1 is all shared memory and a spill would come from the L2.
 * The code that runs again and again is 37 KB: some KB more and the warps wait for instructions
 * (RESULTS-gpu.md), so loops stay loops where a copy would not be used by each warp.
 * Limit: tensor cores, 2690 cycles a chunk. Seen: 2.6 us a chunk with all multiprocessors busy,
 * half of that limit's rate; all four warpgroups work most of the time and wait for their turn
 * on the tensor cores and for their own latency.
 *
 * A chunk's tail: rows past the sequence's end belong to another request, so K's, Q's and V's
 * are zeroed in shared memory; its rows of O are not stored. */
#include "gdn_hopper.cuh"

// ---- kernels

enum {
    STAGES = 4,
    CHUNKS = 8,
    INVERSES = 3,
    TABLES = 5,
    FUSED_THREADS = 512,
    ITEMS = 8,
    ITEMS_FIRST = 4,
    ITEMS_AHEAD = 4
};

struct fused_stage {
    uint8_t K[2 * TILE_BYTES];
    uint8_t Q[2 * TILE_BYTES];
};

/* A chunk of item k, -1 behind the last: what its copies need. A ring of 8: thread 0 writes g +
 * 2 when all have read g - 3. */
struct chunk_at {
    int k;
    int tok, n; /* first token, tokens */
    int h, kh;
};

/* A chunk's gates as they came. */
struct __align__(16) gates_raw
{
    float g[64], beta[64];
    bool last; /* there is none: it was the last one before */
};

struct fused_smem {
    struct fused_stage stage[STAGES];
    uint8_t V[2][2][TILE_BYTES];    /* a half each; then its O on its way to memory */
    uint8_t A[INVERSES][TRI_BYTES]; /* K K^T and T before */
    uint8_t P[2][TILE_BYTES];
    __align__(16) struct gate_table gates[TABLES];
    struct gates_raw raw[4];
    uint32_t corner[256]; /* of the chain's threads: their place in a tile of V or O */
    struct hopper_ctx item[ITEMS];
    struct chunk_at at[CHUNKS]; /* which chunk is in a stage; comes with it */
    uint64_t full[STAGES];      /* 1 */
    uint64_t v_full[2];         /* 1 */
    uint64_t v_free[2];         /* 2: O is on its way */
    uint64_t raw_full[4];       /* 64 */
    uint64_t gates_full[4];     /* 32 */
    uint64_t kk_full[INVERSES]; /* 128 */
    uint64_t a_full[INVERSES];  /* 64 */
    uint64_t p_full[2];         /* 128 */
    uint64_t free[2];           /* 256: the chain is done with the chunk */
    uint64_t item_full[ITEMS];  /* 1 */
    uint64_t item_free[ITEMS];  /* 14: one a warp that looks at items */
    int n_put;                  /* items put so far */
};

static_assert(sizeof(struct fused_smem) <= 232448, "shared memory of a multiprocessor");

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

/* The same from the count, where instructions are cheaper than registers. */
template <int N> __device__ static inline uint32_t ring_parity(uint32_t g)
{
    return g / N & 1;
}

template <int N> __device__ static inline uint32_t ring_at(uint32_t g)
{
    asm volatile("" : "+r"(g));
    return g % N;
}

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

/* Chunk i of item k. */
struct chunk_walk {
    int k, i;
};

/* Moves *w to the next chunk and writes down where it is; one thread. */
__device__ static inline void walk_ahead(struct fused_smem *s, struct chunk_walk *w,
                                         struct chunk_at *to)
{
    if (w->k >= 0 && !walk_next(s, &w->k, &w->i, false))
        w->k = -1;
    to->k = w->k;
    if (w->k < 0)
        return;
    const struct hopper_ctx *c = item_again(s, w->k);
    to->tok = c->tok + w->i * K_CHUNK, to->n = rows_of(c, w->i);
    to->h = c->h, to->kh = c->kh;
}

/* Begins the copies of K and Q of chunk g; one thread. */
__device__ static inline void load_kq(const struct gdn_maps *m, struct fused_smem *s,
                                      uint32_t g)
{
    const struct chunk_at *c = &s->at[g % CHUNKS];
    int j = g % STAGES;
    if (c->k < 0) {
        mbar_arrive(&s->full[j]);
        return;
    }
    mbar_expect(&s->full[j], sizeof s->stage[j]);
    tma_load4(s->stage[j].K, &m->k, &s->full[j], c->tok, 0, c->kh);
    tma_load4(s->stage[j].Q, &m->q, &s->full[j], c->tok, 0, c->kh);
}

/* The same of V of chunk g, once O of g - 2 has left its place. */
__device__ static inline void load_v(const struct gdn_maps *m, struct fused_smem *s, uint32_t g)
{
    const struct chunk_at *c = &s->at[g % CHUNKS];
    mbar_wait(&s->v_free[g & 1], g >> 1 & 1 ^ 1);
    mbar_expect(&s->v_full[g & 1], sizeof s->V[g & 1]);
    tma_load4(s->V[g & 1], &m->v, &s->v_full[g & 1], c->tok, 0, c->h);
}

/* Begins the copies of the gates of chunk g, chunk i of item k, or says that there is none; a
 * warp. */
__device__ static inline void load_gates(const struct k_gdn_delta *a, struct fused_smem *s,
                                         bool live, int k, int i, int g)
{
    struct gates_raw *to = &s->raw[g & 3];
    if (live) {
        const struct hopper_ctx *c = item_again(s, k);
        int tok = c->tok + i * K_CHUNK, n = rows_of(c, i);
#pragma unroll
        for (int r = tid_again() & 31; r < K_CHUNK; r += 32) {
            int64_t at = (int64_t)(tok + (r < n ? r : 0)) * a->d.HV + c->h;
            copy4(&to->g[r], a->g + at, r < n);
            copy4(&to->beta[r], a->beta + at, r < n);
        }
        cp_arrive(&s->raw_full[g & 3]);
    } else {
        mbar_arrive(&s->raw_full[g & 3]);
    }
    to->last = !live;
    mbar_arrive(&s->raw_full[g & 3]);
}

/* ---- gram */

/* Chunk g is in its stage: its rows behind the sequence's end become zeros. False behind the
 * last. n_left: items this warp has left. */
__device__ static inline bool stage_enter(struct fused_smem *s, uint32_t g, int *n_left)
{
    int j = g % STAGES;
    const struct chunk_at *c = &s->at[g % CHUNKS];
    mbar_wait(&s->full[j], g / STAGES & 1);
    int k = c->k, n = c->n;
    if (k < 0)
        return false;
    if (k > *n_left)
        item_leave(s, (*n_left)++);
    if (n < K_CHUNK) {
        zero_rows(s->stage[j].K, 4, n, tid_again(), 128);
        fence_async();
        group_sync(1);
    }
    return true;
}

__device__ static inline void fused_gram(const struct gdn_maps *m, struct fused_smem *s)
{
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), n_left = 0;
    struct chunk_walk ahead = {0, -1};
    struct place<INVERSES> inv;
    struct place<TABLES> table;
    for (int j = 0; j < 2 && tid_again() == 0; j++) {
        walk_ahead(s, &ahead, &s->at[j]);
        load_kq(m, s, j);
        if (ahead.k >= 0)
            load_v(m, s, j);
    }
    uint32_t g = 0;
    for (; stage_enter(s, g, &n_left); g++) {
        struct fused_stage *st = &s->stage[g % STAGES];
        uint32_t K = smem_addr(st->K);
        float acc[8][4];
        prep_product(acc, K, K, warp);
        if (g > 2 && tid_again() == 0)
            load_v(m, s, g - 1);
        prep_product_wait(acc);
        prep_store_kk(smem_addr(s->A[inv.at()]), warp, acc);
        mbar_arrive(&s->kk_full[inv.at()]);
        prep_product(acc, smem_addr(st->Q), K, warp);
        /* Thread 0 is of the warp with the least to mask. */
        if (tid_again() == 0)
            walk_ahead(s, &ahead, &s->at[(g + 2) % CHUNKS]);
        mbar_wait(&s->free[g & 1], g >> 1 & 1 ^ 1);
        if (tid_again() == 0)
            load_kq(m, s, g + 2);
        mbar_wait(&s->gates_full[g & 3], g >> 2 & 1);
        prep_product_wait(acc);
        prep_mask_qk(&s->gates[table.at()], smem_addr(s->P[g & 1]), warp, acc);
        fence_async();
        mbar_arrive(&s->p_full[g & 1]);
        inv.next(), table.next();
    }
    if (g > 2 && tid_again() == 0)
        load_v(m, s, g - 1);
    for (; item_wait(s, n_left)->n_chunks != -2; n_left++)
        item_leave(s, n_left);
}

/* ---- inverse */

/* Chunks p, p + 2, .. by warps 2 p and 2 p + 1 of the warpgroup: the first one begins the
 * copies of the next one's gates while the second one makes factors of this one's; then both
 * make A. */
__device__ static inline void fused_inverse(const struct k_gdn_delta *a, struct fused_smem *s)
{
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5 & 3, 0), g = warp >> 1;
    int k = 0, i = -1; /* the first one's next chunk */
    bool more = true;
    struct place<INVERSES> inv;
    struct place<TABLES> table;
    if ((tid_again() & 127) == 0) {
        for (int j = 0; j < ITEMS_FIRST; j++)
            mbar_arrive(&s->item_full[j]);
    }
    if (g)
        inv.next(), table.next();
    if (!(warp & 1)) {
#pragma unroll 1
        for (int j = 0; j <= g; j++)
            more = more && walk_next(s, &k, &i, true);
        load_gates(a, s, more, k, i, g);
    }
    for (;; g += 2) {
        if ((tid_again() & 127) == 0)
            items_put(a, s, k + ITEMS_AHEAD);
        if (warp & 1) {
            int lane = tid_again() & 31;
            const struct gates_raw *raw = &s->raw[g & 3];
            mbar_wait(&s->raw_full[g & 3], g >> 2 & 1);
            if (raw->last)
                return;
            float2 x = *(const float2 *)&raw->g[2 * lane],
                   y = *(const float2 *)&raw->beta[2 * lane];
            struct gate_regs r = {{x.x, x.y}, {y.x, y.y}};
            gates_scan(&s->gates[table.at()], r);
            mbar_arrive(&s->gates_full[g & 3]);
        } else {
            if (!more)
                break;
#pragma unroll 1
            for (int j = 0; j < 2; j++)
                more = more && walk_next(s, &k, &i, true);
            load_gates(a, s, more, k, i, g + 2);
        }
        mbar_wait(&s->gates_full[g & 3], g >> 2 & 1);
        mbar_wait(&s->kk_full[inv.at()], inv.parity());
        prep_inverse_pair(&s->gates[table.at()], smem_addr(s->A[inv.at()]), warp & 1,
                          g & 1 ? 7 : 2);
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

/* Of this warp's columns of V the rows from n on, which are another request's, become zeros. */
__device__ static inline void value_clear(uint8_t *tile, int n)
{
    int lane = tid_again() & 31, unit = (tid_again() >> 5 & 3) * 2 + (lane & 1);
    for (int r = n + (lane >> 1); r < K_CHUNK; r += 16)
        *(uint4 *)(tile + tile_off(r, unit)) = make_uint4(0, 0, 0, 0);
    __syncwarp();
}

/* This warp's O^T to its place in a tile [64 tokens, 64], where its V was. */
__device__ static inline void out_put(const float O[8][4], uint32_t at)
{
#pragma unroll
    for (int np = 0; np < 4; np++) {
        uint32_t r[4];
        frag_pack(r, O[2 * np], O[2 * np + 1]);
        stsm4_t(at + np * 2048, r);
    }
}

/* And from there to memory, n rows: by one bulk copy that runs on, or row by row. p: the tile's
 * place. */
__device__ static inline void out_send(struct fused_smem *s, const struct k_gdn_delta *a,
                                       const struct gdn_maps *m, const struct hopper_ctx *c,
                                       int chunk, int p)
{
    int n = rows_of(c, chunk), t = tid_again(), half = t >> 7 & 1;
    const uint8_t *tile = s->V[p][half];
    t &= 127;
    fence_async();
    group_sync(5 + half);
    if (n == K_CHUNK) {
        if (t == 0)
            tma_store3(&m->o, tile, half * 64, c->h, c->tok + chunk * K_CHUNK);
        return;
    }
    out_rows(tile, c, half, chunk, (int64_t)a->d.HV * GDN_D, n, t, 128);
    group_sync(5 + half);
}

/* Chain and output of one half of V. The output of a chunk is sent while the next one's first
 * product runs. */
__device__ static inline void fused_chain(const struct k_gdn_delta *a, const struct gdn_maps *m,
                                          struct fused_smem *s)
{
    uint32_t g = 0;
    for (int k = 0;; k++) {
        const struct hopper_ctx *c = item_wait(s, k);
        if (c->n_chunks == -2)
            break;
        if (c->n_chunks == -1) {
            item_leave(s, k);
            continue;
        }
        float S[16][4];
        state_load(S, c, tid_again() >> 7 & 1, tid_again() & 127);
        bool more = item_again(s, k)->n_chunks > 0;
        for (int i = 0; more; i++, g++) {
            uint32_t sb[8][4];
            float x[8][4], O[8][4];
            mbar_wait(&s->full[g % STAGES], g / STAGES & 1);
            if (rows_of(item_again(s, k), i) < K_CHUNK) /* its tail is zeroed */
                mbar_wait(&s->a_full[ring_at<INVERSES>(g)], ring_parity<INVERSES>(g));
            wg_state(x, sb, S, smem_addr(s->stage[g % STAGES].K));
            wg_commit();
            if (i > 0)
                out_send(s, a, m, item_again(s, k), i - 1, g & 1 ^ 1);
            wg_kmajor<8>(O, sb, smem_addr(s->stage[g % STAGES].Q), 0);
            wg_commit();
            if (g > 0 && (threadIdx.x & 127) == 0) {
                bulk_read_done<0>();
                mbar_arrive(&s->v_free[g & 1 ^ 1]);
            }
            mbar_wait(&s->v_full[g & 1], g >> 1 & 1);
            if (rows_of(item_again(s, k), i) < K_CHUNK)
                value_clear(s->V[g & 1][threadIdx.x >> 7 & 1], rows_of(item_again(s, k), i));
            uint32_t tile = smem_addr(s->V[g & 1][threadIdx.x >> 7 & 1]) + corner_of(s);
            uint32_t v[1][4];
            ldsm4_t(v[0], tile);
            mbar_wait(&s->a_full[ring_at<INVERSES>(g)], ring_parity<INVERSES>(g));
            wg_wait<0>();
            wg_pin<8>(x);
            wg_pin<8>(O);
            float y[8][4];
            wg_solve<true>(y, x, v, tile, (const float *)s->gates[ring_at<TABLES>(g)].eg,
                           smem_addr(s->A[ring_at<INVERSES>(g)]));
            wg_commit();
            int save = gdn_save_slot(a, item_again(s, k)->first + i);
            float last = s->gates[ring_at<TABLES>(g)].eg[63];
#pragma unroll
            for (int j = 0; j < 64; j++)
                S[j >> 2][j & 3] = __fmul_rn(S[j >> 2][j & 3], last);
            scale_tokens(O, s->gates[ring_at<TABLES>(g)].eg);
            mbar_wait(&s->p_full[g & 1], g >> 1 & 1);
            wg_wait<0>();
            wg_pin<8>(y);
            uint32_t vn[4][4], f[4][4];
            pack64(vn, y);
            wg_fence();
            wg_kmajor<4>(O, vn, smem_addr(s->P[g & 1]), 1);
            wg_commit();
            wg_update(S, f, y, s->gates[ring_at<TABLES>(g)].el,
                      smem_addr(s->stage[g % STAGES].K));
            wg_commit();
            more = i + 1 < item_again(s, k)->n_chunks;
            wg_wait<1>();
            wg_pin<8>(O);
            out_put(O, tile);
            wg_wait<0>();
            wg_pin<16>(S);
            mbar_arrive(&s->free[g & 1]);
            if (save >= 0)
                state_store(S, gdn_state(a, save, item_again(s, k)->h), tid_again() >> 7 & 1,
                            tid_again() & 127);
        }
        c = item_again(s, k);
        if (c->n_chunks > 0)
            out_send(s, a, m, c, c->n_chunks - 1, g & 1 ^ 1);
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
        for (int i = 0; i < 4; i++)
            mbar_init(&s->raw_full[i], 64), mbar_init(&s->gates_full[i], 32);
        for (int i = 0; i < INVERSES; i++) {
            mbar_init(&s->kk_full[i], 128);
            mbar_init(&s->a_full[i], 64);
        }
        for (int i = 0; i < 2; i++) {
            mbar_init(&s->v_full[i], 1);
            mbar_init(&s->v_free[i], 2);
            mbar_init(&s->p_full[i], 128);
            mbar_init(&s->free[i], 256);
        }
        for (int i = 0; i < ITEMS; i++) {
            mbar_init(&s->item_full[i], 1);
            mbar_init(&s->item_free[i], 14);
        }
        fence_async();
    }
    if (group == 1 && (threadIdx.x & 31) == 0) /* found before anything waits for them */
        s->item[threadIdx.x >> 5 & 3] = item_find(&a, threadIdx.x >> 5 & 3);
    if (threadIdx.x == 0)
        s->n_put = ITEMS_FIRST;
    if (threadIdx.x == 32) {
        map_prefetch(&maps.q);
        map_prefetch(&maps.k);
        map_prefetch(&maps.v);
        map_prefetch(&maps.o);
    }
    for (int i = 0; i < INVERSES; i++)
        tri_clear(s->A[i], threadIdx.x, FUSED_THREADS);
    zero_rows(s->P[0], 2, 0, threadIdx.x, FUSED_THREADS);
    if (threadIdx.x < 256)
        s->corner[threadIdx.x] = corner_off(threadIdx.x & 31, threadIdx.x >> 5 & 3);
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
