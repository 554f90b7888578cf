/* The gated delta rule in every shape of ../shared/peers.md: milliseconds, target, floor, ratio
 * to the better peer. One call a graph, replayed over rotated inputs; median and spread of 60.
 * The card rests for half a second before each: its clock falls under load, and a row's figure
 * should not follow from the rows before it.
 * Arguments: `bodies` times each body too; a head pair such as 16/32 picks one table, a step
 * such as 1x8192 its row. */
#include <algorithm>
#include <unistd.h>

#include "gdn_case.cuh"

struct row {
    const char *name;
    int H, HV;
    double peer, target, floor; /* ms; peer is the best of all columns */
    std::vector<int> lens;
};

static std::vector<int> rep(int n, int len)
{
    return std::vector<int>(n, len);
}

static const std::vector<int> MIX = {1713, 640, 64, 3, 2900, 128, 2744};

static std::vector<row> rows(void)
{
    return {
        {"1x131072", 16, 32, 2.529, 1.694, 0.884, {131072}},
        {"1x32768", 16, 32, 0.680, 0.456, 0.221, {32768}},
        {"1x16384", 16, 32, 0.397, 0.266, 0.111, {16384}},
        {"1x8192", 16, 32, 0.231, 0.155, 0.055, {8192}},
        {"1x4096", 16, 32, 0.146, 0.098, 0.028, {4096}},
        {"1x2048", 16, 32, 0.089, 0.060, 0.014, {2048}},
        {"1x512", 16, 32, 0.031, 0.021, 0.004, {512}},
        {"28672+4096", 16, 32, 0.705, 0.472, 0.221, {28672, 4096}},
        {"16384+16384", 16, 32, 0.722, 0.484, 0.221, {16384, 16384}},
        {"5000+3000", 16, 32, 0.231, 0.155, 0.054, {5000, 3000}},
        {"mix", 16, 32, 0.153, 0.103, 0.056, MIX},
        {"130+20+300", 16, 32, 0.024, 0.016, 0.006, {130, 20, 300}},
        {"8192x4", 16, 32, 0.375, 0.259, 0.221, rep(4, 8192)},
        {"4096x8", 16, 32, 0.383, 0.259, 0.221, rep(8, 4096)},
        {"2048x4", 16, 32, 0.104, 0.070, 0.055, rep(4, 2048)},
        {"1024x8", 16, 32, 0.113, 0.076, 0.055, rep(8, 1024)},
        {"300x32", 16, 32, 0.171, 0.115, 0.087, rep(32, 300)},
        {"512x64", 16, 32, 0.455, 0.305, 0.253, rep(64, 512)},
        {"1x131072", 16, 48, 5.036, 3.374, 1.327, {131072}},
        {"1x32768", 16, 48, 1.269, 0.850, 0.332, {32768}},
        {"1x8192", 16, 48, 0.362, 0.243, 0.083, {8192}},
        {"1x2048", 16, 48, 0.100, 0.067, 0.021, {2048}},
        {"1x512", 16, 48, 0.034, 0.023, 0.005, {512}},
        {"5000+3000", 16, 48, 0.232, 0.155, 0.082, {5000, 3000}},
        {"mix", 16, 48, 0.216, 0.145, 0.084, MIX},
        {"130+20+300", 16, 48, 0.033, 0.022, 0.008, {130, 20, 300}},
        {"4096x8", 16, 48, 0.574, 0.386, 0.332, rep(8, 4096)},
        {"1024x8", 16, 48, 0.163, 0.109, 0.083, rep(8, 1024)},
        {"512x64", 16, 48, 0.670, 0.449, 0.348, rep(64, 512)},
        {"1x131072", 16, 16, 1.283, 0.860, 0.506, {131072}},
        {"1x32768", 16, 16, 0.384, 0.257, 0.127, {32768}},
        {"1x8192", 16, 16, 0.146, 0.098, 0.032, {8192}},
        {"1x2048", 16, 16, 0.080, 0.054, 0.008, {2048}},
        {"1x512", 16, 16, 0.030, 0.020, 0.002, {512}},
        {"5000+3000", 16, 16, 0.155, 0.104, 0.032, {5000, 3000}},
        {"mix", 16, 16, 0.139, 0.093, 0.035, MIX},
        {"130+20+300", 16, 16, 0.023, 0.015, 0.003, {130, 20, 300}},
        {"4096x8", 16, 16, 0.197, 0.155, 0.130, rep(8, 4096)},
        {"1024x8", 16, 16, 0.061, 0.046, 0.036, rep(8, 1024)},
        {"512x64", 16, 16, 0.242, 0.186, 0.158, rep(64, 512)},
        {"1x131072", 2, 8, 0.697, 0.467, 0.221, {131072}},
        {"1x32768", 2, 8, 0.237, 0.159, 0.055, {32768}},
        {"1x8192", 2, 8, 0.114, 0.076, 0.014, {8192}},
        {"1x2048", 2, 8, 0.066, 0.044, 0.003, {2048}},
        {"1x512", 2, 8, 0.028, 0.019, 0.001, {512}},
        {"5000+3000", 2, 8, 0.114, 0.076, 0.014, {5000, 3000}},
        {"mix", 2, 8, 0.136, 0.091, 0.014, MIX},
        {"130+20+300", 2, 8, 0.022, 0.015, 0.001, {130, 20, 300}},
        {"4096x8", 2, 8, 0.188, 0.126, 0.055, rep(8, 4096)},
        {"1024x8", 2, 8, 0.055, 0.037, 0.014, rep(8, 1024)},
        {"512x64", 2, 8, 0.123, 0.082, 0.055, rep(64, 512)},
    };
}

