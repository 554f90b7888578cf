/* The operations of the CUDA backend: each turns its arguments into a kernel's and enqueues it.
 * The contracts are backend.h's, the kernels' are kernels.h's. What is carved from the
 * workspace belongs to one operation: the stream runs them in order. */
#include "cuda_impl.h"

_Static_assert(sizeof(struct row_result) == sizeof(struct k_row_result) &&
                   offsetof(struct row_result, n_bad) == offsetof(struct k_row_result, n_bad),
               "the head's kernel writes struct row_result");

/* Logits of a block of rows stay under this: with h they fit in the 1 GiB that the head may
 * take for any vocabulary. */
enum { HEAD_LOGITS_BYTES = 256 << 20, HEAD_MAX_ROWS = 1024, HEAD_MIN_ROWS = 16 };

/* ---- workspace ---- */

static size_t part(size_t bytes)
{
    return cuda_round_up(bytes, CUDA_ALIGN);
}

static int32_t head_ld(int32_t vocab)
{
    return (vocab + 3) / 4 * 4;
}

int32_t cuda_head_rows(const struct backend_limits *l)
{
    int64_t rows = HEAD_LOGITS_BYTES / (4 * (int64_t)head_ld(l->vocab) + 1);
    rows = rows / HEAD_MIN_ROWS * HEAD_MIN_ROWS;
    rows = rows < HEAD_MIN_ROWS ? HEAD_MIN_ROWS : rows > HEAD_MAX_ROWS ? HEAD_MAX_ROWS : rows;
    return rows < l->max_rows ? (int32_t)rows : l->max_rows;
}

static size_t head_bytes(const struct backend_limits *l)
{
    size_t rows = (size_t)cuda_head_rows(l);
    return part(rows * (size_t)l->M * 2) + part(rows * (size_t)head_ld(l->vocab) * 4);
}

static size_t moe_bytes(const struct backend_limits *l)
{
    size_t T = (size_t)l->max_tokens, places = T * (size_t)l->top_k;
    if (!l->E)
        return 0;
    size_t route = part(T * (size_t)l->E * 4);
    size_t experts = part(k_moe_list_bytes(l->max_tokens, l->top_k, l->E)) +
                     part(places * (size_t)l->moe_F * 2) + part(places * (size_t)l->M * 2);
    return route > experts ? route : experts;
}

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

size_t cuda_ops_bytes(struct backend *b, const struct backend_limits *l)
{
    size_t attn =
        l->HQ ? k_attn_work_bytes(cuda_impl_of(b)->dev.n_sms, cuda_max_chunks(l), l->HQ) : 0;
    return max_size(attn, max_size(head_bytes(l), moe_bytes(l)));
}

/* ---- rows ---- */

void cuda_embed(struct backend *b, const struct op_embed *a)
{
    struct k_embed k = {.n_tokens = a->b->n_tokens,
                        .M = a->w->cols,
                        .tokens = a->b->tokens,
                        .w = a->w->embed,
                        .x = a->x};
    cuda_note(b, "embed", k_embed(&k, cuda_impl_of(b)->stream));
    cuda_mark(b, "embed");
}

void cuda_rmsnorm(struct backend *b, const struct op_rmsnorm *a)
{
    struct k_rmsnorm k = {.n_rows = a->n_rows,
                          .dim = a->dim,
                          .eps = a->eps,
                          .x = a->x,
                          .y = a->y,
                          .w = a->w,
                          .h = a->h};
    cuda_note(b, "rmsnorm", k_rmsnorm(&k, cuda_impl_of(b)->stream));
    cuda_mark(b, "rmsnorm");
}

void cuda_swiglu(struct backend *b, const struct op_swiglu *a)
{
    struct k_swiglu k = {.n_rows = a->n_rows, .F = a->F, .gu = a->gu, .c = a->c};
    cuda_note(b, "swiglu", k_swiglu(&k, cuda_impl_of(b)->stream));
    cuda_mark(b, "swiglu");
}

/* ---- gated delta rule ---- */

static struct k_gdn_dims gdn_dims_of(const struct gdn_dims *d, const struct state_pool *pool)
{
    return (struct k_gdn_dims){.H = d->H, .HV = d->HV, .ld = d->ld, .n_slots = pool->n_slots};
}

