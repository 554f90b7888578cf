/* SHA-256 (FIPS 180-4), for comparing with hashes in fixtures. */
#ifndef PREFILLD_TESTS_SHA256_H
#define PREFILLD_TESTS_SHA256_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first 32 bits of the fractional part of x, scaled: the constants are those of roots. */
static inline uint32_t sha256_root(int prime, int cube)
{
    /* Integer roots of prime * 2^64 (square) or prime * 2^96 (cube), by bisection. */
    unsigned __int128 low = 0, high = (unsigned __int128)1 << 36;
    while (high - low > 1) {
        unsigned __int128 middle = (low + high) / 2;
        unsigned __int128 power = cube ? middle * middle * middle : middle * middle;
        if (power <= (unsigned __int128)prime << (cube ? 96 : 64))
            low = middle;
        else
            high = middle;
    }
    return (uint32_t)low;
}

static inline uint32_t sha256_rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static inline void sha256_block(uint32_t h[8], const uint32_t k[64], const unsigned char *p)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++, p += 4)
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (sha256_rotate(a, 7) ^ sha256_rotate(a, 18) ^ a >> 3) +
               (sha256_rotate(b, 17) ^ sha256_rotate(b, 19) ^ b >> 10);
    }
    memcpy(s, h, sizeof(s));
    for (int i = 0; i < 64; i++) {
        uint32_t a = s[0], e = s[4];
        uint32_t x = s[7] +
                     (sha256_rotate(e, 6) ^ sha256_rotate(e, 11) ^ sha256_rotate(e, 25)) +
                     ((e & s[5]) ^ (~e & s[6])) + k[i] + w[i];
        uint32_t y = (sha256_rotate(a, 2) ^ sha256_rotate(a, 13) ^ sha256_rotate(a, 22)) +
                     ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof(*s));
        s[4] += x;
        s[0] = x + y;
    }
    for (int i = 0; i < 8; i++)
        h[i] += s[i];
}

static inline void sha256_hex(const char *data, size_t len, char hex[65])
{
    uint32_t h[8], k[64];
    int n = 0;
    for (int x = 2; n < 64; x++) {
        int prime = 1;
        for (int d = 2; d * d <= x; d++)
            prime &= x % d != 0;
        if (!prime)
            continue;
        if (n < 8)
            h[n] = sha256_root(x, 0);
        k[n++] = sha256_root(x, 1);
    }
    size_t padded = (len + 9 + 63) / 64 * 64;
    unsigned char *text = calloc(padded, 1);
    memcpy(text, data, len);
    text[len] = 0x80;
    for (int i = 0; i < 8; i++)
        text[padded - 1 - (size_t)i] = (unsigned char)((uint64_t)len * 8 >> (8 * i));
    for (size_t i = 0; i < padded; i += 64)
        sha256_block(h, k, text + i);
    free(text);
    for (int i = 0; i < 8; i++)
        snprintf(hex + 8 * i, 9, "%08x", h[i]);
}

#endif
