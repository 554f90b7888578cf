/* The checksum of saved states (state_file.h). Owns nothing; any thread.
 *
 * Words of 8 bytes, little-endian, the last one filled up with zeros, go to 8 lanes in turn:
 * lane = mix(lane ^ word), mix(x) = y ^ y >> 32 with y = x * 0x9e3779b97f4a7c15, and at the end
 * sum = mix(sum ^ lane) over the lanes in order, from the number of bytes on. Lane i begins as
 * i. Each of these is one-to-one in the word and in what was before it, so a change within one
 * word, of one bit or of 64, is always seen; one of several words is missed once in 2^64.
 * Against faults, not against forgery: whoever can write a file can write its sum, too. Derived
 * here. */
#ifndef PREFILLD_STATE_SUM_H
#define PREFILLD_STATE_SUM_H

#include <stddef.h>
#include <stdint.h>

enum { STATE_SUM_LANES = 8, STATE_SUM_BLOCK = 8 * STATE_SUM_LANES };

struct state_sum {
    uint64_t lanes[STATE_SUM_LANES];
    unsigned char tail[STATE_SUM_BLOCK]; /* bytes of a block that is not whole yet */
    uint64_t n_bytes;
};

void state_sum_start(struct state_sum *s);
void state_sum_add(struct state_sum *s, const void *data, size_t len);
/* The sum of all that was added; s may go on. */
uint64_t state_sum_of(const struct state_sum *s);

#endif
