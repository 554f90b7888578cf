/* bfloat16 on the host: the upper half of a float. */
#ifndef PREFILLD_BF16_H
#define PREFILLD_BF16_H

#include <stdint.h>
#include <string.h>

/* To nearest, ties to even; NaN stays NaN. */
static inline uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
