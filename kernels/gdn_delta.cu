/* The gated delta rule over chunks of 64 tokens: portable body and the launcher.
 *
 * gdn.md 1.2 for each value head h, key head h / (HV / H); A, P, eg, el as gdn_solve.cuh:
 *   R = V - diag(eg) K S;  Vn = A R;  O = diag(eg) Q S + P Vn;
 *   S = eg_last S + K^T diag(el) Vn.
 * Two kernels. gdn_prep is parallel over chunks and value heads: A, P and the gates to the
 * workspace. gdn_chain is serial over a sequence's chunks and parallel over value heads and
 * halves of V. It holds S transposed, so that every product of the chain has its A operand in
 * registers (S, R and Vn in accumulator layout):
 *   W^T = S^T K^T, Vn^T = R^T A^T, S^T += (el Vn)^T K, O^T = eg S^T Q^T + Vn^T P^T.
 * Operands bf16, but for R and A, whose rounding showed most: they are tf32, which has
 * float32's range (R has no bound) and half's precision. Sums f32; S, gates, decays f32.
 *
 * prep:  grid one a multiprocessor, block 3 groups of 256, shared 168 KB (sm_80: 2, 112 KB); a
 *   group takes units of 56 KB in turn, a chunk and head or a chunk and the heads of a key
 *   head, which share its copies. One half of a group makes A, the other P and the gates.
 *   Limit: bytes (51 KB a chunk and head, two thirds of it K and Q). Seen: 1.5 us a unit and
 *   multiprocessor: latency.
 * chain: grid N * HV * 2, block 128, shared 118 KB, 2 stages of K, Q, V, A, P by cp.async.
 *   Limit: latency; 4.2 MFLOP and 59 KB from shared memory a chunk and half.
 * Both need up to 118 KB of shared memory a block: sm_80 and sm_90, not sm_86 or sm_89. They
 * were run on sm_90 only. On Hopper gdn_hopper.cu has the chain, and it may run beside
 * gdn_prep. */
#include "gdn_delta.cuh"

// ---- kernels

enum { GDN_THREADS = 128, PREP_THREADS = 256, PREP_GROUPS = 3 };

struct __align__(1024) prep_smem
{
    uint8_t K[2 * TILE_BYTES];
    uint8_t Q[2 * TILE_BYTES];
    uint8_t P[TILE_BYTES];
    uint8_t T[TRI_BYTES]; /* K K^T, then the inverse */
    struct gate_table gates[2];
};

/* Rows of a chunk's [64, 64 PANELS] of q, k or v into tiles; rows from n on become zeros. row:
 * distance of two tokens in elements. A thread's rows are 16 / PANELS apart, so its swizzle and
 * its steps are constants. */
template <int PANELS>
__device__ static inline void load_rows(uint32_t dst, const bf16 *src, int64_t row, int n,
                                        int t)
{
    const int units = PANELS * 8, step = GDN_THREADS / units;
    int r = t / units, u = t % units;
    src += r * row + u * 8;
    dst += (u >> 3) * TILE_BYTES + tile_off(r, u & 7);
#pragma unroll
    for (int i = 0; i < K_CHUNK / step; i++) {
        cp16(dst + i * step * 128, src, i * step + r < n);
        src += step * row;
    }
}

/* What a group reads before a unit's tiles: a unit ahead, for it is two dependent loads. */
struct prep_at {
    int tok, n; /* first token, tokens */
    int h;      /* first value head */
    struct gate_regs gates;
};

__device__ static inline struct gate_regs prep_gates(const struct k_gdn_delta *a, int tok,
                                                     int h, int n)
{
    int64_t g = (int64_t)tok * a->d.HV + h;
    return gates_load(a->g + g, a->beta + g, a->d.HV, n);
}

/* Unit: flat chunk * (HV / share) + which `share` of its value heads, all of one key head.
 * gates: whether this thread wants them. */
