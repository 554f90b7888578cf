/* What the attention kernels share: the head dim they are made for, the tiling of query rows,
 * where a block of keys lies, and a row's weights. */
#ifndef PREFILLD_ATTN_CUH
#define PREFILLD_ATTN_CUH

#include "tile.cuh"

/* Keys are taken 64 at a time, at absolute multiples of 64. */
enum { ATTN_D = 256, KV_BLOCK = 64, PANELS = ATTN_D / 64, KV_BYTES = PANELS * TILE_BYTES };

/* exp(x / sqrt(D)) = exp2(x * ATTN_SCALE). */
#define ATTN_SCALE (1.4426950408889634f / 16)

/* Below any score: the maximum of a row that has seen no key, so that its weights are zeros. */
#define ATTN_LEAST -3e38f

/* Query rows of a chunk and KV head are (token, query head of the group), token first; a tile
 * takes some of them. Row r is token r / ratio. */
struct attn_tile {
    int kv_head, ratio;
    int by_ratio; /* ceil(2^20 / ratio) */
    int seq;
    int tok;    /* token in the batch that row 0 of the chunk belongs to */
    int pos;    /* its absolute position */
    int row0;   /* first row of the tile */
    int n_rows; /* rows of the tile, 0: nothing to do */
    int last;   /* position of the tile's last row: keys up to it are read */
};

/* Token of the chunk that row r of the tile belongs to. Exact for rows below 2^20 / 64: the
 * factor is too large by less than ratio / 2^20. */
__device__ static inline int attn_token_of(const struct attn_tile *t, int r)
{
    return (t->row0 + r) * t->by_ratio >> 20;
}

/* Tiles of a chunk and KV head. */
__device__ static inline int attn_tiles_of_chunk(const struct k_attn_dims *d, int rows)
{
    return (K_CHUNK * (d->HQ / d->HK) + rows - 1) / rows;
}

/* Tile i: chunks in the map's order, KV heads, tiles. */
__device__ static inline struct attn_tile
attn_tile_at(const struct k_batch *b, const struct k_attn_dims *d, int rows, int i)
{
    struct attn_tile t;
    t.ratio = d->HQ / d->HK;
    t.by_ratio = ((1 << 20) + t.ratio - 1) / t.ratio;
    int n_tiles = attn_tiles_of_chunk(d, rows), chunk = i / (n_tiles * d->HK);
    t.kv_head = i / n_tiles % d->HK;
    t.row0 = i % n_tiles * rows;
    t.seq = b->chunk_seq[chunk];
    t.tok = b->chunk_tok[chunk];
    int first = b->cu_seqlens[t.seq], end = b->cu_seqlens[t.seq + 1];
    t.pos = b->start[t.seq] + t.tok - first;
    t.n_rows = min(min(end - t.tok, (int)K_CHUNK) * t.ratio - t.row0, rows);
    t.last = t.pos + attn_token_of(&t, t.n_rows - 1);
    return t;
}

static inline int64_t attn_grid(const struct k_batch *b, const struct k_attn_dims *d, int rows)
{
    return (int64_t)b->n_chunks * d->HK * ceil_div((int64_t)K_CHUNK * (d->HQ / d->HK), rows);
}

/* Element of dim 0 of a row (which must exist) in q, and in o when ld = HQ * D. */
__device__ static inline int64_t attn_row_at(const struct attn_tile *t, int64_t ld, int r)
{
    int i = attn_token_of(t, r), head = t->kv_head * t->ratio + t->row0 + r - i * t->ratio;
    return (t->tok + i) * ld + head * ATTN_D;
}

/* The panels of keys (or values) from position `pos`, a multiple of 64, on. */
__device__ static inline int64_t kv_block_at(const struct k_kv_pages *kv,
                                             const struct k_attn_dims *d, int page, int head,
                                             int pos)
{
    return k_kv_offset(d, kv->page_tokens, page, head, pos % kv->page_tokens, 0);
}

/* One of a thread's two rows in accumulator layout. */
struct attn_row {
    float max, total; /* total: of this thread's columns */
    int pos;
};

__device__ static inline struct attn_row attn_row_new(const struct attn_tile *t, int r)
{
    struct attn_row row = {-INFINITY, 0, min(t->pos + attn_token_of(t, r), t->last)};
    return row;
}

/* Columns S[nt][at], S[nt][at + 1] are the row's scores for keys key0 .. key0 + 63. Returns the
 * row's maximum with them. Keys past the row become -inf; is_edge: there may be some. */
__device__ static inline float row_max(float S[8][4], const struct attn_row *r, int at,
                                       int key0, bool is_edge)
{
    float m = r->max;
    if (is_edge) {
        m = fmaxf(m, ATTN_LEAST);
        int first = key0 + 2 * (threadIdx.x & 3);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (first + 8 * (i >> 1) + (i & 1) > r->pos)
                S[i >> 1][at + (i & 1)] = -INFINITY;
    }
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
        m = fmaxf(m, fmaxf(S[nt][at], S[nt][at + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

/* The scores become weights, m being the maximum. Returns the factor for the row's earlier
 * sums. */
__device__ static inline float row_weights(float S[8][4], struct attn_row *r, int at, float m)
{
    float shift = exp2_fast((r->max - m) * ATTN_SCALE), base = m * ATTN_SCALE, sum = 0;
    r->max = m;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float *s = &S[i >> 1][at + (i & 1)];
        *s = exp2_fast(fmaf(*s, ATTN_SCALE, -base));
        sum += *s;
    }
    r->total = fmaf(r->total, shift, sum);
    return shift;
}

/* Both at once. */
__device__ static inline float soften(float S[8][4], struct attn_row *r, int at, int key0,
                                      bool is_edge)
{
    return row_weights(S, r, at, row_max(S, r, at, key0, is_edge));
}

/* The row's sum of weights over the four threads that share it. */
__device__ static inline float row_total(const struct attn_row *r)
{
    float total = r->total + __shfl_xor_sync(0xffffffffu, r->total, 1);
    return total + __shfl_xor_sync(0xffffffffu, total, 2);
}

/* Two neighbours of O / total * sigmoid(gate). */
__device__ static inline uint32_t attn_output(float x, float y, float inv_total, uint32_t gate)
{
    float2 sig = sigmoid2(lo2(gate), hi2(gate));
    return pack2(x * inv_total * sig.x, y * inv_total * sig.y);
}

static inline bool attn_dims_ok(const struct k_attn_dims *d, const struct k_kv_pages *kv)
{
    return d->D == ATTN_D && d->HK > 0 && d->HQ > 0 && d->HQ % d->HK == 0 &&
           d->HQ / d->HK <= 64 && d->ld % 8 == 0 && d->ld >= (2 * d->HQ + 2 * d->HK) * ATTN_D &&
           kv->page_tokens > 0 && kv->page_tokens % 64 == 0;
}

#endif
