#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

struct model {
    const struct arch *a;
    struct backend *b;
    struct model_sizes sizes;
    struct weights w;
    struct gdn_dims gd;
    struct attn_dims ad;
    struct state_pool *states; /* [n_gdn] */
    struct kv_pool *kvs;       /* [n_attn] */
    void *scratch[SCRATCH_COUNT];
    bool (*goes_on)(void *arg);
    void *goes_on_arg;
    void (*tap)(void *arg, int32_t layer, const float *x);
    void *tap_arg;
};

/* ---- opening ---- */

static int model_make_scratch(struct model *m)
{
    size_t bytes[SCRATCH_COUNT];
    model_scratch_list(m->a, m->b->act, m->sizes.o.max_step_tokens, bytes);
    for (int i = 0; i < SCRATCH_COUNT; i++) {
        if (bytes[i] == 0)
            continue;
        m->scratch[i] = m->b->ops->alloc(m->b, bytes[i]);
        if (!m->scratch[i])
            return ERR_NOMEM;
    }
    int32_t n = m->a->rot_dim / 2;
    float freq[128];
    if (n > 128)
        return ERR_UNSUPPORTED;
    /* As transformers computes it, in f32: 1 / theta^(2i / rot_dim). */
    for (int32_t i = 0; i < n; i++)
        freq[i] = 1.0f / powf(m->a->rope_theta, (float)(2 * i) / (float)m->a->rot_dim);
    return m->b->ops->upload(m->b, m->scratch[SCRATCH_FREQ], freq, (size_t)n * sizeof(float));
}

static int model_make_pools(struct model *m)
{
    const struct arch *a = m->a;
    m->states = calloc((size_t)a->n_gdn + 1, sizeof(*m->states));
    m->kvs = calloc((size_t)a->n_attn + 1, sizeof(*m->kvs));
    if (!m->states || !m->kvs)
        return ERR_NOMEM;
    int rc = 0;
    for (int32_t i = 0; i < a->n_gdn && rc == 0; i++)
        rc = m->b->ops->state_pool_make(m->b, &m->gd, m->sizes.o.state_slots, &m->states[i]);
    for (int32_t i = 0; i < a->n_attn && rc == 0; i++)
        rc = m->b->ops->kv_pool_make(m->b, &m->ad, m->sizes.n_pages, m->sizes.o.page_tokens,
                                     &m->kvs[i]);
    return rc;
}

int model_open(const struct arch *a, const struct st_set *set, uint64_t seed, struct backend *b,
               const struct model_sizes *sizes, weights_progress progress, void *arg,
               struct model **out, struct errmsg *e)
{
    struct model *m = calloc(1, sizeof(*m));
    if (!m)
        return errmsg_set(e, ERR_NOMEM, "no memory for the model's tables");
    m->a = a;
    m->b = b;
    m->sizes = *sizes;
    m->gd = model_gdn_dims(a);
    m->ad = model_attn_dims(a);
    struct backend_limits lim = model_limits(a, sizes);
    int rc = b->ops->workspace_make(b, &lim, e);
    if (rc != 0)
        goto fail;
    rc = model_make_scratch(m);
    if (rc == 0)
        rc = model_make_pools(m);
    if (rc != 0) {
        errmsg_set(e, rc,
                   rc == ERR_NOMEM
                       ? "the backend gave no memory for scratch and pools (%zu bytes)"
                       : "the backend refused scratch or pools (%zu bytes)",
                   sizes->scratch_bytes + sizes->slots_bytes + sizes->pages_bytes);
        goto fail;
    }
    rc = weights_load(a, set, seed, b, progress, arg, &m->w, e);
    if (rc != 0)
        goto fail;
    *out = m;
    return 0;
fail:
    model_close(m);
    return rc;
}

void model_close(struct model *m)
{
    if (!m)
        return;
    if (m->w.layers)
        weights_free(m->a, m->b, &m->w);
    for (int32_t i = 0; m->states && i < m->a->n_gdn; i++)
        m->b->ops->state_pool_free(m->b, &m->states[i]);
    for (int32_t i = 0; m->kvs && i < m->a->n_attn; i++)
        m->b->ops->kv_pool_free(m->b, &m->kvs[i]);
    for (int i = 0; i < SCRATCH_COUNT; i++)
        m->b->ops->free(m->b, m->scratch[i]);
    free(m->states);
    free(m->kvs);
    free(m);
}

/* ---- the layer loop ---- */

