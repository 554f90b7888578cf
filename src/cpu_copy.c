/* The CPU backend's parts of pools for export and import: copied as they lie, and brought into
 * canonical form and back (backend.h). Copying: engine thread; the rest: any thread. */
#include <stdlib.h>
#include <string.h>

#include "cpu_impl.h"

void *cpu_stage_alloc(struct backend *b, size_t bytes)
{
    (void)b;
    return malloc(bytes ? bytes : 1);
}

void cpu_stage_free(struct backend *b, void *p)
{
    (void)b;
    free(p);
}

static size_t state_bytes(const struct gdn_dims *d)
{
    return (size_t)d->HV * (size_t)d->K * (size_t)d->V * sizeof(float);
}

static size_t conv_bytes(const struct gdn_dims *d)
{
    return 3 * (size_t)d->conv_dim * sizeof(float);
}

int cpu_slot_get(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                 int32_t slot, void *stage)
{
    (void)b;
    memcpy(stage, cpu_state_at(d, p, slot, 0), state_bytes(d));
    memcpy((char *)stage + state_bytes(d), cpu_conv_at(d, p, slot), conv_bytes(d));
    return 0;
}

int cpu_slot_put(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                 int32_t slot, const void *stage)
{
    (void)b;
    memcpy(cpu_state_at(d, p, slot, 0), stage, state_bytes(d));
    memcpy(cpu_conv_at(d, p, slot), (const char *)stage + state_bytes(d), conv_bytes(d));
    return 0;
}

static size_t half_page_bytes(const struct attn_dims *d, int32_t page_tokens)
{
    return (size_t)d->HK * (size_t)page_tokens * (size_t)d->D * sizeof(float);
}

static char *half_page(const struct attn_dims *d, const struct kv_pool *p, int32_t page,
                       bool is_value)
{
    return (char *)(is_value ? p->v : p->k) + (size_t)page * half_page_bytes(d, p->page_tokens);
}

int cpu_page_get(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 int32_t page, bool is_value, void *stage)
{
    (void)b;
    memcpy(stage, half_page(d, p, page, is_value), half_page_bytes(d, p->page_tokens));
    return 0;
}

int cpu_page_put(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 int32_t page, bool is_value, const void *stage)
{
    (void)b;
    memcpy(half_page(d, p, page, is_value), stage, half_page_bytes(d, p->page_tokens));
    return 0;
}

/* ---- canonical forms ---- */

void cpu_slot_unpack(const struct gdn_dims *d, const void *raw, float *S, void *conv)
{
    const float *window = (const float *)((const char *)raw + state_bytes(d));
    size_t n = (size_t)d->conv_dim;
    float *out = conv;
    memcpy(S, raw, state_bytes(d));
    for (size_t c = 0; c < n; c++)
        for (size_t j = 0; j < 3; j++)
            out[c * 3 + j] = window[j * n + c];
}

void cpu_slot_pack(const struct gdn_dims *d, const float *S, const void *conv, void *raw)
{
    float *window = (float *)((char *)raw + state_bytes(d));
    size_t n = (size_t)d->conv_dim;
    const float *in = conv;
    memcpy(raw, S, state_bytes(d));
    for (size_t c = 0; c < n; c++)
        for (size_t j = 0; j < 3; j++)
            window[j * n + c] = in[c * 3 + j];
}

/* Where a head's block of 64 positions begins in half a page. */
static size_t block_at(const struct attn_dims *d, int32_t page_tokens, int32_t i_head,
                       int32_t i_pos)
{
    return ((size_t)i_head * (size_t)page_tokens + (size_t)(i_pos / CHUNK_TOKENS) * 64) *
           (size_t)d->D;
}

typedef float quad __attribute__((vector_size(16)));

