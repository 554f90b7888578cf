/* config.json: every published form, transformers' defaults, and what is refused. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <string.h>

#include "arch.h"
#include "buf.h"
#include "ckpt.h"
#include "leaks.h"
#include "rng.h"

TestSuite(arch, .fini = leaks_check);

static int parse(const char *json, struct arch *a, struct errmsg *e)
{
    memset(e, 0, sizeof(*e));
    return arch_parse(json, strlen(json), "config.json", a, e);
}

/* Asserts that json is refused with code, naming every word of words (separated by '|'). */
static void refused(const char *json, int code, const char *words)
{
    struct arch a, before;
    struct errmsg e;
    char copy[256], *save;
    memset(&a, 0x5a, sizeof(a));
    before = a;
    int rc = parse(json, &a, &e);
    cr_assert(rc == code, "%s: %d %s", json, rc, e.text);
    cr_assert(memcmp(&a, &before, sizeof(a)) == 0, "%s: *a was touched", json);
    snprintf(copy, sizeof(copy), "%s", words);
    for (char *w = strtok_r(copy, "|", &save); w; w = strtok_r(NULL, "|", &save))
        cr_assert(strstr(e.text, w), "%s: \"%s\" does not name %s", json, e.text, w);
}

static struct arch accepted(const char *json)
{
    struct arch a;
    struct errmsg e;
    int rc = parse(json, &a, &e);
    cr_assert(rc == 0, "%s: %d %s", json, rc, e.text);
    return a;
}

/* Every number of struct arch, in words. */
static const char *describe(const struct arch *a, char text[1024])
{
    snprintf(
        text, 1024,
        "%s family %d nested %d layers %d M %d vocab %d positions %d eps %.9g tie %d "
        "eos %d bos %d pad %d gdn %d attn %d H %d HV %d K %d V %d taps %d conv_dim %d "
        "HQ %d HK %d D %d rot %d theta %.9g F %d E %d top %d moe_F %d shared_F %d renorm %d",
        a->model_type, a->family, a->nested, a->n_layers, a->M, a->vocab, a->max_positions,
        (double)a->eps, a->tie_flag, a->eos_id, a->bos_id, a->pad_id, a->n_gdn, a->n_attn, a->H,
        a->HV, a->K, a->V, a->conv_taps, a->conv_dim, a->HQ, a->HK, a->D, a->rot_dim,
        (double)a->rope_theta, a->F, a->E, a->top_k, a->moe_F, a->shared_F, a->renorm_topk);
    return text;
}

static void same_arch(const struct arch *a, const struct arch *want)
{
    char found[1024], wanted[1024];
    cr_assert_str_eq(describe(a, found), describe(want, wanted));
    for (int32_t l = 0; l < a->n_layers; l++) {
        cr_assert(a->layers[l] == ((l + 1) % 4 ? LAYER_GDN : LAYER_ATTN), "layer %d", l);
        cr_assert(a->moe[l] == (want->E > 0), "layer %d", l);
    }
}

/* What transformers 5.24.0 prints for Qwen3NextConfig(), Qwen3_5TextConfig() and
 * Qwen3_5MoeTextConfig() (to_dict); rot_dim is int(head_dim * partial_rotary_factor). */
static const struct arch next_defaults = {.family = ARCH_QWEN3_NEXT,
                                          .model_type = "qwen3_next",
                                          .n_layers = 48,
                                          .M = 2048,
                                          .vocab = 151936,
                                          .max_positions = 32768,
                                          .eps = 1e-6f,
                                          .eos_id = -1,
                                          .bos_id = -1,
                                          .pad_id = -1,
                                          .n_gdn = 36,
                                          .n_attn = 12,
                                          .H = 16,
                                          .HV = 32,
                                          .K = 128,
                                          .V = 128,
                                          .conv_taps = 4,
                                          .conv_dim = 8192,
                                          .HQ = 16,
                                          .HK = 2,
                                          .D = 256,
                                          .rot_dim = 64,
                                          .rope_theta = 10000,
                                          .F = 0,
                                          .E = 512,
                                          .top_k = 10,
                                          .moe_F = 512,
                                          .shared_F = 512,
                                          .renorm_topk = true};

