/* Products with a packed weight: cuts them into blocks and hands tiles to the kernels.
 * See cpu_gemm.h for the form of the operands. Allocates at pool open only. */
#include "cpu_gemm.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Rows in the kernel's form for one pass: enough for 512 rows of the widest model seen
 * (17408 columns); a larger product takes several passes. */
#define A_BYTES ((size_t)64 << 20)
enum {
    MAX_BLOCKS = 2048,
    MAX_RANGE_COLS = 768, /* the sums of a block of rows stay in the second-level cache */
    ITEMS_PER_THREAD = 6, /* so that a thread held up by the system costs a sixth at most */
    MIN_RANGE_PANELS = 4,
    PACK_INLINE_ELEMENTS = 8192 /* under this a second fan-out costs more than it saves */
};

/* Consecutive rows of one job, and where their packed form starts. */
struct cpu_gemm_block {
    const struct cpu_gemm_job *job;
    int32_t row, n_rows;
    size_t a_at;
};

/* One pass: some blocks times all columns. */
struct pass {
    struct cpu_gemm_ctx *g;
    const struct weight *w;
    int64_t lda, ldc;
    int32_t n_blocks;
    int32_t n_kb;         /* blocks of k */
    int32_t n_ranges;     /* ranges of panels */
    int32_t range_panels; /* a multiple of tile_panels */
};

const struct cpu_gemm_isa *const cpu_gemm_isas[] = {
#if defined(__x86_64__)
    &cpu_gemm_isa_amx, &cpu_gemm_isa_avx512, &cpu_gemm_isa_avx2,
#endif
    &cpu_gemm_isa_plain};
const int cpu_gemm_n_isas = sizeof(cpu_gemm_isas) / sizeof(cpu_gemm_isas[0]);

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Room for n bytes on large pages where the system has them: tiles stride far. */
static void *alloc_pages(size_t n)
{
    enum { LARGE_PAGE = 2 << 20 };
    void *p = aligned_alloc(LARGE_PAGE, round_up(n, LARGE_PAGE));
    if (p)
        madvise(p, round_up(n, LARGE_PAGE), MADV_HUGEPAGE);
    return p;
}

int cpu_gemm_ctx_init(struct cpu_gemm_ctx *g, int32_t n_threads)
{
    *g = (struct cpu_gemm_ctx){.n_threads = n_threads, .a_bytes = A_BYTES};
    size_t sum_bytes = 0;
    for (int i = 0; i < cpu_gemm_n_isas; i++) {
        const struct cpu_gemm_isa *isa = cpu_gemm_isas[i];
        if (!isa->is_available())
            continue;
        if (!g->isa)
            g->isa = isa;
        size_t bytes = isa->unpacked_bytes(isa->k_block) * (size_t)isa->tile_panels;
        if (bytes > g->unpacked_bytes)
            g->unpacked_bytes = round_up(bytes, 64);
        bytes = sizeof(float) * (size_t)isa->block_rows * MAX_RANGE_COLS;
        if (bytes > sum_bytes)
            sum_bytes = bytes;
    }
    g->own_bytes = round_up(g->unpacked_bytes + sum_bytes, 4096);
    g->blocks = calloc(MAX_BLOCKS, sizeof(*g->blocks));
    g->a = alloc_pages(g->a_bytes);
    g->own = alloc_pages(g->own_bytes * (size_t)n_threads);
    if (g->blocks && g->a && g->own)
        return 0;
    cpu_gemm_ctx_fini(g);
    return ERR_NOMEM;
}

void cpu_gemm_ctx_fini(struct cpu_gemm_ctx *g)
{
    free(g->blocks);
    free(g->a);
    free(g->own);
    *g = (struct cpu_gemm_ctx){0};
}

size_t cpu_gemm_bytes(struct cpu_pool *pool)
{
    const struct cpu_gemm_ctx *g = cpu_pool_gemm(pool);
    return g->a_bytes + g->own_bytes * (size_t)g->n_threads;
}

bool cpu_gemm_select(struct cpu_pool *pool, const char *name)
{
    for (int i = 0; i < cpu_gemm_n_isas; i++) {
        const struct cpu_gemm_isa *isa = cpu_gemm_isas[i];
        if (strcmp(isa->name, name) == 0 && isa->is_available()) {
            cpu_pool_gemm(pool)->isa = isa;
            return true;
        }
    }
    return false;
}

const char *cpu_gemm_name(struct cpu_pool *pool)
{
    return cpu_pool_gemm(pool)->isa->name;
}

/* Bytes of a block's packed form at full k_block; blocks of k lie one after the other, row
 * tiles inside them. */
static size_t block_kb_bytes(const struct cpu_gemm_isa *isa, int32_t n_rows)
{
    int32_t n_full = n_rows / isa->tile_rows, rest = n_rows % isa->tile_rows;
    size_t bytes = (size_t)n_full * isa->a_bytes(isa->tile_rows, isa->k_block);
    return bytes + (rest ? isa->a_bytes(rest, isa->k_block) : 0);
}

