/* The CUDA backend's parts of pools for export and import: copied beside the steps, on a stream
 * of their own through pinned memory, and brought into canonical form and back (backend.h).
 * Copying: engine thread; the rest: any thread, on the host. */
#include <string.h>

#include "cuda_impl.h"

int cuda_copy_open(struct backend *b)
{
    struct cuda_copy *c = &cuda_impl_of(b)->copy;
    bool is_good =
        cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking) == cudaSuccess &&
        cudaEventCreateWithFlags(&c->follows, cudaEventDisableTiming) == cudaSuccess;
    for (int i = 0; i < COPY_MARKS && is_good; i++)
        is_good = cudaEventCreateWithFlags(&c->marks[i], cudaEventDisableTiming) == cudaSuccess;
    return is_good ? 0 : ERR_DEVICE;
}

void cuda_copy_close(struct backend *b)
{
    struct cuda_copy *c = &cuda_impl_of(b)->copy;
    if (c->stream) {
        cudaStreamSynchronize(c->stream);
        cudaStreamDestroy(c->stream);
    }
    if (c->follows)
        cudaEventDestroy(c->follows);
    for (int i = 0; i < COPY_MARKS; i++)
        if (c->marks[i])
            cudaEventDestroy(c->marks[i]);
}

void *cuda_stage_alloc(struct backend *b, size_t bytes)
{
    void *p = NULL;
    cudaSetDevice(cuda_impl_of(b)->device);
    if (cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocDefault) != cudaSuccess) {
        /* Not a fault of the device: the caller hears NULL. */
        cudaGetLastError();
        return NULL;
    }
    return p;
}

void cuda_stage_free(struct backend *b, void *p)
{
    cudaSetDevice(cuda_impl_of(b)->device);
    cudaFreeHost(p);
}

/* ---- copies ---- */

static int copy(struct backend *b, void *to, const void *from, size_t bytes, bool is_out)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    enum cudaMemcpyKind kind = is_out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    cudaSetDevice(impl->device);
    cuda_note(b, "export and import",
              cudaMemcpyAsync(to, from, bytes, kind, impl->copy.stream));
    return impl->error == cudaSuccess ? 0 : ERR_DEVICE;
}

static size_t state_bytes(const struct gdn_dims *d)
{
    return (size_t)d->HV * (size_t)d->K * (size_t)d->V * sizeof(float);
}

static size_t conv_bytes(const struct gdn_dims *d)
{
    return 3 * (size_t)d->conv_dim * sizeof(uint16_t);
}

int cuda_slot_get(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                  int32_t slot, void *stage)
{
    size_t n = state_bytes(d), n_conv = conv_bytes(d);
    int rc = copy(b, stage, (char *)p->S + (size_t)slot * n, n, true);
    return rc ? rc
              : copy(b, (char *)stage + n, (char *)p->conv + (size_t)slot * n_conv, n_conv,
                     true);
}

int cuda_slot_put(struct backend *b, const struct gdn_dims *d, const struct state_pool *p,
                  int32_t slot, const void *stage)
{
    size_t n = state_bytes(d), n_conv = conv_bytes(d);
    int rc = copy(b, (char *)p->S + (size_t)slot * n, stage, n, false);
    return rc ? rc
              : copy(b, (char *)p->conv + (size_t)slot * n_conv, (const char *)stage + n,
                     n_conv, false);
}

static size_t half_page_bytes(const struct attn_dims *d, int32_t page_tokens)
{
    return (size_t)d->HK * (size_t)page_tokens * (size_t)d->D * sizeof(uint16_t);
}

static char *half_page(const struct attn_dims *d, const struct kv_pool *p, int32_t page,
                       bool is_value)
{
    return (char *)(is_value ? p->v : p->k) + (size_t)page * half_page_bytes(d, p->page_tokens);
}

int cuda_page_get(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                  int32_t page, bool is_value, void *stage)
{
    return copy(b, stage, half_page(d, p, page, is_value), half_page_bytes(d, p->page_tokens),
                true);
}

int cuda_page_put(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                  int32_t page, bool is_value, const void *stage)
{
    return copy(b, half_page(d, p, page, is_value), stage, half_page_bytes(d, p->page_tokens),
                false);
}