void cuda_gdn_conv(struct backend *b, const struct op_gdn_conv *a)
{
    struct k_gdn_conv k = {.b = cuda_batch(a->b),
                           .d = gdn_dims_of(&a->d, a->pool),
                           .p = a->p,
                           .conv_w = a->conv_w,
                           .A_log = a->A_log,
                           .dt_bias = a->dt_bias,
                           .conv_state = a->pool->conv,
                           .q = a->q,
                           .k = a->k,
                           .v = a->v,
                           .g = a->g,
                           .beta = a->beta};
    cuda_note(b, "gdn_conv", k_gdn_conv(&k, cuda_impl_of(b)->stream));
    cuda_mark(b, "gdn_conv");
}

void cuda_gdn_delta(struct backend *b, const struct op_gdn_delta *a)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct k_gdn_delta k = {.dev = &impl->dev,
                            .b = cuda_batch(a->b),
                            .d = gdn_dims_of(&a->d, a->pool),
                            .q = a->q,
                            .k = a->k,
                            .v = a->v,
                            .g = a->g,
                            .beta = a->beta,
                            .S = a->pool->S,
                            .o = a->o,
                            .work = impl->gdn_work,
                            .body = K_GDN_AUTO};
    cuda_note(b, "gdn_delta", k_gdn_delta(&k, impl->stream));
    cuda_mark(b, "gdn_delta");
    if (!a->z)
        return;
    struct k_gdn_norm n = {.n_tokens = a->b->n_tokens,
                           .HV = a->d.HV,
                           .ld = a->d.ld,
                           .eps = a->eps,
                           .z = a->z,
                           .w = a->norm_w,
                           .o = a->o};
    cuda_note(b, "gdn_norm", k_gdn_norm(&n, impl->stream));
    cuda_mark(b, "gdn_norm");
}

/* ---- attention ---- */

static struct k_attn_dims attn_dims_of(const struct attn_dims *d)
{
    return (struct k_attn_dims){
        .HQ = d->HQ, .HK = d->HK, .D = d->D, .rot_dim = d->rot_dim, .ld = d->ld};
}

static struct k_kv_pages pages_of(const struct kv_pool *pool, const struct batch *b)
{
    return (struct k_kv_pages){.n_pages = pool->n_pages,
                               .page_tokens = pool->page_tokens,
                               .max_pages = b->max_pages,
                               .page_table = b->page_table,
                               .k = pool->k,
                               .v = pool->v};
}

void cuda_attn_prep(struct backend *b, const struct op_attn_prep *a)
{
    struct k_attn_prep k = {.b = cuda_batch(a->b),
                            .d = attn_dims_of(&a->d),
                            .kv = pages_of(a->pool, a->b),
                            .eps = a->eps,
                            .p = a->p,
                            .q_norm = a->q_norm,
                            .k_norm = a->k_norm,
                            .inv_freq = a->inv_freq};
    cuda_note(b, "attn_prep", k_attn_prep(&k, cuda_impl_of(b)->stream));
    cuda_mark(b, "attn_prep");
}

void cuda_attn(struct backend *b, const struct op_attn *a)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    struct k_attn k = {.dev = &impl->dev,
                       .b = cuda_batch(a->b),
                       .d = attn_dims_of(&a->d),
                       .kv = pages_of(a->pool, a->b),
                       .p = a->p,
                       .o = a->o,
                       .work = impl->work,
                       .body = K_ATTN_AUTO};
    cuda_note(b, "attn", k_attn(&k, impl->stream));
    cuda_mark(b, "attn");
}

/* ---- mixture of experts ---- */

void cuda_moe_route(struct backend *b, const struct op_moe_route *a)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    const struct cuda_weight *w = a->router->data;
    float *logits = (float *)impl->work;
    gemm_run(b, w->plan[1], w->rows, a->n_rows, a->h, logits, a->router->rows);
    struct k_moe_route k = {.n_rows = a->n_rows,
                            .E = a->router->rows,
                            .top_k = a->top_k,
                            .renorm = a->renorm,
                            .logits = logits,
                            .ids = a->ids,
                            .weights = a->weights};
    cuda_note(b, "moe_route", k_moe_route(&k, impl->stream));
    cuda_mark(b, "moe_route");
}

