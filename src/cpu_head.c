/* The head: final norm, logits, log-sum-exp, the target's logprob and the best candidates of
 * the rows asked for. Rows are taken in blocks, so that of the logits only a block exists. */
#include <math.h>

#include "cpu_impl.h"
#include "cpu_simd.h"

/* HEAD_ROWS rows of logits exist at a time; SPAN logits are looked at together. */
enum { HEAD_ROWS = 64, SPAN = 256 };

struct head_run {
    const struct op_head *a;
    float *h;      /* [HEAD_ROWS, M] */
    float *logits; /* [HEAD_ROWS, vocab] */
    float *work;   /* [threads, vocab] */
    int32_t row0, n_rows;
};

static size_t h_bytes(int32_t M)
{
    return cpu_round_up((size_t)HEAD_ROWS * M * sizeof(float), CPU_ALIGN);
}

size_t cpu_head_workspace_bytes(const struct backend_limits *l, int32_t n_threads)
{
    return h_bytes(l->M) + ((size_t)HEAD_ROWS + (size_t)n_threads) * l->vocab * sizeof(float) +
           CPU_ALIGN;
}

/* The largest of n values (NaN aside), and how many are NaN or infinite. */
CPU_INLINE void survey_body(int32_t n, const float *x, float *max, int32_t *n_bad)
{
    vf most = VF_SET(-INFINITY);
    vi bad = {0};
    float m = -INFINITY;
    int32_t i = 0, count = 0;
    for (; i + VEC <= n; i += VEC) {
        vf v = VF_LOAD(x + i);
        most = VF_SELECT(v > most, v, most);
        bad -= v - v != 0;
    }
    for (; i < n; i++) {
        m = x[i] > m ? x[i] : m;
        count += x[i] - x[i] != 0;
    }
    for (int32_t u = 0; u < VEC; u++) {
        m = most[u] > m ? most[u] : m;
        count += bad[u];
    }
    *max = m;
    *n_bad = count;
}
CPU_KERNEL(survey, (int32_t n, const float *x, float *max, int32_t *n_bad), (n, x, max, n_bad))

CPU_INLINE void less_body(int32_t n, const float *x, float m, float *y)
{
    int32_t i = 0;
    for (; i + VEC <= n; i += VEC)
        VF_STORE(y + i, VF_LOAD(x + i) - m);
    for (; i < n; i++)
        y[i] = x[i] - m;
}
CPU_KERNEL(less, (int32_t n, const float *x, float m, float *y), (n, x, m, y))

CPU_INLINE void total_body(int32_t n, const float *x, float *total)
{
    vf sum = VF_SET(0.0f);
    float rest = 0;
    int32_t i = 0;
    for (; i + VEC <= n; i += VEC)
        sum += VF_LOAD(x + i);
    for (; i < n; i++)
        rest += x[i];
    *total = VF_SUM(sum) + rest;
}
CPU_KERNEL(total, (int32_t n, const float *x, float *sum), (n, x, sum))

static int32_t span_at(int32_t i, int32_t n)
{
    return n - i < SPAN ? n - i : SPAN;
}

/* Spans are summed in f32, their sums in f64. */
static double log_sum_exp(int32_t n, const float *x, float max)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i += SPAN) {
        float e[SPAN], part;
        less(span_at(i, n), x + i, max, e);
        cpu_vec_exp(span_at(i, n), e, e);
        total(span_at(i, n), e, &part);
        sum += part;
    }
    return max + log(sum);
}

/* Candidates by the logprob as it is given out, ties to the lower id: ids come in ascending
 * order, so a later one must be larger to pass. Spans whose largest value cannot enter are
 * skipped. NaN never enters. */
