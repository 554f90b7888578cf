/* Attention by segments of keys (attn_split.cuh): the list of jobs before, the join behind.
 *
 * Plan: one block; tiles with more than one segment are split when there are few of them (they
 * would fill at most three quarters of the multiprocessors) and their sums fit the workspace. A
 * chunk's tiles are counted by its last token: a tile that ends before has an empty job.
 * Chunks are taken from the last to the first, so that later positions come first. Derived
 * here; a scan over chunks, nothing read back. Limit: latency of dependent loads.
 *
 * Join: O = sum of the segments' values, each brought to one maximum, in ascending order; then
 * / total * sigmoid(gate). A block has 64 rows of 64 columns; grid (groups that may be split,
 * 4), block 128. Limit: bytes, 256 floats a row and segment. */
#include <string.h>

#include "attn_split.cuh"

// ---- kernels

enum { PLAN_THREADS = 1024, PLAN_WARPS = PLAN_THREADS / 32 };

/* What a chunk adds to the lists. */
struct plan_sum {
    int jobs, parts, split;
};

__device__ static inline struct plan_sum plan_add(struct plan_sum a, struct plan_sum b)
{
    struct plan_sum s = {a.jobs + b.jobs, a.parts + b.parts, a.split + b.split};
    return s;
}

/* Sum over the threads before the caller's; *all: over all of them. All threads call. */
__device__ static inline struct plan_sum plan_scan(struct plan_sum x, struct plan_sum *shared,
                                                   struct plan_sum *all)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
    struct plan_sum sum = x;
    for (int m = 1; m < 32; m <<= 1) {
        struct plan_sum up = {__shfl_up_sync(0xffffffffu, sum.jobs, m),
                              __shfl_up_sync(0xffffffffu, sum.parts, m),
                              __shfl_up_sync(0xffffffffu, sum.split, m)};
        if (lane >= m)
            sum = plan_add(sum, up);
    }
    if (lane == 31)
        shared[warp] = sum;
    __syncthreads();
    struct plan_sum before = {sum.jobs - x.jobs, sum.parts - x.parts, sum.split - x.split};
    struct plan_sum total = {0, 0, 0};
    for (int i = 0; i < n_warps; i++) {
        if (i < warp)
            before = plan_add(before, shared[i]);
        total = plan_add(total, shared[i]);
    }
    __syncthreads();
    *all = total;
    return before;
}

/* Tiles of one KV head with rows in them, and segments of the last one's keys. */
struct plan_chunk {
    int n_tiles, n_segments;
};

__device__ static inline struct plan_chunk
plan_chunk_at(const struct k_batch *b, const struct k_attn_dims *d, int rows, int c)
{
    struct plan_chunk p = {0, 0};
    if (c < 0 || c >= b->n_chunks)
        return p;
    int s = b->chunk_seq[c], tok = b->chunk_tok[c];
    int n = min(b->cu_seqlens[s + 1] - tok, (int)K_CHUNK);
    if (n <= 0)
        return p;
    int last = b->start[s] + tok - b->cu_seqlens[s] + n - 1;
    p.n_tiles = (n * (d->HQ / d->HK) + rows - 1) / rows;
    p.n_segments = last / K_ATTN_SEGMENT + 1;
    return p;
}

/* Jobs of a chunk's tiles from at.jobs on. */
__device__ static inline void plan_write(const struct attn_work *w, const struct k_attn_dims *d,
                                         int rows, int chunk, const struct plan_chunk *p,
                                         bool is_split, struct plan_sum at)
{
    int n_all = attn_tiles_of_chunk(d, rows);
    for (int h = 0; h < d->HK; h++)
        for (int i = 0; i < p->n_tiles; i++) {
            struct attn_entry job = {(chunk * d->HK + h) * n_all + i, -1, 0, 0};
            if (!is_split) {
                w->jobs[at.jobs++] = job;
                continue;
            }
            job.segment = 0, job.part = at.parts;
            w->split[at.split++] = job;
            for (; job.segment < p->n_segments; job.segment++, job.part += rows / GROUP_ROWS)
                w->jobs[at.jobs++] = job;
            at.parts = job.part;
        }
}

