/* Tests of attention and its preparation against plain host loops in f64 on the same bf16
 * operands. Pages and outputs are poisoned: what a token may not read is NaN.
 *
 * Tolerances. A rounding to bf16 (8 significant bits) is off by at most 2^-8. Preparation: one
 * rounding of f32 arithmetic, and an absolute part for rotations that cancel. Attention:
 * weights are rounded before they meet v, the output once more, so the error of o =
 * sigmoid(gate) sum(p v) / sum(p) is at most 2^-8 (sigmoid(gate) sum(p |v|) / sum(p) + |o|); 5%
 * more and 1e-5 are left to f32 scores (256 terms), exponentials and sums.
 * `small` as first argument: sizes for compute-sanitizer. */
#include <algorithm>

#include "../../kernels/attn_split.cuh"
#include "gpu.cuh"

enum { D = 256, SEG = K_ATTN_SEGMENT };

static struct k_device dev;
static bool small;
static int n_bodies;

static const char *body_name(int body)
{
    return body == K_ATTN_HOPPER ? "hopper" : "portable";
}

/* A batch with its projection and its pages. Positions before start are random, at `seed`. */
struct attn_case {
    int HQ, HK, P, ld, n_pages, max_pages;
    std::vector<int> lens, start;
    batch_dev batch;
    dbuf<bf16> p, k, v, o;
    dbuf<int32_t> table;
    dbuf<float> qn, kn, freq;
    dbuf<uint8_t> work;
    std::vector<int32_t> table_h;
    std::vector<bf16> raw; /* p before preparation */

    /* first_page: pages used are first_page .. + n - 1, in a random order. */
    void make(int HQ_, int HK_, int P_, const std::vector<int> &lens_,
              const std::vector<int> &start_, uint64_t seed, int first_page = 0)
    {
        HQ = HQ_, HK = HK_, P = P_, lens = lens_, start = start_;
        ld = (2 * HQ + 2 * HK) * D + 8;
        int n = (int)lens.size(), used = 0;
        max_pages = 1;
        for (int i = 0; i < n; i++)
            max_pages = std::max(max_pages, (start[i] + lens[i] + P - 1) / P);
        struct rng r = {seed};
        for (int i = 0; i < n; i++)
            used += (start[i] + lens[i] + P - 1) / P;
        n_pages = first_page + used + 1;
        std::vector<int> order(used);
        for (int i = 0; i < used; i++)
            order[i] = first_page + i;
        for (int i = used - 1; i > 0; i--)
            std::swap(order[i], order[rng_int(&r, i + 1)]);
        table_h.assign((size_t)n * max_pages, 0x7fffffff);
        for (int i = 0, at = 0; i < n; i++)
            for (int j = 0; j < (start[i] + lens[i] + P - 1) / P; j++)
                table_h[(size_t)i * max_pages + j] = order[at++];
        batch.make(lens, start, std::vector<int>(n, 0));
        table.make(table_h.size()), table.put(table_h);
        p.make((size_t)batch.b.n_tokens * ld + 8), o.make((size_t)batch.b.n_tokens * HQ * D);
        k.make((size_t)n_pages * HK * P * D), v.make((size_t)n_pages * HK * P * D);
        work.make(k_attn_work_bytes(dev.n_sms, batch.b.n_chunks, HQ));
        qn.make(D), kn.make(D), freq.make(D / 2);
        fill_normal(p, seed, 1);
        std::vector<float> w(D), f(D / 2);
        for (int i = 0; i < D; i++)
            w[i] = 1.2f + 0.3f * rng_normal(&r);
        for (int i = 0; i < D / 2; i++)
            f[i] = powf(1e7f, -2.0f * i / 64);
        qn.put(w), freq.put(f);
        std::reverse(w.begin(), w.end());
        kn.put(w);
        raw = p.get();
    }