__device__ static inline struct prep_at prep_locate(const struct k_gdn_delta *a, uint32_t unit,
                                                    uint32_t share, bool gates)
{
    struct prep_at at = {};
    uint32_t n_shares = a->d.HV / share, chunk = unit / n_shares;
    if (chunk >= (uint32_t)a->b.n_chunks)
        return at;
    at.h = (int)((unit - chunk * n_shares) * share);
    at.tok = a->b.chunk_tok[chunk];
    at.n = min(a->b.cu_seqlens[a->b.chunk_seq[chunk] + 1] - at.tok, (int)K_CHUNK);
    if (gates)
        at.gates = prep_gates(a, at.tok, at.h, at.n);
    return at;
}

/* Begins the copies of a unit's K or Q by a warpgroup. */
__device__ static inline void prep_load(const struct k_gdn_delta *a, uint32_t tile,
                                        const void *from, const struct prep_at *at, int t)
{
    if (at->n <= 0)
        return;
    uint32_t kh = (uint32_t)at->h / (uint32_t)(a->d.HV / a->d.H);
    int64_t row = (int64_t)a->d.H * GDN_D;
    load_rows<2>(tile, (const bf16 *)from + at->tok * row + kh * GDN_D, row, at->n, t);
    cp_commit();
}

/* This warp's 16 rows of a tile to memory. */
__device__ static inline void prep_store(const uint8_t *tile, uint8_t *out, int warp)
{
    int at = warp * 2048 + (threadIdx.x & 31) * 16;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(uint4 *)(out + at + i * 512) = *(const uint4 *)(tile + at + i * 512);
}

/* What a group knows. Its first warpgroup makes A, the other one P and the gates. */
struct prep_ctx {
    struct prep_smem *s;
    int t, warp; /* of the warpgroup */
    bool makes_p, makes_gates;
    int barrier; /* the group's, 2 more of the inverse's behind it */
    bool beside;
};

/* One chunk and `share` heads. Its copies are under way on entry, those of next_unit on exit,
 * *at likewise; table: which one has its first head's gates, and on exit the next's. */
__device__ static inline void prep_unit(const struct k_gdn_delta *a, const struct prep_ctx *c,
                                        uint32_t unit, uint32_t next_unit, int share,
                                        struct prep_at *at, int *table)
{
    struct prep_smem *s = c->s;
    int h = at->h, n = at->n, tok = at->tok;
    struct gdn_unit *out = (struct gdn_unit *)a->work + (int64_t)unit * share;
#pragma unroll 1
    for (int j = 0; j < share; j++, out++) {
        const struct gate_table *g = &s->gates[*table];
        float acc[8][4];
        if (j > 0)
            part_sync<PREP_THREADS>(c->barrier); /* the table */
        prep_product(acc, smem_addr(c->makes_p ? s->Q : s->K), smem_addr(s->K), c->warp);
        if (j + 1 == share)
            *at = prep_locate(a, next_unit, share, c->makes_gates);
        else if (c->makes_gates)
            at->gates = prep_gates(a, tok, h + j + 1, n);
        prep_product_wait(acc);
        if (j + 1 == share) {
            part_sync<PREP_THREADS>(c->barrier); /* all have read K and Q */
            prep_load(a, smem_addr(c->makes_p ? s->Q : s->K), c->makes_p ? a->q : a->k, at,
                      c->t);
        }
        if (c->makes_p) {
            prep_mask_qk(g, smem_addr(s->P), c->warp, acc);
            prep_store(s->P, out->P, c->warp);
            out->gates[c->t] = g->eg[c->t];
            if (c->makes_gates)
                gates_scan(&s->gates[*table ^ 1], at->gates);
        } else {
            prep_store_kk(smem_addr(s->T), c->warp, acc);
            __syncwarp();
            prep_inverse(g, smem_addr(s->T), out->A, c->warp, c->barrier + 1);
        }
        *table ^= 1;
    }
    if (c->beside)
        __threadfence();
    cp_wait<0>();
#if __CUDA_ARCH__ >= 900
    fence_async(); /* before the tensor cores read */
#endif
    part_sync<PREP_THREADS>(c->barrier);
    if (c->beside && !c->makes_p && c->t < 2)
        asm volatile("st.release.gpu.global.b32 [%0], 1;" ::"l"(&(out - 1)->ready[c->t])
                     : "memory");
}

