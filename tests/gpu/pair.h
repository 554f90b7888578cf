/* One operation on two backends: the CPU's, which is the reference, and the one under test.
 *
 * Inputs are drawn once, rounded to bf16 where they are activations, so that both sides compute
 * from the same numbers. Outputs are poisoned, with a guard behind them. What is compared is
 * f32 on the host. */
#ifndef PREFILLD_TESTS_PAIR_H
#define PREFILLD_TESTS_PAIR_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../rng.h"
#include "../tap.h"
#include "backend.h"
#include "cpu.h"

enum { REF, DUT, SIDES, GUARD_BYTES = 4096 };

struct pair {
    struct backend b[SIDES];
    struct backend_limits limits;
    struct rng rng;
    void (*poison_work)(struct backend *b); /* of the side under test */
};

static struct pair pair;

static inline void *must(void *p)
{
    if (!p) {
        printf("Bail out! out of memory\n");
        exit(1);
    }
    return p;
}

static inline void must_be(int rc, int want, const char *what)
{
    if (rc == want)
        return;
    printf("Bail out! %s: %d, not %d; lost: %s\n", what, rc, want,
           pair.b[DUT].lost ? pair.b[DUT].lost : "no");
    exit(1);
}

static inline float bf16_round(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* ---- tensors ---- */

struct tensor {
    size_t n;
    bool is_act; /* the side's activation dtype, else 4-byte elements */
    void *p[SIDES];
};

static size_t tensor_bytes(const struct tensor *t, int side)
{
    return t->n * (t->is_act ? dtype_bytes(pair.b[side].act) : 4);
}

/* n elements of NaN. */
static struct tensor tensor_make(size_t n, bool is_act)
{
    struct tensor t = {.n = n, .is_act = is_act};
    for (int s = 0; s < SIDES; s++) {
        size_t bytes = tensor_bytes(&t, s) + GUARD_BYTES;
        char *ff = must(malloc(bytes));
        memset(ff, 0xff, bytes);
        t.p[s] = must(pair.b[s].ops->alloc(&pair.b[s], bytes));
        must_be(pair.b[s].ops->upload(&pair.b[s], t.p[s], ff, bytes), 0, "upload");
        free(ff);
    }
    return t;
}

static void tensor_put(struct tensor *t, const float *x)
{
    for (int s = 0; s < SIDES; s++) {
        uint16_t *half = must(malloc(t->n * 2 + 1));
        bool is_half = t->is_act && pair.b[s].act == DTYPE_BF16;
        for (size_t i = 0; is_half && i < t->n; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], sizeof(bits));
            half[i] = (uint16_t)(bits >> 16);
        }
        must_be(pair.b[s].ops->upload(&pair.b[s], t->p[s],
                                      is_half ? (const void *)half : (const void *)x,
                                      tensor_bytes(t, s)),
                0, "upload");
        free(half);
    }
}

/* Normal values, rounded to bf16 when is_act. */
static struct tensor tensor_normal(size_t n, bool is_act, float scale, float mean)
{
    struct tensor t = tensor_make(n, is_act);
    float *x = must(malloc(n * sizeof(float) + 1));
    for (size_t i = 0; i < n; i++) {
        x[i] = mean + scale * rng_normal(&pair.rng);
        if (is_act)
            x[i] = bf16_round(x[i]);
    }
    tensor_put(&t, x);
    free(x);
    return t;
}

/* The side's values as f32 (ints as they are); the caller frees. */
static float *tensor_get(const struct tensor *t, int side)
{
    struct backend *b = &pair.b[side];
    size_t bytes = tensor_bytes(t, side);
    char *raw = must(malloc(bytes + GUARD_BYTES));
    must_be(b->ops->download(b, raw, t->p[side], bytes + GUARD_BYTES), 0, "download");
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if ((unsigned char)raw[bytes + i] != 0xff) {
            CHECK(false, "side %d wrote %zu bytes behind a tensor of %zu", side, i, bytes);
            break;
        }
    float *x = must(malloc(t->n * sizeof(float) + 1));
    if (!t->is_act || b->act == DTYPE_F32) {
        memcpy(x, raw, t->n * sizeof(float));
    } else {
        for (size_t i = 0; i < t->n; i++) {
            uint16_t half;
            memcpy(&half, raw + 2 * i, sizeof(half));
            uint32_t bits = (uint32_t)half << 16;
            memcpy(&x[i], &bits, sizeof(bits));
        }
    }
    free(raw);
    return x;
}

