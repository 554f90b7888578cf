/* The pools of the CUDA backend: state slots and KV pages, their layouts, their canonical
 * copies, and what sizes the kernels take. Reading and writing wait; poisoning is enqueued. */
#include <stdlib.h>
#include <string.h>

#include "cuda_impl.h"

enum { GDN_DIM = 128, ATTN_DIM = 256, MAX_GROUP = 64, MAX_HIDDEN = 8192 };

/* ---- what the kernels take ---- */

static int check_gdn(const struct gdn_dims *d, struct errmsg *e)
{
    if (d->K != GDN_DIM || d->V != GDN_DIM)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: linear_key_head_dim is %d, linear_value_head_dim %d; "
                          "accepted: %d",
                          d->K, d->V, GDN_DIM);
    if (d->H < 1 || d->HV % d->H)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: linear_num_value_heads is %d; accepted: a multiple of "
                          "linear_num_key_heads, %d",
                          d->HV, d->H);
    return 0;
}

static int check_attn(const struct attn_dims *d, struct errmsg *e)
{
    if (d->D != ATTN_DIM || d->rot_dim % 16 || d->rot_dim > d->D)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: head_dim is %d, of which partial_rotary_factor "
                          "rotates %d; accepted: %d, and a multiple of 16",
                          d->D, d->rot_dim, ATTN_DIM);
    if (d->HK < 1 || d->HQ % d->HK || d->HQ / d->HK > MAX_GROUP)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: num_attention_heads is %d; accepted: a multiple of "
                          "num_key_value_heads, %d, at most %d times it",
                          d->HQ, d->HK, MAX_GROUP);
    return 0;
}

int cuda_check(struct backend *b, const struct gdn_dims *gd, const struct attn_dims *ad,
               const struct backend_limits *l, struct errmsg *e)
{
    (void)b;
    int rc = gd ? check_gdn(gd, e) : 0;
    if (rc == 0 && ad)
        rc = check_attn(ad, e);
    if (rc != 0)
        return rc;
    if (l->M % 8 || l->M > MAX_HIDDEN)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: hidden_size is %d; accepted: a multiple of 8 up to %d",
                          l->M, MAX_HIDDEN);
    if (l->F % 8 || l->shared_F % 8)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: of intermediate_size and "
                          "shared_expert_intermediate_size one is %d; accepted: multiples of 8",
                          l->F % 8 ? l->F : l->shared_F);
    if (l->E > K_MOE_MAX_EXPERTS || l->top_k > K_MOE_MAX_TOP || l->moe_F % 8)
        return errmsg_set(
            e, ERR_UNSUPPORTED,
            "backend cuda: num_experts is %d, moe_intermediate_size %d, "
            "num_experts_per_tok %d; accepted: up to %d, a multiple of 8, up to %d",
            l->E, l->moe_F, l->top_k, K_MOE_MAX_EXPERTS, K_MOE_MAX_TOP);
    if (l->max_seqs > K_MAX_SEQS)
        return errmsg_set(e, ERR_UNSUPPORTED, "max-seqs: found %d, accepted with cuda: 1 to %d",
                          l->max_seqs, K_MAX_SEQS);
    return 0;
}

/* ---- sizes ---- */

static size_t state_elems(const struct gdn_dims *d)
{
    return (size_t)d->HV * (size_t)d->K * (size_t)d->V;
}

static size_t conv_elems(const struct gdn_dims *d)
{
    return 3 * (size_t)d->conv_dim;
}

static size_t page_elems(const struct attn_dims *d, int32_t page_tokens)
{
    return (size_t)d->HK * (size_t)page_tokens * (size_t)d->D;
}

size_t cuda_state_bytes(struct backend *b, const struct gdn_dims *d)
{
    (void)b;
    return state_elems(d) * sizeof(float) + conv_elems(d) * 2;
}

size_t cuda_page_bytes(struct backend *b, const struct attn_dims *d, int32_t page_tokens)
{
    (void)b;
    return 2 * page_elems(d, page_tokens) * 2;
}

/* ---- making ---- */

int cuda_state_pool_make(struct backend *b, const struct gdn_dims *d, int32_t n_slots,
                         struct state_pool *out)
{
    if (check_gdn(d, NULL) != 0 || n_slots < 1)
        return ERR_UNSUPPORTED;
    struct state_pool p = {.n_slots = n_slots};
    p.S = cuda_alloc(b, (size_t)n_slots * state_elems(d) * sizeof(float));
    p.conv = cuda_alloc(b, (size_t)n_slots * conv_elems(d) * 2);
    if (!p.S || !p.conv) {
        cuda_state_pool_free(b, &p);
        return ERR_NOMEM;
    }
    *out = p;
    return 0;
}

