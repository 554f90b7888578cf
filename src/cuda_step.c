/* Steps of the CUDA backend: workspace, the ring of metadata and results, the chunk map, times.
 *
 * A step's metadata is packed into a pinned buffer and copied at once on a stream of its own;
 * the compute stream waits for it by an event, as the result stream waits for the head. The
 * host waits in step_done alone. A ring entry is used again only after its step was given by
 * step_done, so nothing here is guarded further. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_impl.h"

enum { PACK_ALIGN = 256 };

/* ---- sizes ---- */

static size_t ints(size_t n)
{
    return cuda_round_up(n * sizeof(int32_t), PACK_ALIGN);
}

static size_t words(size_t bytes)
{
    return bytes / sizeof(int32_t);
}

/* Metadata of the largest step. */
static size_t meta_bytes(const struct backend_limits *l)
{
    size_t T = (size_t)l->max_tokens, N = (size_t)l->max_seqs, R = (size_t)l->max_rows;
    return 2 * ints(T) + ints(N + 1) + 2 * ints(N) + ints((size_t)cuda_max_chunks(l)) +
           ints(N * (size_t)l->max_pages) + 3 * ints(R) +
           ints(N * words(sizeof(struct k_sample_row))) +
           ints(SAMPLE_MAX_ADJUST * words(sizeof(struct k_adjust)));
}

/* The chunk map behind it: seq, index, tok, first chunks, order. */
static size_t map_bytes(const struct backend_limits *l)
{
    return 3 * ints((size_t)cuda_max_chunks(l)) + ints((size_t)l->max_seqs + 1) +
           ints((size_t)l->max_seqs);
}

static size_t gdn_bytes(const struct backend_limits *l)
{
    return l->HV ? k_gdn_delta_work_bytes(cuda_max_chunks(l), l->HV) : 0;
}

size_t cuda_workspace_bytes(struct backend *b, const struct backend_limits *l)
{
    return CUDA_STEPS * (meta_bytes(l) + map_bytes(l)) + gdn_bytes(l) + cuda_ops_bytes(b, l);
}

/* ---- making ---- */

static void trace_close(struct cuda_step *s)
{
    for (int32_t i = 0; s->marks && i <= TRACE_SPANS; i++)
        if (s->marks[i])
            cudaEventDestroy(s->marks[i]);
    free(s->marks);
    free(s->spans);
    s->marks = NULL;
    s->spans = NULL;
}

static void step_free(struct backend *b, struct cuda_step *s)
{
    cudaEvent_t events[] = {s->copied_in, s->begun, s->copied_out};
    for (size_t i = 0; i < sizeof(events) / sizeof(events[0]); i++)
        if (events[i])
            cudaEventDestroy(events[i]);
    trace_close(s);
    if (s->host)
        cudaFreeHost(s->host);
    if (s->results)
        cudaFreeHost(s->results);
    cuda_free(b, s->dev);
    memset(s, 0, sizeof(*s));
}

void cuda_workspace_free(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    for (int i = 0; i < CUDA_STEPS; i++)
        step_free(b, &impl->ring[i]);
    cuda_graphs_free(b);
    cuda_free(b, impl->gdn_work);
    cuda_free(b, impl->work);
    impl->gdn_work = NULL;
    impl->work = NULL;
    impl->has_workspace = false;
}

static cudaError_t step_make(struct backend *b, const struct backend_limits *l,
                             struct cuda_step *s)
{
    const size_t results = (size_t)l->max_rows * sizeof(*s->results);
    s->dev = cuda_alloc(b, meta_bytes(l) + map_bytes(l));
    if (!s->dev)
        return cudaErrorMemoryAllocation;
    cudaError_t error = cudaHostAlloc((void **)&s->host, meta_bytes(l), cudaHostAllocDefault);
    if (error == cudaSuccess)
        error = cudaHostAlloc((void **)&s->results, results, cudaHostAllocDefault);
    /* Waiting for a step sleeps: the engine's core is free meanwhile. */
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&s->copied_out,
                                         cudaEventDisableTiming | cudaEventBlockingSync);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&s->copied_in, cudaEventDisableTiming);
    if (error == cudaSuccess)
        error = cudaEventCreate(&s->begun);
    return error;
}

