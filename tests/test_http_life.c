/* HTTP against raw sockets: hang-ups, deadlines, limits, stopping, addresses. What
 * libmicrohttpd 0.9.75 does not do by itself. A plain program: runs under TSan too. */
#include <signal.h>
#include <sys/stat.h>

#include "http_stub.h"
#include "rng.h"
#include "tap.h"

/* ---- hang-ups ---- */

static void hang_up(int fd, int how)
{
    struct linger now = {1, 0};
    if (how == 1) {
        shutdown(fd, SHUT_WR);
        return;
    }
    if (how == 2)
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close(fd);
}

static void test_hangup(const char *address_of_unix)
{
    static const char *const names[] = {"a close", "a closed sending side", "a reset"};
    struct http_config c = server_config();
    if (address_of_unix)
        c.listen = &address_of_unix;
    struct server *s = server_start(c);
    for (int how = 0; how < 3; how++) {
        int fd = client_connect(s->address);
        client_sends(fd, "POST /wait HTTP/1.1\r\n" HOST "Content-Length: 2\r\n\r\nhi");
        wait_parked(s, 1);
        int before = atomic_load(&s->n_hangups);
        long long start = client_now_ms();
        hang_up(fd, how);
        bool seen = becomes(&s->n_hangups, before + 1);
        CHECK(seen && client_now_ms() - start < 1000, "%s is seen while suspended (%lld ms)%s",
              names[how], client_now_ms() - start, address_of_unix ? ", unix" : "");
        if (how == 1) {
            CHECK(client_ends(fd, 2000), "and ends the connection without an answer");
            close(fd);
        }
        CHECK(becomes(&s->n_connections, 0),
              "the connection is gone before the engine is done");
        release_parked(s);
        CHECK(becomes(&s->n_replied_gone, how + 1) && becomes(&s->n_freed, how + 1),
              "the late answer is dropped");
    }
    /* Pipelined bytes are no hang-up. */
    int fd = client_connect(s->address);
    client_sends(fd, "GET /wait HTTP/1.1\r\n" HOST "\r\nGET /2 HTTP/1.1\r\n" HOST "\r\n");
    wait_parked(s, 1);
    client_sleep_ms(20);
    release_parked(s);
    struct answer a = client_read(fd, 1), b = client_read(fd, 1);
    CHECK(a.status == 200 && b.status == 200, "a request that follows is no hang-up");
    answer_free(&a);
    answer_free(&b);
    close(fd);
    server_stop(s);
}

/* Half a request and the end in one segment, or in two. */
static void test_hangup_reading(void)
{
    static const char *const parts[] = {
        "GE", "GET /x HTTP/1.1\r\nHost",
        "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 9\r\n\r\n12",
        "POST /no HTTP/1.1\r\n" HOST "Content-Length: 2\r\n\r\n12"};
    struct server *s = server_start(server_config());
    int fds[4 * 50], n = 0;
    long long start = client_now_ms();
    for (int i = 0; i < 50; i++) {
        for (int j = 0; j < 4; j++) {
            int fd = fds[n++] = client_connect(s->address);
            client_sends(fd, parts[j]);
            shutdown(fd, SHUT_WR);
        }
    }
    int n_ended = 0;
    for (int i = 0; i < n; i++) {
        char rest[1024];
        ssize_t got;
        while ((got = client_recv(fds[i], rest, sizeof(rest))) > 0)
            continue;
        n_ended += got != -2;
        close(fds[i]);
    }
    CHECK(n_ended == n && client_now_ms() - start < 2000,
          "200 that end in the middle are closed within %lld ms", client_now_ms() - start);
    server_stop(s);
}

static void test_hangup_early(void)
{
    struct server *s = server_start(server_config());
    /* All at once, the end included: the watcher may see it in any state. */
    for (int i = 0; i < 100; i++) {
        int fd = client_connect(s->address);
        client_sends(fd, "GET /later HTTP/1.1\r\n" HOST "\r\n");
        hang_up(fd, i % 3);
        if (i % 3 == 1)
            close(fd);
    }
    struct answer a = client_ask(s->address, "GET /later HTTP/1.1\r\n" HOST "\r\n");
    CHECK(a.status == 200, "one that stays is answered");
    answer_free(&a);
    CHECK(becomes(&s->n_connections, 0), "100 clients that leave at once leave nothing");
    int n = atomic_load(&s->n_handled);
    CHECK(becomes(&s->n_freed, n), "each of the %d calls was freed", n);
    server_stop(s);
}

