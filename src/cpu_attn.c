/* Full attention over paged keys and values.
 *
 * A piece is cut at absolute multiples of 64 into tiles of queries; an item of the fan-out is a
 * tile and a KV head, with all the query heads that share it. Keys come in blocks of 64, also
 * at absolute multiples, in ascending order, with a running maximum and sum for every row
 * (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). The row's own block
 * is the last: it is handled row by row, so that nothing past a row's position enters its sums,
 * not even multiplied by zero. A row's bits depend on its position and nothing else of the
 * tile.
 *
 * Shapes of a tile: rows are (token, query head of the group), token first. */
#include <math.h>
#include <string.h>

#include "cpu_impl.h"
#include "cpu_simd.h"
#include "cpu_tile.h"

/* Rows of a tile: Q, scores and sums of so many rows stay in the second cache. */
enum { TILE_ROWS = 256 };

struct tile_scratch {
    float scores[(TILE_ROWS + MAX_TILE_ROWS) * CHUNK_TOKENS];
    float max[TILE_ROWS], total[TILE_ROWS];
    float shift[TILE_ROWS]; /* old maximum minus new, then its exponential */
    void *queries;          /* in the kernels' form, scaled by 1 / sqrt(D) */
    void *weights;          /* the scores' exponentials in the kernels' form */
    void *panels;           /* a block's keys or values in the kernels' form */
    float *sums;
};

struct attn_run {
    const struct op_attn *a;
    const struct cpu_gemm_isa *isa;
    struct cpu_tile_sums sums;
    int32_t tile_tokens;          /* divides 64 */
    int32_t *tile_first;          /* [N + 1] first tile of each sequence */
    struct tile_scratch *scratch; /* [threads] */
};

struct tile {
    int32_t seq, i_kv_head;
    int32_t tok, pos, n; /* first token in the batch, its position, number of tokens */
    int32_t ratio;       /* query heads of a KV head */
};

static void carve_scratch(uintptr_t *at, struct tile_scratch *s)
{
    enum { PANELS_OF_D = ATTN_DIM_MAX / PANEL, PANELS_OF_BLOCK = CHUNK_TOKENS / PANEL };
    size_t keys = cpu_tile_panels_bytes(PANELS_OF_BLOCK, ATTN_DIM_MAX);
    size_t values = cpu_tile_panels_bytes(PANELS_OF_D, CHUNK_TOKENS);
    /* The queries pass through the sums' room before they are packed. */
    size_t sums = cpu_tile_sums_bytes(TILE_ROWS, PANELS_OF_D);
    size_t plain = (size_t)TILE_ROWS * ATTN_DIM_MAX * sizeof(float);
    s->queries = cpu_carve(at, cpu_tile_rows_bytes(TILE_ROWS, ATTN_DIM_MAX));
    s->weights = cpu_carve(at, cpu_tile_rows_bytes(TILE_ROWS, CHUNK_TOKENS));
    s->panels = cpu_carve(at, keys > values ? keys : values);
    s->sums = cpu_carve(at, sums > plain ? sums : plain);
}

static struct tile_scratch *carve_threads(uintptr_t *at, int32_t n_threads)
{
    return cpu_carve(at, (size_t)n_threads * sizeof(struct tile_scratch));
}

size_t cpu_attn_workspace_bytes(const struct backend_limits *l, int32_t n_threads)
{
    if (l->HQ == 0)
        return 0;
    uintptr_t end = 0;
    struct tile_scratch s;
    carve_threads(&end, n_threads);
    for (int32_t i = 0; i < n_threads; i++)
        carve_scratch(&end, &s);
    cpu_carve(&end, ((size_t)l->max_seqs + 1) * sizeof(int32_t));
    return end;
}

/* ---- kernels ---- */

/* y = x * s. */
CPU_INLINE void scale_body(int32_t n, float s, const float *x, float *y)
{
    for (int32_t i = 0; i < n; i += VEC)
        VF_STORE(y + i, VF_LOAD(x + i) * s);
}
CPU_KERNEL(scale, (int32_t n, float s, const float *x, float *y), (n, s, x, y))

/* Raises each row's maximum over its first n of 64 scores, leaves the scores minus it, and
 * shift = old maximum - new. Scores past n are dropped before they are looked at. A NaN stays
 * in its score and makes the row's sums NaN. */
