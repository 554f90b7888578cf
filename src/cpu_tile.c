#include "cpu_tile.h"

static size_t align64(size_t n)
{
    return (n + 63) / 64 * 64;
}

static size_t row_tile_bytes(const struct cpu_gemm_isa *isa, int32_t k)
{
    return align64(isa->a_bytes(isa->tile_rows, k));
}

size_t cpu_tile_rows_bytes(int32_t m, int32_t k)
{
    size_t most = 0;
    for (int i = 0; i < cpu_gemm_n_isas; i++) {
        const struct cpu_gemm_isa *isa = cpu_gemm_isas[i];
        size_t bytes = (size_t)ceil_div(m, isa->tile_rows) * row_tile_bytes(isa, k);
        most = bytes > most ? bytes : most;
    }
    return most;
}

size_t cpu_tile_panels_bytes(int32_t n_panels, int32_t k)
{
    size_t most = 0;
    for (int i = 0; i < cpu_gemm_n_isas; i++) {
        size_t bytes = (size_t)n_panels * align64(cpu_gemm_isas[i]->unpacked_bytes(k));
        most = bytes > most ? bytes : most;
    }
    return most;
}

size_t cpu_tile_sums_bytes(int32_t m, int32_t n_panels)
{
    size_t most = 0;
    for (int i = 0; i < cpu_gemm_n_isas; i++) {
        struct cpu_tile_sums l = cpu_tile_sums_layout(cpu_gemm_isas[i], n_panels);
        size_t bytes = (size_t)ceil_div(m, l.tile_rows) * l.tile_floats * sizeof(float);
        most = bytes > most ? bytes : most;
    }
    return most;
}

struct cpu_tile_sums cpu_tile_sums_layout(const struct cpu_gemm_isa *isa, int32_t n_panels)
{
    struct cpu_tile_sums l = {.tile_rows = isa->tile_rows,
                              .row_floats = isa->tile_panels * PANEL};
    int32_t group_floats = l.tile_rows * l.row_floats;
    l.tile_floats = (size_t)ceil_div(n_panels, isa->tile_panels) * (size_t)group_floats;
    for (int32_t p = 0; p < n_panels; p++)
        l.panel_at[p] = p / isa->tile_panels * group_floats + p % isa->tile_panels * PANEL;
    return l;
}

void cpu_tile_pack_rows(const struct cpu_gemm_isa *isa, int32_t m, int32_t k, const float *A,
                        int64_t lda, void *dst)
{
    uint8_t *d = dst;
    const float *rows[MAX_TILE_ROWS];
    for (int32_t r = 0; r < m; r += isa->tile_rows, d += row_tile_bytes(isa, k)) {
        int32_t n = m - r < isa->tile_rows ? m - r : isa->tile_rows;
        for (int32_t i = 0; i < n; i++)
            rows[i] = A + (r + i) * lda;
        isa->pack_a(DTYPE_F32, n, k, rows, d);
    }
}

struct cpu_tile_panels cpu_tile_unpack(const struct cpu_gemm_isa *isa, int32_t n_panels,
                                       int32_t k, const float *panels, void *room)
{
    size_t stored = cpu_panel_bytes(k, DTYPE_F32);
    struct cpu_tile_panels b = {(const uint8_t *)panels, stored, n_panels, k};
    if (isa->reads_stored >> DTYPE_F32 & 1)
        return b;
    b.data = room;
    b.panel_bytes = align64(isa->unpacked_bytes(k));
    for (int32_t p = 0; p < n_panels; p++)
        isa->unpack_w(DTYPE_F32, k, (const uint8_t *)panels + (size_t)p * stored,
                      (uint8_t *)room + (size_t)p * b.panel_bytes);
    return b;
}

void cpu_tile_enter(const struct cpu_gemm_isa *isa, int32_t m)
{
    if (isa->enter)
        isa->enter(m);
}

void cpu_tile_leave(const struct cpu_gemm_isa *isa)
{
    if (isa->leave)
        isa->leave();
}

/* The kernel call for a group of panels from `first` on, without rows. */
static struct cpu_gemm_tile group_tile(const struct cpu_gemm_isa *isa,
                                       const struct cpu_tile_panels *b, int32_t first)
{
    int32_t n = b->n_panels - first < isa->tile_panels ? b->n_panels - first : isa->tile_panels;
    struct cpu_gemm_tile t = {.n_cols = n * PANEL, .n_k = b->k};
    for (int32_t i = 0; i < MAX_TILE_PANELS; i++)
        t.w[i] = b->data + (size_t)(first + (i < n ? i : n - 1)) * b->panel_bytes;
    return t;
}

static int32_t rows_at(const struct cpu_gemm_isa *isa, int32_t m, int32_t r)
{
    return m - r < isa->tile_rows ? m - r : isa->tile_rows;
}

void cpu_tile_multiply(const struct cpu_gemm_isa *isa, int32_t m, const void *rows,
                       const struct cpu_tile_panels *b, float *C, int64_t ldc)
{
    for (int32_t p = 0; p < b->n_panels; p += isa->tile_panels) {
        struct cpu_gemm_tile t = group_tile(isa, b, p);
        t.a = rows;
        t.ldc = ldc;
        t.is_whole = t.n_cols == isa->tile_panels * PANEL;
        for (int32_t r = 0; r < m; r += isa->tile_rows) {
            t.n_rows = rows_at(isa, m, r);
            t.c = C + r * ldc + p * PANEL;
            isa->kernel(DTYPE_F32, &t);
            t.a = (const uint8_t *)t.a + row_tile_bytes(isa, b->k);
        }
    }
}

void cpu_tile_accumulate(const struct cpu_gemm_isa *isa, int32_t m, const void *rows,
                         const struct cpu_tile_panels *b, float *sums)
{
    struct cpu_tile_sums l = cpu_tile_sums_layout(isa, b->n_panels);
    for (int32_t p = 0; p < b->n_panels; p += isa->tile_panels) {
        struct cpu_gemm_tile t = group_tile(isa, b, p);
        t.a = rows;
        t.ldc = l.row_floats;
        t.is_whole = true;
        t.c = sums + l.panel_at[p];
        for (int32_t r = 0; r < m; r += isa->tile_rows) {
            t.n_rows = rows_at(isa, m, r);
            t.sums = t.c;
            isa->kernel(DTYPE_F32, &t);
            t.a = (const uint8_t *)t.a + row_tile_bytes(isa, b->k);
            t.c += l.tile_floats;
        }
    }
}