/* ---- deadlines ---- */

static void test_deadlines(void)
{
    struct http_config c = server_config();
    c.header_timeout_s = 1;
    c.body_timeout_s = 1;
    struct server *s = server_start(c);
    static const char slow[] =
        "GET /aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
        " HTTP/1.1\r\n" HOST "\r\n";
    static const char head[] = "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 60\r\n\r\n";
    /* header line; body; second request on a connection; nothing at all: side by side */
    int fds[4];
    for (int i = 0; i < 4; i++)
        fds[i] = client_connect(s->address);
    client_sends(fds[1], head);
    client_sends(fds[2], "GET /x HTTP/1.1\r\n" HOST "\r\n");
    struct answer a = client_read(fds[2], 1);
    answer_free(&a);
    long long start = client_now_ms(), ended[4] = {0};
    int status[4] = {0};
    for (int step = 0; step < 100; step++) {
        for (int i = 0; i < 4; i++) {
            struct pollfd p = {.fd = fds[i], .events = POLLIN};
            if (ended[i] ||
                (i != 3 && send(fds[i], &slow[step % 60], 1, MSG_NOSIGNAL) < 0 && 0))
                continue;
            if (poll(&p, 1, 0) != 1)
                continue;
            a = client_read(fds[i], 1);
            status[i] = a.status;
            ended[i] = client_now_ms() - start;
            answer_free(&a);
        }
        client_sleep_ms(30);
    }
    CHECK(status[0] == 408 && ended[0] >= 900 && ended[0] < 1500,
          "a dripped request line: %d after %lld ms", status[0], ended[0]);
    CHECK(status[1] == 408 && ended[1] >= 900 && ended[1] < 1500,
          "a dripped body: %d after %lld ms", status[1], ended[1]);
    CHECK(status[2] == 408 && ended[2] >= 900 && ended[2] < 2200,
          "a dripped second request: %d after %lld ms", status[2], ended[2]);
    CHECK(status[3] == 0 && ended[3] >= 900 && ended[3] < 1500,
          "a silent connection ends after %lld ms", ended[3]);
    CHECK(becomes(&s->n_connections, 0), "all are closed");
    CHECK(atomic_load(&s->last_refused) == 408, "the owner hears of the 408");
    for (int i = 0; i < 4; i++)
        close(fds[i]);
    /* A request that waits for its answer has no deadline of these. */
    int fd = client_connect(s->address);
    client_sends(fd, "GET /wait HTTP/1.1\r\n" HOST "\r\n");
    wait_parked(s, 1);
    client_sleep_ms(1300);
    release_parked(s);
    a = client_read(fd, 1);
    CHECK(a.status == 200, "an answer may take longer");
    answer_free(&a);
    close(fd);
    server_stop(s);
}

/* idle-timeout-s is a total between requests, also where drips cannot be seen (unix sockets),
 * and cuts nothing else short. */
static void test_idle(const char *dir)
{
    char address[300];
    const char *listen[1] = {address};
    struct http_config c = server_config();
    snprintf(address, sizeof(address), "unix:%s/idle.sock", dir);
    c.listen = listen;
    c.idle_timeout_s = 1;
    c.body_timeout_s = 4;
    struct server *s = server_start(c);
    int fds[2] = {client_connect(s->address), client_connect(s->address)};
    client_sends(fds[0], "GET /x HTTP/1.1\r\n" HOST "\r\n");
    struct answer a = client_read(fds[0], 1);
    answer_free(&a);
    client_sends(fds[1], "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 4\r\n\r\nab");
    long long start = client_now_ms();
    while (send(fds[0], "G", 1, MSG_NOSIGNAL) == 1 && client_now_ms() - start < 3000)
        client_sleep_ms(30);
    long long ended = client_now_ms() - start;
    CHECK(ended >= 900 && ended < 2000, "a dripped second request on a unix socket: %lld ms",
          ended);
    while (client_now_ms() - start < 2500)
        client_sleep_ms(10);
    client_sends(fds[1], "cd");
    a = client_read(fds[1], 1);
    CHECK(a.status == 200 && strstr(a.body, "abcd"), "a body may pause for longer");
    answer_free(&a);
    close(fds[0]);
    close(fds[1]);
    server_stop(s);
}

