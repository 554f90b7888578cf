/* Products with a weight, by cuBLASLt: c = a w^T, bf16 in, bf16 or f32 out, f32 sums.
 *
 * A row's bits must not depend on how many rows the step has. So only algorithms that do not
 * split K are asked for, they are timed once for each shape of weight and power of two of rows
 * when the weight is made, and one is used only when it gives the sampled rows the same bits as
 * the algorithm that was chosen for the largest step. With a cache-dir the choice is kept in a
 * file (gemm_cache.h); what is read from there is not timed, but its rows are compared. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_impl.h"
#include "log.h"

_Static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(struct gemm_algo_words),
               "an algorithm fits in a record");

enum { GEMM_CANDIDATES = 16, GEMM_REPEATS = 3, GEMM_SAMPLES = 3 };

/* ---- the library ---- */

/* Half a gigabyte that only this backend needs, so it is loaded when the backend is opened: a
 * daemon that computes on the CPU starts without it. */
#define LT_STRING(x) #x
#define LT_NAME(major) "libcublasLt.so." LT_STRING(major)

/* The functions used; names are the library's without its prefix. */
struct gemm_lib {
    void *handle;
    size_t (*version)(void);
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*destroy)(cublasLtHandle_t);
    const char *(*status_string)(cublasStatus_t);
    cublasStatus_t (*desc_init)(cublasLtMatmulDesc_t, size_t, cublasComputeType_t,
                                cudaDataType_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
                               const void *, size_t);
    cublasStatus_t (*layout_init)(cublasLtMatrixLayout_t, size_t, cudaDataType, uint64_t,
                                  uint64_t, int64_t);
    cublasStatus_t (*pref_init)(cublasLtMatmulPreference_t, size_t);
    cublasStatus_t (*pref_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                               const void *, size_t);
    cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                cublasLtMatmulHeuristicResult_t *, int *);
    cublasStatus_t (*check)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                            cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *,
                            cublasLtMatmulHeuristicResult_t *);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                             cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t,
                             const void *, const void *, cublasLtMatrixLayout_t, void *,
                             cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *,
                             size_t, cudaStream_t);
};

/* Returns what is missing, or NULL. */
static const char *lib_load(struct gemm_lib *lib)
{
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
        {"cublasLtGetVersion", &lib->version},
        {"cublasLtCreate", &lib->create},
        {"cublasLtDestroy", &lib->destroy},
        {"cublasLtGetStatusString", &lib->status_string},
        {"cublasLtMatmulDescInit_internal", &lib->desc_init},
        {"cublasLtMatmulDescSetAttribute", &lib->desc_set},
        {"cublasLtMatrixLayoutInit_internal", &lib->layout_init},
        {"cublasLtMatmulPreferenceInit_internal", &lib->pref_init},
        {"cublasLtMatmulPreferenceSetAttribute", &lib->pref_set},
        {"cublasLtMatmulAlgoGetHeuristic", &lib->heuristic},
        {"cublasLtMatmulAlgoCheck", &lib->check},
        {"cublasLtMatmul", &lib->matmul},
    };
    lib->handle = dlopen(LT_NAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!lib->handle)
        return dlerror();
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *f = dlsym(lib->handle, symbols[i].name);
        if (!f)
            return symbols[i].name;
        memcpy(symbols[i].to, &f, sizeof(f));
    }
    return NULL;
}

