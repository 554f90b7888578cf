/* A layer of experts as the 35B-A3B has it (E 256, top 8, M 2048, F 512), operation by
 * operation: median of 40 launches. The weights (1.6 GB) are far more than the L2. GB/s counts
 * the weights of the experts that have rows, rows in and rows out once. */
#include "gpu.cuh"

static struct k_device dev;

static void line(int T, const char *name, double ms, double flop, double bytes)
{
    printf("%6d tokens  %-10s %8.4f ms", T, name, ms);
    if (flop > 0)
        printf("  %6.1f TFLOP/s", flop / ms / 1e9);
    printf("  %6.0f GB/s\n", bytes / ms / 1e6);
    fflush(stdout);
}

static void bench(int body, int T, const dbuf<bf16> &w1, const dbuf<bf16> &w2)
{
    const int E = 256, k = 8, M = 2048, F = 512;
    size_t places = (size_t)T * k;
    dbuf<float> logits((size_t)T * E), weights(places), gate(M);
    dbuf<int32_t> ids(places);
    dbuf<uint8_t> work(k_moe_list_bytes(T, k, E));
    dbuf<bf16> h((size_t)T * M), mid(places * F), down(places * M), shared((size_t)T * M);
    dbuf<bf16> y((size_t)T * M);
    fill_normal(logits, 1, 1), fill_normal(h, 2, 1), fill_normal(shared, 3, 1);
    fill_normal(gate, 4, 0.02f);
    struct k_moe_list list;
    k_moe_list_make(&list, work.p, T, k, E);
    struct k_moe_route r = {T, E, k, 1, logits.p, ids.p, weights.p};
    struct k_moe_sort s = {list, ids.p};
    struct k_moe_gemm up = {&dev, body, list, 1, 1, 2 * F, M, h.p, w1.p, mid.p};
    struct k_moe_gemm dn = {&dev, body, list, 0, 0, M, F, mid.p, w2.p, down.p};
    struct k_moe_combine c = {list, M, weights.p, down.p, shared.p, h.p, gate.p, y.p};
    double t_route = median_ms([&] { CU(k_moe_route(&r, 0)); });
    double t_sort = median_ms([&] { CU(k_moe_sort(&s, 0)); });
    double t_up = median_ms([&] { CU(k_moe_gemm(&up, 0)); });
    double t_dn = median_ms([&] { CU(k_moe_gemm(&dn, 0)); });
    double t_sum = median_ms([&] { CU(k_moe_combine(&c, 0)); });
    auto chosen = ids.get();
    std::vector<char> used(E, 0);
    int n_used = 0;
    for (int id : chosen)
        n_used += !used[id]++;
    line(T, "route", t_route, 0, (double)T * (E + 2 * k) * 4);
    line(T, "sort", t_sort, 0, places * 12.0);
    line(T, "gate_up", t_up, 4.0 * places * F * M,
         2.0 * ((double)n_used * 2 * F * M + (double)T * M + places * F));
    line(T, "down", t_dn, 2.0 * places * F * M,
         2.0 * ((double)n_used * F * M + places * F + (double)places * M));
    line(T, "combine", t_sum, 0, 2.0 * ((double)places * M + 3.0 * T * M));
    double all = t_route + t_sort + t_up + t_dn + t_sum;
    printf("%6d tokens  %-10s %8.4f ms  %6.1f TFLOP/s\n", T, "all", all,
           6.0 * places * F * M / all / 1e9);
}

int main(void)
{
    if (!gpu_open("bench_moe", &dev))
        return 0;
    dbuf<bf16> w1((size_t)256 * 1024 * 2048), w2((size_t)256 * 2048 * 512);
    CU(k_fill_normal(w1.p, (int64_t)w1.n, 0, 5, 0.02f, 0));
    CU(k_fill_normal(w2.p, (int64_t)w2.n, 0, 6, 0.04f, 0));
    for (int body = K_MOE_PORTABLE; body <= (dev.cc == 90 ? K_MOE_HOPPER : K_MOE_PORTABLE);
         body++) {
        printf("%s products\n", body == K_MOE_HOPPER ? "hopper" : "portable");
        for (int T : {64, 1024, 8192, 32768})
            bench(body, T, w1, w2);
    }
    const int R = 1024, vocab = 248320;
    dbuf<float> logits((size_t)R * vocab);
    dbuf<int32_t> targets(R), top(R);
    dbuf<struct k_row_result> out(R);
    fill_normal(logits, 7, 3);
    targets.put(std::vector<int32_t>(R, 17)), top.put(std::vector<int32_t>(R, 20));
    struct k_head_reduce a = {R, vocab, vocab, logits.p, targets.p, top.p, out.p};
    double ms = median_ms([&] { CU(k_head_reduce(&a, 0)); });
    double bytes = 4.0 * R * vocab;
    printf("head_reduce 1024 x 248320, top 20 %8.4f ms  %6.0f GB/s  %5.2f x copy time\n", ms,
           bytes / ms / 1e6, ms / (bytes / 4.28e9));
    return 0;
}