struct timing {
    double median, p10, p90;
};

static struct timing time_body(const struct k_device *dev, std::vector<gdn_case *> &sets,
                               int body)
{
    const int reps = 60;
    cudaStream_t st;
    CU(cudaStreamCreate(&st));
    std::vector<cudaGraphExec_t> ex;
    for (gdn_case *c : sets) {
        cudaGraph_t graph;
        cudaGraphExec_t e;
        struct k_gdn_delta a = c->args(dev, body);
        CU(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
        CU(k_gdn_delta(&a, st));
        CU(cudaStreamEndCapture(st, &graph));
        CU(cudaGraphInstantiate(&e, graph, 0));
        CU(cudaGraphDestroy(graph));
        ex.push_back(e);
    }
    cudaEvent_t e0, e1;
    CU(cudaEventCreate(&e0));
    CU(cudaEventCreate(&e1));
    std::vector<double> ms;
    usleep(500000);
    for (int i = -5; i < reps; i++) {
        CU(cudaEventRecord(e0, st));
        CU(cudaGraphLaunch(ex[(i + 60) % ex.size()], st));
        CU(cudaEventRecord(e1, st));
        CU(cudaEventSynchronize(e1));
        float f;
        CU(cudaEventElapsedTime(&f, e0, e1));
        if (i >= 0)
            ms.push_back(f);
    }
    for (auto e : ex)
        cudaGraphExecDestroy(e);
    cudaEventDestroy(e0);
    cudaEventDestroy(e1);
    cudaStreamDestroy(st);
    std::sort(ms.begin(), ms.end());
    return {ms[reps / 2], ms[reps / 10], ms[reps * 9 / 10]};
}

int main(int argc, char **argv)
{
    struct k_device dev;
    if (!gpu_open("bench_gdn", &dev))
        return 0;
    bool each = false;
    const char *only = NULL, *step = NULL;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "bodies") == 0)
            each = true;
        else if (strchr(argv[i], '/'))
            only = argv[i];
        else
            step = argv[i];
    printf("heads  step           ms (p10..p90)           target  floor   peer    /peer "
           "/target%s\n",
           each ? "  split   fused" : "");
    for (const row &r : rows()) {
        char heads[16];
        snprintf(heads, sizeof heads, "%d/%d", r.H, r.HV);
        if ((only && strcmp(only, heads) != 0) || (step && strcmp(step, r.name) != 0))
            continue;
        std::vector<gdn_case *> sets;
        size_t tokens = 0;
        for (int n : r.lens)
            tokens += n;
        double bytes = (double)tokens * (r.H * 512 + r.HV * 512);
        int n_sets = std::max(1, std::min(12, (int)(3e8 / bytes) + 1));
        for (int i = 0; i < n_sets; i++) {
            sets.push_back(new gdn_case);
            sets.back()->make(r.H, r.HV, r.lens, i & 1, 100 + i);
            sets.back()->run(&dev, K_GDN_AUTO);
        }
        struct timing t = time_body(&dev, sets, K_GDN_AUTO);
        printf("%-6s %-12s %7.4f (%.4f..%.4f) %8.3f %6.3f %6.3f   %5.2f  %5.2f", heads, r.name,
               t.median, t.p10, t.p90, r.target, r.floor, r.peer, t.median / r.peer,
               t.median / r.target);
        if (each && dev.cc == 90)
            printf("  %7.4f  %7.4f", time_body(&dev, sets, K_GDN_SPLIT).median,
                   time_body(&dev, sets, K_GDN_FUSED).median);
        printf("\n");
        fflush(stdout);
        for (gdn_case *c : sets)
            delete c;
    }
    return 0;
}
