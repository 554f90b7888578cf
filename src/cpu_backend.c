/* The CPU backend's table: threads, memory, weights, workspace and steps.
 *
 * Operations run at once, when they are called; a step is done when it is ended. The contract
 * of two steps in flight is kept all the same, so that the engine is the same for every
 * backend. Engine thread, except the set-up calls before it starts. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cpu_impl.h"

/* ---- memory ---- */

/* Large blocks are asked for in huge pages: weights are streamed through once a step. */
enum { HUGE_PAGE_BYTES = 2 << 20 };

void *cpu_alloc(struct backend *b, size_t bytes)
{
    (void)b;
    size_t align = bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : CPU_ALIGN;
    if (bytes > SIZE_MAX - align)
        return NULL;
    size_t rounded = cpu_round_up(bytes ? bytes : 1, align);
    void *p = aligned_alloc(align, rounded);
    if (p && align == HUGE_PAGE_BYTES)
        madvise(p, rounded, MADV_HUGEPAGE);
    return p;
}

void cpu_free(struct backend *b, void *p)
{
    (void)b;
    free(p);
}

static int cpu_upload(struct backend *b, void *dst, const void *src_host, size_t bytes)
{
    (void)b;
    memcpy(dst, src_host, bytes);
    return 0;
}

static int cpu_download(struct backend *b, void *dst_host, const void *src, size_t bytes)
{
    (void)b;
    memcpy(dst_host, src, bytes);
    return 0;
}

/* ---- open and close ---- */

static int cpu_open(struct backend *b, int32_t n_threads, struct errmsg *e)
{
    if (n_threads < 0)
        return errmsg_set(e, ERR_INVALID, "threads: found %d, accepted: 0 (all) or more",
                          (int)n_threads);
    struct cpu_impl *impl = calloc(1, sizeof *impl);
    if (!impl)
        return errmsg_set(e, ERR_NOMEM, "cpu backend: out of memory");
    impl->pool = cpu_pool_open(n_threads);
    if (!impl->pool) {
        free(impl);
        return errmsg_set(
            e, ERR_NOMEM,
            "cpu backend: no memory or no more threads for cpu-threads %d%s (limits "
            "of the user or the unit?)",
            (int)n_threads, n_threads ? "" : ", which is one a processor");
    }
    b->ops = &backend_cpu_ops;
    b->act = DTYPE_F32;
    b->impl = impl;
    return 0;
}

static void cpu_close(struct backend *b)
{
    struct cpu_impl *impl = b->impl;
    if (!impl)
        return;
    cpu_free(b, impl->workspace);
    for (int i = 0; i < STEPS_IN_FLIGHT; i++)
        cpu_free(b, impl->ring[i].map);
    cpu_pool_close(impl->pool);
    free(impl);
    b->impl = NULL;
}

struct cpu_pool *cpu_impl_pool(struct backend *b)
{
    return ((struct cpu_impl *)b->impl)->pool;
}

void *cpu_impl_workspace(struct backend *b, size_t *bytes)
{
    struct cpu_impl *impl = b->impl;
    *bytes = impl->workspace_bytes;
    return impl->workspace;
}

/* ---- sizes ---- */

static int cpu_check(struct backend *b, const struct gdn_dims *gd, const struct attn_dims *ad,
                     const struct backend_limits *l, struct errmsg *e)
{
    (void)b;
    (void)l;
    if (gd && (gd->K % 16 || gd->V % 16 || gd->K > GDN_DIM_MAX || gd->V > GDN_DIM_MAX))
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cpu: linear_key_head_dim is %d, linear_value_head_dim %d; "
                          "accepted: multiples of 16 up to %d",
                          (int)gd->K, (int)gd->V, GDN_DIM_MAX);
    if (ad && (ad->D % 64 || ad->D > ATTN_DIM_MAX))
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cpu: head_dim is %d; accepted: a multiple of 64 up to %d",
                          (int)ad->D, ATTN_DIM_MAX);
    return 0;
}