    int64_t at(int seq, int pos, int head, int dim) const
    {
        struct k_attn_dims d = {HQ, HK, D, 64, ld};
        return k_kv_offset(&d, P, table_h[(size_t)seq * max_pages + pos / P], head, pos % P,
                           dim);
    }

    /* Random keys and values before the sequences' starts. */
    void history(uint64_t seed)
    {
        struct rng r = {seed};
        for (size_t s = 0; s < lens.size(); s++)
            for (int h = 0; h < HK; h++)
                for (int b = 0; b * 64 < start[s]; b++) {
                    std::vector<bf16> kb(64 * D), vb(64 * D);
                    memset((void *)kb.data(), 0xff, kb.size() * 2);
                    vb = kb;
                    int64_t at0 = at((int)s, b * 64, h, 0);
                    for (int i = 0; i < std::min(64, start[s] - b * 64); i++)
                        for (int d = 0; d < D; d++) {
                            int64_t u = at((int)s, b * 64 + i, h, d) - at0;
                            kb[u] = (bf16)rng_normal(&r), vb[u] = (bf16)rng_normal(&r);
                        }
                    CU(cudaMemcpy(k.p + at0, kb.data(), kb.size() * 2, cudaMemcpyHostToDevice));
                    CU(cudaMemcpy(v.p + at0, vb.data(), vb.size() * 2, cudaMemcpyHostToDevice));
                }
    }

    struct k_kv_pages pages()
    {
        struct k_kv_pages kv = {n_pages, P, max_pages, table.p, k.p, v.p};
        return kv;
    }

    void prep()
    {
        struct k_attn_prep a = {};
        a.b = batch.b, a.d = {HQ, HK, D, 64, ld}, a.kv = pages(), a.eps = 1e-6f;
        a.p = p.p, a.q_norm = qn.p, a.k_norm = kn.p, a.inv_freq = freq.p;
        CU(k_attn_prep(&a, 0));
    }

    struct k_attn args()
    {
        struct k_attn a = {};
        a.dev = &dev, a.b = batch.b, a.d = {HQ, HK, D, 64, ld}, a.kv = pages();
        a.p = p.p, a.o = o.p, a.work = work.p;
        return a;
    }

    void attend(int body, bool whole = false)
    {
        o.poison(), work.poison();
        struct k_attn a = args();
        a.body = body, a.whole = whole;
        CU(k_attn(&a, 0));
        CU(cudaDeviceSynchronize());
    }

    /* Tiles that a launch of the body splits. */
    int n_split(int body, bool whole)
    {
        struct k_attn a = args();
        a.whole = whole;
        struct attn_work w;
        int32_t n = 0;
        CU(attn_split_plan(&a, body == K_ATTN_HOPPER ? ATTN_HOPPER_ROWS : 64, &w, 0));
        if (w.jobs)
            CU(cudaMemcpy(&n, w.n_split, sizeof(n), cudaMemcpyDeviceToHost));
        return n;
    }

    /* A block of 64 positions of keys or values, [64][D]. */
    std::vector<float> block(const dbuf<bf16> &from, int seq, int pos, int head) const
    {
        int64_t at0 = at(seq, pos / 64 * 64, head, 0);
        auto raw_block = from.get(at0, 64 * D);
        std::vector<float> f(64 * D);
        for (int i = 0; i < 64; i++)
            for (int d = 0; d < D; d++)
                f[i * D + d] = (float)raw_block[at(seq, pos / 64 * 64 + i, head, d) - at0];
        return f;
    }
};

static void norm_rotate_ref(const bf16 *x, const std::vector<float> &w,
                            const std::vector<float> &freq, int pos, double y[D])
{
    double s = 0;
    for (int i = 0; i < D; i++)
        s += (double)(float)x[i] * (float)x[i];
    for (int i = 0; i < D; i++)
        y[i] = (float)x[i] / sqrt(s / D + 1e-6) * w[i];
    for (int i = 0; i < 32; i++) {
        float angle = (float)pos * freq[i];
        double lo = y[i], hi = y[i + 32];
        y[i] = lo * cos((double)angle) - hi * sin((double)angle);
        y[i + 32] = hi * cos((double)angle) + lo * sin((double)angle);
    }
}