static void pack_rows(const struct pass *p, const struct cpu_gemm_block *b, int32_t i_kb)
{
    const struct cpu_gemm_isa *isa = p->g->isa;
    int32_t k = i_kb * isa->k_block;
    int32_t n_k = p->w->cols - k < isa->k_block ? p->w->cols - k : isa->k_block;
    uint8_t *dst = p->g->a + b->a_at + (size_t)i_kb * block_kb_bytes(isa, b->n_rows);
    const float *rows[MAX_TILE_ROWS];
    for (int32_t r = 0; r < b->n_rows; r += isa->tile_rows) {
        int32_t n = b->n_rows - r < isa->tile_rows ? b->n_rows - r : isa->tile_rows;
        for (int32_t i = 0; i < n; i++) {
            int64_t row = b->row + r + i;
            if (b->job->a_rows)
                row = b->job->a_rows[row];
            rows[i] = b->job->a + row * p->lda + k;
        }
        isa->pack_a(p->w->dtype, n, n_k, rows, dst);
        dst += isa->a_bytes(isa->tile_rows, isa->k_block);
    }
}

static void pack_item(void *arg, int64_t item, int32_t thread)
{
    const struct pass *p = arg;
    (void)thread;
    pack_rows(p, &p->g->blocks[item / p->n_kb], (int32_t)(item % p->n_kb));
}

/* The panels of tile t at this k, unpacked to the thread's own memory when the kernel cannot
 * read them as they lie. */
static void fetch_panels(const struct pass *p, const uint8_t *mat, int32_t panel, int32_t k,
                         uint8_t *own, struct cpu_gemm_tile *t)
{
    const struct cpu_gemm_isa *isa = p->g->isa;
    enum dtype dtype = p->w->dtype;
    size_t panel_bytes = cpu_panel_bytes(p->w->cols, dtype);
    size_t unpacked_bytes = isa->unpacked_bytes(isa->k_block);
    bool as_stored = isa->reads_stored >> dtype & 1;
    int32_t n = ceil_div(t->n_cols, PANEL);
    for (int32_t i = 0; i < isa->tile_panels; i++) {
        if (i >= n) {
            t->w[i] = t->w[n - 1];
            continue;
        }
        const uint8_t *src =
            mat + (size_t)(panel + i) * panel_bytes + (size_t)k * PANEL * dtype_bytes(dtype);
        t->w[i] = src;
        if (!as_stored) {
            uint8_t *dst = own + (size_t)i * unpacked_bytes;
            isa->unpack_w(dtype, t->n_k, src, dst);
            t->w[i] = dst;
        }
    }
}

/* One block of k, one group of panels, all rows of the block. */
static void product_panels(const struct pass *p, const struct cpu_gemm_block *b,
                           const uint8_t *a, int32_t panel, float *sums, bool is_last,
                           struct cpu_gemm_tile *t)
{
    const struct cpu_gemm_isa *isa = p->g->isa;
    size_t tile_bytes = isa->a_bytes(isa->tile_rows, isa->k_block);
    int32_t max_cols = isa->tile_panels * PANEL, n_tiles = ceil_div(b->n_rows, isa->tile_rows);
    for (int32_t i = 0; i < n_tiles; i++) {
        int32_t r = i * isa->tile_rows;
        t->n_rows = b->n_rows - r < isa->tile_rows ? b->n_rows - r : isa->tile_rows;
        t->a = a + (size_t)i * tile_bytes;
        if (t->sums)
            t->sums = sums;
        t->c = is_last ? b->job->c + (b->row + r) * p->ldc + (int64_t)panel * PANEL : sums;
        t->ldc = is_last ? p->ldc : max_cols;
        t->is_whole = !is_last || (t->n_rows == isa->tile_rows && t->n_cols == max_cols);
        isa->kernel(p->w->dtype, t);
        sums += isa->tile_rows * max_cols;
    }
}

/* A block of rows times a range of panels. */
static void product_item(void *arg, int64_t item, int32_t thread)
{
    const struct pass *p = arg;
    struct cpu_gemm_ctx *g = p->g;
    const struct cpu_gemm_isa *isa = g->isa;
    const struct weight *w = p->w;
    const struct cpu_gemm_block *b = &g->blocks[item % p->n_blocks];
    int32_t first = (int32_t)(item / p->n_blocks) * p->range_panels;
    int32_t last = first + p->range_panels;
    if (last > ceil_div(w->rows, PANEL))
        last = ceil_div(w->rows, PANEL);
    const uint8_t *mat = (const uint8_t *)w->data +
                         (size_t)b->job->i_mat * cpu_pack_bytes(1, w->rows, w->cols, w->dtype);
    uint8_t *own = g->own + (size_t)thread * g->own_bytes;
    size_t group_sums =
        (size_t)ceil_div(b->n_rows, isa->tile_rows) * isa->tile_rows * isa->tile_panels * PANEL;
    if (isa->enter)
        isa->enter(b->n_rows);
    for (int32_t i_kb = 0; i_kb < p->n_kb; i_kb++) {
        int32_t k = i_kb * isa->k_block;
        const uint8_t *a = g->a + b->a_at + (size_t)i_kb * block_kb_bytes(isa, b->n_rows);
        float *sums = (float *)(own + g->unpacked_bytes);
        for (int32_t panel = first; panel < last; panel += isa->tile_panels) {
            int32_t cols = w->rows - panel * PANEL, max_cols = isa->tile_panels * PANEL;
            struct cpu_gemm_tile t = {.n_cols = cols < max_cols ? cols : max_cols,
                                      .n_k = w->cols - k < isa->k_block ? w->cols - k
                                                                        : isa->k_block,
                                      .sums = i_kb > 0 ? sums : NULL};
            fetch_panels(p, mat, panel, k, own, &t);
            product_panels(p, b, a, panel, sums, i_kb == p->n_kb - 1, &t);
            sums += group_sums;
        }
    }
    if (isa->leave)
        isa->leave();
}

