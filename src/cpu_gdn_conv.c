/* Convolution, activation, normalisation and gates in front of the gated delta rule.
 *
 * gdn.md 1.1, steps 2 to 4. Items of the fan-out are (chunk, group of heads): a chunk's rows of
 * some channels stay in the nearest cache while four of them at a time are combined. The slot's
 * window is read by the first three tokens of a piece, so it is replaced only after all items
 * are done. */
#include <math.h>
#include <string.h>

#include "cpu_impl.h"
#include "cpu_simd.h"

/* Heads that one item takes: 4 x 128 channels of 4 rows and their taps fit the nearest
 * cache. */
enum { HEADS_PER_ITEM = 4, TAPS = 4 };

struct conv_run {
    const struct op_gdn_conv *a;
    const float *taps;  /* [4, conv_dim] */
    const float *zeros; /* [conv_dim] what stands before a fresh request */
    int32_t n_groups;
};

size_t cpu_gdn_conv_workspace_bytes(const struct backend_limits *l)
{
    return cpu_round_up((size_t)(TAPS + 1) * l->conv_dim * sizeof(float), CPU_ALIGN);
}

/* y[c] = sum over the taps of w[j][c] * x[j][c]. */
CPU_INLINE void taps_body(int32_t n, const float *const *x, const float *w, size_t w_stride,
                          float *y)
{
    const float *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
    for (int32_t c = 0; c < n; c += VEC) {
        vf sum = VF_LOAD(x0 + c) * VF_LOAD(w + c);
        sum += VF_LOAD(x1 + c) * VF_LOAD(w + w_stride + c);
        sum += VF_LOAD(x2 + c) * VF_LOAD(w + 2 * w_stride + c);
        sum += VF_LOAD(x3 + c) * VF_LOAD(w + 3 * w_stride + c);
        VF_STORE(y + c, sum);
    }
}
CPU_KERNEL(taps, (int32_t n, const float *const *x, const float *w, size_t w_stride, float *y),
           (n, x, w, w_stride, y))

CPU_INLINE void scale_body(int32_t n, float s, float *y)
{
    for (int32_t c = 0; c < n; c += VEC)
        VF_STORE(y + c, VF_LOAD(y + c) * s);
}
CPU_KERNEL(scale, (int32_t n, float s, float *y), (n, s, y))

/* Sequence n's row i of p (i counts from the piece's start and may be -3..-1). */
static const float *input_row(const struct conv_run *r, int32_t n, int32_t i)
{
    const struct op_gdn_conv *a = r->a;
    if (i >= 0)
        return (const float *)a->p + (size_t)(a->b->cu_seqlens[n] + i) * a->d.ld;
    if (a->b->start[n] == 0)
        return r->zeros;
    return cpu_conv_at(&a->d, a->pool, a->b->slots[n]) + (size_t)(3 + i) * a->d.conv_dim;
}

/* One head's outputs of one token: x [4] points at its channels of the last four inputs. */
static void conv_head(const struct conv_run *r, int32_t i_head, const float *const *x,
                      const float *w, int32_t t)
{
    const struct op_gdn_conv *a = r->a;
    int32_t H = a->d.H, K = a->d.K, V = a->d.V;
    if (i_head >= 2 * H) {
        float *v = (float *)a->v + ((size_t)t * a->d.HV + (i_head - 2 * H)) * V;
        taps(V, x, w, a->d.conv_dim, v);
        cpu_vec_silu(V, v, v);
        return;
    }
    bool is_q = i_head < H;
    float *y = is_q ? (float *)a->q + ((size_t)t * H + i_head) * K
                    : (float *)a->k + ((size_t)t * H + (i_head - H)) * K;
    taps(K, x, w, a->d.conv_dim, y);
    cpu_vec_silu(K, y, y);
    float norm = 1 / sqrtf(cpu_vec_dot(K, y, y) + 1e-6f);
    scale(K, is_q ? norm * (1 / sqrtf((float)K)) : norm, y);
}

