/* A GDN layer's operations (conv, then delta with the gated norm) on the CPU: the same bits
 * alone, in any batch, slot, thread count, cut at any multiples of 64. */
#include <criterion/criterion.h>

#include "gdn_ref.h"

/* A layer: weights, and one projection [len, ld] for each request. */
struct layer {
    struct gdn_dims d;
    float *conv_w, *A_log, *dt_bias, *norm_w;
    int32_t n_requests, len[SCHED_MAX_REQUESTS];
    float *p[SCHED_MAX_REQUESTS];
};

/* What a request's run gives. */
struct answer {
    float *o;        /* [len, HV * V] */
    float *S, *conv; /* canonical */
};

static struct layer layer_make(struct rng *r, struct gdn_dims d, int32_t n_requests,
                               const int32_t *lens)
{
    struct layer w = {.d = d, .n_requests = n_requests};
    w.conv_w = normals(r, (size_t)d.conv_dim * 4, 0.5);
    w.A_log = normals(r, d.HV, 1);
    w.dt_bias = normals(r, d.HV, 2);
    w.norm_w = normals(r, d.V, 1);
    for (int32_t i = 0; i < n_requests; i++) {
        w.len[i] = lens[i];
        w.p[i] = normals(r, (size_t)lens[i] * d.ld + 1, 1);
    }
    return w;
}

static struct answer answer_make(const struct layer *w, int32_t i)
{
    const struct gdn_dims *d = &w->d;
    return (struct answer){poisoned((size_t)w->len[i] * d->HV * d->V + 1),
                           poisoned((size_t)d->HV * d->K * d->V),
                           poisoned((size_t)d->conv_dim * 3)};
}

/* Activations of one batch. */
struct acts {
    float *p, *q, *k, *v, *g, *beta, *o;
};

static struct acts acts_make(const struct gdn_dims *d, int32_t T)
{
    size_t n = (size_t)T + 1, HK = (size_t)d->H * d->K, HVV = (size_t)d->HV * d->V;
    return (struct acts){poisoned(n * d->ld), poisoned(n * HK),    poisoned(n * HK),
                         poisoned(n * HVV),   poisoned(n * d->HV), poisoned(n * d->HV),
                         poisoned(n * HVV)};
}

static void acts_free(struct acts *a)
{
    free(a->p);
    free(a->q);
    free(a->k);
    free(a->v);
    free(a->g);
    free(a->beta);
    free(a->o);
}

static void run_ops(struct backend *b, const struct layer *w, const struct batch *batch,
                    const struct acts *a, const struct state_pool *pool)
{
    struct op_gdn_conv conv = {.b = batch,
                               .d = w->d,
                               .p = a->p,
                               .conv_w = w->conv_w,
                               .A_log = w->A_log,
                               .dt_bias = w->dt_bias,
                               .pool = pool,
                               .q = a->q,
                               .k = a->k,
                               .v = a->v,
                               .g = a->g,
                               .beta = a->beta};
    struct op_gdn_delta delta = {.b = batch,
                                 .d = w->d,
                                 .q = a->q,
                                 .k = a->k,
                                 .v = a->v,
                                 .g = a->g,
                                 .beta = a->beta,
                                 .pool = pool,
                                 .z = a->p + w->d.conv_dim,
                                 .norm_w = w->norm_w,
                                 .eps = 1e-6f,
                                 .o = a->o};
    poison_workspace(b);
    b->ops->gdn_conv(b, &conv);
    poison_workspace(b);
    b->ops->gdn_delta(b, &delta);
}

/* Runs a batch of pieces; outputs go to the requests' answers. save_slots: for each chunk, or
 * NULL. */
static void run_saving(struct backend *b, const struct layer *w, const struct piece *pieces,
                       int32_t n_pieces, const struct state_pool *pool, struct answer *answers,
                       const int32_t *save_slots)
{
    struct pack pk;
    pack_make(b, &pk, pieces, n_pieces, NULL, 0);
    pk.b.save_slots = save_slots;
    struct acts a = acts_make(&w->d, pk.h.n_tokens);
    size_t ld = w->d.ld, HVV = (size_t)w->d.HV * w->d.V;
    for (int32_t i = 0; i < n_pieces; i++)
        memcpy(a.p + (size_t)pk.cu_seqlens[i] * ld,
               w->p[pieces[i].request] + (size_t)pieces[i].start * ld,
               (size_t)pieces[i].len * ld * sizeof(float));
    run_ops(b, w, &pk.b, &a, pool);
    for (int32_t i = 0; i < n_pieces; i++)
        memcpy(answers[pieces[i].request].o + (size_t)pieces[i].start * HVV,
               a.o + (size_t)pk.cu_seqlens[i] * HVV,
               (size_t)pieces[i].len * HVV * sizeof(float));
    acts_free(&a);
    pack_free(&pk);
}

