/* Steps that are replayed: the launches of a step's layers, recorded once for a shape of step
 * and enqueued again by one call.
 *
 * A launch costs the host some 5 us and a step of 40 layers has 750 of them; a graph costs the
 * host the same few microseconds for any number. What is recorded holds the counts that size
 * the grids and the addresses of one entry of the metadata ring, so steps share a record when
 * their counts, rounded up, are equal: rows and chunks beyond the batch's own belong to no
 * sequence (kernels.h, struct k_batch), and added sequences are empty. Rounding is fine enough
 * that the products' tiles have the same number of rows. Bits do not change: nothing of a row
 * depends on what else is in the batch.
 *
 * A shape is recorded when it is seen again, behind a launch of the same step, so that the
 * device is busy meanwhile. Recording and its failure are harmless: the step goes on
 * without. */
#include <string.h>

#include "cuda_impl.h"

/* Sightings from which on a shape's counts are rounded up and its launches recorded. */
enum { GRAPH_MIN_SEEN = 3 };

static int32_t up_to(int32_t n, int32_t unit, int32_t most)
{
    int32_t up = (n + unit - 1) / unit * unit;
    return up < most ? up : most;
}

static int32_t up_to_power(int32_t n, int32_t least, int32_t most)
{
    int32_t up = least;
    while (up < n && up <= most / 2)
        up *= 2;
    return up >= n && up < most ? up : most;
}

void cuda_shape_round(const struct backend_limits *l, struct cuda_shape *s)
{
    int32_t T = s->n_tokens, N = s->n_seqs;
    s->n_tokens = up_to(T, T <= 64 ? 16 : T <= 512 ? 64 : 128, l->max_tokens);
    s->n_seqs = up_to(N, N <= 8 ? 1 : N <= 32 ? 4 : N <= 128 ? 16 : 64, l->max_seqs);
    s->n_chunks = s->n_tokens / CHUNK_TOKENS + s->n_seqs;
    s->max_len = up_to_power(s->max_len, CHUNK_TOKENS, s->n_tokens);
    s->max_pages = up_to_power(s->max_pages, 1, l->max_pages);
}

static void graph_drop(struct cuda_graph *g)
{
    for (int i = 0; i < CUDA_STEPS; i++)
        if (g->exec[i])
            cudaGraphExecDestroy(g->exec[i]);
    memset(g, 0, sizeof(*g));
}

void cuda_graphs_free(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    for (int i = 0; i < CUDA_GRAPHS; i++)
        graph_drop(&impl->graphs[i]);
}

struct cuda_graph *cuda_graph_find(struct backend *b, struct cuda_shape *shape)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct cuda_shape rounded = *shape;
    struct cuda_graph *oldest = &impl->graphs[0], *found = NULL;
    cuda_shape_round(&impl->limits, &rounded);
    for (int i = 0; i < CUDA_GRAPHS && !found; i++) {
        struct cuda_graph *g = &impl->graphs[i];
        if (g->n_seen > 0 && memcmp(&g->shape, &rounded, sizeof(rounded)) == 0)
            found = g;
        oldest = g->last_seen < oldest->last_seen ? g : oldest;
    }
    if (!found) {
        /* Steps in flight are the latest seen: with this many entries the oldest is idle. */
        graph_drop(oldest);
        found = oldest;
        found->shape = rounded;
    }
    found->last_seen = ++impl->n_seen;
    found->n_seen++;
    if (found->n_seen < GRAPH_MIN_SEEN || found->is_bad)
        return NULL;
    *shape = rounded;
    return found;
}

/* Its entry in the ring. */
static int ring_index(const struct cuda_impl *impl, const struct cuda_step *s)
{
    return (int)(s - impl->ring);
}

bool cuda_replay(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct cuda_step *s = cuda_newest(b);
    if (!s->graph || !s->graph->exec[ring_index(impl, s)])
        return false;
    s->is_replayed = true;
    cuda_note(b, "replay", cudaGraphLaunch(s->graph->exec[ring_index(impl, s)], impl->stream));
    return true;
}

bool cuda_record_begin(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct cuda_step *s = cuda_newest(b);
    if (!s->graph || s->graph->is_bad || impl->error != cudaSuccess)
        return false;
    impl->is_recording =
        cudaStreamBeginCapture(impl->stream, cudaStreamCaptureModeRelaxed) == cudaSuccess;
    impl->is_record_bad = false;
    s->graph->is_bad = !impl->is_recording;
    return impl->is_recording;
}

void cuda_record_end(struct backend *b, bool is_whole)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct cuda_step *s = cuda_newest(b);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaError_t error = cudaStreamEndCapture(impl->stream, &graph);
    impl->is_recording = false;
    if (error == cudaSuccess && is_whole && !impl->is_record_bad)
        error = cudaGraphInstantiate(&exec, graph, 0);
    /* Behind this the next step's metadata is copied, for which the computing stream waits. */
    if (error == cudaSuccess && exec)
        error = cudaGraphUpload(exec, impl->in);
    if (graph)
        cudaGraphDestroy(graph);
    s->graph->is_bad = error != cudaSuccess || impl->is_record_bad;
    s->graph->exec[ring_index(impl, s)] = exec;
    /* A record that failed leaves the device and the step as they were. */
    if (s->graph->is_bad)
        cudaGetLastError();
}
