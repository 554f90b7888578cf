/* Memory that is short now and then: of malloc, calloc and realloc one in so many fails while a
 * test says so. A program that includes this is linked with WRAP_MALLOC, which leaves the C
 * library's and the sanitizers' own calls as they are. One thread may allocate meanwhile. */
#ifndef PREFILLD_TESTS_SHORT_MEMORY_H
#define PREFILLD_TESTS_SHORT_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "rng.h"

static struct {
    struct rng rng;
    int32_t one_in; /* 0: none fails */
    long long n_failed;
} short_memory;

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t n);

static bool short_memory_fails(void)
{
    bool fails =
        short_memory.one_in > 0 && rng_int(&short_memory.rng, short_memory.one_in) == 0;
    short_memory.n_failed += fails;
    return fails;
}

void *__wrap_malloc(size_t n)
{
    return short_memory_fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    return short_memory_fails() ? NULL : __real_calloc(n, bytes);
}

void *__wrap_realloc(void *p, size_t n)
{
    return short_memory_fails() ? NULL : __real_realloc(p, n);
}

#endif