static void run_batch(struct backend *b, const struct layer *w, const struct piece *pieces,
                      int32_t n_pieces, const struct state_pool *pool, struct answer *answers)
{
    run_saving(b, w, pieces, n_pieces, pool, answers, NULL);
}

static bool is_same_state(const struct gdn_dims *d, const struct answer *x,
                          const struct answer *y)
{
    return memcmp(x->S, y->S, (size_t)d->HV * d->K * d->V * sizeof(float)) == 0 &&
           memcmp(x->conv, y->conv, (size_t)d->conv_dim * 3 * sizeof(float)) == 0;
}

static bool is_same(const struct layer *w, int32_t i, const struct answer *x,
                    const struct answer *y)
{
    const struct gdn_dims *d = &w->d;
    return memcmp(x->o, y->o, (size_t)w->len[i] * d->HV * d->V * sizeof(float)) == 0 &&
           is_same_state(d, x, y);
}

/* Every request alone and whole, one thread. */
static void run_alone(const struct layer *w, struct answer *out)
{
    struct backend b;
    for (int32_t i = 0; i < w->n_requests; i++) {
        struct backend_limits l = gdn_limits(&w->d, w->len[i], 1);
        open_cpu(&b, 1, &l);
        struct state_pool pool;
        cr_assert_eq(b.ops->state_pool_make(&b, &w->d, 1, &pool), 0);
        b.ops->state_poison(&b, &w->d, &pool, 0);
        struct piece piece = {i, 0, w->len[i], 0};
        out[i] = answer_make(w, i);
        run_batch(&b, w, &piece, 1, &pool, out);
        b.ops->state_read(&b, &w->d, &pool, 0, out[i].S, out[i].conv);
        b.ops->state_pool_free(&b, &pool);
        b.ops->close(&b);
    }
}

/* One random schedule; returns the number of requests that differ from alone. */
static int32_t run_schedule(struct rng *r, const struct layer *w, const struct answer *alone,
                            int32_t n_threads)
{
    int32_t n = w->n_requests, n_slots = n + 3, slots[SCHED_MAX_REQUESTS + 3], n_bad = 0;
    struct backend b;
    struct backend_limits l = gdn_limits(&w->d, 4096, n);
    open_cpu(&b, n_threads, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &w->d, n_slots, &pool), 0);
    for (int32_t i = 0; i < n_slots; i++)
        b.ops->state_poison(&b, &w->d, &pool, i);
    shuffled(r, n_slots, slots);
    struct sched_run s = {.n_requests = n};
    struct answer answers[SCHED_MAX_REQUESTS];
    for (int32_t i = 0; i < n; i++) {
        s.len[i] = w->len[i];
        s.slot[i] = slots[i];
        answers[i] = answer_make(w, i);
    }
    struct piece pieces[SCHED_MAX_REQUESTS];
    int32_t n_pieces;
    while ((n_pieces = sched_next(&s, r, pieces)) > 0)
        run_batch(&b, w, pieces, n_pieces, &pool, answers);
    for (int32_t i = 0; i < n; i++) {
        b.ops->state_read(&b, &w->d, &pool, slots[i], answers[i].S, answers[i].conv);
        n_bad += !is_same(w, i, &answers[i], &alone[i]);
        free(answers[i].o);
        free(answers[i].S);
        free(answers[i].conv);
    }
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
    return n_bad;
}