static struct arch dense_defaults(void)
{
    struct arch a = next_defaults;
    a.family = ARCH_QWEN3_5;
    strcpy(a.model_type, "qwen3_5_text");
    a.n_layers = 32;
    a.n_gdn = 24;
    a.n_attn = 8;
    a.M = 4096;
    a.vocab = 248320;
    a.HK = 4;
    a.F = 12288;
    a.E = a.top_k = a.moe_F = a.shared_F = 0;
    a.renorm_topk = false;
    return a;
}

static struct arch moe_defaults(void)
{
    struct arch a = next_defaults;
    a.family = ARCH_QWEN3_5_MOE;
    strcpy(a.model_type, "qwen3_5_moe_text");
    a.n_layers = 40;
    a.n_gdn = 30;
    a.n_attn = 10;
    a.vocab = 248320;
    a.E = 256;
    a.top_k = 8;
    return a;
}

Test(arch, defaults_of_transformers)
{
    struct arch want, a = accepted("{\"model_type\": \"qwen3_next\"}");
    same_arch(&a, &next_defaults);
    arch_fini(&a);

    want = dense_defaults();
    a = accepted("{\"model_type\": \"qwen3_5_text\"}");
    same_arch(&a, &want);
    arch_fini(&a);
    want.nested = true;
    strcpy(want.model_type, "qwen3_5");
    a = accepted("{\"model_type\": \"qwen3_5\", \"text_config\": {}}");
    same_arch(&a, &want);
    arch_fini(&a);

    want = moe_defaults();
    a = accepted("{\"model_type\": \"qwen3_5_moe_text\"}");
    same_arch(&a, &want);
    arch_fini(&a);
    want.nested = true;
    strcpy(want.model_type, "qwen3_5_moe");
    a = accepted("{\"model_type\": \"qwen3_5_moe\", \"text_config\": {}}");
    same_arch(&a, &want);
    arch_fini(&a);

    want.nested = false; /* the outer type without text_config */
    a = accepted("{\"model_type\": \"qwen3_5_moe\"}");
    same_arch(&a, &want);
    arch_fini(&a);
}

/* The published Qwen3-Next-80B-A3B-Instruct config (gdn.md 1.7): flat rope names,
 * "torch_dtype", full_attention_interval, no layer_types. */
Test(arch, qwen3_next_80b)
{
    struct arch want = next_defaults;
    want.max_positions = 262144;
    want.rope_theta = 1e7f;
    want.bos_id = 151643;
    want.eos_id = 151645;
    struct arch a = accepted(
        "{\"architectures\": [\"Qwen3NextForCausalLM\"], \"attention_dropout\": 0.0,"
        "\"bos_token_id\": 151643, \"eos_token_id\": 151645, \"decoder_sparse_step\": 1,"
        "\"full_attention_interval\": 4, \"head_dim\": 256, \"hidden_act\": \"silu\","
        "\"hidden_size\": 2048, \"initializer_range\": 0.02, \"intermediate_size\": 5120,"
        "\"linear_conv_kernel_dim\": 4, \"linear_key_head_dim\": 128,"
        "\"linear_num_key_heads\": 16, \"linear_num_value_heads\": 32,"
        "\"linear_value_head_dim\": 128, \"max_position_embeddings\": 262144,"
        "\"mlp_only_layers\": [], \"model_type\": \"qwen3_next\","
        "\"moe_intermediate_size\": 512, \"norm_topk_prob\": true, \"num_attention_heads\": 16,"
        "\"num_experts\": 512, \"num_experts_per_tok\": 10, \"num_hidden_layers\": 48,"
        "\"num_key_value_heads\": 2, \"output_router_logits\": false,"
        "\"partial_rotary_factor\": 0.25, \"rms_norm_eps\": 1e-06, \"rope_scaling\": null,"
        "\"rope_theta\": 10000000, \"router_aux_loss_coef\": 0.001,"
        "\"shared_expert_intermediate_size\": 512, \"tie_word_embeddings\": false,"
        "\"torch_dtype\": \"bfloat16\", \"transformers_version\": \"4.57.0.dev0\","
        "\"use_cache\": true, \"use_sliding_window\": false, \"vocab_size\": 151936}");
    same_arch(&a, &want);
    arch_fini(&a);
}

