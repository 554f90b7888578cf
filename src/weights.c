#include "weights.h"

#include <stdlib.h>
#include <string.h>

#include "weights_plan.h"

/* ---- vectors ---- */

static float half_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, frac = h & 0x3ff;
    uint32_t bits = sign | (exponent + 112) << 23 | frac << 13;
    float x;
    if (exponent == 31)
        bits = sign | 0x7f800000 | frac << 13;
    memcpy(&x, &bits, sizeof(x));
    if (exponent == 0) {
        x = (float)frac * 0x1p-24f;
        return sign ? -x : x;
    }
    return x;
}

/* Exactly; t need not be aligned. */
static void widen(const struct st_tensor *t, float *out, int64_t n)
{
    if (t->dtype == ST_F32) {
        memcpy(out, t->data, (size_t)n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, (const char *)t->data + 2 * i, sizeof(h));
        uint32_t bits = (uint32_t)h << 16;
        if (t->dtype == ST_F16)
            out[i] = half_to_f32(h);
        else
            memcpy(&out[i], &bits, sizeof(bits));
    }
}

static void make_vec(const struct plan *p, const struct plan_vec *v, uint64_t seed, float *out)
{
    if (!p->set) {
        dummy_vec(dummy_seed(seed, p->layer, v->at), v->fill, out, (size_t)v->n);
        return;
    }
    widen(v->t, out, v->n);
    for (int64_t i = 0; v->is_zero_centred && i < v->n; i++)
        out[i] += 1;
}

/* ---- matrices ---- */

struct loader {
    struct plan plan;
    struct backend *b;
    uint64_t seed;
    struct weights *w;
    char *vectors;      /* host copy of w->vectors */
    size_t vectors_at;  /* bytes filled */
    size_t total_bytes; /* what w->bytes will be */
    weights_progress progress;
    void *progress_arg;
    struct errmsg *e;
};

/* Host memory that a matrix needs besides the mapped files. */
static size_t staging_bytes(const struct plan *p, const struct plan_mat *m)
{
    size_t bytes = 0;
    for (size_t i = 0; i < m->n_parts; i++) {
        const struct plan_part *part = &p->parts[m->i_part + i];
        if (!plan_is_aligned(part))
            bytes += (size_t)part->n_rows * (size_t)m->cols *
                     dtype_bytes(plan_tensor_dtype(part->t));
    }
    return bytes;
}

/* Parts as the backend takes them; rows that the mapping does not hold aligned go to
 * staging. */
static void fill_parts(const struct loader *ld, const struct plan_mat *m, char *staging,
                       struct weight_part *out)
{
    const struct plan *p = &ld->plan;
    uint64_t seed = dummy_seed(ld->seed, p->layer, m->at);
    for (size_t i = 0; i < m->n_parts; i++) {
        const struct plan_part *part = &p->parts[m->i_part + i];
        enum dtype dtype = plan_tensor_dtype(part->t);
        size_t row_bytes = (size_t)m->cols * dtype_bytes(dtype);
        size_t n = (size_t)part->n_rows;
        const char *rows =
            part->t ? (const char *)part->t->data + (size_t)part->row0 * row_bytes : NULL;
        if (!plan_is_aligned(part)) {
            if (rows)
                memcpy(staging, rows, n * row_bytes);
            else
                dummy_rows(seed + i, m->std, (uint16_t *)staging, n * (size_t)m->cols);
            rows = staging;
            staging += n * row_bytes;
        }
        out[i] = (struct weight_part){.rows = rows, .dtype = dtype, .n_rows = part->n_rows};
    }
}

static int load_mat(struct loader *ld, const struct plan_mat *m, struct weight *out)
{
    int rc = ERR_NOMEM;
    if (!ld->plan.set && ld->b->ops->weight_random)
        return ld->b->ops->weight_random(ld->b, m->n_mats, m->rows, m->cols, m->use,
                                         dummy_seed(ld->seed, ld->plan.layer, m->at), m->std,
                                         out, ld->e);
    size_t extra = staging_bytes(&ld->plan, m);
    struct weight_part *parts = calloc(m->n_parts, sizeof(*parts));
    char *staging = extra ? malloc(extra) : NULL;
    if (parts && (staging || !extra)) {
        fill_parts(ld, m, staging, parts);
        rc = ld->b->ops->weight_make(ld->b, parts, (int32_t)m->n_parts, m->n_mats, m->rows,
                                     m->cols, m->use, out, ld->e);
    } else {
        errmsg_set(ld->e, rc, "no memory for %zu bytes on the host while loading", extra);
    }
    free(staging);
    free(parts);
    return rc;
}

/* ---- scopes ---- */

/* Bytes of a scope in backend memory: vectors and matrices. */
static void scope_bytes(const struct plan *p, struct backend *b, size_t *vectors, size_t *mats)
{
    for (size_t i = 0; i < p->n_vecs; i++)
        *vectors += plan_vec_bytes(&p->vecs[i]);
    for (size_t i = 0; i < p->n_mats; i++) {
        const struct plan_mat *m = &p->mats[i];
        *mats += b->ops->weight_bytes(b, m->n_mats, m->rows, m->cols, plan_dtype(p, m), m->use);
    }
}

