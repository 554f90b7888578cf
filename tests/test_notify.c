/* What the service manager is told, and the sockets it hands over. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "http_listen.h"
#include "notify.h"
#include "tap.h"

enum { SECOND = 1000000 };

/* A manager: a datagram socket. name: as in NOTIFY_SOCKET. */
static int manager_open(const char *name)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    size_t len = strlen(name);
    memcpy(sa.sun_path, name, len);
    if (name[0] == '@')
        sa.sun_path[0] = '\0';
    else
        unlink(name);
    if (bind(fd, (struct sockaddr *)&sa,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) != 0) {
        printf("Bail out! cannot bind %s: %s\n", name, strerror(errno));
        exit(1);
    }
    return fd;
}

/* The next message, or "" when there is none. */
static const char *heard(int fd)
{
    static char text[1024];
    ssize_t n = recv(fd, text, sizeof(text) - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    return text;
}

static void test_messages(const char *path)
{
    char abstract[64];
    struct errmsg e;
    struct notify n;
    snprintf(abstract, sizeof(abstract), "@prefilld-test-%d", (int)getpid());
    const char *const names[] = {path, abstract};
    for (int i = 0; i < 2; i++) {
        int fd = manager_open(names[i]);
        CHECK(notify_open(&n, names[i], NULL, NULL, &e) == 0, "%s opens", names[i]);
        CHECK(notify_send(&n, "READY=1\nSTATUS=%d", 7) == 0, "a message is sent");
        CHECK(strcmp(heard(fd), "READY=1\nSTATUS=7") == 0, "and arrives as one datagram");
        char big[600];
        memset(big, 'a', sizeof(big) - 1);
        big[sizeof(big) - 1] = '\0';
        CHECK(notify_send(&n, "STATUS=%s", big) == ERR_IO && heard(fd)[0] == '\0',
              "one too long is not cut, but refused");
        close(fd);
        CHECK(notify_send(&n, "READY=1") == ERR_IO, "a manager that is gone is an error");
        notify_close(&n);
    }
    unlink(path);
    CHECK(notify_open(&n, NULL, "1000000", NULL, &e) == 0 && n.watchdog_us == 0 &&
              notify_send(&n, "READY=1") == 0,
          "without a manager nothing happens");
    char longest[200];
    memset(longest, 'x', sizeof(longest));
    longest[0] = '/';
    longest[108] = '\0';
    const char *const bad[] = {"", "relative", "@", "/", longest};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        CHECK(notify_open(&n, bad[i], NULL, NULL, &e) == ERR_INVALID && n.fd == -1 &&
                  notify_send(&n, "READY=1") == 0,
              "bad name %zu: %s", i, e.text);
    longest[107] = '\0';
    CHECK(notify_open(&n, longest, NULL, NULL, &e) == 0, "107 bytes are accepted");
    notify_close(&n);
}

/* When there is a watchdog, and of what interval. */
static void test_watchdog_terms(const char *path)
{
    char pid[16];
    struct errmsg e;
    struct notify n;
    int fd = manager_open(path);
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    const struct {
        const char *usec, *pid;
        int64_t expected;
    } cases[] = {{"4000000", pid, 4 * SECOND},
                 {"4000000", NULL, 4 * SECOND},
                 {"4000000", "1", 0},
                 {NULL, pid, 0},
                 {"-4", pid, 0},
                 {"4x", pid, 0},
                 {"", pid, 0},
                 {"0", pid, 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        notify_open(&n, path, cases[i].usec, cases[i].pid, &e);
        CHECK(n.watchdog_us == cases[i].expected, "watchdog %s of %s is %lld",
              cases[i].usec ? cases[i].usec : "-", cases[i].pid ? cases[i].pid : "-",
              (long long)n.watchdog_us);
        notify_close(&n);
    }
    close(fd);
    unlink(path);
}

static void test_watchdog(const char *path)
{
    struct errmsg e;
    struct notify n;
    int fd = manager_open(path);
    notify_open(&n, path, "4000000", NULL, &e);
    int64_t now_us = 100ll * SECOND, progress_us = now_us;
    notify_tick(&n, now_us, progress_us, "");
    CHECK(strcmp(heard(fd), "WATCHDOG=1") == 0, "progress feeds the watchdog");
    int n_fed = 0;
    for (int i = 0; i < 100; i++) { /* ten seconds of progress */
        now_us += SECOND / 10;
        notify_tick(&n, now_us, now_us, "");
        n_fed += strcmp(heard(fd), "WATCHDOG=1") == 0;
    }
    CHECK(n_fed == 10, "four times in its interval: %d in 10 s", n_fed);
    progress_us = now_us - SECOND / 20;
    n_fed = 0;
    for (int i = 0; i < 1000; i++) {
        now_us += SECOND / 10;
        notify_tick(&n, now_us, progress_us, "");
        n_fed += heard(fd)[0] != '\0';
    }
    CHECK(n_fed == 0, "without progress it starves: fed %d times", n_fed);
    notify_tick(&n, now_us, now_us, "");
    CHECK(strcmp(heard(fd), "WATCHDOG=1") == 0, "until there is some");
    notify_close(&n);
    close(fd);
    unlink(path);
}

static void test_status(const char *path)
{
    struct errmsg e;
    struct notify n;
    int64_t now_us = 100ll * SECOND;
    int fd = manager_open(path);
    notify_open(&n, path, NULL, NULL, &e);
    notify_tick(&n, now_us, now_us, "one");
    CHECK(strcmp(heard(fd), "STATUS=one") == 0,
          "a status, and no watchdog that was not asked for");
    notify_tick(&n, now_us + SECOND / 2, now_us, "two");
    CHECK(heard(fd)[0] == '\0', "not twice a second");
    notify_tick(&n, now_us + SECOND, now_us, "two");
    CHECK(strcmp(heard(fd), "STATUS=two") == 0, "but after a second");
    notify_tick(&n, now_us + 3 * SECOND, now_us, "two");
    CHECK(heard(fd)[0] == '\0', "and not when it is the same");
    notify_close(&n);
    close(fd);
    unlink(path);
}

static void test_sockets(void)
{
    char pid[16];
    struct errmsg e;
    struct notify_sockets s;
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    CHECK(notify_sockets_take(&s, NULL, NULL, NULL, &e) == 0 && s.n == 0, "none");
    CHECK(notify_sockets_take(&s, "1", "2", NULL, &e) == 0 && s.n == 0,
          "another's are not ours");
    const char *const bad[] = {"", "x", "-1", "17", "99999999999999999999"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        CHECK(notify_sockets_take(&s, pid, bad[i], NULL, &e) == ERR_INVALID && s.n == 0,
              "LISTEN_FDS=%s: %s", bad[i], e.text);
    for (int fd = NOTIFY_FIRST_FD; fd < NOTIFY_FIRST_FD + 3; fd++)
        close(fd);
    CHECK(notify_sockets_take(&s, pid, "1", NULL, &e) == ERR_INVALID && s.n == 0,
          "a descriptor that is not there: %s", e.text);
    for (int fd = NOTIFY_FIRST_FD; fd < NOTIFY_FIRST_FD + 3; fd++)
        dup2(STDERR_FILENO, fd);
    CHECK(notify_sockets_take(&s, pid, "3", "one:two", &e) == 0 && s.n == 3, "three");
    CHECK(strcmp(s.names[0], "one") == 0 && strcmp(s.names[1], "two") == 0 && !s.names[2][0],
          "with their names, as far as there are some");
    CHECK((fcntl(5, F_GETFD) & FD_CLOEXEC) && s.fds[2] == 5, "none goes to a child");
    for (int i = 0; i < 3; i++)
        close(s.fds[i]);
}

static int listening(int family, const struct sockaddr *sa, socklen_t len)
{
    int fd = socket(family, SOCK_STREAM, 0);
    if (fd < 0 || (sa && bind(fd, sa, len) != 0) || listen(fd, 5) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void check_adopted(int fd, const char *prefix)
{
    struct errmsg e = {{0}};
    struct listener l;
    int rc = listener_adopt(fd, &l, &e);
    CHECK(rc == 0 && strncmp(l.address, prefix, strlen(prefix)) == 0 &&
              strlen(l.address) > strlen(prefix) && (fcntl(fd, F_GETFL) & O_NONBLOCK),
          "%s is adopted as %s%s", prefix, l.address, e.text);
    listener_close(&l);
}

static void test_adopt(const char *path)
{
    struct errmsg e;
    struct listener l;
    check_adopted(listening(AF_INET, NULL, 0), "0.0.0.0:");
    int fd = listening(AF_INET6, NULL, 0);
    if (fd >= 0)
        check_adopted(fd, "[::]:");
    else
        tap_skip("[::] is adopted", "no IPv6 here");
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    strcpy(sa.sun_path, path);
    unlink(path);
    check_adopted(listening(AF_UNIX, (struct sockaddr *)&sa, sizeof(sa)), "unix:/");
    CHECK(access(path, F_OK) == 0, "its path stays: it is the manager's");
    unlink(path);
    int len = snprintf(sa.sun_path + 1, sizeof(sa.sun_path) - 1, "prefilld-%d", (int)getpid());
    sa.sun_path[0] = '\0';
    check_adopted(listening(AF_UNIX, (struct sockaddr *)&sa,
                            (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len)),
                  "unix:@prefilld-");
    int pipes[2];
    const int bad[] = {socket(AF_INET, SOCK_STREAM, 0), socket(AF_INET, SOCK_DGRAM, 0),
                       pipe(pipes) == 0 ? pipes[0] : -1};
    for (int i = 0; i < 3; i++)
        CHECK(listener_adopt(bad[i], &l, &e) == ERR_INVALID && l.fd == -1 &&
                  fcntl(bad[i], F_GETFD) < 0,
              "no listening socket %d: %s", i, e.text);
}

int main(void)
{
    char path[64];
    snprintf(path, sizeof(path), "/tmp/prefilld-notify-%d", (int)getpid());
    test_messages(path);
    test_watchdog_terms(path);
    test_watchdog(path);
    test_status(path);
    test_sockets();
    test_adopt(path);
    return tap_done();
}
