/* Small products of two f32 matrices on the calling thread. */
#include "cpu.h"

size_t cpu_mm_scratch_bytes(int32_t m, int32_t n, int32_t k)
{
    (void)m;
    (void)n;
    (void)k;
    return 64;
}

void cpu_mm(enum cpu_mm_mode mode, bool ta, bool tb, int32_t m, int32_t n, int32_t k,
            const float *A, int64_t lda, const float *B, int64_t ldb, float *C, int64_t ldc,
            void *scratch)
{
    (void)scratch;
    for (int32_t i = 0; i < m; i++) {
        for (int32_t j = 0; j < n; j++) {
            float sum = 0;
            for (int32_t l = 0; l < k; l++) {
                float a = ta ? A[l * lda + i] : A[i * lda + l];
                float b = tb ? B[j * ldb + l] : B[l * ldb + j];
                sum += a * b;
            }
            float *c = &C[i * ldc + j];
            *c = mode == CPU_MM_SET ? sum : mode == CPU_MM_ADD ? *c + sum : *c - sum;
        }
    }
}