/* Qwen3.5-27B as gdn.md 1.7 and 1.8 give it: nested, rope_parameters, layer_types, token ids
 * inside, the flag outside. */
Test(arch, qwen3_5_27b)
{
    struct buf json;
    buf_init(&json);
    buf_adds(
        &json,
        "{\"architectures\": [\"Qwen3_5ForConditionalGeneration\"],"
        "\"image_token_id\": 248056, \"model_type\": \"qwen3_5\","
        "\"tie_word_embeddings\": false, \"vision_config\": {\"depth\": 27},"
        "\"text_config\": {\"attention_bias\": false, \"attn_output_gate\": true,"
        "\"dtype\": \"bfloat16\", \"eos_token_id\": 248044, \"full_attention_interval\": 4,"
        "\"head_dim\": 256, \"hidden_act\": \"silu\", \"hidden_size\": 5120,"
        "\"intermediate_size\": 17408, \"linear_conv_kernel_dim\": 4,"
        "\"linear_key_head_dim\": 128, \"linear_num_key_heads\": 16,"
        "\"linear_num_value_heads\": 48, \"linear_value_head_dim\": 128,"
        "\"mamba_ssm_dtype\": \"float32\", \"max_position_embeddings\": 262144,"
        "\"mlp_only_layers\": [], \"model_type\": \"qwen3_5_text\","
        "\"mtp_num_hidden_layers\": 1, \"mtp_use_dedicated_embeddings\": false,"
        "\"num_attention_heads\": 24, \"num_hidden_layers\": 64,"
        "\"num_key_value_heads\": 4, \"partial_rotary_factor\": 0.5,"
        "\"rms_norm_eps\": 1e-06, \"rope_theta\": 5000000, \"rope_parameters\": {"
        "\"mrope_interleaved\": true, \"mrope_section\": [11, 11, 10],"
        "\"partial_rotary_factor\": 0.25, \"rope_theta\": 10000000,"
        "\"rope_type\": \"default\"}, \"use_cache\": true, \"vocab_size\": 248320,"
        "\"layer_types\": [");
    for (int l = 0; l < 64; l++)
        buf_printf(&json, "%s\"%s_attention\"", l ? "," : "", l % 4 == 3 ? "full" : "linear");
    buf_adds(&json, "]}}");
    struct arch want = dense_defaults(), a = accepted(buf_cstr(&json));
    strcpy(want.model_type, "qwen3_5");
    want.nested = true;
    want.n_layers = 64;
    want.n_gdn = 48;
    want.n_attn = 16;
    want.M = 5120;
    want.F = 17408;
    want.HV = 48;
    want.conv_dim = 10240;
    want.HQ = 24;
    want.max_positions = 262144;
    want.rope_theta = 1e7f;
    want.eos_id = 248044;
    same_arch(&a, &want);
    arch_fini(&a);
    buf_fini(&json);
}

/* What the demo model's own file says. */
Test(arch, demo_model)
{
    char dir[512];
    const char *top = getenv("SRCDIR");
    struct errmsg e;
    struct arch a, want = next_defaults;
    snprintf(dir, sizeof(dir), "%s/tests/models/demo", top ? top : ".");
    int rc = arch_read(dir, &a, &e);
    cr_assert(rc == 0, "%s", e.text);
    want.n_layers = 8;
    want.n_gdn = 6;
    want.n_attn = 2;
    want.M = 128;
    want.vocab = 2048;
    want.eos_id = want.bos_id = want.pad_id = 2045;
    want.tie_flag = true;
    want.H = 2;
    want.HV = 4;
    want.conv_dim = 1024;
    want.HQ = 2;
    want.HK = 1;
    want.E = 8;
    want.top_k = 2;
    want.moe_F = want.shared_F = 64;
    same_arch(&a, &want);
    arch_fini(&a);
}

