/* Test cases of the operations over sequences, which have pools: the gated delta rule and
 * attention; and the shapes of batches that all tests use.
 *
 * Tolerances. bf16 has 8 bits: one rounding is 2^-9 of the value. BF16_REL allows two of them
 * (the result's, and an f32 error that moves it over a tie); operations that round inside (the
 * delta rule's chunk products, the experts' middle, P of attention) have an error near 2^-9 of
 * the tensor's rms, so they are held to ABS of it and to L2 in the norm, some twice what was
 * seen (2.9e-3 to 5e-3 against f64, RESULTS-gpu.md). */
#ifndef PREFILLD_TESTS_PAIR_SEQ_H
#define PREFILLD_TESTS_PAIR_SEQ_H

#include "pair.h"

static const double BF16_REL = 0x1p-8, TINY = 1e-5, BF16_L2 = 0x1.8p-9;
static const double CHAIN_REL = 0x1p-6, CHAIN_ABS = 0x1p-4, CHAIN_L2 = 1e-2;

enum { M = 256, VOCAB = 2048, MAX_T = 10240, MAX_R = 2048, P = 128, N_CASES = 8 };

struct shape {
    const char *name;
    int32_t n;
    int32_t lens[8], starts[8];
};

static const struct shape shapes[] = {
    {"T=1", 1, {1}, {0}},
    {"T=63", 1, {63}, {0}},
    {"T=64", 1, {64}, {0}},
    {"T=65", 1, {65}, {0}},
    {"130+20+300", 3, {130, 20, 300}, {0}},
    {"continued 130+20+300", 3, {130, 20, 300}, {64, 320, 0}},
    {"page edges", 6, {128, 127, 129, 1, 64, 192}, {0, 0, 128, 127 + 1, 192, 64}},
    {"with empty ones", 5, {0, 65, 0, 2, 0}, {0, 64, 128, 0, 0}},
};

/* The last case: 4096 sequences of 1 to 3 tokens. */
enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]), MANY = 4096 };

static const char *begin_shape(struct pair_batch *pb, int i, int32_t n_rows)
{
    if (i < N_SHAPES) {
        batch_make(pb, shapes[i].n, shapes[i].lens, shapes[i].starts, P, n_rows, VOCAB);
        batch_begin(pb);
        return shapes[i].name;
    }
    int32_t *lens = must(calloc(MANY, 4)), *starts = must(calloc(MANY, 4));
    for (int32_t k = 0; k < MANY; k++) {
        lens[k] = 1 + rng_int(&pair.rng, 3);
        starts[k] = rng_int(&pair.rng, 2) * 64;
    }
    batch_make(pb, MANY, lens, starts, P, n_rows, VOCAB);
    batch_begin(pb);
    free(lens);
    free(starts);
    return "4096 of 1..3";
}

/* ---- gated delta rule ---- */

struct gdn_case {
    struct gdn_dims d;
    struct state_pool pool[SIDES];
    struct tensor p, conv_w, A_log, dt_bias, norm_w, q, k, v, g, beta, o;
};

