/* The gated delta rule over a batch: how its chunks are shared out over the threads.
 *
 * Chunks of a sequence depend on each other through the state only. Usually an item of the
 * fan-out is a sequence and a key head, and goes through its chunks in order. When there are
 * too few of those, what does not need the state is done first for a window of chunks, one item
 * each, and the serial part is split further by columns of the state, which are independent.
 * Both ways compute every element in the same order: bits do not depend on the choice. */
#include <string.h>

#include "cpu_gdn.h"

/* Most (chunk, head) parts prepared at a time, fewest columns of the state and most key heads
 * in an item. */
enum { MAX_PREPS = 512, MIN_COLUMNS = 32, MAX_GROUP = 8 };

struct delta_run {
    const struct op_gdn_delta *a;
    struct gdn_scratch *scratch; /* [threads] */
    struct gdn_prep *preps;      /* [window chunks, HV] */
    int32_t flat0, flat_end;     /* the window, in flat chunks */
    int32_t n_splits;            /* of the state's columns */
    int32_t n_group;             /* key heads of an item */
};

static size_t scratch_bytes(int32_t n_threads)
{
    return cpu_round_up((size_t)n_threads * sizeof(struct gdn_scratch), CPU_ALIGN);
}

static size_t mm_bytes(void)
{
    size_t bytes = cpu_mm_scratch_bytes(GDN_DIM_MAX, GDN_DIM_MAX, GDN_DIM_MAX);
    return cpu_round_up(bytes, CPU_ALIGN);
}

size_t cpu_gdn_workspace_bytes(const struct backend_limits *l, int32_t n_threads)
{
    size_t n_preps = cpu_max_chunks(l) * l->HV;
    n_preps = n_preps < MAX_PREPS ? n_preps : MAX_PREPS;
    size_t delta = scratch_bytes(n_threads) + (size_t)n_threads * mm_bytes() +
                   n_preps * sizeof(struct gdn_prep);
    size_t conv = cpu_gdn_conv_workspace_bytes(l);
    return l->HV == 0 ? 0 : delta > conv ? delta : conv;
}

static struct gdn_chunk chunk_at(const struct batch *b, int32_t flat)
{
    int32_t tok = b->map.tok[flat], end = b->cu_seqlens[b->map.seq[flat] + 1];
    return (struct gdn_chunk){tok, end - tok < CHUNK_TOKENS ? end - tok : CHUNK_TOKENS};
}

/* Columns v0 .. v0 + n_v of a head in a chunk, from the state that the slot holds. A fresh
 * request's state is stored, not read; one that is to be kept is copied. */
static void apply(const struct op_gdn_delta *a, int32_t flat, int32_t i_head, int32_t v0,
                  int32_t n_v, const struct gdn_prep *prep, struct gdn_scratch *s)
{
    const struct batch *b = a->b;
    int32_t n = b->map.seq[flat];
    bool is_fresh = b->map.index[flat] == 0 && b->start[n] == 0;
    float *S = cpu_state_at(&a->d, a->pool, b->slots[n], i_head);
    for (int32_t i = 0; i < a->d.K && is_fresh; i++)
        memset(S + (size_t)i * a->d.V + v0, 0, (size_t)n_v * sizeof(float));
    gdn_chunk_apply(a, chunk_at(b, flat), i_head, v0, n_v, prep, is_fresh, S, s);
    int32_t to = cpu_save_slot(b, flat);
    for (int32_t i = 0; i < a->d.K && to >= 0; i++)
        memcpy(cpu_state_at(&a->d, a->pool, to, i_head) + (size_t)i * a->d.V + v0,
               S + (size_t)i * a->d.V + v0, (size_t)n_v * sizeof(float));
}

/* A sequence and some key heads, all chunks. Heads take turns chunk by chunk, so that a row's
 * heads, which lie side by side, are fetched together. */
static void whole_item(void *arg, int64_t item, int32_t thread)
{
    const struct delta_run *r = arg;
    const struct op_gdn_delta *a = r->a;
    struct gdn_scratch *s = &r->scratch[thread];
    int32_t n_groups = (a->d.H + r->n_group - 1) / r->n_group, ratio = a->d.HV / a->d.H;
    int32_t n = (int32_t)(item / n_groups), first = (int32_t)(item % n_groups) * r->n_group;
    int32_t end = first + r->n_group < a->d.H ? first + r->n_group : a->d.H;
    const int32_t *seq_first = a->b->map.seq_first;
    for (int32_t flat = seq_first[n]; flat < seq_first[n + 1]; flat++) {
        struct gdn_chunk c = chunk_at(a->b, flat);
        for (int32_t i_key_head = first; i_key_head < end; i_key_head++) {
            gdn_keys_copy(a, c, i_key_head, &s->keys);
            gdn_keys_multiply(c.n, a->d.K, &s->keys, s->mm);
            for (int32_t h = i_key_head * ratio; h < (i_key_head + 1) * ratio; h++) {
                gdn_prep_make(a, c, h, &s->keys, &s->prep);
                apply(a, flat, h, 0, a->d.V, &s->prep, s);
                if (a->z)
                    gdn_gate_rows(a, h, c.tok, c.n);
            }
        }
    }
}

