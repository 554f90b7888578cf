/* Bodies and answers that are handed on as they come: any length, any pieces, slow and vanished
 * clients, answers in the middle of a body, deadlines, the end of the server; memory stays
 * bounded. Plain program: runs under TSan too. */
#include <signal.h>

#include "http_stub.h"
#include "rng.h"
#include "tap.h"

enum { RING_BYTES = 8192, PART_BYTES = 1 << 20, MAX_INTAKE = 64 << 20 };

struct flow {
    struct server *s;
    struct exchange *x;
    const char *what;
    int64_t n_wanted; /* of an answer */
    int64_t n;
    uint32_t sum;
    atomic_bool is_gone;
};

static atomic_llong most_waiting, n_ended_gone;

static void on_hangup(void *arg)
{
    struct flow *f = arg;
    atomic_fetch_add(&f->s->n_hangups, 1);
    atomic_store(&f->is_gone, true);
    exchange_notice(f->x);
}

static void free_flow(void *arg)
{
    struct flow *f = arg;
    atomic_fetch_add(&f->s->n_freed, 1);
    free(f);
}

static uint32_t sum_of(uint32_t sum, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum = (sum ^ (unsigned char)p[i]) * 16777619u;
    return sum;
}

static bool answer(struct flow *f, int status)
{
    struct buf b;
    buf_init(&b);
    buf_printf(&b, "%lld %u", (long long)f->n, f->sum);
    atomic_fetch_add(&n_ended_gone, atomic_load(&f->is_gone));
    exchange_reply(f->x, status, "text/plain", &b);
    return false;
}

/* POST /in reads all; /slow does so slowly; /refuse answers behind 10,000 bytes. */
static bool look_in(struct exchange *x)
{
    struct flow *f = exchange_call(x);
    char data[3000];
    bool is_over = false;
    size_t n;
    if (atomic_load(&f->is_gone))
        return answer(f, 200);
    while ((n = exchange_intake_read(x, data, sizeof(data), &is_over)) > 0) {
        f->sum = sum_of(f->sum, data, n);
        f->n += (int64_t)n;
        if (strcmp(f->what, "/slow") == 0)
            client_sleep_ms(1);
        if (strcmp(f->what, "/refuse") == 0 && f->n >= 10000)
            return answer(f, 400);
    }
    return is_over ? answer(f, 200) : true;
}

static char pattern(int64_t at)
{
    return (char)(at * 31 + at / 257);
}

/* GET /out?N sends N bytes, /cut?N all but the last. */
static bool look_out(struct exchange *x)
{
    struct flow *f = exchange_call(x);
    struct buf b;
    int64_t n_all = f->n_wanted - (strcmp(f->what, "/cut") == 0);
    buf_init(&b);
    while (f->n < n_all && !atomic_load(&f->is_gone)) {
        int64_t n = 1 + (f->n * 7 + 12345) % PART_BYTES;
        n = n < n_all - f->n ? n : n_all - f->n;
        long long waiting = (long long)exchange_stream_waiting(x);
        if (waiting >= HTTP_FILE_LOW_BYTES)
            return true;
        buf_reserve(&b, (size_t)n);
        for (; n > 0; n--)
            buf_addc(&b, pattern(f->n++));
        exchange_stream_write(x, &b);
        waiting = (long long)exchange_stream_waiting(x);
        if (waiting > atomic_load(&most_waiting))
            atomic_store(&most_waiting, waiting);
    }
    atomic_fetch_add(&n_ended_gone, atomic_load(&f->is_gone));
    exchange_stream_end(x, &b);
    return false;
}