static void model_matmul(struct model *m, int32_t n_rows, const struct weight *w, const void *a,
                         void *c, int64_t ldc)
{
    struct op_matmul op = {.n_rows = n_rows, .w = w, .a = a, .c = c, .ldc = ldc};
    m->b->ops->matmul(m->b, &op);
}

/* x += y, h = norm(x); y NULL: nothing to add; h NULL: only add. */
static void model_norm(struct model *m, int32_t n_rows, const void *y, const float *w, void *h)
{
    struct op_rmsnorm op = {.n_rows = n_rows,
                            .dim = m->a->M,
                            .eps = m->a->eps,
                            .x = m->scratch[SCRATCH_X],
                            .y = y,
                            .w = w,
                            .h = h};
    m->b->ops->rmsnorm(m->b, &op);
}

static void model_gdn(struct model *m, const struct batch *b, const struct layer_weights *w,
                      const struct state_pool *pool)
{
    const struct backend_ops *ops = m->b->ops;
    void **s = m->scratch;
    size_t z_offset = (size_t)m->gd.conv_dim * dtype_bytes(m->b->act);
    model_matmul(m, b->n_tokens, &w->gdn_in, s[SCRATCH_H], s[SCRATCH_P], m->gd.ld);
    struct op_gdn_conv conv = {.b = b,
                               .d = m->gd,
                               .p = s[SCRATCH_P],
                               .conv_w = w->conv,
                               .A_log = w->A_log,
                               .dt_bias = w->dt_bias,
                               .pool = pool,
                               .q = s[SCRATCH_Q],
                               .k = s[SCRATCH_K],
                               .v = s[SCRATCH_V],
                               .g = s[SCRATCH_G],
                               .beta = s[SCRATCH_BETA]};
    ops->gdn_conv(m->b, &conv);
    struct op_gdn_delta delta = {.b = b,
                                 .d = m->gd,
                                 .q = s[SCRATCH_Q],
                                 .k = s[SCRATCH_K],
                                 .v = s[SCRATCH_V],
                                 .g = s[SCRATCH_G],
                                 .beta = s[SCRATCH_BETA],
                                 .pool = pool,
                                 .z = (const char *)s[SCRATCH_P] + z_offset,
                                 .norm_w = w->gdn_norm,
                                 .eps = m->a->eps,
                                 .o = s[SCRATCH_O]};
    ops->gdn_delta(m->b, &delta);
    model_matmul(m, b->n_tokens, &w->gdn_out, s[SCRATCH_O], s[SCRATCH_Y], m->a->M);
}

static void model_attn(struct model *m, const struct batch *b, const struct layer_weights *w,
                       const struct kv_pool *pool)
{
    const struct backend_ops *ops = m->b->ops;
    void **s = m->scratch;
    model_matmul(m, b->n_tokens, &w->attn_in, s[SCRATCH_H], s[SCRATCH_P], m->ad.ld);
    struct op_attn_prep prep = {.b = b,
                                .d = m->ad,
                                .p = s[SCRATCH_P],
                                .q_norm = w->q_norm,
                                .k_norm = w->k_norm,
                                .inv_freq = s[SCRATCH_FREQ],
                                .eps = m->a->eps,
                                .pool = pool};
    ops->attn_prep(m->b, &prep);
    struct op_attn attn = {
        .b = b, .d = m->ad, .p = s[SCRATCH_P], .pool = pool, .o = s[SCRATCH_O]};
    ops->attn(m->b, &attn);
    model_matmul(m, b->n_tokens, &w->attn_out, s[SCRATCH_O], s[SCRATCH_Y], m->a->M);
}

/* down(silu(gate) * up) of h into out [T, M]. */
static void model_mlp(struct model *m, int32_t T, const struct layer_weights *w, void *out)
{
    void **s = m->scratch;
    int32_t F = w->down.cols;
    model_matmul(m, T, &w->gate_up, s[SCRATCH_H], s[SCRATCH_P], 2 * (int64_t)F);
    struct op_swiglu swiglu = {.n_rows = T, .F = F, .gu = s[SCRATCH_P], .c = s[SCRATCH_O]};
    m->b->ops->swiglu(m->b, &swiglu);
    model_matmul(m, T, &w->down, s[SCRATCH_O], out, m->a->M);
}