Test(gdn_bits, fault_31_random_schedules)
{
    const uint64_t seed = 31;
    struct rng r = {seed};
    int32_t n_compared = 0;
    for (int round = 0; round < 6; round++) {
        int32_t lens[6], n = 1 + rng_int(&r, 6);
        for (int32_t i = 0; i < n; i++)
            lens[i] = 1 + rng_int(&r, i % 2 ? 70 : 400);
        struct layer w =
            layer_make(&r, gdn_dims_of(2, 1 + round % 3, round % 2 ? 32 : 64, 64), n, lens);
        struct answer alone[SCHED_MAX_REQUESTS];
        run_alone(&w, alone);
        for (int i = 0; i < 8; i++) {
            int32_t n_threads = 1 + i % 4 * 3; /* 10 threads take the windowed way */
            n_compared += n;
            cr_expect_eq(run_schedule(&r, &w, alone, n_threads), 0, "seed %d round %d run %d",
                         (int)seed, round, i);
        }
    }
    cr_log_info("seed %d: %d requests compared", (int)seed, n_compared);
}

/* ---- states kept inside a piece */

enum { MAX_WHOLE = 6 };

/* The states behind each whole chunk of every request, by pieces that are cut there. */
static void run_cut(const struct layer *w, struct answer kept[][MAX_WHOLE])
{
    struct backend b;
    struct backend_limits l = gdn_limits(&w->d, CHUNK_TOKENS, 1);
    struct state_pool pool;
    open_cpu(&b, 1, &l);
    cr_assert_eq(b.ops->state_pool_make(&b, &w->d, 1, &pool), 0);
    for (int32_t i = 0; i < w->n_requests; i++) {
        struct answer all = answer_make(w, i);
        b.ops->state_poison(&b, &w->d, &pool, 0);
        for (int32_t c = 0; c < w->len[i] / CHUNK_TOKENS; c++) {
            struct piece piece = {i, c * CHUNK_TOKENS, CHUNK_TOKENS, 0};
            struct answer *answers = &all - i;
            run_batch(&b, w, &piece, 1, &pool, answers);
            kept[i][c] = answer_make(w, i);
            b.ops->state_read(&b, &w->d, &pool, 0, kept[i][c].S, kept[i][c].conv);
        }
    }
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* A random schedule in which about half of all whole chunks leave their state in a slot of
 * their own. Returns the number of those, and of the requests, that are not as they should
 * be. */
static int32_t run_kept(struct rng *r, const struct layer *w, const struct answer *alone,
                        struct answer kept[][MAX_WHOLE], int32_t n_threads, int32_t *n_kept)
{
    enum { N_SLOTS = SCHED_MAX_REQUESTS * (1 + MAX_WHOLE) + 1 };
    int32_t slots[N_SLOTS], saves[N_SLOTS], n = w->n_requests, n_bad = 0, at_slot = n;
    int32_t slot_of[SCHED_MAX_REQUESTS][MAX_WHOLE];
    struct backend b;
    struct backend_limits l = gdn_limits(&w->d, 4096, n);
    struct state_pool pool;
    struct answer answers[SCHED_MAX_REQUESTS], found = answer_make(w, 0);
    struct sched_run s = {.n_requests = n};
    struct piece pieces[SCHED_MAX_REQUESTS];
    open_cpu(&b, n_threads, &l);
    cr_assert_eq(b.ops->state_pool_make(&b, &w->d, N_SLOTS, &pool), 0);
    for (int32_t i = 0; i < N_SLOTS; i++)
        b.ops->state_poison(&b, &w->d, &pool, i);
    shuffled(r, N_SLOTS, slots);
    memset(slot_of, 0xff, sizeof slot_of);
    for (int32_t i = 0; i < n; i++) {
        s.len[i] = w->len[i];
        s.slot[i] = slots[i];
        answers[i] = answer_make(w, i);
    }
    for (int32_t n_pieces; (n_pieces = sched_next(&s, r, pieces)) > 0;) {
        int32_t flat = 0;
        for (int32_t i = 0; i < n_pieces; i++)
            for (int32_t t = 0; t < pieces[i].len; t += CHUNK_TOKENS, flat++) {
                bool is_whole = t + CHUNK_TOKENS <= pieces[i].len;
                saves[flat] = is_whole && rng_int(r, 2) ? slots[at_slot++] : -1;
                if (saves[flat] >= 0)
                    slot_of[pieces[i].request][(pieces[i].start + t) / CHUNK_TOKENS] =
                        saves[flat];
            }
        run_saving(&b, w, pieces, n_pieces, &pool, answers, saves);
    }
    for (int32_t i = 0; i < n; i++) {
        b.ops->state_read(&b, &w->d, &pool, slots[i], answers[i].S, answers[i].conv);
        n_bad += !is_same(w, i, &answers[i], &alone[i]);
        for (int32_t c = 0; c < MAX_WHOLE; c++) {
            if (slot_of[i][c] < 0)
                continue;
            b.ops->state_read(&b, &w->d, &pool, slot_of[i][c], found.S, found.conv);
            n_bad += !is_same_state(&w->d, &found, &kept[i][c]);
            ++*n_kept;
        }
    }
    b.ops->state_read(&b, &w->d, &pool, slots[at_slot], found.S, found.conv);
    n_bad += !isnan(found.S[0]) || !isnan(found.conv[0]);
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
    return n_bad;
}

/* A state kept inside a piece has the bits of a piece cut there, and changes nothing else. */
Test(gdn_bits, kept_inside_a_piece)
{
    const uint64_t seed = 20261130;
    struct rng r = {seed};
    int32_t n_kept = 0;
    for (int round = 0; round < 6; round++) {
        int32_t lens[SCHED_MAX_REQUESTS], n = 1 + rng_int(&r, 5);
        for (int32_t i = 0; i < n; i++)
            lens[i] = 1 + rng_int(&r, CHUNK_TOKENS * MAX_WHOLE);
        lens[0] = CHUNK_TOKENS * (1 + round); /* it ends with a whole chunk */
        struct layer w =
            layer_make(&r, gdn_dims_of(2, 1 + round % 3, round % 2 ? 32 : 64, 64), n, lens);
        struct answer alone[SCHED_MAX_REQUESTS], kept[SCHED_MAX_REQUESTS][MAX_WHOLE];
        run_alone(&w, alone);
        run_cut(&w, kept);
        for (int i = 0; i < 8; i++) /* 10 threads take the windowed way */
            cr_expect_eq(run_kept(&r, &w, alone, kept, 1 + i % 4 * 3, &n_kept), 0,
                         "seed %d round %d run %d", (int)seed, round, i);
    }
    cr_expect_gt(n_kept, 100);
    cr_log_info("seed %d: %d states compared", (int)seed, n_kept);
}

/* 64 value heads make windows of 8 chunks (MAX_PREPS / HV); these sequences span four of them,
 * in one piece each, and with 70 threads the windowed way is taken. */
Test(gdn_bits, windows_of_long_sequences)
{
    struct rng r = {7};
    int32_t lens[] = {64 * 9 + 5, 64 * 14};
    struct layer w = layer_make(&r, gdn_dims_of(2, 32, 16, 32), 2, lens);
    struct answer alone[2], wide[2];
    run_alone(&w, alone);
    struct backend b;
    struct backend_limits l = gdn_limits(&w.d, lens[0] + lens[1], 2);
    open_cpu(&b, 70, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &w.d, 2, &pool), 0);
    struct piece pieces[] = {{0, 0, lens[0], 1}, {1, 0, lens[1], 0}};
    for (int32_t i = 0; i < 2; i++)
        wide[i] = answer_make(&w, i);
    run_batch(&b, &w, pieces, 2, &pool, wide);
    for (int32_t i = 0; i < 2; i++) {
        b.ops->state_read(&b, &w.d, &pool, 1 - i, wide[i].S, wide[i].conv);
        cr_expect(is_same(&w, i, &wide[i], &alone[i]), "request %d", i);
    }
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* Neighbours of NaN before and after: what pads a batch must not leak. */
Test(gdn_bits, fault_16_neighbours_do_not_leak)
{
    struct rng r = {16};
    int32_t lens[] = {70, 100, 50};
    struct layer w = layer_make(&r, gdn_dims_of(1, 2, 64, 64), 3, lens);
    struct answer alone[3], together[3];
    run_alone(&w, alone);
    for (size_t i = 0; i < (size_t)70 * w.d.ld; i++)
        w.p[0][i] = NAN;
    for (size_t i = 0; i < (size_t)50 * w.d.ld; i++)
        w.p[2][i] = NAN;
    struct backend b;
    struct backend_limits l = gdn_limits(&w.d, 220, 3);
    open_cpu(&b, 2, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &w.d, 3, &pool), 0);
    struct piece pieces[2][3] = {{{0, 0, 70, 0}, {1, 0, 64, 1}, {2, 0, 50, 2}},
                                 {{2, 0, 50, 2}, {0, 0, 70, 0}, {1, 64, 36, 1}}};
    for (int32_t i = 0; i < 3; i++)
        together[i] = answer_make(&w, i);
    run_batch(&b, &w, pieces[0], 3, &pool, together);
    run_batch(&b, &w, pieces[1], 3, &pool, together);
    b.ops->state_read(&b, &w.d, &pool, 1, together[1].S, together[1].conv);
    cr_expect(is_same(&w, 1, &together[1], &alone[1]));
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

Test(gdn_bits, fault_18_packed_equals_separate)
{
    struct rng r = {18};
    int32_t lens[] = {130, 20, 300, 1, 64, 2, 65};
    struct layer w = layer_make(&r, gdn_dims_of(1, 1, 128, 128), 7, lens);
    struct answer alone[7], packed[7];
    run_alone(&w, alone);
    struct backend b;
    struct backend_limits l = gdn_limits(&w.d, 600, 7);
    open_cpu(&b, 2, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &w.d, 7, &pool), 0);
    struct piece pieces[7];
    for (int32_t i = 0; i < 7; i++) {
        packed[i] = answer_make(&w, i);
        pieces[i] = (struct piece){i, 0, lens[i], 6 - i};
    }
    run_batch(&b, &w, pieces, 7, &pool, packed);
    for (int32_t i = 0; i < 7; i++) {
        b.ops->state_read(&b, &w.d, &pool, 6 - i, packed[i].S, packed[i].conv);
        cr_expect(is_same(&w, i, &packed[i], &alone[i]), "request %d", i);
    }
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* A slot that another request left, or that was poisoned, is not read by a fresh one: the same
 * bits as in a slot of zeros. */
Test(gdn_bits, fault_24_slot_reuse)
{
    struct rng r = {24};
    int32_t lens[] = {100, 90};
    struct layer w = layer_make(&r, gdn_dims_of(1, 1, 64, 64), 2, lens);
    struct answer alone[2], again[2];
    run_alone(&w, alone);
    struct backend b;
    struct backend_limits l = gdn_limits(&w.d, 100, 1);
    open_cpu(&b, 1, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &w.d, 1, &pool), 0);
    for (int32_t i = 0; i < 2; i++)
        again[i] = answer_make(&w, i);
    for (int round = 0; round < 4; round++) {
        int32_t i = round % 2;
        struct piece piece = {i, 0, lens[i], 0};
        if (round == 2)
            b.ops->state_poison(&b, &w.d, &pool, 0);
        run_batch(&b, &w, &piece, 1, &pool, again);
        b.ops->state_read(&b, &w.d, &pool, 0, again[i].S, again[i].conv);
        cr_expect(is_same(&w, i, &again[i], &alone[i]), "round %d", round);
    }
    memset(pool.S, 0, (size_t)64 * 64 * sizeof(float));
    memset(pool.conv, 0, (size_t)3 * w.d.conv_dim * sizeof(float));
    struct piece piece = {0, 0, lens[0], 0};
    run_batch(&b, &w, &piece, 1, &pool, again);
    b.ops->state_read(&b, &w.d, &pool, 0, again[0].S, again[0].conv);
    cr_expect(is_same(&w, 0, &again[0], &alone[0]), "over zeros");
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* An empty piece leaves a held slot as it is, and writes nothing for a fresh request. */
Test(gdn_bits, empty_pieces_touch_nothing)
{
    struct rng r = {9};
    int32_t len = 1;
    struct layer w = layer_make(&r, gdn_dims_of(1, 1, 16, 16), 1, &len);
    struct backend b;
    struct backend_limits l = gdn_limits(&w.d, 64, 2);
    open_cpu(&b, 2, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &w.d, 2, &pool), 0);
    size_t n_S = 256, n_conv = (size_t)3 * w.d.conv_dim;
    float *S = normals(&r, n_S, 1), *conv = normals(&r, n_conv, 1);
    float *S_after = poisoned(n_S), *conv_after = poisoned(n_conv);
    b.ops->state_write(&b, &w.d, &pool, 0, S, conv);
    b.ops->state_write(&b, &w.d, &pool, 1, S, conv);
    struct piece pieces[] = {{0, 64, 0, 0}, {0, 0, 0, 1}};
    struct answer out = answer_make(&w, 0);
    run_batch(&b, &w, pieces, 2, &pool, &out);
    for (int32_t slot = 0; slot < 2; slot++) {
        b.ops->state_read(&b, &w.d, &pool, slot, S_after, conv_after);
        cr_expect_arr_eq(S_after, S, n_S * sizeof(float));
        cr_expect_arr_eq(conv_after, conv, n_conv * sizeof(float));
    }
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}

