/* Random weights for `load = dummy`: sizing and speed without a checkpoint.
 *
 * Seeded and fast (one 64-bit mix gives four elements); every row differs. Sizes are chosen so
 * that a deep model stays finite and its logits spread like a trained model's. */
#include <math.h>
#include <string.h>

#include "weights_plan.h"

/* splitmix64 (Steele, Lea, Flood 2014): a counter through a mixing function. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static const uint64_t STEP = 0x9e3779b97f4a7c15ull;

uint64_t dummy_seed(uint64_t seed, int32_t layer, size_t at)
{
    /* at is below 2^16, and in the model's own scope as in a layer's. */
    return mix(mix(seed + STEP) + (((uint64_t)(layer + 1) << 16) + at) * STEP);
}

/* Uniform in [0, 1). */
static float unit(uint64_t *s)
{
    return (float)(mix(*s += STEP) >> 40) * 0x1p-24f;
}

/* Uniform over +-sqrt(3) std, rounded to bf16. */
void dummy_rows(uint64_t seed, float std, uint16_t *rows_bf16, size_t n)
{
    enum { BLOCK = 256 };
    const float scale = std * sqrtf(3) / 32768;
    for (size_t i = 0; i < n; i += BLOCK) {
        uint64_t words[BLOCK / 4];
        int16_t draws[BLOCK];
        uint16_t out[BLOCK];
        for (size_t k = 0; k < BLOCK / 4; k++)
            words[k] = mix(seed += STEP);
        memcpy(draws, words, sizeof(draws));
        for (size_t k = 0; k < BLOCK; k++) {
            float x = (float)draws[k] * scale;
            uint32_t bits;
            memcpy(&bits, &x, sizeof(bits));
            out[k] = (uint16_t)((bits + 0x8000) >> 16);
        }
        memcpy(rows_bf16 + i, out, (n - i < BLOCK ? n - i : BLOCK) * sizeof(out[0]));
    }
}

void dummy_vec(uint64_t seed, enum fill fill, float *v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float u = unit(&seed);
        switch (fill) {
        case FILL_NORM: /* around 1 */
            v[i] = 0.9f + 0.2f * u;
            break;
        case FILL_CONV: /* four taps of variance 1/4 keep the channel's size */
            v[i] = sqrtf(3) * (u - 0.5f);
            break;
        case FILL_A_LOG: /* decay rates 1 to 16, as trained models start */
            v[i] = logf(1 + 15 * u);
            break;
        case FILL_DT_BIAS: /* softplus(dt_bias) from 0.001 to 0.1, evenly in the logarithm */
            v[i] = logf(expm1f(expf(logf(0.001f) + u * logf(100.0f))));
            break;
        case FILL_ROW: /* a row of a projection */
            v[i] = sqrtf(12 / (float)n) * (u - 0.5f);
            break;
        }
    }
}