static void model_moe(struct model *m, int32_t T, const struct layer_weights *w)
{
    const struct arch *a = m->a;
    void **s = m->scratch;
    struct op_moe_route route = {.n_rows = T,
                                 .top_k = a->top_k,
                                 .renorm = a->renorm_topk,
                                 .router = &w->router,
                                 .h = s[SCRATCH_H],
                                 .ids = s[SCRATCH_IDS],
                                 .weights = s[SCRATCH_GATES]};
    m->b->ops->moe_route(m->b, &route);
    if (a->shared_F)
        model_mlp(m, T, w, s[SCRATCH_SHARED]);
    struct op_moe_experts experts = {.n_rows = T,
                                     .top_k = a->top_k,
                                     .gate_up = &w->expert_gate_up,
                                     .down = &w->expert_down,
                                     .h = s[SCRATCH_H],
                                     .ids = s[SCRATCH_IDS],
                                     .weights = s[SCRATCH_GATES],
                                     .shared = s[SCRATCH_SHARED],
                                     .shared_gate = w->shared_gate,
                                     .y = s[SCRATCH_Y]};
    m->b->ops->moe_experts(m->b, &experts);
}

/* Each block leaves its output in y; the next norm adds it to x. False: abandoned. */
static bool model_layers(struct model *m, const struct batch *b)
{
    const struct arch *a = m->a;
    void **s = m->scratch;
    int32_t T = b->n_tokens, i_gdn = 0, i_attn = 0;
    const void *y = NULL;
    struct op_embed embed = {.b = b, .w = &m->w.embed, .x = s[SCRATCH_X]};
    m->b->ops->embed(m->b, &embed);
    if (m->tap)
        m->tap(m->tap_arg, 0, s[SCRATCH_X]);
    for (int32_t l = 0; l < a->n_layers; l++) {
        const struct layer_weights *w = &m->w.layers[l];
        if (m->goes_on && !m->goes_on(m->goes_on_arg))
            return false;
        model_norm(m, T, y, w->in_norm, s[SCRATCH_H]);
        if (a->layers[l] == LAYER_GDN)
            model_gdn(m, b, w, &m->states[i_gdn++]);
        else
            model_attn(m, b, w, &m->kvs[i_attn++]);
        model_norm(m, T, s[SCRATCH_Y], w->post_norm, s[SCRATCH_H]);
        if (a->moe[l])
            model_moe(m, T, w);
        else
            model_mlp(m, T, w, s[SCRATCH_Y]);
        y = s[SCRATCH_Y];
        if (m->tap) {
            model_norm(m, T, y, NULL, NULL);
            y = NULL;
            m->tap(m->tap_arg, l + 1, s[SCRATCH_X]);
        }
    }
    if (y)
        model_norm(m, T, y, NULL, NULL);
    return true;
}

/* The layers as they were recorded for a step like this, or one operation after the other. */
static bool model_run_layers(struct model *m, const struct batch *b, bool may_replay)
{
    const struct backend_ops *ops = m->b->ops;
    if (may_replay && ops->replay(m->b))
        return true;
    if (!model_layers(m, b))
        return false;
    if (may_replay && ops->record_begin(m->b))
        ops->record_end(m->b, model_layers(m, b));
    return true;
}

int model_launch(struct model *m, const struct batch_host *h, struct row_result *results)
{
    const struct backend_ops *ops = m->b->ops;
    struct batch_host host = *h;
    struct batch b;
    host.may_pad = ops->replay && !m->tap;
    int rc = ops->step_begin(m->b, &host, &b);
    if (rc != 0)
        return rc;
    for (int32_t i = 0; h->n_copies > 0 && i < m->a->n_gdn; i++)
        ops->state_copy(m->b, &m->gd, &m->states[i], h->copies, h->n_copies);
    for (int32_t i = 0; h->n_page_copies > 0 && i < m->a->n_attn; i++)
        ops->page_copy(m->b, &m->ad, &m->kvs[i], h->page_copies, h->n_page_copies);
    bool is_whole = model_run_layers(m, &b, host.may_pad);
    struct row_result *rows = m->scratch[SCRATCH_ROWS];
    if (is_whole && b.n_rows > 0) {
        struct op_head head = {.b = &b,
                               .x = m->scratch[SCRATCH_X],
                               .norm_w = m->w.final_norm,
                               .eps = m->a->eps,
                               .M = m->a->M,
                               .w = m->w.tied ? &m->w.embed : &m->w.head,
                               .out = rows};
        ops->head(m->b, &head);
    }
    return ops->step_end(m->b, &b, rows, results);
}

int model_done(struct model *m, bool wait)
{
    return m->b->ops->step_done(m->b, wait);
}

bool model_times(struct model *m, struct step_times *out)
{
    if (!m->b->ops->step_times)
        return false;
    m->b->ops->step_times(m->b, out);
    return true;
}

