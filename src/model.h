/* The layer loop: one step of the whole model in backend operations, written once for every
 * backend, and the pools and scratch it runs in.
 *
 * Owns weights, activations and the memory of the pools (not which slot or page is whose).
 * Engine thread only after opening. Knows tensors; knows no request. */
#ifndef PREFILLD_MODEL_H
#define PREFILLD_MODEL_H

#include "arch.h"
#include "backend.h"
#include "state_file.h"
#include "weights.h"

/* What the operator chose; 0: choose a default. */
struct model_options {
    int32_t max_step_tokens;
    int32_t max_seqs;
    int32_t page_tokens;
    int32_t max_prompt_tokens;
    int32_t state_slots;
    int64_t kv_tokens;
    int32_t memory_share; /* thousandths of the backend's free memory; 0: all of it */
};

/* What it comes to, known before weights are read. */
struct model_sizes {
    struct model_options o; /* all filled in */
    int32_t n_pages;        /* of the pool */
    int32_t max_pages;      /* of one request */
    int32_t max_rows;       /* of the head in a step */
    size_t weights_bytes, scratch_bytes, workspace_bytes;
    size_t slot_bytes, page_bytes; /* one slot or page, all layers */
    size_t slots_bytes, pages_bytes;
    size_t total_bytes, memory_bytes; /* needed, and what may be taken */
};

struct model;

/* Sizes everything for a checkpoint (set NULL: dummy). Returns 0, or ERR_NOMEM / ERR_INVALID
 * with numbers in e when it cannot fit or contradicts itself. Reads no weights. */
int model_size(const struct arch *a, const struct st_set *set, struct backend *b,
               const struct model_options *o, struct model_sizes *out, struct errmsg *e);

/* Allocates pools and scratch, then loads weights. Borrows a, set and b until model_close. */
int model_open(const struct arch *a, const struct st_set *set, uint64_t seed, struct backend *b,
               const struct model_sizes *sizes, weights_progress progress, void *arg,
               struct model **out, struct errmsg *e);
void model_close(struct model *m);

/* Enqueues one step; results [h->n_rows] are in host memory when model_done says so. h and
 * results are borrowed until then. At most two steps are in flight. Returns 0 or ERR_DEVICE. */
int model_launch(struct model *m, const struct batch_host *h, struct row_result *results);
/* 1: the oldest step ended; 0: not yet (only when !wait); ERR_DEVICE. */
int model_done(struct model *m, bool wait);

/* Times of the step that model_done gave last; false: the backend keeps none. */
bool model_times(struct model *m, struct step_times *out);

/* Why the device was lost, in words. */
const char *model_why_lost(const struct model *m);

/* Fills a freed slot's or page's memory with NaN, after all enqueued work. */
void model_poison_slot(struct model *m, int32_t slot);
void model_poison_page(struct model *m, int32_t page);

/* Canonical copies (backend.h), layer l of its kind's count; for tests, export and import. */
int model_state_read(struct model *m, int32_t i_gdn, int32_t slot, float *S, float *conv);
int model_kv_read(struct model *m, int32_t i_attn, const int32_t *pages, int32_t n_tokens,
                  float *k, float *v);

/* A part of a session (state_file.h) to or from stage, of model_stage_alloc and its raw_bytes
 * long, as backend.h says of such copies. slot and pages are the session's. Returns 0 or
 * ERR_DEVICE. */
int model_part_get(struct model *m, const struct state_part *p, int32_t slot,
                   const int32_t *pages, void *stage);
int model_part_put(struct model *m, const struct state_part *p, int32_t slot,
                   const int32_t *pages, const void *stage);
/* Backend.h's copies_follow, copies_mark and copies_done, also where it has none: those that
 * are made at once are done. */
bool model_copies_are_queued(const struct model *m);
void model_copies_follow(struct model *m);
int model_copies_mark(struct model *m, int32_t i);
int model_copies_done(struct model *m, int32_t i, bool wait);
void *model_stage_alloc(struct model *m, size_t bytes);
void model_stage_free(struct model *m, void *p);
/* What sessions of m look like, fingerprint and names left open. */
struct state_shape model_state_shape(const struct model *m);

/* goes_on is asked before every layer, on the thread that launches; false abandons the step:
 * its other layers and its head are left out, its results and what it wrote to slots and pages
 * mean nothing, and model_done tells of its end as ever. */
void model_set_goes_on(struct model *m, bool (*goes_on)(void *arg), void *arg);

/* Tests: called with the residual stream x [T, M] f32 (backend memory) before layer 0 and after
 * each layer (layer + 1). NULL turns it off. */
void model_set_tap(struct model *m, void (*tap)(void *arg, int32_t layer, const float *x),
                   void *arg);

const struct model_sizes *model_sizes_of(const struct model *m);

#endif