/* The last slot and the last rows lie past 2^31 elements: 32 heads x 128 x 128 is 2^19 a slot,
 * slot 4100; rows of 32 x 128 are 2^12, row 530,000. The batch's one sequence starts there. */
Test(gdn_bits, fault_27_offsets_past_31_bits)
{
    struct rng r = {27};
    int32_t len = 66, first = 530000, slot = 4100;
    struct layer w = layer_make(&r, gdn_dims_of(16, 2, 128, 128), 1, &len);
    struct answer alone[1], far = answer_make(&w, 0);
    run_alone(&w, alone);
    struct backend b;
    struct backend_limits l = gdn_limits(&w.d, len, 1);
    open_cpu(&b, 2, &l);
    size_t n = (size_t)first + len, HK = (size_t)16 * 128, HVV = 2 * HK;
    struct state_pool pool = {slot + 1, reserve((size_t)(slot + 1) * HVV * 128),
                              reserve((size_t)(slot + 1) * 3 * w.d.conv_dim)};
    struct acts a = {reserve(n * w.d.ld), reserve(n * HK), reserve(n * HK), reserve(n * HVV),
                     reserve(n * 32),     reserve(n * 32), reserve(n * HVV)};
    struct piece piece = {0, 0, len, slot};
    struct pack pk;
    pack_make(&b, &pk, &piece, 1, NULL, 0);
    pk.cu_seqlens[0] = first;
    pk.cu_seqlens[1] = first + len;
    pk.b.n_tokens = first + len;
    b.ops->chunk_map(&b, &pk.b);
    memcpy(a.p + (size_t)first * w.d.ld, w.p[0], (size_t)len * w.d.ld * sizeof(float));
    run_ops(&b, &w, &pk.b, &a, &pool);
    memcpy(far.o, a.o + (size_t)first * HVV, len * HVV * sizeof(float));
    b.ops->state_read(&b, &w.d, &pool, slot, far.S, far.conv);
    cr_expect(is_same(&w, 0, &far, &alone[0]));
    b.ops->close(&b);
}

