/* What loading must come to, written down a second time: small checkpoints of every layout, and
 * where each of their rows has to be afterwards. For test_weights.c. */
#ifndef PREFILLD_TESTS_WEIGHTS_ORACLE_H
#define PREFILLD_TESTS_WEIGHTS_ORACLE_H

#include <criterion/criterion.h>

#include "fake_backend.h"
#include "weights.h"

/* ---- synthetic checkpoints ---- */

enum dtypes { ALL_BF16, ALL_F16, ALL_F32, MIXED };

struct variant {
    enum dtypes dtypes;
    bool fused;   /* experts in 3-D tensors */
    bool nested;  /* model.language_model. */
    bool no_head; /* tied */
    bool extras;  /* mtp and visual tensors */
    size_t skew;  /* of the data's start from a multiple of 8 */
    /* one tensor changed */
    const char *name;
    bool drop;
    int64_t more_rows;
    enum st_dtype dtype;
};

struct writer {
    const struct arch *a;
    const struct variant *v;
    struct ckpt c;
    char prefix[64];
};

static void put(struct writer *w, const char *name, int64_t d0, int64_t d1, int64_t d2)
{
    const struct variant *v = w->v;
    static const enum st_dtype kinds[] = {ST_BF16, ST_F16, ST_F32};
    enum st_dtype dtype =
        kinds[v->dtypes == MIXED ? (int)(127 + ckpt_value(name, 0)) % 3 : (int)v->dtypes];
    if (v->name && strcmp(v->name, name) == 0) {
        if (v->drop)
            return;
        d0 += v->more_rows;
        if (!v->more_rows)
            dtype = v->dtype;
    }
    ckpt_add(&w->c, name, dtype, (int64_t[]){d0, d1, d2, 0});
}

/* "layers.L.suffix". */
static void put_layer(struct writer *w, int32_t l, const char *suffix, int64_t d0, int64_t d1,
                      int64_t d2)
{
    char name[256];
    snprintf(name, sizeof(name), "%slayers.%d.%s", w->prefix, l, suffix);
    put(w, name, d0, d1, d2);
}

static void put_mlp(struct writer *w, int32_t l, const char *block, int64_t M, int64_t F)
{
    char suffix[96];
    snprintf(suffix, sizeof(suffix), "%s.gate_proj.weight", block);
    put_layer(w, l, suffix, F, M, 0);
    snprintf(suffix, sizeof(suffix), "%s.up_proj.weight", block);
    put_layer(w, l, suffix, F, M, 0);
    snprintf(suffix, sizeof(suffix), "%s.down_proj.weight", block);
    put_layer(w, l, suffix, M, F, 0);
}

static void put_mixer(struct writer *w, int32_t l)
{
    const struct arch *a = w->a;
    int64_t M = a->M, vz = a->HV * a->V;
    if (a->layers[l] == LAYER_ATTN) {
        put_layer(w, l, "self_attn.q_proj.weight", 2 * a->HQ * a->D, M, 0);
        put_layer(w, l, "self_attn.k_proj.weight", a->HK * a->D, M, 0);
        put_layer(w, l, "self_attn.v_proj.weight", a->HK * a->D, M, 0);
        put_layer(w, l, "self_attn.o_proj.weight", M, a->HQ * a->D, 0);
        put_layer(w, l, "self_attn.q_norm.weight", a->D, 0, 0);
        put_layer(w, l, "self_attn.k_norm.weight", a->D, 0, 0);
        return;
    }
    if (a->family == ARCH_QWEN3_NEXT) {
        put_layer(w, l, "linear_attn.in_proj_qkvz.weight", a->conv_dim + vz, M, 0);
        put_layer(w, l, "linear_attn.in_proj_ba.weight", 2 * a->HV, M, 0);
    } else {
        put_layer(w, l, "linear_attn.in_proj_qkv.weight", a->conv_dim, M, 0);
        put_layer(w, l, "linear_attn.in_proj_z.weight", vz, M, 0);
        put_layer(w, l, "linear_attn.in_proj_b.weight", a->HV, M, 0);
        put_layer(w, l, "linear_attn.in_proj_a.weight", a->HV, M, 0);
    }
    put_layer(w, l, "linear_attn.conv1d.weight", a->conv_dim, 1, 4);
    put_layer(w, l, "linear_attn.A_log", a->HV, 0, 0);
    put_layer(w, l, "linear_attn.dt_bias", a->HV, 0, 0);
    put_layer(w, l, "linear_attn.norm.weight", a->V, 0, 0);
    put_layer(w, l, "linear_attn.out_proj.weight", M, vz, 0);
}

