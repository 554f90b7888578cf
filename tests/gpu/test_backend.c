/* Every operation of the CUDA backend against the CPU's body, through the table: random inputs,
 * poisoned outputs and workspace, T = 1, 63, 64, 65, 130 + 20 + 300 and 4096 sequences of 1 to
 * 3 tokens, fresh and continued; pools, steps, and a device that is lost.
 *
 * `test_backend self` compares the CPU backend with itself: the harness without a card. */
#include "cuda_impl.h"
#include "pair_seq.h"

#include <sys/wait.h>
#include <unistd.h>

/* ---- steps ---- */

static void test_map(void)
{
    for (int i = 0; i <= N_SHAPES; i++) {
        struct pair_batch pb;
        const char *name = begin_shape(&pb, i, 0);
        const struct chunk_map *want = &pb.b[REF].map, *got = &pb.b[DUT].map;
        struct {
            const int32_t *want, *got;
            size_t n;
        } parts[] = {{want->seq, got->seq, (size_t)pb.h.n_chunks},
                     {want->index, got->index, (size_t)pb.h.n_chunks},
                     {want->tok, got->tok, (size_t)pb.h.n_chunks},
                     {want->seq_first, got->seq_first, (size_t)pb.n + 1}};
        int n_same = 0;
        for (int k = 0; k < 4; k++) {
            int32_t *x = must(malloc(parts[k].n * 4 + 4));
            must_be(pair.b[DUT].ops->download(&pair.b[DUT], x, parts[k].got, parts[k].n * 4), 0,
                    "download");
            n_same += memcmp(x, parts[k].want, parts[k].n * 4) == 0;
            free(x);
        }
        CHECK(n_same == 4, "chunk map, %s: %d of 4 arrays are right", name, n_same);
        batch_end(&pb, NULL, NULL);
        batch_free(&pb);
    }
}

static void test_steps(void)
{
    const struct backend_ops *ops = pair.b[DUT].ops;
    struct backend *b = &pair.b[DUT];
    struct pair_batch pb;
    struct batch out[3];
    const int32_t lens[] = {5};
    batch_make(&pb, 1, lens, NULL, P, 0, VOCAB);
    must_be(ops->step_begin(b, &pb.h, &out[0]), 0, "first step");
    CHECK(ops->step_done(b, false) == 0, "a step that was not ended is not done");
    must_be(ops->step_end(b, &out[0], NULL, NULL), 0, "step_end");
    must_be(ops->step_begin(b, &pb.h, &out[1]), 0, "second step");
    CHECK(ops->step_begin(b, &pb.h, &out[2]) == ERR_FULL, "a third step in flight is refused");
    must_be(ops->step_end(b, &out[1], NULL, NULL), 0, "step_end");
    CHECK(ops->step_done(b, true) == 1 && ops->step_done(b, true) == 1, "two steps end");
    CHECK(ops->step_done(b, false) == 0, "and no third one");
    pb.h.n_tokens = MAX_T + 1;
    CHECK(ops->step_begin(b, &pb.h, &out[0]) == ERR_TOO_LARGE, "too many tokens are refused");
    batch_free(&pb);
}

/* ---- rows ---- */