void cuda_copies_follow(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cudaSetDevice(impl->device);
    cuda_note(b, "import", cudaEventRecord(impl->copy.follows, impl->stream));
    cuda_note(b, "import", cudaStreamWaitEvent(impl->copy.stream, impl->copy.follows, 0));
}

int cuda_copies_mark(struct backend *b, int32_t i)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cudaSetDevice(impl->device);
    cuda_note(b, "export and import", cudaEventRecord(impl->copy.marks[i], impl->copy.stream));
    return impl->error == cudaSuccess ? 0 : ERR_DEVICE;
}

int cuda_copies_done(struct backend *b, int32_t i, bool wait)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cudaSetDevice(impl->device);
    cudaError_t error =
        wait ? cudaEventSynchronize(impl->copy.marks[i]) : cudaEventQuery(impl->copy.marks[i]);
    if (error == cudaErrorNotReady)
        return 0;
    cuda_note(b, "export and import", error);
    return impl->error == cudaSuccess ? 1 : ERR_DEVICE;
}

/* ---- canonical forms ---- */

/* Swaps the inner two dims of [HV, K, V], K and V being 128, in squares that stay in the
 * cache. */
static void transpose(const struct gdn_dims *d, const float *from, float *to)
{
    enum { SIDE = 16 };
    size_t n = (size_t)d->K;
    for (size_t h = 0; h < (size_t)d->HV; h++, from += n * n, to += n * n)
        for (size_t i = 0; i < n; i += SIDE)
            for (size_t j = 0; j < n; j += SIDE)
                for (size_t k = 0; k < SIDE; k++)
                    for (size_t l = 0; l < SIDE; l++)
                        to[(j + l) * n + i + k] = from[(i + k) * n + j + l];
}

void cuda_slot_unpack(const struct gdn_dims *d, const void *raw, float *S, void *conv)
{
    const uint16_t *window = (const uint16_t *)((const char *)raw + state_bytes(d));
    size_t n = (size_t)d->conv_dim;
    uint16_t *out = conv;
    transpose(d, raw, S);
    for (size_t c = 0; c < n; c++)
        for (size_t j = 0; j < 3; j++)
            out[c * 3 + j] = window[j * n + c];
}

void cuda_slot_pack(const struct gdn_dims *d, const float *S, const void *conv, void *raw)
{
    uint16_t *window = (uint16_t *)((char *)raw + state_bytes(d));
    size_t n = (size_t)d->conv_dim;
    const uint16_t *in = conv;
    transpose(d, S, raw);
    for (size_t c = 0; c < n; c++)
        for (size_t j = 0; j < 3; j++)
            window[j * n + c] = in[c * 3 + j];
}

enum { UNIT = 8 }; /* dims that lie side by side wherever they are: k_kv_offset */

void cuda_page_unpack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                      int32_t n_tokens, const void *raw, void *rows)
{
    const struct k_attn_dims kd = {.HQ = d->HQ, .HK = d->HK, .D = d->D};
    const uint16_t *page = raw;
    uint16_t *out = rows;
    (void)is_value; /* both lie alike */
    for (int32_t t = 0; t < n_tokens; t++)
        for (int32_t h = 0; h < d->HK; h++)
            for (int32_t i = 0; i < d->D; i += UNIT, out += UNIT)
                memcpy(out, page + k_kv_offset(&kd, page_tokens, 0, h, t, i),
                       UNIT * sizeof(*out));
}

void cuda_page_pack(const struct attn_dims *d, int32_t page_tokens, bool is_value,
                    int32_t n_tokens, const void *rows, void *raw)
{
    const struct k_attn_dims kd = {.HQ = d->HQ, .HK = d->HK, .D = d->D};
    const uint16_t *in = rows;
    uint16_t *page = raw;
    (void)is_value;
    if (n_tokens < page_tokens)
        memset(raw, 0, half_page_bytes(d, page_tokens));
    for (int32_t t = 0; t < n_tokens; t++)
        for (int32_t h = 0; h < d->HK; h++)
            for (int32_t i = 0; i < d->D; i += UNIT, in += UNIT)
                memcpy(page + k_kv_offset(&kd, page_tokens, 0, h, t, i), in,
                       UNIT * sizeof(*in));
}
