/* What a model's weights are made of, as data: one description that checking, sizing, loading
 * and dummy filling all follow.
 *
 * A plan holds one scope at a time (the model's own tensors, or one layer), so that it stays
 * small for models with 10^5 tensors. Main thread, at start. Touches no tensor data. */
#ifndef PREFILLD_WEIGHTS_PLAN_H
#define PREFILLD_WEIGHTS_PLAN_H

#include <stdbool.h>

#include "weights.h"

/* How a dummy's vector is drawn (weights_dummy.c). */
enum fill { FILL_NORM, FILL_CONV, FILL_A_LOG, FILL_DT_BIAS, FILL_ROW };

/* A vector: f32 in backend memory. */
struct plan_vec {
    size_t at; /* of the float * in struct weights or layer_weights */
    const struct st_tensor *t;
    int64_t n;
    bool is_zero_centred; /* stored as w, used as 1 + w */
    enum fill fill;
};

/* A run of rows of a tensor. */
struct plan_part {
    const struct st_tensor *t;
    int64_t row0, n_rows;
};

/* A matrix, or n_mats of them: its parts' rows in order. */
struct plan_mat {
    size_t at; /* of the struct weight in struct weights or layer_weights */
    int32_t n_mats, rows, cols;
    unsigned use;
    size_t i_part, n_parts;
    float std; /* of a dummy's elements */
};

struct plan_report; /* weights_check.c */

struct plan {
    const struct arch *a;
    const struct st_set *set;   /* NULL: dummy, every t is NULL */
    struct plan_report *report; /* NULL: tensors are known to be there and right */
    const char *prefix;         /* of names in set */
    bool tied;
    bool failed;   /* memory ran out; the scope is incomplete */
    int32_t layer; /* -1: the model's own */
    struct plan_vec *vecs;
    struct plan_mat *mats;
    struct plan_part *parts;
    size_t n_vecs, n_mats, n_parts, vecs_cap, mats_cap, parts_cap;
};

void plan_init(struct plan *p, const struct arch *a, const struct st_set *set);
void plan_fini(struct plan *p);

/* Replaces the plan by that of a scope, -1 to n_layers - 1. Returns 0 or ERR_NOMEM. */
int plan_scope(struct plan *p, int32_t layer);

/* The dtype of a matrix: its parts', f32 when they differ (backend.h, weight_make), bf16 for a
 * dummy. */
enum dtype plan_dtype(const struct plan *p, const struct plan_mat *m);
/* Whether a part's rows stand at a multiple of their element's size; if not, they must be
 * copied before a backend sees them. False for a dummy. */
bool plan_is_aligned(const struct plan_part *part);
/* Of a tensor that was checked; bf16 for NULL. */
enum dtype plan_tensor_dtype(const struct st_tensor *t);

/* Backend memory of a vector: vectors share one allocation. */
static inline size_t plan_vec_bytes(const struct plan_vec *v)
{
    return ((size_t)v->n * sizeof(float) + 63) / 64 * 64;
}

/* weights_check.c: name was looked up, t (NULL: absent) was found, dims are wanted. */
void plan_report_tensor(struct plan_report *r, const char *name, const struct st_tensor *t,
                        int32_t n_dims, const int64_t *dims);

/* weights_dummy.c. Fills for a dummy; the same seed gives the same numbers. dummy_vec gives
 * factors, 1 + w for norms. dummy_seed: of a weight at an offset in its scope. */
void dummy_rows(uint64_t seed, float std, uint16_t *rows_bf16, size_t n);
void dummy_vec(uint64_t seed, enum fill fill, float *v, size_t n);
uint64_t dummy_seed(uint64_t seed, int32_t layer, size_t at);

#endif
