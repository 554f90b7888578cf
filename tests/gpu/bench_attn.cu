/* Attention at 16 query and 2 KV heads (and 24 and 4, the 27B's), pages of 64: median of 40
 * launches. The card rests for half a second before each: its clock falls under load. "whole":
 * a block does all segments of its rows, whatever the number of rows. TFLOP/s counts 4 * D * HQ
 * for each (query, key) pair that the causal mask leaves; bytes are not the limit. */
#include <unistd.h>

#include "gpu.cuh"

static struct k_device dev;
static const char *wanted;

static void bench(const char *name, const std::vector<int> &lens, const std::vector<int> &start,
                  int HQ = 16, int HK = 2)
{
    if (wanted && !strstr(name, wanted))
        return;
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
    dbuf<uint8_t> work(k_attn_work_bytes(dev.n_sms, b.b.n_chunks, HQ));
    a.dev = &dev, a.b = b.b, a.d = pa.d, a.kv = kv, a.p = p.p, a.o = o.p, a.work = work.p;
    const char *names[] = {"portable", "hopper", "hopper whole"};
    printf("%-18s", name);
    for (int i = 0; i < (dev.cc == 90 ? 3 : 1); i++) {
        a.body = i ? K_ATTN_HOPPER : K_ATTN_PORTABLE, a.whole = i == 2;
        usleep(500000);
        double ms = median_ms([&] { CU(k_attn(&a, 0)); });
        printf("  %s %8.4f ms %6.1f TFLOP/s", names[i], ms, 4.0 * D * HQ * pairs / ms / 1e9);
    }
    printf("  prep %7.4f ms %5.2f x copy time\n", prep, prep / (bytes / 4.28e9));
    fflush(stdout);
}

int main(int argc, char **argv)
{
    wanted = argc > 1 ? argv[1] : NULL;
    if (!gpu_open("bench_attn", &dev))
        return 0;
    bench("1 x 2048", {2048}, {0});
    bench("1 x 8192", {8192}, {0});
    bench("1 x 32768", {32768}, {0});
    bench("8 x 1024", std::vector<int>(8, 1024), std::vector<int>(8, 0));
    bench("8192 mixed", {1713, 640, 64, 3, 2900, 128, 2744}, std::vector<int>(7, 0));
    bench("2048 at 30720", {2048}, {30720});
    bench("1 x 8192, 24/4", {8192}, {0}, 24, 4);
    bench("1 at 32000", {1}, {32000});
    bench("20 at 32000", {20}, {32000});
    bench("200 at 32000", {200}, {32000});
    bench("200 at 8192", {200}, {8192});
    bench("20 at 130000", {20}, {130000});
    bench("200 at 130000", {200}, {130000});
    bench("it and 7 x 1024", {200, 1024, 1024, 1024, 1024, 1024, 1024, 1024},
          {32000, 0, 0, 0, 0, 0, 0, 0});
    bench("64 x 1 at 8000", std::vector<int>(64, 1), std::vector<int>(64, 8000));
    return 0;
}