static void best_candidates(int32_t n, const float *x, double lse, int32_t n_wanted,
                            struct row_result *out)
{
    int32_t n_found = 0;
    for (int32_t i = 0; i < n && n_wanted > 0; i += SPAN) {
        float max;
        int32_t n_bad;
        survey(span_at(i, n), x + i, &max, &n_bad);
        if (n_found == n_wanted && !((float)(max - lse) > out->top_logprob[n_found - 1]))
            continue;
        for (int32_t id = i; id < i + span_at(i, n); id++) {
            float p = (float)(x[id] - lse);
            if (isnan(p) || (n_found == n_wanted && !(p > out->top_logprob[n_found - 1])))
                continue;
            int32_t at = n_found < n_wanted ? n_found++ : n_wanted - 1;
            for (; at > 0 && p > out->top_logprob[at - 1]; at--) {
                out->top_id[at] = out->top_id[at - 1];
                out->top_logprob[at] = out->top_logprob[at - 1];
            }
            out->top_id[at] = id;
            out->top_logprob[at] = p;
        }
    }
}

/* Samples are few and in the order of rows. */
static const struct row_sample *find_sample(const struct batch *b, int32_t r)
{
    int32_t low = 0, high = b->n_samples;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (b->samples[middle].row < r)
            low = middle + 1;
        else
            high = middle;
    }
    return low < b->n_samples && b->samples[low].row == r ? &b->samples[low] : NULL;
}

/* work: [vocab]. */
static void judge_row(const struct op_head *a, int32_t r, const float *logits, float *work)
{
    int32_t vocab = a->w->rows;
    struct row_result *out = &a->out[r];
    float max;
    for (int32_t j = 0; j < TOP_MAX; j++) {
        out->top_id[j] = -1;
        out->top_logprob[j] = 0;
    }
    survey(vocab, logits, &max, &out->n_bad);
    double lse = log_sum_exp(vocab, logits, max);
    int32_t target = a->b->targets[r], n_wanted = a->b->row_top[r];
    out->lse = (float)lse;
    out->target_logprob = target < 0 ? 0 : (float)(logits[target] - lse);
    best_candidates(vocab, logits, lse, n_wanted < TOP_MAX ? n_wanted : TOP_MAX, out);
    out->sampled_id = -1;
    out->sampled_logprob = 0;
    const struct row_sample *s = find_sample(a->b, r);
    if (!s)
        return;
    out->sampled_id = cpu_sample_row(vocab, logits, s, work);
    out->sampled_logprob = (float)(logits[out->sampled_id] - lse);
}

static void norm_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct head_run *r = arg;
    const struct op_head *a = r->a;
    size_t tok = a->b->rows[r->row0 + item];
    cpu_rmsnorm_row(a->M, a->eps, a->x + tok * a->M, a->norm_w, r->h + (size_t)item * a->M);
}

static void judge_item(void *arg, int64_t item, int32_t thread)
{
    const struct head_run *r = arg;
    size_t vocab = (size_t)r->a->w->rows;
    judge_row(r->a, r->row0 + (int32_t)item, r->logits + (size_t)item * vocab,
              r->work + (size_t)thread * vocab);
}

void cpu_head(struct backend *b, const struct op_head *a)
{
    struct cpu_pool *pool = cpu_impl_pool(b);
    size_t bytes;
    uintptr_t at = (uintptr_t)cpu_impl_workspace(b, &bytes);
    struct head_run r = {.a = a};
    r.h = cpu_carve(&at, h_bytes(a->M));
    r.logits = cpu_carve(&at, (size_t)HEAD_ROWS * (size_t)a->w->rows * sizeof(float));
    r.work = (float *)at;
    for (r.row0 = 0; r.row0 < a->b->n_rows; r.row0 += r.n_rows) {
        int32_t left = a->b->n_rows - r.row0;
        r.n_rows = left < HEAD_ROWS ? left : HEAD_ROWS;
        cpu_pool_run(pool, r.n_rows, norm_item, &r);
        cpu_gemm(pool, r.n_rows, r.h, a->M, NULL, a->w, 0, r.logits, a->w->rows);
        cpu_pool_run(pool, r.n_rows, judge_item, &r);
    }
}
