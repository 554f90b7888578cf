/* The service manager: what it is told (sd_notify's protocol) and the sockets it hands over.
 *
 * One datagram a message to the socket that NOTIFY_SOCKET names, a path or an abstract address;
 * without one every call does nothing. Main thread. Reads no environment: main.c does, and
 * hands the values in. Knows nothing of the engine but a time at which it last went on, which
 * is what the watchdog is fed for: a stuck engine starves it, however lively the HTTP threads
 * are. */
#ifndef PREFILLD_NOTIFY_H
#define PREFILLD_NOTIFY_H

#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "err.h"

struct notify {
    int fd; /* -1: nobody to tell */
    struct sockaddr_un address;
    socklen_t address_len;
    int64_t watchdog_us; /* 0: it does not watch */
    int64_t fed_us;      /* when it was last fed */
    int64_t progress_us; /* and for which progress */
    int64_t status_us;   /* when a status was last sent */
    char status[128];    /* and which */
};

/* socket, watchdog_usec, watchdog_pid: NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, or NULL.
 * Returns 0, or ERR_INVALID or ERR_IO with e filled; n is then as without a socket. */
int notify_open(struct notify *n, const char *socket, const char *watchdog_usec,
                const char *watchdog_pid, struct errmsg *e);
void notify_close(struct notify *n);

/* Sends lines of NAME=VALUE, at most 511 bytes. Waits a moment when the manager is slow.
 * Returns 0 or ERR_IO. */
int notify_send(struct notify *n, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* To be called several times a second. Sends the status when it has changed, at most once a
 * second; feeds the watchdog, four times in its interval, when progress_us (monotonic) is newer
 * than at the last feeding. */
void notify_tick(struct notify *n, int64_t now_us, int64_t progress_us, const char *status);

enum { NOTIFY_MAX_SOCKETS = 16, NOTIFY_FIRST_FD = 3 };

struct notify_sockets {
    int fds[NOTIFY_MAX_SOCKETS];
    char names[NOTIFY_MAX_SOCKETS][64]; /* of the socket unit, or FileDescriptorName= */
    int32_t n;
};

/* pid, fds, names: LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES, or NULL. Marks what was handed
 * over close-on-exec; it is the caller's from then on. None when they are another process's.
 * Returns 0 or ERR_INVALID. */
int notify_sockets_take(struct notify_sockets *s, const char *pid, const char *fds,
                        const char *names, struct errmsg *e);

#endif