const char *model_why_lost(const struct model *m)
{
    return m->b->lost ? m->b->lost : "unknown";
}

/* ---- pools ---- */

void model_poison_slot(struct model *m, int32_t slot)
{
    for (int32_t i = 0; i < m->a->n_gdn; i++)
        m->b->ops->state_poison(m->b, &m->gd, &m->states[i], slot);
}

void model_poison_page(struct model *m, int32_t page)
{
    for (int32_t i = 0; i < m->a->n_attn; i++)
        m->b->ops->page_poison(m->b, &m->ad, &m->kvs[i], page);
}

int model_state_read(struct model *m, int32_t i_gdn, int32_t slot, float *S, float *conv)
{
    return m->b->ops->state_read(m->b, &m->gd, &m->states[i_gdn], slot, S, conv);
}

int model_kv_read(struct model *m, int32_t i_attn, const int32_t *pages, int32_t n_tokens,
                  float *k, float *v)
{
    return m->b->ops->kv_read(m->b, &m->ad, &m->kvs[i_attn], pages, n_tokens, k, v);
}

/* ---- parts of sessions ---- */

/* One of the copies of a part; from NULL: out of the pool. */
static int copy_part(struct model *m, const struct state_part *p, int32_t slot,
                     const int32_t *pages, char *to, const char *from)
{
    const struct backend_ops *ops = m->b->ops;
    if (p->kind == STATE_SLOT) {
        const struct state_pool *pool = &m->states[p->i_layer];
        return from ? ops->slot_put(m->b, &m->gd, pool, slot, from)
                    : ops->slot_get(m->b, &m->gd, pool, slot, to);
    }
    const struct kv_pool *pool = &m->kvs[p->i_layer];
    size_t bytes = p->raw_bytes / (size_t)p->n_pages;
    bool is_value = p->kind == STATE_VALUES;
    int rc = 0;
    for (int32_t i = 0; i < p->n_pages && rc == 0; i++) {
        int32_t page = pages[p->i_page + i];
        size_t at = (size_t)i * bytes;
        rc = from ? ops->page_put(m->b, &m->ad, pool, page, is_value, from + at)
                  : ops->page_get(m->b, &m->ad, pool, page, is_value, to + at);
    }
    return rc;
}

int model_part_get(struct model *m, const struct state_part *p, int32_t slot,
                   const int32_t *pages, void *stage)
{
    return copy_part(m, p, slot, pages, stage, NULL);
}

int model_part_put(struct model *m, const struct state_part *p, int32_t slot,
                   const int32_t *pages, const void *stage)
{
    return copy_part(m, p, slot, pages, NULL, stage);
}

bool model_copies_are_queued(const struct model *m)
{
    return m->b->ops->copies_mark != NULL;
}

void model_copies_follow(struct model *m)
{
    if (m->b->ops->copies_follow)
        m->b->ops->copies_follow(m->b);
}

int model_copies_mark(struct model *m, int32_t i)
{
    return m->b->ops->copies_mark ? m->b->ops->copies_mark(m->b, i) : 0;
}

int model_copies_done(struct model *m, int32_t i, bool wait)
{
    return m->b->ops->copies_done ? m->b->ops->copies_done(m->b, i, wait) : 1;
}

void *model_stage_alloc(struct model *m, size_t bytes)
{
    return m->b->ops->stage_alloc(m->b, bytes);
}

void model_stage_free(struct model *m, void *p)
{
    m->b->ops->stage_free(m->b, p);
}

struct state_shape model_state_shape(const struct model *m)
{
    int32_t P = m->sizes.o.page_tokens;
    struct state_shape z = {.a = m->a,
                            .gd = m->gd,
                            .ad = m->ad,
                            .act = m->b->act,
                            .page_tokens = P,
                            .model = "",
                            .backend = m->b->ops->name};
    if (m->a->n_gdn)
        z.slot_bytes = m->b->ops->state_bytes(m->b, &m->gd);
    if (m->a->n_attn)
        z.half_page_bytes = m->b->ops->page_bytes(m->b, &m->ad, P) / 2;
    state_shape_seal(&z);
    return z;
}

void model_set_goes_on(struct model *m, bool (*goes_on)(void *arg), void *arg)
{
    m->goes_on = goes_on;
    m->goes_on_arg = arg;
}

void model_set_tap(struct model *m, void (*tap)(void *arg, int32_t layer, const float *x),
                   void *arg)
{
    m->tap = tap;
    m->tap_arg = arg;
}

const struct model_sizes *model_sizes_of(const struct model *m)
{
    return &m->sizes;
}