__global__ static void __launch_bounds__(PREP_GROUPS *PREP_THREADS, 1)
    gdn_prep_kernel(struct k_gdn_delta a, int share, bool beside)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    int group = threadIdx.x / PREP_THREADS, t = threadIdx.x % PREP_THREADS;
    struct prep_ctx c = {(struct prep_smem *)raw + group,
                         t & 127,
                         (t & 127) >> 5,
                         t >= 128,
                         (t >> 5) == 4,
                         3 * group,
                         beside};
#if __CUDA_ARCH__ >= 900
    /* The chain's blocks may take their places as soon as all of these have begun. */
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    uint32_t n_groups = blockDim.x / PREP_THREADS;
    uint32_t stride = gridDim.x * n_groups, u = group * gridDim.x + blockIdx.x;
    struct prep_at at = prep_locate(&a, u, share, c.makes_gates);
    int table = 0;
    prep_load(&a, smem_addr(c.makes_p ? c.s->Q : c.s->K), c.makes_p ? a.q : a.k, &at, c.t);
    if (c.makes_gates)
        gates_scan(&c.s->gates[0], at.gates);
    zero_rows(c.s->P, 1, 0, t, PREP_THREADS); /* what is above the diagonal stays so */
    cp_wait<0>();
#if __CUDA_ARCH__ >= 900
    fence_async();
#endif
    part_sync<PREP_THREADS>(c.barrier);
    /* Chunks beyond the batch's come last: no chain takes their flags back. */
    for (; at.n > 0; u += stride)
        prep_unit(&a, &c, u, u + stride, share, &at, &table);
}

__global__ static void gdn_work_init_kernel(struct gdn_unit *u, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        u[i].ready[0] = u[i].ready[1] = 0;
}

struct chain_stage {
    uint8_t K[2 * TILE_BYTES];
    uint8_t Q[2 * TILE_BYTES];
    uint8_t V[TILE_BYTES]; /* this half's 64 columns; then O, transposed back */
    struct gdn_unit u;
    uint8_t pad[384];
};

struct chain_smem {
    struct chain_stage stage[2];
};

struct chain_ctx {
    const bf16 *q, *k, *v; /* at the head and half, token 0 of the sequence */
    bf16 *o;
    const struct gdn_unit *unit; /* at the head, first chunk of the sequence */
    int len;
};

__device__ static inline void chain_load(const struct k_gdn_delta *a, const struct chain_ctx *c,
                                         struct chain_stage *st, int chunk)
{
    int64_t t0 = (int64_t)chunk * K_CHUNK;
    int n = min(c->len - (int)t0, (int)K_CHUNK);
    int64_t row_k = (int64_t)a->d.H * GDN_D, row_v = (int64_t)a->d.HV * GDN_D;
    load_rows<2>(smem_addr(st->K), c->k + t0 * row_k, row_k, n, threadIdx.x);
    load_rows<2>(smem_addr(st->Q), c->q + t0 * row_k, row_k, n, threadIdx.x);
    load_rows<1>(smem_addr(st->V), c->v + t0 * row_v, row_v, n, threadIdx.x);
    const uint8_t *u = (const uint8_t *)(c->unit + (int64_t)chunk * a->d.HV);
    for (int i = threadIdx.x; i < (int)(sizeof(struct gdn_unit) / 16); i += GDN_THREADS)
        cp16(smem_addr(&st->u) + i * 16, u + i * 16, true);
}

