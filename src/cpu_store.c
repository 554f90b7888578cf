/* The pools of the CPU backend: state slots and KV pages, and their canonical copies.
 *
 * Owns only the layout (cpu_impl.h); which slot or page is whose is the caller's. Set-up and
 * engine thread. Offsets are size_t throughout: a pool passes 2^31 elements. */
#include <math.h>
#include <string.h>

#include "cpu_impl.h"

static size_t state_elems(const struct gdn_dims *d)
{
    return (size_t)d->HV * d->K * d->V;
}

static size_t page_elems(const struct attn_dims *d, int32_t page_tokens)
{
    return (size_t)d->HK * page_tokens * d->D;
}

size_t cpu_state_bytes(struct backend *b, const struct gdn_dims *d)
{
    (void)b;
    return (state_elems(d) + (size_t)3 * d->conv_dim) * sizeof(float);
}

size_t cpu_page_bytes(struct backend *b, const struct attn_dims *d, int32_t page_tokens)
{
    (void)b;
    return 2 * page_elems(d, page_tokens) * sizeof(float);
}

int cpu_state_pool_make(struct backend *b, const struct gdn_dims *d, int32_t n_slots,
                        struct state_pool *out)
{
    if (d->K % 16 || d->V % 16 || d->K > GDN_DIM_MAX || d->V > GDN_DIM_MAX || n_slots < 1)
        return ERR_INVALID;
    struct state_pool p = {.n_slots = n_slots};
    p.S = cpu_alloc(b, (size_t)n_slots * state_elems(d) * sizeof(float));
    p.conv = cpu_alloc(b, (size_t)n_slots * 3 * d->conv_dim * sizeof(float));
    if (!p.S || !p.conv) {
        cpu_state_pool_free(b, &p);
        return ERR_NOMEM;
    }
    *out = p;
    return 0;
}

int cpu_kv_pool_make(struct backend *b, const struct attn_dims *d, int32_t n_pages,
                     int32_t page_tokens, struct kv_pool *out)
{
    if (d->D % 64 || d->D > ATTN_DIM_MAX || n_pages < 1 || page_tokens < 1 ||
        page_tokens % CHUNK_TOKENS)
        return ERR_INVALID;
    struct kv_pool p = {.n_pages = n_pages, .page_tokens = page_tokens};
    size_t bytes = (size_t)n_pages * page_elems(d, page_tokens) * sizeof(float);
    p.k = cpu_alloc(b, bytes);
    p.v = cpu_alloc(b, bytes);
    if (!p.k || !p.v) {
        cpu_kv_pool_free(b, &p);
        return ERR_NOMEM;
    }
    *out = p;
    return 0;
}

void cpu_state_pool_free(struct backend *b, struct state_pool *p)
{
    cpu_free(b, p->S);
    cpu_free(b, p->conv);
    *p = (struct state_pool){0};
}

void cpu_kv_pool_free(struct backend *b, struct kv_pool *p)
{
    cpu_free(b, p->k);
    cpu_free(b, p->v);
    *p = (struct kv_pool){0};
}

int cpu_state_read(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                   int32_t slot, float *S, float *conv)
{
    (void)b;
    if (slot < 0 || slot >= p->n_slots)
        return ERR_INVALID;
    memcpy(S, cpu_state_at(d, p, slot, 0), state_elems(d) * sizeof(float));
    const float *window = cpu_conv_at(d, p, slot);
    for (int32_t c = 0; c < d->conv_dim; c++)
        for (int32_t j = 0; j < 3; j++)
            conv[(size_t)c * 3 + j] = window[(size_t)j * d->conv_dim + c];
    return 0;
}

int cpu_state_write(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    int32_t slot, const float *S, const float *conv)
{
    (void)b;
    if (slot < 0 || slot >= p->n_slots)
        return ERR_INVALID;
    memcpy(cpu_state_at(d, p, slot, 0), S, state_elems(d) * sizeof(float));
    float *window = cpu_conv_at(d, p, slot);
    for (int32_t c = 0; c < d->conv_dim; c++)
        for (int32_t j = 0; j < 3; j++)
            window[(size_t)j * d->conv_dim + c] = conv[(size_t)c * 3 + j];
    return 0;
}