static void test_rows(void)
{
    static const int32_t counts[] = {1, 63, 65, 450, 8192};
    struct pair_weight w = weight_normal(1, VOCAB, M, 1);
    struct pair_batch pb;
    begin_shape(&pb, 4, 0);
    struct tensor x = tensor_make((size_t)pb.h.n_tokens * M, false);
    for (int s = 0; s < SIDES; s++) {
        struct op_embed op = {.b = &pb.b[s], .w = &w.w[s], .x = x.p[s]};
        pair.b[s].ops->embed(&pair.b[s], &op);
    }
    compare_tensor("embed", &x, 0, 0, 0);
    tensor_free(&x);
    batch_end(&pb, NULL, NULL);
    batch_free(&pb);
    weight_free(&w);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        int32_t n = counts[i], dim = i % 2 ? 2048 : 5120;
        char what[80];
        size_t size = (size_t)n * (size_t)dim;
        struct tensor r = tensor_normal(size, false, 1, 0), y = tensor_normal(size, true, 1, 0);
        struct tensor nw = tensor_normal((size_t)dim, false, 0.1f, 1);
        struct tensor h = tensor_make(size, true), c = tensor_make(size / 2, true);
        for (int s = 0; s < SIDES; s++) {
            struct op_rmsnorm op = {n, dim, 1e-6f, r.p[s], y.p[s], nw.p[s], h.p[s]};
            struct op_swiglu sw = {n, dim / 2, y.p[s], c.p[s]};
            pair.b[s].ops->rmsnorm(&pair.b[s], &op);
            pair.b[s].ops->swiglu(&pair.b[s], &sw);
        }
        snprintf(what, sizeof(what), "rmsnorm's sum, %d x %d", n, dim);
        compare_tensor(what, &r, 0, 0, 0);
        snprintf(what, sizeof(what), "rmsnorm, %d x %d", n, dim);
        compare_tensor(what, &h, BF16_REL, TINY, BF16_L2);
        snprintf(what, sizeof(what), "swiglu, %d x %d", n, dim / 2);
        compare_tensor(what, &c, BF16_REL, TINY, BF16_L2);
        tensor_free(&r), tensor_free(&y), tensor_free(&nw), tensor_free(&h), tensor_free(&c);
    }
}

/* ---- products ---- */

static void test_matmul_shape(int32_t rows, int32_t cols, int32_t ldc)
{
    static const int32_t counts[] = {1,   2,   3,   5,   7,   15,   16,   17,
                                     31,  32,  33,  63,  64,  65,   127,  129,
                                     130, 256, 257, 450, 513, 1000, 2049, 3000};
    enum { N_COUNTS = sizeof(counts) / sizeof(counts[0]), MOST = 3000 };
    char what[80];
    struct pair_weight w = weight_normal(1, rows, cols, 1 / sqrtf((float)cols));
    struct tensor a = tensor_normal((size_t)MOST * (size_t)cols, true, 1, 0);
    struct tensor all = tensor_make((size_t)MOST * (size_t)ldc, true);
    int n_differ = 0, n_gaps = 0;
    for (int s = 0; s < SIDES; s++) {
        struct op_matmul op = {MOST, &w.w[s], a.p[s], all.p[s], ldc};
        pair.b[s].ops->matmul(&pair.b[s], &op);
    }
    float *want = tensor_get(&all, REF), *most = tensor_get(&all, DUT);
    for (size_t r = 0; r < MOST; r++)
        for (int32_t j = rows; j < ldc; j++) {
            n_gaps += !isnan(most[r * (size_t)ldc + (size_t)j]);
            want[r * (size_t)ldc + (size_t)j] = most[r * (size_t)ldc + (size_t)j] = 0;
        }
    snprintf(what, sizeof(what), "matmul %d x %d, %d rows", rows, cols, MOST);
    compare(what, most, want, (size_t)MOST * (size_t)ldc, BF16_REL, TINY, BF16_L2);
    for (int i = 0; i < N_COUNTS; i++) {
        struct tensor c = tensor_make((size_t)counts[i] * (size_t)ldc, true);
        struct op_matmul op = {counts[i], &w.w[DUT], a.p[DUT], c.p[DUT], ldc};
        pair.b[DUT].ops->matmul(&pair.b[DUT], &op);
        float *got = tensor_get(&c, DUT);
        for (size_t r = 0; r < (size_t)counts[i]; r++)
            if (memcmp(got + r * (size_t)ldc, most + r * (size_t)ldc, (size_t)rows * 4) != 0 &&
                n_differ++ == 0)
                printf("# %d x %d: row %zu of %d differs\n", rows, cols, r, counts[i]);
        free(got);
        tensor_free(&c);
    }
    CHECK(n_differ == 0 && n_gaps == 0,
          "matmul %d x %d: %d rows differ between row counts, %d written past the row", rows,
          cols, n_differ, n_gaps);
    free(want);
    free(most);
    tensor_free(&a), tensor_free(&all);
    weight_free(&w);
}

