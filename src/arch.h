/* What a checkpoint's config.json says: the architecture, in numbers.
 *
 * Read once at start by the main thread; constant afterwards. Knows the published families
 * (qwen3_next, qwen3_5, qwen3_5_moe and their text types, nested or plain) and nothing of files
 * other than config.json. Absent fields take the defaults of transformers 5.24's classes. */
#ifndef PREFILLD_ARCH_H
#define PREFILLD_ARCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum arch_family { ARCH_QWEN3_NEXT, ARCH_QWEN3_5, ARCH_QWEN3_5_MOE };

enum layer_kind { LAYER_GDN, LAYER_ATTN };

/* Sizes in the letters of backend.h. */
struct arch {
    enum arch_family family;
    char model_type[32]; /* as written in the file */
    bool nested;         /* text_config inside a multimodal config */

    int32_t n_layers;
    int32_t M;
    int32_t vocab;
    int32_t max_positions;
    float eps;
    bool tie_flag;   /* tie_word_embeddings as the file says; lm_head's presence decides */
    bool needs_head; /* the file has that flag, and nowhere as true */
    int32_t eos_id, bos_id, pad_id; /* below vocab; -1: none; the first of a list */

    enum layer_kind *layers; /* [n_layers], owned */
    bool *moe;               /* [n_layers] the layer's MLP is a mixture; owned */
    int32_t n_gdn, n_attn;   /* layers of each kind */

    /* GDN */
    int32_t H, HV, K, V; /* key heads, value heads, head dims */
    int32_t conv_taps;   /* 4 */
    int32_t conv_dim;    /* 2*H*K + HV*V */

    /* attention */
    int32_t HQ, HK, D;
    int32_t rot_dim; /* even, 2..D */
    float rope_theta;

    /* MLP */
    int32_t F;                         /* dense; 0 when every layer is a mixture */
    int32_t E, top_k, moe_F, shared_F; /* all 0 when no layer is a mixture, else all > 0 */
    bool renorm_topk;
};

/* Reads dir/config.json. On error *a is untouched and e names field, value and what is
 * accepted. Caller ends with arch_fini. Returns 0, ERR_IO, ERR_INVALID, ERR_UNSUPPORTED or
 * ERR_NOMEM. */
int arch_read(const char *dir, struct arch *a, struct errmsg *e);

/* The same from JSON text; name is used in messages. */
int arch_parse(const char *json, size_t len, const char *name, struct arch *a,
               struct errmsg *e);

void arch_fini(struct arch *a);

#endif