int cuda_kv_pool_make(struct backend *b, const struct attn_dims *d, int32_t n_pages,
                      int32_t page_tokens, struct kv_pool *out)
{
    if (check_attn(d, NULL) != 0 || n_pages < 1 || page_tokens < 1 ||
        page_tokens % CHUNK_TOKENS)
        return ERR_UNSUPPORTED;
    struct kv_pool p = {.n_pages = n_pages, .page_tokens = page_tokens};
    size_t bytes = (size_t)n_pages * page_elems(d, page_tokens) * 2;
    p.k = cuda_alloc(b, bytes);
    p.v = cuda_alloc(b, bytes);
    if (!p.k || !p.v) {
        cuda_kv_pool_free(b, &p);
        return ERR_NOMEM;
    }
    cuda_impl_of(b)->page_tokens = page_tokens;
    *out = p;
    return 0;
}

void cuda_state_pool_free(struct backend *b, struct state_pool *p)
{
    cuda_free(b, p->S);
    cuda_free(b, p->conv);
    *p = (struct state_pool){0};
}

void cuda_kv_pool_free(struct backend *b, struct kv_pool *p)
{
    cuda_free(b, p->k);
    cuda_free(b, p->v);
    *p = (struct kv_pool){0};
}

/* ---- canonical copies ---- */

/* Where a slot's parts lie: S [HV, V, K] f32, conv [3, conv_dim] bf16. */
static float *state_at(const struct gdn_dims *d, const struct state_pool *p, int32_t slot)
{
    return (float *)p->S + (size_t)slot * state_elems(d);
}

static uint16_t *conv_at(const struct gdn_dims *d, const struct state_pool *p, int32_t slot)
{
    return (uint16_t *)p->conv + (size_t)slot * conv_elems(d);
}

/* Swaps the inner two dims of a [HV, n, n] tensor (K and V are equal). */
static void transpose(const struct gdn_dims *d, const float *from, float *to)
{
    size_t n = (size_t)d->K;
    for (size_t h = 0; h < (size_t)d->HV; h++)
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < n; j++)
                to[(h * n + j) * n + i] = from[(h * n + i) * n + j];
}

int cuda_state_read(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    int32_t slot, float *S, float *conv)
{
    if (slot < 0 || slot >= p->n_slots)
        return ERR_INVALID;
    float *raw = malloc(state_elems(d) * sizeof(float));
    uint16_t *window = malloc(conv_elems(d) * 2);
    int rc = raw && window ? 0 : ERR_NOMEM;
    if (rc == 0)
        rc = cuda_download(b, raw, state_at(d, p, slot), state_elems(d) * sizeof(float));
    if (rc == 0)
        rc = cuda_download(b, window, conv_at(d, p, slot), conv_elems(d) * 2);
    if (rc == 0) {
        transpose(d, raw, S);
        for (size_t c = 0; c < (size_t)d->conv_dim; c++)
            for (size_t j = 0; j < 3; j++)
                conv[c * 3 + j] = cuda_f32_of(window[j * (size_t)d->conv_dim + c]);
    }
    free(raw);
    free(window);
    return rc;
}

int cuda_state_write(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                     int32_t slot, const float *S, const float *conv)
{
    if (slot < 0 || slot >= p->n_slots)
        return ERR_INVALID;
    float *raw = malloc(state_elems(d) * sizeof(float));
    uint16_t *window = malloc(conv_elems(d) * 2);
    int rc = raw && window ? 0 : ERR_NOMEM;
    if (rc == 0) {
        transpose(d, S, raw);
        for (size_t c = 0; c < (size_t)d->conv_dim; c++)
            for (size_t j = 0; j < 3; j++)
                window[j * (size_t)d->conv_dim + c] = bf16_of(conv[c * 3 + j]);
        rc = cuda_upload(b, state_at(d, p, slot), raw, state_elems(d) * sizeof(float));
    }
    if (rc == 0)
        rc = cuda_upload(b, conv_at(d, p, slot), window, conv_elems(d) * 2);
    free(raw);
    free(window);
    return rc;
}

/* Walks positions [0, n_tokens) of a request page by page, through a host copy of one page. */
struct kv_walk {
    struct backend *b;
    const struct attn_dims *d;
    const struct kv_pool *p;
    const int32_t *pages;
    int32_t n_tokens;
    struct k_attn_dims kd;
    uint16_t *page; /* one page, as it lies */
};

static int kv_open(struct kv_walk *w, struct backend *b, const struct attn_dims *d,
                   const struct kv_pool *p, const int32_t *pages, int32_t n_tokens)
{
    *w = (struct kv_walk){.b = b, .d = d, .p = p, .pages = pages, .n_tokens = n_tokens};
    w->kd = (struct k_attn_dims){.HQ = d->HQ, .HK = d->HK, .D = d->D};
    for (int32_t t = 0; t < n_tokens; t += p->page_tokens)
        if (pages[t / p->page_tokens] < 0 || pages[t / p->page_tokens] >= p->n_pages)
            return ERR_INVALID;
    w->page = malloc(page_elems(d, p->page_tokens) * 2);
    return w->page ? 0 : ERR_NOMEM;
}

