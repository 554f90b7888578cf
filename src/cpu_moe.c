/* Mixture of experts: router, experts, and their weighted sum (gdn.md 1.6).
 *
 * Rows are taken in blocks so that the workspace is bounded. Within a block the rows of each
 * expert are listed, every expert multiplies its own, and a row's results are summed in the
 * order of its ids' places: a row's bits do not depend on the other rows. */
#include <math.h>
#include <string.h>

#include "cpu_impl.h"
#include "cpu_simd.h"

/* Rows of router logits at a time, and the size that a block of expert rows aims at. */
enum { ROUTE_ROWS = 512, EXPERT_BLOCK_BYTES = 256 << 20, ROWS_PER_ITEM = 8 };

static int64_t row_items(int32_t n_rows)
{
    return ((int64_t)n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
}

/* Everything a block of rows needs; places are (row, place in its ids) pairs. */
struct expert_block {
    int32_t *first;            /* [E + 1] first place of each expert */
    int32_t *rows;             /* [places] row of each place, by expert */
    int32_t *place;            /* [block rows, top_k] the place of each choice */
    struct cpu_gemm_job *jobs; /* [E] */
    float *gate_up;            /* [places, 2 F]; its first half becomes silu(gate) * up */
    float *down;               /* [places, M] */
};

/* Rows in a block: as many as fit the aim, at least a chunk. */
static int32_t block_rows(int32_t max_tokens, int32_t top_k, int32_t M, int32_t F)
{
    size_t row_bytes = (size_t)top_k * (2 * (size_t)F + M) * sizeof(float);
    size_t n = EXPERT_BLOCK_BYTES / row_bytes;
    n = n < CHUNK_TOKENS ? CHUNK_TOKENS : n;
    return n < (size_t)max_tokens ? (int32_t)n : max_tokens;
}

/* Lays a block out from *at on, which ends behind it. */
static struct expert_block carve_block(uintptr_t *at, int32_t n_rows, int32_t E, int32_t top_k,
                                       int32_t M, int32_t F)
{
    size_t places = (size_t)n_rows * top_k;
    return (struct expert_block){
        .first = cpu_carve(at, ((size_t)E + 1) * sizeof(int32_t)),
        .rows = cpu_carve(at, places * sizeof(int32_t)),
        .place = cpu_carve(at, places * sizeof(int32_t)),
        .jobs = cpu_carve(at, (size_t)E * sizeof(struct cpu_gemm_job)),
        .gate_up = cpu_carve(at, places * 2 * F * sizeof(float)),
        .down = cpu_carve(at, places * M * sizeof(float)),
    };
}

size_t cpu_moe_workspace_bytes(const struct backend_limits *l, int32_t n_threads)
{
    (void)n_threads;
    if (l->E == 0)
        return 0;
    uintptr_t end = 0;
    int32_t n_rows = block_rows(l->max_tokens, l->top_k, l->M, l->moe_F);
    carve_block(&end, n_rows, l->E, l->top_k, l->M, l->moe_F);
    size_t route = (size_t)ROUTE_ROWS * l->E * sizeof(float);
    return end > route ? end : route;
}

/* ---- router ---- */

struct route_run {
    const struct op_moe_route *a;
    float *logits; /* [ROUTE_ROWS, E] */
    int32_t row0, n_rows;
};

/* The top_k largest of p, ties to the lower id. NaN is less than everything, so that ids are
 * good ones even then. */
static void choose(int32_t E, int32_t top_k, const float *p, int32_t *ids, float *weights)
{
    int32_t n = 0;
    for (int32_t e = 0; e < E; e++) {
        if (n == top_k && !(p[e] > weights[n - 1]))
            continue;
        int32_t at = n < top_k ? n++ : top_k - 1;
        for (; at > 0 && p[e] > weights[at - 1]; at--) {
            ids[at] = ids[at - 1];
            weights[at] = weights[at - 1];
        }
        ids[at] = e;
        weights[at] = p[e];
    }
}

static void route_row(const struct op_moe_route *a, float *p, int32_t *ids, float *weights)
{
    int32_t E = a->router->rows;
    float max = p[0], sum = 0;
    for (int32_t e = 1; e < E; e++)
        max = p[e] > max ? p[e] : max;
    for (int32_t e = 0; e < E; e++)
        p[e] -= max;
    cpu_vec_exp(E, p, p);
    for (int32_t e = 0; e < E; e++)
        sum += p[e];
    for (int32_t e = 0; e < E; e++)
        p[e] /= sum;
    choose(E, a->top_k, p, ids, weights);
    if (!a->renorm)
        return;
    float chosen = 0;
    for (int32_t j = 0; j < a->top_k; j++)
        chosen += weights[j];
    for (int32_t j = 0; j < a->top_k; j++)
        weights[j] /= chosen;
}

static void route_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct route_run *r = arg;
    int32_t i = (int32_t)item * ROWS_PER_ITEM;
    for (int32_t end = i + ROWS_PER_ITEM; i < end && i < r->n_rows; i++) {
        size_t at = (size_t)(r->row0 + i) * r->a->top_k;
        route_row(r->a, r->logits + (size_t)i * r->a->router->rows, r->a->ids + at,
                  r->a->weights + at);
    }
}

void cpu_moe_route(struct backend *b, const struct op_moe_route *a)
{
    struct cpu_pool *pool = cpu_impl_pool(b);
    size_t bytes;
    struct route_run r = {.a = a, .logits = cpu_impl_workspace(b, &bytes)};
    int32_t M = a->router->cols, E = a->router->rows;
    for (r.row0 = 0; r.row0 < a->n_rows; r.row0 += r.n_rows) {
        r.n_rows = a->n_rows - r.row0 < ROUTE_ROWS ? a->n_rows - r.row0 : ROUTE_ROWS;
        cpu_gemm(pool, r.n_rows, (const float *)a->h + (size_t)r.row0 * M, M, NULL, a->router,
                 0, r.logits, E);
        cpu_pool_run(pool, row_items(r.n_rows), route_item, &r);
    }
}

