/* The CPU backend's table: names, memory, weights, steps, the chunk map and the pools. */
#include <criterion/criterion.h>

#include "cpu_ops.h"

static struct backend_limits small_limits(void)
{
    return (struct backend_limits){.max_tokens = 4096, .max_seqs = 64, .max_rows = 16};
}

Test(backend, found_by_name)
{
    struct errmsg e;
    cr_expect_eq(backend_find("cpu", &e), &backend_cpu_ops);
    cr_expect_str_eq(backend_find("cpu", &e)->name, "cpu");
    if (!backend_find("cuda", &e))
        cr_expect(strstr(e.text, "no CUDA backend"), "%s", e.text);
    cr_expect_null(backend_find("tpu", &e));
    cr_expect(strstr(e.text, "tpu") && strstr(e.text, "auto, cpu, cuda"), "%s", e.text);
}

/* By the names of config.json. */
Test(backend, sizes_that_are_refused)
{
    struct backend b;
    struct backend_limits l = small_limits();
    struct errmsg e;
    struct gdn_dims gd = {.H = 1, .HV = 1, .K = 128, .V = 136};
    struct attn_dims ad = {.HQ = 1, .HK = 1, .D = 96, .rot_dim = 16};
    open_cpu(&b, 1, &l);
    cr_expect_eq(b.ops->check(&b, &gd, NULL, &l, &e), ERR_UNSUPPORTED);
    cr_expect(strstr(e.text, "linear_value_head_dim 136; accepted: multiples of 16"), "%s",
              e.text);
    cr_expect_eq(b.ops->check(&b, NULL, &ad, &l, &e), ERR_UNSUPPORTED);
    cr_expect(strstr(e.text, "head_dim is 96; accepted: a multiple of 64"), "%s", e.text);
    gd.V = 16;
    ad.D = 192;
    cr_expect_eq(b.ops->check(&b, &gd, &ad, &l, &e), 0);
    b.ops->close(&b);
}

Test(backend, memory_is_plausible)
{
    struct backend b;
    struct backend_limits l = small_limits();
    open_cpu(&b, 1, &l);
    size_t room, total;
    b.ops->memory(&b, &room, &total);
    cr_expect(room > 0 && room <= total, "%zu of %zu", room, total);
    b.ops->close(&b);
}

Test(backend, threads_and_alignment)
{
    struct backend b = {0};
    struct errmsg e;
    cr_expect_eq(backend_cpu_ops.open(&b, -1, &e), ERR_INVALID);
    cr_assert_eq(backend_cpu_ops.open(&b, 3, &e), 0);
    cr_expect_eq(cpu_pool_threads(cpu_impl_pool(&b)), 3);
    cr_expect_eq(b.act, DTYPE_F32);
    size_t sizes[] = {0, 1, 63, 4096, (2u << 20) - 1, (2u << 20) + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *p = b.ops->alloc(&b, sizes[i]);
        cr_assert(p && (uintptr_t)p % 64 == 0);
        memset(p, 1, sizes[i]);
        b.ops->free(&b, p);
    }
    cr_expect_null(b.ops->alloc(&b, SIZE_MAX));
    b.ops->free(&b, NULL);
    char from[] = "bytes", to[6], *mid = b.ops->alloc(&b, 6);
    cr_expect_eq(b.ops->upload(&b, mid, from, 6), 0);
    cr_expect_eq(b.ops->download(&b, to, mid, 6), 0);
    cr_expect_str_eq(to, "bytes");
    b.ops->free(&b, mid);
    b.ops->close(&b);
}

/* ---- chunk map ---- */

Test(chunk_map, lengths_130_20_300)
{
    struct backend b;
    struct backend_limits l = small_limits();
    open_cpu(&b, 1, &l);
    struct piece pieces[] = {{0, 0, 130, 0}, {1, 0, 20, 1}, {2, 0, 300, 2}};
    struct pack pk;
    pack_make(&b, &pk, pieces, 3, NULL, 0);
    int32_t seq[] = {0, 0, 0, 1, 2, 2, 2, 2, 2}, index[] = {0, 1, 2, 0, 0, 1, 2, 3, 4};
    int32_t tok[] = {0, 64, 128, 130, 150, 214, 278, 342, 406}, first[] = {0, 3, 4, 9};
    cr_assert_eq(pk.b.n_chunks, 9);
    cr_expect_arr_eq(pk.b.map.seq, seq, sizeof seq);
    cr_expect_arr_eq(pk.b.map.index, index, sizeof index);
    cr_expect_arr_eq(pk.b.map.tok, tok, sizeof tok);
    cr_expect_arr_eq(pk.b.map.seq_first, first, sizeof first);
    b.ops->close(&b);
}

