/* The head without its product: final norm of the rows asked for, and what is told of a row of
 * logits.
 *
 * gdn.md 1.9.
 *   norm    h[r] = x[rows[r]] * rsqrt(mean x^2 + eps) * w, the sums of elementwise.cu's rmsnorm
 *   reduce  lse = log sum exp(x); target x[target] - lse; the row_top largest x - lse, ties to
 *           the lower id; how many x are NaN or infinite
 *
 * reduce: a block a row, one pass. A thread has every 512th group of 4 logits, with a running
 * maximum and f32 sum of its own (485 terms for a vocabulary of 248320); the sums meet in a
 * fixed tree, the logarithm is f64. Candidates: the 20th largest of the threads' maxima is at
 * most the 20th largest logit, so only threads whose maximum reaches it have candidates: their
 * logits alone are read again. All that reach it go to a list in shared memory, in any order,
 * and are ranked by (logprob as given out, lower id). A list that overflows (more than LIST
 * equal or nearly equal logits at the top) is made again, one candidate a pass over the row.
 * Limit: bytes, 4 * vocab a row. Grid n_rows, block 512, shared 12 KB. */
#include "common.cuh"

// ---- kernels

enum { NORM_THREADS = 256, NORM_MAX_VEC = 4 };

__global__ static void __launch_bounds__(NORM_THREADS) head_norm_kernel(struct k_head_norm a)
{
    __shared__ float part[NORM_THREADS / 32];
    const float *x = a.x + (int64_t)a.rows[blockIdx.x] * a.M;
    float f[NORM_MAX_VEC][8], sum = 0;
#pragma unroll
    for (int j = 0; j < NORM_MAX_VEC; j++) {
        int i = (j * NORM_THREADS + threadIdx.x) * 8;
        if (i >= a.M)
            continue;
        load8(x + i, f[j]);
        for (int e = 0; e < 8; e++)
            sum = fmaf(f[j][e], f[j][e], sum);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0)
        part[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < NORM_THREADS / 32; w++)
        sum += part[w];
    float scale = rsqrtf(sum / a.M + a.eps);
#pragma unroll
    for (int j = 0; j < NORM_MAX_VEC; j++) {
        int i = (j * NORM_THREADS + threadIdx.x) * 8;
        if (i >= a.M)
            continue;
        float w[8];
        load8(a.w + i, w);
        for (int e = 0; e < 8; e++)
            w[e] *= f[j][e] * scale;
        *(uint4 *)((bf16 *)a.h + (int64_t)blockIdx.x * a.M + i) = pack8(w);
    }
}

enum { REDUCE_THREADS = 512, REDUCE_WARPS = REDUCE_THREADS / 32, LIST = 1024 };

struct reduce_smem {
    float max[REDUCE_THREADS]; /* of each thread's logits, NaN aside */
    float warp_max[REDUCE_WARPS];
    float warp_sum[REDUCE_WARPS];
    int32_t warp_bad[REDUCE_WARPS];
    float list_p[LIST];
    int32_t list_id[LIST];
    int32_t n_list;
    float pick_p[REDUCE_WARPS];
    int32_t pick_id[REDUCE_WARPS];
    double lse;
};

/* A thread's share of a row. */
struct reduce_part {
    float max, sum; /* sum of exp(x - max) */
    int32_t n_bad;
};

/* exp(x - max) where both may be -inf. */
__device__ static inline float exp_below(float x, float max)
{
    return x == -INFINITY ? 0.0f : exp2_fast((x - max) * 1.4426950408889634f);
}

__device__ static inline void take4(struct reduce_part *r, float4 x)
{
    float m = fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), r->max);
    if (m > r->max) {
        r->sum *= exp_below(r->max, m);
        r->max = m;
    }
    r->sum += (exp_below(x.x, m) + exp_below(x.y, m)) + (exp_below(x.z, m) + exp_below(x.w, m));
    r->n_bad += (x.x - x.x != 0) + (x.y - x.y != 0) + (x.z - x.z != 0) + (x.w - x.w != 0);
}