static void put_mixture(struct writer *w, int32_t l)
{
    const struct arch *a = w->a;
    put_layer(w, l, "mlp.gate.weight", a->E, a->M, 0);
    put_layer(w, l, "mlp.shared_expert_gate.weight", 1, a->M, 0);
    put_mlp(w, l, "mlp.shared_expert", a->M, a->shared_F);
    if (w->v->fused) {
        put_layer(w, l, "mlp.experts.gate_up_proj", a->E, 2 * a->moe_F, a->M);
        put_layer(w, l, "mlp.experts.down_proj", a->E, a->M, a->moe_F);
    }
    for (int32_t i = 0; !w->v->fused && i < a->E; i++) {
        char block[32];
        snprintf(block, sizeof(block), "mlp.experts.%d", i);
        put_mlp(w, l, block, a->M, a->moe_F);
    }
}

static struct st_set *checkpoint(const struct arch *a, const struct variant *v)
{
    struct writer w = {.a = a, .v = v};
    struct ckpt_dir d;
    struct st_set *set;
    struct errmsg e;
    char name[96];
    snprintf(w.prefix, sizeof(w.prefix), "%s", v->nested ? "model.language_model." : "model.");
    ckpt_init(&w.c);
    if (!v->no_head)
        put(&w, "lm_head.weight", a->vocab, a->M, 0);
    for (int32_t l = 0; l < a->n_layers; l++) {
        put_layer(&w, l, "input_layernorm.weight", a->M, 0, 0);
        put_layer(&w, l, "post_attention_layernorm.weight", a->M, 0, 0);
        put_mixer(&w, l);
        if (a->moe[l])
            put_mixture(&w, l);
        else
            put_mlp(&w, l, "mlp", a->M, a->F);
    }
    snprintf(name, sizeof(name), "%snorm.weight", w.prefix);
    put(&w, name, a->M, 0, 0);
    snprintf(name, sizeof(name), "%sembed_tokens.weight", w.prefix);
    put(&w, name, a->vocab, a->M, 0);
    if (v->extras) {
        ckpt_add(&w.c, "mtp.fc.weight", ST_BF16, (int64_t[]){3, 4, 0});
        ckpt_add(&w.c, "mtp.layers.0.mlp.up_proj.weight_scale_inv", ST_F32, (int64_t[]){1, 0});
        ckpt_add(&w.c, "model.visual.merger.norm.bias", ST_I8, (int64_t[]){2, 3, 1, 1, 2, 0});
        ckpt_add(&w.c, "visual.pos_embed.weight", ST_F64, (int64_t[]){2, 0});
    }
    ckpt_dir_open(&d);
    ckpt_write(&w.c, ckpt_dir_file(&d, "model.safetensors"), v->skew);
    ckpt_fini(&w.c);
    cr_assert(st_open_dir(d.path, &set, &e) == 0, "%s", e.text);
    ckpt_dir_close(&d);
    return set;
}

/* Small, with no two sizes alike, so that a row or column in a wrong place shows. */
#define SIZES                                                                                  \
    "\"hidden_size\": 10, \"num_hidden_layers\": 2, \"vocab_size\": 13, "                      \
    "\"full_attention_interval\": 2, \"linear_num_key_heads\": 2, "                            \
    "\"linear_num_value_heads\": 6, \"linear_key_head_dim\": 4, "                              \
    "\"linear_value_head_dim\": 5, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "   \
    "\"head_dim\": 8, \"intermediate_size\": 9, \"num_experts\": 3, "                          \
    "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 7, "                               \
    "\"shared_expert_intermediate_size\": 11"

static const char *const configs[] = {
    "{\"model_type\": \"qwen3_next\", " SIZES "}",
    "{\"model_type\": \"qwen3_5_text\", " SIZES "}",
    "{\"model_type\": \"qwen3_5_moe_text\", \"tie_word_embeddings\": true, " SIZES "}",
    "{\"model_type\": \"qwen3_next\", \"mlp_only_layers\": [0], " SIZES "}",
};

static struct arch config(int i)
{
    struct arch a;
    struct errmsg e;
    cr_assert(arch_parse(configs[i], strlen(configs[i]), "config", &a, &e) == 0, "%s", e.text);
    return a;
}

/* ---- what the layer loop must find ---- */

struct seen {
    const struct arch *a;
    const struct st_set *set;
    const char *prefix;
    int32_t layer;
};

static const struct st_tensor *tensor(const struct seen *s, const char *suffix)
{
    char name[256];
    if (s->layer < 0)
        snprintf(name, sizeof(name), "%s%s", s->prefix, suffix);
    else
        snprintf(name, sizeof(name), "%slayers.%d.%s", s->prefix, s->layer, suffix);
    const struct st_tensor *t = st_find(s->set, name);
    cr_assert(t != NULL, "%s", name);
    return t;
}