static bool prep_close(float got, double want)
{
    return fabs(got - want) <= 4e-3 * fabs(want) + 1e-5;
}

/* Every token when there are few, else every `step`-th sequence. */
static bool check_prep(attn_case &c, int step)
{
    auto p = c.p.get();
    auto qn = c.qn.get(), kn = c.kn.get(), freq = c.freq.get();
    bool ok = true;
    int t0 = 0;
    for (size_t s = 0; s < c.lens.size(); t0 += c.lens[s], s++) {
        if (s % step)
            continue;
        for (int t = 0; t < c.lens[s]; t++) {
            const bf16 *x = &c.raw[(size_t)(t0 + t) * c.ld], *g = &p[(size_t)(t0 + t) * c.ld];
            int pos = c.start[s] + t;
            double y[D];
            for (int h = 0; h < c.HQ; h++) {
                norm_rotate_ref(x + h * D, qn, freq, pos, y);
                for (int i = 0; i < D; i++)
                    ok &= prep_close((float)g[h * D + i], y[i]);
            }
            ok &= memcmp(g + c.HQ * D, x + c.HQ * D, (c.ld - c.HQ * D) * 2) == 0;
        }
        for (int h = 0; h < c.HK; h++)
            for (int b = c.start[s] / 64; c.lens[s] && b <= (c.start[s] + c.lens[s] - 1) / 64;
                 b++) {
                auto k = c.block(c.k, (int)s, b * 64, h), v = c.block(c.v, (int)s, b * 64, h);
                for (int i = 0; i < 64; i++) {
                    int t = b * 64 + i - c.start[s];
                    if (t >= c.lens[s])
                        ok &= isnan(k[i * D]) && isnan(v[i * D + D - 1]);
                    if (t < 0 || t >= c.lens[s])
                        continue;
                    const bf16 *x = &c.raw[(size_t)(t0 + t) * c.ld + 2 * c.HQ * D];
                    double y[D];
                    norm_rotate_ref(x + h * D, kn, freq, c.start[s] + t, y);
                    for (int d = 0; d < D; d++) {
                        ok &= prep_close(k[i * D + d], y[d]);
                        ok &= v[i * D + d] == (float)x[(c.HK + h) * D + d];
                    }
                }
            }
    }
    return ok;
}

/* The largest error over its bound; rows: about so many are looked at. */
static double check_attn(attn_case &c, int rows)
{
    auto p = c.p.get();
    auto o = c.o.get();
    int step = std::max(1, c.batch.b.n_tokens / rows), t0 = 0;
    double worst = 0;
    for (size_t s = 0; s < c.lens.size(); t0 += c.lens[s], s++) {
        int first = (step - t0 % step) % step;
        if (first >= c.lens[s])
            continue;
        for (int kh = 0; kh < c.HK; kh++) {
            int end = c.start[s] + c.lens[s];
            std::vector<float> k, v;
            for (int b = 0; b * 64 < end; b++) {
                auto kb = c.block(c.k, (int)s, b * 64, kh),
                     vb = c.block(c.v, (int)s, b * 64, kh);
                k.insert(k.end(), kb.begin(), kb.end()),
                    v.insert(v.end(), vb.begin(), vb.end());
            }
            for (int t = first; t < c.lens[s]; t += step)
                for (int h = kh * (c.HQ / c.HK); h < (kh + 1) * (c.HQ / c.HK); h++) {
                    int n = c.start[s] + t + 1;
                    const bf16 *q = &p[(size_t)(t0 + t) * c.ld + h * D], *gate = q + c.HQ * D;
                    std::vector<double> w(n);
                    double max = -INFINITY, sum = 0, acc[D] = {0}, mag[D] = {0};
                    for (int j = 0; j < n; j++) {
                        double x = 0;
                        for (int d = 0; d < D; d++)
                            x += (double)(float)q[d] * k[(size_t)j * D + d];
                        w[j] = x / 16;
                        max = std::max(max, w[j]);
                    }
                    for (int j = 0; j < n; j++) {
                        w[j] = exp(w[j] - max);
                        sum += w[j];
                        for (int d = 0; d < D; d++) {
                            acc[d] += w[j] * v[(size_t)j * D + d];
                            mag[d] += w[j] * fabs(v[(size_t)j * D + d]);
                        }
                    }
                    for (int d = 0; d < D; d++) {
                        double g = 1 / (1 + exp(-(double)(float)gate[d]));
                        double want = acc[d] / sum * g;
                        double bound = (mag[d] / sum * g + fabs(want)) * (1.05 / 256) + 1e-5;
                        double e =
                            fabs((float)o[((size_t)(t0 + t) * c.HQ + h) * D + d] - want) /
                            bound;
                        if (!(e <= worst))
                            worst = e;
                    }
                }
        }
    }
    return worst;
}

