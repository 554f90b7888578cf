/* A token from a row of logits, chosen by chance: struct row_sample of backend.h.
 *
 * A block a sample. The cuts by count and by mass look for a threshold on e = exp((x - max) /
 * T) by halving the range of its bits, which for floats from 0 on are in the order of their
 * values: at most 31 passes over the row each, which the L2 holds. The draw sums e in order of
 * ids: threads have segments of the row, their sums meet in one order, and the segment that
 * passes u of the whole is walked. Sums of a thread are f32 in passes (485 terms for a
 * vocabulary of 248320) and f64 in the draw; nothing depends on other rows.
 * Limit: 31 to 62 times vocab exponentials a row. Grid n_samples, block 512, shared 4.2 KB. */
#include <math_constants.h>

#include "common.cuh"

enum { SAMPLE_THREADS = 512, SAMPLE_WARPS = SAMPLE_THREADS / 32 };

struct sample_smem {
    float value[SAMPLE_WARPS];
    int id[SAMPLE_WARPS];
    int count[SAMPLE_WARPS];
    double mass[SAMPLE_WARPS];
    double segment[SAMPLE_THREADS];
    int chosen;
    float raw;
};

/* The largest of the row, ties to the lower id; NaN aside. The same in every thread. */
__device__ static void largest(struct sample_smem *s, const float *row, int n, float *max,
                               int *id)
{
    float m = -CUDART_INF_F;
    int at = 0x7fffffff;
    for (int i = threadIdx.x; i < n; i += SAMPLE_THREADS)
        if (row[i] > m) {
            m = row[i];
            at = i;
        }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        float m2 = __shfl_xor_sync(0xffffffffu, m, d);
        int at2 = __shfl_xor_sync(0xffffffffu, at, d);
        if (m2 > m || (m2 == m && at2 < at)) {
            m = m2;
            at = at2;
        }
    }
    if ((threadIdx.x & 31) == 0) {
        s->value[threadIdx.x >> 5] = m;
        s->id[threadIdx.x >> 5] = at;
    }
    __syncthreads();
    m = s->value[0];
    at = s->id[0];
    for (int w = 1; w < SAMPLE_WARPS; w++)
        if (s->value[w] > m || (s->value[w] == m && s->id[w] < at)) {
            m = s->value[w];
            at = s->id[w];
        }
    __syncthreads();
    *max = m;
    *id = at;
}

/* How many e are at least t, and their sum. The same in every thread. */
__device__ static void above(struct sample_smem *s, const float *row, int n, float max,
                             float inv, float t, int *count, double *mass)
{
    float sum = 0;
    int hits = 0;
    for (int i = threadIdx.x; i < n; i += SAMPLE_THREADS) {
        float e = expf((row[i] - max) * inv);
        if (e >= t) {
            sum += e;
            hits++;
        }
    }
    sum = warp_sum(sum);
    hits = __reduce_add_sync(0xffffffffu, hits);
    if ((threadIdx.x & 31) == 0) {
        s->mass[threadIdx.x >> 5] = sum;
        s->count[threadIdx.x >> 5] = hits;
    }
    __syncthreads();
    *mass = 0;
    *count = 0;
    for (int w = 0; w < SAMPLE_WARPS; w++) {
        *mass += s->mass[w];
        *count += s->count[w];
    }
    __syncthreads();
}

/* The largest threshold from t on at which at least min_count values and min_mass stay. */
__device__ static float cut(struct sample_smem *s, const float *row, int n, float max,
                            float inv, float t, int min_count, double min_mass)
{
    uint32_t low = __float_as_uint(t), high = __float_as_uint(1.0f) + 1;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        int count;
        double mass;
        above(s, row, n, max, inv, __uint_as_float(middle), &count, &mass);
        if (count >= min_count && mass >= min_mass)
            low = middle;
        else
            high = middle;
    }
    return __uint_as_float(low);
}

