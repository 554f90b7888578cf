/* The CUDA backend's table: the device, its memory, its errors.
 *
 * Operations enqueue on one stream and never wait; the waits are step_done and the set-up
 * calls. Engine thread, except the set-up calls before it starts: one thread at a time
 * launches. The kernels' launch stubs are compiled without thread-safe statics and count on
 * that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_impl.h"

/* The cards that the kernels are compiled for. */
enum { CUDA_LEAST_CC = 80, CUDA_MOST_CC = 90 };

/* ---- errors ---- */

void cuda_note(struct backend *b, const char *what, cudaError_t error)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    if (error == cudaSuccess || impl->error != cudaSuccess)
        return;
    if (impl->is_recording) {
        impl->is_record_bad = true;
        return;
    }
    impl->error = error;
    snprintf(impl->why, sizeof(impl->why), "%s: %s", what, cudaGetErrorString(error));
    b->lost = impl->why;
}

int cuda_wait(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cuda_note(b, "waiting", cudaStreamSynchronize(impl->stream));
    return impl->error == cudaSuccess ? 0 : ERR_DEVICE;
}

/* ---- memory ---- */

static void cuda_memory(struct backend *b, size_t *free_bytes, size_t *total_bytes)
{
    (void)b;
    if (cudaMemGetInfo(free_bytes, total_bytes) != cudaSuccess)
        *free_bytes = *total_bytes = 0;
}

static bool is_aligned(const void *p)
{
    return (uintptr_t)p % CUDA_ALIGN == 0;
}

/* Memory with room to shift in, and a note of where it really begins. */
static void *alloc_shifted(struct cuda_impl *impl, size_t bytes)
{
    if (impl->n_blocks == impl->blocks_cap) {
        int32_t cap = impl->blocks_cap ? 2 * impl->blocks_cap : 64;
        struct cuda_block *more = realloc(impl->blocks, (size_t)cap * sizeof(*more));
        if (!more)
            return NULL;
        impl->blocks = more;
        impl->blocks_cap = cap;
    }
    struct cuda_block *block = &impl->blocks[impl->n_blocks];
    if (cudaMalloc(&block->raw, bytes + CUDA_ALIGN) != cudaSuccess)
        return NULL;
    block->p = (void *)cuda_round_up((uintptr_t)block->raw, CUDA_ALIGN);
    impl->n_blocks++;
    return block->p;
}

void *cuda_alloc(struct backend *b, size_t bytes)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    void *p = NULL;
    cudaSetDevice(impl->device);
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) {
        /* Not a fault of the device: the caller hears NULL. */
        cudaGetLastError();
        return NULL;
    }
    if (is_aligned(p))
        return p;
    cudaFree(p);
    return alloc_shifted(impl, bytes);
}

void cuda_free(struct backend *b, void *p)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    for (int32_t i = 0; p && i < impl->n_blocks; i++) {
        if (impl->blocks[i].p == p) {
            p = impl->blocks[i].raw;
            impl->blocks[i] = impl->blocks[--impl->n_blocks];
            break;
        }
    }
    cudaFree(p);
}

int cuda_upload(struct backend *b, void *dst, const void *src_host, size_t bytes)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cudaSetDevice(impl->device);
    cuda_note(b, "upload",
              cudaMemcpyAsync(dst, src_host, bytes, cudaMemcpyHostToDevice, impl->stream));
    return cuda_wait(b);
}

int cuda_download(struct backend *b, void *dst_host, const void *src, size_t bytes)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    cudaSetDevice(impl->device);
    cuda_note(b, "download",
              cudaMemcpyAsync(dst_host, src, bytes, cudaMemcpyDeviceToHost, impl->stream));
    return cuda_wait(b);
}

/* ---- open and close ---- */

bool cuda_has_driver(void)
{
    int version = 0;
    return cudaDriverGetVersion(&version) != cudaSuccess || version != 0;
}

/* The refusals: driver, its version, devices, the card. */
static int find_device(int32_t device, struct k_device *out, struct errmsg *e)
{
    int driver = 0, n_devices = 0;
    cudaError_t error = cudaDriverGetVersion(&driver);
    if (error != cudaSuccess || driver == 0)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: no NVIDIA driver is installed (libcuda.so.1); "
                          "backend cpu runs without one");
    if (driver / 1000 < CUDART_VERSION / 1000)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: the driver is for CUDA %d.%d, this build needs %d.%d "
                          "or newer: update the driver, or choose backend cpu",
                          driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                          CUDART_VERSION % 1000 / 10);
    error = cudaGetDeviceCount(&n_devices);
    if (error != cudaSuccess || n_devices == 0)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: the driver is installed but gives no device (%s); "
                          "nvidia-smi may say more; backend cpu runs without one",
                          cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
    if (device < 0 || device >= n_devices)
        return errmsg_set(e, ERR_INVALID, "cuda-device: found %d, accepted: 0 to %d", device,
                          n_devices - 1);
    error = k_device_query(device, out);
    if (error == cudaSuccess)
        error = cudaSetDevice(device);
    /* The first call that makes a context. */
    if (error == cudaSuccess)
        error = cudaFree(NULL);
    if (error != cudaSuccess)
        return errmsg_set(e, ERR_DEVICE, "backend cuda: device %d does not start: %s", device,
                          cudaGetErrorString(error));
    if (out->cc < CUDA_LEAST_CC || out->cc > CUDA_MOST_CC)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "backend cuda: device %d has compute capability %d.%d, accepted: 8.0 "
                          "(A100) to 9.0 (H100, H200)",
                          device, out->cc / 10, out->cc % 10);
    return 0;
}