/* ---- mixture of experts ---- */

/* The same choices where they are clear: a place counts as wrong when the reference's weights
 * there are more than 1e-3 apart from its neighbours'. */
static int wrong_ids(const int32_t *got, const int32_t *want, const float *weights, int32_t n,
                     int32_t top_k)
{
    int n_wrong = 0;
    for (int32_t i = 0; i < n * top_k; i++) {
        int32_t k = i % top_k;
        bool near_up = k > 0 && weights[i - 1] - weights[i] < 1e-3f * weights[i];
        /* Below the last place stands one that the reference does not show. */
        bool near_down = k + 1 == top_k || weights[i] - weights[i + 1] < 1e-3f * weights[i];
        n_wrong += got[i] != want[i] && !near_up && !near_down;
        n_wrong += got[i] < 0;
    }
    return n_wrong;
}

/* A weight of E rows is a router by the limits. */
static void limit_experts(int32_t E)
{
    struct errmsg e;
    pair.limits.E = E;
    for (int s = 0; s < SIDES; s++)
        must_be(pair.b[s].ops->workspace_make(&pair.b[s], &pair.limits, &e), 0,
                "workspace_make");
}

static void test_moe(int32_t T, int32_t E, int32_t top_k, int32_t F, bool is_shared)
{
    char what[96];
    limit_experts(E);
    struct pair_weight router = weight_normal(1, E, M, 2 / sqrtf(M));
    struct pair_weight up = weight_normal(E, 2 * F, M, 1 / sqrtf(M));
    struct pair_weight down = weight_normal(E, M, F, 1 / sqrtf((float)F));
    struct tensor h = tensor_normal((size_t)T * M, true, 1, 0);
    struct tensor shared = tensor_normal((size_t)T * M, true, 1, 0);
    struct tensor gate = tensor_normal(M, false, 0.1f, 0);
    struct tensor ids = tensor_make((size_t)T * (size_t)top_k, false);
    struct tensor weights = tensor_make((size_t)T * (size_t)top_k, false);
    struct tensor y = tensor_make((size_t)T * M, true);
    pair.poison_work(&pair.b[DUT]);
    for (int s = 0; s < SIDES; s++) {
        struct op_moe_route op = {T, top_k, true, &router.w[s], h.p[s], ids.p[s], weights.p[s]};
        pair.b[s].ops->moe_route(&pair.b[s], &op);
    }
    /* f32 sums over M in another order: 1e-6 of logits of size 2, in an exponent. */
    snprintf(what, sizeof(what), "moe_route's weights, %d of %d, %d rows", top_k, E, T);
    compare_tensor(what, &weights, 2e-4, 1e-5, 1e-4);
    float *got = tensor_get(&ids, DUT), *want = tensor_get(&ids, REF);
    float *w = tensor_get(&weights, REF);
    int n_wrong = wrong_ids((int32_t *)got, (int32_t *)want, w, T, top_k);
    CHECK(n_wrong == 0, "moe_route's choices, %d of %d, %d rows: %d wrong", top_k, E, T,
          n_wrong);
    tensor_put(&ids, want);
    tensor_put(&weights, w);
    pair.poison_work(&pair.b[DUT]);
    for (int s = 0; s < SIDES; s++) {
        struct op_moe_experts op = {.n_rows = T,
                                    .top_k = top_k,
                                    .gate_up = &up.w[s],
                                    .down = &down.w[s],
                                    .h = h.p[s],
                                    .ids = ids.p[s],
                                    .weights = weights.p[s],
                                    .shared = is_shared ? shared.p[s] : NULL,
                                    .shared_gate = is_shared ? gate.p[s] : NULL,
                                    .y = y.p[s]};
        pair.b[s].ops->moe_experts(&pair.b[s], &op);
    }
    snprintf(what, sizeof(what), "moe_experts, %d of %d, F %d, %d rows%s", top_k, E, F, T,
             is_shared ? ", shared" : "");
    compare_tensor_rows(what, &y, M, CHAIN_REL, CHAIN_ABS, CHAIN_L2);
    free(got), free(want), free(w);
    tensor_free(&h), tensor_free(&shared), tensor_free(&gate), tensor_free(&ids);
    tensor_free(&weights), tensor_free(&y);
    weight_free(&router), weight_free(&up), weight_free(&down);
}

