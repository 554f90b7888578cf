/* Tests of the operations around the delta rule against plain host loops in f64: chunk map,
 * embedding, RMSNorm, SwiGLU, gated norm, convolution with its state and gates. Outputs are
 * poisoned. An output is one rounding to bf16 (2^-9 relative) of f32 arithmetic; TOL allows the
 * rounding, doubled for a result that f32 error (1e-6) moves over a tie, and an absolute part
 * for sums that cancel. `small` as first argument: sizes for compute-sanitizer. */
#include "gpu.cuh"

static const double TOL_REL = 4e-3, TOL_ABS = 2e-6;

static struct k_device dev;
static bool small;

static bool close_to(double got, double want, double scale)
{
    return fabs(got - want) <= TOL_REL * fabs(want) + TOL_ABS * scale;
}

static void check_map(const std::vector<int> &lens, bool *ok)
{
    batch_dev m;
    m.make(lens, std::vector<int>(lens.size(), 0), std::vector<int>(lens.size(), 0));
    auto seq = m.seq.get(), index = m.index.get(), tok = m.tok.get(), first = m.first.get();
    auto order = m.order.get();
    int f = 0, t = 0, n = (int)lens.size();
    std::vector<int> seen(n, 0);
    for (int s = 0; s < n; s++) {
        *ok &= first[s] == f;
        for (int c = 0; c * 64 < lens[s]; c++, f++)
            *ok &= seq[f] == s && index[f] == c && tok[f] == t + c * 64;
        t += lens[s];
    }
    *ok &= first[n] == f && f == m.b.n_chunks && seq[f] == -1;
    for (int i = 0; i < n; i++) {
        *ok &= order[i] >= 0 && order[i] < n && !seen[order[i]]++;
        if (i > 0) {
            int a = (lens[order[i - 1]] + 63) / 64, b = (lens[order[i]] + 63) / 64;
            *ok &= a > b || (a == b && order[i - 1] < order[i]);
        }
        if (!*ok)
            return;
    }
}

static void test_map(void)
{
    bool ok = true;
    check_map({130, 20, 300}, &ok);
    check_map({0}, &ok);
    check_map({0, 0, 64, 0, 65, 1, 0}, &ok);
    check_map(std::vector<int>(4096, 1), &ok);
    result(ok, "chunk map: 130+20+300, empties, 4096 sequences");
    struct rng r = {7};
    int sets = small ? 20 : 2000;
    for (int i = 0; i < sets && ok; i++) {
        std::vector<int> lens(1 + rng_int(&r, i % 50 == 0 ? 4096 : 40));
        for (int &l : lens)
            l = rng_int(&r, 4) == 0 ? 0 : rng_int(&r, i % 2 ? 200 : 5);
        check_map(lens, &ok);
    }
    result(ok, "chunk map: %d random sets, seed 7", sets);
}

