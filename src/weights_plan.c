/* The tensors of the families (gdn.md 1.4-1.6, 1.9) and the rows that each weight takes from
 * them. The one place that knows names, shapes and orders of rows. */
#include "weights_plan.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- building ---- */

/* Room for one more element, zeroed; NULL when memory is short. */
static void *grow(struct plan *p, void **items, size_t *n, size_t *cap, size_t size)
{
    if (p->failed)
        return NULL;
    if (*n == *cap) {
        size_t more = *cap ? 2 * *cap : 64;
        void *q = realloc(*items, more * size);
        if (!q) {
            p->failed = true;
            return NULL;
        }
        *items = q;
        *cap = more;
    }
    return memset((char *)*items + (*n)++ * size, 0, size);
}

/* The tensor of the scope called by suffix, of dims d0 [, d1 [, d2]] (0: no such dim). */
__attribute__((format(printf, 5, 6))) static const struct st_tensor *
need(struct plan *p, int64_t d0, int64_t d1, int64_t d2, const char *suffix, ...)
{
    if (!p->set)
        return NULL;
    char name[192];
    int len = p->layer < 0 ? snprintf(name, sizeof(name), "%s", p->prefix)
                           : snprintf(name, sizeof(name), "%slayers.%d.", p->prefix, p->layer);
    va_list ap;
    va_start(ap, suffix);
    vsnprintf(name + len, sizeof(name) - (size_t)len, suffix, ap);
    va_end(ap);
    const struct st_tensor *t = st_find(p->set, name);
    if (p->report) {
        int64_t dims[3] = {d0, d1, d2};
        plan_report_tensor(p->report, name, t, d2 ? 3 : d1 ? 2 : 1, dims);
    }
    return t;
}

static void add_vec(struct plan *p, size_t at, const struct st_tensor *t, int64_t n,
                    enum fill fill)
{
    struct plan_vec *v =
        grow(p, (void **)&p->vecs, &p->n_vecs, &p->vecs_cap, sizeof(p->vecs[0]));
    if (v)
        *v = (struct plan_vec){.at = at, .t = t, .n = n, .fill = fill};
}

/* A norm whose stored weight is w for a factor of 1 + w. */
static void add_centred_norm(struct plan *p, size_t at, const struct st_tensor *t, int64_t n)
{
    add_vec(p, at, t, n, FILL_NORM);
    if (!p->failed)
        p->vecs[p->n_vecs - 1].is_zero_centred = true;
}

/* Starts a matrix; its rows follow with add_rows. std 1 / sqrt(cols) keeps a product's size. */
static void add_mat(struct plan *p, size_t at, int32_t n_mats, int32_t rows, int32_t cols,
                    float gain)
{
    struct plan_mat *m =
        grow(p, (void **)&p->mats, &p->n_mats, &p->mats_cap, sizeof(p->mats[0]));
    if (m)
        *m = (struct plan_mat){.at = at,
                               .n_mats = n_mats,
                               .rows = rows,
                               .cols = cols,
                               .use = WEIGHT_MATMUL,
                               .i_part = p->n_parts,
                               .std = gain / sqrtf((float)cols)};
}

static void add_rows(struct plan *p, const struct st_tensor *t, int64_t row0, int64_t n_rows)
{
    struct plan_part *part =
        grow(p, (void **)&p->parts, &p->n_parts, &p->parts_cap, sizeof(p->parts[0]));
    if (!part)
        return;
    *part = (struct plan_part){.t = t, .row0 = row0, .n_rows = n_rows};
    p->mats[p->n_mats - 1].n_parts++;
}

#define IN_LAYER(member) offsetof(struct layer_weights, member)

/* ---- GDN ---- */

/* Qwen3-Next stores the projections grouped by key head: each group is q [K] | k [K] | v [r*V]
 * | z [r*V] in one tensor, b [r] | a [r] in the other. Value head h belongs to group h / r, so
 * walking the groups once for each kind gives the flat order. */
