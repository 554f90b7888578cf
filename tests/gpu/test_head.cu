/* Tests of the head's norm and reduction against host loops in f64; outputs are poisoned.
 *
 * Tolerances. Norm: as test_ops. lse: a thread sums at most ceil(vocab / 2048) groups of 4
 * terms in f32, then 21 more sums: (vocab / 2048 + 24) * 2^-24 relative at most, with 2^-20 for
 * the exponentials of differences down to -30 and f32 output. Logprobs add one f32 rounding.
 * `small`: sizes for compute-sanitizer. */
#include <algorithm>

#include "gpu.cuh"

static struct k_device dev;
static bool small;

static void test_norm(int T, int R, int M)
{
    dbuf<float> x((size_t)T * M), w(M);
    dbuf<bf16> h((size_t)R * M);
    dbuf<int32_t> rows(R);
    fill_normal(x, 1, 3), fill_normal(w, 2, 1);
    std::vector<int32_t> r(R);
    for (int i = 0; i < R; i++)
        r[i] = (i * 7 + 3) % T;
    rows.put(r);
    struct k_head_norm a = {R, M, 1e-6f, rows.p, x.p, w.p, h.p};
    CU(k_head_norm(&a, 0));
    auto xh = x.get(), wh = w.get();
    auto got = h.get();
    bool ok = true;
    for (int i = 0; i < R; i++) {
        double s = 0;
        for (int m = 0; m < M; m++)
            s += (double)xh[(size_t)r[i] * M + m] * xh[(size_t)r[i] * M + m];
        for (int m = 0; m < M; m++) {
            double want = xh[(size_t)r[i] * M + m] / sqrt(s / M + 1e-6) * wh[m];
            ok &= fabs((float)got[(size_t)i * M + m] - want) <= 4e-3 * fabs(want) + 2e-6;
        }
    }
    result(ok, "head_norm %d of %d rows, M %d", R, T, M);
}

static bool row_ok(const float *x, int vocab, int target, int n, const struct k_row_result &r)
{
    double max = -INFINITY, sum = 0;
    int bad = 0;
    for (int i = 0; i < vocab; i++) {
        bad += !isfinite(x[i]);
        if (x[i] > max)
            max = x[i];
    }
    if (bad != r.n_bad)
        return false;
    for (int i = n; i < K_TOP_MAX; i++)
        if (r.top_id[i] != -1 || r.top_logprob[i] != 0)
            return false;
    bool sound = true; /* -inf alone leaves the rest good */
    for (int i = 0; i < vocab; i++) {
        sound = sound && !isnan(x[i]) && x[i] < INFINITY;
        sum += exp(x[i] - max);
    }
    if (!sound)
        return isnan(r.lse) && r.top_id[0] == -1;
    double lse = max + log(sum);
    double tol = (vocab / 2048.0 + 24) * 0x1p-24 + 0x1p-20 + fabs(lse) * 0x1p-23;
    if (!(fabs(r.lse - lse) <= tol))
        return false;
    auto logprob_ok = [&](float p, float logit) {
        return p == logit - lse /* both -inf */ ||
               fabs(p - (logit - lse)) <= tol + fabs(logit - lse) * 0x1p-23;
    };
    if (target < 0 ? r.target_logprob != 0 : !logprob_ok(r.target_logprob, x[target]))
        return false;
    std::vector<int> by(vocab);
    for (int i = 0; i < vocab; i++)
        by[i] = i;
    int m = std::min(n, vocab);
    std::partial_sort(by.begin(), by.begin() + m, by.end(),
                      [&](int i, int j) { return x[i] > x[j] || (x[i] == x[j] && i < j); });
    for (int i = 0; i < n; i++) {
        if (i >= m) {
            if (r.top_id[i] != -1)
                return false;
            continue;
        }
        int id = r.top_id[i];
        if (id < 0 || id >= vocab || !logprob_ok(r.top_logprob[i], x[id]))
            return false;
        /* different logits may have one logprob; then the lower id is first */
        if (id != by[i] && (float)(x[id] - lse) != (float)(x[by[i]] - lse) &&
            fabs(x[id] - x[by[i]]) > fabs(x[id] - lse) * 0x1p-23)
            return false;
        if (i > 0 && (r.top_logprob[i] > r.top_logprob[i - 1] ||
                      (r.top_logprob[i] == r.top_logprob[i - 1] && id < r.top_id[i - 1])))
            return false;
    }
    return true;
}

/* What is special about row r. */
static void shape_row(float *row, int r, int vocab, int ld)
{
    for (int i = 0; i < vocab; i++) {
        if (r == 1)
            row[i] = 0.25f; /* all equal: the list overflows */
        if (r == 2)
            row[i] = roundf(row[i]); /* ties, more than the list holds in large vocabularies */
        if (r == 3)
            row[i] = (float)(bf16)row[i];
        if (r == 4)
            row[i] = i % 3 ? -INFINITY : row[i];
        if (r == 5)
            row[i] += 80.0f * (i == vocab - 1); /* peaked */
        if (r == 6)
            row[i] = i == vocab / 2 ? NAN : row[i];
        if (r == 7)
            row[i] = i == vocab - 1 ? INFINITY : row[i];
        if (r == 8)
            row[i] = (float)-i; /* the best are neighbours: few threads have them */
        if (r == 9)
            row[i] = i < 3 ? 1.0f : -INFINITY;
    }
    for (int i = vocab; i < ld; i++)
        row[i] = NAN; /* padding is not part of the row */
}