Test(arch, fixtures)
{
    static const struct {
        const char *name;
        enum arch_family family;
        bool nested, tie;
        int32_t H, HV, HQ, HK, M, F, E, top_k, eos;
    } rows[] = {
        {"next-moe-r2", ARCH_QWEN3_NEXT, false, false, 2, 4, 4, 2, 128, 0, 8, 3, 314},
        {"q35-dense-r1", ARCH_QWEN3_5, false, false, 2, 2, 4, 2, 256, 384, 0, 0, 312},
        {"q35-dense-r3", ARCH_QWEN3_5, true, true, 1, 3, 6, 1, 128, 320, 0, 0, 312},
        {"q35-moe-r2", ARCH_QWEN3_5_MOE, true, false, 2, 4, 8, 1, 128, 0, 16, 4, 312},
    };
    const char *top = getenv("SRCDIR");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char dir[512];
        struct arch a;
        struct errmsg e;
        snprintf(dir, sizeof(dir), "%s/../shared/fixtures/%s", top ? top : ".", rows[i].name);
        if (access(dir, R_OK) != 0)
            cr_skip_test("../shared/fixtures is not here");
        int rc = arch_read(dir, &a, &e);
        cr_assert(rc == 0, "%s", e.text);
        cr_assert(a.family == rows[i].family && a.nested == rows[i].nested &&
                      a.tie_flag == rows[i].tie,
                  "%s", rows[i].name);
        cr_assert(a.H == rows[i].H && a.HV == rows[i].HV && a.HQ == rows[i].HQ &&
                      a.HK == rows[i].HK && a.M == rows[i].M && a.F == rows[i].F &&
                      a.E == rows[i].E && a.top_k == rows[i].top_k && a.eos_id == rows[i].eos,
                  "%s", rows[i].name);
        cr_assert(a.n_layers == 4 && a.n_gdn == 3 && a.n_attn == 1 && a.rope_theta == 1e7f &&
                      a.rot_dim == 64 && a.max_positions == 262144,
                  "%s", rows[i].name);
        arch_fini(&a);
    }
}

#define NEXT(fields) "{\"model_type\": \"qwen3_next\", " fields "}"
#define NESTED(fields) "{\"model_type\": \"qwen3_5\", \"text_config\": {" fields "}}"

/* rope_parameters first, flat names second, defaults third; each value by itself. */
Test(arch, rope)
{
    static const struct {
        const char *json;
        float theta;
        int32_t rot_dim;
    } rows[] = {
        {NEXT("\"rope_theta\": 5000000"), 5e6f, 64},
        {NEXT("\"rope_theta\": 5e6, \"rope_parameters\": {\"rope_theta\": 1e7}"), 1e7f, 64},
        {NEXT("\"rope_theta\": 5e6, \"rope_parameters\": {\"rope_type\": \"default\"}"), 5e6f,
         64},
        {NEXT("\"partial_rotary_factor\": 0.5, \"rope_parameters\": {\"type\": \"default\"}"),
         1e4f, 128},
        {NEXT("\"partial_rotary_factor\": 0.5, \"rope_parameters\": "
              "{\"partial_rotary_factor\": 0.125}"),
         1e4f, 32},
        {NEXT("\"rope_parameters\": null, \"rope_scaling\": null"), 1e4f, 64},
        {NEXT("\"rope_theta\": 5e6, \"rope_scaling\": {\"rope_type\": \"default\"}"), 5e6f, 64},
        {NEXT("\"rope_scaling\": {\"type\": \"default\", \"rope_theta\": 1e7}"), 1e7f, 64},
        {NEXT("\"partial_rotary_factor\": 1"), 1e4f, 256},
        {NESTED("\"rope_parameters\": {\"rope_theta\": 123.5}"), 123.5f, 64},
        /* Names outside text_config are not the text model's. */
        {"{\"model_type\": \"qwen3_5\", \"rope_theta\": 7, \"text_config\": {}}", 1e4f, 64},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct arch a = accepted(rows[i].json);
        cr_assert(a.rope_theta == rows[i].theta, "%s: %g", rows[i].json, (double)a.rope_theta);
        cr_assert(a.rot_dim == rows[i].rot_dim, "%s: %d", rows[i].json, a.rot_dim);
        arch_fini(&a);
    }
}