static void run_pass(struct cpu_pool *pool, struct pass *p)
{
    struct cpu_gemm_ctx *g = p->g;
    int64_t n_rows = 0;
    for (int32_t i = 0; i < p->n_blocks; i++)
        n_rows += g->blocks[i].n_rows;
    int64_t n_packs = (int64_t)p->n_blocks * p->n_kb;
    if (n_rows * p->w->cols <= PACK_INLINE_ELEMENTS) {
        for (int64_t i = 0; i < n_packs; i++)
            pack_item(p, i, 0);
    } else {
        cpu_pool_run(pool, n_packs, pack_item, p);
    }

    int32_t n_panels = ceil_div(p->w->rows, PANEL);
    int32_t n_ranges = ceil_div(g->n_threads * ITEMS_PER_THREAD, p->n_blocks);
    if (n_ranges < ceil_div(p->w->rows, MAX_RANGE_COLS))
        n_ranges = ceil_div(p->w->rows, MAX_RANGE_COLS);
    p->range_panels = ceil_div(n_panels, n_ranges);
    if (p->range_panels < MIN_RANGE_PANELS)
        p->range_panels = MIN_RANGE_PANELS;
    p->range_panels = ceil_div(p->range_panels, g->isa->tile_panels) * g->isa->tile_panels;
    p->n_ranges = ceil_div(n_panels, p->range_panels);
    cpu_pool_run(pool, (int64_t)p->n_ranges * p->n_blocks, product_item, p);
}

/* Appends as many rows of a job as the pass has room for, in blocks of like size. Returns how
 * many. */
static int32_t add_rows(struct pass *p, const struct cpu_gemm_job *job, int32_t row,
                        size_t *a_used)
{
    const struct cpu_gemm_isa *isa = p->g->isa;
    int32_t rest = job->n_rows - row, start = row;
    int32_t n_tiles = ceil_div(rest, isa->tile_rows);
    int32_t n_blocks = ceil_div(n_tiles * isa->tile_rows, isa->block_rows);
    int32_t block_rows = ceil_div(n_tiles, n_blocks) * isa->tile_rows;
    while (row < job->n_rows && p->n_blocks < MAX_BLOCKS) {
        int32_t n = job->n_rows - row < block_rows ? job->n_rows - row : block_rows;
        size_t bytes = (size_t)p->n_kb * block_kb_bytes(isa, n);
        if (*a_used + bytes > p->g->a_bytes)
            break;
        p->g->blocks[p->n_blocks++] = (struct cpu_gemm_block){job, row, n, *a_used};
        *a_used += bytes;
        row += n;
    }
    return row - start;
}

void cpu_gemm_jobs(struct cpu_pool *pool, const struct cpu_gemm_job *jobs, int32_t n_jobs,
                   int64_t lda, const struct weight *w, int64_t ldc)
{
    struct cpu_gemm_ctx *g = cpu_pool_gemm(pool);
    struct pass p = {.g = g, .w = w, .lda = lda, .ldc = ldc};
    p.n_kb = ceil_div(w->cols, g->isa->k_block);
    size_t a_used = 0;
    for (int32_t j = 0; j < n_jobs; j++) {
        for (int32_t row = 0; row < jobs[j].n_rows;) {
            row += add_rows(&p, &jobs[j], row, &a_used);
            if (row < jobs[j].n_rows) {
                run_pass(pool, &p);
                p.n_blocks = 0;
                a_used = 0;
            }
        }
    }
    if (p.n_blocks > 0)
        run_pass(pool, &p);
}

void cpu_gemm(struct cpu_pool *pool, int32_t n_rows, const float *a, int64_t lda,
              const int32_t *a_rows, const struct weight *w, int32_t i_mat, float *c,
              int64_t ldc)
{
    struct cpu_gemm_job job = {
        .n_rows = n_rows, .i_mat = i_mat, .a = a, .a_rows = a_rows, .c = c};
    cpu_gemm_jobs(pool, &job, 1, lda, w, ldc);
}
