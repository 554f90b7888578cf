/* Full attention over paged keys and values: portable body and the launcher.
 *
 * o = softmax(q k^T / sqrt(D), causal) v * sigmoid(gate), gdn.md 1.5; one pass over keys with a
 * running maximum and sum a row (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv
 * 2205.14135), in base 2. For a row and each block of 64 keys, blocks ascending from position
 * 0:
 *   m' = max(m, max s); p = exp2((s - m') c); l = l exp2((m - m') c) + sum p;
 *   O = O exp2((m - m') c) + bf16(p) V, c = log2(e) / sqrt(D); keys past the row have s = -inf.
 * Segments of K_ATTN_SEGMENT keys begin with m = -inf, l = 0, O = 0 and are joined in ascending
 * order (attn_split.cuh).
 * Blocks lie at absolute multiples of 64 and a block wholly past a row leaves m, l and O as
 * they are (factor 1, sums of zeros): a row's bits do not depend on its tile. bf16 operands,
 * f32 scores and sums.
 *
 * A tile is 64 rows, (token, query head of the group) token first, of one chunk and KV head: a
 * short piece fills few tiles. 4 warps of 16 rows; a block a job (attn_split.cuh), block 128,
 * shared 97 KB (Q, one block of K, one of V: V travels while scores are made, the next K while
 * values are summed), two blocks a multiprocessor on sm_90. Rows of a block past the tile's
 * last position are zeroed, never read.
 * Limit: mma.sync, 4 * D FLOP a (row, key) pair; its operands take the bandwidth of shared
 * memory first (2 clocks a 16x8x16 product). Hopper has its own body, attn_hopper.cu. */
#include "attn_split.cuh"

// ---- kernels

enum { ATTN_THREADS = 128, ATTN_ROWS = 64 };

struct __align__(1024) attn_smem
{
    uint8_t Q[KV_BYTES];
    uint8_t K[KV_BYTES];
    uint8_t V[KV_BYTES];
    int total; /* the place of the block's sums so far */
};

/* n rows of a block of keys or values; the other rows become zeros. */
__device__ static inline void load_block(uint8_t *dst, const bf16 *src, int n)
{
    uint32_t to = smem_addr(dst);
#pragma unroll
    for (int j = 0; j < KV_BYTES / 16 / ATTN_THREADS; j++) {
        int unit = j * ATTN_THREADS + threadIdx.x;
        cp16(to + unit * 16, (const uint4 *)src + unit, ((unit >> 3) & 63) < n);
    }
}

__device__ static inline void load_queries(uint8_t *dst, const struct k_attn *a,
                                           const struct attn_tile *t)
{
    uint32_t to = smem_addr(dst);
    for (int j = threadIdx.x; j < ATTN_ROWS * 32; j += ATTN_THREADS) {
        int r = j >> 5, unit = j & 31;
        bool live = r < t->n_rows;
        const bf16 *row = (const bf16 *)a->p + attn_row_at(t, a->d.ld, live ? r : 0);
        cp16(to + (unit >> 3) * TILE_BYTES + tile_off(r, unit & 7), row + unit * 8, live);
    }
}

/* S [16 rows, 64 keys] = Q K^T of this warp. */
__device__ static inline void scores(float S[8][4], uint32_t q, uint32_t k)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m = lane >> 3, l7 = lane & 7;
    int q_row = warp * 16 + (m & 1) * 8 + l7, k_row = (m >> 1) * 8 + l7;
#pragma unroll
    for (int i = 0; i < 32; i++)
        S[i >> 2][i & 3] = 0.0f;
#pragma unroll
    for (int ks = 0; ks < ATTN_D / 16; ks++) {
        uint32_t f[4], panel = (ks >> 2) * TILE_BYTES;
        ldsm4(f, q + panel + tile_off(q_row, 2 * (ks & 3) + (m >> 1)));
#pragma unroll
        for (int np = 0; np < 4; np++) {
            uint32_t b[4];
            ldsm4(b, k + panel + tile_off(np * 16 + k_row, 2 * (ks & 3) + (m & 1)));
            mma16816(S[2 * np], f, b[0], b[1]);
            mma16816(S[2 * np + 1], f, b[2], b[3]);
        }
    }
}

