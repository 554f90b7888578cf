/* Products of two f32 matrices on the calling thread, with the kernels of the packed weights.
 *
 * For operands that are used many times over: each is brought into the kernel's form once. The
 * right one lies in memory as panels of 16 columns, [panels][k][16]. An element's sum runs over
 * k in one order that depends on nothing else; a NaN stays in its row and column. */
#ifndef PREFILLD_CPU_TILE_H
#define PREFILLD_CPU_TILE_H

#include "cpu_gemm.h"

/* Rooms that suffice for every kernel of this build. k is at most 256. */
size_t cpu_tile_rows_bytes(int32_t m, int32_t k);
size_t cpu_tile_panels_bytes(int32_t n_panels, int32_t k);
size_t cpu_tile_sums_bytes(int32_t m, int32_t n_panels);

/* The left operand: A [m, k] into dst. */
void cpu_tile_pack_rows(const struct cpu_gemm_isa *isa, int32_t m, int32_t k, const float *A,
                        int64_t lda, void *dst);

/* The right operand, ready for the kernel. */
struct cpu_tile_panels {
    const uint8_t *data;
    size_t panel_bytes;
    int32_t n_panels, k;
};

/* May use room, and may refer to panels as they lie. */
struct cpu_tile_panels cpu_tile_unpack(const struct cpu_gemm_isa *isa, int32_t n_panels,
                                       int32_t k, const float *panels, void *room);

/* Sums [m, 16 n_panels] lie as the kernels leave them: tiles of rows, in them groups of panels.
 * Row r starts at cpu_tile_sums_row; its panel p is panel_at[p] floats further on. */
struct cpu_tile_sums {
    int32_t tile_rows, row_floats; /* of a tile, of a row in a group */
    size_t tile_floats;
    int32_t panel_at[16]; /* n_panels is at most 16 */
};

struct cpu_tile_sums cpu_tile_sums_layout(const struct cpu_gemm_isa *isa, int32_t n_panels);

static inline size_t cpu_tile_sums_row(const struct cpu_tile_sums *l, int32_t r)
{
    return (size_t)(r / l->tile_rows) * l->tile_floats +
           (size_t)(r % l->tile_rows) * (size_t)l->row_floats;
}

/* Around the products of one item of a fan-out, which have at most m rows. */
void cpu_tile_enter(const struct cpu_gemm_isa *isa, int32_t m);
void cpu_tile_leave(const struct cpu_gemm_isa *isa);

/* C [m, 16 n_panels] = A B; C has room for MAX_TILE_ROWS rows more. */
void cpu_tile_multiply(const struct cpu_gemm_isa *isa, int32_t m, const void *rows,
                       const struct cpu_tile_panels *b, float *C, int64_t ldc);
/* sums += A B, going on in each element's accumulator. */
void cpu_tile_accumulate(const struct cpu_gemm_isa *isa, int32_t m, const void *rows,
                         const struct cpu_tile_panels *b, float *sums);

#endif
