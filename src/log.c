#include "log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static _Atomic int max_level = LOG_LEVEL_INFO;
static int is_journal;

void log_init(enum log_level level, const char *journal_stream)
{
    unsigned long long dev, ino;
    struct stat st;
    is_journal = journal_stream && sscanf(journal_stream, "%llu:%llu", &dev, &ino) == 2 &&
                 fstat(STDERR_FILENO, &st) == 0 && st.st_dev == dev && st.st_ino == ino;
    log_set_level(level);
}

const char *log_prefix(enum log_level level)
{
    static const char *const journal[] = {"<3>", "<4>", "<6>", "<7>"};
    return is_journal ? journal[level] : "";
}

void log_set_level(enum log_level level)
{
    atomic_store(&max_level, level);
}

void log_line(enum log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed))
        return;
    char line[2048];
    int n;
    if (is_journal) {
        n = snprintf(line, sizeof(line), "%s", log_prefix(level));
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
