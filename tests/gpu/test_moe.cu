/* Tests of the mixture of experts: routing, sort, grouped products, combination, each against
 * plain host loops in f64 on the same operands; outputs and workspaces are poisoned.
 *
 * Tolerances. Routing: f32 arithmetic, 2e-5 relative. Products: one rounding to bf16 (2^-8),
 * and f32 sums: a step of 16 products is aligned and cut to some 2^-23 of the largest sum, so
 * cols / 16 steps give at most cols / 16 * 2^-22 * sum |a w|; SwiGLU carries both factors'
 * errors on. Combination: one rounding and 1e-6 of the magnitudes. `small`: sizes for
 * compute-sanitizer.
 */
#include <algorithm>

#include "gpu.cuh"

static struct k_device dev;
static bool small;
static int n_bodies;

static double softmax_at(const float *x, int E, std::vector<double> &p)
{
    double max = -INFINITY, sum = 0;
    for (int e = 0; e < E; e++)
        max = std::max(max, (double)x[e]);
    for (int e = 0; e < E; e++)
        sum += p[e] = exp(x[e] - max);
    for (int e = 0; e < E; e++)
        p[e] /= sum;
    return max;
}

/* Chosen ids are good when nothing left out has a larger logit (or an equal one and a lower
 * id), as far as f32 probabilities can tell logits apart. */
static bool route_row_ok(const float *x, int E, int k, bool renorm, const int32_t *ids,
                         const float *w)
{
    std::vector<double> p(E);
    std::vector<bool> in(E, false);
    softmax_at(x, E, p);
    double chosen = 0;
    for (int i = 0; i < k; i++) {
        if (ids[i] < 0 || ids[i] >= E || in[ids[i]])
            return false;
        in[ids[i]] = true;
        chosen += p[ids[i]];
    }
    for (int i = 0; i < k; i++) {
        double want = p[ids[i]] / (renorm ? chosen : 1);
        if (!(fabs(w[i] - want) <= 2e-5 * want + 1e-30))
            return false;
        if (i > 0 && (w[i] > w[i - 1] || (x[ids[i]] == x[ids[i - 1]] && ids[i] < ids[i - 1])))
            return false;
        for (int e = 0; e < E; e++)
            if (!in[e] && (p[e] > p[ids[i]] * (1 + 4e-6) || (x[e] == x[ids[i]] && e < ids[i])))
                return false;
    }
    return true;
}

static void test_route(int n, int E, int k, bool renorm)
{
    dbuf<float> logits((size_t)n * E), w((size_t)n * k);
    dbuf<int32_t> ids((size_t)n * k);
    fill_normal(logits, 21, 2);
    auto x = logits.get();
    for (int i = 0; i < E; i++) {
        x[i] = 0.5f; /* row 0: all equal */
        if (n > 1)
            x[E + i] = roundf(x[E + i]); /* row 1: many ties */
        if (n > 2)
            x[2 * E + i] = i == 1 ? NAN : x[2 * E + i];
        if (n > 3)
            x[3 * E + i] *= 100; /* row 3: probabilities that vanish */
    }
    logits.put(x);
    struct k_moe_route a = {n, E, k, renorm, logits.p, ids.p, w.p};
    CU(k_moe_route(&a, 0));
    auto gi = ids.get();
    auto gw = w.get();
    bool ok = true;
    for (int r = 0; r < n; r++) {
        const int32_t *id = &gi[(size_t)r * k];
        const float *weight = &gw[(size_t)r * k];
        if (r == 2)
            for (int i = 0; i < k; i++)
                ok &= id[i] == i && isnan(weight[i]);
        else if (r == 3) /* vanished ones tie at 0, by id; the largest must be first */
            ok &= x[3 * E + id[0]] == *std::max_element(&x[3 * E], &x[4 * E - 1] + 1);
        else
            ok &= route_row_ok(&x[(size_t)r * E], E, k, renorm, id, weight);
    }
    result(ok, "route %d rows, E %d, top %d%s: ties, NaN", n, E, k, renorm ? ", renorm" : "");
}

