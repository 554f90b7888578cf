/* Tests of sampling against sorting in f64 on the host: u at the middle of a token's share must
 * give that token. Shares under 1e-4 are passed over: f32 exponentials and sums place their
 * edges to about 1e-6. `small`: sizes for compute-sanitizer. */
#include <algorithm>

#include <functional>

#include "gpu.cuh"

static bool small;
static uint64_t state = 20261130;

static double unit()
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(state >> 11) * 0x1p-53;
}

static double normal()
{
    return sqrt(-2 * log(unit() + 1e-12)) * cos(6.283185307179586 * unit());
}

static std::vector<double> expected(std::vector<double> p, const struct k_sample_row &q,
                                    const std::vector<struct k_adjust> &adjust)
{
    for (auto &a : adjust)
        p[a.id] = (p[a.id] > 0 ? p[a.id] / a.scale : p[a.id] * a.scale) + a.add;
    double max = *std::max_element(p.begin(), p.end()), sum = 0, kept = 0, so_far = 0;
    for (auto &x : p)
        x = exp((x - max) * q.inv_temperature);
    auto sorted = p;
    std::sort(sorted.begin(), sorted.end(), std::greater<double>());
    double least = q.min_p;
    if (q.top_k > 0 && q.top_k < (int)p.size())
        least = std::max(least, sorted[q.top_k - 1]);
    for (double x : sorted)
        kept += x >= least ? x : 0;
    for (double x : sorted) {
        if (q.top_p >= 1 || x < least)
            break;
        so_far += x;
        if (so_far >= q.top_p * kept) {
            least = x;
            break;
        }
    }
    for (auto &x : p) {
        x = x >= least ? x : 0;
        sum += x;
    }
    for (auto &x : p)
        x /= sum;
    return p;
}

/* R rows, a sample for every second one; what is launched holds rows from row0 on. */
static void test_draws(int vocab, int R, int row0, bool has_ties)
{
    int ld = (vocab + 3) / 4 * 4, n = 0, n_wrong = 0, n_adjusted = 0;
    std::vector<float> x((size_t)R * ld);
    for (auto &v : x)
        v = (float)(has_ties ? round(3 * normal()) : 3 * normal());
    std::vector<struct k_sample_row> rows;
    std::vector<struct k_adjust> all;
    std::vector<int> want;
    std::vector<float> raw;
    for (int r = 0; r < R; r += 2) {
        struct k_sample_row q = {r, (float)(1 / (0.2 + 2 * unit()))};
        q.top_k = unit() < 0.5 ? 1 + (int)(unit() * 60) : 0;
        q.top_p = unit() < 0.5 ? (float)(0.05 + 0.9 * unit()) : 1;
        q.min_p = unit() < 0.3 ? (float)(0.2 * unit()) : 0;
        q.adjust0 = (int)all.size();
        std::vector<struct k_adjust> adjust;
        for (int i = 0; i < 5 && vocab > 40 && unit() < 0.8; i++)
            adjust.push_back(
                {i * 7, (float)(1 + unit()), unit() < 0.2 ? -INFINITY : (float)normal()});
        q.n_adjust = (int)adjust.size();
        const float *row = &x[(size_t)r * ld];
        auto p = expected(std::vector<double>(row, row + vocab), q, adjust);
        double before = 0;
        int id = -1;
        double u = 0, skip = unit() * 8;
        for (int i = 0; i < vocab; before += p[i++])
            if (p[i] >= 1e-4 && (id < 0 || skip-- > 0)) {
                id = i;
                u = before + p[i] / 2;
            }
        q.u = (float)u;
        if (unit() < 0.1) {
            q.inv_temperature = INFINITY;
            auto g = std::vector<float>(row, row + vocab);
            for (auto &a : adjust)
                g[a.id] = (g[a.id] > 0 ? g[a.id] / a.scale : g[a.id] * a.scale) + a.add;
            id = (int)(std::max_element(g.begin(), g.end()) - g.begin());
        }
        n_adjusted += q.n_adjust;
        all.insert(all.end(), adjust.begin(), adjust.end());
        rows.push_back(q);
        want.push_back(id);
        raw.push_back(row[id]);
    }
    all.push_back({0, 1, 0});
    dbuf<float> logits(x.size());
    dbuf<struct k_sample_row> samples(rows.size());
    dbuf<struct k_adjust> adjust(all.size());
    dbuf<struct k_row_result> out(R);
    dbuf<int32_t> targets(R), tops(R);
    logits.put(x), samples.put(rows), adjust.put(all);
    targets.put(std::vector<int32_t>(R, -1)), tops.put(std::vector<int32_t>(R, 3));
    struct k_head_reduce reduce = {R - row0,  vocab,  ld,          logits.p + (size_t)row0 * ld,
                                   targets.p, tops.p, out.p + row0};
    CU(k_head_reduce(&reduce, 0));
    struct k_sample a = {
        (int)rows.size(), row0,     R - row0,    vocab, ld, logits.p + (size_t)row0 * ld,
        samples.p,        adjust.p, out.p + row0};
    CU(k_sample(&a, 0));
    auto got = out.get();
    for (size_t i = 0; i < rows.size(); i++) {
        int r = rows[i].row;
        if (r < row0)
            continue;
        n++;
        double logprob = (double)raw[i] - got[r].lse;
        if (got[r].sampled_id != want[i] || fabs(got[r].sampled_logprob - logprob) > 1e-5) {
            if (n_wrong++ < 5)
                printf("row %d: %d, not %d; logprob %g, not %g\n", r, got[r].sampled_id,
                       want[i], got[r].sampled_logprob, logprob);
        }
    }
    for (int r = std::max(row0, 1) | 1; r < R; r += 2)
        n_wrong += got[r].sampled_id != -1;
    result(n_wrong == 0 && n > 0, "sample vocab %d, %d rows from %d%s, %d adjusted: %d wrong",
           vocab, n, row0, has_ties ? ", ties" : "", n_adjusted, n_wrong);
}

int main(int argc, char **argv)
{
    small = argc > 1 && !strcmp(argv[1], "small");
    struct k_device dev;
    if (!gpu_open("test_sample", &dev))
        return 0;
    printf("# seed %llu\n", (unsigned long long)state);
    int sizes[] = {1, 2, 5, 513, 2048, 20000, 248320};
    for (int vocab : sizes) {
        if (small && vocab > 3000)
            break;
        for (int round = 0; round < (small ? 1 : 3); round++)
            test_draws(vocab, small ? 8 : 128, round * 5, round == 1);
    }
    printf("%s test_sample: %d failed\n", n_failed ? "FAIL" : "pass", n_failed);
    return n_failed != 0;
}
