/* Keys by segments: how a row's sums over segments are joined, and who sums which.
 *
 * A row's maximum, weights and values are summed afresh in each segment of K_ATTN_SEGMENT keys,
 * at absolute multiples of it; segments are then joined in ascending order (attn_merge). This
 * is so whatever the batch, so it is free to choose who sums a segment: one block all of a
 * tile's, keeping the sums so far in memory between them, or a block each and a kernel behind
 * that joins them. The latter is for few tiles that would leave multiprocessors idle: a short
 * piece behind a long context. attn_plan_kernel decides, on the device, and lists the jobs.
 *
 * Sums in memory are groups of 64 rows in accumulator layout, [33][128 threads] of float4: 32
 * of values, then maximum and total of the thread's two rows. A thread gets back what it
 * wrote. */
#ifndef PREFILLD_ATTN_SPLIT_CUH
#define PREFILLD_ATTN_SPLIT_CUH

#include "attn.cuh"

enum {
    SEGMENT_BLOCKS = K_ATTN_SEGMENT / KV_BLOCK,
    GROUP_ROWS = 64,
    GROUP_THREADS = 128,
    ROW_SUMS = 32 * GROUP_THREADS, /* where those of the rows lie */
    GROUP_SUMS = 33 * GROUP_THREADS,
    SPLIT_GROUPS = 2048, /* whose sums of one segment there is room for */
};

/* A job in the list. */
struct attn_entry {
    int32_t tile;
    int32_t segment; /* -1: all of them */
    int32_t part;    /* where the sums of that segment go: the first group's place */
    int32_t padding;
};

/* What a block does. */
struct attn_job {
    struct attn_tile t;
    int from, to; /* blocks of keys; from is a multiple of SEGMENT_BLOCKS */
    int part;     /* as above; -1: all segments, and outputs */
};

/* k_attn's workspace, placed. jobs is NULL where nobody can have a second segment. */
struct attn_work {
    int32_t *n_jobs, *n_split;
    int32_t *taken;           /* [n_totals] nonzero: in use */
    struct attn_entry *jobs;  /* [max_jobs] */
    struct attn_entry *split; /* [max_split] tiles in jobs of one segment, as of segment 0 */
    float4 *totals;           /* [n_totals] groups: sums so far of those that do all segments */
    float4 *parts;            /* [n_parts] groups: sums of one segment */
    int32_t n_totals, n_parts, max_jobs, max_split;
};

/* Maxima and totals of a thread's two rows over some keys. */
struct attn_sums {
    float max[2], total[2];
};

/* How the values of one more segment join those before. */
struct attn_merge {
    float before[2], now[2];
};

__device__ static inline float4 attn_sums_pack(const struct attn_sums *s)
{
    return make_float4(s->max[0], s->total[0], s->max[1], s->total[1]);
}

__device__ static inline struct attn_sums attn_sums_unpack(float4 x)
{
    struct attn_sums s = {{x.x, x.z}, {x.y, x.w}};
    return s;
}

/* m = max(m1, m2), factors exp2((m1 - m) c) and exp2((m2 - m) c). *s takes in *now. A row
 * without keys in the segment, whose sums there are +0, stays as it is to the bit: (+0)(-0) + x
 * is x for either zero, too. */
__device__ static inline struct attn_merge attn_merge(struct attn_sums *s,
                                                      const struct attn_sums *now,
                                                      const struct attn_row row[2], int segment)
{
    struct attn_merge f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool has = segment * K_ATTN_SEGMENT <= row[i].pos;
        float m = fmaxf(s->max[i], now->max[i]);
        f.before[i] = exp2_fast((s->max[i] - m) * ATTN_SCALE);
        f.now[i] = has ? exp2_fast((now->max[i] - m) * ATTN_SCALE) : -0.0f;
        s->total[i] = fmaf(now->total[i], f.now[i], s->total[i] * f.before[i]);
        s->max[i] = m;
    }
    return f;
}

__device__ static inline float4 attn_merged(const struct attn_merge *f, float4 before,
                                            float4 now)
{
    return make_float4(fmaf(now.x, f->now[0], before.x * f->before[0]),
                       fmaf(now.y, f->now[0], before.y * f->before[0]),
                       fmaf(now.z, f->now[1], before.z * f->before[1]),
                       fmaf(now.w, f->now[1], before.w * f->before[1]));
}