static void add_gdn_in_grouped(struct plan *p)
{
    const struct arch *a = p->a;
    int64_t r = a->HV / a->H, group = 2 * a->K + 2 * r * a->V;
    const struct st_tensor *qkvz =
        need(p, a->H * group, a->M, 0, "linear_attn.in_proj_qkvz.weight");
    const struct st_tensor *ba = need(p, 2 * a->HV, a->M, 0, "linear_attn.in_proj_ba.weight");
    const struct {
        int64_t row0, n_rows;
    } kinds[] = {
        {0, a->K}, {a->K, a->K}, {2 * a->K, r * a->V}, {2 * a->K + r * a->V, r * a->V}};
    for (int i = 0; i < 4; i++)
        for (int64_t h = 0; h < a->H; h++)
            add_rows(p, qkvz, h * group + kinds[i].row0, kinds[i].n_rows);
    for (int i = 0; i < 2; i++)
        for (int64_t h = 0; h < a->H; h++)
            add_rows(p, ba, h * 2 * r + i * r, r);
}

static void add_gdn_in_flat(struct plan *p)
{
    const struct arch *a = p->a;
    int64_t z = (int64_t)a->HV * a->V;
    add_rows(p, need(p, a->conv_dim, a->M, 0, "linear_attn.in_proj_qkv.weight"), 0,
             a->conv_dim);
    add_rows(p, need(p, z, a->M, 0, "linear_attn.in_proj_z.weight"), 0, z);
    add_rows(p, need(p, a->HV, a->M, 0, "linear_attn.in_proj_b.weight"), 0, a->HV);
    add_rows(p, need(p, a->HV, a->M, 0, "linear_attn.in_proj_a.weight"), 0, a->HV);
}

/* Dummies: each of the 2 L blocks adds about 1 / (2 L) to the residual's variance. What these
 * products take is gated, half the size of a normal draw. */
static float out_gain(const struct arch *a)
{
    return 2 / sqrtf(2 * (float)a->n_layers);
}

static void add_gdn(struct plan *p)
{
    const struct arch *a = p->a;
    int32_t v_rows = a->HV * a->V;
    add_mat(p, IN_LAYER(gdn_in), 1, a->conv_dim + v_rows + 2 * a->HV, a->M, 1);
    if (a->family == ARCH_QWEN3_NEXT)
        add_gdn_in_grouped(p);
    else
        add_gdn_in_flat(p);
    add_mat(p, IN_LAYER(gdn_out), 1, a->M, v_rows, out_gain(a));
    add_rows(p, need(p, a->M, v_rows, 0, "linear_attn.out_proj.weight"), 0, a->M);
    add_vec(p, IN_LAYER(conv),
            need(p, a->conv_dim, 1, a->conv_taps, "linear_attn.conv1d.weight"),
            (int64_t)a->conv_dim * a->conv_taps, FILL_CONV);
    add_vec(p, IN_LAYER(A_log), need(p, a->HV, 0, 0, "linear_attn.A_log"), a->HV, FILL_A_LOG);
    add_vec(p, IN_LAYER(dt_bias), need(p, a->HV, 0, 0, "linear_attn.dt_bias"), a->HV,
            FILL_DT_BIAS);
    /* The one norm that is not zero-centred. */
    add_vec(p, IN_LAYER(gdn_norm), need(p, a->V, 0, 0, "linear_attn.norm.weight"), a->V,
            FILL_NORM);
}

/* ---- attention ---- */

