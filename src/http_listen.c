#include "http_listen.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Is somebody there? Returns 0 when the path is free or was left behind (then it is
 * removed). */
static int clear_path(const struct sockaddr_un *sa, struct errmsg *e)
{
    struct stat st;
    if (lstat(sa->sun_path, &st) != 0) {
        if (errno == ENOENT)
            return 0;
        return errmsg_set(e, ERR_IO, "listen unix:%s: %s", sa->sun_path, strerror(errno));
    }
    if (!S_ISSOCK(st.st_mode))
        return errmsg_set(e, ERR_INVALID,
                          "listen unix:%s: exists and is not a socket; name a path that is "
                          "free",
                          sa->sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errmsg_set(e, ERR_IO, "socket: %s", strerror(errno));
    int rc = connect(fd, (const struct sockaddr *)sa, sizeof(*sa));
    int why = errno;
    close(fd);
    if (rc != 0 && why == ECONNREFUSED) {
        if (unlink(sa->sun_path) == 0 || errno == ENOENT)
            return 0;
        why = errno;
    }
    if (rc == 0 || why == EAGAIN)
        return errmsg_set(e, ERR_FULL,
                          "listen unix:%s: another process listens there; stop it or choose "
                          "another path",
                          sa->sun_path);
    return errmsg_set(e, ERR_IO, "listen unix:%s: %s", sa->sun_path, strerror(why));
}

static int open_unix(const char *path, struct listener *l, struct errmsg *e)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    size_t len = strlen(path);
    if (len == 0 || len >= sizeof(sa.sun_path) || len >= sizeof(l->path))
        return errmsg_set(e, ERR_INVALID,
                          "listen unix:%s: %zu characters; a socket path has 1 to %zu", path,
                          len, sizeof(sa.sun_path) - 1);
    memcpy(sa.sun_path, path, len + 1);
    int rc = clear_path(&sa, e);
    if (rc != 0)
        return rc;
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return errmsg_set(e, ERR_IO, "socket: %s", strerror(errno));
    struct stat st;
    if (bind(l->fd, (const struct sockaddr *)&sa, sizeof(sa)) != 0 || lstat(path, &st) != 0)
        return errmsg_set(e, ERR_IO, "listen unix:%s: %s", path, strerror(errno));
    memcpy(l->path, path, len + 1);
    l->dev = st.st_dev;
    l->ino = st.st_ino;
    snprintf(l->address, sizeof(l->address), "unix:%s", path);
    return 0;
}

/* Splits HOST:PORT or [HOST]:PORT. host has room for cap bytes. */
static int split(const char *spec, char *host, size_t cap, const char **port)
{
    const char *colon = strrchr(spec, ':');
    if (!colon || colon[1] == '\0' || strspn(colon + 1, "0123456789") != strlen(colon + 1))
        return ERR_INVALID;
    size_t len = (size_t)(colon - spec);
    if (spec[0] == '[') {
        if (len < 2 || spec[len - 1] != ']')
            return ERR_INVALID;
        spec++;
        len -= 2;
    } else if (memchr(spec, ':', len)) {
        return ERR_INVALID; /* IPv6 without brackets */
    }
    if (len == 0 || len >= cap)
        return ERR_INVALID;
    memcpy(host, spec, len);
    host[len] = '\0';
    *port = colon + 1;
    return 0;
}

