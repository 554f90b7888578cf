#include "log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Atomic int max_level = LOG_LEVEL_INFO;
static int is_journal;

void log_init(enum log_level level)
{
    is_journal = getenv("JOURNAL_STREAM") != NULL;
    log_set_level(level);
}

void log_set_level(enum log_level level)
{
    atomic_store(&max_level, level);
}

void log_line(enum log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    static const char *const journal[] = {"<3>", "<4>", "<6>", "<7>"};
    if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed))
        return;
    char line[2048];
    int n;
    if (is_journal) {
        n = snprintf(line, sizeof(line), "%s", journal[level]);
    } else {
        struct timespec ts;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &ts);
        gmtime_r(&ts.tv_sec, &tm);
        n = (int)strftime(line, sizeof(line), "%Y-%m-%dT%H:%M:%S", &tm);
        n += snprintf(line + n, sizeof(line) - n, ".%03ldZ %s ", ts.tv_nsec / 1000000,
                      names[level]);
    }
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof(line) - n - 1, fmt, ap);
    va_end(ap);
    if (m < 0)
        return;
    n += m;
    if (n > (int)sizeof(line) - 2)
        n = (int)sizeof(line) - 2;
    line[n++] = '\n';
    /* A failed write to stderr has nowhere to be reported. */
    ssize_t ignored = write(STDERR_FILENO, line, n);
    (void)ignored;
}
