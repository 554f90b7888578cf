/* One problem of the gated delta rule on the device, its f64 references, and its comparison. */
#ifndef PREFILLD_TESTS_GDN_CASE_CUH
#define PREFILLD_TESTS_GDN_CASE_CUH

#include "gpu.cuh"

/* The recurrence token by token in f64 (gdn.md 1.1, step 6), a block a (sequence, value head),
 * a thread a column of V. S [N, HV, V, K] in and out, o [T, HV, V]. */
__global__ static void gdn_ref_kernel(struct k_batch b, int H, int HV, const bf16 *q,
                                      const bf16 *k, const bf16 *v, const float *g,
                                      const float *beta, double *S, double *o)
{
    extern __shared__ double sm[];
    double *s = sm, *kk = sm + 128 * 128, *qq = kk + 128;
    int seq = blockIdx.x / HV, h = blockIdx.x % HV, kh = h / (HV / H), c = threadIdx.x;
    double *pool = S + ((size_t)blockIdx.x * 128 + c) * 128;
    for (int i = 0; i < 128; i++)
        s[i * 128 + c] = pool[i];
    for (size_t t = b.cu_seqlens[seq]; t < (size_t)b.cu_seqlens[seq + 1]; t++) {
        __syncthreads();
        kk[c] = (double)(float)k[(t * H + kh) * 128 + c];
        qq[c] = (double)(float)q[(t * H + kh) * 128 + c];
        __syncthreads();
        double e = exp((double)g[t * HV + h]), r = 0, out = 0;
        for (int i = 0; i < 128; i++)
            r += (s[i * 128 + c] *= e) * kk[i];
        double d = beta[t * HV + h] * ((double)(float)v[(t * HV + h) * 128 + c] - r);
        for (int i = 0; i < 128; i++)
            out += (s[i * 128 + c] += kk[i] * d) * qq[i];
        o[(t * HV + h) * 128 + c] = out;
    }
    for (int i = 0; i < 128; i++)
        pool[i] = s[i * 128 + c];
}

struct gdn_case {
    int H, HV;
    std::vector<int> lens, start, slot;
    int n_slots = 0;
    int n_more = 0; /* slots that no sequence has; set before make */
    batch_dev batch;
    dbuf<bf16> q, k, v, o;
    dbuf<float> g, beta, S, S0;
    dbuf<uint8_t> work;

    /* Sequence i continues a state when i is odd (or start says so); slots are spread. */
    void make(int H_, int HV_, const std::vector<int> &lens_, int gates, uint64_t seed,
              float common = 0)
    {
        H = H_, HV = HV_, lens = lens_;
        int n = (int)lens.size();
        n_slots = n + 3 + n_more;
        start.resize(n), slot.resize(n);
        for (int i = 0; i < n; i++)
            start[i] = i & 1 ? 64 : 0, slot[i] = (i * 5 + 1) % n_slots;
        if (n_slots % 5 == 0)
            for (int i = 0; i < n; i++)
                slot[i] = i + 1;
        batch.make(lens, start, slot);
        size_t T = batch.b.n_tokens;
        q.make(T * H * 128 + 1), k.make(T * H * 128 + 1), v.make(T * HV * 128 + 1);
        o.make(T * HV * 128 + 1), g.make(T * HV + 1), beta.make(T * HV + 1);
        S.make((size_t)n_slots * HV * 16384), S0.make(S.n);
        work.make(k_gdn_delta_work_bytes(batch.b.n_chunks, HV) + 128);
        fill(gates, seed, common);
    }

    void fill(int gates, uint64_t seed, float common = 0)
    {
        size_t T = batch.b.n_tokens;
        if (T > 0) {
            fill_unit_kernel<<<T * H, 128>>>(q.p, H, seed, 0.08838834764f, 0);
            fill_unit_kernel<<<T * H, 128>>>(k.p, H, seed + 1, 1.0f, common);
            fill_normal_kernel<<<1024, 256>>>(v.p, T * HV * 128, seed + 2, 1.0f);
            fill_gates_kernel<<<1024, 256>>>(g.p, beta.p, T * HV, HV, seed + 3, gates);
        }
        fill_normal(S0, seed + 5, 0.5f);
        CU(cudaGetLastError());
    }

    struct k_gdn_delta args(const struct k_device *dev, int body)
    {
        struct k_gdn_delta a = {};
        a.dev = dev, a.b = batch.b;
        a.d.H = H, a.d.HV = HV, a.d.n_slots = n_slots, a.d.ld = 8;
        a.q = q.p, a.k = k.p, a.v = v.p, a.g = g.p, a.beta = beta.p;
        a.S = S.p, a.o = o.p, a.work = work.p, a.body = body;
        return a;
    }

    /* Outputs and workspace poisoned; fresh sequences' slots hold NaN. */
    void run(const struct k_device *dev, int body)
    {
        o.poison(), work.poison(), S.poison();
        CU(k_gdn_work_init(work.p, work.n, 0));
        size_t slot_n = (size_t)HV * 16384;
        for (size_t i = 0; i < lens.size(); i++)
            if (start[i])
                CU(cudaMemcpy(S.p + slot[i] * slot_n, S0.p + slot[i] * slot_n,
                              slot_n * sizeof(float), cudaMemcpyDeviceToDevice));
        struct k_gdn_delta a = args(dev, body);
        CU(k_gdn_delta(&a, 0));
        CU(cudaDeviceSynchronize());
    }

    std::vector<float> state(int seq)
    {
        return S.get((size_t)slot[seq] * HV * 16384, (size_t)HV * 16384);
    }

    void reference(std::vector<double> *o_ref, std::vector<double> *S_ref)
    {
        size_t n = lens.size(), slot_n = (size_t)HV * 16384, T = batch.b.n_tokens;
        dbuf<double> rs(n * slot_n), ro(T * HV * 128 + 1);
        std::vector<double> s(n * slot_n, 0.0);
        for (size_t i = 0; i < n; i++)
            if (start[i]) {
                std::vector<float> f = S0.get(slot[i] * slot_n, slot_n);
                for (size_t j = 0; j < slot_n; j++)
                    s[i * slot_n + j] = f[j];
            }
        rs.put(s);
        int smem = (128 * 128 + 256) * 8;
        CU(cudaFuncSetAttribute(gdn_ref_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                smem));
        gdn_ref_kernel<<<(unsigned)(n * HV), 128, smem>>>(batch.b, H, HV, q.p, k.p, v.p, g.p,
                                                          beta.p, rs.p, ro.p);
        CU(cudaDeviceSynchronize());
        *o_ref = ro.get(0, T * HV * 128);
        *S_ref = rs.get();
    }
};

static const char *body_name(int body)
{
    static const char *const names[] = {"auto", "portable", "split", "fused"};
    return names[body];
}

#endif
