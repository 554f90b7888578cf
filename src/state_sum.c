#include "state_sum.h"

#include <string.h>

static inline uint64_t mix(uint64_t x)
{
    uint64_t y = x * 0x9e3779b97f4a7c15u;
    return y ^ y >> 32;
}

static inline uint64_t word(const unsigned char *p)
{
    uint64_t w;
    memcpy(&w, p, sizeof(w));
    return w;
}

/* Lanes in registers: the products of one block do not wait for each other. Written out,
 * because compilers keep an array in memory. */
static void add_blocks(uint64_t lanes[STATE_SUM_LANES], const unsigned char *p, size_t n)
{
    uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
    uint64_t e = lanes[4], f = lanes[5], g = lanes[6], h = lanes[7];
    for (; n > 0; n--, p += STATE_SUM_BLOCK) {
        a = mix(a ^ word(p));
        b = mix(b ^ word(p + 8));
        c = mix(c ^ word(p + 16));
        d = mix(d ^ word(p + 24));
        e = mix(e ^ word(p + 32));
        f = mix(f ^ word(p + 40));
        g = mix(g ^ word(p + 48));
        h = mix(h ^ word(p + 56));
    }
    const uint64_t after[] = {a, b, c, d, e, f, g, h};
    memcpy(lanes, after, sizeof(after));
}

void state_sum_start(struct state_sum *s)
{
    memset(s, 0, sizeof(*s));
    for (int i = 0; i < STATE_SUM_LANES; i++)
        s->lanes[i] = (uint64_t)i;
}

void state_sum_add(struct state_sum *s, const void *data, size_t len)
{
    const unsigned char *p = data;
    size_t n_tail = s->n_bytes % STATE_SUM_BLOCK, n = STATE_SUM_BLOCK - n_tail;
    s->n_bytes += len;
    if (n_tail > 0) {
        n = n < len ? n : len;
        memcpy(s->tail + n_tail, p, n);
        p += n;
        len -= n;
        if (n_tail + n < STATE_SUM_BLOCK)
            return;
        add_blocks(s->lanes, s->tail, 1);
    }
    add_blocks(s->lanes, p, len / STATE_SUM_BLOCK);
    n = len % STATE_SUM_BLOCK;
    if (n > 0)
        memcpy(s->tail, p + (len - n), n);
}

uint64_t state_sum_of(const struct state_sum *s)
{
    uint64_t lanes[STATE_SUM_LANES], sum = s->n_bytes;
    size_t n_tail = s->n_bytes % STATE_SUM_BLOCK;
    unsigned char last[STATE_SUM_BLOCK] = {0};
    memcpy(lanes, s->lanes, sizeof(lanes));
    memcpy(last, s->tail, n_tail);
    add_blocks(lanes, last, n_tail > 0);
    for (int i = 0; i < STATE_SUM_LANES; i++)
        sum = mix(sum ^ lanes[i]);
    return sum;
}
