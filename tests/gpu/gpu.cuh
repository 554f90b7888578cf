/* What the GPU tests and benchmarks share: results in words, device buffers with poison around
 * them, deterministic random tensors made on the device, packed batches. */
#ifndef PREFILLD_TESTS_GPU_CUH
#define PREFILLD_TESTS_GPU_CUH

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "../../kernels/kernels.h"
#include "../rng.h"

typedef __nv_bfloat16 bf16;

static int n_failed;

#define CU(call)                                                                               \
    do {                                                                                       \
        cudaError_t e_ = (call);                                                               \
        if (e_ != cudaSuccess) {                                                               \
            printf("FAIL %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));  \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

__attribute__((format(printf, 2, 3), unused)) static bool result(bool ok, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    printf("%s ", ok ? "pass" : "FAIL");
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    fflush(stdout);
    n_failed += !ok;
    return ok;
}

/* False, and says so, on a machine without a usable GPU. */
static bool gpu_open(const char *what, struct k_device *dev)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) {
        printf("skip %s: no CUDA device (%s)\n", what, cudaGetErrorString(e));
        return false;
    }
    CU(k_device_query(0, dev));
    cudaDeviceProp p;
    CU(cudaGetDeviceProperties(&p, 0));
    printf("# %s on %s, cc %d, %d SMs\n", what, p.name, dev->cc, dev->n_sms);
    return true;
}

/* n elements and 64 KB after them, all bytes 0xff: NaN as bf16 and f32, -1 as int32. */
template <class T> struct dbuf {
    T *p = NULL;
    size_t n = 0;
    explicit dbuf(size_t n_ = 0)
    {
        if (n_)
            make(n_);
    }
    dbuf(const dbuf &) = delete;
    ~dbuf()
    {
        cudaFree(p);
    }
    void make(size_t n_)
    {
        cudaFree(p);
        n = n_;
        CU(cudaMalloc((void **)&p, n * sizeof(T) + 65536));
        poison();
    }
    void poison()
    {
        CU(cudaMemset(p, 0xff, n * sizeof(T) + 65536));
    }
    void put(const std::vector<T> &h)
    {
        CU(cudaMemcpy(p, h.data(), h.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get(size_t from, size_t count) const
    {
        std::vector<T> h(count);
        CU(cudaMemcpy(h.data(), p + from, count * sizeof(T), cudaMemcpyDeviceToHost));
        return h;
    }
    std::vector<T> get() const
    {
        return get(0, n);
    }
};

__device__ static inline uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ static inline float normal_at(uint64_t seed, uint64_t i)
{
    uint64_t z = mix64(seed * 0x9e3779b97f4a7c15ull + i * 0xd1342543de82ef95ull + 1);
    float u = ((uint32_t)z + 1.0f) * 2.3283064e-10f, v = (uint32_t)(z >> 32) * 2.3283064e-10f;
    return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}

template <class T>
__global__ static void fill_normal_kernel(T *p, size_t n, uint64_t seed, float s)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = (T)(s * normal_at(seed, i));
}

template <class T> static void fill_normal(dbuf<T> &b, uint64_t seed, float scale)
{
    fill_normal_kernel<<<1024, 256>>>(b.p, b.n, seed, scale);
    CU(cudaGetLastError());
}

/* Rows of 128, normalised to `scale`; `common` adds a vector shared by the head's rows. */
__global__ static void fill_unit_kernel(bf16 *p, int heads, uint64_t seed, float scale,
                                        float common)
{
    size_t row = blockIdx.x;
    int head = row % heads;
    float x = normal_at(seed, row * 128 + threadIdx.x) +
              common * normal_at(seed ^ 77, head * 128 + threadIdx.x);
    __shared__ float part[4];
    float s = x * x;
    for (int m = 16; m; m >>= 1)
        s += __shfl_xor_sync(~0u, s, m);
    if ((threadIdx.x & 31) == 0)
        part[threadIdx.x >> 5] = s;
    __syncthreads();
    s = part[0] + part[1] + part[2] + part[3];
    p[row * 128 + threadIdx.x] = (bf16)(x * rsqrtf(s + 1e-6f) * scale);
}

/* kind 0: log sigmoid(normal) (forgets fast); 1: every fourth head hardly forgets, the others
 * slowly; 2: no decay; 3: 0 and -100 in turns. beta = sigmoid(normal), or near 1 for kind 2. */
__global__ static void fill_gates_kernel(float *g, float *beta, size_t n, int HV, uint64_t seed,
                                         int kind)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        float x = normal_at(seed, i), y = normal_at(seed + 1, i);
        float ls = -log1pf(expf(-x));
        int h = i % HV;
        g[i] = kind == 0   ? ls
               : kind == 1 ? ls * (h % 4 ? 0.05f : 1e-4f)
               : kind == 2 ? 0.0f
                           : ((i / HV) % 3 ? 0.0f : -100.0f);
        beta[i] = kind == 2 ? 0.9999f : 1.0f / (1.0f + expf(-y));
    }
}

/* A packed batch on the device with its chunk map. */
struct batch_dev {
    struct k_batch b;
    dbuf<int32_t> cu, start, slots, seq, index, tok, first, order, saves;

    /* With more tokens and chunks than the lengths have (kernels.h, struct k_batch). */
    void make(const std::vector<int> &lens, const std::vector<int> &start_,
              const std::vector<int> &slots_, int more_tokens = 0, int more_chunks = 0)
    {
        int n = (int)lens.size();
        std::vector<int32_t> c(n + 1, 0);
        b = {};
        for (int i = 0; i < n; i++) {
            c[i + 1] = c[i] + lens[i];
            b.n_chunks += (lens[i] + 63) / 64;
            b.max_len = lens[i] > b.max_len ? lens[i] : b.max_len;
        }
        b.n_tokens = c[n] + more_tokens;
        b.n_chunks += more_chunks;
        b.n_seqs = n;
        cu.make(n + 1), start.make(n + 1), slots.make(n + 1), first.make(n + 1);
        order.make(n + 1);
        seq.make(b.n_chunks + 1), index.make(b.n_chunks + 1), tok.make(b.n_chunks + 1);
        saves.make(b.n_chunks + 1);
        cu.put(c), start.put(start_), slots.put(slots_);
        save(std::vector<int32_t>(b.n_chunks, -1));
        b.cu_seqlens = cu.p, b.start = start.p, b.slots = slots.p;
        b.chunk_seq = seq.p, b.chunk_index = index.p, b.chunk_tok = tok.p;
        b.seq_first = first.p, b.seq_order = order.p;
        struct k_chunk_map m = {b};
        CU(k_chunk_map(&m, 0));
    }

    /* Keeps the state behind chunk i in slot list[i]. */
    void save(const std::vector<int32_t> &list)
    {
        saves.put(list);
        b.save_slots = saves.p;
    }
};

/* Median of 40 event-timed launches after 4 more. */
template <class F> static double median_ms(F launch)
{
    cudaEvent_t a, b;
    CU(cudaEventCreate(&a));
    CU(cudaEventCreate(&b));
    std::vector<float> ms;
    for (int i = -4; i < 40; i++) {
        CU(cudaEventRecord(a));
        launch();
        CU(cudaEventRecord(b));
        CU(cudaEventSynchronize(b));
        float f;
        CU(cudaEventElapsedTime(&f, a, b));
        if (i >= 0)
            ms.push_back(f);
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

template <class A, class B>
static double rel_error(const std::vector<A> &got, const std::vector<B> &ref)
{
    double d = 0, r = 0;
    for (size_t i = 0; i < ref.size(); i++) {
        double x = (double)(float)got[i], y = (double)ref[i];
        if (!(fabs(x) < 1e30))
            return NAN;
        d += (x - y) * (x - y);
        r += y * y;
    }
    return sqrt(d / (r + 1e-300));
}

#endif