int gemm_open(struct backend *b, struct errmsg *e)
{
    struct gemm *g = &cuda_impl_of(b)->gemm;
    cublasOperation_t trans = CUBLAS_OP_T;
    g->lib = calloc(1, sizeof(*g->lib));
    if (!g->lib)
        return errmsg_set(e, ERR_NOMEM, "backend cuda: out of memory");
    const char *missing = lib_load(g->lib);
    if (missing)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: %s cannot be used: %s; install the CUDA Toolkit's "
                          "cuBLAS, or choose backend cpu",
                          LT_NAME(CUBLAS_VER_MAJOR), missing);
    cublasStatus_t s = g->lib->create(&g->lt);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = g->lib->desc_init(&g->op, sizeof(g->op), CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = g->lib->desc_set(&g->op, CUBLASLT_MATMUL_DESC_TRANSA, &trans, sizeof(trans));
    if (s != CUBLAS_STATUS_SUCCESS)
        return errmsg_set(e, ERR_DEVICE, "backend cuda: cuBLASLt does not start: %s",
                          g->lib->status_string(s));
    g->workspace = cuda_alloc(b, GEMM_WORKSPACE_BYTES);
    if (!g->workspace)
        return errmsg_set(e, ERR_NOMEM, "backend cuda: no memory for cuBLASLt's workspace");
    return 0;
}

void gemm_close(struct backend *b)
{
    struct gemm *g = &cuda_impl_of(b)->gemm;
    for (int32_t i = 0; i < g->n_plans; i++)
        free(g->plans[i]);
    free(g->plans);
    gemm_cache_close(&g->cache);
    cuda_free(b, g->workspace);
    if (g->lt)
        g->lib->destroy(g->lt);
    /* The library stays loaded: its threads and handlers outlive the handle. */
    free(g->lib);
    memset(g, 0, sizeof(*g));
}

int64_t gemm_version(struct backend *b)
{
    return (int64_t)cuda_impl_of(b)->gemm.lib->version();
}

/* ---- one product ---- */

/* Row-major as cuBLAS sees it, column-major: w [cols, rows] transposed, a [cols, n_rows],
 * c [rows, n_rows]. */
struct gemm_layout {
    cublasLtMatrixLayoutOpaque_t w, a, c;
};

static void layout_init(const struct gemm *g, struct gemm_layout *l, const struct gemm_plan *p,
                        int32_t n_rows, int64_t ldc)
{
    const size_t size = sizeof(l->w);
    uint64_t rows = (uint64_t)p->rows, cols = (uint64_t)p->cols, n = (uint64_t)n_rows;
    g->lib->layout_init(&l->w, size, CUDA_R_16BF, cols, rows, p->cols);
    g->lib->layout_init(&l->a, size, CUDA_R_16BF, cols, n, p->cols);
    g->lib->layout_init(&l->c, size, p->is_f32 ? CUDA_R_32F : CUDA_R_16BF, rows, n, ldc);
}

static cublasStatus_t multiply(struct cuda_impl *impl, struct gemm_layout *l, const void *w,
                               const void *a, void *c, const cublasLtMatmulAlgo_t *algo)
{
    const float one = 1, zero = 0;
    struct gemm *g = &impl->gemm;
    return g->lib->matmul(g->lt, &g->op, &one, w, &l->w, a, &l->a, &zero, c, &l->c, c, &l->c,
                          algo, g->workspace, GEMM_WORKSPACE_BYTES, impl->stream);
}

/* Algorithms without split-K for n_rows, best guess first. Returns how many. */
static int candidates(struct gemm *g, struct gemm_layout *l,
                      cublasLtMatmulHeuristicResult_t *out)
{
    cublasLtMatmulPreferenceOpaque_t pref;
    const uint32_t no_split = CUBLASLT_REDUCTION_SCHEME_NONE;
    const size_t workspace = GEMM_WORKSPACE_BYTES;
    int n = 0, n_good = 0;
    g->lib->pref_init(&pref, sizeof(pref));
    g->lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_split,
                     sizeof(no_split));
    g->lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                     sizeof(workspace));
    if (g->lib->heuristic(g->lt, &g->op, &l->w, &l->a, &l->c, &l->c, &pref, GEMM_CANDIDATES,
                          out, &n) != CUBLAS_STATUS_SUCCESS)
        return 0;
    for (int i = 0; i < n; i++)
        if (out[i].state == CUBLAS_STATUS_SUCCESS)
            out[n_good++] = out[i];
    return n_good;
}

