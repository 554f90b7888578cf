#include "notify.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { SEND_TIMEOUT_S = 2, STATUS_EVERY_US = 1000000, FEEDINGS = 4 };

/* Decimal digits alone, up to max. */
static bool parse_count(const char *text, int64_t max, int64_t *out)
{
    char *end;
    if (!text || text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno != 0 || *end != '\0' || value > max)
        return false;
    *out = value;
    return true;
}

static bool is_ours(const char *pid)
{
    int64_t value;
    return parse_count(pid, INT32_MAX, &value) && value == getpid();
}

int notify_open(struct notify *n, const char *socket_name, const char *watchdog_usec,
                const char *watchdog_pid, struct errmsg *e)
{
    memset(n, 0, sizeof(*n));
    n->fd = -1;
    if (!socket_name)
        return 0;
    size_t len = strlen(socket_name);
    bool is_abstract = socket_name[0] == '@';
    if ((socket_name[0] != '/' && !is_abstract) || len < 2 ||
        len >= sizeof(n->address.sun_path))
        return errmsg_set(e, ERR_INVALID,
                          "NOTIFY_SOCKET: found %zu bytes that start with \\x%02x, accepted: "
                          "/PATH or @NAME of 2 to %zu bytes",
                          len, (unsigned char)socket_name[0], sizeof(n->address.sun_path) - 1);
    n->address.sun_family = AF_UNIX;
    memcpy(n->address.sun_path, socket_name, len);
    if (is_abstract)
        n->address.sun_path[0] = '\0';
    n->address_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len);
    n->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (n->fd < 0)
        return errmsg_set(e, ERR_IO, "NOTIFY_SOCKET: %s", strerror(errno));
    const struct timeval limit = {.tv_sec = SEND_TIMEOUT_S};
    setsockopt(n->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    int64_t watchdog_us;
    if (parse_count(watchdog_usec, INT64_MAX, &watchdog_us) &&
        (!watchdog_pid || is_ours(watchdog_pid)))
        n->watchdog_us = watchdog_us;
    return 0;
}

void notify_close(struct notify *n)
{
    if (n->fd >= 0)
        close(n->fd);
    n->fd = -1;
}

int notify_send(struct notify *n, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    if (n->fd < 0)
        return 0;
    va_start(ap, fmt);
    int len = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (len < 0 || len >= (int)sizeof(text))
        return ERR_IO;
    ssize_t rc;
    do
        rc = sendto(n->fd, text, (size_t)len, MSG_NOSIGNAL, (struct sockaddr *)&n->address,
                    n->address_len);
    while (rc < 0 && errno == EINTR);
    return rc == len ? 0 : ERR_IO;
}

void notify_tick(struct notify *n, int64_t now_us, int64_t progress_us, const char *status)
{
    if (n->watchdog_us > 0 && progress_us > n->progress_us &&
        now_us - n->fed_us >= n->watchdog_us / FEEDINGS && notify_send(n, "WATCHDOG=1") == 0) {
        n->progress_us = progress_us;
        n->fed_us = now_us;
    }
    if (now_us - n->status_us < STATUS_EVERY_US || strcmp(status, n->status) == 0)
        return;
    n->status_us = now_us;
    if (notify_send(n, "STATUS=%s", status) == 0)
        snprintf(n->status, sizeof(n->status), "%s", status);
}

int notify_sockets_take(struct notify_sockets *s, const char *pid, const char *fds,
                        const char *names, struct errmsg *e)
{
    memset(s, 0, sizeof(*s));
    if (!fds || !is_ours(pid))
        return 0;
    int64_t n;
    if (!parse_count(fds, NOTIFY_MAX_SOCKETS, &n))
        return errmsg_set(e, ERR_INVALID,
                          "LISTEN_FDS: found no number, or more sockets than are taken, "
                          "accepted: 0 to %d",
                          NOTIFY_MAX_SOCKETS);
    for (int32_t i = 0; i < n; i++) {
        int fd = NOTIFY_FIRST_FD + i;
        int flags = fcntl(fd, F_GETFD);
        if (flags < 0 || fcntl(fd, F_SETFD, flags | FD_CLOEXEC) != 0)
            return errmsg_set(e, ERR_INVALID,
                              "LISTEN_FDS: descriptor %d was not handed over: %s", fd,
                              strerror(errno));
        s->fds[i] = fd;
        size_t len = names ? strcspn(names, ":") : 0;
        snprintf(s->names[i], sizeof(s->names[i]), "%.*s", (int)len, names ? names : "");
        if (names)
            names += len + (names[len] == ':');
    }
    s->n = (int32_t)n;
    return 0;
}