static void tensor_free(struct tensor *t)
{
    for (int s = 0; s < SIDES; s++)
        pair.b[s].ops->free(&pair.b[s], t->p[s]);
}

/* ---- weights ---- */

struct pair_weight {
    struct weight w[SIDES];
};

static struct pair_weight weight_normal(int32_t n_mats, int32_t rows, int32_t cols, float scale)
{
    struct pair_weight pw;
    size_t n = (size_t)n_mats * (size_t)rows * (size_t)cols;
    uint16_t *x = must(malloc(n * 2));
    for (size_t i = 0; i < n; i++) {
        float v = bf16_round(scale * rng_normal(&pair.rng));
        uint32_t bits;
        memcpy(&bits, &v, sizeof(bits));
        x[i] = (uint16_t)(bits >> 16);
    }
    struct weight_part part = {
        .rows = x, .dtype = DTYPE_BF16, .n_rows = (int64_t)n_mats * rows};
    for (int s = 0; s < SIDES; s++) {
        struct errmsg e = {{0}};
        int rc = pair.b[s].ops->weight_make(&pair.b[s], &part, 1, n_mats, rows, cols,
                                            WEIGHT_MATMUL | WEIGHT_EMBED, &pw.w[s], &e);
        if (rc != 0)
            printf("# %s\n", e.text);
        must_be(rc, 0, "weight_make");
    }
    free(x);
    return pw;
}

static void weight_free(struct pair_weight *pw)
{
    for (int s = 0; s < SIDES; s++)
        pair.b[s].ops->weight_free(&pair.b[s], &pw->w[s]);
}

/* ---- comparing ---- */

static double rms_of(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return n ? sqrt(sum / (double)n) : 0;
}

/* Passes when |got - want| <= rel |want| + abs rms for every element, the rms being the
 * tensor's or the row's when that is larger (sums of few terms are larger than means of many,
 * and so are their roundings), and the relative error in the 2-norm is at most l2. n is a
 * multiple of row, 0: one row. Prints the first element that does not. */
static bool compare_rows(const char *what, const float *got, const float *want, size_t n,
                         size_t row, double rel, double abs, double l2)
{
    double d2 = 0, most = 0, rms = rms_of(want, n), row_rms = 0;
    size_t n_over = 0, first = 0;
    for (size_t i = 0; i < n; i++) {
        if (row && i % row == 0)
            row_rms = rms_of(want + i, row);
        double d = fabs((double)got[i] - want[i]), scale = row_rms > rms ? row_rms : rms;
        d2 += d * d;
        most = d > most ? d : most;
        if (!(d <= rel * fabs(want[i]) + abs * scale) && n_over++ == 0)
            first = i;
    }
    double error = rms > 0 ? sqrt(d2 / (double)n) / rms : sqrt(d2);
    bool is_good = n_over == 0 && error <= l2;
    CHECK(is_good, "%s: relative error %.2g (bar %.2g), worst %.3g of rms %.3g", what, error,
          l2, most, rms);
    if (n_over)
        printf("# %zu of %zu are off, the first at %zu: %.9g, want %.9g\n", n_over, n, first,
               (double)got[first], (double)want[first]);
    return is_good;
}

static bool compare(const char *what, const float *got, const float *want, size_t n, double rel,
                    double abs, double l2)
{
    return compare_rows(what, got, want, n, 0, rel, abs, l2);
}

static bool compare_tensor_rows(const char *what, const struct tensor *t, size_t row,
                                double rel, double abs, double l2)
{
    float *got = tensor_get(t, DUT), *want = tensor_get(t, REF);
    bool is_good = compare_rows(what, got, want, t->n, row, rel, abs, l2);
    free(got);
    free(want);
    return is_good;
}

static bool compare_tensor(const char *what, const struct tensor *t, double rel, double abs,
                           double l2)
{
    return compare_tensor_rows(what, t, 0, rel, abs, l2);
}

/* ---- batches ---- */

enum { PAIR_PAGES = 64 };

struct pair_batch {
    int32_t n;
    struct batch_host h;
    struct batch b[SIDES];
    int32_t *tokens, *positions, *cu, *start, *slots, *saves, *pages, *rows, *targets, *tops;
    int32_t n_slots, n_pages; /* that the pools must have */
};

/* Sequences of lens with starts (NULL: 0), in shuffled slots and on shuffled pages of P tokens;
 * every second whole chunk saved, to the slots from n + 1 on; n_rows rows asked for, spread
 * over the batch. */