__global__ static void __launch_bounds__(PLAN_THREADS)
    attn_plan_kernel(struct k_batch b, struct k_attn_dims d, struct attn_work w, int rows,
                     int most_split)
{
    __shared__ struct plan_sum shared[PLAN_WARPS];
    const int groups = rows / GROUP_ROWS, n_threads = blockDim.x;
    const struct plan_sum none = {0, 0, 0};
    struct plan_sum mine = none, all, before = none;
    for (int i = threadIdx.x; i < w.n_totals; i += n_threads)
        w.taken[i] = 0;
    int mine0 = b.n_chunks - 1 - (int)threadIdx.x;
    const struct plan_chunk first = plan_chunk_at(&b, &d, rows, mine0);
    for (int c = mine0; c >= 0; c -= n_threads) {
        struct plan_chunk p = c == mine0 ? first : plan_chunk_at(&b, &d, rows, c);
        int n = p.n_segments > 1 ? p.n_tiles * d.HK : 0;
        struct plan_sum x = {0, n * p.n_segments * groups, n};
        mine = plan_add(mine, x);
    }
    plan_scan(mine, shared, &all);
    bool fits = all.split <= most_split && all.parts <= w.n_parts;
    for (int c0 = 0; c0 < b.n_chunks; c0 += n_threads) {
        int c = mine0 - c0;
        struct plan_chunk p = c0 == 0 ? first : plan_chunk_at(&b, &d, rows, c);
        bool is_split = fits && p.n_segments > 1;
        int n = p.n_tiles * d.HK;
        struct plan_sum x = {n, 0, 0};
        if (is_split)
            x.jobs = n * p.n_segments, x.parts = x.jobs * groups, x.split = n;
        struct plan_sum at = plan_add(before, plan_scan(x, shared, &all));
        before = plan_add(before, all);
        plan_write(&w, &d, rows, c, &p, is_split, at);
    }
    if (threadIdx.x == 0) {
        *w.n_jobs = before.jobs;
        *w.n_split = before.split;
    }
}

__global__ static void __launch_bounds__(GROUP_THREADS)
    attn_join_kernel(struct k_attn a, struct attn_work w, int rows)
{
    int groups = rows / GROUP_ROWS, i = blockIdx.x / groups, group = blockIdx.x % groups;
    if (i >= *w.n_split)
        return;
    struct attn_entry job = w.split[i];
    struct attn_tile t = attn_tile_at(&a.b, &a.d, rows, job.tile);
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, panel = blockIdx.y;
    int r = group * GROUP_ROWS + warp * 16 + (lane >> 2);
    if (group * GROUP_ROWS >= t.n_rows)
        return;
    const struct attn_row row[2] = {attn_row_new(&t, r), attn_row_new(&t, r + 8)};
    struct attn_sums s = {{0, 0}, {0, 0}};
    float4 O[8];
    for (int seg = 0; seg * K_ATTN_SEGMENT <= t.last; seg++) {
        const float4 *from =
            w.parts + (int64_t)(job.part + seg * groups + group) * GROUP_SUMS + tid;
        struct attn_sums now = attn_sums_unpack(from[ROW_SUMS]);
        struct attn_merge f = {};
        if (seg > 0)
            f = attn_merge(&s, &now, row, seg);
        else
            s = now;
#pragma unroll
        for (int nt = 0; nt < 8; nt++) {
            float4 x = from[(panel * 8 + nt) * GROUP_THREADS];
            O[nt] = seg > 0 ? attn_merged(&f, O[nt], x) : x;
        }
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        if (r + 8 * k >= t.n_rows)
            continue;
        int col = panel * 64 + 2 * (lane & 3);
        const bf16 *gate =
            (const bf16 *)a.p + attn_row_at(&t, a.d.ld, r + 8 * k) + a.d.HQ * ATTN_D + col;
        bf16 *o = (bf16 *)a.o + attn_row_at(&t, a.d.HQ * ATTN_D, r + 8 * k) + col;
        float inv = 1.0f / s.total[k];
#pragma unroll
        for (int nt = 0; nt < 8; nt++)
            *(uint32_t *)(o + nt * 8) =
                attn_output(k ? O[nt].z : O[nt].x, k ? O[nt].w : O[nt].y, inv,
                            *(const uint32_t *)(gate + nt * 8));
    }
}