static void handle(void *arg, struct exchange *x)
{
    struct server *s = arg;
    struct flow *f = calloc(1, sizeof(*f));
    bool is_in = strcmp(exchange_method(x), "POST") == 0;
    atomic_fetch_add(&s->n_handled, 1);
    *f = (struct flow){.s = s, .x = x, .what = exchange_path(x), .sum = 2166136261u};
    if (strcmp(f->what, "/now") == 0) { /* without a look at the body */
        free(f);
        atomic_fetch_add(&s->n_freed, 1);
        struct buf b;
        buf_init(&b);
        buf_adds(&b, "no");
        exchange_reply(x, 503, "text/plain", &b);
        return;
    }
    if (is_in && exchange_intake_open(x, RING_BYTES) != 0)
        exit(1);
    if (!is_in) {
        f->n_wanted = atoll(exchange_query(x));
        exchange_file_open(x, "application/octet-stream", f->n_wanted);
    }
    if (strcmp(f->what, "/late") == 0)
        client_sleep_ms(50); /* bytes come, or the client goes */
    exchange_start_looks(x, is_in ? look_in : look_out, f, on_hangup, free_flow);
}

static int64_t intake(void *arg, const struct exchange *x)
{
    (void)arg;
    return strcmp(exchange_method(x), "POST") == 0 ? MAX_INTAKE : 0;
}

static struct http_config config(void)
{
    struct http_config c = server_config();
    c.handle = handle;
    c.intake = intake;
    c.file_timeout_s = 10;
    return c;
}

/* ---- clients ---- */

static int send_head(int fd, const char *path, size_t len, bool is_chunked)
{
    char head[200], length[60] = "Transfer-Encoding: chunked";
    if (!is_chunked)
        snprintf(length, sizeof(length), "Content-Length: %zu", len);
    snprintf(head, sizeof(head), "POST %s HTTP/1.1\r\n" HOST "%s\r\n\r\n", path, length);
    return client_sends(fd, head);
}

/* len bytes in pieces; returns what was sent. */
static size_t send_body(int fd, struct rng *rng, char *data, size_t len, bool is_chunked)
{
    size_t at = 0, n;
    for (; at < len; at += n) {
        char line[32];
        n = 1 + (size_t)rng_int(rng, rng_int(rng, 2) ? 100 : 100000);
        n = n < len - at ? n : len - at;
        for (size_t i = 0; i < n; i++)
            data[at + i] = (char)rng_u64(rng);
        snprintf(line, sizeof(line), "%zx\r\n", n);
        if ((is_chunked && !client_sends(fd, line)) || !client_send(fd, data + at, n) ||
            (is_chunked && !client_sends(fd, "\r\n")))
            return at;
    }
    if (is_chunked)
        client_sends(fd, "0\r\n\r\n");
    return at;
}

static void get(int fd, const char *path, int64_t n)
{
    char head[200];
    snprintf(head, sizeof(head), "GET %s?%lld HTTP/1.1\r\n" HOST "\r\n", path, (long long)n);
    client_sends(fd, head);
}

static bool is_pattern(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != pattern((int64_t)i))
            return false;
    return true;
}

/* ---- tests ---- */

/* Under TSan, on a busy machine, what takes a moment takes seconds; what takes the idle
 * timeout, 30 s, is a fault. */
static bool comes_to(atomic_int *value, int want)
{
    bool is_there = false;
    for (int i = 0; i < 5 && !is_there; i++)
        is_there = becomes(value, want);
    return is_there;
}

static void test_bodies(struct rng *rng)
{
    struct server *s = server_start(config());
    static const size_t sizes[] = {0,    1,     2999,  3000, 8191,   8192,
                                   8193, 16384, 70000, 999,  1000000};
    int n_wrong = 0, n = 0, fd = client_connect(s->address);
    char *data = malloc(1000000), want[64];
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (int chunked = 0; chunked < 2; chunked++, n++) {
            send_head(fd, i % 3 ? "/in" : "/slow", sizes[i], chunked);
            send_body(fd, rng, data, sizes[i], chunked);
            struct answer a = client_read(fd, 1);
            snprintf(want, sizeof(want), "%zu %u", sizes[i],
                     sum_of(2166136261u, data, sizes[i]));
            n_wrong += a.status != 200 || strcmp(a.body, want) != 0;
            answer_free(&a);
        }
    CHECK(n_wrong == 0, "%d bodies on one connection came as they were sent (%d not)", n,
          n_wrong);
    close(fd);
    CHECK(comes_to(&s->n_freed, n), "their calls are over");
    server_stop(s);
    free(data);
}

