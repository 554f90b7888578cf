/* Hopper's own instructions (sm_90a): mbarriers, bulk tensor copies, wgmma with A in registers.
 *
 * Tiles are those of tile.cuh. A wgmma is asynchronous: registers it reads or accumulates into
 * may be touched only after the wait that covers it. Order of k is ascending, 16 at a time. */
#ifndef PREFILLD_HOPPER_CUH
#define PREFILLD_HOPPER_CUH

#include <cuda.h>

#include "tile.cuh"

/* ---- mbarriers: phases alternate parity 0, 1; waiting for parity p returns when the phase of
 * that parity is over ---- */

__device__ static inline void mbar_init(uint64_t *bar, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(count)
                 : "memory");
}

__device__ static inline void mbar_expect(uint64_t *bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_addr(bar)),
                 "r"(bytes)
                 : "memory");
}

__device__ static inline void mbar_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(smem_addr(bar)) : "memory");
}

__device__ static inline void mbar_wait(uint64_t *bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra again;\n"
                 "done:\n"
                 "}" ::"r"(smem_addr(bar)),
                 "r"(parity)
                 : "memory");
}

/* Orders this thread's ordinary accesses to shared memory before later ones of the tensor cores
 * and the copy engine. */
__device__ static inline void fence_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Waits until the kernel before this one in the stream is over, when launched to overlap it. */
__device__ static inline void grid_wait(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* ---- copies ---- */

/* Fetches a tensor map ahead of its first copy. */
__device__ static inline void map_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Box of a tensor map at (x, y, z), innermost first, into shared memory. */
__device__ static inline void tma_load3(void *dst, const CUtensorMap *map, uint64_t *bar, int x,
                                        int y, int z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_addr(dst)),
        "l"(map), "r"(smem_addr(bar)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

/* The same of four dims, at (0, y, z, w). */
__device__ static inline void tma_load4(void *dst, const CUtensorMap *map, uint64_t *bar, int y,
                                        int z, int w)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_addr(dst)),
        "l"(map), "r"(smem_addr(bar)), "r"(0), "r"(y), "r"(z), "r"(w)
        : "memory");
}

/* Ends a bulk group of the calling thread, be it empty. */
__device__ static inline void bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* The same box back to memory; one bulk group of the calling thread. */
__device__ static inline void tma_store3(const CUtensorMap *map, const void *src, int x, int y,
                                         int z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            map),
        "r"(smem_addr(src)), "r"(x), "r"(y), "r"(z)
        : "memory");
    bulk_commit();
}

/* Two dims of it. */
__device__ static inline void tma_store2(const CUtensorMap *map, const void *src, int x, int y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
            map),
        "r"(smem_addr(src)), "r"(x), "r"(y)
        : "memory");
    bulk_commit();
}

__device__ static inline void bulk_load(void *dst, const void *src, uint32_t bytes,
                                        uint64_t *bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
        "%2, [%3];" ::"r"(smem_addr(dst)),
        "l"(src), "r"(bytes), "r"(smem_addr(bar))
        : "memory");
}

/* All but the calling thread's last N bulk groups have read their shared memory. */
template <int N> __device__ static inline void bulk_read_done(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/* The calling thread's bulk groups have been written. */
__device__ static inline void bulk_done(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* One of the arrivals that `bar` counts, when this thread's cp.async so far have landed. Who
 * waits for it has to fence_async before the tensor cores read. */
__device__ static inline void cp_arrive(uint64_t *bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_addr(bar))
                 : "memory");
}

/* ---- clusters: blocks that share a bulk copy ---- */

/* Box of a tensor map at (x, y) to the same place in every block of `mask`, whose barriers at
 * the same place as `bar` count its bytes. */
__device__ static inline void tma_load2_to(void *dst, const CUtensorMap *map, uint64_t *bar,
                                           int x, int y, uint16_t mask)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::"
        "bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_addr(dst)),
        "l"(map), "r"(smem_addr(bar)), "r"(x), "r"(y), "h"(mask)
        : "memory");
}

/* Arrival at the barrier that lies at `bar` in block `rank`. */
__device__ static inline void mbar_arrive_at(uint64_t *bar, int rank)
{
    asm volatile("{\n.reg .b32 at;\n"
                 "mapa.shared::cluster.u32 at, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [at];\n}" ::"r"(smem_addr(bar)),
                 "r"(rank)
                 : "memory");
}