// ---- launchers

enum { WORK_ALIGN = 256 };

static char *place(char **at, size_t bytes)
{
    char *p = *at;
    *at += (bytes + WORK_ALIGN - 1) / WORK_ALIGN * WORK_ALIGN;
    return p;
}

/* Bytes from base on. n_tiles: at most, of any body. */
static size_t work_place(struct attn_work *w, char *base, int32_t n_sms, int64_t n_tiles)
{
    char *at = base;
    w->n_totals = 2 * n_sms; /* no body has more than two groups on a multiprocessor */
    w->n_parts = SPLIT_GROUPS;
    w->max_split = n_sms * 3 / 4;
    w->n_jobs = (int32_t *)place(&at, sizeof(int32_t));
    w->n_split = (int32_t *)place(&at, sizeof(int32_t));
    w->taken = (int32_t *)place(&at, (size_t)w->n_totals * sizeof(int32_t));
    w->split =
        (struct attn_entry *)place(&at, (size_t)w->max_split * sizeof(struct attn_entry));
    w->totals = (float4 *)place(&at, (size_t)w->n_totals * GROUP_SUMS * sizeof(float4));
    w->parts = (float4 *)place(&at, (size_t)w->n_parts * GROUP_SUMS * sizeof(float4));
    w->jobs = (struct attn_entry *)place(&at, (size_t)(n_tiles + SPLIT_GROUPS) *
                                                  sizeof(struct attn_entry));
    return (size_t)(at - base);
}

extern "C" size_t k_attn_work_bytes(int32_t n_sms, int64_t n_chunks, int32_t HQ)
{
    struct attn_work w;
    return work_place(&w, NULL, n_sms, n_chunks * HQ);
}

cudaError_t attn_split_plan(const struct k_attn *a, int rows, struct attn_work *w,
                            cudaStream_t stream)
{
    int64_t n_tiles = attn_grid(&a->b, &a->d, rows);
    int64_t n_segments = ceil_div((int64_t)a->kv.max_pages * a->kv.page_tokens, K_ATTN_SEGMENT);
    memset(w, 0, sizeof(*w));
    w->max_jobs = (int32_t)n_tiles;
    if (n_segments <= 1)
        return cudaSuccess;
    if (!a->work)
        return cudaErrorInvalidValue;
    work_place(w, (char *)a->work, a->dev->n_sms, n_tiles);
    int64_t more = (n_tiles < w->max_split ? n_tiles : w->max_split) * (n_segments - 1);
    int64_t room = SPLIT_GROUPS / (rows / GROUP_ROWS);
    w->max_jobs = (int32_t)(n_tiles + (more < room ? more : room));
    int most_split = a->whole ? 0 : w->max_split;
    int64_t whole_warps = ceil_div(a->b.n_chunks, 32) * 32;
    int64_t threads = whole_warps < PLAN_THREADS ? whole_warps : (int64_t)PLAN_THREADS;
    attn_plan_kernel<<<1, (unsigned)threads, 0, stream>>>(a->b, a->d, *w, rows, most_split);
    return cudaGetLastError();
}

cudaError_t attn_split_join(const struct k_attn *a, int rows, const struct attn_work *w,
                            cudaStream_t stream)
{
    if (!w->jobs)
        return cudaSuccess;
    int64_t n_tiles = attn_grid(&a->b, &a->d, rows);
    int64_t most = n_tiles < w->max_split ? n_tiles : w->max_split;
    if (most == 0)
        return cudaSuccess;
    dim3 grid((unsigned)(most * (rows / GROUP_ROWS)), PANELS);
    attn_join_kernel<<<grid, GROUP_THREADS, 0, stream>>>(*a, *w, rows);
    return cudaGetLastError();
}