static void batch_make(struct pair_batch *pb, int32_t n, const int32_t *lens,
                       const int32_t *starts, int32_t P, int32_t n_rows, int32_t vocab)
{
    int32_t T = 0, at_page = 0;
    size_t N = (size_t)n;
    memset(pb, 0, sizeof(*pb));
    pb->n = n;
    pb->cu = must(calloc(N + 1, 4));
    pb->start = must(calloc(N + 1, 4));
    pb->slots = must(calloc(N + 1, 4));
    pb->pages = must(calloc((N + 1) * PAIR_PAGES, 4));
    for (int32_t i = 0; i < n; i++) {
        pb->start[i] = starts ? starts[i] : 0;
        pb->cu[i + 1] = T += lens[i];
        pb->h.n_chunks += (lens[i] + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
        pb->h.max_len = lens[i] > pb->h.max_len ? lens[i] : pb->h.max_len;
        for (int32_t k = 0; k * P < pb->start[i] + lens[i]; k++)
            at_page++;
    }
    int32_t *order = must(calloc((size_t)at_page + N + 1, 4));
    for (int32_t i = 0; i < at_page; i++) {
        int32_t j = rng_int(&pair.rng, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    pb->n_pages = at_page + 1;
    pb->n_slots = n + 1;
    pb->saves = must(calloc((size_t)pb->h.n_chunks + 1, 4));
    for (int32_t i = 0, flat = 0; i < n; i++)
        for (int32_t t = 0; t < lens[i]; t += CHUNK_TOKENS, flat++)
            pb->saves[flat] = flat % 2 == 0 && t + CHUNK_TOKENS <= lens[i] ? pb->n_slots++ : -1;
    pb->tokens = must(calloc((size_t)T + 1, 4));
    pb->positions = must(calloc((size_t)T + 1, 4));
    at_page = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t j = rng_int(&pair.rng, i + 1);
        pb->slots[i] = pb->slots[j];
        pb->slots[j] = i;
        for (int32_t k = 0; k * P < pb->start[i] + lens[i]; k++)
            pb->pages[i * PAIR_PAGES + k] = order[at_page++];
        for (int32_t t = 0; t < lens[i]; t++)
            pb->positions[pb->cu[i] + t] = pb->start[i] + t;
    }
    free(order);
    for (int32_t t = 0; t < T; t++)
        pb->tokens[t] = rng_int(&pair.rng, vocab);
    pb->rows = must(calloc((size_t)n_rows + 1, 4));
    pb->targets = must(calloc((size_t)n_rows + 1, 4));
    pb->tops = must(calloc((size_t)n_rows + 1, 4));
    for (int32_t r = 0; r < n_rows; r++) {
        pb->rows[r] = (int32_t)((int64_t)r * T / n_rows);
        pb->targets[r] = r % 4 ? rng_int(&pair.rng, vocab) : -1;
        pb->tops[r] = r % 3 ? r % (TOP_MAX + 1) : TOP_MAX;
    }
    pb->h.n_tokens = T;
    pb->h.n_seqs = n;
    pb->h.n_rows = n_rows;
    pb->h.max_pages = PAIR_PAGES;
    pb->h.tokens = pb->tokens, pb->h.positions = pb->positions, pb->h.cu_seqlens = pb->cu;
    pb->h.start = pb->start, pb->h.slots = pb->slots, pb->h.page_table = pb->pages;
    pb->h.save_slots = pb->saves;
    pb->h.rows = pb->rows, pb->h.targets = pb->targets, pb->h.row_top = pb->tops;
}

static void batch_begin(struct pair_batch *pb)
{
    for (int s = 0; s < SIDES; s++)
        must_be(pair.b[s].ops->step_begin(&pair.b[s], &pb->h, &pb->b[s]), 0, "step_begin");
    pair.poison_work(&pair.b[DUT]);
}

/* Ends the step on both sides; results [n_rows] of each side, or NULL. */
static void batch_end(struct pair_batch *pb, const struct tensor *rows,
                      struct row_result *results[SIDES])
{
    for (int s = 0; s < SIDES; s++) {
        struct batch b = pb->b[s];
        if (!rows)
            b.n_rows = 0;
        must_be(pair.b[s].ops->step_end(&pair.b[s], &b, rows ? rows->p[s] : NULL,
                                        rows ? results[s] : NULL),
                0, "step_end");
        must_be(pair.b[s].ops->step_done(&pair.b[s], true), 1, "step_done");
    }
}

static void batch_free(struct pair_batch *pb)
{
    int32_t *all[] = {pb->tokens, pb->positions, pb->cu,   pb->start,   pb->slots,
                      pb->saves,  pb->pages,     pb->rows, pb->targets, pb->tops};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}

#endif