int cuda_workspace_make(struct backend *b, const struct backend_limits *l, struct errmsg *e)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cudaError_t error = cudaSuccess;
    if (impl->n_flights)
        return errmsg_set(e, ERR_INVALID, "backend cuda: workspace made with steps in flight");
    int rc = cuda_check(b, NULL, NULL, l, e);
    if (rc != 0)
        return rc;
    cuda_workspace_free(b);
    for (int i = 0; i < CUDA_STEPS && error == cudaSuccess; i++)
        error = step_make(b, l, &impl->ring[i]);
    impl->work_bytes = cuda_ops_bytes(b, l);
    impl->work = cuda_alloc(b, impl->work_bytes);
    if (!impl->work)
        error = cudaErrorMemoryAllocation;
    if (gdn_bytes(l) && error == cudaSuccess) {
        impl->gdn_work = cuda_alloc(b, gdn_bytes(l));
        error = impl->gdn_work ? k_gdn_work_init(impl->gdn_work, gdn_bytes(l), impl->stream)
                               : cudaErrorMemoryAllocation;
    }
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(impl->stream);
    if (error != cudaSuccess) {
        cudaGetLastError();
        cuda_workspace_free(b);
        return errmsg_set(e, error == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE,
                          "backend cuda: %zu bytes of workspace: %s",
                          cuda_workspace_bytes(b, l), cudaGetErrorString(error));
    }
    impl->limits = *l;
    impl->has_workspace = true;
    return 0;
}

/* ---- begin ---- */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct cuda_step *cuda_newest(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    return &impl->ring[(impl->i_oldest + impl->n_flights - 1) % CUDA_STEPS];
}

/* Copies n ints behind what was packed, and up to n_padded of `pad`; returns where they will
 * lie on the device. */
static const int32_t *pack(const struct cuda_step *s, size_t *at, const int32_t *src, size_t n,
                           size_t n_padded, int32_t pad)
{
    const int32_t *there = (const int32_t *)(s->dev + *at);
    int32_t *to = (int32_t *)(s->host + *at);
    if (n > 0)
        memcpy(to, src, n * sizeof(*to));
    for (size_t i = n; i < n_padded; i++)
        to[i] = pad;
    *at += ints(n_padded);
    return there;
}

/* Columns of the page table that some sequence has. */
static int32_t widest(const struct cuda_impl *impl, const struct batch_host *h)
{
    int32_t most = 0;
    if (!h->page_table)
        return 0;
    if (!impl->page_tokens)
        return h->max_pages;
    for (int32_t i = 0; i < h->n_seqs; i++) {
        int32_t end = h->start[i] + h->cu_seqlens[i + 1] - h->cu_seqlens[i];
        int32_t n = (end + impl->page_tokens - 1) / impl->page_tokens;
        most = n > most ? n : most;
    }
    return most;
}

/* The page table in rows of `width`; of a row longer than the source's, the rest is not set:
 * nothing reads it. */
static void pack_pages(const struct cuda_step *s, size_t *at, const struct batch_host *h,
                       int32_t n_seqs, int32_t width)
{
    int32_t n = width < h->max_pages ? width : h->max_pages;
    int32_t *to = (int32_t *)(s->host + *at);
    for (int32_t i = 0; i < h->n_seqs && n > 0; i++)
        memcpy(to + (size_t)i * (size_t)width, h->page_table + (size_t)i * (size_t)h->max_pages,
               (size_t)n * sizeof(int32_t));
    *at += ints((size_t)n_seqs * (size_t)width);
}

