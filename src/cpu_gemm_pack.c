/* Packs weights into panels (cpu_gemm.h), at load. */
#include "cpu_gemm.h"

#include <string.h>

float cpu_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = h >> 10 & 31, mantissa = h & 1023;
    union {
        uint32_t u;
        float f;
    } v;
    if (exponent == 0) {
        float f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    v.u = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    return v.f;
}

size_t cpu_panel_bytes(int32_t cols, enum dtype dtype)
{
    size_t n = dtype == DTYPE_BF16 ? ((size_t)cols + 31) / 32 * 32 : (size_t)cols;
    return n * PANEL * dtype_bytes(dtype);
}

size_t cpu_pack_bytes(int32_t n_mats, int32_t rows, int32_t cols, enum dtype dtype)
{
    return (size_t)n_mats * (size_t)ceil_div(rows, PANEL) * cpu_panel_bytes(cols, dtype);
}

struct packing {
    const struct weight_part *parts;
    int32_t n_parts, rows, cols;
    enum dtype dtype;
    uint8_t *dst;
};

/* Row r of all the parts together. */
static const uint8_t *find_row(const struct packing *p, int64_t r, enum dtype *dtype)
{
    int32_t i = 0;
    while (r >= p->parts[i].n_rows)
        r -= p->parts[i++].n_rows;
    *dtype = p->parts[i].dtype;
    return (const uint8_t *)p->parts[i].rows +
           (size_t)r * (size_t)p->cols * dtype_bytes(*dtype);
}

static float load_f32(const uint8_t *row, enum dtype dtype, int32_t k)
{
    float f;
    uint16_t h;
    if (dtype == DTYPE_F32) {
        memcpy(&f, row + (size_t)k * 4, 4);
        return f;
    }
    memcpy(&h, row + (size_t)k * 2, 2);
    return dtype == DTYPE_BF16 ? cpu_bf16_to_f32(h) : cpu_f16_to_f32(h);
}

/* File rows may lie at any address, hence memcpy. */
static void pack_row(const struct packing *p, const uint8_t *row, enum dtype dtype, int32_t col,
                     uint8_t *panel)
{
    for (int32_t k = 0; k < p->cols; k++) {
        if (p->dtype == DTYPE_F32) {
            ((float *)panel)[(size_t)k * PANEL + col] = load_f32(row, dtype, k);
            continue;
        }
        size_t at = p->dtype == DTYPE_BF16 ? cpu_bf16_at(k, col) : (size_t)k * PANEL + col;
        memcpy((uint16_t *)panel + at, row + (size_t)k * 2, 2);
    }
}

static void pack_panel(void *arg, int64_t item, int32_t thread)
{
    const struct packing *p = arg;
    (void)thread;
    int32_t n_panels = ceil_div(p->rows, PANEL);
    int64_t i_mat = item / n_panels;
    int32_t first = (int32_t)(item % n_panels) * PANEL;
    size_t bytes = cpu_panel_bytes(p->cols, p->dtype);
    uint8_t *panel = p->dst + (size_t)item * bytes;
    int32_t n = p->rows - first < PANEL ? p->rows - first : PANEL;
    if (n < PANEL || p->cols % 32)
        memset(panel, 0, bytes);
    for (int32_t i = 0; i < n; i++) {
        enum dtype dtype;
        const uint8_t *row = find_row(p, i_mat * p->rows + first + i, &dtype);
        pack_row(p, row, dtype, i, panel);
    }
}

void cpu_pack(struct cpu_pool *pool, const struct weight_part *parts, int32_t n_parts,
              int32_t n_mats, int32_t rows, int32_t cols, enum dtype dtype, void *dst)
{
    struct packing p = {parts, n_parts, rows, cols, dtype, dst};
    cpu_pool_run(pool, (int64_t)n_mats * ceil_div(rows, PANEL), pack_panel, &p);
}
