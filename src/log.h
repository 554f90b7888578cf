/* Log lines on stderr: one event, one line, key=value, request id first.
 *
 * Callable from any thread; a line is written with one write(2). Levels: error = act, warn =
 * look, info = start, stop, reload and one line a request, debug = the rest. Prompts and tokens
 * are never logged. Under journald lines carry the <N> priority prefix. */
#ifndef PREFILLD_LOG_H
#define PREFILLD_LOG_H

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

/* journal_stream: JOURNAL_STREAM, or NULL; when it names what stderr is, journald reads the
 * lines. Call once before threads start. */
void log_init(enum log_level level, const char *journal_stream);
void log_set_level(enum log_level level);

/* What a line of one's own on stderr begins with. */
const char *log_prefix(enum log_level level);

void log_line(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...) log_line(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...) log_line(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
