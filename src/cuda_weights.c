/* Weights of the CUDA backend: rows as bf16 in device memory, row-major; a tied embedding is
 * kept once. Main thread, at start.
 *
 * Rows go through two pinned buffers: while one is copied to the device the next is filled by a
 * few threads, which read the mapped file and convert f32 and f16 to bf16 (to nearest, ties to
 * even). The buffers are made for the first weight and kept: pinning takes as long as a
 * copy. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_impl.h"

enum { STAGE_BYTES = 32 << 20, N_READERS = 8 };

size_t cuda_weight_bytes(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                         enum dtype dtype, unsigned use)
{
    (void)b;
    (void)dtype;
    (void)use;
    return (size_t)n_mats * (size_t)rows * (size_t)cols * 2;
}

/* ---- conversion ---- */

static float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, frac = h & 0x3ff;
    uint32_t bits = sign | (exponent + 112) << 23 | frac << 13;
    float x;
    if (exponent == 0) {
        x = (float)frac * 0x1p-24f;
        return sign ? -x : x;
    }
    if (exponent == 31)
        bits = sign | 0x7f800000 | frac << 13;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Elements [from, from + n) of a part's rows into out. */
static void convert(const struct weight_part *part, size_t from, size_t n, uint16_t *out)
{
    if (part->dtype == DTYPE_BF16) {
        memcpy(out, (const uint16_t *)part->rows + from, n * 2);
    } else if (part->dtype == DTYPE_F32) {
        const float *x = (const float *)part->rows + from;
        for (size_t i = 0; i < n; i++)
            out[i] = bf16_of(x[i]);
    } else {
        const uint16_t *x = (const uint16_t *)part->rows + from;
        for (size_t i = 0; i < n; i++)
            out[i] = bf16_of(f16_to_f32(x[i]));
    }
}

/* ---- filling a buffer ---- */

struct reader {
    const struct weight_part *part;
    size_t from, n;
    uint16_t *out;
};

static void *reader_main(void *arg)
{
    const struct reader *r = arg;
    convert(r->part, r->from, r->n, r->out);
    return NULL;
}

/* Elements [from, from + n) of a part, by several threads. A thread that cannot be started is
 * done without. */
static void fill(const struct weight_part *part, size_t from, size_t n, uint16_t *out)
{
    enum { WORTH_A_THREAD = 1 << 20 };
    struct reader r[N_READERS];
    pthread_t thread[N_READERS];
    bool is_running[N_READERS] = {false};
    size_t n_readers = n / WORTH_A_THREAD;
    n_readers = n_readers < 1 ? 1 : n_readers > N_READERS ? N_READERS : n_readers;
    for (size_t i = 0; i < n_readers; i++) {
        size_t at = n * i / n_readers, end = n * (i + 1) / n_readers;
        r[i] = (struct reader){part, from + at, end - at, out + at};
        if (i + 1 < n_readers)
            is_running[i] = pthread_create(&thread[i], NULL, reader_main, &r[i]) == 0;
        if (!is_running[i])
            reader_main(&r[i]);
    }
    for (size_t i = 0; i < n_readers; i++)
        if (is_running[i])
            pthread_join(thread[i], NULL);
}

/* ---- making ---- */

void cuda_stages_close(struct cuda_stages *s)
{
    for (int i = 0; i < CUDA_STAGES; i++) {
        if (s->host[i])
            cudaFreeHost(s->host[i]);
        if (s->copied[i])
            cudaEventDestroy(s->copied[i]);
    }
    *s = (struct cuda_stages){0};
}

static bool stages_open(struct cuda_stages *s)
{
    bool is_good = true;
    for (int i = 0; is_good && i < CUDA_STAGES; i++)
        is_good = (s->host[i] || cudaHostAlloc((void **)&s->host[i], STAGE_BYTES,
                                               cudaHostAllocDefault) == cudaSuccess) &&
                  (s->copied[i] || cudaEventCreateWithFlags(
                                       &s->copied[i], cudaEventDisableTiming) == cudaSuccess);
    return is_good;
}

/* Copies all parts to dst. Waits until done. */
static int copy_parts(struct backend *b, const struct weight_part *parts, int32_t n_parts,
                      int32_t cols, uint16_t *dst)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct cuda_stages *s = &impl->stages;
    const size_t per = STAGE_BYTES / 2;
    int i_stage = 0;
    cudaError_t error = cudaSuccess;
    if (!stages_open(s)) {
        cuda_stages_close(s);
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < n_parts; i++) {
        size_t left = (size_t)parts[i].n_rows * (size_t)cols;
        for (size_t at = 0, n; left > 0 && error == cudaSuccess; at += n, left -= n, dst += n) {
            n = left < per ? left : per;
            error = cudaEventSynchronize(s->copied[i_stage]);
            if (error != cudaSuccess)
                break;
            fill(&parts[i], at, n, s->host[i_stage]);
            error = cudaMemcpyAsync(dst, s->host[i_stage], n * 2, cudaMemcpyHostToDevice,
                                    impl->stream);
            if (error == cudaSuccess)
                error = cudaEventRecord(s->copied[i_stage], impl->stream);
            i_stage = (i_stage + 1) % CUDA_STAGES;
        }
    }
    cuda_note(b, "copying weights", error);
    return cuda_wait(b);
}