/* Copies between x [HK, n_tokens, D] and the host page that has positions from t0 on. */
static void kv_copy(const struct kv_walk *w, int32_t t0, const float *from, float *to)
{
    int32_t P = w->p->page_tokens, n = w->n_tokens - t0 < P ? w->n_tokens - t0 : P;
    for (int32_t h = 0; h < w->d->HK; h++) {
        for (int32_t t = 0; t < n; t++) {
            size_t row = ((size_t)h * (size_t)w->n_tokens + (size_t)(t0 + t)) * (size_t)w->d->D;
            for (int32_t i = 0; i < w->d->D; i++) {
                uint16_t *at = &w->page[k_kv_offset(&w->kd, P, 0, h, t, i)];
                if (to)
                    to[row + (size_t)i] = cuda_f32_of(*at);
                else
                    *at = bf16_of(from[row + (size_t)i]);
            }
        }
    }
}

/* from NULL: reads pool's pages into to; else writes them, keeping what lies past n_tokens. */
static int kv_pass(struct kv_walk *w, void *pool, const float *from, float *to)
{
    int rc = 0;
    size_t elems = page_elems(w->d, w->p->page_tokens);
    for (int32_t t = 0; t < w->n_tokens && rc == 0; t += w->p->page_tokens) {
        uint16_t *page = (uint16_t *)pool + (size_t)w->pages[t / w->p->page_tokens] * elems;
        rc = cuda_download(w->b, w->page, page, elems * 2);
        if (rc != 0)
            break;
        kv_copy(w, t, from, to);
        if (from)
            rc = cuda_upload(w->b, page, w->page, elems * 2);
    }
    return rc;
}

int cuda_kv_read(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 const int32_t *pages, int32_t n_tokens, float *k, float *v)
{
    struct kv_walk w;
    int rc = kv_open(&w, b, d, p, pages, n_tokens);
    if (rc == 0)
        rc = kv_pass(&w, p->k, NULL, k);
    if (rc == 0)
        rc = kv_pass(&w, p->v, NULL, v);
    free(w.page);
    return rc;
}

int cuda_kv_write(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                  const int32_t *pages, int32_t n_tokens, const float *k, const float *v)
{
    struct kv_walk w;
    int rc = kv_open(&w, b, d, p, pages, n_tokens);
    if (rc == 0)
        rc = kv_pass(&w, p->k, k, NULL);
    if (rc == 0)
        rc = kv_pass(&w, p->v, v, NULL);
    free(w.page);
    return rc;
}

/* ---- copies within a step ---- */

/* Entries of two pools, as two parts of the same thing. */
static void copy_entries(struct backend *b, const char *what, void *const pools[2],
                         const size_t bytes[2], const struct slot_copy *copies, int32_t n)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    for (int32_t at = 0; at < n; at += K_COPY_MAX) {
        struct k_copy_slots k = {.n = n - at < K_COPY_MAX ? n - at : K_COPY_MAX};
        for (int32_t i = 0; i < k.n; i++) {
            k.from[i] = copies[at + i].from;
            k.to[i] = copies[at + i].to;
        }
        for (int i = 0; i < 2; i++) {
            k.pool = pools[i];
            k.slot_bytes = (int64_t)bytes[i];
            cuda_note(b, what, k_copy_slots(&k, impl->stream));
        }
    }
}

void cuda_state_copy(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                     const struct slot_copy *copies, int32_t n)
{
    const size_t bytes[2] = {state_elems(d) * sizeof(float), conv_elems(d) * 2};
    copy_entries(b, "state_copy", (void *const[2]){p->S, p->conv}, bytes, copies, n);
}

void cuda_page_copy(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                    const struct slot_copy *copies, int32_t n)
{
    const size_t page = page_elems(d, p->page_tokens) * 2;
    const size_t bytes[2] = {page, page};
    copy_entries(b, "page_copy", (void *const[2]){p->k, p->v}, bytes, copies, n);
}

/* ---- poison ---- */

static void poison(struct backend *b, void *p, size_t bytes)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cudaSetDevice(impl->device);
    cuda_note(b, "poison", k_fill_nan(p, bytes, impl->stream));
}

void cuda_state_poison(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                       int32_t slot)
{
    poison(b, state_at(d, p, slot), state_elems(d) * sizeof(float));
    poison(b, conv_at(d, p, slot), conv_elems(d) * 2);
}

void cuda_page_poison(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                      int32_t page)
{
    size_t bytes = page_elems(d, p->page_tokens) * 2;
    poison(b, (char *)p->k + (size_t)page * bytes, bytes);
    poison(b, (char *)p->v + (size_t)page * bytes, bytes);
}