/* A chunk of the window and a key head. */
static void prep_item(void *arg, int64_t item, int32_t thread)
{
    const struct delta_run *r = arg;
    const struct op_gdn_delta *a = r->a;
    struct gdn_scratch *s = &r->scratch[thread];
    int32_t i_chunk = (int32_t)(item / a->d.H), i_key_head = (int32_t)(item % a->d.H);
    int32_t ratio = a->d.HV / a->d.H;
    struct gdn_chunk c = chunk_at(a->b, r->flat0 + i_chunk);
    gdn_keys_copy(a, c, i_key_head, &s->keys);
    gdn_keys_multiply(c.n, a->d.K, &s->keys, s->mm);
    for (int32_t h = i_key_head * ratio; h < (i_key_head + 1) * ratio; h++)
        gdn_prep_make(a, c, h, &s->keys, &r->preps[(size_t)i_chunk * a->d.HV + h]);
}

/* A sequence, a value head and some of its columns; the chunks in the window. */
static void serial_item(void *arg, int64_t item, int32_t thread)
{
    const struct delta_run *r = arg;
    const struct op_gdn_delta *a = r->a;
    int32_t split = (int32_t)(item % r->n_splits);
    int32_t h = (int32_t)(item / r->n_splits % a->d.HV);
    int32_t n = (int32_t)(item / r->n_splits / a->d.HV);
    int32_t n_v = a->d.V / r->n_splits, v0 = split * n_v;
    int32_t flat = a->b->map.seq_first[n], end = a->b->map.seq_first[n + 1];
    flat = flat > r->flat0 ? flat : r->flat0;
    end = end < r->flat_end ? end : r->flat_end;
    struct gdn_scratch *s = &r->scratch[thread];
    for (; flat < end; flat++) {
        gdn_keys_copy(a, chunk_at(a->b, flat), h / (a->d.HV / a->d.H), &s->keys);
        apply(a, flat, h, v0, n_v, &r->preps[(size_t)(flat - r->flat0) * a->d.HV + h], s);
    }
}

/* A chunk of the window and a value head: the gated norm needs all columns. */
static void gate_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct delta_run *r = arg;
    struct gdn_chunk c = chunk_at(r->a->b, r->flat0 + (int32_t)(item / r->a->d.HV));
    gdn_gate_rows(r->a, (int32_t)(item % r->a->d.HV), c.tok, c.n);
}

static void run_windows(struct cpu_pool *pool, struct delta_run *r)
{
    const struct op_gdn_delta *a = r->a;
    int32_t n_threads = cpu_pool_threads(pool), n_heads = a->b->n_seqs * a->d.HV;
    r->n_splits = 1;
    while (n_heads * r->n_splits < 2 * n_threads && a->d.V / r->n_splits >= 2 * MIN_COLUMNS &&
           a->d.V % (2 * r->n_splits * MIN_COLUMNS) == 0)
        r->n_splits *= 2;
    int32_t window = MAX_PREPS / a->d.HV;
    for (r->flat0 = 0; r->flat0 < a->b->n_chunks; r->flat0 = r->flat_end) {
        r->flat_end = a->b->n_chunks - r->flat0 < window ? a->b->n_chunks : r->flat0 + window;
        int64_t n_chunks = r->flat_end - r->flat0;
        cpu_pool_run(pool, n_chunks * a->d.H, prep_item, r);
        cpu_pool_run(pool, (int64_t)n_heads * r->n_splits, serial_item, r);
        if (a->z)
            cpu_pool_run(pool, n_chunks * a->d.HV, gate_item, r);
    }
}

static void run_whole(struct cpu_pool *pool, struct delta_run *r)
{
    const struct op_gdn_delta *a = r->a;
    int64_t n_items = (int64_t)a->b->n_seqs * a->d.H;
    r->n_group = 1;
    while (r->n_group < MAX_GROUP && n_items / (2 * r->n_group) >= 2 * cpu_pool_threads(pool))
        r->n_group *= 2;
    int32_t n_groups = (a->d.H + r->n_group - 1) / r->n_group;
    cpu_pool_run(pool, (int64_t)a->b->n_seqs * n_groups, whole_item, r);
}

void cpu_gdn_delta(struct backend *b, const struct op_gdn_delta *a)
{
    struct cpu_pool *pool = cpu_impl_pool(b);
    int32_t n_threads = cpu_pool_threads(pool);
    size_t bytes;
    uintptr_t at = (uintptr_t)cpu_impl_workspace(b, &bytes);
    struct delta_run r = {.a = a};
    r.scratch = cpu_carve(&at, scratch_bytes(n_threads));
    for (int32_t i = 0; i < n_threads; i++)
        r.scratch[i].mm = cpu_carve(&at, mm_bytes());
    r.preps = (struct gdn_prep *)at;
    int64_t n_items = (int64_t)a->b->n_seqs * a->d.H;
    /* With one thread there is nothing to share out. */
    if (n_threads == 1 || n_items >= 2 * n_threads || a->d.HV > MAX_PREPS)
        run_whole(pool, &r);
    else
        run_windows(pool, &r);
}