/* mlp_only_layers and decoder_sparse_step count for Qwen3-Next only. */
Test(arch, which_layers_are_mixtures)
{
    struct arch a = accepted(NEXT("\"num_hidden_layers\": 6, \"decoder_sparse_step\": 2, "
                                  "\"mlp_only_layers\": [3], \"norm_topk_prob\": false"));
    for (int32_t l = 0; l < 6; l++)
        cr_assert(a.moe[l] == (l == 1 || l == 5), "layer %d", l);
    cr_assert(a.F == 5632 && a.E == 512 && !a.renorm_topk);
    arch_fini(&a);

    a = accepted(NEXT("\"num_hidden_layers\": 2, \"num_experts\": 0"));
    cr_assert(!a.moe[0] && !a.moe[1] && a.F == 5632);
    cr_assert(a.E == 0 && a.top_k == 0 && a.moe_F == 0 && a.shared_F == 0 && !a.renorm_topk);
    arch_fini(&a);
    a = accepted(NEXT("\"num_hidden_layers\": 2, \"mlp_only_layers\": [0, 1]"));
    cr_assert(a.E == 0 && a.F == 5632);
    arch_fini(&a);

    a = accepted("{\"model_type\": \"qwen3_5_moe_text\", \"num_hidden_layers\": 3, "
                 "\"mlp_only_layers\": [0], \"decoder_sparse_step\": 2, "
                 "\"norm_topk_prob\": false, \"intermediate_size\": 99}");
    cr_assert(a.moe[0] && a.moe[1] && a.moe[2] && a.F == 0 && a.renorm_topk);
    arch_fini(&a);
    a = accepted("{\"model_type\": \"qwen3_5_text\", \"num_experts\": 8, "
                 "\"mlp_only_layers\": []}");
    cr_assert(!a.moe[0] && a.E == 0 && a.F == 12288);
    arch_fini(&a);
}

Test(arch, layer_kinds_and_token_ids)
{
    struct arch a = accepted(NEXT("\"num_hidden_layers\": 3, \"full_attention_interval\": 2"));
    cr_assert(a.layers[0] == LAYER_GDN && a.layers[1] == LAYER_ATTN && a.n_gdn == 2 &&
              a.n_attn == 1);
    arch_fini(&a);
    a = accepted(NEXT("\"num_hidden_layers\": 2, \"full_attention_interval\": 9, "
                      "\"layer_types\": [\"full_attention\", \"linear_attention\"]"));
    cr_assert(a.layers[0] == LAYER_ATTN && a.layers[1] == LAYER_GDN);
    arch_fini(&a);
    a = accepted(
        NEXT("\"layer_types\": null, \"eos_token_id\": [7, 8], \"bos_token_id\": null, "
             "\"pad_token_id\": []"));
    cr_assert(a.eos_id == 7 && a.bos_id == -1 && a.pad_id == -1);
    arch_fini(&a);
    /* The text part's before the whole's; the whole's flag over the text part's. */
    a = accepted("{\"model_type\": \"qwen3_5\", \"eos_token_id\": 1, \"bos_token_id\": 2, "
                 "\"tie_word_embeddings\": false, \"text_config\": {\"eos_token_id\": 3, "
                 "\"tie_word_embeddings\": true}}");
    cr_assert(a.eos_id == 3 && a.bos_id == 2 && !a.tie_flag && !a.needs_head);
    arch_fini(&a);
    a = accepted(NESTED("\"tie_word_embeddings\": true, \"model_type\": \"qwen3_5\""));
    cr_assert(a.tie_flag && !a.needs_head);
    arch_fini(&a);
    a = accepted(NESTED("\"tie_word_embeddings\": false"));
    cr_assert(!a.tie_flag && a.needs_head && !next_defaults.needs_head);
    arch_fini(&a);
}