/* Streams that end when their client has not read them: cut behind a whole event, or, when
 * little is left, not at all. */
static void test_cut(void)
{
    static const char last[] =
        "data: {\"error\": {\"message\": \"the server is shutting down\"";
    static const char done[] = "}}\n\ndata: [DONE]\n\n";
    const size_t event_len = strlen("data: \n\n") + EVENT_DIGITS;
    char dir[] = "/tmp/prefilld-http-XXXXXX", address[64];
    const char *listen[1] = {address};
    struct http_config c = server_config();
    if (!mkdtemp(dir))
        printf("Bail out! mkdtemp\n");
    snprintf(address, sizeof(address), "unix:%s/s", dir);
    c.listen = listen;
    struct server *s = server_start(c);
    int fd = client_connect(s->address);
    client_sends(fd, "GET /events HTTP/1.1\r\n" HOST "\r\n");
    struct answer a = client_read(fd, 0);
    CHECK(a.status == 200, "a stream begins");
    answer_free(&a);
    http_quiesce(s->http);
    CHECK(!http_flush(s->http, client_now_ms() * 1000 + 50000), "its client does not read");
    http_cut(s->http);
    http_cut(s->http);
    struct buf b;
    buf_init(&b);
    CHECK(client_read_chunks(fd, &b, NULL) > 0 && buf_cstr(&b), "it ends");
    const char *end = b.data ? strstr(b.data, last) : NULL;
    size_t n = end ? (size_t)(end - b.data) / event_len : 0;
    bool is_right = end && (size_t)(end - b.data) == n * event_len && n > 0 && n < N_EVENTS &&
                    strcmp(b.data + b.len - strlen(done), done) == 0 && !strstr(end + 1, last);
    for (size_t i = 0; is_right && i < n; i++)
        is_right = strtoul(b.data + i * event_len + strlen("data: "), NULL, 10) == i;
    CHECK(is_right, "an error is the last event, behind %zu whole ones", n);
    CHECK(http_flush(s->http, client_now_ms() * 1000 + 3000000), "nothing is left");
    buf_fini(&b);
    close(fd);
    server_stop(s);
    rmdir(dir);
}

/* While a handler takes its time bytes come, and the client may go: it hears of both. */
static void test_late_looks(struct rng *rng)
{
    struct server *s = server_start(config());
    char *data = malloc(100000), want[64];
    int fd = client_connect(s->address);
    send_head(fd, "/late", 100000, false);
    send_body(fd, rng, data, 100000, false);
    struct answer a = client_read(fd, 1);
    snprintf(want, sizeof(want), "%d %u", 100000, sum_of(2166136261u, data, 100000));
    CHECK(a.status == 200 && strcmp(a.body, want) == 0, "a body that comes meanwhile");
    answer_free(&a);
    close(fd);
    int n_gone = (int)atomic_load(&n_ended_gone);
    fd = client_connect(s->address);
    send_head(fd, "/late", 100000, false);
    send_body(fd, rng, data, 5000, false);
    client_sleep_ms(10);
    close(fd);
    fd = client_connect(s->address);
    get(fd, "/late", 1000000);
    client_sleep_ms(10);
    close(fd);
    CHECK(comes_to(&s->n_freed, 3) && atomic_load(&n_ended_gone) == n_gone + 2 &&
              comes_to(&s->n_connections, 0),
          "a client that goes meanwhile");
    server_stop(s);
    free(data);
}