/* ---- head ---- */

/* Candidates that differ only where the reference's are closer than the tolerance. */
static int wrong_top(const struct row_result *got, const struct row_result *want, int32_t n_top,
                     float tolerance)
{
    int n_wrong = 0;
    for (int32_t k = 0; k < TOP_MAX; k++) {
        if (k >= n_top)
            n_wrong += got->top_id[k] != want->top_id[k];
        else
            n_wrong += got->top_id[k] < 0 ||
                       !(fabsf(got->top_logprob[k] - want->top_logprob[k]) <= tolerance) ||
                       (k > 0 && got->top_logprob[k] > got->top_logprob[k - 1]);
    }
    return n_wrong;
}

/* h is rounded to bf16 (2^-9 of each of M terms, so 2^-9 of a logit's rms), logits of rms 1. */
static const float HEAD_TOLERANCE = 0x1p-6f;

static void test_head(int32_t vocab, int32_t n_rows, bool has_nan)
{
    struct pair_batch pb;
    const int32_t lens[] = {130, 20, 300};
    batch_make(&pb, 3, lens, NULL, P, n_rows, vocab);
    batch_begin(&pb);
    struct pair_weight w = weight_normal(1, vocab, M, 1 / sqrtf(M));
    struct tensor x = tensor_normal((size_t)pb.h.n_tokens * M, false, 1, 0);
    struct tensor nw = tensor_normal(M, false, 0.1f, 1);
    struct tensor rows =
        tensor_make((size_t)n_rows * sizeof(struct row_result) / sizeof(float), false);
    if (has_nan) {
        float *v = tensor_get(&x, REF);
        v[(size_t)pb.rows[n_rows / 2] * M + 7] = NAN;
        tensor_put(&x, v);
        free(v);
    }
    struct row_result *r[SIDES];
    for (int s = 0; s < SIDES; s++) {
        r[s] = must(malloc((size_t)n_rows * sizeof(*r[s])));
        struct op_head op = {&pb.b[s], x.p[s], nw.p[s], 1e-6f, M, &w.w[s], rows.p[s]};
        pair.b[s].ops->head(&pair.b[s], &op);
    }
    batch_end(&pb, &rows, r);
    int n_lse = 0, n_target = 0, n_top = 0, n_bad = 0;
    float worst = 0;
    for (int32_t i = 0; i < n_rows; i++) {
        const struct row_result *got = &r[DUT][i], *want = &r[REF][i];
        n_bad += (got->n_bad != 0) != (want->n_bad != 0);
        if (want->n_bad)
            continue;
        worst = fmaxf(worst, fabsf(got->lse - want->lse));
        worst = fmaxf(worst, fabsf(got->target_logprob - want->target_logprob));
        n_lse += !(fabsf(got->lse - want->lse) <= HEAD_TOLERANCE);
        n_target += !(fabsf(got->target_logprob - want->target_logprob) <= HEAD_TOLERANCE);
        n_top += wrong_top(got, want, pb.tops[i], HEAD_TOLERANCE) != 0;
    }
    CHECK(n_lse + n_target + n_top + n_bad == 0,
          "head, vocabulary %d, %d rows%s: wrong lse %d, logprobs %d, candidates %d, NaN %d; "
          "worst "
          "%.2g",
          vocab, n_rows, has_nan ? ", one NaN" : "", n_lse, n_target, n_top, n_bad,
          (double)worst);
    free(r[REF]), free(r[DUT]);
    tensor_free(&x), tensor_free(&nw), tensor_free(&rows);
    weight_free(&w);
    batch_free(&pb);
}

/* ---- more than 2^31 elements ---- */

/* Writes and reads the last slot and page of pools that a 32-bit index does not span, through
 * the calls and through a step; the first ones must stay as they were. */