/* q_proj holds query [D] | gate [D] for each head in turn, not two halves. */
static void add_attn(struct plan *p)
{
    const struct arch *a = p->a;
    int64_t q_rows = 2 * (int64_t)a->HQ * a->D, kv_rows = (int64_t)a->HK * a->D;
    add_mat(p, IN_LAYER(attn_in), 1, (int32_t)(q_rows + 2 * kv_rows), a->M, 1);
    const struct st_tensor *q = need(p, q_rows, a->M, 0, "self_attn.q_proj.weight");
    for (int i = 0; i < 2; i++)
        for (int64_t h = 0; h < a->HQ; h++)
            add_rows(p, q, (2 * h + i) * a->D, a->D);
    add_rows(p, need(p, kv_rows, a->M, 0, "self_attn.k_proj.weight"), 0, kv_rows);
    add_rows(p, need(p, kv_rows, a->M, 0, "self_attn.v_proj.weight"), 0, kv_rows);
    add_mat(p, IN_LAYER(attn_out), 1, a->M, a->HQ * a->D, out_gain(a));
    add_rows(p, need(p, a->M, a->HQ * a->D, 0, "self_attn.o_proj.weight"), 0, a->M);
    add_centred_norm(p, IN_LAYER(q_norm), need(p, a->D, 0, 0, "self_attn.q_norm.weight"), a->D);
    add_centred_norm(p, IN_LAYER(k_norm), need(p, a->D, 0, 0, "self_attn.k_norm.weight"), a->D);
}

/* ---- MLPs ---- */

/* block is "mlp." or "mlp.shared_expert.". */
static void add_mlp(struct plan *p, const char *block, int32_t F)
{
    int32_t M = p->a->M;
    add_mat(p, IN_LAYER(gate_up), 1, 2 * F, M, 1);
    add_rows(p, need(p, F, M, 0, "%sgate_proj.weight", block), 0, F);
    add_rows(p, need(p, F, M, 0, "%sup_proj.weight", block), 0, F);
    add_mat(p, IN_LAYER(down), 1, M, F, out_gain(p->a));
    add_rows(p, need(p, M, F, 0, "%sdown_proj.weight", block), 0, M);
}

/* Whether the layer's experts are stored one by one. */
static bool is_per_expert(const struct plan *p)
{
    char name[192];
    if (!p->set)
        return false;
    int len = snprintf(name, sizeof(name), "%slayers.%d.mlp.experts.", p->prefix, p->layer);
    /* The first name that is not before it. */
    size_t from = 0, to = st_count(p->set);
    while (from < to) {
        size_t mid = from + (to - from) / 2;
        if (strcmp(st_at(p->set, mid)->name, name) < 0)
            from = mid + 1;
        else
            to = mid;
    }
    if (from == st_count(p->set))
        return false;
    const char *found = st_at(p->set, from)->name;
    /* Digits sort before the names of the fused form. */
    return strncmp(found, name, (size_t)len) == 0 && found[len] >= '0' && found[len] <= '9';
}

static void add_experts(struct plan *p)
{
    const struct arch *a = p->a;
    int32_t E = a->E, M = a->M, F = a->moe_F;
    bool per_expert = is_per_expert(p);
    add_mat(p, IN_LAYER(expert_gate_up), E, 2 * F, M, 1);
    if (!per_expert)
        add_rows(p, need(p, E, 2 * F, M, "mlp.experts.gate_up_proj"), 0, (int64_t)E * 2 * F);
    for (int32_t i = 0; per_expert && i < E; i++) {
        add_rows(p, need(p, F, M, 0, "mlp.experts.%d.gate_proj.weight", i), 0, F);
        add_rows(p, need(p, F, M, 0, "mlp.experts.%d.up_proj.weight", i), 0, F);
    }
    add_mat(p, IN_LAYER(expert_down), E, M, F, out_gain(a));
    if (!per_expert)
        add_rows(p, need(p, E, M, F, "mlp.experts.down_proj"), 0, (int64_t)E * M);
    for (int32_t i = 0; per_expert && i < E; i++)
        add_rows(p, need(p, M, F, 0, "mlp.experts.%d.down_proj.weight", i), 0, M);
}

static void add_mixture(struct plan *p)
{
    const struct arch *a = p->a;
    add_mat(p, IN_LAYER(router), 1, a->E, a->M, 1);
    add_rows(p, need(p, a->E, a->M, 0, "mlp.gate.weight"), 0, a->E);
    add_experts(p);
    add_mlp(p, "mlp.shared_expert.", a->shared_F);
    add_vec(p, IN_LAYER(shared_gate), need(p, 1, a->M, 0, "mlp.shared_expert_gate.weight"),
            a->M, FILL_ROW);
}

