/* A libcublasLt.so that stands before the real one and breaks it when asked to: once the file
 * that FAULTY_LT_WHEN names exists, products are written to an address that no device has. What
 * a process meets then is a fault of its device, in a step. FAULTY_LT_REAL: the real library's
 * path. tests/gpu/lost.py runs the daemon with it. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *real(const char *name)
{
    static void *lib;
    if (!lib)
        lib = dlopen(getenv("FAULTY_LT_REAL"), RTLD_NOW | RTLD_LOCAL);
    void *f = lib ? dlsym(lib, name) : NULL;
    if (!f) {
        fprintf(stderr, "faulty_lt: %s: %s\n", name, dlerror());
        abort();
    }
    return f;
}

/* A function of the library that passes its arguments on. */
#define FORWARD(result, name, parameters, arguments)                                           \
    result name parameters                                                                     \
    {                                                                                          \
        static result(*f) parameters;                                                          \
        if (!f)                                                                                \
            *(void **)&f = real(#name);                                                        \
        return f arguments;                                                                    \
    }

FORWARD(size_t, cublasLtGetVersion, (void), ())
FORWARD(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t * h), (h))
FORWARD(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t h), (h))
FORWARD(const char *, cublasLtGetStatusString, (cublasStatus_t s), (s))
FORWARD(cublasStatus_t, cublasLtMatmulDescInit_internal,
        (cublasLtMatmulDesc_t d, size_t n, cublasComputeType_t c, cudaDataType_t t),
        (d, n, c, t))
FORWARD(cublasStatus_t, cublasLtMatmulDescSetAttribute,
        (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *p, size_t n),
        (d, a, p, n))
FORWARD(cublasStatus_t, cublasLtMatrixLayoutInit_internal,
        (cublasLtMatrixLayout_t m, size_t n, cudaDataType t, uint64_t rows, uint64_t cols,
         int64_t ld),
        (m, n, t, rows, cols, ld))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceInit_internal,
        (cublasLtMatmulPreference_t p, size_t n), (p, n))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute,
        (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void *v,
         size_t n),
        (p, a, v, n))
FORWARD(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,
        (cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
         cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
         cublasLtMatmulPreference_t p, int n, cublasLtMatmulHeuristicResult_t *r, int *found),
        (h, d, a, b, c, out, p, n, r, found))
FORWARD(cublasStatus_t, cublasLtMatmulAlgoCheck,
        (cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
         cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
         const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *r),
        (h, d, a, b, c, out, algo, r))

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *out,
                              cublasLtMatrixLayout_t out_layout,
                              const cublasLtMatmulAlgo_t *algo, void *work, size_t work_bytes,
                              cudaStream_t stream)
{
    static cublasStatus_t (*f)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *,
                               const void *, cublasLtMatrixLayout_t, const void *,
                               cublasLtMatrixLayout_t, const void *, const void *,
                               cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t,
                               const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t);
    if (!f)
        *(void **)&f = real("cublasLtMatmul");
    if (access(getenv("FAULTY_LT_WHEN"), F_OK) == 0)
        c = out = (void *)0x1000;
    return f(h, d, alpha, a, a_layout, b, b_layout, beta, c, c_layout, out, out_layout, algo,
             work, work_bytes, stream);
}