/* The gated norm against f64, from the same run's outputs without it. */
Test(gdn_bits, gated_norm_against_f64)
{
    struct rng r = {5};
    struct gdn_dims d = gdn_dims_of(1, 2, 128, 128);
    struct gdn_input in = gdn_input_make(&r, d, 65, 0.1, 1);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, 65, 1);
    open_cpu(&b, 2, &l);
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &d, 1, &pool), 0);
    float *p = normals(&r, (size_t)65 * d.ld, 2), *w = normals(&r, d.V, 1);
    float *o = poisoned((size_t)65 * 256), *raw = poisoned((size_t)65 * 256);
    struct piece piece = {0, 0, 65, 0};
    struct pack pk;
    pack_make(&b, &pk, &piece, 1, NULL, 0);
    struct op_gdn_delta a = {.b = &pk.b,
                             .d = d,
                             .q = in.q,
                             .k = in.k,
                             .v = in.v,
                             .g = in.g,
                             .beta = in.beta,
                             .pool = &pool,
                             .norm_w = w,
                             .eps = 1e-6f,
                             .o = raw};
    b.ops->gdn_delta(&b, &a);
    a.z = p + d.conv_dim;
    a.o = o;
    b.ops->gdn_delta(&b, &a);
    /* Sum of squares, root, 4 products, SiLU: some 16 roundings, each of the value's size. */
    double worst = 0;
    for (int32_t row = 0; row < 65 * 2; row++) {
        double ss = 0;
        const float *x = raw + (size_t)row * 128, *y = o + (size_t)row * 128;
        const float *z = p + (size_t)(row / 2) * d.ld + d.conv_dim + row % 2 * 128;
        for (int32_t j = 0; j < 128; j++)
            ss += (double)x[j] * x[j];
        for (int32_t j = 0; j < 128; j++) {
            double right = x[j] / sqrt(ss / 128 + 1e-6) * w[j] * z[j] / (1 + exp(-z[j]));
            worst = fmax(worst, fabs(y[j] - right) / fabs(right));
        }
    }
    cr_expect_leq(worst, 16 * UNIT_ROUNDOFF, "relative error %.3g", worst);
    b.ops->state_pool_free(&b, &pool);
    b.ops->close(&b);
}
