/* The watcher: one thread with an epoll set of the sockets libmicrohttpd does not look at.
 *
 * libmicrohttpd takes a suspended connection's socket out of its own set, so nobody would see
 * the client go away; the watcher does (EPOLLRDHUP). It also wakes for listening sockets and
 * for those that are drained before their close, and gives its owner a turn at a fixed interval
 * for deadlines. Knows file descriptors and callbacks; neither HTTP nor requests.
 *
 * A file descriptor is added while it is open and removed before it may be closed; events carry
 * a generation, so that one read from the kernel before a removal can never reach the next
 * owner of the same descriptor or slot. */
#ifndef PREFILLD_WATCH_H
#define PREFILLD_WATCH_H

#include <stdint.h>

#include "err.h"

enum watch_kind {
    WATCH_HANGUP,  /* reported once, then removed by itself */
    WATCH_READABLE /* reported while readable; added and removed on the watcher thread only, or
                      before watch_start */
};

struct watch_ops {
    /* Watcher thread, with the watcher's lock held: must not call watch_*, and must not wait.
     * When watch_remove has returned, it is over and will not come. */
    void (*hangup)(void *arg, void *owner);
    /* Watcher thread, no lock held. */
    void (*readable)(void *arg, void *owner);
    /* Watcher thread, no lock held: after every batch of events, and at least each tick. */
    void (*turn)(void *arg);
};

struct watch;

/* max_fds: descriptors watched at a time. ops is copied. Returns 0, ERR_NOMEM or ERR_IO. */
int watch_open(int32_t max_fds, int32_t tick_ms, const struct watch_ops *ops, void *arg,
               struct watch **out);
int watch_start(struct watch *w);
/* Stops and joins the thread; watches nothing any more, frees w. May be NULL. */
void watch_close(struct watch *w);

/* Watches fd for owner. *token names the watch; never 0. Returns 0, ERR_FULL or ERR_IO. */
int watch_add(struct watch *w, enum watch_kind kind, int fd, void *owner, uint64_t *token);
/* No-op for a token that was removed, or 0. */
void watch_remove(struct watch *w, uint64_t token);
/* A turn soon. Any thread. */
void watch_wake(struct watch *w);

#endif