/* The samples with their adjustments in one array behind them. */
static void pack_samples(const struct cuda_step *s, size_t *at, const struct batch_host *h,
                         struct cuda_samples *out)
{
    struct k_sample_row *rows = (struct k_sample_row *)(void *)(s->host + *at);
    *out = (struct cuda_samples){.n = h->n_samples, .rows = (const void *)(s->dev + *at)};
    *at += ints((size_t)h->n_samples * words(sizeof(*rows)));
    struct k_adjust *adjust = (struct k_adjust *)(void *)(s->host + *at);
    out->adjust = (struct k_adjust *)(void *)(s->dev + *at);
    int32_t n = 0;
    for (int32_t i = 0; i < h->n_samples; i++) {
        const struct row_sample *q = &h->samples[i];
        rows[i] = (struct k_sample_row){.row = q->row,
                                        .inv_temperature = q->inv_temperature,
                                        .top_k = q->top_k,
                                        .top_p = q->top_p,
                                        .min_p = q->min_p,
                                        .u = q->u,
                                        .n_adjust = q->n_adjust,
                                        .adjust0 = n};
        for (int32_t k = 0; k < q->n_adjust; k++)
            adjust[n++] =
                (struct k_adjust){q->adjust[k].id, q->adjust[k].scale, q->adjust[k].add};
    }
    *at += ints((size_t)n * words(sizeof(*adjust)));
}

static bool samples_fit(const struct batch_host *h, const struct backend_limits *l)
{
    int64_t n = 0;
    for (int32_t i = 0; i < h->n_samples; i++)
        n += h->samples[i].n_adjust;
    return h->n_samples <= l->max_seqs && n <= SAMPLE_MAX_ADJUST;
}

/* What the layers read comes first, at places that depend on the shape alone. */
static size_t pack_step(struct cuda_impl *impl, const struct cuda_step *s,
                        const struct batch_host *h, const struct cuda_shape *shape,
                        struct batch *out)
{
    size_t at = 0, T = (size_t)h->n_tokens, N = (size_t)h->n_seqs, R = (size_t)h->n_rows;
    size_t T_padded = (size_t)shape->n_tokens, N_padded = (size_t)shape->n_seqs;
    *out = (struct batch){.n_tokens = shape->n_tokens,
                          .n_seqs = shape->n_seqs,
                          .n_chunks = shape->n_chunks,
                          .n_rows = h->n_rows,
                          .max_pages = shape->max_pages,
                          .max_len = shape->max_len};
    out->tokens = pack(s, &at, h->tokens, T, T_padded, 0);
    out->positions = pack(s, &at, h->positions, T, T_padded, 0);
    out->cu_seqlens = pack(s, &at, h->cu_seqlens, N + 1, N_padded + 1, h->n_tokens);
    /* Empty sequences that are not at their start leave slot 0 alone. */
    out->start = pack(s, &at, h->start, N, N_padded, 1);
    out->slots = pack(s, &at, h->slots, N, N_padded, 0);
    out->save_slots = pack(s, &at, h->save_slots, h->save_slots ? (size_t)h->n_chunks : 0,
                           (size_t)shape->n_chunks, -1);
    out->page_table = (const int32_t *)(s->dev + at);
    if (h->page_table)
        pack_pages(s, &at, h, shape->n_seqs, shape->max_pages);
    out->rows = pack(s, &at, h->rows, R, R, 0);
    out->targets = pack(s, &at, h->targets, R, R, 0);
    out->row_top = pack(s, &at, h->row_top, R, R, 0);
    pack_samples(s, &at, h, &impl->samples[s - impl->ring]);
    return at;
}

static int32_t *map_part(char **at, size_t n)
{
    int32_t *p = (int32_t *)*at;
    *at += ints(n);
    return p;
}

/* seq_order has no place in struct chunk_map; it lies behind seq_first. */
static int32_t *order_of(const struct batch *b)
{
    return (int32_t *)((char *)b->map.seq_first + ints((size_t)b->n_seqs + 1));
}

