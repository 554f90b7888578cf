/* A model of three layers for tests where cases count: a folder with its config.json. */
#ifndef PREFILLD_TESTS_TINY_MODEL_H
#define PREFILLD_TESTS_TINY_MODEL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A folder with the config.json of a model as small as the backends take, of both kinds of
 * layers: cases count here, not depth. The caller removes it. */
static inline void tiny_make(char dir[64])
{
    static const char config[] =
        "{\"model_type\": \"qwen3_next\", \"architectures\": [\"Qwen3NextForCausalLM\"], "
        "\"hidden_size\": 64, \"num_hidden_layers\": 3, \"vocab_size\": 96, "
        "\"layer_types\": [\"linear_attention\", \"full_attention\", \"linear_attention\"], "
        "\"linear_conv_kernel_dim\": 4, \"linear_key_head_dim\": 128, "
        "\"linear_num_key_heads\": 1, \"linear_num_value_heads\": 1, "
        "\"linear_value_head_dim\": 128, \"num_attention_heads\": 1, "
        "\"num_key_value_heads\": 1, \"head_dim\": 256, \"partial_rotary_factor\": 0.25, "
        "\"rope_theta\": 10000.0, \"rms_norm_eps\": 1e-06, \"intermediate_size\": 64, "
        "\"mlp_only_layers\": [0, 1, 2], \"num_experts\": 0, \"hidden_act\": \"silu\", "
        "\"max_position_embeddings\": 4096, \"tie_word_embeddings\": true, "
        "\"eos_token_id\": 95}";
    char path[96];
    strcpy(dir, "/tmp/prefilld-share-XXXXXX");
    if (!mkdtemp(dir))
        exit(1);
    snprintf(path, sizeof(path), "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    if (!f || fputs(config, f) < 0 || fclose(f) != 0)
        exit(1);
}

static inline void tiny_remove(const char *dir)
{
    char path[96];
    snprintf(path, sizeof(path), "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}

#endif
