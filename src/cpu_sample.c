/* Sampling a token from a row of logits. The cuts by count and by mass look for a threshold on
 * the exponentials by halving the range of their bits, which for floats from 0 on are in the
 * order of their values: some thirty passes, no sorting, and the same result whatever runs
 * beside. */
#include <math.h>
#include <string.h>

#include "cpu_impl.h"
#include "cpu_simd.h"

enum { SPAN = 256 };

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

/* How many of e[n] are at least t, and their sum. Lanes hold strided parts, spans are summed in
 * f64: one order for every n. */
CPU_INLINE void above_body(int32_t n, const float *e, float t, int32_t *count, double *mass)
{
    double whole = 0;
    int32_t n_above = 0;
    for (int32_t from = 0; from < n; from += SPAN) {
        int32_t end = from + SPAN < n ? from + SPAN : n, i = from;
        vf sum = VF_SET(0.0f);
        vi hits = {0};
        for (; i + VEC <= end; i += VEC) {
            vf v = VF_LOAD(e + i);
            hits -= v >= t;
            sum += VF_KEEP(v >= t, v);
        }
        float rest = 0;
        for (; i < end; i++)
            if (e[i] >= t) {
                rest += e[i];
                n_above++;
            }
        for (int32_t k = 0; k < VEC; k++)
            n_above += hits[k];
        whole += VF_SUM(sum) + rest;
    }
    *count = n_above;
    *mass = whole;
}
CPU_KERNEL(above, (int32_t n, const float *e, float t, int32_t *count, double *mass),
           (n, e, t, count, mass))

/* The largest threshold from t on at which at least min_count values and min_mass of mass
 * stay. */
static float cut(int32_t n, const float *e, float t, int32_t min_count, double min_mass)
{
    uint32_t low = bits_of(t), high = bits_of(1.0f) + 1; /* low keeps enough, high does not */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        int32_t count;
        double mass;
        above(n, e, float_of(middle), &count, &mass);
        if (count >= min_count && mass >= min_mass)
            low = middle;
        else
            high = middle;
    }
    return float_of(low);
}

static int32_t largest(int32_t n, const float *x)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

int32_t cpu_sample_row(int32_t n, const float *logits, const struct row_sample *s, float *x)
{
    memcpy(x, logits, (size_t)n * sizeof(*x));
    for (int32_t i = 0; i < s->n_adjust; i++) {
        const struct row_adjust *a = &s->adjust[i];
        float *v = &x[a->id];
        *v = (*v > 0 ? *v / a->scale : *v * a->scale) + a->add;
    }
    int32_t best = largest(n, x);
    if (isinf(s->inv_temperature) || !isfinite(x[best]))
        return best;
    float max = x[best];
    for (int32_t i = 0; i < n; i++)
        x[i] = (x[i] - max) * s->inv_temperature;
    cpu_vec_exp(n, x, x);
    int32_t count;
    double mass;
    float t = s->min_p > 0 ? s->min_p : float_of(1); /* nothing of probability 0 */
    if (s->top_k > 0) {
        float by_count = cut(n, x, 0, s->top_k < n ? s->top_k : n, 0);
        t = by_count > t ? by_count : t;
    }
    if (s->top_p < 1) {
        above(n, x, t, &count, &mass);
        t = cut(n, x, t, 1, (double)s->top_p * mass);
    }
    above(n, x, t, &count, &mass);
    double sum = 0, wanted = s->u * mass;
    int32_t last = best;
    for (int32_t i = 0; i < n; i++) {
        if (!(x[i] >= t))
            continue;
        last = i;
        sum += x[i];
        if (sum > wanted)
            break;
    }
    return last;
}