/* Four logits from 4 i on; past the vocabulary -inf, which `n_pad` counts as bad. */
__device__ static inline float4 logits_at(const float *row, int i, int vocab)
{
    float4 x = *(const float4 *)(row + 4 * i);
    if (4 * i + 3 >= vocab) {
        x.y = 4 * i + 1 < vocab ? x.y : -INFINITY;
        x.z = 4 * i + 2 < vocab ? x.z : -INFINITY;
        x.w = -INFINITY;
    }
    return x;
}

__device__ static inline struct reduce_part reduce_thread(const float *row, int vocab)
{
    struct reduce_part r = {-INFINITY, 0, 0};
    int n = (vocab + 3) / 4, i = threadIdx.x;
    for (; i + 3 * REDUCE_THREADS < n; i += 4 * REDUCE_THREADS) {
        float4 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = logits_at(row, i + j * REDUCE_THREADS, vocab);
#pragma unroll
        for (int j = 0; j < 4; j++)
            take4(&r, x[j]);
    }
    for (; i < n; i += REDUCE_THREADS)
        take4(&r, logits_at(row, i, vocab));
    return r;
}

/* Joins the threads' parts; s->lse and the count in the result. */
__device__ static inline void reduce_block(struct reduce_smem *s, struct reduce_part r,
                                           int n_pad, struct k_row_result *out)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    s->max[threadIdx.x] = r.max;
    float m = r.max;
#pragma unroll
    for (int k = 16; k > 0; k >>= 1)
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, k));
    if (lane == 0)
        s->warp_max[warp] = m;
    __syncthreads();
    for (int w = 0; w < REDUCE_WARPS; w++)
        m = fmaxf(m, s->warp_max[w]);
    float sum = warp_sum(r.sum * exp_below(r.max, m));
    int bad = __reduce_add_sync(0xffffffffu, r.n_bad);
    if (lane == 0) {
        s->warp_sum[warp] = sum;
        s->warp_bad[warp] = bad;
    }
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    sum = 0;
    bad = -n_pad;
    for (int w = 0; w < REDUCE_WARPS; w++) {
        sum += s->warp_sum[w];
        bad += s->warp_bad[w];
    }
    s->lse = m + log((double)sum);
    s->n_list = 0;
    out->lse = (float)s->lse;
    out->n_bad = bad;
}

/* (p, i) is given out before (q, j). NaN comes before nothing. */
__device__ static inline bool is_before(float p, int i, float q, int j)
{
    return p > q || (p == q && i < j);
}

/* A logprob that the n-th candidate has at least: the n-th largest of the threads' maxima.
 * -inf when fewer threads have any. */
__device__ static inline float reach(struct reduce_smem *s, int n)
{
    float mine = s->max[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < REDUCE_THREADS; i++)
        rank += is_before(s->max[i], i, mine, threadIdx.x);
    if (rank == n - 1)
        s->pick_p[0] = mine;
    __syncthreads();
    return (float)(s->pick_p[0] - s->lse);
}

/* Every logit whose logprob is at least `least` to the list. */
__device__ static inline void collect(struct reduce_smem *s, const float *row, int vocab,
                                      float least)
{
    double lse = s->lse;
    int n = (vocab + 3) / 4, warp = threadIdx.x >> 5;
    for (int t = warp; t < REDUCE_THREADS; t += REDUCE_WARPS) {
        if (!((float)(s->max[t] - lse) >= least))
            continue;
        for (int i = t + (threadIdx.x & 31) * REDUCE_THREADS; i < n; i += 32 * REDUCE_THREADS) {
            float4 x = logits_at(row, i, vocab);
            const float *f = (const float *)&x;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = (float)(f[e] - lse);
                if (!(p >= least) || 4 * i + e >= vocab)
                    continue;
                int at = atomicAdd(&s->n_list, 1);
                if (at < LIST) {
                    s->list_p[at] = p;
                    s->list_id[at] = 4 * i + e;
                }
            }
        }
    }
    __syncthreads();
}

