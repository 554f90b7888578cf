/* A backend that only stores: weights as f32 rows in the order they came, so that a test sees
 * where each row was put. Counts what is alive and fails the n-th request for memory. */
#ifndef PREFILLD_TESTS_FAKE_BACKEND_H
#define PREFILLD_TESTS_FAKE_BACKEND_H

#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "ckpt.h"

struct fake {
    size_t live_bytes; /* as weight_bytes counts */
    int n_live, n_calls;
    int fail_at; /* the n-th call gets nothing; 0: none */
    bool fail_upload;
    bool is_misused; /* rows not aligned, or not as many as said */
    bool keeps_borrowed;
};

struct fake_block {
    size_t bytes;
    char data[];
};

static bool fake_refuses(struct fake *f)
{
    return ++f->n_calls == f->fail_at;
}

static void *fake_alloc(struct backend *b, size_t bytes)
{
    struct fake *f = b->impl;
    struct fake_block *m = fake_refuses(f) ? NULL : malloc(sizeof(*m) + bytes);
    if (!m)
        return NULL;
    m->bytes = bytes;
    f->live_bytes += bytes;
    f->n_live++;
    return m->data;
}

static void fake_free(struct backend *b, void *p)
{
    struct fake *f = b->impl;
    if (!p)
        return;
    struct fake_block *m = (struct fake_block *)((char *)p - offsetof(struct fake_block, data));
    f->live_bytes -= m->bytes;
    f->n_live--;
    free(m);
}

static int fake_upload(struct backend *b, void *dst, const void *src, size_t bytes)
{
    if (((struct fake *)b->impl)->fail_upload)
        return ERR_DEVICE;
    memcpy(dst, src, bytes);
    return 0;
}

static size_t fake_weight_bytes(struct backend *b, int32_t n_mats, int32_t rows, int32_t cols,
                                enum dtype dtype, unsigned use)
{
    struct fake *f = b->impl;
    size_t n = (size_t)n_mats * rows * cols, bytes = 0;
    if (use & WEIGHT_MATMUL)
        bytes += n * sizeof(float);
    if ((use & WEIGHT_EMBED) && !((use & WEIGHT_BORROW) && f->keeps_borrowed))
        bytes += n * dtype_bytes(dtype);
    return bytes;
}

static enum st_dtype fake_st_dtype(enum dtype d)
{
    return d == DTYPE_F32 ? ST_F32 : d == DTYPE_F16 ? ST_F16 : ST_BF16;
}

/* Rows of a part as f32. */
static void fake_widen(const struct weight_part *part, size_t n, float *out)
{
    struct st_tensor t = {.dtype = fake_st_dtype(part->dtype), .data = part->rows};
    for (size_t i = 0; i < n; i++)
        out[i] = ckpt_element(&t, i);
}

static void fake_weight_free(struct backend *b, struct weight *w)
{
    fake_free(b, w->data);
    if (!(w->use & WEIGHT_BORROW))
        fake_free(b, w->embed);
    memset(w, 0, sizeof(*w));
}

static int fake_weight_make(struct backend *b, const struct weight_part *parts, int32_t n_parts,
                            int32_t n_mats, int32_t rows, int32_t cols, unsigned use,
                            struct weight *out, struct errmsg *e)
{
    struct fake *f = b->impl;
    int64_t n_rows = 0;
    struct weight w = {
        .n_mats = n_mats, .rows = rows, .cols = cols, .use = use, .dtype = parts[0].dtype};
    for (int32_t i = 0; i < n_parts; i++) {
        n_rows += parts[i].n_rows;
        if (parts[i].dtype != w.dtype)
            w.dtype = DTYPE_F32;
        if ((uintptr_t)parts[i].rows % dtype_bytes(parts[i].dtype))
            f->is_misused = true;
    }
    if (n_rows != (int64_t)n_mats * rows || ((use & WEIGHT_EMBED) && n_parts != 1))
        f->is_misused = true;
    if (!f->keeps_borrowed)
        w.use &= ~(unsigned)WEIGHT_BORROW;
    size_t n = (size_t)n_mats * rows * cols;
    w.bytes = fake_weight_bytes(b, n_mats, rows, cols, w.dtype, w.use);
    if (use & WEIGHT_MATMUL) {
        w.data = fake_alloc(b, n * sizeof(float));
        if (!w.data)
            goto fail;
        float *at = w.data;
        for (int32_t i = 0; i < n_parts; at += parts[i++].n_rows * cols)
            fake_widen(&parts[i], (size_t)parts[i].n_rows * cols, at);
    }
    if (w.use & WEIGHT_BORROW) {
        w.embed = (void *)parts[0].rows;
    } else if (use & WEIGHT_EMBED) {
        w.embed = fake_alloc(b, n * dtype_bytes(w.dtype));
        if (!w.embed)
            goto fail;
        memcpy(w.embed, parts[0].rows, n * dtype_bytes(w.dtype));
    }
    *out = w;
    return 0;
fail:
    fake_weight_free(b, &w);
    return errmsg_set(e, ERR_NOMEM, "the fake has no room");
}

static const struct backend_ops fake_ops = {.name = "fake",
                                            .alloc = fake_alloc,
                                            .free = fake_free,
                                            .upload = fake_upload,
                                            .weight_bytes = fake_weight_bytes,
                                            .weight_make = fake_weight_make,
                                            .weight_free = fake_weight_free};

#endif