/* acc = V^T - eg * acc, columns are tokens; V is [64 tokens, 64] at `tile`. */
__device__ static inline void residual(float acc[8][4], uint32_t tile, const float *eg,
                                       int warp)
{
    int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
    for (int np = 0; np < 4; np++) {
        uint32_t v[4]; /* (tokens 16 np .. + 7 and + 8 .. + 15) x (rows g, rows g + 8) */
        ldsm4_t(v, tile + tile_off(np * 16 + (lane >> 4) * 8 + (lane & 7),
                                   2 * warp + ((lane >> 3) & 1)));
#pragma unroll
        for (int q = 0; q < 4; q++) {
            float2 e = *(const float2 *)&eg[16 * np + (q >> 1) * 8 + 2 * t];
            float *x = &acc[2 * np + (q >> 1)][2 * (q & 1)];
            x[0] = fmaf(-e.x, x[0], lo2(v[q]));
            x[1] = fmaf(-e.y, x[1], hi2(v[q]));
        }
    }
}

/* O^T in accumulator layout to [64 tokens, 64] in `tile`, then whole rows to memory. */
__device__ static inline void chain_store(const float acc[8][4], uint8_t *tile, bf16 *o,
                                          int64_t row, int n, int warp)
{
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t x = movm_t(pack2(acc[nt][2 * half], acc[nt][2 * half + 1]));
            st_shared2(smem_addr(tile) + tile_off(8 * nt + g, 2 * warp + half) + t * 4, x);
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 16 + (threadIdx.x >> 3), u = threadIdx.x & 7;
        if (r < n)
            *(uint4 *)(o + r * row + u * 8) = *(const uint4 *)(tile + tile_off(r, u));
    }
}

__device__ static inline void chain_step(float S[16][4], const struct chain_stage *st,
                                         float O[8][4], int warp)
{
    int t = threadIdx.x & 3;
    const float *eg = st->u.gates, *el = eg + 64;
    float x[8][4] = {};
    {
        uint32_t sb[8][4];
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
            frag_pack(sb[ks], S[2 * ks], S[2 * ks + 1]);
        mm_kmajor<8>(x, sb, smem_addr(st->K));
#pragma unroll
        for (int i = 0; i < 32; i++)
            O[i >> 2][i & 3] = 0.0f;
        mm_kmajor<8>(O, sb, smem_addr(st->Q));
    }
    residual(x, smem_addr(st->V), eg, warp);
    float y[8][4] = {};
    mm_tri(y, x, smem_addr(st->u.A));
    uint32_t f[4][4];
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        frag_pack(f[ks], y[2 * ks], y[2 * ks + 1]);
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        float2 e = *(const float2 *)&eg[8 * nt + 2 * t],
               l = *(const float2 *)&el[8 * nt + 2 * t];
        O[nt][0] = __fmul_rn(O[nt][0], e.x), O[nt][1] = __fmul_rn(O[nt][1], e.y);
        O[nt][2] = __fmul_rn(O[nt][2], e.x), O[nt][3] = __fmul_rn(O[nt][3], e.y);
        y[nt][0] = __fmul_rn(y[nt][0], l.x), y[nt][1] = __fmul_rn(y[nt][1], l.y);
        y[nt][2] = __fmul_rn(y[nt][2], l.x), y[nt][3] = __fmul_rn(y[nt][3], l.y);
    }
    mm_kmajor<4>(O, f, smem_addr(st->u.P));
    float last = eg[63];
#pragma unroll
    for (int i = 0; i < 64; i++)
        S[i >> 2][i & 3] = __fmul_rn(S[i >> 2][i & 3], last);
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        frag_pack(f[ks], y[2 * ks], y[2 * ks + 1]);
    mm_nmajor(S, f, smem_addr(st->K));
}

/* A thread's rows of S^T, from `pool` on, to memory. */
__device__ static inline void state_store(const float S[16][4], float *pool)
{
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
        *(float2 *)(pool + nt * 8) = make_float2(S[nt][0], S[nt][1]);
        *(float2 *)(pool + nt * 8 + 8 * GDN_D) = make_float2(S[nt][2], S[nt][3]);
    }
}

