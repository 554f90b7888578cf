/* Inside the CPU backend: what cpu_backend.c, the pools and the operation bodies share.
 *
 * Owns the layouts of state slots and KV pages. Engine thread only; bodies read it from pool
 * threads. Never allocates. */
#ifndef PREFILLD_CPU_IMPL_H
#define PREFILLD_CPU_IMPL_H

#include "cpu.h"

enum { STEPS_IN_FLIGHT = 2, CPU_ALIGN = 64 };

/* Largest head dims the bodies' scratch is made for; K and V are multiples of 16, D of 64. */
enum { GDN_DIM_MAX = 256, ATTN_DIM_MAX = 256 };

struct cpu_step {
    int32_t *map; /* room for the chunk map of the largest step */
    bool is_ended;
};

struct cpu_impl {
    struct cpu_pool *pool;
    void *workspace;
    size_t workspace_bytes;
    struct backend_limits limits;
    struct cpu_step ring[STEPS_IN_FLIGHT];
    int32_t i_oldest;  /* in ring */
    int32_t n_flights; /* steps between step_begin and step_done */
};

static inline size_t cpu_round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Chunks of a step: sum of ceil(len / 64) <= T / 64 + N. */
static inline size_t cpu_max_chunks(const struct backend_limits *l)
{
    return (size_t)l->max_tokens / CHUNK_TOKENS + l->max_seqs;
}

/* Takes bytes from the workspace at *at, keeping it aligned. From 0 on, it measures. */
static inline void *cpu_carve(uintptr_t *at, size_t bytes)
{
    void *p = (void *)*at;
    *at += cpu_round_up(bytes, CPU_ALIGN);
    return p;
}

/* backend.h, save_slots. */
static inline int32_t cpu_save_slot(const struct batch *b, int32_t flat)
{
    return b->save_slots ? b->save_slots[flat] : -1;
}

/* ---- layouts of the pools ---- */

/* State of one head: [K, V] f32 row-major, heads in order, slots in order. */
static inline float *cpu_state_at(const struct gdn_dims *d, const struct state_pool *p,
                                  int32_t slot, int32_t i_head)
{
    return (float *)p->S + ((size_t)slot * d->HV + i_head) * d->K * d->V;
}

/* Convolution window of a slot: [3, conv_dim] f32, oldest first, so that taps are contiguous
 * over channels. */
static inline float *cpu_conv_at(const struct gdn_dims *d, const struct state_pool *p,
                                 int32_t slot)
{
    return (float *)p->conv + (size_t)slot * 3 * d->conv_dim;
}

/* Keys and values lie in blocks of 64 positions of a page and head, each as panels of 16
 * columns (cpu_tile.h): keys as [D, 64], so that scores are a plain product, in panels of
 * [D][16]; values as [64, D] in panels of [64][16]. */
static inline size_t cpu_kv_block(const struct attn_dims *d, const struct kv_pool *p,
                                  int32_t page, int32_t i_head, int32_t i_pos)
{
    size_t head = (size_t)page * d->HK + i_head;
    return (head * p->page_tokens + i_pos / CHUNK_TOKENS * CHUNK_TOKENS) * d->D;
}

/* Dim 0 of the key of a position; dim i is 16 i further on. */
static inline float *cpu_key_at(const struct attn_dims *d, const struct kv_pool *p,
                                int32_t page, int32_t i_head, int32_t i_pos)
{
    int32_t j = i_pos % CHUNK_TOKENS;
    return (float *)p->k + cpu_kv_block(d, p, page, i_head, i_pos) + j / 16 * 16 * d->D +
           j % 16;
}

/* Dims 0 to 15 of the value of a position; the next 16 are 64 x 16 further on. */
static inline float *cpu_value_at(const struct attn_dims *d, const struct kv_pool *p,
                                  int32_t page, int32_t i_head, int32_t i_pos)
{
    return (float *)p->v + cpu_kv_block(d, p, page, i_head, i_pos) + i_pos % CHUNK_TOKENS * 16;
}

/* ---- rows, on the calling thread (cpu_norm.c) ---- */

/* h = x * rsqrt(mean(x^2) + eps) * w, n elements; h may be x. */
void cpu_rmsnorm_row(int32_t n, float eps, const float *x, const float *w, float *h);
/* A token of logits[n] as struct row_sample says (cpu_sample.c); x [n] is scratch. n >= 1. */
int32_t cpu_sample_row(int32_t n, const float *logits, const struct row_sample *s, float *x);
/* c = silu(gate) * up; c may be gate. */
void cpu_swiglu_row(int32_t F, const float *gate, const float *up, float *c);

/* Part of cpu_gdn_workspace_bytes (cpu_gdn_conv.c). */
size_t cpu_gdn_conv_workspace_bytes(const struct backend_limits *l);

/* ---- set-up calls of the table (cpu_backend.c, cpu_store.c) ---- */

void *cpu_alloc(struct backend *b, size_t bytes);
void cpu_free(struct backend *b, void *p);

void cpu_memory(struct backend *b, size_t *free_bytes, size_t *total_bytes);
size_t cpu_state_bytes(struct backend *b, const struct gdn_dims *d);
size_t cpu_page_bytes(struct backend *b, const struct attn_dims *d, int32_t page_tokens);
int cpu_state_pool_make(struct backend *b, const struct gdn_dims *d, int32_t n_slots,
                        struct state_pool *out);
int cpu_kv_pool_make(struct backend *b, const struct attn_dims *d, int32_t n_pages,
                     int32_t page_tokens, struct kv_pool *out);
void cpu_state_pool_free(struct backend *b, struct state_pool *p);
void cpu_kv_pool_free(struct backend *b, struct kv_pool *p);
int cpu_state_read(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                   int32_t slot, float *S, float *conv);
int cpu_state_write(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    int32_t slot, const float *S, const float *conv);
int cpu_kv_read(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                const int32_t *pages, int32_t n_tokens, float *k, float *v);
int cpu_kv_write(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 const int32_t *pages, int32_t n_tokens, const float *k, const float *v);
void cpu_state_copy(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                    const struct slot_copy *copies, int32_t n);
void cpu_page_copy(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                   const struct slot_copy *copies, int32_t n);
void cpu_state_poison(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                      int32_t slot);
void cpu_page_poison(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                     int32_t page);

/* ---- parts of pools, copied and brought into canonical form (cpu_copy.c) ---- */

void *cpu_stage_alloc(struct backend *b, size_t bytes);
void cpu_stage_free(struct backend *b, void *p);
int cpu_slot_get(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                 int32_t slot, void *stage);
int cpu_slot_put(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                 int32_t slot, const void *stage);
int cpu_page_get(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 int32_t page, bool is_value, void *stage);
int cpu_page_put(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                 int32_t page, bool is_value, const void *stage);
void cpu_slot_unpack(const struct gdn_dims *d, const void *raw, float *S, void *conv);
void cpu_slot_pack(const struct gdn_dims *d, const float *S, const void *conv, void *raw);
void cpu_page_unpack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                     int32_t n_tokens, const void *raw, void *rows);
void cpu_page_pack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                   int32_t n_tokens, const void *rows, void *raw);

#endif