/* ---- weights ---- */

static size_t embed_bytes(int32_t n_mats, int32_t rows, int32_t cols, enum dtype dtype)
{
    return (size_t)n_mats * rows * cols * dtype_bytes(dtype);
}

static size_t cpu_weight_bytes(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                               enum dtype dtype, unsigned use)
{
    (void)b;
    size_t bytes = 0;
    if (use & WEIGHT_MATMUL)
        bytes += cpu_pack_bytes(n_mats, rows, cols, dtype);
    if ((use & WEIGHT_EMBED) && !(use & WEIGHT_BORROW))
        bytes += embed_bytes(n_mats, rows, cols, dtype);
    return bytes;
}

/* Copies the parts behind each other; all have the weight's dtype. */
static void copy_parts(const struct weight_part *parts, int32_t n_parts, int32_t cols,
                       char *dst)
{
    for (int32_t i = 0; i < n_parts; i++) {
        size_t bytes = embed_bytes(1, 1, cols, parts[i].dtype) * (size_t)parts[i].n_rows;
        memcpy(dst, parts[i].rows, bytes);
        dst += bytes;
    }
}

/* Parts of different dtypes make an f32 weight. */
static enum dtype common_dtype(const struct weight_part *parts, int32_t n_parts)
{
    for (int32_t i = 1; i < n_parts; i++)
        if (parts[i].dtype != parts[0].dtype)
            return DTYPE_F32;
    return parts[0].dtype;
}

static int check_parts(const struct weight_part *parts, int32_t n_parts, int64_t n_rows,
                       unsigned use, struct errmsg *e)
{
    int64_t found = 0;
    for (int32_t i = 0; i < n_parts; i++) {
        found += parts[i].n_rows;
        if ((use & WEIGHT_EMBED) && parts[i].dtype != parts[0].dtype)
            return errmsg_set(e, ERR_UNSUPPORTED, "embedding: parts of different dtypes");
    }
    if (n_parts < 1 || found != n_rows)
        return errmsg_set(e, ERR_INVALID, "weight: found %lld rows, accepted: %lld",
                          (long long)found, (long long)n_rows);
    return 0;
}

static void cpu_weight_free(struct backend *b, struct weight *w)
{
    cpu_free(b, w->data);
    if (!(w->use & WEIGHT_BORROW))
        cpu_free(b, w->embed);
    *w = (struct weight){0};
}

static int cpu_weight_make(struct backend *b, const struct weight_part *parts, int32_t n_parts,
                           int32_t n_mats, int32_t rows, int32_t cols, unsigned use,
                           struct weight *out, struct errmsg *e)
{
    int rc = check_parts(parts, n_parts, (int64_t)n_mats * rows, use, e);
    if (rc)
        return rc;
    if (!(use & WEIGHT_EMBED) || n_parts != 1)
        use &= ~(unsigned)WEIGHT_BORROW;
    struct weight w = {.n_mats = n_mats, .rows = rows, .cols = cols, .use = use};
    w.dtype = common_dtype(parts, n_parts);
    w.bytes = cpu_weight_bytes(b, n_mats, rows, cols, w.dtype, use);
    if (use & WEIGHT_MATMUL) {
        w.data = cpu_alloc(b, cpu_pack_bytes(n_mats, rows, cols, w.dtype));
        if (!w.data)
            goto fail;
        cpu_pack(cpu_impl_pool(b), parts, n_parts, n_mats, rows, cols, w.dtype, w.data);
    }
    if (use & WEIGHT_BORROW) {
        w.embed = (void *)parts[0].rows;
    } else if (use & WEIGHT_EMBED) {
        w.embed = cpu_alloc(b, embed_bytes(n_mats, rows, cols, w.dtype));
        if (!w.embed)
            goto fail;
        copy_parts(parts, n_parts, cols, w.embed);
    }
    *out = w;
    return 0;
fail:
    cpu_weight_free(b, &w);
    return errmsg_set(e, ERR_NOMEM, "weight [%d, %d, %d]: no room", (int)n_mats, (int)rows,
                      (int)cols);
}