/* For a shape that the plan's algorithm refuses after all: the library's guess. It waits for
 * nothing, and no algorithm without split-K was seen to give other bits. */
static cublasStatus_t multiply_anyhow(struct cuda_impl *impl, struct gemm_layout *l,
                                      const void *w, const void *a, void *c)
{
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    int n = candidates(&impl->gemm, l, found);
    cublasStatus_t s = CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i = 0; i < n && s != CUBLAS_STATUS_SUCCESS; i++)
        s = multiply(impl, l, w, a, c, &found[i].algo);
    return s;
}

static int32_t bucket_of(int32_t n_rows)
{
    int32_t i = 0;
    while (i < GEMM_BUCKETS - 1 && (1 << (i + GEMM_SMALLEST_LOG2)) < n_rows)
        i++;
    return i;
}

void gemm_run(struct backend *b, const struct gemm_plan *plan, const void *w, int32_t n_rows,
              const void *a, void *c, int64_t ldc)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct gemm_layout l;
    int32_t i = bucket_of(n_rows);
    if (n_rows == 0)
        return;
    if (!plan) {
        cuda_note(b, "a product that its weight was not made for", cudaErrorInvalidValue);
        return;
    }
    layout_init(&impl->gemm, &l, plan, n_rows, ldc);
    const cublasLtMatmulAlgo_t *algo = plan->has_algo[i] ? &plan->algo[i] : &plan->common;
    cublasStatus_t s = multiply(impl, &l, w, a, c, algo);
    if (s != CUBLAS_STATUS_SUCCESS)
        s = multiply_anyhow(impl, &l, w, a, c);
    if (s != CUBLAS_STATUS_SUCCESS)
        cuda_note(b, impl->gemm.lib->status_string(s), cudaErrorUnknown);
}

void cuda_matmul(struct backend *b, const struct op_matmul *a)
{
    const struct cuda_weight *w = a->w->data;
    gemm_run(b, w->plan[0], w->rows, a->n_rows, a->a, a->c, a->ldc);
    cuda_mark(b, "matmul");
}

/* ---- choosing algorithms ---- */

/* What a plan is timed with. */
struct trial {
    struct cuda_impl *impl;
    struct gemm_plan *plan;
    const void *w;
    int32_t max_rows;
    void *a, *c;        /* [max_rows, cols] bf16, [max_rows, rows] of the output's type */
    size_t c_row_bytes; /* of c */
    char *want;         /* host: the sampled rows as the common algorithm makes them */
    char *got;          /* host: one row */
    cudaEvent_t from, to;
};

static int32_t bucket_rows(const struct trial *t, int32_t i)
{
    int32_t rows = 1 << (i + GEMM_SMALLEST_LOG2);
    return i == GEMM_BUCKETS - 1 || rows > t->max_rows ? t->max_rows : rows;
}

/* First, middle and last row of a bucket. */
static int32_t sample_row(int32_t n_rows, int32_t k)
{
    return k == 0 ? 0 : k == 1 ? n_rows / 2 : n_rows - 1;
}

static bool fetch_row(struct trial *t, int32_t row, char *out)
{
    return cudaMemcpyAsync(out, (char *)t->c + (size_t)row * t->c_row_bytes, t->c_row_bytes,
                           cudaMemcpyDeviceToHost, t->impl->stream) == cudaSuccess &&
           cudaStreamSynchronize(t->impl->stream) == cudaSuccess;
}

/* Whether c's first n_rows hold the bits that the common algorithm gave. */
static bool has_same_bits(struct trial *t, int32_t bucket, int32_t n_rows)
{
    for (int32_t k = 0; k < GEMM_SAMPLES; k++) {
        const char *want = t->want + (size_t)(bucket * GEMM_SAMPLES + k) * t->c_row_bytes;
        if (!fetch_row(t, sample_row(n_rows, k), t->got) ||
            memcmp(t->got, want, t->c_row_bytes) != 0)
            return false;
    }
    return true;
}