/* O [16 rows, 256] += P V. */
__device__ static inline void add_values(float O[32][4], const uint32_t p[4][4], uint32_t v)
{
    int lane = threadIdx.x & 31, m = lane >> 3;
    int row = (m & 1) * 8 + (lane & 7);
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
#pragma unroll
        for (int np = 0; np < ATTN_D / 16; np++) {
            uint32_t b[4];
            ldsm4_t(b, v + (np >> 2) * TILE_BYTES +
                           tile_off(ks * 16 + row, (np & 3) * 2 + (m >> 1)));
            mma16816(O[2 * np], p[ks], b[0], b[1]);
            mma16816(O[2 * np + 1], p[ks], b[2], b[3]);
        }
}

__device__ static inline void rescale(float O[32][4], float shift, int at)
{
#pragma unroll
    for (int nt = 0; nt < 32; nt++) {
        O[nt][at] *= shift;
        O[nt][at + 1] *= shift;
    }
}

/* o = O / total * sigmoid(gate) for one row. */
__device__ static inline void store_row(const struct k_attn *a, const struct attn_tile *t,
                                        const float O[32][4], float total, int at, int r)
{
    if (r >= t->n_rows)
        return;
    int col = 2 * (threadIdx.x & 3);
    const bf16 *gate = (const bf16 *)a->p + attn_row_at(t, a->d.ld, r) + a->d.HQ * ATTN_D + col;
    bf16 *o = (bf16 *)a->o + attn_row_at(t, a->d.HQ * ATTN_D, r) + col;
    float s = 1.0f / total;
#pragma unroll
    for (int nt = 0; nt < 32; nt++)
        *(uint32_t *)(o + nt * 8) =
            attn_output(O[nt][at], O[nt][at + 1], s, *(const uint32_t *)(gate + nt * 8));
}

/* The thread's place in the sums so far, which exist from the first segment's end on. */
__device__ static inline float4 *sums_at(const struct attn_work *w, const struct attn_smem *s)
{
    return w->totals + (int64_t)s->total * GROUP_SUMS + threadIdx.x;
}

/* A segment has ended and another follows: O goes to the sums so far and begins afresh. */
__device__ static inline void segment_end(const struct attn_work *w, struct attn_smem *s,
                                          float O[32][4], struct attn_row row[2], int segment)
{
    struct attn_sums ended = attn_rows_end(row);
    if (segment == 0 && threadIdx.x == 0)
        s->total = attn_total_take(w);
    __syncthreads();
    float4 *at = sums_at(w, s);
    if (segment > 0)
        attn_sums_join(O, &ended, row, segment, at);
    attn_sums_store(at, O, &ended);
#pragma unroll
    for (int i = 0; i < 128; i++)
        O[i >> 2][i & 3] = 0.0f;
}

