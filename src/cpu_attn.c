/* Full attention over paged keys and values.
 *
 * A piece is cut at absolute multiples of 64 into tiles of queries; an item of the fan-out is a
 * tile and a KV head, with all the query heads that share it. Keys come in blocks of 64, also
 * at absolute multiples, in ascending order, with a running maximum and sum for every row
 * (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). The row's own block is the last:
 * it is handled row by row, so that nothing past a row's position enters its sums, not even
 * multiplied by zero. A row's bits depend on its position and nothing else of the tile.
 *
 * Shapes of a tile: rows are (token, query head of the group), token first. */
#include <math.h>
#include <string.h>

#include "cpu_impl.h"
#include "cpu_simd.h"

/* Rows of a tile: Q, scores and sums of so many rows stay in the second cache. */
enum { TILE_ROWS = 256 };

struct tile_scratch {
    float Q[TILE_ROWS * ATTN_DIM_MAX]; /* scaled by 1 / sqrt(D) */
    float sum[TILE_ROWS * ATTN_DIM_MAX];
    float scores[TILE_ROWS * CHUNK_TOKENS];
    float max[TILE_ROWS], total[TILE_ROWS];
    float shift[TILE_ROWS]; /* old maximum minus new, then its exponential */
    void *mm;
};

struct attn_run {
    const struct op_attn *a;
    int32_t tile_tokens;          /* divides 64 */
    int32_t *tile_first;          /* [N + 1] first tile of each sequence */
    struct tile_scratch *scratch; /* [threads] */
};

struct tile {
    int32_t seq, i_kv_head;
    int32_t tok, pos, n; /* first token in the batch, its position, number of tokens */
    int32_t ratio;       /* query heads of a KV head */
};

static size_t scratch_bytes(int32_t n_threads)
{
    return cpu_round_up((size_t)n_threads * sizeof(struct tile_scratch), CPU_ALIGN);
}

static size_t mm_bytes(void)
{
    size_t scores = cpu_mm_scratch_bytes(TILE_ROWS, CHUNK_TOKENS, ATTN_DIM_MAX);
    size_t values = cpu_mm_scratch_bytes(TILE_ROWS, ATTN_DIM_MAX, CHUNK_TOKENS);
    return cpu_round_up(scores > values ? scores : values, CPU_ALIGN);
}