static void test_rows(void)
{
    const int rows = 37;
    for (int dim : {8, 1024, 2560, 5120, 8192}) {
        dbuf<float> x(rows * dim), w(dim);
        dbuf<bf16> y(rows * dim), h(rows * dim);
        fill_normal(x, 1, 1), fill_normal(w, 2, 1), fill_normal(y, 3, 1);
        auto x0 = x.get(), w0 = w.get();
        auto y0 = y.get();
        struct k_rmsnorm a = {rows, dim, 1e-6f, x.p, y.p, w.p, h.p};
        CU(k_rmsnorm(&a, 0));
        auto x1 = x.get();
        auto h1 = h.get();
        bool ok = true;
        for (int r = 0; r < rows; r++) {
            double s = 0;
            for (int i = 0; i < dim; i++) {
                float v = x0[r * dim + i] + (float)y0[r * dim + i];
                ok &= x1[r * dim + i] == v;
                s += (double)v * v;
            }
            for (int i = 0; i < dim; i++)
                ok &= close_to((float)h1[r * dim + i],
                               x1[r * dim + i] / sqrt(s / dim + 1e-6) * w0[i], 1);
        }
        result(ok, "rmsnorm with sum, dim %d", dim);
    }
    const int F = 3584;
    dbuf<bf16> gu(rows * 2 * F), c(rows * F);
    fill_normal(gu, 4, 3);
    struct k_swiglu s = {rows, F, gu.p, c.p};
    CU(k_swiglu(&s, 0));
    auto g = gu.get(), o = c.get();
    bool ok = true;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < F; i++) {
            double x = (float)g[r * 2 * F + i], u = (float)g[r * 2 * F + F + i];
            ok &= close_to((float)o[r * F + i], x / (1 + exp(-x)) * u, 1);
        }
    result(ok, "swiglu");

    const int M = 2048, vocab = 100;
    dbuf<bf16> e(vocab * M);
    dbuf<float> ex(rows * M);
    dbuf<int32_t> tok(rows);
    fill_normal(e, 5, 1);
    std::vector<int32_t> ids(rows);
    for (int i = 0; i < rows; i++)
        ids[i] = (i * 31) % vocab;
    tok.put(ids);
    struct k_embed ea = {rows, M, tok.p, e.p, ex.p};
    CU(k_embed(&ea, 0));
    auto eh = e.get();
    auto xh = ex.get();
    ok = true;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < M; i++)
            ok &= xh[r * M + i] == (float)eh[ids[r] * M + i];
    result(ok, "embed");

    const int HV = 6, ld = 3 * HV * 128 + 16;
    dbuf<bf16> no(rows * HV * 128), z(rows * ld);
    dbuf<float> nw(128);
    fill_normal(no, 6, 1), fill_normal(z, 7, 2), fill_normal(nw, 8, 1);
    auto n0 = no.get(), z0 = z.get();
    auto w0 = nw.get();
    struct k_gdn_norm na = {rows, HV, ld, 1e-6f, z.p, nw.p, no.p};
    CU(k_gdn_norm(&na, 0));
    auto n1 = no.get();
    ok = true;
    for (int r = 0; r < rows * HV; r++) {
        double s2 = 0;
        for (int i = 0; i < 128; i++)
            s2 += (double)(float)n0[r * 128 + i] * (float)n0[r * 128 + i];
        for (int i = 0; i < 128; i++) {
            double x = (float)z0[(r / HV) * ld + (r % HV) * 128 + i];
            ok &= close_to(
                (float)n1[r * 128 + i],
                (float)n0[r * 128 + i] / sqrt(s2 / 128 + 1e-6) * w0[i] * x / (1 + exp(-x)), 1);
        }
    }
    result(ok, "gdn_norm");
}

struct conv_case {
    int H, HV, cd, ld, n_slots;
    std::vector<int> lens, start, slot;
    batch_dev batch;
    dbuf<bf16> p, q, k, v, state;
    dbuf<float> w, A_log, dt, g, beta;
    std::vector<int32_t> save; /* every whole chunk but each third has a slot of its own */

    void make(int H_, int HV_, const std::vector<int> &lens_, const std::vector<int> &start_)
    {
        H = H_, HV = HV_, lens = lens_, start = start_;
        cd = (2 * H + HV) * 128, ld = cd + HV * 128 + 2 * HV;
        ld = (ld + 7) / 8 * 8;
        slot.clear(), save.clear();
        n_slots = 1;
        for (int len : lens)
            for (int t = 0; t < len; t += 64)
                save.push_back(t + 64 <= len && save.size() % 3 != 2 ? n_slots++ : -1);
        n_slots += (int)lens.size() + 1;
        for (size_t i = 0; i < lens.size(); i++)
            slot.push_back(n_slots - 1 - (int)i);
        batch.make(lens, start, slot);
        batch.save(save);
        size_t T = batch.b.n_tokens;
        p.make(T * ld + 1), q.make(T * H * 128 + 1), k.make(T * H * 128 + 1);
        v.make(T * HV * 128 + 1), g.make(T * HV + 1), beta.make(T * HV + 1);
        state.make((size_t)n_slots * 3 * cd);
        w.make(cd * 4), A_log.make(HV), dt.make(HV);
        if (T > 0)
            fill_normal_kernel<<<512, 256>>>(p.p, T * ld, 31, 2.0f);
        fill_normal(w, 32, 0.5f), fill_normal(A_log, 33, 1), fill_normal(dt, 34, 4);
    }

