#include "arch.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "buf.h"
#include "file.h"

enum { CONFIG_MAX_BYTES = 4 << 20, FAMILY_COUNT = 3 };

/* Sizes past these are mistakes; with them no product of two sizes passes 2^31 and no number of
 * bytes 2^63. Positions stay exact in f32, which rotary angles are computed in. */
enum {
    LAYERS_MAX = 1024,
    HIDDEN_MAX = 1 << 16,
    FF_MAX = 1 << 18,
    VOCAB_MAX = 1 << 24,
    POSITIONS_MAX = 1 << 24,
    HEADS_MAX = 1024,
    HEAD_DIM_MAX = 256, /* what the backends' bodies are made for */
    EXPERTS_MAX = 4096
};

struct reader {
    const char *name;   /* of the file, for messages */
    const char *prefix; /* of field names in messages: "" or "text_config." */
    const json_t *root;
    const json_t *text; /* the text model's fields: root or root.text_config */
    struct errmsg *e;
    int32_t interval, sparse_step; /* full_attention_interval, decoder_sparse_step */
    int32_t F_file;
    struct arch a;
};

/* The classes' defaults, transformers 5.24 configuration_qwen3_next.py,
 * configuration_qwen3_5.py and configuration_qwen3_5_moe.py. A default of 0: the class does not
 * read the field. */
struct int_field {
    const char *key;
    size_t at; /* in struct reader */
    int32_t by_family[FAMILY_COUNT];
    int32_t min, max;
};

#define FIELD(key, member, next, dense, moe, min, max)                                         \
    {                                                                                          \
        key, offsetof(struct reader, member), {next, dense, moe}, min, max                     \
    }

static const struct int_field int_fields[] = {
    FIELD("num_hidden_layers", a.n_layers, 48, 32, 40, 1, LAYERS_MAX),
    FIELD("hidden_size", a.M, 2048, 4096, 2048, 1, HIDDEN_MAX),
    FIELD("vocab_size", a.vocab, 151936, 248320, 248320, 1, VOCAB_MAX),
    FIELD("max_position_embeddings", a.max_positions, 32768, 32768, 32768, 1, POSITIONS_MAX),
    FIELD("linear_num_key_heads", a.H, 16, 16, 16, 1, HEADS_MAX),
    FIELD("linear_num_value_heads", a.HV, 32, 32, 32, 1, HEADS_MAX),
    FIELD("linear_key_head_dim", a.K, 128, 128, 128, 1, HEAD_DIM_MAX),
    FIELD("linear_value_head_dim", a.V, 128, 128, 128, 1, HEAD_DIM_MAX),
    FIELD("linear_conv_kernel_dim", a.conv_taps, 4, 4, 4, 4, 4),
    FIELD("num_attention_heads", a.HQ, 16, 16, 16, 1, HEADS_MAX),
    FIELD("num_key_value_heads", a.HK, 2, 4, 2, 1, HEADS_MAX),
    FIELD("head_dim", a.D, 256, 256, 256, 2, HEAD_DIM_MAX),
    FIELD("intermediate_size", F_file, 5632, 12288, 0, 1, FF_MAX),
    FIELD("num_experts", a.E, 512, 0, 256, 0, EXPERTS_MAX),
    FIELD("num_experts_per_tok", a.top_k, 10, 0, 8, 1, EXPERTS_MAX),
    FIELD("moe_intermediate_size", a.moe_F, 512, 0, 512, 1, FF_MAX),
    FIELD("shared_expert_intermediate_size", a.shared_F, 512, 0, 512, 1, FF_MAX),
    FIELD("full_attention_interval", interval, 4, 4, 4, 1, INT32_MAX),
    FIELD("decoder_sparse_step", sparse_step, 1, 0, 0, 1, INT32_MAX),
};

static const struct {
    const char *type, *text_type; /* text_type NULL: has no nested form */
    enum arch_family family;
} families[] = {
    {"qwen3_next", NULL, ARCH_QWEN3_NEXT},
    {"qwen3_5", "qwen3_5_text", ARCH_QWEN3_5},
    {"qwen3_5_text", NULL, ARCH_QWEN3_5},
    {"qwen3_5_moe", "qwen3_5_moe_text", ARCH_QWEN3_5_MOE},
    {"qwen3_5_moe_text", NULL, ARCH_QWEN3_5_MOE},
};

/* ---- messages ---- */

/* A file's words may hold anything; messages are one line of ASCII. */
static void make_printable(char *text)
{
    for (; *text; text++)
        if (*text < 0x20 || *text > 0x7e)
            *text = '?';
}