static void place_map(const struct cuda_impl *impl, const struct cuda_step *s,
                      struct batch *out)
{
    char *at = s->dev + meta_bytes(&impl->limits);
    size_t NC = (size_t)out->n_chunks;
    out->map.seq = map_part(&at, NC);
    out->map.index = map_part(&at, NC);
    out->map.tok = map_part(&at, NC);
    out->map.seq_first = (int32_t *)at;
}

struct k_batch cuda_batch(const struct batch *b)
{
    return (struct k_batch){.n_tokens = b->n_tokens,
                            .n_seqs = b->n_seqs,
                            .n_chunks = b->n_chunks,
                            .max_len = b->max_len,
                            .cu_seqlens = b->cu_seqlens,
                            .start = b->start,
                            .slots = b->slots,
                            .save_slots = b->save_slots,
                            .chunk_seq = b->map.seq,
                            .chunk_index = b->map.index,
                            .chunk_tok = b->map.tok,
                            .seq_first = b->map.seq_first,
                            .seq_order = order_of(b)};
}

void cuda_chunk_map(struct backend *b, struct batch *batch)
{
    struct k_chunk_map k = {.b = cuda_batch(batch)};
    cuda_note(b, "chunk_map", k_chunk_map(&k, cuda_impl_of(b)->stream));
    cuda_mark(b, "chunk_map");
}

int cuda_step_begin(struct backend *b, const struct batch_host *h, struct batch *out)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    const struct backend_limits *l = &impl->limits;
    if (impl->error != cudaSuccess)
        return ERR_DEVICE;
    if (impl->n_flights == CUDA_STEPS)
        return ERR_FULL;
    if (h->n_tokens > l->max_tokens || h->n_seqs > l->max_seqs || h->n_rows > l->max_rows ||
        h->max_pages > l->max_pages || h->n_chunks > cuda_max_chunks(l) || !samples_fit(h, l))
        return ERR_TOO_LARGE;
    /* The engine's thread is not the one that opened the device. */
    cudaSetDevice(impl->device);
    impl->n_flights++;
    struct cuda_step *s = cuda_newest(b);
    s->is_ended = false;
    s->n_spans = 0;
    s->follows = impl->n_flights > 1;
    s->is_traced = impl->is_tracing;
    s->is_replayed = false;
    struct cuda_shape shape = {h->n_tokens, h->n_seqs, h->n_chunks, h->max_len,
                               widest(impl, h)};
    /* A traced step is launched operation by operation. */
    s->graph =
        h->may_pad && !s->is_traced && h->n_tokens > 0 ? cuda_graph_find(b, &shape) : NULL;
    s->i_end = impl->i_end = (impl->i_end + 1) % CUDA_ENDS;
    size_t bytes = pack_step(impl, s, h, &shape, out);
    s->n_live = s->graph ? out->cu_seqlens + out->n_seqs : NULL;
    place_map(impl, s, out);
    cuda_note(b, "step metadata",
              cudaMemcpyAsync(s->dev, s->host, bytes, cudaMemcpyHostToDevice, impl->in));
    cuda_note(b, "step metadata", cudaEventRecord(s->copied_in, impl->in));
    cuda_note(b, "step metadata", cudaStreamWaitEvent(impl->stream, s->copied_in, 0));
    cuda_note(b, "step begin", cudaEventRecord(s->begun, impl->stream));
    if (s->is_traced) {
        cuda_note(b, "trace", cudaEventRecord(s->marks[0], impl->stream));
        s->marked_ns = now_ns();
    }
    b->ops->chunk_map(b, out);
    return 0;
}

/* ---- end ---- */