/* The first id, in order, at which the sum of what is at least t passes u of the whole. */
__device__ static int draw(struct sample_smem *s, const float *row, int n, float max, float inv,
                           float t, float u)
{
    int per = (n + SAMPLE_THREADS - 1) / SAMPLE_THREADS, first = threadIdx.x * per;
    int end = min(first + per, n);
    double sum = 0;
    for (int i = first; i < end; i++) {
        float e = expf((row[i] - max) * inv);
        sum += e >= t ? (double)e : 0;
    }
    s->segment[threadIdx.x] = sum;
    __syncthreads();
    double whole = 0, before = 0;
    int mine = -1;
    for (int k = 0; k < SAMPLE_THREADS; k++)
        whole += s->segment[k];
    double wanted = (double)u * whole, passed = 0;
    for (int k = 0; k < SAMPLE_THREADS; k++) {
        if (s->segment[k] <= 0)
            continue;
        mine = k;
        before = passed;
        passed += s->segment[k];
        if (passed > wanted)
            break;
    }
    if (threadIdx.x == mine) {
        int last = -1;
        for (int i = first; i < end; i++) {
            float e = expf((row[i] - max) * inv);
            if (!(e >= t))
                continue;
            last = i;
            before += (double)e;
            if (before > wanted)
                break;
        }
        s->chosen = last;
    }
    __syncthreads();
    return s->chosen;
}

__global__ static void __launch_bounds__(SAMPLE_THREADS) sample_kernel(struct k_sample a)
{
    __shared__ struct sample_smem s;
    struct k_sample_row q = a.samples[blockIdx.x];
    if (q.row < a.row0 || q.row >= a.row0 + a.n_rows)
        return;
    float *row = a.logits + (int64_t)(q.row - a.row0) * a.ld;
    struct k_row_result *out = &a.out[q.row - a.row0];
    struct k_adjust *adjust = a.adjust + q.adjust0;
    for (int i = threadIdx.x; i < q.n_adjust; i += SAMPLE_THREADS) {
        float x = row[adjust[i].id];
        row[adjust[i].id] = (x > 0 ? x / adjust[i].scale : x * adjust[i].scale) + adjust[i].add;
        adjust[i].add = x; /* for its logprob */
    }
    __syncthreads();
    float max;
    int id;
    largest(&s, row, a.vocab, &max, &id);
    if (id >= a.vocab) /* nothing but NaN: the row is not trusted anyway */
        id = 0;
    else if (!isinf(q.inv_temperature) && isfinite(max)) {
        float inv = q.inv_temperature, t = q.min_p > 0 ? q.min_p : __uint_as_float(1);
        int count;
        double mass;
        if (q.top_k > 0)
            t = fmaxf(t, cut(&s, row, a.vocab, max, inv, 0, min(q.top_k, a.vocab), 0));
        if (q.top_p < 1) {
            above(&s, row, a.vocab, max, inv, t, &count, &mass);
            t = cut(&s, row, a.vocab, max, inv, t, 1, (double)q.top_p * mass);
        }
        id = draw(&s, row, a.vocab, max, inv, t, q.u);
    }
    if (threadIdx.x == 0)
        s.raw = row[id];
    __syncthreads();
    for (int i = threadIdx.x; i < q.n_adjust; i += SAMPLE_THREADS)
        if (adjust[i].id == id)
            s.raw = adjust[i].add;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    out->sampled_id = id;
    out->sampled_logprob = (float)((double)s.raw - (double)out->lse);
    /* As the candidates have it, to the last bit. */
    for (int k = 0; k < K_TOP_MAX; k++)
        if (out->top_id[k] == id)
            out->sampled_logprob = out->top_logprob[k];
}

cudaError_t k_sample(const struct k_sample *a, cudaStream_t stream)
{
    if (a->vocab < 1 || a->ld < a->vocab || a->n_samples < 0)
        return cudaErrorInvalidValue;
    if (a->n_samples == 0)
        return cudaSuccess;
    sample_kernel<<<a->n_samples, SAMPLE_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}