/* ---- workspace and steps ---- */

static size_t map_bytes(const struct backend_limits *l)
{
    return (3 * cpu_max_chunks(l) + l->max_seqs + 1) * sizeof(int32_t);
}

static size_t ops_workspace_bytes(struct backend *b, const struct backend_limits *l)
{
    int32_t n_threads = cpu_pool_threads(cpu_impl_pool(b));
    size_t need[] = {
        cpu_gdn_workspace_bytes(l, n_threads),
        cpu_attn_workspace_bytes(l, n_threads),
        cpu_moe_workspace_bytes(l, n_threads),
        cpu_head_workspace_bytes(l, n_threads),
    };
    size_t most = 0;
    for (size_t i = 0; i < sizeof need / sizeof *need; i++)
        most = need[i] > most ? need[i] : most;
    return most;
}

static size_t cpu_workspace_bytes(struct backend *b, const struct backend_limits *l)
{
    return ops_workspace_bytes(b, l) + STEPS_IN_FLIGHT * map_bytes(l) +
           cpu_gemm_bytes(cpu_impl_pool(b));
}

static int cpu_workspace_make(struct backend *b, const struct backend_limits *l,
                              struct errmsg *e)
{
    struct cpu_impl *impl = b->impl;
    if (impl->n_flights)
        return errmsg_set(e, ERR_INVALID, "cpu backend: workspace made with steps in flight");
    cpu_free(b, impl->workspace);
    impl->workspace_bytes = ops_workspace_bytes(b, l);
    impl->workspace = cpu_alloc(b, impl->workspace_bytes);
    bool failed = !impl->workspace;
    for (int i = 0; i < STEPS_IN_FLIGHT; i++) {
        cpu_free(b, impl->ring[i].map);
        impl->ring[i].map = cpu_alloc(b, map_bytes(l));
        failed |= !impl->ring[i].map;
    }
    if (failed)
        return errmsg_set(e, ERR_NOMEM, "cpu backend: no room for %zu bytes of workspace",
                          impl->workspace_bytes + STEPS_IN_FLIGHT * map_bytes(l));
    impl->limits = *l;
    return 0;
}

static int cpu_step_begin(struct backend *b, const struct batch_host *h, struct batch *out)
{
    struct cpu_impl *impl = b->impl;
    const struct backend_limits *l = &impl->limits;
    if (impl->n_flights == STEPS_IN_FLIGHT)
        return ERR_FULL;
    if (h->n_tokens > l->max_tokens || h->n_seqs > l->max_seqs || h->n_rows > l->max_rows ||
        (size_t)h->n_chunks > cpu_max_chunks(l))
        return ERR_TOO_LARGE;
    struct cpu_step *s = &impl->ring[(impl->i_oldest + impl->n_flights++) % STEPS_IN_FLIGHT];
    s->is_ended = false;
    int32_t NC = h->n_chunks;
    *out = (struct batch){
        .n_tokens = h->n_tokens,
        .n_seqs = h->n_seqs,
        .n_chunks = NC,
        .n_rows = h->n_rows,
        .max_pages = h->max_pages,
        .max_len = h->max_len,
        .tokens = h->tokens,
        .positions = h->positions,
        .cu_seqlens = h->cu_seqlens,
        .start = h->start,
        .slots = h->slots,
        .save_slots = h->save_slots,
        .page_table = h->page_table,
        .rows = h->rows,
        .targets = h->targets,
        .row_top = h->row_top,
        .n_samples = h->n_samples,
        .samples = h->samples,
        .map = {s->map, s->map + NC, s->map + 2 * (size_t)NC, s->map + 3 * (size_t)NC},
    };
    b->ops->chunk_map(b, out);
    return 0;
}