Test(arch, refuses_what_it_does_not_compute)
{
    refused("{}", ERR_UNSUPPORTED, "model_type|absent|qwen3_next");
    refused("{\"model_type\": \"llama\"}", ERR_UNSUPPORTED, "model_type|\"llama\"|qwen3_5_moe");
    refused("{\"model_type\": 3}", ERR_INVALID, "model_type|3");
    refused("{\"model_type\": \"qwen3_5\", \"text_config\": {\"model_type\": "
            "\"qwen3_5_moe_text\"}}",
            ERR_UNSUPPORTED, "text_config.model_type|qwen3_5_moe_text|qwen3_5_text");
    refused("{\"model_type\": \"qwen3_next\", \"text_config\": {}}", ERR_INVALID,
            "text_config");
    refused("{\"model_type\": \"qwen3_5\", \"text_config\": 1}", ERR_INVALID, "text_config|1");
    refused(NEXT("\"hidden_act\": \"gelu\""), ERR_UNSUPPORTED, "hidden_act|\"gelu\"|\"silu\"");
    refused(NESTED("\"hidden_act\": \"gelu\""), ERR_UNSUPPORTED, "text_config.hidden_act");
    refused(NEXT("\"attention_bias\": true"), ERR_UNSUPPORTED, "attention_bias|true|false");
    refused(NEXT("\"use_sliding_window\": true"), ERR_UNSUPPORTED, "use_sliding_window");
    refused(NESTED("\"attn_output_gate\": false"), ERR_UNSUPPORTED, "attn_output_gate|false");
    refused(NEXT("\"output_gate_type\": \"sigmoid\""), ERR_UNSUPPORTED, "sigmoid|swish");
    refused(NEXT("\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0}"),
            ERR_UNSUPPORTED, "rope_scaling.rope_type|\"yarn\"|\"default\"");
    refused(NEXT("\"rope_scaling\": {\"rope_type\": \"default\"}, \"rope_parameters\": {}"),
            ERR_UNSUPPORTED, "rope_scaling|null|rope_parameters");
    refused(NEXT("\"rope_scaling\": 2"), ERR_INVALID, "rope_scaling|2|an object");
    refused(NEXT("\"rope_scaling\": {\"rope_theta\": -1}"), ERR_INVALID,
            "rope_scaling.rope_theta|-1");
    refused(NESTED("\"rope_parameters\": {\"rope_type\": \"yarn\"}"), ERR_UNSUPPORTED,
            "text_config.rope_parameters.rope_type|\"yarn\"|\"default\"");
    refused(NEXT("\"rope_parameters\": {\"type\": \"linear\"}"), ERR_UNSUPPORTED,
            "rope_parameters.type|linear");
    refused(NEXT("\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 5e5}}"),
            ERR_UNSUPPORTED, "rope_parameters.full_attention|an object|one set");
    refused(NEXT("\"linear_conv_kernel_dim\": 3"), ERR_UNSUPPORTED,
            "linear_conv_kernel_dim|3|4");
    refused(NEXT("\"layer_types\": [\"mamba\"], \"num_hidden_layers\": 1"), ERR_UNSUPPORTED,
            "layer_types|mamba|full_attention");
    refused(NEXT("\"partial_rotary_factor\": 0.1"), ERR_UNSUPPORTED, "even|25");
#define FP8 "\"quantization_config\": {\"quant_method\": \"fp8\"}"
    refused("{\"model_type\": \"qwen3_5\", " FP8 ", \"text_config\": {}}", ERR_UNSUPPORTED,
            "quantization_config|\"fp8\"|not supported yet|BF16");
    refused(NESTED(FP8), ERR_UNSUPPORTED, "quantization_config|\"fp8\"");
    struct arch a =
        accepted(NEXT("\"quantization_config\": null, \"output_gate_type\": \"swish\""));
    arch_fini(&a);
}

