/* How much memory a model takes, before anything of it is read. The sizes of the layer loop's
 * scratch are here and in model_open, from one list. */
#include <stdio.h>
#include <string.h>

#include "model_priv.h"

enum { SLOTS_SHARE = 4, PAGES_SHARE = 2, DEFAULT_PROMPT_TOKENS = 2048 };

static size_t align64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

struct gdn_dims model_gdn_dims(const struct arch *a)
{
    int32_t ld = 2 * a->H * a->K + 2 * a->HV * a->V + 2 * a->HV;
    return (struct gdn_dims){.H = a->H,
                             .HV = a->HV,
                             .K = a->K,
                             .V = a->V,
                             .conv_dim = a->conv_dim,
                             .ld = (ld + 63) / 64 * 64};
}

struct attn_dims model_attn_dims(const struct arch *a)
{
    return (struct attn_dims){.HQ = a->HQ,
                              .HK = a->HK,
                              .D = a->D,
                              .rot_dim = a->rot_dim,
                              .ld = (2 * a->HQ + 2 * a->HK) * a->D};
}

void model_scratch_list(const struct arch *a, enum dtype act, int32_t max_tokens,
                        size_t bytes[SCRATCH_COUNT])
{
    size_t T = (size_t)max_tokens, act_bytes = dtype_bytes(act);
    int64_t F = max64(a->F, a->shared_F);
    int64_t p = max64(2 * F, 0), o = max64(F, 0);
    if (a->n_gdn) {
        p = max64(p, model_gdn_dims(a).ld);
        o = max64(o, (int64_t)a->HV * a->V);
    }
    if (a->n_attn) {
        p = max64(p, model_attn_dims(a).ld);
        o = max64(o, (int64_t)a->HQ * a->D);
    }
    memset(bytes, 0, SCRATCH_COUNT * sizeof(bytes[0]));
    bytes[SCRATCH_X] = T * (size_t)a->M * 4;
    bytes[SCRATCH_H] = T * (size_t)a->M * act_bytes;
    bytes[SCRATCH_Y] = T * (size_t)a->M * act_bytes;
    bytes[SCRATCH_P] = T * (size_t)p * act_bytes;
    bytes[SCRATCH_O] = T * (size_t)o * act_bytes;
    if (a->n_gdn) {
        bytes[SCRATCH_Q] = T * (size_t)(a->H * a->K) * act_bytes;
        bytes[SCRATCH_K] = T * (size_t)(a->H * a->K) * act_bytes;
        bytes[SCRATCH_V] = T * (size_t)(a->HV * a->V) * act_bytes;
        bytes[SCRATCH_G] = T * (size_t)a->HV * 4;
        bytes[SCRATCH_BETA] = T * (size_t)a->HV * 4;
    }
    if (a->E) {
        bytes[SCRATCH_IDS] = T * (size_t)a->top_k * 4;
        bytes[SCRATCH_GATES] = T * (size_t)a->top_k * 4;
        if (a->shared_F)
            bytes[SCRATCH_SHARED] = T * (size_t)a->M * act_bytes;
    }
    bytes[SCRATCH_ROWS] = T * sizeof(struct row_result);
    bytes[SCRATCH_FREQ] = (size_t)(a->rot_dim / 2 + 1) * sizeof(float);
    for (int i = 0; i < SCRATCH_COUNT; i++)
        bytes[i] = align64(bytes[i]);
}

struct backend_limits model_limits(const struct arch *a, const struct model_sizes *s)
{
    return (struct backend_limits){.max_tokens = s->o.max_step_tokens,
                                   .max_seqs = s->o.max_seqs,
                                   .max_rows = s->max_rows,
                                   .max_pages = s->max_pages,
                                   .M = a->M,
                                   .F = a->F > a->shared_F ? a->F : a->shared_F,
                                   .shared_F = a->shared_F,
                                   .moe_F = a->moe_F,
                                   .E = a->E,
                                   .top_k = a->top_k,
                                   .vocab = a->vocab,
                                   .HQ = a->HQ,
                                   .HV = a->HV,
                                   .conv_dim = a->conv_dim};
}

/* Fills in what the operator left to us. left: memory after weights and scratch. */
static void size_defaults(const struct arch *a, size_t left, struct model_sizes *s)
{
    struct model_options *o = &s->o;
    if (o->state_slots == 0) {
        size_t fits = s->slot_bytes ? left / SLOTS_SHARE / s->slot_bytes : SIZE_MAX;
        o->state_slots = (size_t)o->max_seqs <= fits ? o->max_seqs : (int32_t)fits;
        if (o->state_slots < 1)
            o->state_slots = 1;
    }
    if (o->kv_tokens == 0) {
        int64_t want = max64(2 * (int64_t)a->max_positions,
                             (int64_t)o->state_slots * DEFAULT_PROMPT_TOKENS);
        size_t page_tokens = (size_t)o->page_tokens;
        size_t fits = s->page_bytes ? left / PAGES_SHARE / s->page_bytes : INT32_MAX;
        int64_t max =
            (int64_t)(fits > INT32_MAX / 2 ? INT32_MAX / 2 : fits) * (int64_t)page_tokens;
        o->kv_tokens = want < max ? want : max;
        if (o->kv_tokens < o->page_tokens)
            o->kv_tokens = o->page_tokens;
    }
}