/* A product of n_rows; what a failed algorithm leaves unwritten does not pass for its
 * result. */
static bool run_algo(struct trial *t, struct gemm_layout *l, int32_t n_rows,
                     const cublasLtMatmulAlgo_t *algo)
{
    struct cuda_impl *impl = t->impl;
    layout_init(&impl->gemm, l, t->plan, n_rows, t->plan->rows);
    return k_fill_nan(t->c, (size_t)n_rows * t->c_row_bytes, impl->stream) == cudaSuccess &&
           multiply(impl, l, t->w, t->a, t->c, algo) == CUBLAS_STATUS_SUCCESS;
}

/* Milliseconds of a product of n_rows, the best of some; negative: it does not run. */
static float time_algo(struct trial *t, int32_t n_rows, const cublasLtMatmulAlgo_t *algo)
{
    struct cuda_impl *impl = t->impl;
    struct gemm_layout l;
    float best = -1;
    if (!run_algo(t, &l, n_rows, algo))
        return -1;
    for (int i = 0; i < GEMM_REPEATS; i++) {
        float ms = 0;
        cudaEventRecord(t->from, impl->stream);
        multiply(impl, &l, t->w, t->a, t->c, algo);
        cudaEventRecord(t->to, impl->stream);
        if (cudaEventSynchronize(t->to) != cudaSuccess ||
            cudaEventElapsedTime(&ms, t->from, t->to) != cudaSuccess)
            return -1;
        best = best < 0 || ms < best ? ms : best;
    }
    return best;
}

/* Whether an algorithm takes every kind of row count from 1 or the last bucket's end to n_rows,
 * in rows of c that are packed and that are padded as the model pads them. */
static bool fits_bucket(struct trial *t, int32_t n_rows, const cublasLtMatmulAlgo_t *algo)
{
    struct gemm *g = &t->impl->gemm;
    int32_t least = n_rows <= 1 << GEMM_SMALLEST_LOG2 ? 1 : n_rows / 2 + 1;
    const int32_t counts[] = {least, least + 1, least + 2, (least + n_rows) / 2, n_rows};
    const int64_t rows = t->plan->rows,
                  lds[] = {rows, (rows + 3) / 4 * 4, (rows + 63) / 64 * 64};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        for (size_t k = 0; k < sizeof(lds) / sizeof(lds[0]); k++) {
            struct gemm_layout l;
            cublasLtMatmulHeuristicResult_t r;
            layout_init(g, &l, t->plan, counts[i], lds[k]);
            if (g->lib->check(g->lt, &g->op, &l.w, &l.a, &l.c, &l.c, algo, &r) !=
                    CUBLAS_STATUS_SUCCESS ||
                r.workspaceSize > GEMM_WORKSPACE_BYTES)
                return false;
        }
    }
    return true;
}

/* Takes an algorithm for n_rows when it is faster than *ms (negative: there is none yet) and
 * its rows have the common bits; bucket negative: any bits will do. */
static void try_algo(struct trial *t, int32_t n_rows, int32_t bucket,
                     const cublasLtMatmulAlgo_t *algo, float *ms, cublasLtMatmulAlgo_t *out)
{
    if (!fits_bucket(t, n_rows, algo))
        return;
    float here = time_algo(t, n_rows, algo);
    if (here < 0 || (*ms >= 0 && here >= *ms))
        return;
    if (bucket >= 0 && !has_same_bits(t, bucket, n_rows))
        return;
    *ms = here;
    *out = *algo;
}

/* The fastest of the library's candidates; milliseconds, negative: none fits. */
static float choose(struct trial *t, int32_t n_rows, int32_t bucket, cublasLtMatmulAlgo_t *out)
{
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    struct gemm_layout l;
    layout_init(&t->impl->gemm, &l, t->plan, n_rows, t->plan->rows);
    int n = candidates(&t->impl->gemm, &l, found);
    float ms = -1;
    for (int i = 0; i < n; i++)
        try_algo(t, n_rows, bucket, &found[i].algo, &ms, out);
    return ms;
}

