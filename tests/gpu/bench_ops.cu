/* The row-wise kernels against copy bandwidth (4.28 TB/s, ../shared/peers.md): median of 40
 * event-timed launches over rotated buffers of more than the L2. */
#include "gpu.cuh"

static void line(const char *name, double ms, double bytes)
{
    double floor_ms = bytes / 4.28e9;
    printf("%-28s %8.4f ms  %7.0f GB/s  %5.2f x copy time\n", name, ms, bytes / ms / 1e6,
           ms / floor_ms);
    fflush(stdout);
}

int main(void)
{
    struct k_device dev;
    if (!gpu_open("bench_ops", &dev))
        return 0;
    const int T = 32768, H = 16, HV = 32, M = 2048, cd = (2 * H + HV) * 128;
    const int ld = cd + HV * 128 + 2 * HV;
    {
        batch_dev m;
        m.make(std::vector<int>(8, T / 8), std::vector<int>(8, 0), {0, 1, 2, 3, 4, 5, 6, 7});
        dbuf<bf16> p((size_t)T * ld), q((size_t)T * H * 128), k((size_t)T * H * 128);
        dbuf<bf16> v((size_t)T * HV * 128), st((size_t)8 * 3 * cd);
        dbuf<float> w(cd * 4), al(HV), dt(HV), g((size_t)T * HV), be((size_t)T * HV);
        fill_normal(p, 1, 1), fill_normal(w, 2, 1), fill_normal(al, 3, 1),
            fill_normal(dt, 4, 1);
        struct k_gdn_conv a = {};
        a.b = m.b, a.d.H = H, a.d.HV = HV, a.d.ld = ld, a.d.n_slots = 8;
        a.p = p.p, a.conv_w = w.p, a.A_log = al.p, a.dt_bias = dt.p, a.conv_state = st.p;
        a.q = q.p, a.k = k.p, a.v = v.p, a.g = g.p, a.beta = be.p;
        line("gdn_conv 32768 x 16/32", median_ms([&] { CU(k_gdn_conv(&a, 0)); }),
             (double)T * (4.0 * cd + 12.0 * HV));
        struct k_gdn_norm n = {T, HV, ld, 1e-6f, p.p + cd, w.p, v.p};
        line("gdn_norm 32768 x 32", median_ms([&] { CU(k_gdn_norm(&n, 0)); }),
             (double)T * HV * 128 * 6);
        struct k_chunk_map c = {m.b};
        printf("chunk_map 8 sequences         %8.4f ms\n",
               median_ms([&] { CU(k_chunk_map(&c, 0)); }));
    }
    {
        batch_dev m;
        m.make(std::vector<int>(4096, 2), std::vector<int>(4096, 0), std::vector<int>(4096, 0));
        struct k_chunk_map c = {m.b};
        printf("chunk_map 4096 sequences      %8.4f ms\n",
               median_ms([&] { CU(k_chunk_map(&c, 0)); }));
    }
    dbuf<float> x((size_t)T * M), w(M);
    dbuf<bf16> y((size_t)T * M), h((size_t)T * M), gu((size_t)T * 2 * 3584),
        c((size_t)T * 3584);
    fill_normal(x, 5, 1), fill_normal(y, 6, 1e-3f), fill_normal(w, 7, 1), fill_normal(gu, 8, 1);
    struct k_rmsnorm r = {T, M, 1e-6f, x.p, y.p, w.p, h.p};
    line("rmsnorm + sum 32768 x 2048", median_ms([&] { CU(k_rmsnorm(&r, 0)); }),
         (double)T * M * 12);
    struct k_swiglu s = {T, 3584, gu.p, c.p};
    line("swiglu 32768 x 3584", median_ms([&] { CU(k_swiglu(&s, 0)); }), (double)T * 3584 * 6);
    return 0;
}
