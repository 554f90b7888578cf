/* Shared-memory tiles and warp-level products of the GDN kernels.
 *
 * A tile is 64 rows of 64 bf16 (128 bytes a row, 8 KB, 1024-byte aligned); the 16-byte unit u
 * of row r lies at u ^ (r & 7): the 128-byte swizzle of TMA and wgmma, and free of bank
 * conflicts for ldmatrix and for stores in accumulator layout. A [64, 128] matrix is two tiles.
 *
 * Accumulator layout, 16 rows a warp: acc[nt][0..3] are (row g, columns 8 nt + 2 t, + 1) and
 * (row g + 8, the same columns), g = lane / 4, t = lane % 4. Two neighbours packed to bf16 are
 * an A operand: no shuffles between dependent products. wgmma has the same layout for each
 * warp.
 * All products sum over k in ascending steps of 16. */
#ifndef PREFILLD_TILE_CUH
#define PREFILLD_TILE_CUH

#include "common.cuh"

enum { TILE_BYTES = 8192 };

__device__ static inline uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static inline uint32_t tile_off(int row, int unit)
{
    return (uint32_t)(row * 128 + ((unit ^ (row & 7)) << 4));
}

__device__ static inline void ldsm4(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

__device__ static inline void ldsm4_t(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

/* The 8x8 matrix of the warp, transposed. */
__device__ static inline uint32_t movm_t(uint32_t x)
{
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

__device__ static inline void mma16816(float c[4], const uint32_t a[4], uint32_t b0,
                                       uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ static inline void cp16(uint32_t dst, const void *src, bool live)
{
    int n = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n)
                 : "memory");
}

__device__ static inline void cp_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ static inline void cp_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ static inline void st_shared2(uint32_t addr, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(x) : "memory");
}

/* 128 threads; its warps may stand at different copies of the call. */
__device__ static inline void group_sync(int barrier)
{
    asm volatile("barrier.sync %0, 128;" ::"r"(barrier) : "memory");
}

/* Rows n .. 63 of `tiles` consecutive tiles become zeros; n_threads threads, this one `t`. */
__device__ static inline void zero_rows(uint8_t *at, int tiles, int n, int t, int n_threads)
{
    for (int i = t; i < tiles * (64 - n) * 8; i += n_threads) {
        int tile = i / ((64 - n) * 8), unit = i % ((64 - n) * 8);
        *(uint4 *)(at + tile * TILE_BYTES + n * 128 + unit * 16) = make_uint4(0, 0, 0, 0);
    }
}

/* Accumulator columns 16 ks .. 16 ks + 15 as the A operand of step ks. */
__device__ static inline void frag_pack(uint32_t a[4], const float c0[4], const float c1[4])
{
    a[0] = pack2(c0[0], c0[1]);
    a[1] = pack2(c0[2], c0[3]);
    a[2] = pack2(c1[0], c1[1]);
    a[3] = pack2(c1[2], c1[3]);
}

/* acc[16 rows, 64] += A[16 rows, 16 KS] B^T; B is [64, 16 KS] in tiles of 64 columns. */
template <int KS>
__device__ static inline void mm_kmajor(float acc[8][4], const uint32_t a[KS][4], uint32_t tile)
{
    int lane = threadIdx.x & 31, m = lane >> 3;
    int row = (m >> 1) * 8 + (lane & 7);
#pragma unroll
    for (int ks = 0; ks < KS; ks++) {
        uint32_t base = tile + (ks >> 2) * TILE_BYTES;
#pragma unroll
        for (int np = 0; np < 4; np++) {
            uint32_t b[4];
            ldsm4(b, base + tile_off(np * 16 + row, 2 * (ks & 3) + (m & 1)));
            mma16816(acc[2 * np], a[ks], b[0], b[1]);
            mma16816(acc[2 * np + 1], a[ks], b[2], b[3]);
        }
    }
}

/* acc[16 rows, 128] += A[16 rows, 64] B; B is [64, 128] in two tiles. */
__device__ static inline void mm_nmajor(float acc[16][4], const uint32_t a[4][4], uint32_t tile)
{
    int lane = threadIdx.x & 31, m = lane >> 3;
    int row = (m & 1) * 8 + (lane & 7);
#pragma unroll
    for (int ks = 0; ks < 4; ks++) {
#pragma unroll
        for (int np = 0; np < 8; np++) {
            uint32_t b[4];
            ldsm4_t(b, tile + (np >> 2) * TILE_BYTES +
                           tile_off(ks * 16 + row, (np & 3) * 2 + (m >> 1)));
            mma16816(acc[2 * np], a[ks], b[0], b[1]);
            mma16816(acc[2 * np + 1], a[ks], b[2], b[3]);
        }
    }
}

#endif