static int total_bytes(const struct arch *a, const struct st_set *set, struct backend *b,
                       size_t *vectors, size_t *mats)
{
    struct plan p;
    int rc = 0;
    *vectors = *mats = 0;
    plan_init(&p, a, set);
    for (int32_t l = -1; l < a->n_layers && rc == 0; l++) {
        rc = plan_scope(&p, l);
        if (rc == 0)
            scope_bytes(&p, b, vectors, mats);
    }
    plan_fini(&p);
    return rc;
}

static int load_scope(struct loader *ld, int32_t layer)
{
    const struct plan *p = &ld->plan;
    char *base = layer < 0 ? (char *)ld->w : (char *)&ld->w->layers[layer];
    int rc = plan_scope(&ld->plan, layer);
    if (rc != 0)
        return errmsg_set(ld->e, rc, "no memory for the list of weights");
    for (size_t i = 0; i < p->n_vecs; i++) {
        const struct plan_vec *v = &p->vecs[i];
        make_vec(p, v, ld->seed, (float *)(ld->vectors + ld->vectors_at));
        *(float **)(base + v->at) = ld->w->vectors + ld->vectors_at / sizeof(float);
        ld->vectors_at += plan_vec_bytes(v);
    }
    for (size_t i = 0; i < p->n_mats; i++) {
        struct weight *w = (struct weight *)(base + p->mats[i].at);
        rc = load_mat(ld, &p->mats[i], w);
        if (rc != 0)
            return rc;
        ld->w->bytes += w->bytes;
        if (ld->progress)
            ld->progress(ld->progress_arg, (double)ld->w->bytes / (double)ld->total_bytes);
    }
    return 0;
}

/* ---- public ---- */

size_t weights_bytes(const struct arch *a, const struct st_set *set, struct backend *b)
{
    size_t vectors, mats;
    return total_bytes(a, set, b, &vectors, &mats) == 0 ? vectors + mats : SIZE_MAX;
}

int weights_load(const struct arch *a, const struct st_set *set, uint64_t seed,
                 struct backend *b, weights_progress progress, void *arg, struct weights *w,
                 struct errmsg *e)
{
    size_t vectors, mats;
    struct loader ld = {
        .b = b, .seed = seed, .w = w, .progress = progress, .progress_arg = arg};
    memset(w, 0, sizeof(*w));
    int rc = set ? weights_check(a, set, e) : 0;
    if (rc != 0)
        return rc;
    plan_init(&ld.plan, a, set);
    ld.e = e;
    rc = total_bytes(a, set, b, &vectors, &mats);
    if (rc == 0) {
        w->tied = ld.plan.tied;
        w->layers = calloc((size_t)a->n_layers, sizeof(w->layers[0]));
        w->vectors = b->ops->alloc(b, vectors);
        w->bytes = vectors;
        ld.total_bytes = vectors + mats;
        /* Zeros between the vectors: what is uploaded is defined. */
        ld.vectors = calloc(1, vectors);
    }
    if (rc != 0 || !w->layers || !w->vectors || !ld.vectors) {
        rc = errmsg_set(e, ERR_NOMEM, "no memory for %zu bytes of norms and gates", vectors);
        goto done;
    }
    for (int32_t l = -1; l < a->n_layers && rc == 0; l++)
        rc = load_scope(&ld, l);
    if (rc != 0)
        goto done;
    rc = b->ops->upload(b, w->vectors, ld.vectors, vectors);
    if (rc != 0)
        errmsg_set(e, rc, "the backend did not take %zu bytes of norms and gates", vectors);
    else if (progress)
        progress(arg, 1);
done:
    free(ld.vectors);
    plan_fini(&ld.plan);
    if (rc != 0)
        weights_free(a, b, w);
    return rc;
}

static void free_mat(struct backend *b, struct weight *w)
{
    if (w->n_mats)
        b->ops->weight_free(b, w);
}

void weights_free(const struct arch *a, struct backend *b, struct weights *w)
{
    free_mat(b, &w->embed);
    free_mat(b, &w->head);
    for (int32_t l = 0; w->layers && l < a->n_layers; l++) {
        struct layer_weights *lw = &w->layers[l];
        struct weight *mats[] = {&lw->gdn_in,   &lw->gdn_out,        &lw->attn_in,
                                 &lw->attn_out, &lw->gate_up,        &lw->down,
                                 &lw->router,   &lw->expert_gate_up, &lw->expert_down};
        for (size_t i = 0; i < sizeof(mats) / sizeof(mats[0]); i++)
            free_mat(b, mats[i]);
    }
    if (w->vectors)
        b->ops->free(b, w->vectors);
    free(w->layers);
    memset(w, 0, sizeof(*w));
}