static void test_case(const char *name, int HQ, int HK, int P, const std::vector<int> &lens,
                      const std::vector<int> &start, int rows = 200, int first_page = 0)
{
    attn_case c;
    c.make(HQ, HK, P, lens, start, 11 + lens.size(), first_page);
    c.history(5);
    c.prep();
    result(check_prep(c, (int)lens.size() / 64 + 1), "attn_prep %s", name);
    for (int body = K_ATTN_PORTABLE; body < K_ATTN_PORTABLE + n_bodies; body++) {
        c.attend(body);
        double worst = check_attn(c, rows);
        result(worst <= 1, "attn %s %s: %.3f of the bound", body_name(body), name, worst);
    }
}

/* Copies the pages of sequence `from` of one case to sequence `to` of another, up to pos. */
static void copy_pages(attn_case &c, int from, attn_case &d, int to, int end)
{
    for (int h = 0; h < c.HK; h++)
        for (int b = 0; b * 64 < end; b++) {
            CU(cudaMemcpy(d.k.p + d.at(to, b * 64, h, 0), c.k.p + c.at(from, b * 64, h, 0),
                          64 * D * 2, cudaMemcpyDeviceToDevice));
            CU(cudaMemcpy(d.v.p + d.at(to, b * 64, h, 0), c.v.p + c.at(from, b * 64, h, 0),
                          64 * D * 2, cudaMemcpyDeviceToDevice));
        }
}

/* A sequence at once, and in pieces inside other batches on other pages, gives the same bits.
 * Control: with one key of position 3 changed it must not. */
static void test_bits(int HQ, int HK, int n, const std::vector<int> &cuts)
{
    for (int body = K_ATTN_PORTABLE; body < K_ATTN_PORTABLE + n_bodies; body++) {
        attn_case one;
        one.make(HQ, HK, 192, {n}, {0}, 3);
        one.prep(), one.attend(body);
        auto want = one.o.get();
        bool same = true, differs = false;
        int at = 0;
        for (size_t i = 0; i < cuts.size(); i++) {
            attn_case c;
            c.make(HQ, HK, i % 2 ? 64 : 128, {37, cuts[i], 0, 130}, {64, at, 0, 5}, 17 + i);
            c.history(6);
            copy_pages(one, 0, c, 1, at);
            CU(cudaMemcpy(c.p.p + (size_t)37 * c.ld, one.raw.data() + (size_t)at * c.ld,
                          (size_t)cuts[i] * c.ld * 2, cudaMemcpyHostToDevice));
            CU(cudaMemcpy(c.qn.p, one.qn.p, D * 4, cudaMemcpyDeviceToDevice));
            CU(cudaMemcpy(c.kn.p, one.kn.p, D * 4, cudaMemcpyDeviceToDevice));
            c.prep(), c.attend(body);
            auto got = c.o.get((size_t)37 * HQ * D, (size_t)cuts[i] * HQ * D);
            same &= memcmp(got.data(), &want[(size_t)at * HQ * D], got.size() * 2) == 0;
            if (at > 3) {
                bf16 other = (bf16)3.0f;
                CU(cudaMemcpy(c.k.p + c.at(1, 3, 0, 100), &other, 2, cudaMemcpyHostToDevice));
                c.attend(body);
                got = c.o.get((size_t)37 * HQ * D, (size_t)cuts[i] * HQ * D);
                differs |= memcmp(got.data(), &want[(size_t)at * HQ * D], got.size() * 2) != 0;
            }
            at += cuts[i];
        }
        result(same && differs && at == n,
               "attn %s bits %d/%d: %d tokens at once %s in %zu pieces; "
               "control %s",
               body_name(body), HQ, HK, n, same ? "=" : "DIFFER FROM", cuts.size(),
               differs ? "differs" : "DOES NOT DIFFER");
    }
}