/* Swaps rows and columns of four rows of four numbers. */
static inline void swap_quads(const float *from, size_t from_ld, float *to, size_t to_ld)
{
    typedef int32_t order __attribute__((vector_size(16)));
    quad a, b, c, d;
    memcpy(&a, from, sizeof(a));
    memcpy(&b, from + from_ld, sizeof(b));
    memcpy(&c, from + 2 * from_ld, sizeof(c));
    memcpy(&d, from + 3 * from_ld, sizeof(d));
    quad ab = __builtin_shuffle(a, b, (order){0, 4, 1, 5});
    quad cd = __builtin_shuffle(c, d, (order){0, 4, 1, 5});
    quad AB = __builtin_shuffle(a, b, (order){2, 6, 3, 7});
    quad CD = __builtin_shuffle(c, d, (order){2, 6, 3, 7});
    const quad rows[4] = {__builtin_shuffle(ab, cd, (order){0, 1, 4, 5}),
                          __builtin_shuffle(ab, cd, (order){2, 3, 6, 7}),
                          __builtin_shuffle(AB, CD, (order){0, 1, 4, 5}),
                          __builtin_shuffle(AB, CD, (order){2, 3, 6, 7})};
    for (size_t i = 0; i < 4; i++)
        memcpy(to + i * to_ld, &rows[i], sizeof(rows[i]));
}

/* Up to 16 keys of a head, [dim][16] in a page, and as rows; dim is a multiple of 64. */
static void unpack_keys(int32_t n, size_t dim, const float *panel, float *rows, size_t ld)
{
    size_t t = 0;
    for (; t + 4 <= (size_t)n; t += 4)
        for (size_t i = 0; i < dim; i += 4)
            swap_quads(panel + i * 16 + t, 16, rows + t * ld + i, ld);
    for (; t < (size_t)n; t++)
        for (size_t i = 0; i < dim; i++)
            rows[t * ld + i] = panel[i * 16 + t];
}

static void pack_keys(int32_t n, size_t dim, const float *rows, size_t ld, float *panel)
{
    size_t t = 0;
    for (; t + 4 <= (size_t)n; t += 4)
        for (size_t i = 0; i < dim; i += 4)
            swap_quads(rows + t * ld + i, ld, panel + i * 16 + t, 16);
    for (; t < (size_t)n; t++)
        for (size_t i = 0; i < dim; i++)
            panel[i * 16 + t] = rows[t * ld + i];
}

void cpu_page_unpack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                     int32_t n_tokens, const void *raw, void *rows)
{
    size_t dim = (size_t)d->D, ld = (size_t)d->HK * dim;
    for (int32_t h = 0; h < d->HK; h++) {
        for (int32_t t = 0; t < n_tokens; t += 16) {
            const float *block = (const float *)raw + block_at(d, page_tokens, h, t);
            float *out = (float *)rows + (size_t)t * ld + (size_t)h * dim;
            int32_t n = n_tokens - t < 16 ? n_tokens - t : 16, at = t % CHUNK_TOKENS;
            if (!is_value) {
                unpack_keys(n, dim, block + (size_t)at * dim, out, ld);
                continue;
            }
            for (int32_t j = 0; j < n; j++)
                for (size_t i = 0; i < dim; i += 16)
                    memcpy(out + (size_t)j * ld + i,
                           block + i * CHUNK_TOKENS + (size_t)(at + j) * 16,
                           16 * sizeof(float));
        }
    }
}

void cpu_page_pack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                   int32_t n_tokens, const void *rows, void *raw)
{
    size_t dim = (size_t)d->D, ld = (size_t)d->HK * dim;
    if (n_tokens < page_tokens)
        memset(raw, 0, half_page_bytes(d, page_tokens));
    for (int32_t h = 0; h < d->HK; h++) {
        for (int32_t t = 0; t < n_tokens; t += 16) {
            float *block = (float *)raw + block_at(d, page_tokens, h, t);
            const float *in = (const float *)rows + (size_t)t * ld + (size_t)h * dim;
            int32_t n = n_tokens - t < 16 ? n_tokens - t : 16, at = t % CHUNK_TOKENS;
            if (!is_value) {
                pack_keys(n, dim, in, ld, block + (size_t)at * dim);
                continue;
            }
            for (int32_t j = 0; j < n; j++)
                for (size_t i = 0; i < dim; i += 16)
                    memcpy(block + i * CHUNK_TOKENS + (size_t)(at + j) * 16,
                           in + (size_t)j * ld + i, 16 * sizeof(float));
        }
    }
}
