/* Private to cpu_gdn*.c: the pieces of the gated delta rule's chunked form.
 *
 * A chunk of a value head is worked in two parts: what does not need the state (its decays, and
 * two triangular matrices), and what does. The first may be done for many chunks at a time. */
#ifndef PREFILLD_CPU_GDN_H
#define PREFILLD_CPU_GDN_H

#include "cpu_impl.h"

/* The state-independent part of one chunk of one value head; n rows are used. */
struct gdn_prep {
    float L[CHUNK_TOKENS * CHUNK_TOKENS]; /* beta_i k_i.k_j e^(c_i - c_j), j < i; else unused */
    float P[CHUNK_TOKENS * CHUNK_TOKENS]; /* q_i.k_j e^(c_i - c_j), j <= i; 0 above */
    float decay[CHUNK_TOKENS];            /* e^c_i: from the chunk's start to row i */
    float rest[CHUNK_TOKENS];             /* e^(c_last - c_i): from row i to the chunk's end */
};

/* A chunk: rows tok .. tok + n - 1 of the batch. */
struct gdn_chunk {
    int32_t tok, n;
};

/* What the value heads of a key head share in a chunk. */
struct gdn_keys {
    float rows[2 * CHUNK_TOKENS * GDN_DIM_MAX];  /* [2 n, K] the keys, then the queries */
    float dots[2 * CHUNK_TOKENS * CHUNK_TOKENS]; /* [2 n, 64] k_i.k_j, then q_i.k_j; j < n */
};

/* Scratch of one thread. */
struct gdn_scratch {
    struct gdn_keys keys;
    struct gdn_prep prep;
    float R[2 * CHUNK_TOKENS * GDN_DIM_MAX];
    void *mm;
};

/* All of these run on the calling thread. */

/* Copies the rows; the dots are left to gdn_keys_multiply. */
void gdn_keys_copy(const struct op_gdn_delta *a, struct gdn_chunk c, int32_t i_key_head,
                   struct gdn_keys *out);
void gdn_keys_multiply(int32_t n, int32_t K, struct gdn_keys *keys, void *mm);
void gdn_prep_make(const struct op_gdn_delta *a, struct gdn_chunk c, int32_t i_head,
                   const struct gdn_keys *keys, struct gdn_prep *out);

/* Columns v0 .. v0 + n_v of the state S [K, V] and of the outputs; s->keys has the chunk's
 * rows. is_fresh: S is all zeros. */
void gdn_chunk_apply(const struct op_gdn_delta *a, struct gdn_chunk c, int32_t i_head,
                     int32_t v0, int32_t n_v, const struct gdn_prep *prep, bool is_fresh,
                     float *S, struct gdn_scratch *s);

/* o = rmsnorm(o) * w * silu(z) for one head of rows tok .. tok + n - 1. */
void gdn_gate_rows(const struct op_gdn_delta *a, int32_t i_head, int32_t tok, int32_t n);

#endif