__global__ static void __launch_bounds__(ATTN_THREADS)
    attn_kernel(struct k_attn a, struct attn_work w)
{
    extern __shared__ uint8_t raw[];
    struct attn_smem *s = (struct attn_smem *)raw;
    struct attn_job job;
    if (!attn_job_at(&a, &w, ATTN_ROWS, &job))
        return;
    const struct attn_tile t = job.t;
    const int32_t *pages = a.kv.page_table + (int64_t)t.seq * a.kv.max_pages;
    const bf16 *keys = (const bf16 *)a.kv.k, *values = (const bf16 *)a.kv.v;
    int P = a.kv.page_tokens, r0 = (threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2);

    float O[32][4];
#pragma unroll
    for (int i = 0; i < 128; i++)
        O[i >> 2][i & 3] = 0.0f;
    struct attn_row row[2] = {attn_row_new(&t, r0), attn_row_new(&t, r0 + 8)};
    load_queries(s->Q, &a, &t);
    int key0 = job.from * KV_BLOCK, end = min(job.to * KV_BLOCK, t.last + 1), segment = 0;
    int64_t at = kv_block_at(&a.kv, &a.d, pages[key0 / P], t.kv_head, key0);
    load_block(s->K, keys + at, end - key0);
    cp_commit();
    for (; key0 < end; key0 += KV_BLOCK) {
        load_block(s->V, values + at, end - key0);
        cp_commit();
        int next = key0 + KV_BLOCK;
        if (next < end)
            at = kv_block_at(&a.kv, &a.d, pages[next / P], t.kv_head, next);
        if (key0 > job.from * KV_BLOCK && key0 % K_ATTN_SEGMENT == 0)
            segment_end(&w, s, O, row, segment++);
        cp_wait<1>();
        __syncthreads();
        float S[8][4];
        scores(S, smem_addr(s->Q), smem_addr(s->K));
        __syncthreads();
        if (next < end)
            load_block(s->K, keys + at, end - next);
        cp_commit();
        bool is_edge = key0 + KV_BLOCK - 1 > t.pos + attn_token_of(&t, 0);
        rescale(O, soften(S, &row[0], 0, key0, is_edge), 0);
        rescale(O, soften(S, &row[1], 2, key0, is_edge), 2);
        uint32_t p[4][4];
#pragma unroll
        for (int ks = 0; ks < 4; ks++)
            frag_pack(p[ks], S[2 * ks], S[2 * ks + 1]);
        cp_wait<1>();
        __syncthreads();
        add_values(O, p, smem_addr(s->V));
        __syncthreads();
    }
    struct attn_sums ended = attn_rows_end(row);
    if (job.part >= 0) {
        attn_sums_store(w.parts + (int64_t)job.part * GROUP_SUMS + threadIdx.x, O, &ended);
        return;
    }
    if (segment > 0) {
        attn_sums_join(O, &ended, row, segment, sums_at(&w, s));
        __syncthreads();
        if (threadIdx.x == 0)
            attn_total_give(&w, s->total);
    }
    store_row(&a, &t, O, ended.total[0], 0, r0);
    store_row(&a, &t, O, ended.total[1], 2, r0 + 8);
}

// ---- launchers

static cudaError_t attn_portable(const struct k_attn *a, const struct attn_work *w,
                                 cudaStream_t stream)
{
    cudaError_t e = cudaFuncSetAttribute(
        attn_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(struct attn_smem));
    if (e != cudaSuccess)
        return e;
    attn_kernel<<<(unsigned)w->max_jobs, ATTN_THREADS, sizeof(struct attn_smem), stream>>>(*a,
                                                                                           *w);
    return cudaGetLastError();
}

extern "C" cudaError_t k_attn(const struct k_attn *a, cudaStream_t stream)
{
    if (!attn_dims_ok(&a->d, &a->kv) || a->dev->smem_bytes < (int)sizeof(struct attn_smem))
        return cudaErrorInvalidValue;
    bool is_hopper = a->body == K_ATTN_HOPPER || (a->body == K_ATTN_AUTO && a->dev->cc == 90);
    int rows = is_hopper ? (int)ATTN_HOPPER_ROWS : (int)ATTN_ROWS;
    int64_t n = attn_grid(&a->b, &a->d, rows);
    if (n > INT32_MAX - SPLIT_GROUPS)
        return cudaErrorInvalidValue;
    if (n == 0)
        return cudaSuccess;
    struct attn_work w;
    cudaError_t e = attn_split_plan(a, rows, &w, stream);
    if (e == cudaSuccess)
        e = is_hopper ? attn_hopper(a, &w, stream) : attn_portable(a, &w, stream);
    return e == cudaSuccess ? attn_split_join(a, rows, &w, stream) : e;
}