static void cpu_chunk_map(struct backend *b, struct batch *batch)
{
    (void)b;
    struct chunk_map *m = &batch->map;
    int32_t flat = 0;
    for (int32_t n = 0; n < batch->n_seqs; n++) {
        m->seq_first[n] = flat;
        int32_t first = batch->cu_seqlens[n], end = batch->cu_seqlens[n + 1];
        for (int32_t t = first, i = 0; t < end; t += CHUNK_TOKENS, i++, flat++) {
            m->seq[flat] = n;
            m->index[flat] = i;
            m->tok[flat] = t;
        }
    }
    m->seq_first[batch->n_seqs] = flat;
}

static int cpu_step_end(struct backend *b, const struct batch *batch,
                        const struct row_result *src, struct row_result *dst_host)
{
    struct cpu_impl *impl = b->impl;
    if (!impl->n_flights)
        return ERR_INVALID;
    struct cpu_step *s = &impl->ring[(impl->i_oldest + impl->n_flights - 1) % STEPS_IN_FLIGHT];
    if (s->is_ended)
        return ERR_INVALID;
    if (batch->n_rows)
        memcpy(dst_host, src, (size_t)batch->n_rows * sizeof *src);
    s->is_ended = true;
    return 0;
}

static int cpu_step_done(struct backend *b, bool wait)
{
    struct cpu_impl *impl = b->impl;
    if (!impl->n_flights || !impl->ring[impl->i_oldest].is_ended)
        return wait ? ERR_INVALID : 0;
    impl->i_oldest = (impl->i_oldest + 1) % STEPS_IN_FLIGHT;
    impl->n_flights--;
    return 1;
}

const struct backend_ops backend_cpu_ops = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .memory = cpu_memory,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_upload,
    .download = cpu_download,
    .check = cpu_check,
    .weight_bytes = cpu_weight_bytes,
    .weight_make = cpu_weight_make,
    .weight_free = cpu_weight_free,
    .workspace_bytes = cpu_workspace_bytes,
    .workspace_make = cpu_workspace_make,
    .step_begin = cpu_step_begin,
    .chunk_map = cpu_chunk_map,
    .step_end = cpu_step_end,
    .step_done = cpu_step_done,
    .embed = cpu_embed,
    .rmsnorm = cpu_rmsnorm,
    .matmul = cpu_matmul,
    .gdn_conv = cpu_gdn_conv,
    .gdn_delta = cpu_gdn_delta,
    .attn_prep = cpu_attn_prep,
    .attn = cpu_attn,
    .moe_route = cpu_moe_route,
    .moe_experts = cpu_moe_experts,
    .swiglu = cpu_swiglu,
    .head = cpu_head,
    .state_bytes = cpu_state_bytes,
    .page_bytes = cpu_page_bytes,
    .state_pool_make = cpu_state_pool_make,
    .kv_pool_make = cpu_kv_pool_make,
    .state_pool_free = cpu_state_pool_free,
    .kv_pool_free = cpu_kv_pool_free,
    .state_read = cpu_state_read,
    .state_write = cpu_state_write,
    .kv_read = cpu_kv_read,
    .kv_write = cpu_kv_write,
    .stage_alloc = cpu_stage_alloc,
    .stage_free = cpu_stage_free,
    .slot_get = cpu_slot_get,
    .slot_put = cpu_slot_put,
    .page_get = cpu_page_get,
    .page_put = cpu_page_put,
    .slot_unpack = cpu_slot_unpack,
    .slot_pack = cpu_slot_pack,
    .page_unpack = cpu_page_unpack,
    .page_pack = cpu_page_pack,
    .state_copy = cpu_state_copy,
    .page_copy = cpu_page_copy,
    .state_poison = cpu_state_poison,
    .page_poison = cpu_page_poison,
};