/* A sequence whose neighbours in the batch are NaN throughout keeps its bits. */
static void test_nan(int HQ, int HK)
{
    const std::vector<int> lens = {70, 33, 90}, start = {0, 100, 5};
    for (int body = K_ATTN_PORTABLE; body < K_ATTN_PORTABLE + n_bodies; body++) {
        attn_case c;
        std::vector<bf16> out[2];
        c.make(HQ, HK, 64, lens, start, 23);
        c.history(7);
        for (int i = 0; i < 2; i++) {
            c.p.put(c.raw);
            if (i == 1) {
                CU(cudaMemset(c.p.p, 0xff, (size_t)70 * c.ld * 2));
                CU(cudaMemset(c.p.p + (size_t)103 * c.ld, 0xff, (size_t)90 * c.ld * 2));
            }
            c.prep(), c.attend(body);
            out[i] = c.o.get();
        }
        size_t row = (size_t)HQ * D, from = 70 * row, n = 33 * row;
        bool same = memcmp(&out[0][from], &out[1][from], n * 2) == 0;
        bool neighbours = isnan((float)out[1][from - 1]) && isnan((float)out[1][from + n]);
        result(same && neighbours, "attn %s %d/%d: NaN in the neighbours stays there",
               body_name(body), HQ, HK);
    }
}

/* Bodies, and keys shared out or not: the same bits. split: whether the launcher is to share
 * them out. Control: a row's neighbour differs. */
static void test_shares(const char *name, int HQ, int HK, int P, const std::vector<int> &lens,
                        const std::vector<int> &start, bool split)
{
    attn_case c;
    c.make(HQ, HK, P, lens, start, 31 + lens.size());
    c.history(8);
    c.prep();
    std::vector<bf16> want;
    bool same = true, as_meant = true;
    for (int body = K_ATTN_PORTABLE; body < K_ATTN_PORTABLE + n_bodies; body++)
        for (int whole = 0; whole < 2; whole++) {
            c.attend(body, whole);
            auto got = c.o.get();
            if (want.empty())
                want = got;
            same &= memcmp(got.data(), want.data(), got.size() * 2) == 0;
            as_meant &= (c.n_split(body, whole) > 0) == (split && !whole);
        }
    bool differs = memcmp(&want[0], &want[D], D * 2) != 0;
    double worst = check_attn(c, 24);
    result(same && differs && as_meant && worst <= 1,
           "attn shares %s: all bodies, keys %s %s: %.3f of the bound", name,
           as_meant ? split ? "shared out and not" : "not shared out" : "NOT AS MEANT",
           same ? "the same bits" : "DIFFER", worst);
}

/* The list of jobs: each tile with rows has each of its segments once, the sums of split tiles
 * lie apart and in order, and a list that would be too long splits nothing. */
