/* Names that nobody can guess: of requests and of sessions. */
#ifndef PREFILLD_RANDOM_NAME_H
#define PREFILLD_RANDOM_NAME_H

#include <stdbool.h>
#include <string.h>
#include <sys/random.h>

enum { RANDOM_NAME_BYTES = 12 };

/* The prefix, 24 hexadecimal digits and a NUL. False when the system gives no random bytes,
 * which it does not in part and not long after its start; the digits are 0 then. Any thread. */
static inline bool random_name(char *out, const char *prefix)
{
    static const char hex[] = "0123456789abcdef";
    unsigned char bytes[RANDOM_NAME_BYTES];
    bool is_random = getrandom(bytes, sizeof(bytes), 0) == (ssize_t)sizeof(bytes);
    size_t n = strlen(prefix);
    memcpy(out, prefix, n);
    for (size_t i = 0; i < sizeof(bytes); i++, n += 2) {
        out[n] = is_random ? hex[bytes[i] >> 4] : '0';
        out[n + 1] = is_random ? hex[bytes[i] & 15] : '0';
    }
    out[n] = '\0';
    return is_random;
}

#endif