/* ---- experts ---- */

struct experts_run {
    const struct op_moe_experts *a;
    struct expert_block block;
    int32_t row0, n_rows;
};

/* y += s * x, or y = s * x. */
CPU_INLINE void add_scaled_body(int32_t n, bool is_first, float s, const float *x, float *y)
{
    int32_t i = 0;
    for (; i + VEC <= n; i += VEC)
        VF_STORE(y + i, is_first ? VF_LOAD(x + i) * s : VF_LOAD(y + i) + VF_LOAD(x + i) * s);
    for (; i < n; i++)
        y[i] = is_first ? x[i] * s : y[i] + x[i] * s;
}
CPU_KERNEL(add_scaled, (int32_t n, bool is_first, float s, const float *x, float *y),
           (n, is_first, s, x, y))

/* Lists the block's rows by expert, in row order, and where each choice went. */
static void group_rows(struct experts_run *r)
{
    const struct op_moe_experts *a = r->a;
    struct expert_block *k = &r->block;
    int32_t E = a->gate_up->n_mats, n = r->n_rows * a->top_k;
    const int32_t *ids = a->ids + (size_t)r->row0 * a->top_k;
    memset(k->first, 0, ((size_t)E + 1) * sizeof(int32_t));
    for (int32_t i = 0; i < n; i++)
        k->first[ids[i] + 1]++;
    for (int32_t e = 0; e < E; e++)
        k->first[e + 1] += k->first[e];
    /* first[e] runs to the end of e while filling, which is the start of e + 1: shift back. */
    for (int32_t i = 0; i < n; i++) {
        k->place[i] = k->first[ids[i]]++;
        k->rows[k->place[i]] = r->row0 + i / a->top_k;
    }
    memmove(k->first + 1, k->first, (size_t)E * sizeof(int32_t));
    k->first[0] = 0;
}

static int32_t list_jobs(struct expert_block *k, int32_t E, const float *a, const int32_t *rows,
                         int64_t lda, float *c, int64_t ldc)
{
    int32_t n_jobs = 0;
    for (int32_t e = 0; e < E; e++) {
        size_t first = k->first[e];
        int32_t n = k->first[e + 1] - k->first[e];
        if (n > 0)
            k->jobs[n_jobs++] = (struct cpu_gemm_job){
                .n_rows = n,
                .i_mat = e,
                .a = rows ? a : a + first * lda,
                .a_rows = rows ? rows + first : NULL,
                .c = c + first * ldc,
            };
    }
    return n_jobs;
}

static void hidden_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct experts_run *r = arg;
    int32_t F = r->a->down->cols, n = r->n_rows * r->a->top_k;
    int32_t i = (int32_t)item * ROWS_PER_ITEM;
    for (int32_t end = i + ROWS_PER_ITEM; i < end && i < n; i++) {
        float *row = r->block.gate_up + (size_t)i * 2 * F;
        cpu_swiglu_row(F, row, row + F, row);
    }
}

static void combine_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct experts_run *r = arg;
    const struct op_moe_experts *a = r->a;
    int32_t M = a->down->rows;
    int32_t i = (int32_t)item * ROWS_PER_ITEM;
    for (int32_t end = i + ROWS_PER_ITEM; i < end && i < r->n_rows; i++) {
        size_t row = r->row0 + i;
        float *y = (float *)a->y + row * M;
        for (int32_t j = 0; j < a->top_k; j++)
            add_scaled(M, j == 0, a->weights[row * a->top_k + j],
                       r->block.down + (size_t)r->block.place[i * a->top_k + j] * M, y);
        if (a->shared) {
            float x = cpu_vec_dot(M, (const float *)a->h + row * M, a->shared_gate);
            add_scaled(M, false, 1 / (1 + expf(-x)), (const float *)a->shared + row * M, y);
        }
    }
}

void cpu_moe_experts(struct backend *b, const struct op_moe_experts *a)
{
    struct cpu_pool *pool = cpu_impl_pool(b);
    const struct cpu_impl *impl = b->impl;
    size_t bytes;
    uintptr_t at = (uintptr_t)cpu_impl_workspace(b, &bytes);
    int32_t E = a->gate_up->n_mats, M = a->down->rows, F = a->down->cols;
    int32_t most = block_rows(impl->limits.max_tokens, a->top_k, M, F);
    struct experts_run r = {.a = a, .block = carve_block(&at, most, E, a->top_k, M, F)};
    struct expert_block *k = &r.block;
    for (r.row0 = 0; r.row0 < a->n_rows; r.row0 += r.n_rows) {
        r.n_rows = a->n_rows - r.row0 < most ? a->n_rows - r.row0 : most;
        group_rows(&r);
        int32_t n_jobs = list_jobs(k, E, a->h, k->rows, M, k->gate_up, 2 * (int64_t)F);
        cpu_gemm_jobs(pool, k->jobs, n_jobs, M, a->gate_up, 2 * (int64_t)F);
        cpu_pool_run(pool, row_items(r.n_rows * a->top_k), hidden_item, &r);
        n_jobs = list_jobs(k, E, k->gate_up, NULL, 2 * (int64_t)F, k->down, M);
        cpu_gemm_jobs(pool, k->jobs, n_jobs, 2 * (int64_t)F, a->down, M);
        cpu_pool_run(pool, row_items(r.n_rows), combine_item, &r);
    }
}