static int size_prompt(const struct arch *a, struct model_sizes *s, struct errmsg *e)
{
    struct model_options *o = &s->o;
    int64_t pool = (int64_t)s->n_pages * o->page_tokens;
    if (o->max_prompt_tokens > a->max_positions)
        return errmsg_set(e, ERR_INVALID,
                          "max-prompt-tokens %d is more than the model's %d positions",
                          o->max_prompt_tokens, a->max_positions);
    if (o->max_prompt_tokens > pool)
        return errmsg_set(e, ERR_INVALID,
                          "max-prompt-tokens %d is more than the %lld tokens of the KV pool; "
                          "raise kv-tokens",
                          o->max_prompt_tokens, (long long)pool);
    if (o->max_prompt_tokens == 0)
        o->max_prompt_tokens = (int32_t)(pool < a->max_positions ? pool : a->max_positions);
    s->max_pages = (o->max_prompt_tokens + o->page_tokens - 1) / o->page_tokens;
    return 0;
}

/* One line of numbers, for messages. */
static void size_explain(const struct model_sizes *s, struct errmsg *e)
{
    const double mib = 1 << 20;
    errmsg_add(e,
               "weights %.1f MiB + scratch for %d tokens a step %.1f MiB + %d state slots of "
               "%.2f MiB + %d KV pages of %.3f MiB = %.1f MiB; free: %.1f MiB",
               (double)s->weights_bytes / mib, s->o.max_step_tokens,
               (double)(s->scratch_bytes + s->workspace_bytes) / mib, s->o.state_slots,
               (double)s->slot_bytes / mib, s->n_pages, (double)s->page_bytes / mib,
               (double)s->total_bytes / mib, (double)s->memory_bytes / mib);
}

int model_size(const struct arch *a, const struct st_set *set, struct backend *b,
               const struct model_options *o, struct model_sizes *out, struct errmsg *e)
{
    struct model_sizes s = {.o = *o, .max_rows = o->max_step_tokens + LABELS_MAX * o->max_seqs};
    struct gdn_dims gd = model_gdn_dims(a);
    struct attn_dims ad = model_attn_dims(a);
    size_t list[SCRATCH_COUNT], total;
    b->ops->memory(b, &s.memory_bytes, &total);
    if (o->memory_share)
        s.memory_bytes = s.memory_bytes / 1000 * (size_t)o->memory_share;
    s.weights_bytes = weights_bytes(a, set, b);
    model_scratch_list(a, b->act, s.o.max_step_tokens, list);
    for (int i = 0; i < SCRATCH_COUNT; i++)
        s.scratch_bytes += list[i];
    s.slot_bytes = a->n_gdn ? (size_t)a->n_gdn * b->ops->state_bytes(b, &gd) : 0;
    s.page_bytes =
        a->n_attn ? (size_t)a->n_attn * b->ops->page_bytes(b, &ad, s.o.page_tokens) : 0;

    /* The workspace hardly depends on the longest prompt; the model's own is the bound. */
    s.max_pages = (a->max_positions + s.o.page_tokens - 1) / s.o.page_tokens;
    struct backend_limits lim = model_limits(a, &s);
    int rc = b->ops->check(b, a->n_gdn ? &gd : NULL, a->n_attn ? &ad : NULL, &lim, e);
    if (rc != 0)
        return rc;
    s.workspace_bytes = b->ops->workspace_bytes(b, &lim);

    size_t fixed = s.weights_bytes + s.scratch_bytes + s.workspace_bytes;
    size_defaults(a, s.memory_bytes > fixed ? s.memory_bytes - fixed : 0, &s);
    int64_t n_pages = (s.o.kv_tokens + s.o.page_tokens - 1) / s.o.page_tokens;
    if (n_pages > INT32_MAX)
        return errmsg_set(e, ERR_INVALID, "kv-tokens %lld is more than %lld",
                          (long long)s.o.kv_tokens, (long long)INT32_MAX * s.o.page_tokens);
    s.n_pages = (int32_t)n_pages;
    rc = size_prompt(a, &s, e);
    if (rc != 0)
        return rc;
    s.slots_bytes = (size_t)s.o.state_slots * s.slot_bytes;
    s.pages_bytes = (size_t)s.n_pages * s.page_bytes;
    s.total_bytes = fixed + s.slots_bytes + s.pages_bytes;
    if (s.total_bytes > s.memory_bytes) {
        errmsg_set(e, ERR_NOMEM, "the model does not fit: ");
        size_explain(&s, e);
        errmsg_add(e, s.weights_bytes < s.memory_bytes
                          ? "; lower state-slots, kv-tokens or max-step-tokens"
                          : "; the weights alone take more");
        return ERR_NOMEM;
    }
    *out = s;
    return 0;
}