static void gdn_open(struct gdn_case *c, const struct pair_batch *pb, int32_t H, int32_t HV)
{
    size_t T = (size_t)pb->h.n_tokens, cd = (size_t)(2 * H + HV) * 128;
    c->d = (struct gdn_dims){.H = H, .HV = HV, .K = 128, .V = 128, .conv_dim = (int32_t)cd};
    c->d.ld = (c->d.conv_dim + HV * 128 + 2 * HV + 63) / 64 * 64;
    c->p = tensor_normal(T * (size_t)c->d.ld, true, 1, 0);
    c->conv_w = tensor_normal(cd * 4, false, 0.5f, 0);
    c->A_log = tensor_normal((size_t)HV, false, 1, 0);
    c->dt_bias = tensor_normal((size_t)HV, false, 1, -2);
    c->norm_w = tensor_normal(128, false, 0.2f, 1);
    c->q = tensor_make(T * (size_t)H * 128, true);
    c->k = tensor_make(T * (size_t)H * 128, true);
    c->v = tensor_make(T * (size_t)HV * 128, true);
    c->g = tensor_make(T * (size_t)HV, false);
    c->beta = tensor_make(T * (size_t)HV, false);
    c->o = tensor_make(T * (size_t)HV * 128, true);
    size_t elems = (size_t)HV * 128 * 128;
    float *S = must(malloc(elems * 4)), *conv = must(malloc(cd * 3 * 4));
    for (int s = 0; s < SIDES; s++) {
        must_be(pair.b[s].ops->state_pool_make(&pair.b[s], &c->d, pb->n_slots, &c->pool[s]), 0,
                "state_pool_make");
        for (int32_t slot = pb->n; slot < pb->n_slots; slot++)
            pair.b[s].ops->state_poison(&pair.b[s], &c->d, &c->pool[s], slot);
    }
    for (int32_t i = 0; i < pb->n; i++) {
        for (size_t k = 0; k < elems; k++)
            S[k] = 0.1f * rng_normal(&pair.rng);
        for (size_t k = 0; k < cd * 3; k++)
            conv[k] = bf16_round(rng_normal(&pair.rng));
        for (int s = 0; s < SIDES; s++) {
            struct backend *b = &pair.b[s];
            /* A fresh piece must not read its slot. */
            if (pb->start[i] == 0)
                b->ops->state_poison(b, &c->d, &c->pool[s], pb->slots[i]);
            else
                must_be(b->ops->state_write(b, &c->d, &c->pool[s], pb->slots[i], S, conv), 0,
                        "state_write");
        }
        /* Drawing 4096 states takes longer than all else; they may be the same. */
        if (pb->n > 64 && i > 0)
            pair.rng.s += 1;
    }
    free(S);
    free(conv);
}

static void gdn_close(struct gdn_case *c)
{
    struct tensor *all[] = {&c->p, &c->conv_w, &c->A_log, &c->dt_bias, &c->norm_w, &c->q,
                            &c->k, &c->v,      &c->g,     &c->beta,    &c->o};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        tensor_free(all[i]);
    for (int s = 0; s < SIDES; s++)
        pair.b[s].ops->state_pool_free(&pair.b[s], &c->pool[s]);
}

/* What becomes of the slot of a piece that starts a request and has no tokens is left open. */
static bool has_state(const struct pair_batch *pb, int32_t i)
{
    return pb->start[i] > 0 || pb->cu[i + 1] > pb->cu[i];
}

/* The slots of some of the batch's sequences, and all that a state was saved to. Returns how
 * many; the caller frees. */
static int32_t slots_to_compare(const struct pair_batch *pb, int32_t **out)
{
    int32_t n = 0, *slots = must(calloc((size_t)(pb->n + pb->n_slots), 4));
    for (int32_t i = 0; i < pb->n && i < 8; i++)
        if (has_state(pb, i))
            slots[n++] = pb->slots[i];
    for (int32_t slot = pb->n + 1; slot < pb->n_slots; slot++)
        slots[n++] = slot;
    *out = slots;
    return n;
}

/* Their states, joined. */
static void gdn_compare_states(const char *name, struct gdn_case *c,
                               const struct pair_batch *pb)
{
    int32_t *slots, n = slots_to_compare(pb, &slots);
    size_t elems = (size_t)c->d.HV * 128 * 128, cd3 = (size_t)c->d.conv_dim * 3;
    float *S[SIDES], *conv[SIDES];
    char what[128];
    for (int s = 0; s < SIDES; s++) {
        S[s] = must(calloc((size_t)n * elems + 1, 4));
        conv[s] = must(calloc((size_t)n * cd3 + 1, 4));
        for (int32_t i = 0; i < n; i++)
            must_be(pair.b[s].ops->state_read(&pair.b[s], &c->d, &c->pool[s], slots[i],
                                              S[s] + (size_t)i * elems,
                                              conv[s] + (size_t)i * cd3),
                    0, "state_read");
    }
    snprintf(what, sizeof(what), "gdn state, %s, %d saved", name, pb->n_slots - pb->n - 1);
    compare(what, S[DUT], S[REF], (size_t)n * elems, CHAIN_REL, CHAIN_ABS, CHAIN_L2);
    snprintf(what, sizeof(what), "gdn conv state, %s, %d saved", name, pb->n_slots - pb->n - 1);
    compare(what, conv[DUT], conv[REF], (size_t)n * cd3, 0, 0, 0);
    for (int s = 0; s < SIDES; s++) {
        free(S[s]);
        free(conv[s]);
    }
    free(slots);
}