static void test_slow_reader(void)
{
    struct http_config c = server_config();
    c.idle_timeout_s = c.header_timeout_s = c.body_timeout_s = 1;
    struct server *s = server_start(c);
    int fd = client_connect(s->address);
    client_sends(fd, "GET /big HTTP/1.1\r\n" HOST "\r\n");
    client_sleep_ms(500);
    struct answer a = client_read(fd, 1);
    bool is_right = a.status == 200 && a.body_len == BIG_WORDS * sizeof(uint32_t);
    for (uint32_t i = 0; is_right && i < BIG_WORDS; i++)
        is_right = ((uint32_t *)(void *)a.body)[i] == i;
    CHECK(is_right, "16 MB arrive whole at a reader that starts late");
    answer_free(&a);
    client_sends(fd, "GET /big HTTP/1.1\r\n" HOST "\r\n");
    CHECK(becomes(&s->n_handled, 2) &&
              (becomes(&s->n_connections, 0) || becomes(&s->n_connections, 0)),
          "one that does not read at all is closed");
    close(fd);
    server_stop(s);
}

/* ---- limits ---- */

static void test_connection_limit(void)
{
    struct http_config c = server_config();
    c.max_connections = 4;
    struct server *s = server_start(c);
    int fds[4];
    for (int i = 0; i < 4; i++)
        fds[i] = client_connect(s->address);
    struct answer a = client_ask(s->address, "GET /x HTTP/1.1\r\n" HOST "\r\n");
    CHECK(a.status == 503 && answer_header(&a, "Retry-After") && a.body[0] == '{',
          "the fifth of four connections: %d", a.status);
    answer_free(&a);
    client_sends(fds[3], "GET /x HTTP/1.1\r\n" HOST "\r\n");
    a = client_read(fds[3], 1);
    CHECK(a.status == 200, "the fourth is served");
    answer_free(&a);
    close(fds[0]);
    becomes(&s->n_connections, 3);
    a = client_ask(s->address, "GET /x HTTP/1.1\r\n" HOST "\r\n");
    CHECK(a.status == 200, "when one leaves, the next is served");
    answer_free(&a);
    for (int i = 1; i < 4; i++)
        close(fds[i]);
    server_stop(s);
}

static void test_full_pool(void)
{
    struct server *s = server_start_with(server_config(), 2);
    int fds[5];
    atomic_store(&s->holds_workers, true);
    for (int i = 0; i < 5; i++) {
        fds[i] = client_connect(s->address);
        client_sends(fds[i], "GET /hold HTTP/1.1\r\n" HOST "\r\n");
        if (i == 1)
            becomes(&s->n_handled, 2); /* both workers are busy */
        client_sleep_ms(5);
    }
    struct answer a = client_read(fds[4], 1);
    CHECK(a.status == 503 && answer_header(&a, "Retry-After"), "the third that waits: %d",
          a.status);
    CHECK(becomes(&s->last_refused, 503), "the owner hears of it");
    answer_free(&a);
    client_sends(fds[4], "GET /quick HTTP/1.1\r\n" HOST "\r\n");
    a = client_read(fds[4], 1);
    CHECK(a.status == 200, "a quick call is answered meanwhile, and the connection stayed");
    answer_free(&a);
    atomic_store(&s->holds_workers, false);
    int n_ok = 0;
    for (int i = 0; i < 4; i++) {
        a = client_read(fds[i], 1);
        n_ok += a.status == 200;
        answer_free(&a);
    }
    CHECK(n_ok == 4, "those that were taken are answered");
    for (int i = 0; i < 5; i++)
        close(fds[i]);
    server_stop(s);
}

/* ---- stopping ---- */

static void *release_later(void *arg)
{
    client_sleep_ms(100);
    release_parked(arg);
    return NULL;
}

static void test_close_with_suspended(void)
{
    struct server *s = server_start(server_config());
    int fds[8];
    for (int i = 0; i < 8; i++) {
        fds[i] = client_connect(s->address);
        client_sends(fds[i], "GET /wait HTTP/1.1\r\n" HOST "\r\n");
    }
    wait_parked(s, 8);
    pthread_t thread;
    pthread_create(&thread, NULL, release_later, s);
    http_close(s->http);
    pthread_join(thread, NULL);
    CHECK(1, "closing with suspended connections does not abort");
    CHECK(atomic_load(&s->n_hangups) == 8 && atomic_load(&s->n_replied_gone) == 8 &&
              atomic_load(&s->n_freed) == 8,
          "each of them was cancelled and freed");
    int n_ended = 0;
    for (int i = 0; i < 8; i++) {
        n_ended += client_ends(fds[i], 2000);
        close(fds[i]);
    }
    CHECK(n_ended == 8, "each client sees the end");
    work_close(s->work);
    free(s);
}