static bool is_page_list_good(const struct kv_pool *p, const int32_t *pages, int32_t n_tokens)
{
    if (n_tokens < 0)
        return false;
    for (int64_t t = 0; t < n_tokens; t += p->page_tokens)
        if (pages[t / p->page_tokens] < 0 || pages[t / p->page_tokens] >= p->n_pages)
            return false;
    return true;
}

int cpu_kv_read(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                const int32_t *pages, int32_t n_tokens, float *k, float *v)
{
    (void)b;
    if (!is_page_list_good(p, pages, n_tokens))
        return ERR_INVALID;
    for (int32_t h = 0; h < d->HK; h++)
        for (int32_t t = 0; t < n_tokens; t++) {
            int32_t page = pages[t / p->page_tokens], at = t % p->page_tokens;
            const float *key = cpu_key_at(d, p, page, h, at);
            const float *value = cpu_value_at(d, p, page, h, at);
            size_t row = ((size_t)h * n_tokens + t) * d->D;
            for (int32_t i = 0; i < d->D; i++) {
                k[row + i] = key[i * 16];
                v[row + i] = value[i / 16 * 16 * CHUNK_TOKENS + i % 16];
            }
        }
    return 0;
}

int cpu_kv_write(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 const int32_t *pages, int32_t n_tokens, const float *k, const float *v)
{
    (void)b;
    if (!is_page_list_good(p, pages, n_tokens))
        return ERR_INVALID;
    for (int32_t h = 0; h < d->HK; h++)
        for (int32_t t = 0; t < n_tokens; t++) {
            int32_t page = pages[t / p->page_tokens], at = t % p->page_tokens;
            float *key = cpu_key_at(d, p, page, h, at),
                  *value = cpu_value_at(d, p, page, h, at);
            size_t row = ((size_t)h * n_tokens + t) * d->D;
            for (int32_t i = 0; i < d->D; i++) {
                key[i * 16] = k[row + i];
                value[i / 16 * 16 * CHUNK_TOKENS + i % 16] = v[row + i];
            }
        }
    return 0;
}

void cpu_state_copy(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    const struct slot_copy *copies, int32_t n)
{
    (void)b;
    for (int32_t i = 0; i < n; i++) {
        memcpy(cpu_state_at(d, p, copies[i].to, 0), cpu_state_at(d, p, copies[i].from, 0),
               state_elems(d) * sizeof(float));
        memcpy(cpu_conv_at(d, p, copies[i].to), cpu_conv_at(d, p, copies[i].from),
               (size_t)3 * d->conv_dim * sizeof(float));
    }
}

void cpu_page_copy(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                   const struct slot_copy *copies, int32_t n)
{
    (void)b;
    size_t elems = page_elems(d, p->page_tokens), bytes = elems * sizeof(float);
    float *k = p->k, *v = p->v;
    for (int32_t i = 0; i < n; i++) {
        memcpy(k + (size_t)copies[i].to * elems, k + (size_t)copies[i].from * elems, bytes);
        memcpy(v + (size_t)copies[i].to * elems, v + (size_t)copies[i].from * elems, bytes);
    }
}

static void fill_nan(float *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = NAN;
}

void cpu_state_poison(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                      int32_t slot)
{
    (void)b;
    fill_nan(cpu_state_at(d, p, slot, 0), state_elems(d));
    fill_nan(cpu_conv_at(d, p, slot), (size_t)3 * d->conv_dim);
}

void cpu_page_poison(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                     int32_t page)
{
    (void)b;
    size_t n = page_elems(d, p->page_tokens);
    fill_nan((float *)p->k + (size_t)page * n, n);
    fill_nan((float *)p->v + (size_t)page * n, n);
}
