/* A raw HTTP client for tests: it sends what it is told, well-formed or not, and reads whole
 * answers. Every wait ends after a few seconds. */
#ifndef PREFILLD_TESTS_HTTP_CLIENT_H
#define PREFILLD_TESTS_HTTP_CLIENT_H

#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "buf.h"

enum { CLIENT_WAIT_MS = 5000 };

struct answer {
    int status; /* 0: the connection ended without one; -1: nothing came in time */
    char head[8192];
    char *body; /* NUL-terminated; freed by answer_free */
    size_t body_len;
};

static inline long long client_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000ll + t.tv_nsec / 1000000;
}

static inline void client_sleep_ms(int ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000l};
    nanosleep(&t, NULL);
}

/* address: ADDR:PORT, [ADDR6]:PORT or unix:PATH. -1: refused. */
static inline int client_connect(const char *address)
{
    struct sockaddr_storage sa;
    socklen_t len;
    memset(&sa, 0, sizeof(sa));
    if (strncmp(address, "unix:", 5) == 0) {
        struct sockaddr_un *u = (struct sockaddr_un *)&sa;
        u->sun_family = AF_UNIX;
        snprintf(u->sun_path, sizeof(u->sun_path), "%s", address + 5);
        len = sizeof(*u);
    } else if (address[0] == '[') {
        struct sockaddr_in6 *s = (struct sockaddr_in6 *)&sa;
        s->sin6_family = AF_INET6;
        s->sin6_addr = in6addr_loopback;
        s->sin6_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
        len = sizeof(*s);
    } else {
        struct sockaddr_in *s = (struct sockaddr_in *)&sa;
        s->sin_family = AF_INET;
        s->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        s->sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
        len = sizeof(*s);
    }
    int fd = socket(sa.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&sa, len) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Returns whether all of it went out. */
static inline int client_send(int fd, const void *data, size_t len)
{
    const char *p = data;
    while (len > 0) {
        ssize_t n = send(fd, p, len, MSG_NOSIGNAL);
        if (n <= 0)
            return 0;
        p += n;
        len -= (size_t)n;
    }
    return 1;
}

static inline int client_sends(int fd, const char *text)
{
    return client_send(fd, text, strlen(text));
}

static inline ssize_t client_recv(int fd, void *buf, size_t cap)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (poll(&p, 1, CLIENT_WAIT_MS) <= 0)
        return -2;
    return recv(fd, buf, cap, 0);
}

/* The value of a header in a's head, in a static buffer; NULL when it is not there. */
static inline const char *answer_header(const struct answer *a, const char *name)
{
    static _Thread_local char value[1024];
    size_t len = strlen(name);
    for (const char *p = strstr(a->head, "\r\n"); p; p = strstr(p + 2, "\r\n")) {
        if (strncasecmp(p + 2, name, len) != 0 || p[2 + len] != ':')
            continue;
        const char *v = p + 3 + len;
        v += strspn(v, " ");
        snprintf(value, sizeof(value), "%.*s", (int)strcspn(v, "\r"), v);
        return value;
    }
    return NULL;
}

static inline int answer_has(const struct answer *a, const char *name, const char *value)
{
    const char *found = answer_header(a, name);
    return found && strcmp(found, value) == 0;
}

static inline void answer_free(struct answer *a)
{
    free(a->body);
    a->body = NULL;
}

/* Reads one answer; has_body is 0 for HEAD. Bytes are read one at a time up to the body, so
 * that what follows stays in the socket. */
static inline struct answer client_read(int fd, int has_body)
{
    struct answer a = {.status = 0};
    size_t n = 0;
    while (n < sizeof(a.head) - 1 && !(n >= 4 && memcmp(a.head + n - 4, "\r\n\r\n", 4) == 0)) {
        ssize_t got = client_recv(fd, a.head + n, 1);
        if (got <= 0) {
            a.status = got == -2 ? -1 : 0;
            return a;
        }
        n++;
    }
    a.head[n] = '\0';
    sscanf(a.head, "HTTP/1.1 %d", &a.status);
    const char *length = answer_header(&a, "Content-Length");
    size_t want = length && has_body ? (size_t)atoll(length) : 0;
    a.body = calloc(1, want + 1);
    while (a.body_len < want) {
        ssize_t got = client_recv(fd, a.body + a.body_len, want - a.body_len);
        if (got <= 0)
            break;
        a.body_len += (size_t)got;
    }
    if (a.body_len < want)
        a.status = -1;
    return a;
}

/* Does the connection end, without another byte, within ms? */
static inline int client_ends(int fd, int ms)
{
    char byte;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, ms) == 1 && recv(fd, &byte, 1, 0) <= 0;
}

/* One request on a connection of its own, to its end. */
static inline struct answer client_ask(const char *address, const char *request)
{
    struct answer a = {.status = 0};
    int fd = client_connect(address);
    if (fd < 0)
        return a;
    client_sends(fd, request);
    a = client_read(fd, strncmp(request, "HEAD", 4) != 0);
    close(fd);
    return a;
}

/* Reads chunks to the end of the stream, or until the text holds `until`. Appends their bytes;
 * returns how many chunks there were, -1 at an early end. */
static inline int client_read_chunks(int fd, struct buf *out, const char *until)
{
    for (int n = 0;; n++) {
        char line[32];
        size_t len = 0;
        while (len < 2 || memcmp(line + len - 2, "\r\n", 2) != 0)
            if (len == sizeof(line) || client_recv(fd, line + len++, 1) != 1)
                return -1;
        size_t want = (size_t)strtoul(line, NULL, 16);
        for (size_t got = 0; got < want + 2; got++) {
            char c;
            if (client_recv(fd, &c, 1) != 1)
                return -1;
            if (got < want)
                buf_addc(out, c);
        }
        if (want == 0 || (until && buf_cstr(out) && strstr(out->data, until)))
            return n;
    }
}

#endif