static void test_refused_in_body(struct rng *rng)
{
    static const char *const paths[] = {"/refuse", "/now"};
    struct server *s = server_start(config());
    char *data = malloc(2000000);
    for (int i = 0; i < 2; i++) {
        int fd = client_connect(s->address);
        send_head(fd, paths[i], 2000000, false);
        send_body(fd, rng, data, 2000000, false); /* it may not be taken to its end */
        struct answer a = client_read(fd, 1);
        CHECK(a.status == (i ? 503 : 400) && answer_has(&a, "Connection", "close") &&
                  client_ends(fd, 5000),
              "%s: an answer in the middle, and a close: %d", paths[i], a.status);
        answer_free(&a);
        close(fd);
    }
    int fd = client_connect(s->address);
    send_head(fd, "/refuse", 100000, false);
    send_body(fd, rng, data, 10000, false); /* all that is read before the answer */
    struct answer early = client_read(fd, 1);
    CHECK(early.status == 400 && client_ends(fd, 5000),
          "who sends no more meets the close, too");
    answer_free(&early);
    close(fd);
    fd = client_connect(s->address);
    client_sends(fd, "POST /in HTTP/1.1\r\n" HOST "Content-Length: 99999999999\r\n\r\n");
    struct answer a = client_read(fd, 1);
    CHECK(a.status == 413, "too long by its length: %d", a.status);
    answer_free(&a);
    close(fd);
    CHECK(comes_to(&s->n_connections, 0) && comes_to(&s->n_freed, 3), "nothing is left");
    server_stop(s);
    free(data);
}

static void test_answers(void)
{
    static const int64_t sizes[] = {1, 1000, HTTP_FILE_LOW_BYTES, 3000001, 8000000};
    struct server *s = server_start(config());
    int n_wrong = 0, fd = client_connect(s->address);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        get(fd, "/out", sizes[i]);
        struct answer a = client_read(fd, 1);
        n_wrong += a.status != 200 || (int64_t)a.body_len != sizes[i] ||
                   !is_pattern(a.body, a.body_len);
        answer_free(&a);
    }
    CHECK(n_wrong == 0, "answers of known lengths (%d wrong)", n_wrong);
    get(fd, "/cut", 3000000);
    struct answer a = client_read(fd, 1);
    CHECK(a.status == -1 && answer_has(&a, "Content-Length", "3000000"),
          "one that ends early is cut, not ended: %d, %zu bytes", a.status, a.body_len);
    answer_free(&a);
    close(fd);
    /* A reader that does not read. */
    int small = 4096;
    fd = client_connect(s->address);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    get(fd, "/out", 20000000);
    client_sleep_ms(100);
    close(fd);
    bool is_over = comes_to(&s->n_freed, 7) && comes_to(&s->n_connections, 0);
    CHECK(is_over && atomic_load(&n_ended_gone) == 1 && atomic_load(&s->n_hangups) <= 1,
          "one that goes is noticed, and no other (%d, %d, %lld, %d)", atomic_load(&s->n_freed),
          atomic_load(&s->n_connections), atomic_load(&n_ended_gone),
          atomic_load(&s->n_hangups));
    CHECK(atomic_load(&most_waiting) < HTTP_FILE_LOW_BYTES + PART_BYTES,
          "no more than %lld bytes waited", atomic_load(&most_waiting));
    server_stop(s);
}

