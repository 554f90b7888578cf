/* A libcuda.so.1 that is there and does not work: FAKE_DRIVER_VERSION is what it says it is for
 * (13000: CUDA 13.0), FAKE_DRIVER_ERROR what everything else returns. tests/test_driver.py puts
 * it before the daemon. Declares for itself what it needs of cuda.h, which a CPU build does not
 * have. */
#include <stdlib.h>
#include <string.h>

int cuDriverGetVersion(int *version);
int cuGetProcAddress_v2(const char *name, void **p, int version, unsigned long long flags,
                        int *status);

int cuDriverGetVersion(int *version)
{
    *version = atoi(getenv("FAKE_DRIVER_VERSION"));
    return 0;
}

static int fail(void)
{
    return atoi(getenv("FAKE_DRIVER_ERROR"));
}

int cuGetProcAddress_v2(const char *name, void **p, int version, unsigned long long flags,
                        int *status)
{
    (void)version;
    (void)flags;
    if (status)
        *status = 0;
    if (strcmp(name, "cuDriverGetVersion") == 0)
        *(int (**)(int *))p = cuDriverGetVersion;
    else if (strcmp(name, "cuGetProcAddress") == 0)
        *(int (**)(const char *, void **, int, unsigned long long, int *))p =
            cuGetProcAddress_v2;
    else
        *(int (**)(void))p = fail;
    return 0;
}