static void test_plan(const char *name, int HQ, int HK, int rows, const std::vector<int> &lens,
                      const std::vector<int> &start)
{
    batch_dev batch;
    batch.make(lens, start, std::vector<int>(lens.size(), 0), 70, 3);
    int most = 0, ratio = HQ / HK, groups = rows / GROUP_ROWS;
    for (size_t i = 0; i < lens.size(); i++)
        most = std::max(most, start[i] + lens[i]);
    dbuf<uint8_t> work(k_attn_work_bytes(dev.n_sms, batch.b.n_chunks, HQ));
    struct k_attn a = {};
    a.dev = &dev, a.b = batch.b, a.d = {HQ, HK, D, 64, 0}, a.work = work.p;
    a.kv.page_tokens = 64, a.kv.max_pages = (most + 63) / 64;
    struct attn_work w;
    CU(attn_split_plan(&a, rows, &w, 0));
    int32_t n[2] = {0, 0};
    CU(cudaMemcpy(&n[0], w.n_jobs, 4, cudaMemcpyDeviceToHost));
    CU(cudaMemcpy(&n[1], w.n_split, 4, cudaMemcpyDeviceToHost));
    bool ok = n[0] >= 0 && n[0] <= w.max_jobs && n[1] >= 0 && n[1] <= w.max_split;
    std::vector<struct attn_entry> jobs(ok ? n[0] : 0);
    CU(cudaMemcpy(jobs.data(), w.jobs, jobs.size() * sizeof(jobs[0]), cudaMemcpyDeviceToHost));
    /* What is to be: a tile's segments. */
    std::vector<int> segments;
    int64_t n_multi = 0, n_parts = 0, n_live = 0;
    for (size_t s = 0; s < lens.size(); s++)
        for (int t = 0; t < lens[s]; t += 64) {
            int len = std::min(64, lens[s] - t), last = start[s] + t + len - 1;
            int n_tiles = (64 * ratio + rows - 1) / rows,
                live = (len * ratio + rows - 1) / rows;
            for (int i = 0; i < n_tiles * HK; i++)
                segments.push_back(i % n_tiles < live ? last / K_ATTN_SEGMENT + 1 : 0);
            n_live += live * HK;
            if (last >= K_ATTN_SEGMENT)
                n_multi += live * HK, n_parts += live * HK * (last / K_ATTN_SEGMENT + 1);
        }
    bool split = n_multi > 0 && n_multi <= w.max_split && n_parts * groups <= w.n_parts;
    ok &= n[1] == (split ? n_multi : 0);
    ok &= n[0] == n_live + (split ? n_parts - n_multi : 0);
    std::vector<int> seen(segments.size(), 0), first_part(segments.size(), -1);
    std::vector<char> taken(w.n_parts, 0);
    for (auto &j : jobs) {
        if (j.tile < 0 || j.tile >= (int)segments.size()) {
            ok = false;
            break;
        }
        bool is_part = split && segments[j.tile] > 1;
        ok &= segments[j.tile] > 0 && j.segment == (is_part ? seen[j.tile] : -1);
        if (is_part) {
            if (j.segment == 0)
                first_part[j.tile] = j.part;
            ok &= j.part == first_part[j.tile] + j.segment * groups;
            for (int g = 0; g < groups && ok; g++)
                ok &= j.part + g < w.n_parts && !taken[j.part + g]++;
        }
        seen[j.tile]++;
    }
    for (size_t i = 0; i < segments.size(); i++)
        ok &= seen[i] == (split && segments[i] > 1 ? segments[i] : segments[i] > 0);
    result(ok, "attn plan %s, tiles of %d: %d jobs, %d of %ld tiles split", name, rows, n[0],
           n[1], (long)n_live);
}