/* Thousands of random sets of lengths, empty ones and full limits among them. */
Test(chunk_map, random_lengths)
{
    const uint64_t seed = 64;
    struct rng r = {seed};
    struct backend b;
    struct backend_limits l = small_limits();
    open_cpu(&b, 1, &l);
    for (int round = 0; round < 5000; round++) {
        struct piece pieces[64] = {{0}};
        int32_t n = rng_int(&r, 65), left = l.max_tokens;
        for (int32_t i = 0; i < n; i++) {
            int32_t kinds[] = {0, 1, rng_int(&r, 4), 64 * rng_int(&r, 5), rng_int(&r, 400)};
            int32_t len = round % 50 == 0 ? left / (n - i) : kinds[rng_int(&r, 5)];
            pieces[i] = (struct piece){i, 0, len < left ? len : left, i};
            left -= pieces[i].len;
        }
        struct pack pk;
        pack_make(&b, &pk, pieces, n, NULL, 0);
        const struct chunk_map *m = &pk.b.map;
        int32_t flat = 0, tok = 0, n_bad = 0;
        for (int32_t i = 0; i < n; i++) {
            n_bad += m->seq_first[i] != flat;
            for (int32_t c = 0; c * 64 < pieces[i].len; c++, flat++)
                n_bad +=
                    m->seq[flat] != i || m->index[flat] != c || m->tok[flat] != tok + 64 * c;
            tok += pieces[i].len;
        }
        n_bad += m->seq_first[n] != flat || flat != pk.b.n_chunks;
        cr_assert_eq(n_bad, 0, "seed %d round %d", (int)seed, round);
        pack_free(&pk);
    }
    b.ops->close(&b);
}

/* ---- steps ---- */

Test(step, two_in_flight)
{
    struct backend b;
    struct backend_limits l = small_limits();
    open_cpu(&b, 1, &l);
    int32_t cu[2][2] = {{0, 100}, {0, 70}}, zero[100] = {0};
    struct batch_host h[2];
    struct batch batch[3];
    for (int i = 0; i < 2; i++)
        h[i] = (struct batch_host){.n_tokens = cu[i][1],
                                   .n_seqs = 1,
                                   .n_chunks = 2,
                                   .n_rows = 1,
                                   .tokens = zero,
                                   .positions = zero,
                                   .cu_seqlens = cu[i],
                                   .start = zero,
                                   .slots = zero};
    struct row_result src[2] = {{.lse = 1}, {.lse = 2}}, dst[2] = {{.lse = 0}};
    cr_expect_eq(b.ops->step_done(&b, false), 0, "nothing begun");
    cr_expect_lt(b.ops->step_done(&b, true), 0, "waiting for nothing would be forever");
    cr_assert_eq(b.ops->step_begin(&b, &h[0], &batch[0]), 0);
    cr_expect_eq(b.ops->step_done(&b, false), 0, "begun, not ended");
    cr_assert_eq(b.ops->step_end(&b, &batch[0], &src[0], &dst[0]), 0);
    cr_assert_eq(b.ops->step_begin(&b, &h[1], &batch[1]), 0);
    cr_expect_eq(b.ops->step_begin(&b, &h[0], &batch[2]), ERR_FULL);
    cr_expect_eq(batch[0].map.tok[1], 64);
    cr_expect_eq(batch[0].map.seq_first[1], 2, "the first step's map is still there");
    cr_expect_neq(batch[0].map.tok, batch[1].map.tok);
    cr_expect_eq(b.ops->step_done(&b, false), 1);
    cr_expect_eq(dst[0].lse, 1);
    cr_expect_eq(b.ops->step_done(&b, false), 0);
    cr_assert_eq(b.ops->step_end(&b, &batch[1], &src[1], &dst[1]), 0);
    cr_expect_lt(b.ops->step_end(&b, &batch[1], &src[1], &dst[1]), 0, "ended twice");
    cr_expect_eq(b.ops->step_done(&b, true), 1);
    cr_expect_eq(dst[1].lse, 2);
    h[0].n_tokens = l.max_tokens + 1;
    cr_expect_eq(b.ops->step_begin(&b, &h[0], &batch[0]), ERR_TOO_LARGE);
    cr_expect_eq(b.ops->step_done(&b, false), 0);
    b.ops->close(&b);
}

/* ---- weights ---- */

