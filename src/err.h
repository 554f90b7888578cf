/* Error codes and messages, shared by every module.
 *
 * Functions return 0 for success or a negative enum err. Code that runs at set-up or on bad
 * input also fills a caller-owned struct errmsg with the subject, what was found and what is
 * accepted. Low layers never log, print or exit. */
#ifndef PREFILLD_ERR_H
#define PREFILLD_ERR_H

enum err {
    ERR_OK = 0,
    ERR_NOMEM = -1,       /* host or device memory is short */
    ERR_INVALID = -2,     /* bad input: a request, an option, a file's content */
    ERR_IO = -3,          /* the system refused: open, read, map, bind */
    ERR_UNSUPPORTED = -4, /* well-formed, but not something prefilld does */
    ERR_FULL = -5,        /* a bounded queue or pool has no room */
    ERR_NOT_FOUND = -6,   /* no such thing */
    ERR_TOO_LARGE = -7,   /* past a configured limit */
    ERR_DEVICE = -8,      /* the device failed; nothing on it can be trusted */
    ERR_STOPPED = -9      /* shutting down */
};

/* Room for a list of some dozen tensor names; longer lists end in "and N more". */
struct errmsg {
    char text[4096];
};

/* Replaces the message. e may be NULL. Returns code, so that callers can
 * `return errmsg_set(e, ERR_INVALID, ...)`. */
int errmsg_set(struct errmsg *e, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Appends to the message, truncating at the buffer's end. e may be NULL. */
void errmsg_add(struct errmsg *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