    void run(void)
    {
        struct k_gdn_conv a = {};
        a.b = batch.b;
        a.d.H = H, a.d.HV = HV, a.d.ld = ld, a.d.n_slots = n_slots;
        a.p = p.p, a.conv_w = w.p, a.A_log = A_log.p, a.dt_bias = dt.p, a.conv_state = state.p;
        a.q = q.p, a.k = k.p, a.v = v.p, a.g = g.p, a.beta = beta.p;
        CU(k_gdn_conv(&a, 0));
        CU(cudaDeviceSynchronize());
    }
};

static void test_conv(const char *name, int H, int HV, const std::vector<int> &lens,
                      const std::vector<int> &start)
{
    conv_case c;
    c.make(H, HV, lens, start);
    std::vector<bf16> st0 = c.state.get();
    for (size_t i = 0; i < lens.size(); i++)
        for (int j = 0; j < 3 * c.cd; j++)
            if (start[i])
                st0[(size_t)c.slot[i] * 3 * c.cd + j] = (bf16)(sinf(j * 0.37f + i));
    c.state.put(st0);
    c.run();
    auto p = c.p.get(), q = c.q.get(), k = c.k.get(), v = c.v.get(), st = c.state.get();
    auto w = c.w.get(), A = c.A_log.get(), dt = c.dt.get(), g = c.g.get(), be = c.beta.get();
    bool ok_y = true, ok_g = true, ok_s = true;
    size_t t0 = 0;
    for (size_t s = 0; s < lens.size(); s++) {
        auto input = [&](int t, int ch) -> double {
            if (t >= 0)
                return (float)p[(t0 + t) * c.ld + ch];
            return start[s] ? (float)st0[((size_t)c.slot[s] * 3 + t + 3) * c.cd + ch] : 0.0;
        };
        for (int t = 0; t < lens[s]; t++) {
            for (int hd = 0; hd < 2 * H + HV; hd++) {
                double y[128], ss = 1e-6;
                for (int i = 0; i < 128; i++) {
                    double x = 0;
                    for (int e = 0; e < 4; e++)
                        x += w[(hd * 128 + i) * 4 + e] * input(t - 3 + e, hd * 128 + i);
                    y[i] = x / (1 + exp(-x));
                    ss += y[i] * y[i];
                }
                for (int i = 0; i < 128; i++) {
                    size_t tt = t0 + t;
                    double want = hd < H       ? y[i] / sqrt(ss) / sqrt(128.0)
                                  : hd < 2 * H ? y[i] / sqrt(ss)
                                               : y[i];
                    double got = hd < H       ? (float)q[(tt * H + hd) * 128 + i]
                                 : hd < 2 * H ? (float)k[(tt * H + hd - H) * 128 + i]
                                              : (float)v[(tt * HV + hd - 2 * H) * 128 + i];
                    ok_y &= close_to(got, want, 4);
                }
            }
            for (int h = 0; h < HV; h++) {
                const bf16 *row = &p[(t0 + t) * c.ld + c.cd + HV * 128];
                double b = (float)row[h], x = (float)row[HV + h] + (double)dt[h];
                double sp = x > 20 ? x : log1p(exp(x));
                ok_g &= fabs(be[(t0 + t) * HV + h] - 1 / (1 + exp(-b))) < 1e-6;
                double want = -exp((double)A[h]) * sp;
                /* a + dt_bias is rounded to f32 first: its error moves softplus by as much */
                ok_g &= fabs(g[(t0 + t) * HV + h] - want) <= 1e-5 * fabs(want) + 2e-6;
            }
        }
        for (int i = 0; i < 3; i++)
            for (int ch = 0; ch < c.cd; ch++)
                ok_s &= (float)st[((size_t)c.slot[s] * 3 + i) * c.cd + ch] ==
                        (float)input(lens[s] - 3 + i, ch);
        t0 += lens[s];
    }
    /* Slot 0, and the one before the sequences', are nobody's. */
    size_t slot_n = 3 * (size_t)c.cd, free_slot = c.n_slots - 1 - lens.size();
    ok_s &= memcmp(&st[0], &st0[0], slot_n * 2) == 0 &&
            memcmp(&st[free_slot * slot_n], &st0[free_slot * slot_n], slot_n * 2) == 0;
    t0 = 0;
    for (size_t s = 0, flat = 0; s < lens.size(); t0 += lens[s++])
        for (int t = 0; t < lens[s]; t += 64, flat++)
            for (int i = 0; i < 3 && c.save[flat] >= 0; i++)
                ok_s &= memcmp(&st[(c.save[flat] * 3 + i) * (size_t)c.cd],
                               &p[(t0 + t + 61 + i) * c.ld], c.cd * 2) == 0;
    result(ok_y && ok_g && ok_s, "gdn_conv %s: outputs %s gates %s state %s", name,
           ok_y ? "ok" : "WRONG", ok_g ? "ok" : "WRONG", ok_s ? "ok" : "WRONG");
}

