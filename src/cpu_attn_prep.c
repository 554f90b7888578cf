/* In front of attention: q and k norm, partial rotation, and the writing of keys and values to
 * their pages (gdn.md 1.5). An item of the fan-out is a chunk of the chunk map. */
#include <math.h>
#include <string.h>

#include "cpu_impl.h"

struct angles {
    float cos[ATTN_DIM_MAX / 2], sin[ATTN_DIM_MAX / 2];
};

/* x = norm(x) * w, then halves i and i + rot_dim / 2 rotate. */
static void norm_rotate(const struct op_attn_prep *a, const float *w, const struct angles *g,
                        const float *x, float *y)
{
    cpu_rmsnorm_row(a->d.D, a->eps, x, w, y);
    int32_t half = a->d.rot_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        float low = y[i], high = y[i + half];
        y[i] = low * g->cos[i] - high * g->sin[i];
        y[i + half] = high * g->cos[i] + low * g->sin[i];
    }
}

static void prep_token(const struct op_attn_prep *a, int32_t n, int32_t t)
{
    const struct attn_dims *d = &a->d;
    int32_t D = d->D, P = a->pool->page_tokens, pos = a->b->positions[t];
    struct angles g;
    for (int32_t i = 0; i < d->rot_dim / 2; i++) {
        float angle = (float)pos * a->inv_freq[i];
        g.cos[i] = cosf(angle);
        g.sin[i] = sinf(angle);
    }
    float *q = (float *)a->p + (size_t)t * d->ld;
    for (int32_t h = 0; h < d->HQ; h++)
        norm_rotate(a, a->q_norm, &g, q + (size_t)h * D, q + (size_t)h * D);
    const float *k = q + (size_t)2 * d->HQ * D, *v = k + (size_t)d->HK * D;
    int32_t page = a->b->page_table[(size_t)n * a->b->max_pages + pos / P];
    for (int32_t h = 0; h < d->HK; h++) {
        float key[ATTN_DIM_MAX];
        norm_rotate(a, a->k_norm, &g, k + (size_t)h * D, key);
        float *to = cpu_key_at(d, a->pool, page, h, pos % P);
        for (int32_t i = 0; i < D; i++)
            to[i * 16] = key[i];
        to = cpu_value_at(d, a->pool, page, h, pos % P);
        for (int32_t i = 0; i < D; i += 16)
            memcpy(to + (size_t)i * CHUNK_TOKENS, v + (size_t)h * D + i, 16 * sizeof(float));
    }
}

static void prep_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct op_attn_prep *a = arg;
    int32_t n = a->b->map.seq[item], tok = a->b->map.tok[item];
    int32_t end = a->b->cu_seqlens[n + 1];
    end = end < tok + CHUNK_TOKENS ? end : tok + CHUNK_TOKENS;
    for (int32_t t = tok; t < end; t++)
        prep_token(a, n, t);
}

void cpu_attn_prep(struct backend *b, const struct op_attn_prep *a)
{
    cpu_pool_run(cpu_impl_pool(b), a->b->n_chunks, prep_item, (void *)a);
}