static void test_plans(void)
{
    for (int rows = 64; rows <= 128; rows += 64) {
        test_plan("one long tail", 16, 2, rows, {200}, {32000});
        test_plan("a tail among others", 16, 2, rows, {1000, 0, 200, 3, 700, 64},
                  {0, 9, 32000, SEG - 1, 100, SEG - 64});
        test_plan("too many tiles", 16, 2, rows, {3000}, {32000});
        test_plan("too many sums", 16, 2, rows, {200, 100}, {900000, SEG});
        test_plan("across a boundary", 3, 1, rows, {1, 2, 63, 64},
                  {SEG, SEG - 1, 2 * SEG - 32, SEG - 6});
        test_plan("ratio 64", 64, 1, rows, {5}, {20000});
        test_plan("many chunks", 2, 1, rows, {100000, 1}, {0, SEG + 100});
        std::vector<int> lens(1500), start(1500, SEG - 2);
        for (int i = 0; i < 1500; i++)
            lens[i] = i % 4;
        test_plan("1500 across a boundary", 2, 1, rows, lens, start);
        std::fill(start.begin() + 40, start.end(), 7);
        test_plan("40 across a boundary", 2, 1, rows, lens, start);
    }
}

int main(int argc, char **argv)
{
    small = argc > 1 && strcmp(argv[1], "small") == 0;
    if (!gpu_open("test_attn", &dev))
        return 0;
    printf("# seeds 3, 5, 6, 7, 23, 11 + sequences, 17 + piece\n");
    n_bodies = dev.cc == 90 ? 2 : 1;
    test_case("T=1", 16, 2, 64, {1}, {0});
    test_case("63", 8, 8, 64, {63}, {0}, 20);
    test_case("64", 6, 2, 192, {64}, {0}, 20);
    test_case("65, ratio 5", 5, 1, 64, {65}, {0}, 20);
    test_case("130+20+300", 16, 2, 64, {130, 20, 300}, {0, 0, 0}, small ? 20 : 200);
    test_case("starts", 8, 2, 192, {1, 65, 0, 64, 130, 3}, {191, 192, 64, 63, 250, 383},
              small ? 20 : 200);
    if (!small) {
        test_case("ratio 1", 4, 4, 64, {300, 70}, {129, 0});
        test_case("ratio 6", 24, 4, 64, {100, 129}, {0, 1000});
        test_case("ratio 64", 64, 1, 64, {7, 66}, {100, 0}, 20);
        test_case("long", 4, 2, 128, {700, 64}, {5000, 20001}, 60);
        std::vector<int> lens(4096), start(4096);
        for (int i = 0; i < 4096; i++) {
            lens[i] = 1 + i % 3;
            start[i] = i % 5 == 0 ? 63 : 0;
        }
        test_case("4096 of 1..3", 2, 1, 64, lens, start, 500);
        test_case("pages past 2^31 elements", 4, 2, 64, {130, 65}, {0, 70}, 100, 65600);
    }
    test_plans();
    test_shares("3+1+70", 4, 2, 64, {3, 1, 70, 5}, {2 * SEG - 2, SEG, SEG - 6, 0}, true);
    test_shares("short", 4, 2, 64, {70, 5}, {SEG - 80, 0}, false);
    test_nan(8, 2);
    test_nan(6, 2);
    test_bits(8, 2, 300, {64, 64, 128, 44});
    if (!small) {
        test_bits(16, 2, 961, {1, 63, 64, 1, 2, 320, 510});
        test_bits(3, 1, 200, {130, 70});
        test_bits(4, 1, 2 * SEG + 300, {SEG - 100, 200, SEG - 101, 1, 2, 250, 48});
        test_shares("200 behind 32000", 16, 2, 64, {200}, {32000}, true);
        test_shares("ratio 5, pages of 192", 5, 1, 192, {100, 33}, {20000, SEG - 1}, true);
        test_shares("ratio 64", 64, 1, 64, {7}, {SEG + 900}, true);
        test_shares("many tiles", 16, 2, 64, {2200}, {SEG - 1000}, false);
    }
    printf("%s test_attn: %d failed\n", n_failed ? "FAIL" : "pass", n_failed);
    return n_failed != 0;
}