static bool trial_open(struct backend *b, struct trial *t)
{
    const struct gemm_plan *p = t->plan;
    t->c_row_bytes = (size_t)p->rows * (p->is_f32 ? 4 : 2);
    int64_t n = (int64_t)t->max_rows * p->cols;
    t->a = cuda_alloc(b, (size_t)n * 2);
    t->c = cuda_alloc(b, (size_t)t->max_rows * t->c_row_bytes);
    t->want = malloc((size_t)GEMM_BUCKETS * GEMM_SAMPLES * t->c_row_bytes);
    t->got = malloc(t->c_row_bytes);
    return t->a && t->c && t->want && t->got && cudaEventCreate(&t->from) == cudaSuccess &&
           cudaEventCreate(&t->to) == cudaSuccess &&
           k_fill_normal(t->a, n, 0, 1, 1, t->impl->stream) == cudaSuccess;
}

static void trial_close(struct backend *b, struct trial *t)
{
    cuda_free(b, t->a);
    cuda_free(b, t->c);
    free(t->want);
    free(t->got);
    if (t->from)
        cudaEventDestroy(t->from);
    if (t->to)
        cudaEventDestroy(t->to);
}

/* Fills want by the plan's common algorithm. */
static bool take_wanted(struct trial *t)
{
    struct gemm_layout l;
    bool is_good = run_algo(t, &l, t->max_rows, &t->plan->common);
    for (int32_t i = 0; is_good && i < GEMM_BUCKETS; i++)
        for (int32_t k = 0; is_good && k < GEMM_SAMPLES; k++)
            is_good = fetch_row(t, sample_row(bucket_rows(t, i), k),
                                t->want + (size_t)(i * GEMM_SAMPLES + k) * t->c_row_bytes);
    return is_good;
}

/* Times the plan; false leaves it as it was. */
static bool time_plan(struct backend *b, const void *w, int32_t max_rows,
                      struct gemm_plan *plan)
{
    struct trial t = {.impl = cuda_impl_of(b), .plan = plan, .w = w, .max_rows = max_rows};
    bool is_good =
        trial_open(b, &t) && choose(&t, max_rows, -1, &plan->common) >= 0 && take_wanted(&t);
    float ms[GEMM_BUCKETS];
    int32_t n_buckets = bucket_of(max_rows) + 1;
    for (int32_t i = 0; is_good && i < n_buckets; i++)
        ms[i] = choose(&t, bucket_rows(&t, i), i, &plan->algo[i]);
    /* What is good for other row counts is at times better than all that the library offers. */
    struct gemm_plan first = *plan;
    for (int32_t i = 0; is_good && i < n_buckets; i++) {
        for (int32_t k = 0; k < n_buckets; k++)
            if (k != i && ms[k] >= 0)
                try_algo(&t, bucket_rows(&t, i), i, &first.algo[k], &ms[i], &plan->algo[i]);
        plan->has_algo[i] = ms[i] >= 0;
    }
    trial_close(b, &t);
    return is_good;
}

/* ---- remembering them ---- */

/* Opens the file at the first product. NULL: there is none to be kept. */
static struct gemm_cache *cache_of(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct gemm *g = &impl->gemm;
    struct cudaDeviceProp card;
    if (!b->cache_dir || g->cache.path)
        return g->cache.path ? &g->cache : NULL;
    if (cudaGetDeviceProperties(&card, impl->device) != cudaSuccess ||
        gemm_cache_open(&g->cache, b->cache_dir, card.name, gemm_version(b)) != 0)
        return NULL;
    return &g->cache;
}