CPU_INLINE void raise_body(int32_t n_rows, int32_t n, float *scores, float *max, float *shift)
{
    vi lane;
    for (int32_t u = 0; u < VEC; u++)
        lane[u] = u;
    vf low = VF_SET(-INFINITY);
    for (int32_t r = 0; r < n_rows; r++) {
        float *s = scores + (size_t)r * CHUNK_TOKENS;
        vf most = low;
        for (int32_t j = 0; j < CHUNK_TOKENS; j += VEC) {
            vf x = VF_SELECT(lane + j < n, VF_LOAD(s + j), low);
            VF_STORE(s + j, x);
            most = VF_SELECT(x > most, x, most);
        }
        float m = max[r];
        for (int32_t u = 0; u < VEC; u++)
            m = most[u] > m ? most[u] : m;
        shift[r] = max[r] - m;
        max[r] = m;
        for (int32_t j = 0; j < CHUNK_TOKENS; j += VEC)
            VF_STORE(s + j, VF_LOAD(s + j) - m);
    }
}
CPU_KERNEL(raise, (int32_t n_rows, int32_t n, float *scores, float *max, float *shift),
           (n_rows, n, scores, max, shift))

/* total = total * shift + sum of the row's 64 weights; sums *= shift where that is not 1. Rows
 * from r0 on. */
CPU_INLINE void carry_body(const struct cpu_tile_sums *l, int32_t r0, int32_t n_rows, int32_t D,
                           const float *weights, const float *shift, float *total, float *sums)
{
    for (int32_t r = r0; r < r0 + n_rows; r++) {
        const float *w = weights + (size_t)r * CHUNK_TOKENS;
        vf t = (VF_LOAD(w) + VF_LOAD(w + VEC)) + (VF_LOAD(w + 2 * VEC) + VF_LOAD(w + 3 * VEC));
        total[r] = total[r] * shift[r] + VF_SUM(t);
        float *s = sums + cpu_tile_sums_row(l, r);
        if (shift[r] != 1)
            for (int32_t p = 0; p < D / VEC; p++)
                VF_STORE(s + l->panel_at[p], VF_LOAD(s + l->panel_at[p]) * shift[r]);
    }
}
CPU_KERNEL(carry,
           (const struct cpu_tile_sums *l, int32_t r0, int32_t n_rows, int32_t D,
            const float *weights, const float *shift, float *total, float *sums),
           (l, r0, n_rows, D, weights, shift, total, sums))

/* n_rows (a constant) rows, two panels of them. */
CPU_INLINE void add_strip(int32_t n_rows, int32_t n, const float *w, const float *v,
                          float *const *rows, const int32_t *at)
{
    vf s[4][2];
#pragma GCC unroll 4
    for (int32_t r = 0; r < n_rows; r++) {
        s[r][0] = VF_LOAD(rows[r] + at[0]);
        s[r][1] = VF_LOAD(rows[r] + at[1]);
    }
    for (int32_t j = 0; j < n; j++, v += VEC) {
        vf v0 = VF_LOAD(v), v1 = VF_LOAD(v + CHUNK_TOKENS * VEC);
#pragma GCC unroll 4
        for (int32_t r = 0; r < n_rows; r++) {
            s[r][0] += v0 * w[r * CHUNK_TOKENS + j];
            s[r][1] += v1 * w[r * CHUNK_TOKENS + j];
        }
    }
#pragma GCC unroll 4
    for (int32_t r = 0; r < n_rows; r++) {
        VF_STORE(rows[r] + at[0], s[r][0]);
        VF_STORE(rows[r] + at[1], s[r][1]);
    }
}

/* sums += the first n weights of each row times values [n, D] in panels. Rows from r0 on. */
CPU_INLINE void add_values_body(const struct cpu_tile_sums *l, int32_t r0, int32_t n_rows,
                                int32_t n, int32_t D, const float *weights, const float *values,
                                float *sums)
{
    int32_t r = r0, end = r0 + n_rows;
    while (r < end) {
        int32_t n_strip = end - r >= 4 ? 4 : 1;
        float *rows[4];
        for (int32_t i = 0; i < n_strip; i++)
            rows[i] = sums + cpu_tile_sums_row(l, r + i);
        const float *w = weights + (size_t)r * CHUNK_TOKENS, *v = values;
        for (int32_t p = 0; p < D / VEC; p += 2, v += 2 * CHUNK_TOKENS * VEC) {
            if (n_strip == 4)
                add_strip(4, n, w, v, rows, l->panel_at + p);
            else
                add_strip(1, n, w, v, rows, l->panel_at + p);
        }
        r += n_strip;
    }
}
CPU_KERNEL(add_values,
           (const struct cpu_tile_sums *l, int32_t r0, int32_t n_rows, int32_t n, int32_t D,
            const float *weights, const float *values, float *sums),
           (l, r0, n_rows, n, D, weights, values, sums))