static int bind_tcp(const struct addrinfo *ai, struct listener *l)
{
    const int on = 1;
    l->fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return ERR_IO;
    setsockopt(l->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (ai->ai_family == AF_INET6)
        setsockopt(l->fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    return bind(l->fd, ai->ai_addr, ai->ai_addrlen) == 0 ? 0 : ERR_IO;
}

/* Fills the address in from the socket. */
static int read_address(struct listener *l)
{
    union {
        struct sockaddr any;
        struct sockaddr_un un;
        struct sockaddr_storage room;
    } sa;
    socklen_t len = sizeof(sa);
    char host[64], port[8];
    memset(&sa, 0, sizeof(sa));
    if (getsockname(l->fd, &sa.any, &len) != 0)
        return ERR_IO;
    if (sa.any.sa_family == AF_UNIX) {
        bool is_abstract = sa.un.sun_path[0] == '\0';
        snprintf(l->address, sizeof(l->address), "unix:%s%.*s", is_abstract ? "@" : "",
                 (int)sizeof(sa.un.sun_path) - 1, sa.un.sun_path + is_abstract);
        return 0;
    }
    if (getnameinfo(&sa.any, len, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return ERR_IO;
    snprintf(l->address, sizeof(l->address), sa.any.sa_family == AF_INET6 ? "[%s]:%s" : "%s:%s",
             host, port);
    return 0;
}

static int open_tcp(const char *spec, struct listener *l, struct errmsg *e)
{
    char host[256];
    const char *port;
    long number;
    if (split(spec, host, sizeof(host), &port) != 0 || strlen(port) > 5 ||
        sscanf(port, "%ld", &number) != 1 || number > 65535)
        return errmsg_set(e, ERR_INVALID,
                          "listen %s: accepted are ADDR:PORT, [ADDR6]:PORT and unix:PATH, PORT "
                          "0 to 65535 (0: a free one)",
                          spec);
    struct addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICSERV,
                             .ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM};
    struct addrinfo *ai;
    int rc = getaddrinfo(host, port, &hints, &ai);
    if (rc != 0)
        return errmsg_set(e, ERR_INVALID, "listen %s: %s", spec, gai_strerror(rc));
    rc = bind_tcp(ai, l);
    int why = errno;
    freeaddrinfo(ai);
    if (rc != 0)
        return errmsg_set(e, why == EADDRINUSE ? ERR_FULL : ERR_IO, "listen %s: %s", spec,
                          strerror(why));
    if (read_address(l) != 0)
        return errmsg_set(e, ERR_IO, "listen %s: its address cannot be read back", spec);
    return 0;
}

int listener_open(const char *spec, struct listener *l, struct errmsg *e)
{
    memset(l, 0, sizeof(*l));
    l->fd = -1;
    int rc = strncmp(spec, "unix:", 5) == 0 ? open_unix(spec + 5, l, e) : open_tcp(spec, l, e);
    if (rc == 0 && listen(l->fd, SOMAXCONN) != 0)
        rc = errmsg_set(e, ERR_IO, "listen %s: %s", spec, strerror(errno));
    if (rc != 0)
        listener_close(l);
    return rc;
}

static int socket_option(int fd, int name)
{
    int value = -1;
    socklen_t len = sizeof(value);
    return getsockopt(fd, SOL_SOCKET, name, &value, &len) == 0 ? value : -1;
}

int listener_adopt(int fd, struct listener *l, struct errmsg *e)
{
    memset(l, 0, sizeof(*l));
    l->fd = fd;
    l->is_adopted = true;
    int domain = socket_option(fd, SO_DOMAIN);
    int flags = fcntl(fd, F_GETFL);
    int rc = 0;
    if (flags < 0 || socket_option(fd, SO_TYPE) != SOCK_STREAM ||
        socket_option(fd, SO_ACCEPTCONN) != 1 ||
        (domain != AF_INET && domain != AF_INET6 && domain != AF_UNIX))
        rc = errmsg_set(e, ERR_INVALID,
                        "descriptor %d was handed over, but is no listening stream socket: "
                        "accepted are TCP and unix sockets (ListenStream=, Accept=no)",
                        fd);
    else if (read_address(l) != 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
        rc = errmsg_set(e, ERR_INVALID, "descriptor %d was handed over, but: %s", fd,
                        strerror(errno));
    if (rc != 0)
        listener_close(l);
    return rc;
}

void listener_close(struct listener *l)
{
    struct stat st;
    if (l->path[0] && lstat(l->path, &st) == 0 && st.st_dev == l->dev && st.st_ino == l->ino)
        unlink(l->path);
    l->path[0] = '\0';
    if (l->fd >= 0)
        close(l->fd);
    l->fd = -1;
}