/* The plan as it was kept; false when there is none, or it does not give the same bits here. */
static bool recall_plan(struct backend *b, const void *w, int32_t max_rows,
                        struct gemm_plan *plan)
{
    struct gemm_cache *cache = cache_of(b);
    const struct gemm_record *r =
        cache ? gemm_cache_find(cache, plan->rows, plan->cols, plan->is_f32, max_rows) : NULL;
    if (!r)
        return false;
    struct gemm_plan kept = *plan;
    struct trial t = {.impl = cuda_impl_of(b), .plan = &kept, .w = w, .max_rows = max_rows};
    memcpy(&kept.common, &r->common, sizeof(kept.common));
    bool is_good =
        trial_open(b, &t) && fits_bucket(&t, max_rows, &kept.common) && take_wanted(&t);
    for (int32_t i = 0; is_good && i < GEMM_BUCKETS; i++) {
        struct gemm_layout l;
        int32_t n = bucket_rows(&t, i);
        kept.has_algo[i] = r->has_algo >> i & 1;
        memcpy(&kept.algo[i], &r->algo[i], sizeof(kept.algo[i]));
        is_good = !kept.has_algo[i] ||
                  (fits_bucket(&t, n, &kept.algo[i]) && run_algo(&t, &l, n, &kept.algo[i]) &&
                   has_same_bits(&t, i, n));
    }
    trial_close(b, &t);
    if (is_good)
        *plan = kept;
    return is_good;
}

static void keep_plan(struct backend *b, int32_t max_rows, const struct gemm_plan *plan)
{
    struct gemm_cache *cache = cache_of(b);
    struct gemm_record r = {
        .rows = plan->rows, .cols = plan->cols, .is_f32 = plan->is_f32, .max_rows = max_rows};
    struct errmsg e = {""};
    if (!cache)
        return;
    memcpy(&r.common, &plan->common, sizeof(r.common));
    for (int32_t i = 0; i < GEMM_BUCKETS; i++) {
        r.has_algo |= (uint32_t)plan->has_algo[i] << i;
        if (plan->has_algo[i])
            memcpy(&r.algo[i], &plan->algo[i], sizeof(r.algo[i]));
    }
    if (gemm_cache_add(cache, &r, &e) != 0 && !cuda_impl_of(b)->gemm.is_cache_bad) {
        cuda_impl_of(b)->gemm.is_cache_bad = true;
        log_warn("event=products_not_kept why=\"%s\"", e.text);
    }
}

static struct gemm_plan *plan_add(struct gemm *g)
{
    if (g->n_plans == g->plans_cap) {
        int32_t cap = g->plans_cap ? 2 * g->plans_cap : 16;
        struct gemm_plan **more = realloc(g->plans, (size_t)cap * sizeof(*more));
        if (!more)
            return NULL;
        g->plans = more;
        g->plans_cap = cap;
    }
    struct gemm_plan *p = calloc(1, sizeof(*p));
    if (p)
        g->plans[g->n_plans++] = p;
    return p;
}

struct gemm_plan *gemm_plan_make(struct backend *b, const void *w, int32_t rows, int32_t cols,
                                 bool is_f32, int32_t max_rows)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct gemm *g = &impl->gemm;
    for (int32_t i = 0; i < g->n_plans; i++) {
        struct gemm_plan *p = g->plans[i];
        if (p->rows == rows && p->cols == cols && p->is_f32 == is_f32)
            return p;
    }
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    struct gemm_layout l;
    struct gemm_plan *p = plan_add(g);
    if (!p)
        return NULL;
    *p = (struct gemm_plan){.rows = rows, .cols = cols, .is_f32 = is_f32};
    if (recall_plan(b, w, max_rows, p))
        return p;
    if (time_plan(b, w, max_rows, p)) {
        keep_plan(b, max_rows, p);
        g->n_timed++;
        return p;
    }
    /* No memory to try: the library's guess for the largest step serves all. */
    layout_init(g, &l, p, max_rows, rows);
    if (candidates(g, &l, found) > 0) {
        p->common = found[0].algo;
        return p;
    }
    free(g->plans[--g->n_plans]);
    return NULL;
}
