/* Small products of two f32 matrices on the calling thread.
 *
 * C is cut into panels of 32 columns and tiles of 8 rows, whose sums stay in registers over all
 * of k. B is read where it lies when a panel of it is whole, and else brought into the form
 * [k][32] first, transposed 16 x 16 at a time or filled up with zeros. Every element is one sum
 * over ascending l in one accumulator, so the tile that computes it leaves no trace in its
 * bits. */
#include "cpu.h"
#include "cpu_simd.h"

enum { COLS = 2 * VEC, ROWS = 8 };

size_t cpu_mm_scratch_bytes(int32_t m, int32_t n, int32_t k)
{
    (void)m;
    (void)n;
    return (size_t)(k > 0 ? k : 1) * COLS * sizeof(float);
}

/* op(A) by strides, op(B) as rows of 32 columns, C. */
struct mm_tile {
    const float *a;
    int64_t row, col; /* A[i, l] is a[i * row + l * col] */
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    int32_t k;
    int32_t n_cols; /* 1..32 */
    enum cpu_mm_mode mode;
};

#define MM_MERGE(mode, c, sum)                                                                 \
    ((mode) == CPU_MM_SET ? (sum) : (mode) == CPU_MM_ADD ? (c) + (sum) : (c) - (sum))

/* n_rows is a constant of the caller's. */
CPU_INLINE void mm_tile_rows(const struct mm_tile *t, int32_t i0, const int n_rows)
{
    vf sum[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < n_rows; i++)
        sum[i][0] = sum[i][1] = (vf){0};
    const float *a = t->a + i0 * t->row, *b = t->b;
    for (int32_t l = 0; l < t->k; l++) {
        vf b0 = VF_LOAD(b), b1 = VF_LOAD(b + VEC);
#pragma GCC unroll 8
        for (int i = 0; i < n_rows; i++) {
            vf x = VF_SET(a[i * t->row]);
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
        a += t->col;
        b += t->ldb;
    }
    for (int i = 0; i < n_rows; i++) {
        float *c = t->c + (i0 + i) * t->ldc;
        if (t->n_cols == COLS) {
            VF_STORE(c, MM_MERGE(t->mode, (vf)VF_LOAD(c), sum[i][0]));
            VF_STORE(c + VEC, MM_MERGE(t->mode, (vf)VF_LOAD(c + VEC), sum[i][1]));
            continue;
        }
        float last[COLS];
        VF_STORE(last, sum[i][0]);
        VF_STORE(last + VEC, sum[i][1]);
        for (int32_t j = 0; j < t->n_cols; j++)
            c[j] = MM_MERGE(t->mode, c[j], last[j]);
    }
}

CPU_INLINE void mm_panel(const struct mm_tile *t, int32_t m)
{
    int32_t i = 0;
    for (; i + 8 <= m; i += 8)
        mm_tile_rows(t, i, 8);
    if (m & 4) {
        mm_tile_rows(t, i, 4);
        i += 4;
    }
    if (m & 2) {
        mm_tile_rows(t, i, 2);
        i += 2;
    }
    if (m & 1)
        mm_tile_rows(t, i, 1);
}

/* out[l][j] = in[j][l] for 16 x 16. Interleaving rows i and i + 8 rotates the bits of an
 * element's address, row bits above column bits, by one; four times make the transpose. */
CPU_INLINE void mm_transpose16(const float *in, int64_t ld_in, float *out, int64_t ld_out)
{
    static const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    static const vi high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    vf r[VEC], s[VEC];
#pragma GCC unroll 16
    for (int i = 0; i < VEC; i++)
        r[i] = VF_LOAD(in + i * ld_in);
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < VEC / 2; i++) {
            s[2 * i] = __builtin_shuffle(r[i], r[i + VEC / 2], low);
            s[2 * i + 1] = __builtin_shuffle(r[i], r[i + VEC / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < VEC; i++)
            r[i] = s[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < VEC; i++)
        VF_STORE(out + i * ld_out, r[i]);
}

/* Columns j0.. of op(B), n_cols of them, as [k][32] with zeros after. */
CPU_INLINE void mm_pack(bool tb, int32_t k, const float *B, int64_t ldb, int32_t n_cols,
                        float *dst)
{
    int32_t l = 0;
    if (tb) {
        for (; l + VEC <= k; l += VEC) {
            int32_t j = 0;
            for (; j + VEC <= n_cols; j += VEC)
                mm_transpose16(B + j * ldb + l, ldb, dst + (int64_t)l * COLS + j, COLS);
            for (int32_t r = l; r < l + VEC; r++) {
                for (int32_t c = j; c < COLS; c++)
                    dst[(int64_t)r * COLS + c] = c < n_cols ? B[c * ldb + r] : 0;
            }
        }
    }
    for (; l < k; l++) {
        for (int32_t c = 0; c < COLS; c++)
            dst[(int64_t)l * COLS + c] = c >= n_cols ? 0 : tb ? B[c * ldb + l] : B[l * ldb + c];
    }
}

struct mm_call {
    struct mm_tile tile; /* of the first panel, B not set */
    const float *B;
    int64_t ldb;
    int32_t m, n;
    bool tb;
    float *scratch;
};

CPU_INLINE void mm_run_body(const struct mm_call *call)
{
    struct mm_tile t = call->tile;
    for (int32_t j = 0; j < call->n; j += COLS) {
        t.n_cols = call->n - j < COLS ? call->n - j : COLS;
        t.c = call->tile.c + j;
        if (call->tb || t.n_cols < COLS) {
            const float *from = call->B + (call->tb ? j * call->ldb : j);
            mm_pack(call->tb, t.k, from, call->ldb, t.n_cols, call->scratch);
            t.b = call->scratch;
            t.ldb = COLS;
        } else {
            t.b = call->B + j;
            t.ldb = call->ldb;
        }
        mm_panel(&t, call->m);
    }
}

CPU_KERNEL(mm_run, (const struct mm_call *call), (call))

void cpu_mm(enum cpu_mm_mode mode, bool ta, bool tb, int32_t m, int32_t n, int32_t k,
            const float *A, int64_t lda, const float *B, int64_t ldb, float *C, int64_t ldc,
            void *scratch)
{
    struct mm_call call = {.tile = {.a = A,
                                    .row = ta ? 1 : lda,
                                    .col = ta ? lda : 1,
                                    .c = C,
                                    .ldc = ldc,
                                    .k = k,
                                    .mode = mode},
                           .B = B,
                           .ldb = ldb,
                           .m = m,
                           .n = n,
                           .tb = tb,
                           .scratch = scratch};
    mm_run(&call);
}