/* The list's n first, by counting for each what comes before it. */
__device__ static inline void rank_list(const struct reduce_smem *s, int n,
                                        struct k_row_result *out)
{
    for (int i = threadIdx.x; i < s->n_list; i += REDUCE_THREADS) {
        float p = s->list_p[i];
        int id = s->list_id[i], rank = 0;
        for (int j = 0; j < s->n_list && rank < n; j++)
            rank += is_before(s->list_p[j], s->list_id[j], p, id);
        if (rank < n) {
            out->top_id[rank] = id;
            out->top_logprob[rank] = p;
        }
    }
}

/* The n first, one a pass: the first of those that come after the last one found. */
__device__ static void rank_row(struct reduce_smem *s, const float *row, int vocab, int n,
                                struct k_row_result *out)
{
    double lse = s->lse;
    float last_p = INFINITY;
    int last_id = -1;
    for (int k = 0; k < n; k++) {
        float best = -INFINITY;
        int at = INT32_MAX;
        for (int i = threadIdx.x; i < vocab; i += REDUCE_THREADS) {
            float p = (float)(row[i] - lse);
            if (is_before(last_p, last_id, p, i) && is_before(p, i, best, at)) {
                best = p;
                at = i;
            }
        }
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) {
            float p = __shfl_xor_sync(0xffffffffu, best, m);
            int id = __shfl_xor_sync(0xffffffffu, at, m);
            if (is_before(p, id, best, at)) {
                best = p;
                at = id;
            }
        }
        if ((threadIdx.x & 31) == 0) {
            s->pick_p[threadIdx.x >> 5] = best;
            s->pick_id[threadIdx.x >> 5] = at;
        }
        __syncthreads();
        for (int w = 0; w < REDUCE_WARPS; w++)
            if (is_before(s->pick_p[w], s->pick_id[w], best, at)) {
                best = s->pick_p[w];
                at = s->pick_id[w];
            }
        __syncthreads();
        if (at == INT32_MAX)
            return;
        if (threadIdx.x == 0) {
            out->top_id[k] = at;
            out->top_logprob[k] = best;
        }
        last_p = best;
        last_id = at;
    }
}

__global__ static void __launch_bounds__(REDUCE_THREADS)
    head_reduce_kernel(struct k_head_reduce a)
{
    __shared__ struct reduce_smem s;
    const float *row = a.logits + (int64_t)blockIdx.x * a.ld;
    struct k_row_result *out = &a.out[blockIdx.x];
    int n = min(a.row_top[blockIdx.x], (int)K_TOP_MAX), target = a.targets[blockIdx.x];
    if (threadIdx.x == 0) {
        out->sampled_id = -1;
        out->sampled_logprob = 0;
    }
    if (threadIdx.x < K_TOP_MAX) {
        out->top_id[threadIdx.x] = -1;
        out->top_logprob[threadIdx.x] = 0;
    }
    reduce_block(&s, reduce_thread(row, a.vocab), (4 - a.vocab % 4) % 4, out);
    __syncthreads();
    if (threadIdx.x == 0)
        out->target_logprob = target < 0 ? 0 : (float)(row[target] - s.lse);
    if (n <= 0)
        return;
    collect(&s, row, a.vocab, reach(&s, n));
    if (s.n_list <= LIST)
        rank_list(&s, n, out);
    else
        rank_row(&s, row, a.vocab, n, out);
}

// ---- launchers

extern "C" cudaError_t k_head_norm(const struct k_head_norm *a, cudaStream_t stream)
{
    if (a->M <= 0 || a->M % 8 || a->M > NORM_THREADS * NORM_MAX_VEC * 8 || a->n_rows < 0)
        return cudaErrorInvalidValue;
    if (a->n_rows == 0)
        return cudaSuccess;
    head_norm_kernel<<<(unsigned)a->n_rows, NORM_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_head_reduce(const struct k_head_reduce *a, cudaStream_t stream)
{
    if (a->vocab <= 0 || a->ld < a->vocab || a->ld % 4 || a->n_rows < 0)
        return cudaErrorInvalidValue;
    if (a->n_rows == 0)
        return cudaSuccess;
    head_reduce_kernel<<<(unsigned)a->n_rows, REDUCE_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