static void moe_gemm(struct backend *b, const struct k_moe_list *list, const struct weight *w,
                     bool is_first, const void *a, void *c)
{
    const struct cuda_weight *cw = w->data;
    struct k_moe_gemm k = {.dev = &cuda_impl_of(b)->dev,
                           .list = *list,
                           .gather = is_first,
                           .swiglu = is_first,
                           .rows = w->rows,
                           .cols = w->cols,
                           .a = a,
                           .w = cw->rows,
                           .c = c};
    cuda_note(b, "moe_gemm", k_moe_gemm(&k, cuda_impl_of(b)->stream));
    cuda_mark(b, is_first ? "moe_gate_up" : "moe_down");
}

void cuda_moe_experts(struct backend *b, const struct op_moe_experts *a)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    int32_t E = a->gate_up->n_mats, M = a->down->rows;
    size_t places = (size_t)a->n_rows * (size_t)a->top_k;
    struct k_moe_sort sort = {.ids = a->ids};
    char *act = impl->work + part(k_moe_list_bytes(a->n_rows, a->top_k, E));
    char *down = act + part(places * (size_t)a->down->cols * 2);
    k_moe_list_make(&sort.list, impl->work, a->n_rows, a->top_k, E);
    if (impl->n_flights)
        sort.list.n_live = cuda_newest(b)->n_live;
    cuda_note(b, "moe_sort", k_moe_sort(&sort, impl->stream));
    cuda_mark(b, "moe_sort");
    moe_gemm(b, &sort.list, a->gate_up, true, a->h, act);
    moe_gemm(b, &sort.list, a->down, false, act, down);
    struct k_moe_combine k = {.list = sort.list,
                              .M = M,
                              .weights = a->weights,
                              .down = down,
                              .shared = a->shared,
                              .h = a->h,
                              .shared_gate = a->shared_gate,
                              .y = a->y};
    cuda_note(b, "moe_combine", k_moe_combine(&k, impl->stream));
    cuda_mark(b, "moe_combine");
}

/* ---- head ---- */

void cuda_head(struct backend *b, const struct op_head *a)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    const struct cuda_weight *w = a->w->data;
    int32_t most = cuda_head_rows(&impl->limits), R = a->b->n_rows;
    int32_t ld = head_ld(a->w->rows);
    char *h = impl->work;
    float *logits = (float *)(h + part((size_t)most * (size_t)a->M * 2));
    /* The results of the step before may still be on their way out of the same rows. */
    const struct cuda_step *newest = cuda_newest(b);
    const struct cuda_step *other = &impl->ring[newest == &impl->ring[0]];
    cuda_note(b, "head", cudaStreamWaitEvent(impl->stream, other->copied_out, 0));
    for (int32_t r = 0, n; r < R; r += n) {
        n = R - r < most ? R - r : most;
        struct k_head_norm norm = {.n_rows = n,
                                   .M = a->M,
                                   .eps = a->eps,
                                   .rows = a->b->rows + r,
                                   .x = a->x,
                                   .w = a->norm_w,
                                   .h = h};
        cuda_note(b, "head_norm", k_head_norm(&norm, impl->stream));
        gemm_run(b, w->plan[1], w->rows, n, h, logits, ld);
        struct k_head_reduce reduce = {.n_rows = n,
                                       .vocab = a->w->rows,
                                       .ld = ld,
                                       .logits = logits,
                                       .targets = a->b->targets + r,
                                       .row_top = a->b->row_top + r,
                                       .out = (struct k_row_result *)a->out + r};
        cuda_note(b, "head_reduce", k_head_reduce(&reduce, impl->stream));
        const struct cuda_samples *samples = &impl->samples[newest - impl->ring];
        struct k_sample sample = {.n_samples = samples->n,
                                  .row0 = r,
                                  .n_rows = n,
                                  .vocab = a->w->rows,
                                  .ld = ld,
                                  .logits = logits,
                                  .samples = samples->rows,
                                  .adjust = samples->adjust,
                                  .out = (struct k_row_result *)a->out + r};
        cuda_note(b, "sample", k_sample(&sample, impl->stream));
    }
    cuda_mark(b, "head");
}
