/* Seeded random numbers for tests and benchmarks: splitmix64. Print the seed. */
#ifndef PREFILLD_TESTS_RNG_H
#define PREFILLD_TESTS_RNG_H

#include <math.h>
#include <stdint.h>

struct rng {
    uint64_t s;
};

static inline uint64_t rng_u64(struct rng *r)
{
    uint64_t z = (r->s += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* Uniform in [0, n). */
static inline int32_t rng_int(struct rng *r, int32_t n)
{
    return (int32_t)(rng_u64(r) % (uint64_t)n);
}

/* Uniform in [0, 1). */
static inline double rng_unit(struct rng *r)
{
    return (double)(rng_u64(r) >> 11) * 0x1p-53;
}

/* Standard normal. */
static inline float rng_normal(struct rng *r)
{
    double u = rng_unit(r) + 0x1p-54;
    double v = rng_unit(r);
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

#endif