Test(arch, refuses_sizes_out_of_bounds)
{
    static const char *const fields[] = {"hidden_size",
                                         "num_hidden_layers",
                                         "vocab_size",
                                         "max_position_embeddings",
                                         "linear_num_key_heads",
                                         "linear_num_value_heads",
                                         "linear_key_head_dim",
                                         "linear_value_head_dim",
                                         "linear_conv_kernel_dim",
                                         "num_attention_heads",
                                         "num_key_value_heads",
                                         "head_dim",
                                         "intermediate_size",
                                         "num_experts",
                                         "num_experts_per_tok",
                                         "moe_intermediate_size",
                                         "shared_expert_intermediate_size",
                                         "full_attention_interval",
                                         "decoder_sparse_step"};
    static const char *const values[] = {
        "-1", "2147483648", "9223372036854775807", "2.0", "\"4\"", "null", "[4]", "{}", "true"};
    char json[256];
    for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++)
        for (size_t v = 0; v < sizeof(values) / sizeof(values[0]); v++) {
            snprintf(json, sizeof(json), "{\"model_type\": \"qwen3_next\", \"%s\": %s}",
                     fields[f], values[v]);
            struct arch a;
            struct errmsg e;
            int rc = parse(json, &a, &e);
            cr_assert(rc == ERR_INVALID || (rc == ERR_UNSUPPORTED && strstr(json, "conv")),
                      "%s: %d", json, rc);
            cr_assert(strstr(e.text, fields[f]) && strstr(e.text, "accepted"), "%s: %s", json,
                      e.text);
        }
    refused(NEXT("\"hidden_size\": 0"), ERR_INVALID, "hidden_size|0|1 to");
    refused(NEXT("\"hidden_size\": 65537"), ERR_INVALID, "hidden_size|65536");
    refused(NEXT("\"vocab_size\": 16777217"), ERR_INVALID, "vocab_size|16777216");
    refused(NEXT("\"head_dim\": 512"), ERR_INVALID, "head_dim|512|256");
    refused("{\"model_type\": \"qwen3_5_moe_text\", \"num_experts\": 0}", ERR_INVALID,
            "num_experts|0");
    refused(NEXT("\"linear_num_value_heads\": 24"), ERR_INVALID,
            "linear_num_value_heads|24|16");
    refused(NEXT("\"num_attention_heads\": 15"), ERR_INVALID, "num_attention_heads|15|2");
    refused(NEXT("\"num_experts\": 4, \"num_experts_per_tok\": 5"), ERR_INVALID,
            "num_experts_per_tok|5|4");
    refused(NEXT("\"layer_types\": [\"full_attention\"]"), ERR_INVALID,
            "layer_types|1 entr|48");
    refused(NEXT("\"layer_types\": {}"), ERR_INVALID, "layer_types|a list");
    refused(NEXT("\"layer_types\": [1], \"num_hidden_layers\": 1"), ERR_UNSUPPORTED,
            "layer_types|1");
    refused(NEXT("\"mlp_only_layers\": [48]"), ERR_INVALID, "mlp_only_layers|48|47");
    refused(NEXT("\"mlp_only_layers\": 0"), ERR_INVALID, "mlp_only_layers|a list");
    refused(NEXT("\"eos_token_id\": 151936"), ERR_INVALID, "eos_token_id|151935");
    refused(NEXT("\"eos_token_id\": [1, -1]"), ERR_INVALID, "eos_token_id|-1");
    refused(NEXT("\"bos_token_id\": \"<s>\""), ERR_INVALID, "bos_token_id|<s>");
    refused(NEXT("\"rms_norm_eps\": 0"), ERR_INVALID, "rms_norm_eps|0");
    refused(NEXT("\"rms_norm_eps\": 1e-60"), ERR_INVALID, "rms_norm_eps|1e-60");
    refused(NEXT("\"rms_norm_eps\": \"1e-6\""), ERR_INVALID, "rms_norm_eps");
    refused(NEXT("\"rope_theta\": 1e39"), ERR_INVALID, "rope_theta|1e+30");
    refused(NEXT("\"rope_theta\": -1"), ERR_INVALID, "rope_theta|-1");
    refused(NEXT("\"rope_parameters\": []"), ERR_INVALID, "rope_parameters|a list");
    refused(NEXT("\"rope_parameters\": {\"partial_rotary_factor\": 1.5}"), ERR_INVALID,
            "rope_parameters.partial_rotary_factor|1.5");
    refused(NEXT("\"norm_topk_prob\": 1"), ERR_INVALID, "norm_topk_prob|1|true or false");
    refused(NEXT("\"tie_word_embeddings\": null"), ERR_INVALID, "tie_word_embeddings|null");
}