/* c = a w^T for one row of ones on column i: column i of w. */
static void check_columns(struct backend *b, const struct weight *w, int32_t i_mat,
                          const float *right)
{
    float a[8], c[8];
    for (int32_t i = 0; i < w->cols; i++) {
        for (int32_t j = 0; j < w->cols; j++)
            a[j] = j == i;
        cpu_gemm(cpu_impl_pool(b), 1, a, w->cols, NULL, w, i_mat, c, w->rows);
        for (int32_t j = 0; j < w->rows; j++)
            cr_expect_eq(c[j], right[j * w->cols + i]);
    }
}

Test(weight, parts_of_several_dtypes)
{
    struct backend b;
    struct backend_limits l = small_limits();
    open_cpu(&b, 2, &l);
    struct errmsg e;
    struct weight w;
    float first[] = {1, 2, 3, 1.0000001f, 5, 6},
          right[] = {1, 2, 3, 1.0000001f, 5, 6, 1, -2, 0.5f};
    uint16_t bf16[] = {0x3f80, 0xc000, 0x3f00}, f16[] = {0x3c00, 0xc000, 0x3800};
    struct weight_part mixed[] = {{first, DTYPE_F32, 2}, {bf16, DTYPE_BF16, 1}};
    cr_assert_eq(b.ops->weight_make(&b, mixed, 2, 1, 3, 3, WEIGHT_MATMUL, &w, &e), 0);
    cr_expect_eq(w.dtype, DTYPE_F32);
    cr_expect_eq(w.bytes, b.ops->weight_bytes(&b, 1, 3, 3, DTYPE_F32, WEIGHT_MATMUL));
    check_columns(&b, &w, 0, right);
    b.ops->weight_free(&b, &w);
    cr_expect_null(w.data);

    struct weight_part halves[] = {{bf16, DTYPE_BF16, 1}, {f16, DTYPE_F16, 1}};
    float pair[] = {1, -2, 0.5f, 1, -2, 0.5f};
    cr_assert_eq(b.ops->weight_make(&b, halves, 2, 2, 1, 3, WEIGHT_MATMUL, &w, &e), 0);
    check_columns(&b, &w, 0, pair);
    check_columns(&b, &w, 1, pair);
    b.ops->weight_free(&b, &w);

    /* Several parts are copied, even where a single one would be borrowed. */
    struct weight_part same[] = {{bf16, DTYPE_BF16, 1}, {bf16, DTYPE_BF16, 1}};
    unsigned use = WEIGHT_EMBED | WEIGHT_BORROW | WEIGHT_MATMUL;
    cr_assert_eq(b.ops->weight_make(&b, same, 2, 1, 2, 3, use, &w, &e), 0);
    cr_expect_eq(w.use & WEIGHT_BORROW, 0);
    cr_expect_arr_eq((char *)w.embed + 6, bf16, 6);
    check_columns(&b, &w, 0, pair);
    b.ops->weight_free(&b, &w);

    cr_expect_eq(b.ops->weight_make(&b, mixed, 2, 1, 3, 3, WEIGHT_EMBED, &w, &e),
                 ERR_UNSUPPORTED);
    cr_expect_eq(b.ops->weight_make(&b, mixed, 2, 1, 4, 3, WEIGHT_MATMUL, &w, &e), ERR_INVALID);
    cr_expect(strstr(e.text, "3 rows") && strstr(e.text, "4"), "%s", e.text);
    b.ops->close(&b);
}

/* ---- pools ---- */