static void test_large_pools(void)
{
    struct backend *b = &pair.b[DUT];
    const struct backend_ops *ops = b->ops;
    struct gdn_dims gd = {.H = 2, .HV = 4, .K = 128, .V = 128, .conv_dim = 8 * 128, .ld = 1600};
    struct attn_dims ad = {.HQ = 4, .HK = 2, .D = 256, .rot_dim = 64, .ld = 12 * 256};
    const int32_t n_slots = 33000, n_pages = 66000, page_tokens = 64;
    const size_t elems = 4 * 128 * 128, conv_elems = 3 * 8 * 128, kv_elems = 2 * 64 * 256;
    struct state_pool states;
    struct kv_pool kvs;
    int32_t last = n_pages - 1, first = 0;
    bool is_good = true;
    if (ops->state_pool_make(b, &gd, n_slots, &states) != 0 ||
        ops->kv_pool_make(b, &ad, n_pages, page_tokens, &kvs) != 0) {
        tap_skip("pools of more than 2^31 elements", "no room for them");
        return;
    }
    float *x = must(malloc(elems * 4)), *y = must(malloc(elems * 4));
    float *conv = must(malloc(conv_elems * 4)), *conv2 = must(malloc(conv_elems * 4));
    for (size_t i = 0; i < elems; i++)
        x[i] = bf16_round(rng_normal(&pair.rng));
    memcpy(conv, x, conv_elems * 4);
    ops->state_poison(b, &gd, &states, 0);
    ops->page_poison(b, &ad, &kvs, 0);
    is_good &= ops->state_write(b, &gd, &states, n_slots - 1, x, conv) == 0 &&
               ops->state_read(b, &gd, &states, n_slots - 1, y, conv2) == 0 &&
               memcmp(x, y, elems * 4) == 0 && memcmp(conv, conv2, conv_elems * 4) == 0;
    is_good &= ops->state_read(b, &gd, &states, 0, y, conv2) == 0 && isnan(y[0]) &&
               isnan(y[elems - 1]) && isnan(conv2[0]) && isnan(conv2[conv_elems - 1]);
    CHECK(is_good, "the last of %d slots is apart from the first", n_slots);
    is_good = ops->kv_write(b, &ad, &kvs, &last, page_tokens, x, x + kv_elems / 2) == 0 &&
              ops->kv_read(b, &ad, &kvs, &last, page_tokens, y, y + kv_elems) == 0 &&
              memcmp(x, y, kv_elems * 4) == 0 &&
              memcmp(x + kv_elems / 2, y + kv_elems, kv_elems * 4) == 0;
    is_good &= ops->kv_read(b, &ad, &kvs, &first, page_tokens, y, y + kv_elems) == 0 &&
               isnan(y[0]) && isnan(y[kv_elems - 1]) && isnan(y[2 * kv_elems - 1]);
    CHECK(is_good, "the last of %d pages is apart from the first", n_pages);
    free(x), free(y), free(conv), free(conv2);
    ops->state_pool_free(b, &states);
    ops->kv_pool_free(b, &kvs);
}

/* Slots that become copies of others, more than one launch takes; the rest stay as they were.
 * On either backend, so that what is read back must be the bits written. */