int cuda_step_end(struct backend *b, const struct batch *batch, const struct row_result *src,
                  struct row_result *dst_host)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct cuda_step *s = impl->n_flights ? cuda_newest(b) : NULL;
    if (!s || s->is_ended)
        return ERR_INVALID;
    s->is_ended = true;
    s->dst = dst_host;
    s->n_rows = batch->n_rows;
    cuda_note(b, "step end", cudaEventRecord(impl->ends[s->i_end], impl->stream));
    cuda_note(b, "step end", cudaStreamWaitEvent(impl->out, impl->ends[s->i_end], 0));
    if (batch->n_rows > 0)
        cuda_note(b, "step results",
                  cudaMemcpyAsync(s->results, src, (size_t)batch->n_rows * sizeof(*src),
                                  cudaMemcpyDeviceToHost, impl->out));
    cuda_note(b, "step end", cudaEventRecord(s->copied_out, impl->out));
    return impl->error == cudaSuccess ? 0 : ERR_DEVICE;
}

/* Microseconds between two events that have passed. */
static float us_between(cudaEvent_t from, cudaEvent_t to)
{
    float ms = 0;
    return cudaEventElapsedTime(&ms, from, to) == cudaSuccess ? ms * 1e3f : 0;
}

static void measure(struct cuda_impl *impl, struct cuda_step *s)
{
    cudaEvent_t end = impl->ends[s->i_end];
    cudaEvent_t end_before = impl->ends[(s->i_end + CUDA_ENDS - 1) % CUDA_ENDS];
    impl->times = (struct step_times){
        .gap_us = s->follows ? us_between(end_before, s->begun) : -1,
        .device_us = us_between(s->begun, end),
        .is_replayed = s->is_replayed,
        .n_spans = s->n_spans,
        .spans = s->spans,
    };
    for (int32_t i = 0; i < s->n_spans; i++)
        s->spans[i].us = us_between(s->marks[i], s->marks[i + 1]);
}

void cuda_step_times(struct backend *b, struct step_times *out)
{
    *out = cuda_impl_of(b)->times;
}

int cuda_step_done(struct backend *b, bool wait)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    if (!impl->n_flights || !impl->ring[impl->i_oldest].is_ended)
        return wait ? ERR_INVALID : 0;
    if (impl->error != cudaSuccess)
        return ERR_DEVICE;
    struct cuda_step *s = &impl->ring[impl->i_oldest];
    cudaError_t error =
        wait ? cudaEventSynchronize(s->copied_out) : cudaEventQuery(s->copied_out);
    if (error == cudaErrorNotReady)
        return 0;
    if (error != cudaSuccess) {
        cuda_note(b, "step", error);
        return ERR_DEVICE;
    }
    if (s->n_rows > 0)
        memcpy(s->dst, s->results, (size_t)s->n_rows * sizeof(*s->dst));
    measure(impl, s);
    impl->i_oldest = (impl->i_oldest + 1) % CUDA_STEPS;
    impl->n_flights--;
    return 1;
}

/* ---- tracing ---- */

int cuda_trace(struct backend *b, bool on)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    for (int i = 0; on && i < CUDA_STEPS; i++) {
        struct cuda_step *s = &impl->ring[i];
        if (s->marks)
            continue;
        s->marks = calloc(TRACE_SPANS + 1, sizeof(*s->marks));
        s->spans = calloc(TRACE_SPANS, sizeof(*s->spans));
        bool is_good = s->marks && s->spans;
        for (int32_t k = 0; is_good && k <= TRACE_SPANS; k++)
            is_good = cudaEventCreate(&s->marks[k]) == cudaSuccess;
        if (!is_good) {
            trace_close(s);
            return ERR_NOMEM;
        }
    }
    impl->is_tracing = on;
    return 0;
}

void cuda_mark(struct backend *b, const char *name)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    if (!impl->n_flights)
        return;
    struct cuda_step *s = cuda_newest(b);
    if (!s->is_traced || s->is_ended || s->n_spans == TRACE_SPANS)
        return;
    struct step_span *span = &s->spans[s->n_spans++];
    span->name = name;
    span->host_us = (float)(now_ns() - s->marked_ns) / 1e3f;
    cuda_note(b, "trace", cudaEventRecord(s->marks[s->n_spans], impl->stream));
    s->marked_ns = now_ns();
}
