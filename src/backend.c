#include "backend.h"

#include <string.h>

#include "config.h"

#if HAVE_CUDA
static const struct backend_ops *const cuda_ops = &backend_cuda_ops;
#else
static const struct backend_ops *const cuda_ops = NULL;

bool cuda_has_driver(void)
{
    return false;
}
#endif

const struct backend_ops *backend_find(const char *name, struct errmsg *e)
{
    if (strcmp(name, "auto") == 0)
        return cuda_ops && cuda_has_driver() ? cuda_ops : &backend_cpu_ops;
    if (strcmp(name, "cpu") == 0)
        return &backend_cpu_ops;
    if (strcmp(name, "cuda") == 0 && cuda_ops)
        return cuda_ops;
    if (strcmp(name, "cuda") == 0)
        errmsg_set(e, ERR_UNSUPPORTED,
                   "backend cuda: this build has no CUDA backend (configure --with-cuda)");
    else
        errmsg_set(e, ERR_INVALID, "backend: found '%s', accepted: auto, cpu, cuda", name);
    return NULL;
}