static void test_state_copy(struct backend *b)
{
    enum { N_SLOTS = 160, N_COPIES = 70 };
    const struct backend_ops *ops = b->ops;
    struct gdn_dims d = {.H = 1, .HV = 2, .K = 128, .V = 128, .conv_dim = 4 * 128, .ld = 800};
    const size_t elems = 2 * 128 * 128, conv_elems = 3 * 4 * 128;
    struct slot_copy copies[N_COPIES];
    struct state_pool pool;
    int n_bad = 0;
    float *x = must(malloc(elems * 4)), *y = must(malloc(elems * 4));
    float *conv = must(malloc(conv_elems * 4)), *conv2 = must(malloc(conv_elems * 4));
    if (ops->state_pool_make(b, &d, N_SLOTS, &pool) != 0)
        exit(1);
    for (int32_t i = 0; i < N_SLOTS; i++) {
        for (size_t k = 0; k < elems; k++)
            x[k] = (float)((int)(k % 251) + i);
        for (size_t k = 0; k < conv_elems; k++)
            conv[k] = (float)((int)(k % 61) - i); /* whole numbers under 256: bf16 holds them */
        ops->state_write(b, &d, &pool, i, x, conv);
    }
    /* Slots 90 and up become copies of 0 to 34, two of each. */
    for (int32_t i = 0; i < N_COPIES; i++)
        copies[i] = (struct slot_copy){i / 2, 90 + i};
    ops->state_copy(b, &d, &pool, copies, N_COPIES);
    for (int32_t i = 0; i < N_SLOTS; i++) {
        int32_t of = i >= 90 ? (i - 90) / 2 : i;
        ops->state_read(b, &d, &pool, i, y, conv2);
        for (size_t k = 0; k < elems; k++)
            n_bad += y[k] != (float)((int)(k % 251) + of);
        for (size_t k = 0; k < conv_elems; k++)
            n_bad += conv2[k] != (float)((int)(k % 61) - of);
    }
    CHECK(n_bad == 0, "%s: %d slots copied, %d numbers differ", ops->name, N_COPIES, n_bad);
    free(x), free(y), free(conv), free(conv2);
    ops->state_pool_free(b, &pool);
}

/* The same for pages: copies, and what is not written stays. */
static void test_page_copy(struct backend *b)
{
    enum { N_PAGES = 9 };
    const struct backend_ops *ops = b->ops;
    struct attn_dims d = {.HQ = 4, .HK = 2, .D = 256, .rot_dim = 64, .ld = 12 * 256};
    const struct slot_copy copies[] = {{0, 7}, {0, 8}, {3, 6}};
    static const int32_t want[N_PAGES] = {0, 1, 2, 3, 4, 5, 3, 0, 0};
    const size_t elems = 2 * P * 256;
    struct kv_pool pool;
    int n_bad = 0;
    float *k = must(malloc(elems * 4)), *v = must(malloc(elems * 4));
    if (ops->kv_pool_make(b, &d, N_PAGES, P, &pool) != 0)
        exit(1);
    for (int32_t i = 0; i < N_PAGES; i++) {
        for (size_t t = 0; t < elems; t++) {
            k[t] = (float)((int)(t % 127) + i); /* whole numbers under 256: bf16 holds them */
            v[t] = (float)((int)(t % 113) - i);
        }
        ops->kv_write(b, &d, &pool, &i, P, k, v);
    }
    ops->page_copy(b, &d, &pool, copies, 3);
    for (int32_t i = 0; i < N_PAGES; i++) {
        ops->kv_read(b, &d, &pool, &i, P, k, v);
        for (size_t t = 0; t < elems; t++)
            n_bad += k[t] != (float)((int)(t % 127) + want[i]) ||
                     v[t] != (float)((int)(t % 113) - want[i]);
    }
    CHECK(n_bad == 0, "%s: pages copied, %d numbers differ", ops->name, n_bad);
    free(k), free(v);
    ops->kv_pool_free(b, &pool);
}

/* ---- opening ---- */

static void poison_cuda(struct backend *b)
{
    struct cuda_impl *impl = b->impl;
    k_fill_nan(impl->work, impl->work_bytes, impl->stream);
    k_fill_nan(impl->gemm.workspace, GEMM_WORKSPACE_BYTES, impl->stream);
}

static void poison_cpu(struct backend *b)
{
    size_t bytes;
    void *p = cpu_impl_workspace(b, &bytes);
    memset(p, 0xff, bytes < 64 << 20 ? bytes : 64 << 20);
}