__device__ static inline int cluster_rank(void)
{
    int r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

/* All threads of all blocks. Initialised barriers are seen by the others after it. */
__device__ static inline void cluster_sync(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* threadIdx.x, read again: what depends on it is computed here and not kept in registers from
 * further above. Where shared memory takes all of L1, a spilled register comes from the L2. */
__device__ static inline int tid_again(void)
{
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}

template <int N> __device__ static inline void reg_alloc(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ static inline void reg_dealloc(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- wgmma ---- */

__device__ static inline void wg_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ static inline void wg_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> __device__ static inline void wg_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from moving uses of an accumulator across a wait. */
template <int N> __device__ static inline void wg_pin(float acc[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile(""
                     : "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]),
                       "+f"(acc[i][3])::"memory");
}

/* Descriptor of a swizzled tile, rows of 64 contiguous k: stride 1024 bytes between 8 rows.
 * Step ks of 16 columns: + 2; next tile of 64 columns: + 512. */
__device__ static inline uint64_t desc_kmajor(uint32_t tile)
{
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((tile & 0x3ffff) >> 4);
}

/* Descriptor of two swizzled tiles [k, 128 n], n contiguous: 8192 bytes to the next 64 columns,
 * 1024 between 8 rows of k. Step of 16 rows: + 128. */
__device__ static inline uint64_t desc_nmajor(uint32_t tile)
{
    return (1ull << 62) | (64ull << 32) | (512ull << 16) | ((tile & 0x3ffff) >> 4);
}

#define WG_ACC4(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define WG_ACC32(c)                                                                            \
    WG_ACC4(c, 0), WG_ACC4(c, 1), WG_ACC4(c, 2), WG_ACC4(c, 3), WG_ACC4(c, 4), WG_ACC4(c, 5),  \
        WG_ACC4(c, 6), WG_ACC4(c, 7)
#define WG_ACC64(c)                                                                            \
    WG_ACC32(c), WG_ACC4(c, 8), WG_ACC4(c, 9), WG_ACC4(c, 10), WG_ACC4(c, 11), WG_ACC4(c, 12), \
        WG_ACC4(c, 13), WG_ACC4(c, 14), WG_ACC4(c, 15)
#define WG_NAMES32                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "    \
    "%19,"                                                                                     \
    " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WG_NAMES64                                                                             \
    WG_NAMES32                                                                                 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48,"   \
    " %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define WG_ACC128(c)                                                                           \
    WG_ACC64(c), WG_ACC4(c, 16), WG_ACC4(c, 17), WG_ACC4(c, 18), WG_ACC4(c, 19),               \
        WG_ACC4(c, 20), WG_ACC4(c, 21), WG_ACC4(c, 22), WG_ACC4(c, 23), WG_ACC4(c, 24),        \
        WG_ACC4(c, 25), WG_ACC4(c, 26), WG_ACC4(c, 27), WG_ACC4(c, 28), WG_ACC4(c, 29),        \
        WG_ACC4(c, 30), WG_ACC4(c, 31)
#define WG_NAMES128                                                                            \
    WG_NAMES64                                                                                 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80,"   \
    " %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97,"    \
    " %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"       \
    " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125,"     \
    " %126, %127"

/* acc[64, 64] (+)= A B^T for one k step; adds when `add`. */
__device__ static inline void wg_k64(float c[8][4], const uint32_t a[4], uint64_t desc, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WG_NAMES32 "}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : WG_ACC32(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "r"(add));
}

/* The same with A from shared memory. */
__device__ static inline void wg_ss64(float c[8][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WG_NAMES32 "}, "
                 "%32, %33, p, 1, 1, 0, 0;\n}"
                 : WG_ACC32(c)
                 : "l"(a), "l"(b), "r"(add));
}

/* acc[64, 256] (+)= A B^T, both from shared memory with k contiguous. */
__device__ static inline void wg_ss256(float c[32][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WG_NAMES128 "}, "
                 "%128, %129, p, 1, 1, 0, 0;\n}"
                 : WG_ACC128(c)
                 : "l"(a), "l"(b), "r"(add));
}

/* acc[64, 256] += A B, B [16, 256] with n contiguous, in four tiles. */
__device__ static inline void wg_n256(float c[32][4], const uint32_t a[4], uint64_t desc)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WG_NAMES128 "}, "
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : WG_ACC128(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc));
}

/* acc[64, 128] += A B, B [16, 128] with n contiguous. */
__device__ static inline void wg_n128(float c[16][4], const uint32_t a[4], uint64_t desc)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WG_NAMES64 "}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : WG_ACC64(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc));
}

/* acc (+)= A B^T over steps FROM .. TO - 1; B [64, 16 TO] in tiles of 64 columns. */
template <int FROM, int TO>
__device__ static inline void wg_kmajor_part(float acc[8][4], const uint32_t a[TO][4],
                                             uint32_t tile, int add)
{
    uint64_t d = desc_kmajor(tile);
#pragma unroll
    for (int ks = FROM; ks < TO; ks++)
        wg_k64(acc, a[ks], d + (ks >> 2) * 512 + (ks & 3) * 2, ks > FROM ? 1 : add);
}

template <int KS>
__device__ static inline void wg_kmajor(float acc[8][4], const uint32_t a[KS][4], uint32_t tile,
                                        int add)
{
    wg_kmajor_part<0, KS>(acc, a, tile, add);
}

/* acc[64, 128] += A[64, 64] B[64, 128]. */
__device__ static inline void wg_nmajor(float acc[16][4], const uint32_t a[4][4], uint32_t tile)
{
    uint64_t d = desc_nmajor(tile);
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
        wg_n128(acc, a[ks], d + ks * 128);
}

/* Four 8x8 matrices of packed pairs to the rows at the lanes' addresses: the inverse of
 * ldsm4. */
__device__ static inline void stsm4(uint32_t addr, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Four 8x8 matrices of packed pairs, each transposed, to the rows at the lanes' addresses. */
__device__ static inline void stsm4_t(uint32_t addr, const uint32_t r[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/* ---- host ---- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* A map of a bf16 tensor of `rank` dims, innermost first, whose boxes are tiles: 64 columns,
 * swizzled. strides: bytes, of all dims but the first. What lies outside reads as zeros. */
static inline cudaError_t tensor_map(CUtensorMap *map, const void *p, int rank,
                                     const cuuint64_t *dims, const cuuint64_t *strides,
                                     const cuuint32_t *box)
{
    void *fn = NULL;
    cudaDriverEntryPointQueryResult found;
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                                     cudaEnableDefault, &found);
    if (e != cudaSuccess || found != cudaDriverEntryPointSuccess)
        return e != cudaSuccess ? e : cudaErrorNotSupported;
    const cuuint32_t step[4] = {1, 1, 1, 1};
    CUresult r = ((encode_fn)fn)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)rank, (void *)p, dims, strides, box,
        step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#endif