static void test_deadlines(void)
{
    struct http_config c = config();
    c.file_timeout_s = 1;
    struct server *s = server_start(c);
    int in = client_connect(s->address), out = client_connect(s->address), small = 4096;
    setsockopt(out, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    send_head(in, "/in", 1000, false);
    client_sends(in, "x");
    get(out, "/out", 20000000);
    struct answer a = client_read(in, 1);
    CHECK(a.status == 408, "a body that stands still: %d", a.status);
    answer_free(&a);
    CHECK(comes_to(&s->n_freed, 2) && comes_to(&s->n_connections, 0), "a reader, too");
    close(in);
    close(out);
    server_stop(s);
}

static void test_stop(struct rng *rng)
{
    enum { N = 8 };
    struct server *s = server_start(config());
    int fds[N], small = 4096;
    char data[20000];
    for (int i = 0; i < N; i++) {
        fds[i] = client_connect(s->address);
        setsockopt(fds[i], SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
        if (i % 2)
            get(fds[i], "/out", 20000000);
        else if (send_head(fds[i], "/slow", 1 << 20, false))
            send_body(fds[i], rng, data, sizeof(data), false);
    }
    CHECK(comes_to(&s->n_handled, N), "eight are under way");
    server_stop(s); /* hangs when one is forgotten */
    CHECK(true, "and the server ends");
    for (int i = 0; i < N; i++)
        close(fds[i]);
}

/* ---- all of it at once ---- */

struct storm {
    struct server *s;
    uint64_t seed;
    int n_ok, n_wrong;
};

static void one_of_storm(struct storm *st, struct rng *rng, char *data)
{
    int fd = client_connect(st->s->address);
    bool leaves = rng_int(rng, 4) == 0;
    if (rng_int(rng, 2)) {
        int64_t n = 1 + rng_int(rng, 2000000);
        get(fd, "/out", n);
        if (!leaves) {
            struct answer a = client_read(fd, 1);
            bool ok = a.status == 200 && is_pattern(a.body, a.body_len);
            ok ? st->n_ok++ : st->n_wrong++;
            answer_free(&a);
        }
    } else {
        static const char *const paths[] = {"/in", "/refuse", "/slow", "/now"};
        int how = rng_int(rng, 4);
        size_t n = (size_t)rng_int(rng, 100000);
        send_head(fd, paths[how], n, false);
        size_t sent = send_body(fd, rng, data, leaves ? n / 2 : n, false);
        if (!leaves) {
            struct answer a = client_read(fd, 1);
            char want[64];
            snprintf(want, sizeof(want), "%zu %u", n, sum_of(2166136261u, data, sent));
            bool ok = how == 3                 ? a.status == 503
                      : how == 1 && n >= 10000 ? a.status == 400
                                               : a.status == 200 && strcmp(a.body, want) == 0;
            ok ? st->n_ok++ : st->n_wrong++;
            answer_free(&a);
        }
    }
    close(fd);
}

static void *storm_main(void *arg)
{
    struct storm *st = arg;
    struct rng rng = {st->seed};
    char *data = malloc(100000);
    for (int i = 0; i < 12; i++)
        one_of_storm(st, &rng, data);
    free(data);
    return NULL;
}

static void test_storm(uint64_t seed)
{
    enum { N_THREADS = 8 };
    struct server *s = server_start(config());
    struct storm storms[N_THREADS];
    pthread_t threads[N_THREADS];
    int n_ok = 0, n_wrong = 0;
    for (int i = 0; i < N_THREADS; i++) {
        storms[i] = (struct storm){.s = s, .seed = seed + (uint64_t)i};
        pthread_create(&threads[i], NULL, storm_main, &storms[i]);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
        n_ok += storms[i].n_ok;
        n_wrong += storms[i].n_wrong;
    }
    CHECK(n_wrong == 0, "each of %d clients that stayed got its answer (%d not)", n_ok,
          n_wrong);
    CHECK(comes_to(&s->n_connections, 0) && comes_to(&s->n_freed, atomic_load(&s->n_handled)),
          "each of %d calls was freed", atomic_load(&s->n_handled));
    CHECK(http_flush(s->http, client_now_ms() * 1000 + 1000000), "nothing is under way");
    server_stop(s);
}

int main(int argc, char **argv)
{
    struct rng rng = {argc > 1 ? strtoull(argv[1], NULL, 10) : 20261130};
    signal(SIGPIPE, SIG_IGN);
    printf("# seed %llu\n", (unsigned long long)rng.s);
    test_bodies(&rng);
    test_refused_in_body(&rng);
    test_answers();
    test_deadlines();
    test_stop(&rng);
    test_late_looks(&rng);
    test_cut();
    test_storm(rng.s);
    return tap_done();
}
