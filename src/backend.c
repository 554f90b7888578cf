#include "backend.h"

#include <string.h>

const struct backend_ops *backend_find(const char *name, struct errmsg *e)
{
    if (strcmp(name, "cpu") == 0 || strcmp(name, "auto") == 0)
        return &backend_cpu_ops;
    if (strcmp(name, "cuda") == 0)
        errmsg_set(e, ERR_UNSUPPORTED, "backend cuda: this build has no CUDA backend");
    else
        errmsg_set(e, ERR_INVALID, "backend: found '%s', accepted: auto, cpu, cuda", name);
    return NULL;
}