/* is_normed: with the gated norm, which scales a nearly cancelled row up with its rounding, so
 * that only the error in the norm says anything; without it every element is held. */
static void test_gdn(int i_shape, int32_t H, int32_t HV, bool is_normed)
{
    struct pair_batch pb;
    struct gdn_case c;
    char name[64], what[96];
    snprintf(name, sizeof(name), "%d/%d %s", H, HV, begin_shape(&pb, i_shape, 0));
    gdn_open(&c, &pb, H, HV);
    for (int s = 0; s < SIDES; s++) {
        struct op_gdn_conv op = {
            &pb.b[s],   c.d,      c.p.p[s], c.conv_w.p[s], c.A_log.p[s], c.dt_bias.p[s],
            &c.pool[s], c.q.p[s], c.k.p[s], c.v.p[s],      c.g.p[s],     c.beta.p[s]};
        pair.b[s].ops->gdn_conv(&pair.b[s], &op);
    }
    snprintf(what, sizeof(what), "gdn_conv q, %s", name);
    compare_tensor(what, &c.q, BF16_REL, TINY, BF16_L2);
    snprintf(what, sizeof(what), "gdn_conv k, %s", name);
    compare_tensor(what, &c.k, BF16_REL, TINY, BF16_L2);
    snprintf(what, sizeof(what), "gdn_conv v, %s", name);
    compare_tensor(what, &c.v, BF16_REL, TINY, BF16_L2);
    snprintf(what, sizeof(what), "gdn_conv g, %s", name);
    compare_tensor(what, &c.g, 1e-5, 1e-6, 1e-5);
    snprintf(what, sizeof(what), "gdn_conv beta, %s", name);
    compare_tensor(what, &c.beta, 1e-5, 1e-6, 1e-5);
    /* The same inputs for both from here on. */
    struct tensor *same[] = {&c.q, &c.k, &c.v, &c.g, &c.beta};
    for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++) {
        float *x = tensor_get(same[i], DUT);
        tensor_put(same[i], x);
        free(x);
    }
    pair.poison_work(&pair.b[DUT]);
    for (int s = 0; s < SIDES; s++) {
        size_t act = dtype_bytes(pair.b[s].act);
        struct op_gdn_delta op = {.b = &pb.b[s],
                                  .d = c.d,
                                  .q = c.q.p[s],
                                  .k = c.k.p[s],
                                  .v = c.v.p[s],
                                  .g = c.g.p[s],
                                  .beta = c.beta.p[s],
                                  .pool = &c.pool[s],
                                  .z = is_normed ? (char *)c.p.p[s] + (size_t)c.d.conv_dim * act
                                                 : NULL,
                                  .norm_w = c.norm_w.p[s],
                                  .eps = 1e-6f,
                                  .o = c.o.p[s]};
        pair.b[s].ops->gdn_delta(&pair.b[s], &op);
    }
    snprintf(what, sizeof(what), "gdn_delta%s, %s", is_normed ? " and norm" : "", name);
    compare_tensor_rows(what, &c.o, 128, CHAIN_REL, is_normed ? INFINITY : CHAIN_ABS, CHAIN_L2);
    gdn_compare_states(name, &c, &pb);
    batch_end(&pb, NULL, NULL);
    gdn_close(&c);
    batch_free(&pb);
}

/* ---- attention ---- */

/* What was before each piece, in the pools of both sides. */
static void kv_fill(struct pair_batch *pb, const struct attn_dims *d,
                    struct kv_pool pool[SIDES])
{
    for (int s = 0; s < SIDES; s++) {
        must_be(pair.b[s].ops->kv_pool_make(&pair.b[s], d, pb->n_pages, P, &pool[s]), 0,
                "kv_pool_make");
        for (int32_t i = 0; i < pb->n_pages; i++)
            pair.b[s].ops->page_poison(&pair.b[s], d, &pool[s], i);
    }
    for (int32_t i = 0; i < pb->n; i++) {
        int32_t n = pb->start[i];
        size_t size = (size_t)d->HK * (size_t)n * (size_t)d->D;
        if (n == 0)
            continue;
        float *k = must(malloc(size * 4)), *v = must(malloc(size * 4));
        for (size_t j = 0; j < size; j++) {
            k[j] = bf16_round(rng_normal(&pair.rng));
            v[j] = bf16_round(rng_normal(&pair.rng));
        }
        for (int s = 0; s < SIDES; s++)
            must_be(pair.b[s].ops->kv_write(&pair.b[s], d, &pool[s], pb->pages + i * PAIR_PAGES,
                                            n, k, v),
                    0, "kv_write");
        free(k);
        free(v);
    }
}

