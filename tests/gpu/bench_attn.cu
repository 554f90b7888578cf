/* Attention at 16 query and 2 KV heads (and 24 and 4, the 27B's), pages of 64: median of 40
 * launches. TFLOP/s counts 4 * D * HQ for each (query, key) pair that the causal mask leaves;
 * bytes are not the limit. */
#include "gpu.cuh"

static struct k_device dev;

static void bench(const char *name, const std::vector<int> &lens, const std::vector<int> &start,
                  int HQ = 16, int HK = 2)
{
    const int D = 256, ld = (2 * HQ + 2 * HK) * D;
    int n = (int)lens.size(), max_pages = 0, n_pages = 0;
    double pairs = 0;
    for (int i = 0; i < n; i++) {
        max_pages = std::max(max_pages, (start[i] + lens[i] + 63) / 64);
        pairs += (double)lens[i] * start[i] + 0.5 * lens[i] * (lens[i] + 1.0);
    }
    std::vector<int32_t> table((size_t)n * max_pages);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (start[i] + lens[i] + 63) / 64; j++)
            table[(size_t)i * max_pages + j] = n_pages++;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (start[i] + lens[i] + 63) / 64; j++)
            table[(size_t)i * max_pages + j] =
                (int32_t)((table[(size_t)i * max_pages + j] * 7919ll) % n_pages);
    batch_dev b;
    b.make(lens, start, std::vector<int>(n, 0));
    dbuf<bf16> p((size_t)b.b.n_tokens * ld), o((size_t)b.b.n_tokens * HQ * D);
    dbuf<bf16> k((size_t)n_pages * HK * 64 * D), v((size_t)n_pages * HK * 64 * D);
    dbuf<int32_t> t(table.size());
    dbuf<float> w(D), f(32);
    t.put(table);
    fill_normal(p, 1, 1), fill_normal(k, 2, 1), fill_normal(v, 3, 1);
    fill_normal(w, 4, 1), fill_normal(f, 5, 1);
    struct k_kv_pages kv = {n_pages, 64, max_pages, t.p, k.p, v.p};
    struct k_attn_prep pa = {};
    pa.b = b.b, pa.d = {HQ, HK, D, 64, ld}, pa.kv = kv, pa.eps = 1e-6f, pa.p = p.p;
    pa.q_norm = w.p, pa.k_norm = w.p, pa.inv_freq = f.p;
    double prep = median_ms([&] { CU(k_attn_prep(&pa, 0)); });
    double bytes = (double)b.b.n_tokens * (2 * HQ + 4 * HK) * D * 2;
    fill_normal(p, 1, 1);
    struct k_attn a = {};
    a.dev = &dev, a.b = b.b, a.d = pa.d, a.kv = kv, a.p = p.p, a.o = o.p;
    printf("%-14s", name);
    for (int body = K_ATTN_PORTABLE; body <= (dev.cc == 90 ? K_ATTN_HOPPER : K_ATTN_PORTABLE);
         body++) {
        a.body = body;
        double ms = median_ms([&] { CU(k_attn(&a, 0)); });
        printf("  %s %8.4f ms %6.1f TFLOP/s", body == K_ATTN_HOPPER ? "hopper" : "portable", ms,
               4.0 * D * HQ * pairs / ms / 1e9);
    }
    printf("  prep %7.4f ms %5.2f x copy time\n", prep, prep / (bytes / 4.28e9));
    fflush(stdout);
}

int main(void)
{
    if (!gpu_open("bench_attn", &dev))
        return 0;
    bench("1 x 2048", {2048}, {0});
    bench("1 x 8192", {8192}, {0});
    bench("1 x 32768", {32768}, {0});
    bench("8 x 1024", std::vector<int>(8, 1024), std::vector<int>(8, 0));
    bench("8192 mixed", {1713, 640, 64, 3, 2900, 128, 2744}, std::vector<int>(7, 0));
    bench("2048 at 30720", {2048}, {30720});
    bench("1 x 8192, 24/4", {8192}, {0}, 24, 4);
    return 0;
}