static bool open_sides(bool is_self)
{
    struct errmsg e = {{0}};
    pair.limits = (struct backend_limits){.max_tokens = MAX_T,
                                          .max_seqs = MANY,
                                          .max_rows = MAX_R,
                                          .max_pages = PAIR_PAGES,
                                          .M = M,
                                          .F = 512,
                                          .moe_F = 96,
                                          .E = 64,
                                          .top_k = 8,
                                          .vocab = VOCAB,
                                          .HQ = 16,
                                          .HV = 8,
                                          .conv_dim = 16 * 128};
    must_be(backend_cpu_ops.open(&pair.b[REF], 0, &e), 0, "open cpu");
    const struct backend_ops *ops = backend_find(is_self ? "cpu" : "cuda", &e);
    if (!ops || ops->open(&pair.b[DUT], 0, &e) != 0) {
        tap_skip("operations on a GPU", e.text);
        return false;
    }
    pair.poison_work = is_self ? poison_cpu : poison_cuda;
    for (int s = 0; s < SIDES; s++) {
        int rc = pair.b[s].ops->workspace_make(&pair.b[s], &pair.limits, &e);
        if (rc != 0)
            printf("# %s\n", e.text);
        must_be(rc, 0, "workspace_make");
    }
    return true;
}

/* ---- losing the device ---- */

/* ---- products that are remembered ---- */

/* A weight's product with what is in dir: how many plans were timed, and the product's rows. */
static int run_remembered(const char *dir, float *c)
{
    enum { ROWS = 512, COLS = 256, N = 300 };
    struct backend b = {.ops = pair.b[DUT].ops};
    struct weight w;
    struct errmsg e = {""};
    must_be(b.ops->open(&b, 0, &e), 0, "a second backend");
    b.cache_dir = dir;
    must_be(b.ops->workspace_make(&b, &pair.limits, &e), 0, "workspace");
    must_be(b.ops->weight_random(&b, 1, ROWS, COLS, WEIGHT_MATMUL, 7, 0.1f, &w, &e), 0,
            "weight");
    uint16_t *a = must(b.ops->alloc(&b, N * COLS * 2)), *out = must(malloc(N * ROWS * 2));
    void *dev = must(b.ops->alloc(&b, N * ROWS * 2));
    must_be(k_fill_normal(a, N * COLS, 0, 3, 1, cuda_impl_of(&b)->stream), 0, "inputs");
    struct op_matmul op = {N, &w, a, dev, ROWS};
    b.ops->matmul(&b, &op);
    must_be(b.ops->download(&b, out, dev, N * ROWS * 2), 0, "download");
    for (int i = 0; i < N * ROWS; i++)
        c[i] = cuda_f32_of(out[i]);
    int n_timed = cuda_impl_of(&b)->gemm.n_timed;
    free(out);
    b.ops->weight_free(&b, &w);
    b.ops->free(&b, a);
    b.ops->free(&b, dev);
    b.ops->close(&b);
    return n_timed;
}

static void test_cache(void)
{
    char dir[] = "/tmp/test_backend.XXXXXX", command[64];
    const size_t size = 300 * 512;
    float *c[4];
    int n[4];
    must(mkdtemp(dir));
    for (int i = 0; i < 4; i++)
        c[i] = must(malloc(size * sizeof(float)));
    n[0] = run_remembered(NULL, c[0]);
    n[1] = run_remembered(dir, c[1]);
    n[2] = run_remembered(dir, c[2]);
    /* What was kept is of no use: other words, with a good sum. */
    struct cudaDeviceProp card;
    struct gemm_cache cache;
    must_be(cudaGetDeviceProperties(&card, 0), 0, "card");
    must_be(gemm_cache_open(&cache, dir, card.name, gemm_version(&pair.b[DUT])), 0, "cache");
    CHECK(cache.n == n[1] && n[1] > 0, "%d of %d plans are in the file", cache.n, n[1]);
    for (int32_t i = 0; i < cache.n; i++) {
        struct gemm_record r = cache.records[i];
        r.common.w[0] = 12345;
        r.algo[5] = r.common;
        must_be(gemm_cache_add(&cache, &r, NULL), 0, "gemm_cache_add");
    }
    gemm_cache_close(&cache);
    n[3] = run_remembered(dir, c[3]);
    CHECK(n[0] == n[1] && n[2] == 0 && n[3] == n[1],
          "plans timed without a file %d, with a new one %d, again %d, with a useless one %d",
          n[0], n[1], n[2], n[3]);
    bool is_same = true;
    for (int i = 1; i < 4; i++)
        is_same = is_same && memcmp(c[0], c[i], size * sizeof(float)) == 0;
    CHECK(is_same, "and the rows have the same bits");
    snprintf(command, sizeof(command), "rm -r %s", dir);
    must_be(system(command), 0, command);
    for (int i = 0; i < 4; i++)
        free(c[i]);
}