static void test_drain(void)
{
    struct server *s = server_start(server_config());
    int fd = client_connect(s->address), idle = client_connect(s->address);
    client_sends(fd, "GET /wait HTTP/1.1\r\n" HOST "\r\n");
    wait_parked(s, 1);
    http_quiesce(s->http);
    CHECK(client_connect(s->address) < 0, "after quiesce nobody can connect");
    client_sends(idle, "GET /x HTTP/1.1\r\n" HOST "\r\n");
    struct answer a = client_read(idle, 1);
    CHECK(a.status == 200 && answer_has(&a, "Connection", "close"),
          "a connection of before is answered once more");
    answer_free(&a);
    CHECK(!http_flush(s->http, client_now_ms() * 1000 + 50000),
          "flush waits, but not for ever");
    pthread_t thread;
    pthread_create(&thread, NULL, release_later, s);
    CHECK(http_flush(s->http, client_now_ms() * 1000 + 3000000), "until all is answered");
    http_close(s->http);
    a = client_read(fd, 1);
    CHECK(a.status == 200, "what was under way was not lost");
    answer_free(&a);
    pthread_join(thread, NULL);
    close(fd);
    close(idle);
    work_close(s->work);
    free(s);
}

/* ---- addresses ---- */

static int open_fails(const char *address, const char *expected)
{
    struct http_config c = server_config();
    struct http *h;
    struct errmsg e = {{0}};
    c.listen = &address;
    int rc = http_open(&c, &h, &e);
    if (rc == 0)
        http_close(h);
    return rc < 0 && strstr(e.text, expected) != NULL;
}

static void test_addresses(const char *dir)
{
    char path[200], address[220];
    snprintf(path, sizeof(path), "%s/s", dir);
    snprintf(address, sizeof(address), "unix:%s", path);
    test_hangup(address);
    CHECK(access(path, F_OK) != 0, "the unix path is removed at the end");
    const char *two[] = {"127.0.0.1:0", address};
    struct http_config c = server_config();
    c.listen = two;
    c.n_listen = 2;
    struct server *s = server_start(c);
    char *comma = strchr(s->address, ',');
    CHECK(comma && strcmp(comma + 1, address) == 0 &&
              strncmp(s->address, "127.0.0.1:0", 11) != 0,
          "the real port is reported: %s", comma ? "yes" : s->address);
    *comma = '\0';
    struct answer a = client_ask(s->address, "GET /tcp HTTP/1.1\r\n" HOST "\r\n");
    struct answer b = client_ask(address, "GET /unix HTTP/1.1\r\n" HOST "\r\n");
    CHECK(a.status == 200 && b.status == 200, "both addresses answer");
    answer_free(&a);
    answer_free(&b);
    CHECK(open_fails(address, "another process listens"), "a path in use is refused");
    CHECK(open_fails(s->address, "in use"), "a port in use is refused");
    server_stop(s);
}

/* A socket that nobody listens at is taken over; a file is not. */
static void test_stale_path(const char *dir)
{
    char path[200], address[220];
    snprintf(path, sizeof(path), "%s/s", dir);
    snprintf(address, sizeof(address), "unix:%s", path);
    int stale = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    memcpy(sa.sun_path, path, strlen(path) + 1);
    CHECK(bind(stale, (struct sockaddr *)&sa, sizeof(sa)) == 0, "a socket is left behind");
    close(stale);
    const char *one[] = {address};
    struct http_config c = server_config();
    c.listen = one;
    struct server *s = server_start(c);
    struct answer a = client_ask(address, "GET /unix HTTP/1.1\r\n" HOST "\r\n");
    CHECK(a.status == 200, "and its path is taken over");
    answer_free(&a);
    server_stop(s);

    FILE *f = fopen(path, "w");
    fclose(f);
    CHECK(open_fails(address, "not a socket"), "a path that is a file is refused");
    unlink(path);
}