/* The rows' sums over the segment that ends; they begin afresh. */
__device__ static inline struct attn_sums attn_rows_end(struct attn_row row[2])
{
    struct attn_sums s;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s.max[i] = row[i].max, s.total[i] = row_total(&row[i]);
        row[i].max = -INFINITY, row[i].total = 0;
    }
    return s;
}

/* The block's job; false: it has none. */
__device__ static inline bool attn_job_at(const struct k_attn *a, const struct attn_work *w,
                                          int rows, struct attn_job *job)
{
    /* Without a list the last chunks come first, since later positions have more keys. */
    struct attn_entry e = {(int32_t)(gridDim.x - 1 - blockIdx.x), -1, 0, 0};
    if (w->jobs) {
        if (blockIdx.x >= *w->n_jobs)
            return false;
        e = w->jobs[blockIdx.x];
    }
    job->t = attn_tile_at(&a->b, &a->d, rows, e.tile);
    bool is_part = e.segment >= 0;
    int end = job->t.last / KV_BLOCK + 1;
    job->from = is_part ? e.segment * SEGMENT_BLOCKS : 0;
    job->to = is_part ? min(end, job->from + SEGMENT_BLOCKS) : end;
    job->part = is_part ? e.part : -1;
    return job->t.n_rows > 0 && job->from < job->to;
}

/* A place for a group's sums so far; one thread. There are at least as many as groups that the
 * device runs at once. */
__device__ static inline int attn_total_take(const struct attn_work *w)
{
    uint32_t sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    int i = (int)(sm * 2 % w->n_totals);
    while (atomicCAS(&w->taken[i], 0, 1) != 0)
        i = i + 1 < w->n_totals ? i + 1 : 0;
    return i;
}

/* One thread, when the group's threads have read their sums. */
__device__ static inline void attn_total_give(const struct attn_work *w, int i)
{
    __threadfence();
    atomicExch(&w->taken[i], 0);
}

/* To `at`, the thread's place in a group's sums. */
__device__ static inline void attn_sums_store(float4 *at, const float O[32][4],
                                              const struct attn_sums *s)
{
#pragma unroll
    for (int nt = 0; nt < 32; nt++)
        __stcg(at + nt * GROUP_THREADS, make_float4(O[nt][0], O[nt][1], O[nt][2], O[nt][3]));
    __stcg(at + ROW_SUMS, attn_sums_pack(s));
}

/* O and *s, of one more segment, join the sums at `at`; the result stays in O and *s. */
__device__ static inline void attn_sums_join(float O[32][4], struct attn_sums *s,
                                             const struct attn_row row[2], int segment,
                                             const float4 *at)
{
    struct attn_sums so_far = attn_sums_unpack(__ldcg(at + ROW_SUMS));
    const struct attn_merge f = attn_merge(&so_far, s, row, segment);
    *s = so_far;
#pragma unroll
    for (int nt = 0; nt < 32; nt++) {
        float4 x = attn_merged(&f, __ldcg(at + nt * GROUP_THREADS),
                               make_float4(O[nt][0], O[nt][1], O[nt][2], O[nt][3]));
        O[nt][0] = x.x, O[nt][1] = x.y, O[nt][2] = x.z, O[nt][3] = x.w;
        if (nt % 8 == 7)
            __syncwarp(); /* keeps the loads from moving up: there are few registers */
    }
}

/* Places the workspace for a launch and lists its jobs; a->work may be NULL where no sequence
 * can have a second segment. rows: of a tile. */
cudaError_t attn_split_plan(const struct k_attn *a, int rows, struct attn_work *w,
                            cudaStream_t stream);

/* Behind the jobs: joins the segments of tiles that were split, and writes their outputs. */
cudaError_t attn_split_join(const struct k_attn *a, int rows, const struct attn_work *w,
                            cudaStream_t stream);

/* The body for compute capability 9.0; shapes are checked and there is work. Its tiles have
 * ATTN_HOPPER_ROWS. */
enum { ATTN_HOPPER_ROWS = 128 };
cudaError_t attn_hopper(const struct k_attn *a, const struct attn_work *w, cudaStream_t stream);

#endif