/* K and V of some requests, after the step. */
static void kv_compare(const char *name, const struct pair_batch *pb, const struct attn_dims *d,
                       struct kv_pool pool[SIDES])
{
    for (int32_t i = 0; i < pb->n && i < 3; i++) {
        int32_t n = pb->start[i] + pb->cu[i + 1] - pb->cu[i];
        size_t size = (size_t)d->HK * (size_t)n * (size_t)d->D;
        float *k[SIDES], *v[SIDES];
        char what[96];
        if (n == 0)
            continue;
        for (int s = 0; s < SIDES; s++) {
            k[s] = must(malloc(size * 4));
            v[s] = must(malloc(size * 4));
            must_be(pair.b[s].ops->kv_read(&pair.b[s], d, &pool[s], pb->pages + i * PAIR_PAGES,
                                           n, k[s], v[s]),
                    0, "kv_read");
        }
        snprintf(what, sizeof(what), "keys of sequence %d, %s", i, name);
        compare(what, k[DUT], k[REF], size, BF16_REL, TINY, BF16_L2);
        snprintf(what, sizeof(what), "values of sequence %d, %s", i, name);
        compare(what, v[DUT], v[REF], size, 0, 0, 0);
        for (int s = 0; s < SIDES; s++) {
            free(k[s]);
            free(v[s]);
        }
    }
}

static void test_attn(int i_shape, int32_t HQ, int32_t HK)
{
    struct pair_batch pb;
    struct kv_pool pool[SIDES];
    char name[64], what[96];
    snprintf(name, sizeof(name), "%d/%d %s", HQ, HK, begin_shape(&pb, i_shape, 0));
    struct attn_dims d = {.HQ = HQ, .HK = HK, .D = 256, .rot_dim = 64};
    d.ld = (2 * HQ + 2 * HK) * 256;
    size_t T = (size_t)pb.h.n_tokens;
    struct tensor p = tensor_normal(T * (size_t)d.ld, true, 1, 0);
    struct tensor qn = tensor_normal(256, false, 0.1f, 1),
                  kn = tensor_normal(256, false, 0.1f, 1);
    struct tensor freq = tensor_make(32, false), o = tensor_make(T * (size_t)HQ * 256, true);
    float f[32];
    for (int i = 0; i < 32; i++)
        f[i] = 1.0f / powf(1e7f, (float)(2 * i) / 64);
    tensor_put(&freq, f);
    kv_fill(&pb, &d, pool);
    for (int s = 0; s < SIDES; s++) {
        struct op_attn_prep op = {&pb.b[s], d,         p.p[s], qn.p[s],
                                  kn.p[s],  freq.p[s], 1e-6f,  &pool[s]};
        pair.b[s].ops->attn_prep(&pair.b[s], &op);
    }
    snprintf(what, sizeof(what), "attn_prep, %s", name);
    compare_tensor(what, &p, BF16_REL, TINY, BF16_L2);
    pair.poison_work(&pair.b[DUT]);
    for (int s = 0; s < SIDES; s++) {
        struct op_attn op = {&pb.b[s], d, p.p[s], &pool[s], o.p[s]};
        pair.b[s].ops->attn(&pair.b[s], &op);
    }
    snprintf(what, sizeof(what), "attn, %s", name);
    compare_tensor_rows(what, &o, 256, CHAIN_REL, CHAIN_ABS, CHAIN_L2);
    kv_compare(name, &pb, &d, pool);
    batch_end(&pb, NULL, NULL);
    tensor_free(&p), tensor_free(&qn), tensor_free(&kn), tensor_free(&freq), tensor_free(&o);
    for (int s = 0; s < SIDES; s++)
        pair.b[s].ops->kv_pool_free(&pair.b[s], &pool[s]);
    batch_free(&pb);
}

#endif