/* In a process of its own: after a fault nothing of a context can be used. */
static void test_loss(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "test_backend", "lose", (char *)NULL);
        _exit(99);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "a fault in a step is ERR_DEVICE with a reason, then and after (status %d)", status);
}

static int lose(void)
{
    struct pair_batch pb;
    struct batch out;
    if (!open_sides(false))
        return 1;
    const struct backend_ops *ops = pair.b[DUT].ops;
    struct backend *b = &pair.b[DUT];
    const int32_t lens[] = {5};
    batch_make(&pb, 1, lens, NULL, P, 0, VOCAB);
    must_be(ops->step_begin(b, &pb.h, &out), 0, "step_begin");
    struct op_swiglu op = {.n_rows = 64, .F = 64, .gu = (void *)4096, .c = (void *)8192};
    ops->swiglu(b, &op);
    ops->step_end(b, &out, NULL, NULL);
    int rc = ops->step_done(b, true);
    printf("# lost: %d, %s\n", rc, b->lost ? b->lost : "no reason");
    bool is_good = rc == ERR_DEVICE && b->lost && ops->step_begin(b, &pb.h, &out) == ERR_DEVICE;
    ops->close(b);
    return is_good ? 0 : 2;
}

/* For compute-sanitizer: a shape of each operation. */
static void test_small(void)
{
    test_rows();
    test_matmul_shape(520, 256, 576);
    test_gdn(4, 2, 4, true);
    test_gdn(5, 1, 3, true);
    test_attn(5, 4, 2);
    test_moe(63, 8, 3, 64, true);
    test_head(VOCAB, 33, true);
}

static void test_all(bool is_self)
{
    test_map();
    test_steps();
    test_rows();
    test_matmul_shape(2048, 1024, 2048);
    test_matmul_shape(520, 256, 576);
    /* Rows that no vector of bf16 divides. */
    test_matmul_shape(1030, 640, 1088);
    test_matmul_shape(1030, 128, 1088);
    test_matmul_shape(6, 128, 64);
    test_matmul_shape(256, 4096, 256);
    for (int i = 0; i <= N_SHAPES; i++) {
        test_gdn(i, 2, 4, true);
        test_gdn(i, 2, 4, false);
        test_attn(i, 4, 2);
        if (i == N_SHAPES)
            break;
        test_gdn(i, 2, 2, true), test_gdn(i, 1, 3, false), test_gdn(i, 2, 8, true);
        test_attn(i, 16, 2), test_attn(i, 6, 1);
    }
    test_moe(1, 64, 8, 96, true);
    test_moe(63, 8, 3, 64, false);
    test_moe(450, 64, 8, 96, true);
    test_moe(3000, 16, 4, 32, true);
    test_head(VOCAB, 450, false);
    test_head(VOCAB, 1500, false);
    test_head(VOCAB, 33, true);
    if (is_self)
        return;
    test_cache();
    test_large_pools();
    test_state_copy(&pair.b[REF]);
    test_state_copy(&pair.b[DUT]);
    test_page_copy(&pair.b[REF]);
    test_page_copy(&pair.b[DUT]);
    test_loss();
}

int main(int argc, char **argv)
{
    bool is_self = argc > 1 && strcmp(argv[1], "self") == 0;
    if (argc > 1 && strcmp(argv[1], "lose") == 0)
        return lose();
    pair.rng.s = 20261130;
    printf("# seed %llu\n", (unsigned long long)pair.rng.s);
    if (!open_sides(is_self))
        return tap_done();
    if (argc > 1 && strcmp(argv[1], "small") == 0)
        test_small();
    else
        test_all(is_self);
    for (int s = 0; s < SIDES; s++)
        pair.b[s].ops->close(&pair.b[s]);
    return tap_done();
}