__global__ static void __launch_bounds__(GDN_THREADS) gdn_chain_kernel(struct k_gdn_delta a)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct chain_smem *s = (struct chain_smem *)raw;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int half = blockIdx.x & 1, h = (blockIdx.x >> 1) % a.d.HV;
    int seq = a.b.seq_order[(blockIdx.x >> 1) / a.d.HV];
    int kh = h / (a.d.HV / a.d.H);
    int64_t tok = a.b.cu_seqlens[seq];
    int64_t at_v = (tok * a.d.HV + h) * GDN_D + half * 64;
    struct chain_ctx c;
    c.len = a.b.cu_seqlens[seq + 1] - (int)tok;
    c.q = (const bf16 *)a.q + (tok * a.d.H + kh) * GDN_D;
    c.k = (const bf16 *)a.k + (tok * a.d.H + kh) * GDN_D;
    c.v = (const bf16 *)a.v + at_v;
    c.o = (bf16 *)a.o + at_v;
    int first = a.b.seq_first[seq];
    c.unit = (const struct gdn_unit *)a.work + (int64_t)first * a.d.HV + h;
    int n_chunks = (c.len + K_CHUNK - 1) / K_CHUNK;

    int place = (half * 64 + warp * 16 + (lane >> 2)) * GDN_D + 2 * (lane & 3);
    float *pool = gdn_state(&a, a.b.slots[seq], h) + place;
    bool fresh = a.b.start[seq] == 0;
    if (n_chunks == 0 && !fresh)
        return;
    float S[16][4];
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
        float2 x = make_float2(0, 0), y = x;
        if (!fresh) {
            x = *(const float2 *)(pool + nt * 8);
            y = *(const float2 *)(pool + nt * 8 + 8 * GDN_D);
        }
        S[nt][0] = x.x, S[nt][1] = x.y, S[nt][2] = y.x, S[nt][3] = y.y;
    }
    if (n_chunks > 0)
        chain_load(&a, &c, &s->stage[0], 0);
    cp_commit();
    for (int i = 0; i < n_chunks; i++) {
        if (i + 1 < n_chunks)
            chain_load(&a, &c, &s->stage[(i + 1) & 1], i + 1);
        cp_commit();
        int save = gdn_save_slot(&a, first + i);
        cp_wait<1>();
        __syncthreads();
        float O[8][4];
        struct chain_stage *st = &s->stage[i & 1];
        chain_step(S, st, O, warp);
        if (save >= 0)
            state_store(S, gdn_state(&a, save, h) + place);
        __syncthreads();
        int64_t row = (int64_t)a.d.HV * GDN_D;
        chain_store(O, st->V, c.o + (int64_t)i * K_CHUNK * row, row,
                    min(c.len - i * K_CHUNK, (int)K_CHUNK), warp);
        __syncthreads();
    }
    state_store(S, pool);
}

// ---- launchers

extern "C" size_t k_gdn_delta_work_bytes(int64_t n_chunks, int32_t HV)
{
    return (size_t)n_chunks * (size_t)HV * sizeof(struct gdn_unit);
}

extern "C" cudaError_t k_gdn_work_init(void *work, size_t bytes, cudaStream_t stream)
{
    size_t n = bytes / sizeof(struct gdn_unit);
    if (n == 0)
        return cudaSuccess;
    gdn_work_init_kernel<<<256, 256, 0, stream>>>((struct gdn_unit *)work, n);
    return cudaGetLastError();
}

