/* Listening sockets: addresses as text, bound and unbound.
 *
 * Set-up code, main thread. TCP over IPv4 and IPv6, and unix sockets; opened
 * here, or handed over by a service manager. */
#ifndef PREFILLD_HTTP_LISTEN_H
#define PREFILLD_HTTP_LISTEN_H

#include <stdbool.h>
#include <sys/types.h>

#include "err.h"

struct listener {
    int fd;            /* -1: closed */
    char address[160]; /* as it is reported, with the real port */
    char path[108];    /* unix; else empty */
    dev_t dev;         /* of path, so that only our own is removed */
    ino_t ino;
    bool is_adopted;
};

/* spec: ADDR:PORT, [ADDR6]:PORT or unix:PATH. A unix path at which nobody listens any more is
 * taken over. Non-blocking, close-on-exec. Returns 0, ERR_INVALID or ERR_IO. */
int listener_open(const char *spec, struct listener *l, struct errmsg *e);
/* Closes; removes the path if it is still the one that was bound. Idempotent. */
void listener_close(struct listener *l);

/* Takes a listening stream socket that was handed over; its path, if any, stays at the end.
 * Makes it non-blocking, for its other holders, too. Returns 0 or ERR_INVALID; fd is closed
 * then. */
int listener_adopt(int fd, struct listener *l, struct errmsg *e);

#endif
