/* TAP for the tests that are plain programs (they also run under TSan, where Criterion cannot).
 * Usage: CHECK(cond, "what"); each call is one line of output; return tap_done() from main. */
#ifndef PREFILLD_TESTS_TAP_H
#define PREFILLD_TESTS_TAP_H

#include <stdarg.h>
#include <stdio.h>

static int tap_count, tap_failed;

__attribute__((format(printf, 4, 5), unused)) static int
tap_check(int ok, const char *file, int line, const char *fmt, ...)
{
    va_list ap;
    printf("%s %d - ", ok ? "ok" : "not ok", ++tap_count);
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    printf("\n");
    if (!ok) {
        printf("# failed at %s:%d\n", file, line);
        tap_failed++;
    }
    fflush(stdout);
    return ok;
}

__attribute__((unused)) static void tap_skip(const char *what, const char *why)
{
    printf("ok %d - %s # SKIP %s\n", ++tap_count, what, why);
    fflush(stdout);
}

__attribute__((unused)) static int tap_done(void)
{
    printf("1..%d\n", tap_count);
    return tap_failed != 0;
}

#define CHECK(cond, ...) tap_check((cond) != 0, __FILE__, __LINE__, __VA_ARGS__)

#endif