/* Row i of a weight is row `row` of a tensor. */
static void same_row(const struct weight *w, int64_t i, const struct st_tensor *t, int64_t row)
{
    const float *found = (const float *)w->data + i * w->cols;
    for (int32_t c = 0; c < w->cols; c++) {
        float want = ckpt_element(t, (size_t)(row * w->cols + c));
        if (found[c] != want)
            cr_assert_fail("row %lld column %d is %g, not %g of %s row %lld", (long long)i, c,
                           (double)found[c], (double)want, t->name, (long long)row);
    }
}

static void same_vec(const struct seen *s, const float *v, int64_t n, const char *suffix,
                     float offset)
{
    const struct st_tensor *t = tensor(s, suffix);
    for (int64_t i = 0; i < n; i++)
        cr_assert(v[i] == ckpt_element(t, (size_t)i) + offset, "%s %lld", t->name,
                  (long long)i);
}

static void same_rows(const struct seen *s, const struct weight *w, int64_t at, int64_t n,
                      const char *suffix)
{
    const struct st_tensor *t = tensor(s, suffix);
    for (int64_t i = 0; i < n; i++)
        same_row(w, at + i, t, i);
}

static void check_shape(const struct weight *w, int32_t n_mats, int32_t rows, int32_t cols)
{
    cr_assert(w->n_mats == n_mats && w->rows == rows && w->cols == cols, "[%d, %d, %d]",
              w->n_mats, w->rows, w->cols);
}

/* By value head and dim, each kind's own formula (gdn.md 1.4). */
static void check_gdn_in(const struct seen *s, const struct weight *w)
{
    const struct arch *a = s->a;
    int64_t K = a->K, V = a->V, r = a->HV / a->H, G = 2 * K + 2 * r * V;
    int64_t k0 = a->H * K, v0 = 2 * k0, z0 = v0 + a->HV * V, b0 = z0 + a->HV * V;
    check_shape(w, 1, (int32_t)(b0 + 2 * a->HV), a->M);
    if (a->family != ARCH_QWEN3_NEXT) {
        same_rows(s, w, 0, z0, "linear_attn.in_proj_qkv.weight");
        same_rows(s, w, z0, a->HV * V, "linear_attn.in_proj_z.weight");
        same_rows(s, w, b0, a->HV, "linear_attn.in_proj_b.weight");
        same_rows(s, w, b0 + a->HV, a->HV, "linear_attn.in_proj_a.weight");
        return;
    }
    const struct st_tensor *qkvz = tensor(s, "linear_attn.in_proj_qkvz.weight");
    const struct st_tensor *ba = tensor(s, "linear_attn.in_proj_ba.weight");
    for (int64_t i = 0; i < k0; i++) {
        same_row(w, i, qkvz, i / K * G + i % K);
        same_row(w, k0 + i, qkvz, i / K * G + K + i % K);
    }
    for (int64_t h = 0; h < a->HV; h++) {
        for (int64_t i = 0; i < V; i++) {
            same_row(w, v0 + h * V + i, qkvz, h / r * G + 2 * K + h % r * V + i);
            same_row(w, z0 + h * V + i, qkvz, h / r * G + 2 * K + r * V + h % r * V + i);
        }
        same_row(w, b0 + h, ba, h / r * 2 * r + h % r);
        same_row(w, b0 + a->HV + h, ba, h / r * 2 * r + r + h % r);
    }
}

static void check_attn(const struct seen *s, const struct layer_weights *lw)
{
    const struct arch *a = s->a;
    int64_t q = a->HQ * a->D, kv = a->HK * a->D;
    const struct st_tensor *t = tensor(s, "self_attn.q_proj.weight");
    check_shape(&lw->attn_in, 1, (int32_t)(2 * q + 2 * kv), a->M);
    for (int64_t i = 0; i < q; i++) {
        same_row(&lw->attn_in, i, t, i / a->D * 2 * a->D + i % a->D);
        same_row(&lw->attn_in, q + i, t, i / a->D * 2 * a->D + a->D + i % a->D);
    }
    same_rows(s, &lw->attn_in, 2 * q, kv, "self_attn.k_proj.weight");
    same_rows(s, &lw->attn_in, 2 * q + kv, kv, "self_attn.v_proj.weight");
    check_shape(&lw->attn_out, 1, a->M, (int32_t)q);
    same_rows(s, &lw->attn_out, 0, a->M, "self_attn.o_proj.weight");
    same_vec(s, lw->q_norm, a->D, "self_attn.q_norm.weight", 1);
    same_vec(s, lw->k_norm, a->D, "self_attn.k_norm.weight", 1);
}

