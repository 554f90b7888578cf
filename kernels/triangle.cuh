/* Products with a lower triangular [64, 64] matrix in tf32, halves of whose rows know nothing
 * of the columns behind them.
 *
 * tf32 is float32 of which the tensor cores read the sign, the exponent and 10 bits of the
 * fraction: the range of float32, the precision of half.
 *
 * A block is [16, 16] in 1024 bytes: of rows 8 r .. and columns 8 e .. + 7 the even ones (h =
 * 0) or the odd ones (h = 1) are 8 rows of 16 bytes at r * 512 + e * 256 + h * 128: a core
 * matrix as wgmma reads it without a swizzle. In that order of k two neighbours of an
 * accumulator are, as they are, an A operand; and a lane's element of accumulator layout is at
 * 4 * lane. In shared memory 12 blocks, in pairs of a column's block rows 0, 1 or 2, 3; in
 * memory the 10 of them that are not zero. */
#ifndef PREFILLD_TRIANGLE_CUH
#define PREFILLD_TRIANGLE_CUH

#include "hopper.cuh"

enum { TRI_BLOCK = 1024, TRI_BYTES = 12 * TRI_BLOCK, TRI_PACKED = 10 * TRI_BLOCK };

/* Where block (w, c) is in shared memory. Zeros are (0, 1) and (2, 3). */
__device__ static constexpr int tri_block(int w, int c)
{
    return TRI_BLOCK * (w + 2 * c + (w >= 2 ? 2 : 0));
}

/* And in memory, w >= c. */
__device__ static constexpr int tri_packed(int w, int c)
{
    return tri_block(w, c) - TRI_BLOCK * ((w + c > 1) + (c == 3));
}

/* The zeros; thread t of n. */
__device__ static inline void tri_clear(uint8_t *tri, int t, int n)
{
    for (int i = t; i < 2 * TRI_BLOCK / 16; i += n)
        *(uint4 *)(tri + (i < 64 ? tri_block(0, 1) : tri_block(2, 3)) + (i & 63) * 16) =
            make_uint4(0, 0, 0, 0);
}

/* A block in accumulator layout to memory; at: this lane's first element. */
__device__ static inline void tri_store(float *at, const float x[2][4])
{
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            at[128 * (i >> 1) + 64 * e + 32 * (i & 1)] = x[e][i];
    }
}

/* This lane's place in a block in shared memory for the other tri_store. */
__device__ static inline uint32_t tri_lane(void)
{
    int lane = tid_again() & 31;
    return (lane >> 4) * 512 + (lane & 15) * 16;
}

/* The same to shared memory; at: of the block, and tri_lane. */
__device__ static inline void tri_store(uint32_t at, const float x[2][4])
{
#pragma unroll
    for (int e = 0; e < 2; e++) {
        uint32_t r[4] = {__float_as_uint(x[e][0]), __float_as_uint(x[e][1]),
                         __float_as_uint(x[e][2]), __float_as_uint(x[e][3])};
        stsm4(at + 256 * e, r);
    }
}

/* ---- mma.sync: a warp's 16 rows ---- */

__device__ static inline uint32_t ld_shared(uint32_t addr)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
    return x;
}

__device__ static inline void mma1688t(float c[4], const float a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])),
          "r"(__float_as_uint(a[3])), "r"(b0), "r"(b1));
}

/* acc[16, 64] += X[16, 64] L^T; X an accumulator, read as tf32; L as in memory. */
__device__ static inline void mm_tri(float acc[8][4], const float x[8][4], uint32_t tri)
{
    tri += (threadIdx.x & 31) * 4;
#pragma unroll
    for (int k = 0; k < 8; k++) {
#pragma unroll
        for (int nt = k & ~1; nt < 8; nt++) {
            uint32_t at = tri + tri_packed(nt >> 1, k >> 1) + (nt & 1) * 512 + (k & 1) * 256;
            mma1688t(acc[nt], x[k], ld_shared(at), ld_shared(at + 128));
        }
    }
}

/* ---- wgmma: a warpgroup's 64 rows ---- */

/* From memory to shared memory, TRI_PACKED bytes; its zeros are there. */
__device__ static inline void tri_load(uint8_t *tri, const uint8_t *from, uint64_t *bar)
{
    bulk_load(tri, from, 2 * TRI_BLOCK, bar);
    bulk_load(tri + tri_block(1, 1), from + tri_packed(1, 1), 7 * TRI_BLOCK, bar);
    bulk_load(tri + tri_block(3, 3), from + tri_packed(3, 3), TRI_BLOCK, bar);
}

/* Descriptor of a pair of blocks: 128 bytes to the next core matrix in k, 512 to the next in
 * rows. */
__device__ static inline uint64_t desc_tri(uint32_t at)
{
    return (32ull << 32) | (8ull << 16) | ((at & 0x3ffff) >> 4);
}

/* c[64, 32] (+)= A B^T for 8 k. */
__device__ static inline void wg_tf32(float (*c)[4], const uint32_t a[4], uint64_t desc,
                                      int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, "
                 "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, p, 1, 1;\n}"
                 : WG_ACC4(c, 0), WG_ACC4(c, 1), WG_ACC4(c, 2), WG_ACC4(c, 3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "r"(add));
}

/* acc[64, 64] (+)= X L^T, the part of block column C; x[0], x[1]: X's accumulators of columns
 * 16 C .. + 15, read as tf32. C = 0 sets acc. */
template <int C>
__device__ static inline void wg_tri(float acc[8][4], const float x[2][4], uint32_t tri)
{
    uint64_t low = desc_tri(tri + tri_block(0, C));
    uint64_t high = desc_tri(tri + tri_block(2, C));
#pragma unroll
    for (int e = 0; e < 2; e++) {
        uint32_t a[4] = {__float_as_uint(x[e][0]), __float_as_uint(x[e][2]),
                         __float_as_uint(x[e][1]), __float_as_uint(x[e][3])};
        if (C < 2)
            wg_tf32(acc, a, low + e * 16, C > 0 || e > 0);
        wg_tf32(acc + 4, a, high + e * 16, C > 0 || e > 0);
    }
}

#endif