/* Plans of the products that a weight may be used in. The head and the router give f32: logits
 * are summed and compared as they come. By its shape alone a weight can be one of them and a
 * projection too. */
static bool make_plans(struct backend *b, struct cuda_weight *cw, int32_t rows, int32_t cols)
{
    const struct backend_limits *l = &cuda_impl_of(b)->limits;
    bool is_head = rows == l->vocab, is_router = rows == l->E;
    int32_t max_rows = is_head ? cuda_head_rows(l) : l->max_tokens;
    cw->plan[0] = gemm_plan_make(b, cw->rows, rows, cols, false, max_rows);
    if (is_head || is_router)
        cw->plan[1] = gemm_plan_make(b, cw->rows, rows, cols, true, max_rows);
    return cw->plan[0] && (cw->plan[1] || !(is_head || is_router));
}

static int weight_open(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                       unsigned use, struct weight *w, struct errmsg *e)
{
    *w = (struct weight){.n_mats = n_mats,
                         .rows = rows,
                         .cols = cols,
                         .dtype = DTYPE_BF16,
                         .use = use & ~(unsigned)WEIGHT_BORROW};
    w->bytes = cuda_weight_bytes(b, n_mats, rows, cols, DTYPE_BF16, use);
    if (!cuda_impl_of(b)->has_workspace)
        return errmsg_set(e, ERR_INVALID, "backend cuda: a weight comes before the workspace");
    if (cols % 8)
        return errmsg_set(
            e, ERR_UNSUPPORTED,
            "backend cuda: weight [%d, %d, %d]: the columns must be a multiple of 8", n_mats,
            rows, cols);
    struct cuda_weight *cw = calloc(1, sizeof(*cw));
    w->data = cw;
    if (cw)
        cw->rows = w->embed = cuda_alloc(b, w->bytes);
    if (!cw || !cw->rows) {
        cuda_weight_free(b, w);
        return errmsg_set(e, ERR_NOMEM, "weight [%d, %d, %d]: no room on the device", n_mats,
                          rows, cols);
    }
    return 0;
}

static int weight_finish(struct backend *b, struct weight *w, struct errmsg *e)
{
    if (w->n_mats == 1 && (w->use & WEIGHT_MATMUL) &&
        !make_plans(b, w->data, w->rows, w->cols)) {
        errmsg_set(e, ERR_DEVICE, "weight [%d, %d]: cuBLASLt has no product for it", w->rows,
                   w->cols);
        cuda_weight_free(b, w);
        return ERR_DEVICE;
    }
    return 0;
}

int cuda_weight_make(struct backend *b, const struct weight_part *parts, int32_t n_parts,
                     int32_t n_mats, int32_t rows, int32_t cols, unsigned use,
                     struct weight *out, struct errmsg *e)
{
    int64_t found = 0, wanted = (int64_t)n_mats * rows;
    for (int32_t i = 0; i < n_parts; i++)
        found += parts[i].n_rows;
    if (found != wanted)
        return errmsg_set(e, ERR_INVALID, "weight: found %lld rows, accepted: %lld",
                          (long long)found, (long long)wanted);
    struct weight w;
    int rc = weight_open(b, n_mats, rows, cols, use, &w, e);
    if (rc != 0)
        return rc;
    const struct cuda_weight *cw = w.data;
    rc = copy_parts(b, parts, n_parts, cols, cw->rows);
    if (rc != 0) {
        errmsg_set(e, rc,
                   rc == ERR_NOMEM ? "weight [%d, %d, %d]: no pinned memory to copy through"
                                   : "weight [%d, %d, %d]: the device did not take it",
                   n_mats, rows, cols);
        cuda_weight_free(b, &w);
        return rc;
    }
    rc = weight_finish(b, &w, e);
    if (rc == 0)
        *out = w;
    return rc;
}

int cuda_weight_random(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                       unsigned use, uint64_t seed, float std, struct weight *out,
                       struct errmsg *e)
{
    struct weight w;
    int rc = weight_open(b, n_mats, rows, cols, use, &w, e);
    if (rc != 0)
        return rc;
    const struct cuda_weight *cw = w.data;
    cuda_note(b, "random weights",
              k_fill_normal(cw->rows, (int64_t)n_mats * rows * cols, 0, seed, std,
                            cuda_impl_of(b)->stream));
    rc = cuda_wait(b);
    if (rc != 0) {
        cuda_weight_free(b, &w);
        return errmsg_set(e, rc, "weight [%d, %d, %d]: the device did not make it", n_mats,
                          rows, cols);
    }
    rc = weight_finish(b, &w, e);
    if (rc == 0)
        *out = w;
    return rc;
}

void cuda_weight_free(struct backend *b, struct weight *w)
{
    struct cuda_weight *cw = w->data;
    if (cw)
        cuda_free(b, cw->rows);
    free(cw);
    *w = (struct weight){0};
}