/* One sequence at once, and in pieces, must give the same bits. */
static void test_conv_cut(void)
{
    const int H = 1, HV = 2, n = 200;
    conv_case one;
    one.make(H, HV, {n}, {0});
    one.run();
    auto v = one.v.get(0, n * HV * 128);
    auto q = one.q.get(0, n * H * 128);
    std::vector<bf16> st(3 * one.cd), gv, gq;
    size_t at = 0;
    bool ok = true;
    for (int len : {64, 1, 1, 2, 60, 72}) {
        conv_case c;
        c.make(H, HV, {7, len}, {0, (int)at});
        CU(cudaMemcpy(c.p.p + 7 * c.ld, one.p.p + at * c.ld, len * c.ld * 2,
                      cudaMemcpyDeviceToDevice));
        if (at)
            CU(cudaMemcpy(c.state.p + (size_t)c.slot[1] * 3 * c.cd, st.data(), st.size() * 2,
                          cudaMemcpyHostToDevice));
        c.run();
        st = c.state.get((size_t)c.slot[1] * 3 * c.cd, 3 * c.cd);
        auto pv = c.v.get(7 * HV * 128, len * HV * 128);
        auto pq = c.q.get(7 * H * 128, len * H * 128);
        ok &= memcmp(pv.data(), &v[at * HV * 128], pv.size() * 2) == 0;
        ok &= memcmp(pq.data(), &q[at * H * 128], pq.size() * 2) == 0;
        at += len;
    }
    result(ok, "gdn_conv bits: 200 tokens at once = pieces of 64, 1, 1, 2, 60, 72 in a batch");
}

int main(int argc, char **argv)
{
    small = argc > 1 && strcmp(argv[1], "small") == 0;
    if (!gpu_open("test_ops", &dev))
        return 0;
    test_map();
    test_rows();
    test_conv("1..2 tokens", 1, 1, {1, 2, 1, 2, 3}, {0, 0, 5, 9, 7});
    test_conv("empties", 1, 2, {0, 65, 0, 130}, {0, 64, 8, 0});
    if (!small) {
        test_conv("16/32", 16, 32, {63, 64, 65, 130}, {0, 64, 128, 0});
        test_conv("r=3", 2, 6, {300, 20}, {64, 0});
    }
    test_conv_cut();
    printf("%s test_ops: %d failed\n", n_failed ? "FAIL" : "pass", n_failed);
    return n_failed != 0;
}