size_t cpu_attn_workspace_bytes(const struct backend_limits *l, int32_t n_threads)
{
    if (l->HQ == 0)
        return 0;
    return scratch_bytes(n_threads) + (size_t)n_threads * mm_bytes() +
           cpu_round_up(((size_t)l->max_seqs + 1) * sizeof(int32_t), CPU_ALIGN);
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

/* total = total * shift + sum of the row's 64 weights; sum *= shift where that is not 1. */
CPU_INLINE void carry_body(int32_t n_rows, int32_t D, const float *weights, const float *shift,
                           float *total, float *sum)
{
    for (int32_t r = 0; r < n_rows; r++) {
        const float *w = weights + (size_t)r * CHUNK_TOKENS;
        vf t = (VF_LOAD(w) + VF_LOAD(w + VEC)) + (VF_LOAD(w + 2 * VEC) + VF_LOAD(w + 3 * VEC));
        total[r] = total[r] * shift[r] + VF_SUM(t);
        float *s = sum + (size_t)r * D;
        if (shift[r] != 1)
            for (int32_t i = 0; i < D; i += VEC)
                VF_STORE(s + i, VF_LOAD(s + i) * shift[r]);
    }
}
CPU_KERNEL(carry,
           (int32_t n_rows, int32_t D, const float *weights, const float *shift, float *total,
            float *sum),
           (n_rows, D, weights, shift, total, sum))

/* n_rows (a constant) rows of 64 columns of the sums at a time. */
CPU_INLINE void add_strip(int32_t n_rows, int32_t n, int32_t D, const float *w, const float *v,
                          float *sum)
{
    vf s[4][4];
#pragma GCC unroll 4
    for (int32_t r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int32_t u = 0; u < 4; u++)
            s[r][u] = VF_LOAD(sum + (size_t)r * D + u * VEC);
    for (int32_t j = 0; j < n; j++, v += D)
#pragma GCC unroll 4
        for (int32_t r = 0; r < n_rows; r++)
#pragma GCC unroll 4
            for (int32_t u = 0; u < 4; u++)
                s[r][u] += VF_LOAD(v + u * VEC) * w[r * CHUNK_TOKENS + j];
#pragma GCC unroll 4
    for (int32_t r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int32_t u = 0; u < 4; u++)
            VF_STORE(sum + (size_t)r * D + u * VEC, s[r][u]);
}

/* sum [n_rows, D] += the first n weights of each row times values [n, D]. */
CPU_INLINE void add_values_body(int32_t n_rows, int32_t n, int32_t D, const float *weights,
                                const float *values, float *sum)
{
    for (int32_t i = 0; i < D; i += 4 * VEC) {
        int32_t r = 0;
        for (; r + 4 <= n_rows; r += 4)
            add_strip(4, n, D, weights + (size_t)r * CHUNK_TOKENS, values + i,
                      sum + (size_t)r * D + i);
        for (; r < n_rows; r++)
            add_strip(1, n, D, weights + (size_t)r * CHUNK_TOKENS, values + i,
                      sum + (size_t)r * D + i);
    }
}
CPU_KERNEL(add_values,
           (int32_t n_rows, int32_t n, int32_t D, const float *weights, const float *values,
            float *sum),
           (n_rows, n, D, weights, values, sum))

/* o = sum / total / (1 + gate), gate = e^-x. */
CPU_INLINE void finish_body(int32_t D, float total, const float *sum, const float *gate,
                            float *o)
{
    float s = 1 / total;
    for (int32_t i = 0; i < D; i += VEC)
        VF_STORE(o + i, VF_LOAD(sum + i) * s / (1 + VF_LOAD(gate + i)));
}
CPU_KERNEL(finish, (int32_t D, float total, const float *sum, const float *gate, float *o),
           (D, total, sum, gate, o))

/* ---- a tile ---- */

static void load_queries(const struct op_attn *a, const struct tile *t, struct tile_scratch *s)
{
    int32_t D = a->d.D;
    for (int32_t i = 0; i < t->n; i++)
        scale(t->ratio * D, 1 / sqrtf((float)D),
              (const float *)a->p + (size_t)(t->tok + i) * a->d.ld +
                  (size_t)t->i_kv_head * t->ratio * D,
              s->Q + (size_t)i * t->ratio * D);
    int32_t n_rows = t->n * t->ratio;
    memset(s->sum, 0, (size_t)n_rows * D * sizeof(float));
    for (int32_t r = 0; r < n_rows; r++) {
        s->max[r] = -INFINITY;
        s->total[r] = 0;
    }
}

/* Rows r0 .. r0 + n_rows - 1 have new scores, of which the first n count. */
static void soften(struct tile_scratch *s, int32_t r0, int32_t n_rows, int32_t n, int32_t D)
{
    float *scores = s->scores + (size_t)r0 * CHUNK_TOKENS;
    raise(n_rows, n, scores, s->max + r0, s->shift + r0);
    cpu_vec_exp(n_rows * CHUNK_TOKENS, scores, scores);
    cpu_vec_exp(n_rows, s->shift + r0, s->shift + r0);
    carry(n_rows, D, scores, s->shift + r0, s->total + r0, s->sum + (size_t)r0 * D);
}

static void key_block(const struct op_attn *a, const struct tile *t, int32_t pos,
                      struct tile_scratch *s)
{
    int32_t D = a->d.D, P = a->pool->page_tokens, n_rows = t->n * t->ratio;
    int32_t page = a->b->page_table[(size_t)t->seq * a->b->max_pages + pos / P];
    const float *keys = cpu_key_block_at(&a->d, a->pool, page, t->i_kv_head, pos % P);
    const float *values = cpu_value_at(&a->d, a->pool, page, t->i_kv_head, pos % P);
    bool is_own = pos + CHUNK_TOKENS > t->pos;
    int32_t n_keys = is_own ? t->pos + t->n - pos : CHUNK_TOKENS;
    cpu_mm(CPU_MM_SET, false, false, n_rows, n_keys, D, s->Q, D, keys, CHUNK_TOKENS, s->scores,
           CHUNK_TOKENS, s->mm);
    if (!is_own) {
        soften(s, 0, n_rows, CHUNK_TOKENS, D);
        cpu_mm(CPU_MM_ADD, false, false, n_rows, D, CHUNK_TOKENS, s->scores, CHUNK_TOKENS,
               values, D, s->sum, D, s->mm);
        return;
    }
    for (int32_t i = 0; i < t->n; i++) {
        int32_t r0 = i * t->ratio, n = t->pos + i + 1 - pos;
        soften(s, r0, t->ratio, n, D);
        add_values(t->ratio, n, D, s->scores + (size_t)r0 * CHUNK_TOKENS, values,
                   s->sum + (size_t)r0 * D);
    }
}

/* o = sum / total * sigmoid(gate). */
static void store_outputs(const struct op_attn *a, const struct tile *t,
                          const struct tile_scratch *s)
{
    int32_t D = a->d.D, HQ = a->d.HQ;
    float gate[ATTN_DIM_MAX];
    for (int32_t i = 0; i < t->n; i++)
        for (int32_t j = 0; j < t->ratio; j++) {
            size_t head = (size_t)(t->i_kv_head * t->ratio + j) * D, tok = t->tok + i;
            int32_t r = i * t->ratio + j;
            scale(D, -1, (const float *)a->p + tok * a->d.ld + (size_t)HQ * D + head, gate);
            cpu_vec_exp(D, gate, gate);
            finish(D, s->total[r], s->sum + (size_t)r * D, gate,
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
    load_queries(r->a, &t, s);
    for (int32_t pos = 0; pos < t.pos + t.n; pos += CHUNK_TOKENS)
        key_block(r->a, &t, pos, s);
    store_outputs(r->a, &t, s);
}

void cpu_attn(struct backend *b, const struct op_attn *a)
{
    struct cpu_pool *pool = cpu_impl_pool(b);
    int32_t n_threads = cpu_pool_threads(pool);
    size_t bytes;
    uintptr_t at = (uintptr_t)cpu_impl_workspace(b, &bytes);
    struct attn_run r = {.a = a, .tile_tokens = CHUNK_TOKENS};
    while (r.tile_tokens * (a->d.HQ / a->d.HK) > TILE_ROWS)
        r.tile_tokens /= 2;
    r.scratch = cpu_carve(&at, scratch_bytes(n_threads));
    for (int32_t i = 0; i < n_threads; i++)
        r.scratch[i].mm = cpu_carve(&at, mm_bytes());
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