/* ---- scopes ---- */

static void add_layer(struct plan *p)
{
    const struct arch *a = p->a;
    add_centred_norm(p, IN_LAYER(in_norm), need(p, a->M, 0, 0, "input_layernorm.weight"), a->M);
    if (a->layers[p->layer] == LAYER_GDN)
        add_gdn(p);
    else
        add_attn(p);
    add_centred_norm(p, IN_LAYER(post_norm),
                     need(p, a->M, 0, 0, "post_attention_layernorm.weight"), a->M);
    if (a->moe[p->layer])
        add_mixture(p);
    else
        add_mlp(p, "mlp.", a->F);
}

/* Dummies: logits with a standard deviation of 3, embeddings that are small beside what the
 * blocks add, so that a tied head does not just repeat its input. */
static void add_model(struct plan *p)
{
    const struct arch *a = p->a;
    add_mat(p, offsetof(struct weights, embed), 1, a->vocab, a->M, 3);
    add_rows(p, need(p, a->vocab, a->M, 0, "embed_tokens.weight"), 0, a->vocab);
    if (p->failed)
        return;
    struct plan_mat *embed = &p->mats[0];
    embed->use = p->tied ? WEIGHT_EMBED | WEIGHT_MATMUL : WEIGHT_EMBED;
    if (p->set && plan_is_aligned(&p->parts[0]))
        embed->use |= WEIGHT_BORROW;
    if (!p->tied) {
        const char *prefix = p->prefix;
        p->prefix = "";
        add_mat(p, offsetof(struct weights, head), 1, a->vocab, a->M, 3);
        add_rows(p, need(p, a->vocab, a->M, 0, "lm_head.weight"), 0, a->vocab);
        p->prefix = prefix;
    }
    add_centred_norm(p, offsetof(struct weights, final_norm),
                     need(p, a->M, 0, 0, "norm.weight"), a->M);
}

void plan_init(struct plan *p, const struct arch *a, const struct st_set *set)
{
    static const char nested[] = "model.language_model.";
    *p = (struct plan){.a = a, .set = set, .prefix = "model.", .tied = a->tie_flag};
    if (!set)
        return;
    /* The file decides, not the flag: a head that is there is used. One that is not there is
     * the embedding, unless the flag says that it is another. */
    p->tied = !st_find(set, "lm_head.weight") && !a->needs_head;
    for (size_t i = 0; i < st_count(set); i++)
        if (strncmp(st_at(set, i)->name, nested, strlen(nested)) == 0) {
            p->prefix = nested;
            break;
        }
}

void plan_fini(struct plan *p)
{
    free(p->vecs);
    free(p->mats);
    free(p->parts);
}

int plan_scope(struct plan *p, int32_t layer)
{
    p->layer = layer;
    p->n_vecs = p->n_mats = p->n_parts = 0;
    if (layer < 0)
        add_model(p);
    else
        add_layer(p);
    return p->failed ? ERR_NOMEM : 0;
}

enum dtype plan_tensor_dtype(const struct st_tensor *t)
{
    if (!t)
        return DTYPE_BF16;
    return t->dtype == ST_F32 ? DTYPE_F32 : t->dtype == ST_F16 ? DTYPE_F16 : DTYPE_BF16;
}

enum dtype plan_dtype(const struct plan *p, const struct plan_mat *m)
{
    const struct plan_part *parts = &p->parts[m->i_part];
    enum dtype first = plan_tensor_dtype(parts[0].t);
    for (size_t i = 1; i < m->n_parts; i++)
        if (plan_tensor_dtype(parts[i].t) != first)
            return DTYPE_F32;
    return first;
}

bool plan_is_aligned(const struct plan_part *part)
{
    return part->t && (uintptr_t)part->t->data % st_dtype_bytes(part->t->dtype) == 0;
}
