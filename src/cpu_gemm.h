/* Private to cpu_gemm*.c, cpu_threads.c and their tests: how a product is cut into tiles, and
 * what an instruction set supplies.
 *
 * A packed weight [rows, cols] is panels of 16 rows (the last one filled up with zeros):
 *   f32, f16   [panels][cols][16]
 *   bf16       [panels][ceil(cols / 32)][16 pairs][16][2], where pair j of 32 columns is
 *              columns j and j + 16, and a short last 32 is filled up with zeros
 * which every instruction set reads (the pairs are what AMX takes; so far apart, they cost no
 * permutation). A product runs in two passes over the pool: the rows of a
 * are brought into the kernel's form, then blocks of rows times ranges of panels are computed.
 * An element's sum always runs over all of k in ascending order in one accumulator: it may be
 * put by and taken up again between blocks of k, which loses no bit. */
#ifndef PREFILLD_CPU_GEMM_H
#define PREFILLD_CPU_GEMM_H

#include "cpu.h"

enum { PANEL = 16, MAX_TILE_ROWS = 32, MAX_TILE_PANELS = 4 };

/* One kernel call: a row tile times a few panels, over n_k of k. */
struct cpu_gemm_tile {
    int32_t n_rows; /* 1..tile_rows */
    int32_t n_cols; /* 1..PANEL * tile_panels */
    int32_t n_k;
    const void *a;                  /* as pack_a left it */
    const void *w[MAX_TILE_PANELS]; /* the panels at this k, as stored or as unpack_w left
                                       them; those past n_cols repeat the last one */
    const float *sums; /* [tile_rows, tile_panels * PANEL] to go on from, or NULL */
    float *c;          /* out [n_rows, n_cols] */
    int64_t ldc;
    bool is_whole; /* c has room for [tile_rows, tile_panels * PANEL] */
};

/* What an instruction set supplies. tile_rows * tile_panels is the shape of its kernel; k_block
 * (a multiple of 32) is what it takes of k at a time. */
struct cpu_gemm_isa {
    const char *name;
    bool (*is_available)(void); /* on this processor and system */
    int32_t tile_rows, tile_panels, k_block;
    int32_t block_rows; /* rows taken together, a multiple of tile_rows */
    /* Bytes of a row tile of n_rows rows and n_k of k; grows with n_rows. */
    size_t (*a_bytes)(int32_t n_rows, int32_t n_k);
    /* rows: [n_rows] pointers to n_k floats each; dtype: the weight's. */
    void (*pack_a)(enum dtype dtype, int32_t n_rows, int32_t n_k, const float *const *rows,
                   void *dst);
    /* A panel's n_k columns, stored as dtype, into the kernel's form; at most
     * unpacked_bytes(n_k). Skipped for a dtype whose bit is in reads_stored. */
    void (*unpack_w)(enum dtype dtype, int32_t n_k, const void *panel, void *dst);
    size_t (*unpacked_bytes)(int32_t n_k);
    unsigned reads_stored; /* bits 1 << enum dtype */
    /* Called with every row tile of a block in turn. */
    void (*kernel)(enum dtype dtype, const struct cpu_gemm_tile *t);
    /* Around the kernel calls of one item; may be NULL. */
    void (*enter)(int32_t n_rows);
    void (*leave)(void);
};

extern const struct cpu_gemm_isa cpu_gemm_isa_amx, cpu_gemm_isa_avx512, cpu_gemm_isa_avx2,
    cpu_gemm_isa_plain;

/* All in this build, best first; the last, always available, is plain C. */
extern const struct cpu_gemm_isa *const cpu_gemm_isas[];
extern const int cpu_gemm_n_isas;

/* Bytes of one packed panel. */
size_t cpu_panel_bytes(int32_t cols, enum dtype dtype);

struct cpu_gemm_block;

/* What a pool keeps for products. */
struct cpu_gemm_ctx {
    const struct cpu_gemm_isa *isa;
    int32_t n_threads;
    struct cpu_gemm_block *blocks; /* the blocks of rows in the current pass */
    uint8_t *a;                    /* rows in the kernel's form, shared by the threads */
    uint8_t *own;                  /* [n_threads] unpacked panels, then sums between blocks
                                      of k */
    size_t a_bytes, unpacked_bytes, own_bytes;
};

int cpu_gemm_ctx_init(struct cpu_gemm_ctx *g, int32_t n_threads);
void cpu_gemm_ctx_fini(struct cpu_gemm_ctx *g);
struct cpu_gemm_ctx *cpu_pool_gemm(struct cpu_pool *pool);

/* For tests and benches: products of this pool use "plain", "avx2", "avx512" or "amx" from now
 * on. False when the machine lacks it. */
bool cpu_gemm_select(struct cpu_pool *pool, const char *name);
const char *cpu_gemm_name(struct cpu_pool *pool);

/* f16 bits to f32, exactly. */
float cpu_f16_to_f32(uint16_t h);

static inline float cpu_bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {.u = (uint32_t)h << 16};
    return v.f;
}

/* Where a bf16 panel holds column k of its row col, in elements. */
static inline size_t cpu_bf16_at(int32_t k, int32_t col)
{
    return ((size_t)(k / 32 * 16 + k % 16) * PANEL + (size_t)col) * 2 + (size_t)(k / 16 % 2);
}

static inline int32_t ceil_div(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

#endif