/* o = sum / total / (1 + gate), gate = e^-x. */
CPU_INLINE void finish_body(const int32_t *panel_at, int32_t D, float total, const float *sum,
                            const float *gate, float *o)
{
    float s = 1 / total;
    for (int32_t p = 0; p < D / VEC; p++)
        VF_STORE(o + p * VEC, VF_LOAD(sum + panel_at[p]) * s / (1 + VF_LOAD(gate + p * VEC)));
}
CPU_KERNEL(finish,
           (const int32_t *panel_at, int32_t D, float total, const float *sum,
            const float *gate, float *o),
           (panel_at, D, total, sum, gate, o))

/* ---- a tile ---- */

static void load_queries(const struct attn_run *run, const struct tile *t,
                         struct tile_scratch *s)
{
    const struct op_attn *a = run->a;
    int32_t D = a->d.D, n_rows = t->n * t->ratio;
    for (int32_t i = 0; i < t->n; i++)
        scale(t->ratio * D, 1 / sqrtf((float)D),
              (const float *)a->p + (size_t)(t->tok + i) * a->d.ld +
                  (size_t)t->i_kv_head * t->ratio * D,
              s->sums + (size_t)i * t->ratio * D);
    cpu_tile_pack_rows(run->isa, n_rows, D, s->sums, D, s->queries);
    size_t n_tiles = (size_t)ceil_div(n_rows, run->sums.tile_rows);
    memset(s->sums, 0, n_tiles * run->sums.tile_floats * sizeof(float));
    for (int32_t r = 0; r < n_rows; r++) {
        s->max[r] = -INFINITY;
        s->total[r] = 0;
    }
}

/* Rows r0 .. r0 + n_rows - 1 have new scores, of which the first n count. */
static void soften(const struct attn_run *run, struct tile_scratch *s, int32_t r0,
                   int32_t n_rows, int32_t n)
{
    float *scores = s->scores + (size_t)r0 * CHUNK_TOKENS;
    raise(n_rows, n, scores, s->max + r0, s->shift + r0);
    cpu_vec_exp(n_rows * CHUNK_TOKENS, scores, scores);
    cpu_vec_exp(n_rows, s->shift + r0, s->shift + r0);
    carry(&run->sums, r0, n_rows, run->a->d.D, s->scores, s->shift, s->total, s->sums);
}

static void key_block(const struct attn_run *run, const struct tile *t, int32_t pos,
                      struct tile_scratch *s)
{
    const struct op_attn *a = run->a;
    int32_t D = a->d.D, P = a->pool->page_tokens, n_rows = t->n * t->ratio;
    int32_t page = a->b->page_table[(size_t)t->seq * a->b->max_pages + pos / P];
    size_t block = cpu_kv_block(&a->d, a->pool, page, t->i_kv_head, pos % P);
    const float *values = (const float *)a->pool->v + block;
    bool is_own = pos + CHUNK_TOKENS > t->pos;
    int32_t n_keys = is_own ? t->pos + t->n - pos : CHUNK_TOKENS;
    struct cpu_tile_panels b = cpu_tile_unpack(run->isa, ceil_div(n_keys, PANEL), D,
                                               (const float *)a->pool->k + block, s->panels);
    cpu_tile_multiply(run->isa, n_rows, s->queries, &b, s->scores, CHUNK_TOKENS);
    if (!is_own) {
        soften(run, s, 0, n_rows, CHUNK_TOKENS);
        cpu_tile_pack_rows(run->isa, n_rows, CHUNK_TOKENS, s->scores, CHUNK_TOKENS, s->weights);
        b = cpu_tile_unpack(run->isa, D / PANEL, CHUNK_TOKENS, values, s->panels);
        cpu_tile_accumulate(run->isa, n_rows, s->weights, &b, s->sums);
        return;
    }
    for (int32_t i = 0; i < t->n; i++) {
        int32_t r0 = i * t->ratio, n = t->pos + i + 1 - pos;
        soften(run, s, r0, t->ratio, n);
        add_values(&run->sums, r0, t->ratio, n, D, s->scores, values, s->sums);
    }
}

