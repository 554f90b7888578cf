/* How fast steps run: tokens a microsecond, from the steps that have ended. Pure.
 *
 * The slope of time over tokens, through 0, by least squares with a memory of some full steps:
 * what full steps reach. A small step costs as much by the step as by the token, while a queue,
 * which is what the rate is asked about, runs in full ones; a plain quotient of sums says after
 * a thousand small steps that the machine is slow. */
#ifndef PREFILLD_RATE_H
#define PREFILLD_RATE_H

#include <stdint.h>

enum { RATE_KEEP_STEPS = 16 };

struct rate {
    double window_tokens;
    double nn, nt; /* decayed sums of tokens^2 and tokens * us */
};

/* max_step_tokens: of a full step. */
static inline struct rate rate_start(int32_t max_step_tokens)
{
    return (struct rate){.window_tokens = RATE_KEEP_STEPS * (double)max_step_tokens};
}

/* A step of n_tokens (1..max_step_tokens) took that long, at least 1 us. */
static inline void rate_add(struct rate *r, int32_t n_tokens, int64_t us)
{
    double n = n_tokens, keep = 1 - n / r->window_tokens;
    r->nn = r->nn * keep + n * n;
    r->nt = r->nt * keep + n * (double)us;
}

/* unknown: what to say before the first step. */
static inline double rate_tokens_per_us(const struct rate *r, double unknown)
{
    return r->nt > 0 ? r->nn / r->nt : unknown;
}

#endif