static void test_other_addresses(void)
{
    CHECK(open_fails("127.0.0.1", "ADDR:PORT"), "no port");
    CHECK(open_fails("127.0.0.1:70000", "65535"), "a port too large");
    CHECK(open_fails("::1:80", "ADDR6"), "IPv6 without brackets");
    CHECK(open_fails("unix:", "1 to"), "an empty path");

    int probe = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    if (probe < 0 || bind(probe, (struct sockaddr *)&in6, sizeof(in6)) != 0) {
        tap_skip("IPv6", "this machine has none");
    } else {
        const char *six[] = {"[::1]:0"};
        struct http_config c = server_config();
        c.listen = six;
        struct server *s = server_start(c);
        struct answer a = client_ask(s->address, "GET /six HTTP/1.1\r\n" HOST "\r\n");
        CHECK(a.status == 200, "IPv6: %s", s->address);
        answer_free(&a);
        server_stop(s);
    }
    if (probe >= 0)
        close(probe);
}

/* ---- everything at once ---- */

struct storm {
    struct server *s;
    uint64_t seed;
    int n_requests;
    atomic_int *n_ok, *n_wrong;
};

/* Requests with hang-ups at a random byte, before, in or after the answer. */
static void *storm_main(void *arg)
{
    struct storm *t = arg;
    struct rng r = {t->seed};
    static const char *const requests[] = {
        "GET /later HTTP/1.1\r\n" HOST "\r\n",
        "POST /later HTTP/1.1\r\n" HOST "Content-Length: 10\r\n\r\n0123456789",
        "POST /later HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n"
        "3\r\nabc\r\n0\r\n\r\n"};
    int fd = -1;
    for (int i = 0; i < t->n_requests; i++) {
        const char *request = requests[rng_int(&r, 3)];
        size_t len = strlen(request);
        if (fd < 0)
            fd = client_connect(t->s->address);
        bool stays = rng_int(&r, 3) != 0;
        size_t cut = stays || rng_int(&r, 2) ? len : (size_t)rng_int(&r, (int32_t)len);
        client_send(fd, request, cut);
        if (stays) {
            struct answer a = client_read(fd, 1);
            if (a.status == 200 && strcmp(a.body, "done") == 0)
                atomic_fetch_add(t->n_ok, 1);
            else
                atomic_fetch_add(t->n_wrong, 1);
            answer_free(&a);
            continue;
        }
        struct timespec pause = {0, rng_int(&r, 2000000)};
        nanosleep(&pause, NULL);
        int how = rng_int(&r, 3);
        hang_up(fd, how);
        if (how == 1) {
            client_ends(fd, CLIENT_WAIT_MS);
            close(fd);
        }
        fd = -1;
    }
    if (fd >= 0)
        close(fd);
    return NULL;
}

static void test_storm(void)
{
    enum { N_THREADS = 16, N_REQUESTS = 100 };
    const uint64_t seed = 20240911;
    struct server *s = server_start(server_config());
    atomic_int n_ok = 0, n_wrong = 0;
    pthread_t threads[N_THREADS];
    struct storm storms[N_THREADS];
    for (int i = 0; i < N_THREADS; i++) {
        storms[i] = (struct storm){s, seed + (uint64_t)i, N_REQUESTS, &n_ok, &n_wrong};
        pthread_create(&threads[i], NULL, storm_main, &storms[i]);
    }
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(atomic_load(&n_wrong) == 0, "seed %llu: each client that stayed got its answer: %d",
          (unsigned long long)seed, atomic_load(&n_ok));
    CHECK(becomes(&s->n_connections, 0), "no connection is left");
    CHECK(becomes(&s->n_freed, atomic_load(&s->n_handled)), "each of %d calls was freed",
          atomic_load(&s->n_handled));
    CHECK(http_flush(s->http, client_now_ms() * 1000 + 1000000), "nothing is under way");
    server_stop(s);
}
int main(void)
{
    char dir[] = "/tmp/prefilld-http-XXXXXX";
    signal(SIGPIPE, SIG_IGN);
    if (!mkdtemp(dir)) {
        printf("Bail out! mkdtemp\n");
        return 1;
    }
    test_hangup(NULL);
    test_hangup_reading();
    test_hangup_early();
    test_deadlines();
    test_idle(dir);
    test_slow_reader();
    test_connection_limit();
    test_full_pool();
    test_close_with_suspended();
    test_drain();
    test_addresses(dir);
    test_stale_path(dir);
    test_other_addresses();
    test_storm();
    rmdir(dir);
    return tap_done();
}