/* A layer's worth of choices, made on the host. kind 0: random; 1: all rows choose 0 .. k -
 * 1. */
struct moe_case {
    int n, E, k;
    dbuf<int32_t> ids;
    dbuf<float> weights;
    dbuf<uint8_t> work;
    struct k_moe_list list;
    std::vector<int32_t> ids_h, place, first;
    std::vector<float> weights_h;

    void make(int n_, int E_, int k_, int kind)
    {
        n = n_, E = E_, k = k_;
        struct rng r = {(uint64_t)(n + 1000 * E + k)};
        ids_h.resize((size_t)n * k), weights_h.resize((size_t)n * k);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < k; j++) {
                int id = kind ? j : rng_int(&r, E);
                for (int q = 0; q < j; q++)
                    if (ids_h[(size_t)i * k + q] == id) {
                        id = (id + 1) % E;
                        q = -1;
                    }
                ids_h[(size_t)i * k + j] = id;
                weights_h[(size_t)i * k + j] = (float)rng_unit(&r);
            }
        ids.make((size_t)n * k + 1), weights.make((size_t)n * k + 1);
        ids.put(ids_h), weights.put(weights_h);
        work.make(k_moe_list_bytes(n, k, E));
        k_moe_list_make(&list, work.p, n, k, E);
        struct k_moe_sort a = {list, ids.p};
        CU(k_moe_sort(&a, 0));
        first.assign(E + 1, 0), place.resize((size_t)n * k);
        for (int id : ids_h)
            first[id + 1]++;
        for (int e = 0; e < E; e++)
            first[e + 1] += first[e];
        std::vector<int> at(first.begin(), first.end());
        for (size_t i = 0; i < ids_h.size(); i++)
            place[i] = at[ids_h[i]]++;
    }

    template <class T> std::vector<T> read(const T *p, size_t count)
    {
        std::vector<T> h(count + 1);
        CU(cudaMemcpy(h.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
        return h;
    }
};

static void test_sort(int n, int E, int k, int kind)
{
    moe_case c;
    c.make(n, E, k, kind);
    auto first = c.read(c.list.first, E + 1), rows = c.read(c.list.rows, (size_t)n * k);
    auto place = c.read(c.list.place, (size_t)n * k), n_tiles = c.read(c.list.n_tiles, 1);
    auto tiles = c.read(c.list.tiles, 2 * (size_t)c.list.max_tiles);
    bool ok = true;
    for (int e = 0; e <= E; e++)
        ok &= first[e] == c.first[e];
    for (size_t i = 0; i < c.ids_h.size() && ok; i++)
        ok &= place[i] == c.place[i] && rows[place[i]] == (int)(i / k);
    int t = 0;
    for (int e = 0; e < E; e++)
        for (int p = c.first[e]; p < c.first[e + 1] || t % 2; p += K_MOE_TILE, t++)
            ok = ok && t < c.list.max_tiles && tiles[2 * t] == e && tiles[2 * t + 1] == p;
    ok &= t == n_tiles[0];
    result(ok, "sort %d rows, E %d, top %d%s: %d tiles of at most %d", n, E, k,
           kind ? ", skewed" : "", t, c.list.max_tiles);
}

static double step_error(int cols, double magnitude)
{
    return cols / 16.0 * ldexp(magnitude, -22);
}

/* sum a w and, in *error, its bound. */
static double dot(const bf16 *a, const bf16 *w, int cols, double *error)
{
    double s = 0, m = 0;
    for (int i = 0; i < cols; i++) {
        double x = (double)(float)a[i] * (float)w[i];
        s += x, m += fabs(x);
    }
    *error = step_error(cols, m);
    return s;
}

/* About `samples` outputs. Returns the largest error over its bound. */
static double check_gemm(moe_case &c, bool gather, bool swiglu, int rows, int cols,
                         const dbuf<bf16> &a, const dbuf<bf16> &w, const dbuf<bf16> &out,
                         int samples)
{
    size_t places = (size_t)c.n * c.k, n_cols = swiglu ? rows / 2 : rows;
    std::vector<int> expert(places), row(places);
    for (size_t i = 0; i < places; i++)
        expert[c.place[i]] = c.ids_h[i], row[c.place[i]] = (int)(i / c.k);
    double worst = 0;
    int per_place = (int)std::min(n_cols, (size_t)16);
    size_t step = std::max((size_t)1, places * per_place / samples);
    for (size_t p = 0; p < places; p += step) {
        auto x = a.get((size_t)(gather ? row[p] : p) * cols, cols);
        auto got = out.get(p * n_cols, n_cols);
        for (int i = 0; i < per_place; i++) {
            size_t col = i == 0 ? n_cols - 1 : (i * 37 + p * 11) % n_cols;
            auto wg = w.get(((size_t)expert[p] * rows + col) * cols, cols);
            double eg, want = dot(x.data(), wg.data(), cols, &eg), bound = eg;
            if (swiglu) {
                auto wu = w.get(((size_t)expert[p] * rows + n_cols + col) * cols, cols);
                double eu, up = dot(x.data(), wu.data(), cols, &eu);
                double g = want / (1 + exp(-want));
                bound = 1.1 * eg * fabs(up) + eu * fabs(g) + 1e-6 * fabs(g * up);
                want = g * up;
            }
            bound += fabs(want) * (1.02 / 256) + 1e-30;
            double e = fabs((float)got[col] - want) / bound;
            if (!(e <= worst))
                worst = e;
        }
    }
    return worst;
}

static void test_gemm(int n, int E, int k, int M, int F, int kind, int samples = 2000)
{
    moe_case c;
    c.make(n, E, k, kind);
    size_t places = (size_t)n * k;
    dbuf<bf16> h((size_t)n * M), w1((size_t)E * 2 * F * M), w2((size_t)E * M * F);
    dbuf<bf16> mid(places * F), down(places * M);
    fill_normal(h, 31, 1);
    CU(k_fill_normal(w1.p, (int64_t)w1.n, 0, 32, 1 / sqrtf((float)M), 0));
    CU(k_fill_normal(w2.p, (int64_t)w2.n, 0, 33, 1 / sqrtf((float)F), 0));
    std::vector<bf16> first_mid, first_down;
    for (int body = K_MOE_PORTABLE; body < K_MOE_PORTABLE + n_bodies; body++) {
        mid.poison(), down.poison();
        struct k_moe_gemm up = {&dev, body, c.list, 1, 1, 2 * F, M, h.p, w1.p, mid.p};
        struct k_moe_gemm dn = {&dev, body, c.list, 0, 0, M, F, mid.p, w2.p, down.p};
        CU(k_moe_gemm(&up, 0));
        CU(k_moe_gemm(&dn, 0));
        CU(cudaDeviceSynchronize());
        double e1 = check_gemm(c, true, true, 2 * F, M, h, w1, mid, samples);
        double e2 = check_gemm(c, false, false, M, F, mid, w2, down, samples);
        auto got_mid = mid.get(), got_down = down.get();
        if (body == K_MOE_PORTABLE)
            first_mid = got_mid, first_down = got_down;
        bool same = memcmp(got_mid.data(), first_mid.data(), places * F * 2) == 0 &&
                    memcmp(got_down.data(), first_down.data(), places * M * 2) == 0;
        result(e1 <= 1 && e2 <= 1 && same,
               "gemm %s %d rows, E %d, top %d, M %d, F %d%s: %.3f, %.3f of bounds%s",
               body == K_MOE_HOPPER ? "hopper" : "portable", n, E, k, M, F,
               kind ? ", skewed" : "", e1, e2,
               same ? "" : "; bits differ from the portable body's");
    }
}

static void test_combine(int n, int E, int k, int M, bool shared)
{
    moe_case c;
    c.make(n, E, k, 0);
    dbuf<bf16> down((size_t)n * k * M), sh((size_t)n * M), h((size_t)n * M), y((size_t)n * M);
    dbuf<float> gate(M);
    fill_normal(down, 41, 1), fill_normal(sh, 42, 1), fill_normal(h, 43, 1);
    fill_normal(gate, 44, 1 / sqrtf((float)M));
    struct k_moe_combine a = {c.list, M,      c.weights.p, down.p, shared ? sh.p : NULL,
                              h.p,    gate.p, y.p};
    CU(k_moe_combine(&a, 0));
    auto d = down.get(), s = sh.get(), hh = h.get(), got = y.get();
    auto g = gate.get();
    a.y = sh.p; /* in place of the shared expert's output */
    if (shared)
        CU(k_moe_combine(&a, 0));
    auto in_place = sh.get();
    bool ok = true;
    for (int r = 0; r < n; r++) {
        double x = 0;
        for (int i = 0; i < M; i++)
            x += (double)(float)hh[(size_t)r * M + i] * g[i];
        for (int i = 0; i < M; i++) {
            double want = 0, mag = 0;
            for (int j = 0; j < k; j++) {
                double t = c.weights_h[r * k + j] *
                           (double)(float)d[(size_t)c.place[r * k + j] * M + i];
                want += t, mag += fabs(t);
            }
            if (shared) {
                double t = (float)s[(size_t)r * M + i] / (1 + exp(-x));
                want += t, mag += fabs(t);
            }
            ok &= fabs((float)got[(size_t)r * M + i] - want) <=
                  fabs(want) * (1.02 / 256) + 2e-6 * mag;
            if (shared)
                ok &= (float)in_place[(size_t)r * M + i] == (float)got[(size_t)r * M + i];
        }
    }
    result(ok, "combine %d rows, top %d, M %d%s", n, k, M, shared ? ", shared" : "");
}

/* Routing, sort, products and combination of rows [from, from + n) of h; y to the host. */
static std::vector<bf16> run_layer(int body, const dbuf<bf16> &h, const dbuf<float> &logits,
                                   int from, int n, int E, int k, int M, int F,
                                   const dbuf<bf16> &w1, const dbuf<bf16> &w2)
{
    dbuf<int32_t> ids((size_t)n * k);
    dbuf<float> weights((size_t)n * k);
    dbuf<uint8_t> work(k_moe_list_bytes(n, k, E));
    dbuf<bf16> mid((size_t)n * k * F), down((size_t)n * k * M), y((size_t)n * M);
    struct k_moe_route r = {n, E, k, 1, logits.p + (size_t)from * E, ids.p, weights.p};
    CU(k_moe_route(&r, 0));
    struct k_moe_sort s = {};
    k_moe_list_make(&s.list, work.p, n, k, E);
    s.ids = ids.p;
    CU(k_moe_sort(&s, 0));
    struct k_moe_gemm up = {&dev, body, s.list, 1, 1, 2 * F, M, h.p + (size_t)from * M,
                            w1.p, mid.p};
    struct k_moe_gemm dn = {&dev, body, s.list, 0, 0, M, F, mid.p, w2.p, down.p};
    CU(k_moe_gemm(&up, 0));
    CU(k_moe_gemm(&dn, 0));
    struct k_moe_combine c = {s.list, M, weights.p, down.p, NULL, NULL, NULL, y.p};
    CU(k_moe_combine(&c, 0));
    return y.get();
}

static void test_bits(void)
{
    const int n = small ? 80 : 1000, E = 16, k = 4, M = 256, F = 128;
    dbuf<bf16> h((size_t)n * M), w1((size_t)E * 2 * F * M), w2((size_t)E * M * F);
    dbuf<float> logits((size_t)n * E);
    fill_normal(h, 51, 1), fill_normal(logits, 52, 1);
    fill_normal(w1, 53, 0.06f), fill_normal(w2, 54, 0.09f);
    for (int body = K_MOE_PORTABLE; body < K_MOE_PORTABLE + n_bodies; body++) {
        auto want = run_layer(body, h, logits, 0, n, E, k, M, F, w1, w2);
        bool same = true;
        for (int from = 0, i = 0; from < n; i++) {
            const int sizes[] = {1, 63, 7, 300, 129};
            int m = std::min(n - from, sizes[i % 5]);
            auto got = run_layer(body, h, logits, from, m, E, k, M, F, w1, w2);
            same &= memcmp(got.data(), &want[(size_t)from * M], got.size() * 2) == 0;
            from += m;
        }
        auto hh = h.get();
        hh[(size_t)5 * M + 9] = (bf16)((float)hh[(size_t)5 * M + 9] + 1);
        h.put(hh);
        auto other = run_layer(body, h, logits, 0, n, E, k, M, F, w1, w2);
        bool differs = memcmp(&other[(size_t)5 * M], &want[(size_t)5 * M], M * 2) != 0;
        memcpy(&other[(size_t)5 * M], &want[(size_t)5 * M], M * 2);
        same &= memcmp(other.data(), want.data(), other.size() * 2) == 0;
        result(same && differs,
               "experts bits %s: %d rows at once %s in pieces and beside a changed row; "
               "control %s",
               body == K_MOE_HOPPER ? "hopper" : "portable", n, same ? "=" : "DIFFER FROM",
               differs ? "differs" : "DOES NOT DIFFER");
        bf16 old = hh[(size_t)7 * M];
        hh[(size_t)7 * M] = (bf16)NAN; /* stays in its row */
        h.put(hh);
        auto bad = run_layer(body, h, logits, 0, n, E, k, M, F, w1, w2);
        bool stays =
            isnan((float)bad[(size_t)7 * M]) &&
            memcmp(bad.data(), other.data(), (size_t)5 * M * 2) == 0 &&
            memcmp(&bad[(size_t)8 * M], &other[(size_t)8 * M], (size_t)(n - 8) * M * 2) == 0;
        result(stays, "experts %s: NaN stays in its row",
               body == K_MOE_HOPPER ? "hopper" : "portable");
        hh[(size_t)7 * M] = old;
        h.put(hh);
    }
}

int main(int argc, char **argv)
{
    small = argc > 1 && strcmp(argv[1], "small") == 0;
    if (!gpu_open("test_moe", &dev))
        return 0;
    n_bodies = dev.cc == 90 ? 2 : 1;
    printf("# seeds 21, 31..33, 41..44, 51..54, rows + 1000 E + top_k\n");
    test_route(1, 4, 1, false);
    test_route(65, 4, 4, true);
    test_route(64, 8, 2, true);
    test_route(63, 512, 10, true);
    test_sort(1, 4, 1, 0), test_sort(63, 8, 2, 0), test_sort(65, 512, 10, 0);
    test_sort(0, 8, 2, 0);
    test_sort(300, 4, 4, 1);
    test_gemm(1, 4, 1, 64, 8, 0, 200);
    test_gemm(65, 8, 2, 136, 72, 0, 500);
    test_gemm(130, 4, 4, 128, 64, 1, 500);
    test_combine(3, 4, 1, 64, false);
    test_combine(65, 8, 2, 264, true);
    if (!small) {
        test_route(4096, 256, 8, false);
        test_route(4096, 500, 10, true);
        test_sort(8192, 256, 8, 0), test_sort(32768, 512, 10, 0), test_sort(3000, 128, 8, 1);
        test_gemm(300, 256, 8, 2048, 512, 0);
        test_gemm(1000, 512, 10, 2048, 512, 0);
        test_gemm(1000, 8, 2, 1024, 3584, 1);
        test_gemm(64, 512, 10, 2048, 2048, 0); /* weights past 2^31 elements */
        test_combine(300, 256, 8, 2048, true);
        test_combine(7, 512, 10, 8192, true);
    }
    test_bits();
    printf("%s test_moe: %d failed\n", n_failed ? "FAIL" : "pass", n_failed);
    return n_failed != 0;
}
