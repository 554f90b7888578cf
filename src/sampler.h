/* What one generating request asks of each of its tokens: the adjustments that its own tokens
 * make, and the numbers drawn from its seed. Pure but for the memory it owns; engine thread. */
#ifndef PREFILLD_SAMPLER_H
#define PREFILLD_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "backend.h"

struct token_bias {
    int32_t id;
    float bias;
};

enum { SAMPLING_MAX_STOPS = 17 }; /* the model's own, a chat's, and at least 8 of a caller's */

/* How tokens are chosen behind the prompt. All zero but max_new: greedy, and no end before. */
struct sampling {
    int32_t max_new;   /* tokens to generate, at least 1 */
    int32_t min_new;   /* before these no stop token is chosen */
    float temperature; /* 0: the most probable one, ties to the lower id */
    int32_t top_k;     /* 0: all */
    float top_p;       /* 0 or 1: all */
    float min_p;       /* 0: all */
    float presence_penalty, frequency_penalty; /* of generated tokens; 0: none */
    float repetition_penalty;                  /* of the prompt's too; 0 or 1: none */
    uint64_t seed;
    struct token_bias *bias; /* [n_bias] */
    int32_t n_bias;
    int32_t stop_ids[SAMPLING_MAX_STOPS]; /* the first one chosen is the last token */
    int32_t n_stop;
};

struct sampler {
    const struct sampling *s;
    struct row_adjust *adjust; /* [n_adjust], by id, distinct */
    float *biases;             /* [n_adjust] from s->bias */
    int32_t *n_made;           /* [n_adjust] times it was generated */
    int32_t n_adjust, cap;
    int32_t n_new;
};

/* prompt: [n_prompt] ids. Borrows s until sampler_fini. Returns 0 or ERR_NOMEM. */
int sampler_init(struct sampler *m, const struct sampling *s, const int32_t *prompt,
                 int32_t n_prompt);
void sampler_fini(struct sampler *m);

/* Whether the most probable token is what is wanted, without any adjustment. */
bool sampler_is_plain(const struct sampler *m);
/* The next token as the head is to choose it; row is the caller's to set. Valid until the next
 * sampler_add. The same (seed, token number) gives the same u in every batch. */
struct row_sample sampler_next(struct sampler *m);
/* id was generated. Returns 0 or ERR_NOMEM. */
int sampler_add(struct sampler *m, int32_t id);
bool sampler_is_stop(const struct sampler *m, int32_t id);

#endif