Test(arch, refuses_hostile_json)
{
    refused("", ERR_INVALID, "config.json");
    refused("[]", ERR_INVALID, "object");
    refused("{\"model_type\": \"qwen3_next\",", ERR_INVALID, "not JSON|line 1");
    refused(NEXT("\"hidden_size\": 64, \"hidden_size\": 128"), ERR_INVALID, "duplicate");
    refused(NEXT("\"rope_theta\": 1e400"), ERR_INVALID, "not JSON");
    refused(NEXT("\"rope_theta\": NaN"), ERR_INVALID, "not JSON");
    refused(NEXT("\"hidden_size\": 99999999999999999999"), ERR_INVALID, "not JSON");
    refused(NEXT("\"hidden_act\": \"\\ud800\""), ERR_INVALID, "not JSON");

    /* Depth, length and control characters of values stay out of messages. */
    size_t n = 1 << 20;
    char *json = malloc(n + 64);
    memset(json, '[', n);
    json[n] = '\0';
    refused(json, ERR_INVALID, "not JSON");
    size_t len = (size_t)sprintf(json, "{\"model_type\": \"\\n\\u001b[31m");
    memset(json + len, 'x', n - len);
    strcpy(json + n, "\"}");
    struct arch a;
    struct errmsg e;
    cr_assert(parse(json, &a, &e) == ERR_UNSUPPORTED);
    for (const char *c = e.text; *c; c++)
        cr_assert((*c >= 0x20 && *c < 0x7f && c < e.text + 400));
    free(json);
}

/* Any damage to a real file gives an error or a sound result, never a crash. */
Test(arch, damaged_files)
{
    char path[512];
    const char *top = getenv("SRCDIR");
    struct rng rng = {1};
    char good[4096], bad[4096];
    snprintf(path, sizeof(path), "%s/tests/models/demo/config.json", top ? top : ".");
    FILE *f = fopen(path, "rb");
    cr_assert(f != NULL);
    size_t len = fread(good, 1, sizeof(good), f);
    fclose(f);
    int n_good = 0;
    for (int i = 0; i < 4000; i++) {
        static const char pool[] = "\"{}[],:0123456789-.eEnull\\ \0\x80\xff";
        size_t n = len;
        memcpy(bad, good, len);
        for (int k = rng_int(&rng, 3); k >= 0; k--) {
            size_t at = (size_t)rng_int(&rng, (int32_t)n);
            if (rng_int(&rng, 8) == 0)
                n = at + 1;
            else
                bad[at] = pool[rng_int(&rng, sizeof(pool) - 1)];
        }
        struct arch a;
        struct errmsg e = {{0}};
        if (arch_parse(bad, n, "bad", &a, &e) == 0) {
            cr_assert(a.n_gdn + a.n_attn == a.n_layers && a.top_k <= a.E && a.HV % a.H == 0);
            arch_fini(&a);
            n_good++;
        } else {
            cr_assert(e.text[0], "an error without words");
        }
    }
    cr_assert(n_good > 100 && n_good < 3900, "%d of 4000 accepted: the damage tests nothing",
              n_good);
}

Test(arch, reads_files)
{
    struct ckpt_dir d;
    struct arch a;
    struct errmsg e;
    ckpt_dir_open(&d);
    cr_assert(arch_read(d.path, &a, &e) == ERR_IO && strstr(e.text, d.path));
    ckpt_dir_put(&d, "config.json", "{\"model_type\": \"qwen3_next\"}");
    cr_assert(arch_read(d.path, &a, &e) == 0);
    arch_fini(&a);
    cr_assert(unlink(ckpt_dir_file(&d, "config.json")) == 0);
    cr_assert(mkfifo(d.file, 0600) == 0);
    cr_assert(arch_read(d.path, &a, &e) == ERR_IO && strstr(e.text, "regular"));
    cr_assert(unlink(d.file) == 0);
    FILE *f = fopen(d.file, "w");
    cr_assert(f && ftruncate(fileno(f), 64 << 20) == 0);
    fclose(f);
    cr_assert(arch_read(d.path, &a, &e) == ERR_INVALID && strstr(e.text, "bytes"));
    char longest[5000];
    memset(longest, 'd', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    cr_assert(arch_read(longest, &a, &e) == ERR_INVALID);
    ckpt_dir_close(&d);
}