/* The value in words; containers by kind only. */
static const char *value_text(const json_t *v, char text[80])
{
    if (json_is_string(v)) {
        const char *s = json_string_value(v);
        snprintf(text, 80, "\"%.64s%s\"", s, strlen(s) > 64 ? "..." : "");
        make_printable(text);
    } else if (json_is_integer(v)) {
        snprintf(text, 80, "%lld", (long long)json_integer_value(v));
    } else if (json_is_real(v)) {
        snprintf(text, 80, "%.9g", json_real_value(v));
    } else {
        snprintf(text, 80, "%s",
                 !v                  ? "absent"
                 : json_is_object(v) ? "an object"
                 : json_is_array(v)  ? "a list"
                 : json_is_true(v)   ? "true"
                 : json_is_false(v)  ? "false"
                                     : "null");
    }
    return text;
}

__attribute__((format(printf, 5, 6))) static int
refuse(const struct reader *r, int code, const char *key, const json_t *v, const char *fmt, ...)
{
    char text[80], accepted[160];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(accepted, sizeof(accepted), fmt, ap);
    va_end(ap);
    return errmsg_set(r->e, code, "%s: %s%s is %s; accepted: %s", r->name, r->prefix, key,
                      value_text(v, text), accepted);
}

/* ---- fields ---- */

static int read_int(const struct reader *r, const char *key, const json_t *v, int64_t min,
                    int64_t max, int32_t *out)
{
    int64_t n = json_integer_value(v);
    if (!json_is_integer(v) || n < min || n > max) {
        if (min == max)
            return refuse(r, json_is_integer(v) && n > 0 ? ERR_UNSUPPORTED : ERR_INVALID, key,
                          v, "%lld", (long long)min);
        return refuse(r, ERR_INVALID, key, v, "an integer, %lld to %lld", (long long)min,
                      (long long)max);
    }
    *out = (int32_t)n;
    return 0;
}