/* o = sum / total * sigmoid(gate). */
static void store_outputs(const struct attn_run *run, const struct tile *t,
                          const struct tile_scratch *s)
{
    const struct op_attn *a = run->a;
    int32_t D = a->d.D, HQ = a->d.HQ;
    float gate[ATTN_DIM_MAX];
    for (int32_t i = 0; i < t->n; i++)
        for (int32_t j = 0; j < t->ratio; j++) {
            size_t head = (size_t)(t->i_kv_head * t->ratio + j) * D, tok = t->tok + i;
            int32_t r = i * t->ratio + j;
            scale(D, -1, (const float *)a->p + tok * a->d.ld + (size_t)HQ * D + head, gate);
            cpu_vec_exp(D, gate, gate);
            finish(run->sums.panel_at, D, s->total[r],
                   s->sums + cpu_tile_sums_row(&run->sums, r), gate,
                   (float *)a->o + tok * HQ * D + head);
        }
}

/* ---- the fan-out ---- */

static int32_t first_position(const struct batch *b, int32_t n)
{
    return b->positions[b->cu_seqlens[n]];
}

/* Tiles of tile_tokens at absolute positions; the first and last of a piece may be shorter. */
static struct tile find_tile(const struct attn_run *r, int64_t item)
{
    const struct batch *b = r->a->b;
    struct tile t = {.ratio = r->a->d.HQ / r->a->d.HK};
    int32_t HK = r->a->d.HK, i_tile = (int32_t)(item / HK);
    t.i_kv_head = (int32_t)(item % HK);
    int32_t low = 0, high = b->n_seqs; /* tile_first[low] <= i_tile < tile_first[high] */
    while (high - low > 1) {
        int32_t mid = low + (high - low) / 2;
        if (r->tile_first[mid] <= i_tile)
            low = mid;
        else
            high = mid;
    }
    t.seq = low;
    int32_t len = b->cu_seqlens[low + 1] - b->cu_seqlens[low], start = first_position(b, low);
    /* Later tiles have more keys: they go first. */
    int32_t k = r->tile_first[low + 1] - 1 - i_tile;
    int32_t from = (start / r->tile_tokens + k) * r->tile_tokens;
    int32_t to = from + r->tile_tokens;
    t.pos = from > start ? from : start;
    t.n = (to < start + len ? to : start + len) - t.pos;
    t.tok = b->cu_seqlens[low] + t.pos - start;
    return t;
}

static void attn_item(void *arg, int64_t item, int32_t thread)
{
    const struct attn_run *r = arg;
    struct tile_scratch *s = &r->scratch[thread];
    struct tile t = find_tile(r, item);
    cpu_tile_enter(r->isa, t.n * t.ratio);
    load_queries(r, &t, s);
    for (int32_t pos = 0; pos < t.pos + t.n; pos += CHUNK_TOKENS)
        key_block(r, &t, pos, s);
    store_outputs(r, &t, s);
    cpu_tile_leave(r->isa);
}

void cpu_attn(struct backend *b, const struct op_attn *a)
{
    struct cpu_pool *pool = cpu_impl_pool(b);
    int32_t n_threads = cpu_pool_threads(pool);
    size_t bytes;
    uintptr_t at = (uintptr_t)cpu_impl_workspace(b, &bytes);
    const struct cpu_gemm_isa *isa = cpu_pool_gemm(pool)->isa;
    struct attn_run r = {.a = a, .isa = isa, .tile_tokens = CHUNK_TOKENS};
    r.sums = cpu_tile_sums_layout(isa, a->d.D / PANEL);
    while (r.tile_tokens * (a->d.HQ / a->d.HK) > TILE_ROWS)
        r.tile_tokens /= 2;
    r.scratch = carve_threads(&at, n_threads);
    for (int32_t i = 0; i < n_threads; i++)
        carve_scratch(&at, &r.scratch[i]);
    r.tile_first = (int32_t *)at;
    int32_t n_tiles = 0;
    for (int32_t n = 0; n < a->b->n_seqs; n++) {
        r.tile_first[n] = n_tiles;
        int32_t len = a->b->cu_seqlens[n + 1] - a->b->cu_seqlens[n];
        if (len > 0) {
            int32_t start = first_position(a->b, n);
            n_tiles += (start + len - 1) / r.tile_tokens - start / r.tile_tokens + 1;
        }
    }
    r.tile_first[a->b->n_seqs] = n_tiles;
    cpu_pool_run(pool, (int64_t)n_tiles * a->d.HK, attn_item, &r);
}