static void cuda_close(struct backend *b)
{
    struct cuda_impl *impl = cuda_impl_of(b);
    if (!impl)
        return;
    cudaSetDevice(impl->device);
    if (impl->stream)
        cudaStreamSynchronize(impl->stream);
    cuda_copy_close(b);
    cuda_workspace_free(b);
    gemm_close(b);
    cuda_stages_close(&impl->stages);
    cudaStream_t streams[] = {impl->stream, impl->in, impl->out};
    for (size_t i = 0; i < sizeof(streams) / sizeof(streams[0]); i++)
        if (streams[i])
            cudaStreamDestroy(streams[i]);
    for (int i = 0; i < CUDA_ENDS; i++)
        if (impl->ends[i])
            cudaEventDestroy(impl->ends[i]);
    free(impl->blocks);
    free(impl);
    b->impl = NULL;
    b->lost = NULL;
}

static int cuda_open(struct backend *b, int32_t device, struct errmsg *e)
{
    struct k_device dev;
    /* The driver holds 1,024 launches by default and makes the next one wait; two steps of a
     * deep model are more. It reads this when it starts; an operator's own value stays. */
    setenv("CUDA_SCALE_LAUNCH_QUEUES", "4x", 0);
    int rc = find_device(device, &dev, e);
    if (rc != 0)
        return rc;
    struct cuda_impl *impl = calloc(1, sizeof(*impl));
    if (!impl)
        return errmsg_set(e, ERR_NOMEM, "backend cuda: out of memory");
    impl->device = device;
    impl->dev = dev;
    b->ops = &backend_cuda_ops;
    b->act = DTYPE_BF16;
    b->impl = impl;
    b->lost = NULL;
    cudaStream_t *streams[] = {&impl->stream, &impl->in, &impl->out};
    for (size_t i = 0; i < sizeof(streams) / sizeof(streams[0]) && rc == 0; i++)
        if (cudaStreamCreateWithFlags(streams[i], cudaStreamNonBlocking) != cudaSuccess)
            rc = errmsg_set(e, ERR_DEVICE, "backend cuda: cannot make a stream");
    for (int i = 0; i < CUDA_ENDS && rc == 0; i++)
        if (cudaEventCreate(&impl->ends[i]) != cudaSuccess)
            rc = errmsg_set(e, ERR_DEVICE, "backend cuda: cannot make an event");
    if (rc == 0 && cuda_copy_open(b) != 0)
        rc = errmsg_set(e, ERR_DEVICE, "backend cuda: cannot make a stream for copies");
    if (rc == 0)
        rc = gemm_open(b, e);
    if (rc != 0)
        cuda_close(b);
    return rc;
}

const struct backend_ops backend_cuda_ops = {
    .name = "cuda",
    .max_adjust = SAMPLE_MAX_ADJUST,
    .open = cuda_open,
    .close = cuda_close,
    .memory = cuda_memory,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .check = cuda_check,
    .weight_bytes = cuda_weight_bytes,
    .weight_make = cuda_weight_make,
    .weight_random = cuda_weight_random,
    .weight_free = cuda_weight_free,
    .workspace_bytes = cuda_workspace_bytes,
    .workspace_make = cuda_workspace_make,
    .step_begin = cuda_step_begin,
    .chunk_map = cuda_chunk_map,
    .replay = cuda_replay,
    .record_begin = cuda_record_begin,
    .record_end = cuda_record_end,
    .step_end = cuda_step_end,
    .step_done = cuda_step_done,
    .step_times = cuda_step_times,
    .trace = cuda_trace,
    .embed = cuda_embed,
    .rmsnorm = cuda_rmsnorm,
    .matmul = cuda_matmul,
    .gdn_conv = cuda_gdn_conv,
    .gdn_delta = cuda_gdn_delta,
    .attn_prep = cuda_attn_prep,
    .attn = cuda_attn,
    .moe_route = cuda_moe_route,
    .moe_experts = cuda_moe_experts,
    .swiglu = cuda_swiglu,
    .head = cuda_head,
    .state_bytes = cuda_state_bytes,
    .page_bytes = cuda_page_bytes,
    .state_pool_make = cuda_state_pool_make,
    .kv_pool_make = cuda_kv_pool_make,
    .state_pool_free = cuda_state_pool_free,
    .kv_pool_free = cuda_kv_pool_free,
    .state_read = cuda_state_read,
    .state_write = cuda_state_write,
    .kv_read = cuda_kv_read,
    .kv_write = cuda_kv_write,
    .stage_alloc = cuda_stage_alloc,
    .stage_free = cuda_stage_free,
    .slot_get = cuda_slot_get,
    .slot_put = cuda_slot_put,
    .page_get = cuda_page_get,
    .page_put = cuda_page_put,
    .copies_follow = cuda_copies_follow,
    .copies_mark = cuda_copies_mark,
    .copies_done = cuda_copies_done,
    .slot_unpack = cuda_slot_unpack,
    .slot_pack = cuda_slot_pack,
    .page_unpack = cuda_page_unpack,
    .page_pack = cuda_page_pack,
    .state_copy = cuda_state_copy,
    .page_copy = cuda_page_copy,
    .state_poison = cuda_state_poison,
    .page_poison = cuda_page_poison,
};