static void test_reduce(int n_rows, int vocab, int ld)
{
    dbuf<float> logits((size_t)n_rows * ld);
    dbuf<int32_t> targets(n_rows), top(n_rows);
    dbuf<struct k_row_result> out(n_rows);
    fill_normal(logits, 7 + vocab, 3);
    auto x = logits.get();
    std::vector<int32_t> t(n_rows), k(n_rows);
    for (int r = 0; r < n_rows; r++) {
        float *row = &x[(size_t)r * ld];
        t[r] = r % 4 == 1 ? -1 : (r * 12345) % vocab;
        k[r] = r % 5 == 2 ? r % 21 : K_TOP_MAX;
        shape_row(row, r, vocab, ld);
        if (r == 2 || r == 8)
            k[r] = K_TOP_MAX;
    }
    logits.put(x), targets.put(t), top.put(k);
    struct k_head_reduce a = {n_rows, vocab, ld, logits.p, targets.p, top.p, out.p};
    CU(k_head_reduce(&a, 0));
    auto got = out.get();
    bool ok = true;
    for (int r = 0; r < n_rows; r++)
        if (!row_ok(&x[(size_t)r * ld], vocab, t[r], k[r], got[r])) {
            printf("# row %d of vocabulary %d is wrong\n", r, vocab);
            ok = false;
        }
    /* Rows alone and in a shifted block give the same bits; a changed row does not. */
    bool same = true;
    for (int r : {0, 2, n_rows - 1}) {
        dbuf<struct k_row_result> alone(1);
        struct k_head_reduce b = {
            1, vocab, ld, logits.p + (size_t)r * ld, targets.p + r, top.p + r, alone.p};
        CU(k_head_reduce(&b, 0));
        same &= memcmp(alone.get().data(), &got[r], sizeof got[r]) == 0;
    }
    float v = x[0] + 1;
    CU(cudaMemcpy(logits.p, &v, 4, cudaMemcpyHostToDevice));
    CU(k_head_reduce(&a, 0));
    auto other = out.get();
    bool differs = memcmp(&other[0], &got[0], sizeof got[0]) != 0;
    same &= memcmp(&other[2], &got[2], sizeof got[2]) == 0;
    result(ok && same && differs,
           "head_reduce %d rows, vocabulary %d: values %s, bits %s, control "
           "%s",
           n_rows, vocab, ok ? "ok" : "WRONG", same ? "same" : "DIFFER",
           differs ? "differs" : "DOES NOT DIFFER");
}

static void test_fill(void)
{
    const int n = 100001;
    dbuf<bf16> a(n), b(n);
    CU(k_fill_normal(a.p, n, 0, 9, 0.5f, 0));
    CU(k_fill_normal(b.p, 1000, 0, 9, 0.5f, 0));
    CU(k_fill_normal(b.p + 1000, n - 1000, 1000, 9, 0.5f, 0));
    auto x = a.get(), y = b.get();
    double s = 0, s2 = 0;
    for (int i = 0; i < n; i++)
        s += (float)x[i], s2 += (double)(float)x[i] * (float)x[i];
    /* mean within 5 sigma of 0, variance within 5 sigma (sqrt(2 / n)) of 0.25 */
    bool ok = memcmp(x.data(), y.data(), n * 2) == 0 && fabs(s / n) < 5 * 0.5 / sqrt(n) &&
              fabs(s2 / n / 0.25 - 1) < 5 * sqrt(2.0 / n);
    CU(k_fill_nan(a.p, 64, 0));
    x = a.get();
    ok &= isnan((float)x[0]) && isnan((float)x[31]) && (float)x[32] == (float)y[32];
    result(ok, "fills: mean %.4f, variance %.4f", s / n, s2 / n);
}

int main(int argc, char **argv)
{
    small = argc > 1 && strcmp(argv[1], "small") == 0;
    if (!gpu_open("test_head", &dev))
        return 0;
    printf("# seeds 1, 2, 7 + vocabulary, 9\n");
    test_norm(9, 5, 64);
    test_reduce(10, 1000, 1000);
    test_reduce(10, 1001, 1008);
    test_reduce(10, 15, 16);
    test_fill();
    if (!small) {
        test_norm(300, 130, 5120), test_norm(70, 65, 8192);
        test_reduce(63, 32000, 32000);
        test_reduce(24, 151936, 151936);
        test_reduce(24, 248320, 248320);
    }
    printf("%s test_head: %d failed\n", n_failed ? "FAIL" : "pass", n_failed);
    return n_failed != 0;
}