static cudaError_t launch_prep(const struct k_gdn_delta *a, int32_t n_blocks, bool beside,
                               cudaStream_t stream)
{
    if (a->b.n_chunks == 0)
        return cudaSuccess;
    int n_groups = a->dev->cc >= 90 ? PREP_GROUPS : PREP_GROUPS - 1; /* what has room */
    int smem = n_groups * (int)sizeof(struct prep_smem), ratio = a->d.HV / a->d.H;
    /* The heads of a key head share its copies, where there is work enough for all groups and
     * the chain does not wait for the first units. A choice for time only. */
    bool is_sharing = !beside && (int64_t)a->b.n_chunks * a->d.H >= n_groups * n_blocks / 2;
    cudaError_t e = cudaFuncSetAttribute(gdn_prep_kernel,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    if (e != cudaSuccess)
        return e;
    gdn_prep_kernel<<<(unsigned)n_blocks, n_groups * PREP_THREADS, smem, stream>>>(
        *a, is_sharing ? ratio : 1, beside);
    return cudaGetLastError();
}

/* Whether gdn_prep may run beside the split chain: that leaves half of the card idle, and there
 * is work for every group. */
static bool fits_beside(const struct k_gdn_delta *a)
{
    int n_sms = a->dev->n_sms;
    return a->b.n_seqs * a->d.HV * 2 <= n_sms / 2 &&
           (int64_t)a->b.n_chunks * a->d.HV >= PREP_GROUPS * n_sms;
}

/* By which of the two Hopper bodies ends sooner: microseconds as measured on one H200
 * (RESULTS-gpu.md). split: a chunk of the chain, worse when blocks of uneven length come in
 * rounds, gdn_prep before it, launches and rounds. fused: a chunk with the card idle or busy,
 * the pipeline's start. A choice for time only: bits do not depend on it. */
static int32_t pick_body(const struct k_gdn_delta *a)
{
    if (a->dev->cc != 90)
        return K_GDN_PORTABLE;
    int32_t n_sms = a->dev->n_sms, rounds = (a->b.n_seqs * a->d.HV * 2 + n_sms - 1) / n_sms;
    double chunks = (double)a->b.n_chunks * a->d.HV / n_sms;
    double longest = (a->b.max_len + K_CHUNK - 1) / K_CHUNK, uneven = 2.6 * chunks;
    double split = 1.18 * (rounds > 1 && uneven > longest ? uneven : longest) + 3 * rounds + 5;
    if (!fits_beside(a))
        split += 1.5 * chunks;
    double alone = 2.4 * longest, busy = 2.65 * chunks;
    double fused = (alone > busy ? alone : busy) + 6;
    return split < fused ? K_GDN_SPLIT : K_GDN_FUSED;
}

extern "C" cudaError_t k_gdn_delta(const struct k_gdn_delta *a, cudaStream_t stream)
{
    if (a->d.H <= 0 || a->d.HV <= 0 || a->d.HV % a->d.H || a->b.n_seqs > K_MAX_SEQS ||
        (int64_t)a->b.n_chunks * a->d.HV > INT32_MAX)
        return cudaErrorInvalidValue;
    if (a->b.n_seqs == 0)
        return cudaSuccess;
    int32_t body = a->body == K_GDN_AUTO ? pick_body(a) : a->body;
    if (body == K_GDN_FUSED)
        return gdn_delta_hopper(a, body, false, stream);
    /* When the chain leaves half of the card idle, gdn_prep has that half and both run at once.
     * gdn_prep is launched first and waits for nothing, so the order is safe even when a tool
     * runs one kernel at a time. */
    bool beside = body == K_GDN_SPLIT && fits_beside(a);
    int32_t n_blocks = a->dev->n_sms - (beside ? a->b.n_seqs * a->d.HV * 2 : 0);
    cudaError_t e = launch_prep(a, n_blocks, beside, stream);
    if (e != cudaSuccess)
        return e;
    if (body != K_GDN_PORTABLE)
        return gdn_delta_hopper(a, body, beside, stream);
    e = cudaFuncSetAttribute(gdn_chain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(struct chain_smem));
    if (e != cudaSuccess)
        return e;
    gdn_chain_kernel<<<(unsigned)(a->b.n_seqs * a->d.HV * 2), GDN_THREADS,
                       sizeof(struct chain_smem), stream>>>(*a);
    return cudaGetLastError();
}