/* beta and g of a token's heads; softplus is linear above 20. */
static void gates(const struct op_gdn_conv *a, int32_t t)
{
    const struct gdn_dims *d = &a->d;
    const float *b = (const float *)a->p + (size_t)t * d->ld + d->conv_dim + d->HV * d->V;
    const float *raw = b + d->HV;
    float *beta = a->beta + (size_t)t * d->HV, *g = a->g + (size_t)t * d->HV;
    for (int32_t h = 0; h < d->HV; h++) {
        beta[h] = 1 / (1 + expf(-b[h]));
        float x = raw[h] + a->dt_bias[h];
        g[h] = -expf(a->A_log[h]) * (x > 20 ? x : log1pf(expf(x)));
    }
}

static void conv_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct conv_run *r = arg;
    const struct op_gdn_conv *a = r->a;
    const struct batch *b = a->b;
    int32_t flat = (int32_t)(item / r->n_groups), group = (int32_t)(item % r->n_groups);
    int32_t n = b->map.seq[flat], first = b->map.index[flat] * CHUNK_TOKENS;
    int32_t len = b->cu_seqlens[n + 1] - b->cu_seqlens[n];
    int32_t end = first + CHUNK_TOKENS < len ? first + CHUNK_TOKENS : len;
    int32_t n_heads = 2 * a->d.H + a->d.HV;
    int32_t head0 = group * HEADS_PER_ITEM;
    int32_t head_end = head0 + HEADS_PER_ITEM < n_heads ? head0 + HEADS_PER_ITEM : n_heads;
    for (int32_t i = first; i < end; i++) {
        int32_t t = b->cu_seqlens[n] + i;
        const float *rows[TAPS];
        for (int32_t j = 0; j < TAPS; j++)
            rows[j] = input_row(r, n, i - 3 + j);
        for (int32_t h = head0; h < head_end; h++) {
            size_t c = h < 2 * a->d.H
                           ? (size_t)h * a->d.K
                           : (size_t)2 * a->d.H * a->d.K + (size_t)(h - 2 * a->d.H) * a->d.V;
            const float *x[TAPS] = {rows[0] + c, rows[1] + c, rows[2] + c, rows[3] + c};
            conv_head(r, h, x, r->taps + c, t);
        }
        if (group == 0)
            gates(a, t);
    }
    int32_t to = group == 0 ? cpu_save_slot(b, flat) : -1;
    for (int32_t j = 0; j < 3 && to >= 0; j++)
        memcpy(cpu_conv_at(&a->d, a->pool, to) + (size_t)j * a->d.conv_dim,
               input_row(r, n, end - 3 + j), (size_t)a->d.conv_dim * sizeof(float));
}

/* Shifts a sequence's window by its piece. Row j of the new window is input len - 3 + j, which
 * may still be one of the old window's later rows; oldest first, so none is overwritten
 * early. */
static void window_item(void *arg, int64_t item, int32_t thread)
{
    (void)thread;
    const struct conv_run *r = arg;
    const struct op_gdn_conv *a = r->a;
    int32_t n = (int32_t)item;
    int32_t len = a->b->cu_seqlens[n + 1] - a->b->cu_seqlens[n];
    if (len == 0)
        return;
    float *window = cpu_conv_at(&a->d, a->pool, a->b->slots[n]);
    for (int32_t j = 0; j < 3; j++)
        memcpy(window + (size_t)j * a->d.conv_dim, input_row(r, n, len - 3 + j),
               (size_t)a->d.conv_dim * sizeof(float));
}

void cpu_gdn_conv(struct backend *b, const struct op_gdn_conv *a)
{
    size_t bytes;
    float *taps_t = cpu_impl_workspace(b, &bytes);
    size_t dim = a->d.conv_dim;
    for (size_t c = 0; c < dim; c++)
        for (size_t j = 0; j < TAPS; j++)
            taps_t[j * dim + c] = a->conv_w[c * TAPS + j];
    float *zeros = taps_t + TAPS * dim;
    memset(zeros, 0, dim * sizeof(float));
    int32_t n_heads = 2 * a->d.H + a->d.HV;
    struct conv_run r = {a, taps_t, zeros, (n_heads + HEADS_PER_ITEM - 1) / HEADS_PER_ITEM};
    struct cpu_pool *pool = cpu_impl_pool(b);
    cpu_pool_run(pool, (int64_t)a->b->n_chunks * r.n_groups, conv_item, &r);
    cpu_pool_run(pool, a->b->n_seqs, window_item, &r);
}