static void check_gdn(const struct seen *s, const struct layer_weights *lw)
{
    const struct arch *a = s->a;
    check_gdn_in(s, &lw->gdn_in);
    check_shape(&lw->gdn_out, 1, a->M, a->HV * a->V);
    same_rows(s, &lw->gdn_out, 0, a->M, "linear_attn.out_proj.weight");
    same_vec(s, lw->conv, a->conv_dim * 4, "linear_attn.conv1d.weight", 0);
    same_vec(s, lw->A_log, a->HV, "linear_attn.A_log", 0);
    same_vec(s, lw->dt_bias, a->HV, "linear_attn.dt_bias", 0);
    same_vec(s, lw->gdn_norm, a->V, "linear_attn.norm.weight", 0);
}

static void check_mlp(const struct seen *s, const struct layer_weights *lw, const char *block,
                      int32_t F)
{
    char suffix[96];
    check_shape(&lw->gate_up, 1, 2 * F, s->a->M);
    check_shape(&lw->down, 1, s->a->M, F);
    snprintf(suffix, sizeof(suffix), "%s.gate_proj.weight", block);
    same_rows(s, &lw->gate_up, 0, F, suffix);
    snprintf(suffix, sizeof(suffix), "%s.up_proj.weight", block);
    same_rows(s, &lw->gate_up, F, F, suffix);
    snprintf(suffix, sizeof(suffix), "%s.down_proj.weight", block);
    same_rows(s, &lw->down, 0, s->a->M, suffix);
}

static void check_mixture(const struct seen *s, const struct layer_weights *lw, bool fused)
{
    const struct arch *a = s->a;
    int32_t F = a->moe_F;
    check_shape(&lw->router, 1, a->E, a->M);
    same_rows(s, &lw->router, 0, a->E, "mlp.gate.weight");
    same_vec(s, lw->shared_gate, a->M, "mlp.shared_expert_gate.weight", 0);
    check_mlp(s, lw, "mlp.shared_expert", a->shared_F);
    check_shape(&lw->expert_gate_up, a->E, 2 * F, a->M);
    check_shape(&lw->expert_down, a->E, a->M, F);
    if (fused) {
        same_rows(s, &lw->expert_gate_up, 0, a->E * 2 * F, "mlp.experts.gate_up_proj");
        same_rows(s, &lw->expert_down, 0, a->E * a->M, "mlp.experts.down_proj");
    }
    for (int32_t i = 0; !fused && i < a->E; i++) {
        char suffix[96];
        snprintf(suffix, sizeof(suffix), "mlp.experts.%d.gate_proj.weight", i);
        same_rows(s, &lw->expert_gate_up, i * 2 * F, F, suffix);
        snprintf(suffix, sizeof(suffix), "mlp.experts.%d.up_proj.weight", i);
        same_rows(s, &lw->expert_gate_up, i * 2 * F + F, F, suffix);
        snprintf(suffix, sizeof(suffix), "mlp.experts.%d.down_proj.weight", i);
        same_rows(s, &lw->expert_down, i * a->M, a->M, suffix);
    }
}

static void check_embed(const struct seen *s, const struct weights *w)
{
    const struct st_tensor *t = tensor(s, "embed_tokens.weight");
    struct st_tensor held = {.dtype = t->dtype, .data = w->embed.embed};
    check_shape(&w->embed, 1, s->a->vocab, s->a->M);
    for (size_t i = 0; i < (size_t)s->a->vocab * s->a->M; i++)
        if (ckpt_element(&held, i) != ckpt_element(t, i))
            cr_assert_fail("embedding element %zu", i);
    bool no_head = !st_find(s->set, "lm_head.weight");
    cr_assert(w->tied == no_head);
    if (no_head) {
        same_rows(s, &w->embed, 0, s->a->vocab, "embed_tokens.weight");
        cr_assert(w->head.n_mats == 0);
    } else {
        struct seen top = *s;
        top.prefix = "";
        check_shape(&w->head, 1, s->a->vocab, s->a->M);
        same_rows(&top, &w->head, 0, s->a->vocab, "lm_head.weight");
        cr_assert(w->embed.data == NULL);
    }
}

static void check_weights(const struct arch *a, const struct st_set *set,
                          const struct weights *w, bool nested, bool fused)
{
    struct seen s = {
        .a = a, .set = set, .prefix = nested ? "model.language_model." : "model.", .layer = -1};
    check_embed(&s, w);
    same_vec(&s, w->final_norm, a->M, "norm.weight", 1);
    for (s.layer = 0; s.layer < a->n_layers; s.layer++) {
        const struct layer_weights *lw = &w->layers[s.layer];
        same_vec(&s, lw->in_norm, a->M, "input_layernorm.weight", 1);
        same_vec(&s, lw->post_norm, a->M, "post_attention_layernorm.weight", 1);
        if (a->layers[s.layer] == LAYER_GDN)
            check_gdn(&s, lw);
        else
            check_attn(&s, lw);
        if (a->moe[s.layer])
            check_mixture(&s, lw, fused);
        else
            check_mlp(&s, lw, "mlp", a->F);
    }
}

#endif