Test(pools, state_round_trip)
{
    struct rng r = {1};
    struct backend b;
    struct backend_limits l = small_limits();
    open_cpu(&b, 1, &l);
    struct gdn_dims d = {1, 2, 32, 48, 2 * 32 + 2 * 48, 0};
    struct state_pool pool;
    cr_assert_eq(b.ops->state_pool_make(&b, &d, 3, &pool), 0);
    size_t n_S = (size_t)2 * 32 * 48, n_conv = (size_t)d.conv_dim * 3;
    cr_expect_eq(b.ops->state_bytes(&b, &d), (n_S + n_conv) * sizeof(float));
    float *S[3], *conv[3], *S_read = poisoned(n_S), *conv_read = poisoned(n_conv);
    for (int32_t i = 0; i < 3; i++) {
        S[i] = normals(&r, n_S, 1);
        conv[i] = normals(&r, n_conv, 1);
        cr_assert_eq(b.ops->state_write(&b, &d, &pool, i, S[i], conv[i]), 0);
    }
    b.ops->state_poison(&b, &d, &pool, 1);
    for (int32_t i = 0; i < 3; i++) {
        cr_assert_eq(b.ops->state_read(&b, &d, &pool, i, S_read, conv_read), 0);
        for (size_t j = 0; j < n_S && i == 1; j++)
            cr_expect(isnan(S_read[j]));
        for (size_t j = 0; j < n_conv && i == 1; j++)
            cr_expect(isnan(conv_read[j]));
        if (i == 1)
            continue;
        cr_expect_arr_eq(S_read, S[i], n_S * sizeof(float));
        cr_expect_arr_eq(conv_read, conv[i], n_conv * sizeof(float));
    }
    /* Two slots become copies of the last one, which stays. */
    const struct slot_copy copies[] = {{2, 0}, {2, 1}};
    b.ops->state_copy(&b, &d, &pool, copies, 2);
    for (int32_t i = 0; i < 3; i++) {
        cr_assert_eq(b.ops->state_read(&b, &d, &pool, i, S_read, conv_read), 0);
        cr_expect_arr_eq(S_read, S[2], n_S * sizeof(float));
        cr_expect_arr_eq(conv_read, conv[2], n_conv * sizeof(float));
    }
    b.ops->state_copy(&b, &d, &pool, copies, 0);
    cr_expect_eq(b.ops->state_read(&b, &d, &pool, 3, S_read, conv_read), ERR_INVALID);
    cr_expect_eq(b.ops->state_write(&b, &d, &pool, -1, S_read, conv_read), ERR_INVALID);
    b.ops->state_pool_free(&b, &pool);
    struct gdn_dims odd = {1, 1, 20, 16, 56, 0};
    cr_expect_eq(b.ops->state_pool_make(&b, &odd, 3, &pool), ERR_INVALID);
    b.ops->close(&b);
}

Test(pools, kv_round_trip)
{
    struct rng r = {2};
    struct backend b;
    struct backend_limits l = small_limits();
    open_cpu(&b, 1, &l);
    struct attn_dims d = {2, 2, 64, 16, 0};
    struct kv_pool pool;
    cr_expect_eq(b.ops->kv_pool_make(&b, &d, 5, 96, &pool), ERR_INVALID);
    cr_assert_eq(b.ops->kv_pool_make(&b, &d, 5, 128, &pool), 0);
    cr_expect_eq(b.ops->page_bytes(&b, &d, 128), (size_t)2 * 2 * 128 * 64 * sizeof(float));
    int32_t n = 300, pages[] = {4, 0, 2}, bad[] = {4, 5, 2};
    size_t n_kv = (size_t)2 * n * 64;
    float *k = normals(&r, n_kv, 1), *v = normals(&r, n_kv, 1);
    float *k_read = poisoned(n_kv), *v_read = poisoned(n_kv);
    for (int32_t i = 0; i < 5; i++)
        b.ops->page_poison(&b, &d, &pool, i);
    cr_assert_eq(b.ops->kv_write(&b, &d, &pool, pages, n, k, v), 0);
    cr_assert_eq(b.ops->kv_read(&b, &d, &pool, pages, n, k_read, v_read), 0);
    cr_expect_arr_eq(k_read, k, n_kv * sizeof(float));
    cr_expect_arr_eq(v_read, v, n_kv * sizeof(float));
    b.ops->page_poison(&b, &d, &pool, 0);
    b.ops->kv_read(&b, &d, &pool, pages, n, k_read, v_read);
    for (int32_t h = 0; h < 2; h++)
        for (int32_t t = 0; t < n; t++)
            for (int32_t c = 0; c < 64; c++) {
                size_t at = ((size_t)h * n + t) * 64 + c;
                bool is_poisoned = t >= 128 && t < 256;
                cr_expect(is_poisoned ? isnan(k_read[at]) && isnan(v_read[at])
                                      : k_read[at] == k[at] && v_read[at] == v[at]);
            }
    /* Page 0 becomes a copy of page 4, and 4 stays. */
    b.ops->page_copy(&b, &d, &pool, &(struct slot_copy){4, 0}, 1);
    b.ops->kv_read(&b, &d, &pool, pages, n, k_read, v_read);
    for (int32_t h = 0; h < 2; h++)
        for (int32_t i = 0; i < 2 * 128; i++) {
            size_t at = ((size_t)h * n + i) * 64, from = ((size_t)h * n + i % 128) * 64;
            cr_expect_arr_eq(k_read + at, k + from, 64 * sizeof(float));
            cr_expect_arr_eq(v_read + at, v + from, 64 * sizeof(float));
        }
    cr_expect_eq(b.ops->kv_read(&b, &d, &pool, bad, n, k_read, v_read), ERR_INVALID);
    cr_expect_eq(b.ops->kv_write(&b, &d, &pool, bad, n, k, v), ERR_INVALID);
    b.ops->kv_pool_free(&b, &pool);
    b.ops->close(&b);
}