static int read_ints(struct reader *r)
{
    for (size_t i = 0; i < sizeof(int_fields) / sizeof(int_fields[0]); i++) {
        const struct int_field *f = &int_fields[i];
        int32_t *out = (int32_t *)((char *)r + f->at);
        *out = f->by_family[r->a.family];
        const json_t *v = json_object_get(r->text, f->key);
        if (!v || !*out)
            continue;
        /* Only Qwen3-Next may be without experts. */
        int32_t min = f->min;
        if (min == 0 && r->a.family != ARCH_QWEN3_NEXT)
            min = 1;
        int rc = read_int(r, f->key, v, min, f->max, out);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* A number above 0, at most max, that is finite and not 0 as f32. */
static int read_positive(const struct reader *r, const char *key, const json_t *v, double max,
                         double *out)
{
    double x = json_number_value(v);
    if (!json_is_number(v) || !isfinite((float)x) || !((float)x > 0) || x > max)
        return refuse(r, ERR_INVALID, key, v, "a number above 0, at most %g", max);
    *out = x;
    return 0;
}

static int read_bool(const struct reader *r, const json_t *from, const char *key, bool *out)
{
    const json_t *v = json_object_get(from, key);
    if (!v)
        return 0;
    if (!json_is_boolean(v))
        return refuse(r, ERR_INVALID, key, v, "true or false");
    *out = json_is_true(v);
    return 0;
}

/* A token id: an integer, a list of them (the first counts), or null; the text part's before
 * the whole config's. */
static int read_token_id(const struct reader *r, const char *key, int32_t *out)
{
    *out = -1;
    struct reader from = *r;
    const json_t *v = json_object_get(r->text, key);
    if (!v || json_is_null(v)) {
        v = json_object_get(r->root, key);
        from.prefix = "";
    }
    if (!v || json_is_null(v))
        return 0;
    if (!json_is_array(v))
        return read_int(&from, key, v, 0, r->a.vocab - 1, out);
    for (size_t i = json_array_size(v); i-- > 0;) {
        int rc = read_int(&from, key, json_array_get(v, i), 0, r->a.vocab - 1, out);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* ---- parts of the config ---- */

static int read_family(struct reader *r)
{
    const json_t *v = json_object_get(r->root, "model_type");
    const json_t *text = json_object_get(r->root, "text_config");
    for (size_t i = 0; json_is_string(v) && i < sizeof(families) / sizeof(families[0]); i++) {
        if (strcmp(json_string_value(v), families[i].type) != 0)
            continue;
        snprintf(r->a.model_type, sizeof(r->a.model_type), "%s", families[i].type);
        r->a.family = families[i].family;
        r->text = r->root;
        if (!text)
            return 0;
        if (!families[i].text_type)
            return refuse(r, ERR_INVALID, "text_config", text,
                          "no such field with model_type \"%s\"", families[i].type);
        if (!json_is_object(text))
            return refuse(r, ERR_INVALID, "text_config", text, "an object");
        r->text = text;
        r->prefix = "text_config.";
        r->a.nested = true;
        v = json_object_get(text, "model_type");
        if (v && (!json_is_string(v) || (strcmp(json_string_value(v), families[i].type) != 0 &&
                                         strcmp(json_string_value(v), families[i].text_type))))
            return refuse(r, ERR_UNSUPPORTED, "model_type", v, "\"%s\" in a \"%s\"",
                          families[i].text_type, families[i].type);
        return 0;
    }
    return refuse(r, v && !json_is_string(v) ? ERR_INVALID : ERR_UNSUPPORTED, "model_type", v,
                  "\"qwen3_next\", \"qwen3_5\", \"qwen3_5_text\", \"qwen3_5_moe\", "
                  "\"qwen3_5_moe_text\"");
}

/* Switches of which one position is computed: anything else is refused, never ignored. */
static int check_switches(const struct reader *r)
{
    bool attention_bias = false, sliding = false, gate = true;
    int rc = read_bool(r, r->text, "attention_bias", &attention_bias);
    if (rc == 0)
        rc = read_bool(r, r->text, "use_sliding_window", &sliding);
    if (rc == 0)
        rc = read_bool(r, r->text, "attn_output_gate", &gate);
    if (rc != 0)
        return rc;
    if (attention_bias)
        return refuse(r, ERR_UNSUPPORTED, "attention_bias", json_true(), "false");
    if (sliding)
        return refuse(r, ERR_UNSUPPORTED, "use_sliding_window", json_true(), "false");
    if (!gate)
        return refuse(r, ERR_UNSUPPORTED, "attn_output_gate", json_false(), "true");

    const json_t *v = json_object_get(r->text, "hidden_act");
    if (v && (!json_is_string(v) || strcmp(json_string_value(v), "silu") != 0))
        return refuse(r, ERR_UNSUPPORTED, "hidden_act", v, "\"silu\"");
    v = json_object_get(r->text, "output_gate_type");
    if (v && (!json_is_string(v) || (strcmp(json_string_value(v), "silu") != 0 &&
                                     strcmp(json_string_value(v), "swish") != 0)))
        return refuse(r, ERR_UNSUPPORTED, "output_gate_type", v, "\"silu\", \"swish\"");
    return 0;
}

static int check_quantization(const struct reader *r)
{
    const json_t *from[] = {r->root, r->text};
    for (int i = 0; i < 2; i++) {
        const json_t *q = json_object_get(from[i], "quantization_config");
        if (!q || json_is_null(q))
            continue;
        char text[80];
        const json_t *method = json_object_get(q, "quant_method");
        return errmsg_set(r->e, ERR_UNSUPPORTED,
                          "%s: quantization_config (quant_method %s) is not supported yet; "
                          "accepted: weights in BF16, F16 or F32, without quantization_config",
                          r->name, value_text(method, text));
    }
    return 0;
}

/* One set of parameters for all layers, without scaling. Where parameters stand by kind of
 * layer, their names are not where they are read. */
static int check_rope(const struct reader *r, const char *group, const json_t *rope)
{
    char path[96];
    const char *name;
    json_t *v;
    if (rope && !json_is_object(rope) && !json_is_null(rope))
        return refuse(r, ERR_INVALID, group, rope, "an object");
    json_object_foreach((json_t *)rope, name, v)
    {
        bool is_type = strcmp(name, "rope_type") == 0 || strcmp(name, "type") == 0;
        bool is_default = json_is_string(v) && strcmp(json_string_value(v), "default") == 0;
        if (!json_is_object(v) && (!is_type || is_default))
            continue;
        snprintf(path, sizeof(path), "%s.%.64s", group, name);
        make_printable(path);
        return refuse(r, ERR_UNSUPPORTED, path, v, "%s",
                      is_type ? "\"default\"" : "one set of parameters for all layers");
    }
    return 0;
}

/* rope_parameters first, or rope_scaling as it was called before; flat names second. */
static int read_rope(struct reader *r)
{
    double theta = 10000.0, factor = 0.25;
    const json_t *rope = json_object_get(r->text, "rope_parameters");
    const json_t *v = json_object_get(r->text, "rope_scaling");
    const char *group = "rope_parameters";
    if (v && !json_is_null(v)) {
        if (rope && !json_is_null(rope))
            return refuse(r, ERR_UNSUPPORTED, "rope_scaling", v,
                          "null, or no rope_parameters beside it");
        rope = v;
        group = "rope_scaling";
    }
    int rc = check_rope(r, group, rope);
    if (rc != 0)
        return rc;
    char key[64];
    v = json_object_get(rope, "rope_theta");
    snprintf(key, sizeof(key), "%s%srope_theta", v ? group : "", v ? "." : "");
    if (!v)
        v = json_object_get(r->text, "rope_theta");
    if (v) {
        rc = read_positive(r, key, v, 1e30, &theta);
        if (rc != 0)
            return rc;
    }
    v = json_object_get(rope, "partial_rotary_factor");
    snprintf(key, sizeof(key), "%s%spartial_rotary_factor", v ? group : "", v ? "." : "");
    if (!v)
        v = json_object_get(r->text, "partial_rotary_factor");
    if (v) {
        rc = read_positive(r, key, v, 1.0, &factor);
        if (rc != 0)
            return rc;
    }
    r->a.rope_theta = (float)theta;
    r->a.rot_dim = (int32_t)(r->a.D * factor);
    if (r->a.rot_dim < 2 || r->a.rot_dim % 2 != 0)
        return refuse(r, ERR_UNSUPPORTED, key, v,
                      "an even number of rotated dims out of head_dim %d, found %d", r->a.D,
                      r->a.rot_dim);
    return 0;
}

static int read_layers(struct reader *r)
{
    struct arch *a = &r->a;
    a->layers = calloc((uint32_t)a->n_layers, sizeof(a->layers[0]));
    if (!a->layers)
        return errmsg_set(r->e, ERR_NOMEM, "%s: no memory", r->name);
    const json_t *v = json_object_get(r->text, "layer_types");
    if (v && !json_is_null(v) &&
        (!json_is_array(v) || json_array_size(v) != (size_t)a->n_layers))
        return json_is_array(v)
                   ? errmsg_set(r->e, ERR_INVALID,
                                "%s: %slayer_types has %zu entries; accepted: %d, as "
                                "num_hidden_layers says",
                                r->name, r->prefix, json_array_size(v), a->n_layers)
                   : refuse(r, ERR_INVALID, "layer_types", v, "a list");
    for (int32_t l = 0; l < a->n_layers; l++) {
        const json_t *kind = json_array_get(v, (size_t)l);
        const char *s = json_string_value(kind);
        if (!kind)
            a->layers[l] = (l + 1) % r->interval == 0 ? LAYER_ATTN : LAYER_GDN;
        else if (s && strcmp(s, "full_attention") == 0)
            a->layers[l] = LAYER_ATTN;
        else if (s && strcmp(s, "linear_attention") == 0)
            a->layers[l] = LAYER_GDN;
        else
            return refuse(r, ERR_UNSUPPORTED, "layer_types", kind,
                          "\"linear_attention\", \"full_attention\"");
        *(a->layers[l] == LAYER_GDN ? &a->n_gdn : &a->n_attn) += 1;
    }
    return 0;
}

/* Which MLPs are mixtures. Qwen3-Next: those that mlp_only_layers and decoder_sparse_step
 * leave; Qwen3.5-MoE: all, the class reads neither field. */
static int read_mixtures(struct reader *r)
{
    struct arch *a = &r->a;
    a->moe = calloc((uint32_t)a->n_layers, sizeof(a->moe[0]));
    if (!a->moe)
        return errmsg_set(r->e, ERR_NOMEM, "%s: no memory", r->name);
    for (int32_t l = 0; l < a->n_layers; l++)
        a->moe[l] = a->E > 0 && (a->family != ARCH_QWEN3_NEXT || (l + 1) % r->sparse_step == 0);
    const json_t *dense = json_object_get(r->text, "mlp_only_layers");
    if (a->family == ARCH_QWEN3_NEXT && dense && !json_is_null(dense)) {
        if (!json_is_array(dense))
            return refuse(r, ERR_INVALID, "mlp_only_layers", dense, "a list");
        for (size_t i = 0; i < json_array_size(dense); i++) {
            int32_t l;
            int rc = read_int(r, "mlp_only_layers", json_array_get(dense, i), 0,
                              a->n_layers - 1, &l);
            if (rc != 0)
                return rc;
            a->moe[l] = false;
        }
    }
    int32_t n_moe = 0;
    for (int32_t l = 0; l < a->n_layers; l++)
        n_moe += a->moe[l];
    a->F = n_moe < a->n_layers ? r->F_file : 0;
    if (n_moe == 0)
        a->E = a->top_k = a->moe_F = a->shared_F = 0;
    if (a->top_k > a->E)
        return errmsg_set(r->e, ERR_INVALID,
                          "%s: %snum_experts_per_tok is %d; accepted: at most num_experts, %d",
                          r->name, r->prefix, a->top_k, a->E);
    a->renorm_topk = n_moe > 0;
    if (a->family == ARCH_QWEN3_NEXT && n_moe > 0)
        return read_bool(r, r->text, "norm_topk_prob", &a->renorm_topk);
    return 0;
}

static int check_heads(const struct reader *r)
{
    const struct arch *a = &r->a;
    if (a->HV % a->H != 0)
        return errmsg_set(r->e, ERR_INVALID,
                          "%s: %slinear_num_value_heads is %d; accepted: a multiple of "
                          "linear_num_key_heads, %d",
                          r->name, r->prefix, a->HV, a->H);
    if (a->HQ % a->HK != 0)
        return errmsg_set(r->e, ERR_INVALID,
                          "%s: %snum_attention_heads is %d; accepted: a multiple of "
                          "num_key_value_heads, %d",
                          r->name, r->prefix, a->HQ, a->HK);
    return 0;
}

/* The whole config's flag rules over the text part's; what none of them calls tied has a head
 * of its own. */
static int read_tie(struct reader *r)
{
    static const char key[] = "tie_word_embeddings";
    const json_t *from[] = {r->text, r->root};
    bool is_said = false, is_tied = false;
    for (int i = 0; i < 2; i++) {
        if (from[i] == r->root)
            r->prefix = "";
        int rc = read_bool(r, from[i], key, &r->a.tie_flag);
        if (rc != 0)
            return rc;
        is_said |= json_object_get(from[i], key) != NULL;
        is_tied |= r->a.tie_flag;
    }
    r->a.needs_head = is_said && !is_tied;
    return 0;
}

static int read_config(struct reader *r)
{
    struct arch *a = &r->a;
    double eps = 1e-6;
    int rc = read_family(r);
    if (rc == 0)
        rc = check_quantization(r);
    if (rc == 0)
        rc = check_switches(r);
    if (rc == 0)
        rc = read_ints(r);
    if (rc == 0)
        rc = check_heads(r);
    const json_t *v = json_object_get(r->text, "rms_norm_eps");
    if (rc == 0 && v)
        rc = read_positive(r, "rms_norm_eps", v, 1.0, &eps);
    if (rc == 0)
        rc = read_rope(r);
    if (rc == 0)
        rc = read_layers(r);
    if (rc == 0)
        rc = read_mixtures(r);
    if (rc == 0)
        rc = read_token_id(r, "eos_token_id", &a->eos_id);
    if (rc == 0)
        rc = read_token_id(r, "bos_token_id", &a->bos_id);
    if (rc == 0)
        rc = read_token_id(r, "pad_token_id", &a->pad_id);
    if (rc == 0)
        rc = read_tie(r);
    a->eps = (float)eps;
    a->conv_dim = 2 * a->H * a->K + a->HV * a->V;
    return rc;
}

/* ---- public ---- */

int arch_parse(const char *json, size_t len, const char *name, struct arch *a, struct errmsg *e)
{
    json_error_t where;
    json_t *root = json_loadb(json, len, JSON_REJECT_DUPLICATES, &where);
    if (!root) {
        make_printable(where.text);
        return errmsg_set(e, ERR_INVALID, "%s: not JSON: %s (line %d, column %d)", name,
                          where.text, where.line, where.column);
    }
    struct reader r = {.name = name, .prefix = "", .root = root, .text = root, .e = e};
    int rc = json_is_object(root) ? read_config(&r)
                                  : errmsg_set(e, ERR_INVALID, "%s: not a JSON object", name);
    json_decref(root);
    if (rc == 0)
        *a = r.a;
    else
        arch_fini(&r.a);
    return rc;
}

int arch_read(const char *dir, struct arch *a, struct errmsg *e)
{
    char path[4096];
    if (snprintf(path, sizeof(path), "%s/config.json", dir) >= (int)sizeof(path))
        return errmsg_set(e, ERR_INVALID, "the model directory's name is too long");
    struct buf text;
    buf_init(&text);
    int rc = file_read(path, CONFIG_MAX_BYTES, &text, e);
    if (rc == 0)
        rc = arch_parse(text.data, text.len, path, a, e);
    else if (rc == ERR_NOT_FOUND)
        rc = ERR_IO;
    else if (rc == ERR_TOO_LARGE)
        rc = ERR_INVALID;
    buf_fini(&text);
    return rc;
}

void arch_fini(struct arch *a)
{
    free(a->layers);
    free(a->moe);
    memset(a, 0, sizeof(*a));
}
