/* Answers that grow, over real sockets, with a stub for the engine: completions as events,
 * hang-ups, pings, failures, stops; readers of the steps. */
#include <pthread.h>
#include <signal.h>

#include "api_steps.h"
#include "api_stub.h"
#include "rng.h"

/* ---- streams ---- */

static int ask_stream_at(struct server *s, const char *path, const char *body)
{
    char request[1024];
    int fd = client_connect(s->address);
    snprintf(request, sizeof(request),
             "POST %s HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n%s", path, strlen(body),
             body);
    client_sends(fd, request);
    return fd;
}

static int ask_stream(struct server *s, const char *body)
{
    return ask_stream_at(s, "/v1/completions", body);
}

/* The n-th event's line; it stays in a static buffer. */
static const char *event_of(struct buf *b, int n)
{
    static char line[4096];
    const char *p = buf_cstr(b);
    while (p && n-- > 0)
        p = strstr(p, "\n\n") ? strstr(p, "\n\n") + 2 : NULL;
    snprintf(line, sizeof(line), "%.*s", p ? (int)strcspn(p, "\n") : 0, p ? p : "");
    return line;
}

static void test_stream(void)
{
    struct server *s = server_start(NULL);
    struct buf b;
    buf_init(&b);
    int fd = ask_stream(s, "{\"prompt\":[5,6],\"max_tokens\":3,\"stream\":true,\"logprobs\":0,"
                           "\"stream_options\":{\"include_usage\":true},\"ignore_eos\":true}");
    struct answer a = client_read(fd, 0);
    CHECK(a.status == 200 && answer_has(&a, "Content-Type", "text/event-stream") &&
              answer_has(&a, "Transfer-Encoding", "chunked") &&
              answer_header(&a, "X-Request-Id"),
          "a stream begins: %s", a.head);
    answer_free(&a);
    int n = client_read_chunks(fd, &b, NULL);
    CHECK(n > 0, "it ends: %s", buf_cstr(&b));
    CHECK(strstr(event_of(&b, 0), "data: {\"id\": \"cmpl-pf-") == event_of(&b, 0) &&
              strstr(event_of(&b, 0), "\"tokens\": [\" ha\"]") &&
              strstr(event_of(&b, 0), "\"finish_reason\": null"),
          "a token: %s", event_of(&b, 0));
    CHECK(strstr(event_of(&b, 1), "\"text_offset\": [3]"), "the next: %s", event_of(&b, 1));
    CHECK(strstr(event_of(&b, 2), "\"finish_reason\": \"length\""), "the last: %s",
          event_of(&b, 2));
    CHECK(strstr(event_of(&b, 3), "\"choices\": [], \"usage\": {\"prompt_tokens\": 2, "
                                  "\"total_tokens\": 5, \"completion_tokens\": 3"),
          "usage: %s", event_of(&b, 3));
    CHECK(strcmp(event_of(&b, 4), "data: [DONE]") == 0 && event_of(&b, 5)[0] == '\0', "done");
    /* The connection stays. */
    client_sends(fd, "GET /version HTTP/1.1\r\nHost: t\r\n\r\n");
    expect(client_read(fd, 1), 200, "9.9", "another call on the connection");
    close(fd);
    b.len = 0;
    fd = ask_stream(s, "{\"prompt\":\"And God\",\"max_tokens\":0,\"stream\":true,\"echo\":true,"
                       "\"logprobs\":0}");
    a = client_read(fd, 0);
    answer_free(&a);
    client_read_chunks(fd, &b, NULL);
    CHECK(strstr(event_of(&b, 0),
                 "\"text\": \"And God\", \"logprobs\": {\"text_offset\": [0, 3]") &&
              strcmp(event_of(&b, 1), "data: [DONE]") == 0,
          "a prompt alone: %s", event_of(&b, 0));
    close(fd);
    expect(complete(s, "{\"prompt\":[1],\"stream_options\":{}}"), 400, "stream_options",
           "stream_options without a stream");
    expect(complete(s, "{\"prompt\":[1],\"stream\":true,\"prompt_logprobs\":1}"), 400,
           "prompt_logprobs", "vLLM's list in a stream");
    buf_fini(&b);
    server_stop(s);
}

/* All of a stream, of which b gets the events. */
static void read_stream(struct server *s, const char *path, const char *body, struct buf *b)
{
    int fd = ask_stream_at(s, path, body);
    struct answer a = client_read(fd, 0);
    CHECK(a.status == 200 && answer_has(&a, "Content-Type", "text/event-stream"), "a stream");
    answer_free(&a);
    b->len = 0;
    int n = client_read_chunks(fd, b, NULL);
    CHECK(n >= 0, "it ends: %s", buf_cstr(b));
    close(fd);
}

static void has_event(struct buf *b, int n, const char *text, const char *what)
{
    CHECK(strstr(event_of(b, n), text), "%s: has %s in %s", what, text, event_of(b, n));
}

/* How far prompts are, in llama.cpp's words, before the first token. */
static void test_progress(void)
{
    struct server *s = server_start(NULL);
    struct buf b;
    buf_init(&b);
    read_stream(
        s, "/v1/completions",
        "{\"prompt\":[5,6,7],\"max_tokens\":1,\"stream\":true,\"return_progress\":true}", &b);
    has_event(&b, 0,
              "\"choices\": [{\"index\": 0, \"text\": \"\", \"logprobs\": null, "
              "\"finish_reason\": null}], \"prompt_progress\": {\"total\": 3, \"cache\": 0, "
              "\"processed\": 2, \"time_ms\": ",
              "half of it");
    has_event(&b, 1, "\"processed\": 3", "all of it");
    has_event(&b, 2, "\"finish_reason\": \"length\"", "then the token");
    has_event(&b, 3, "[DONE]", "and the end");
    read_stream(s, "/v1/chat/completions",
                "{\"messages\":[{\"role\":\"user\",\"content\":\"And\"}],\"max_tokens\":1,"
                "\"stream\":true,\"return_progress\":true}",
                &b);
    has_event(&b, 1, "\"delta\": {}", "a chat");
    has_event(&b, 1, "\"prompt_progress\": {\"total\": ", "and its progress");
    /* A prompt alone. */
    read_stream(s, "/v1/completions",
                "{\"prompt\":[[5],[6,7]],\"max_tokens\":0,\"stream\":true,\"echo\":true,"
                "\"return_progress\":true}",
                &b);
    CHECK(strstr(b.data, "\"index\": 1, \"text\": \"\", ") &&
              strstr(b.data, "\"total\": 2, \"cache\": 0, \"processed\": 2"),
          "each prompt has its own: %s", b.data);
    buf_fini(&b);
    server_stop(s);
}

/* As SGLang: each event has all that came so far. */
static void test_generate(void)
{
    struct server *s = server_start(NULL);
    struct buf b;
    buf_init(&b);
    read_stream(
        s, "/generate",
        "{\"input_ids\":[5,6],\"sampling_params\":{\"max_new_tokens\":3},\"stream\":true,"
        "\"return_logprob\":true,\"logprob_start_len\":0}",
        &b);
    has_event(&b, 0, "data: {\"text\": \" ha\", \"output_ids\": [300], \"meta_info\": {",
              "the first");
    has_event(&b, 0, "\"finish_reason\": null, \"prompt_tokens\": 2, \"completion_tokens\": 1",
              "open");
    has_event(&b, 0, "\"input_token_logprobs\": [[null, 5, null], [-0.5, 6, null]]",
              "with the prompt's numbers");
    has_event(&b, 1, "\"output_ids\": [300, 301]", "both");
    CHECK(!strstr(event_of(&b, 1), "input_token_logprobs"), "without the prompt's numbers");
    has_event(&b, 1, "\"output_token_logprobs\": [[-0.125, 300, null], [-0.25, 301, null]]",
              "their numbers");
    has_event(&b, 2, "\"finish_reason\": {\"type\": \"length\", \"length\": 3}", "the last");
    has_event(&b, 2, "\"input_token_logprobs\": [[null, 5, null]", "with all");
    has_event(&b, 3, "data: [DONE]", "done");
    read_stream(s, "/generate",
                "{\"text\":[\"And\",\"God\"],\"sampling_params\":{\"max_new_tokens\":1},"
                "\"stream\":true}",
                &b);
    CHECK(strstr(b.data, "}, \"index\": 0}\n\n") && strstr(b.data, "}, \"index\": 1}\n\n"),
          "a list: %s", b.data);
    buf_fini(&b);
    server_stop(s);
}

/* Before its first event a call fails as any other; later with an event. */
static void test_stream_fails(void)
{
    static const char body[] = "{\"prompt\":[5,6],\"max_tokens\":90,\"stream\":true}";
    struct server *s = server_start(NULL);
    struct buf b;
    buf_init(&b);
    atomic_store(&s->outcome, OUTCOME_DEADLINE);
    int fd = ask_stream(s, body);
    expect(client_read(fd, 1), 504, "deadline_ms", "late before the first event");
    close(fd);
    atomic_store(&s->outcome, OUTCOME_OK);
    atomic_store(&s->token_ms, 5);
    fd = ask_stream(s, body);
    struct answer a = client_read(fd, 0);
    CHECK(a.status == 200, "a stream");
    answer_free(&a);
    client_read_chunks(fd, &b, "data: ");
    atomic_store(&s->outcome, OUTCOME_ERROR);
    int n = client_read_chunks(fd, &b, NULL);
    CHECK(n >= 0 && strstr(buf_cstr(&b), "\n\ndata: {\"error\": {\"message\"") &&
              strstr(b.data, "\n\ndata: [DONE]\n\n"),
          "an error in the middle: %s", b.data);
    close(fd);
    CHECK(counted(s, OUTCOME_ERROR) == 1 && counted(s, OUTCOME_DEADLINE) == 1, "both count");
    buf_fini(&b);
    server_stop(s);
}

static void test_stream_hangup(void)
{
    static const char body[] = "{\"prompt\":[5,6],\"max_tokens\":90,\"n\":2,\"stream\":true}";
    struct server *s = server_start(NULL);
    struct buf b;
    buf_init(&b);
    atomic_store(&s->token_ms, 20);
    for (int i = 0; i < 2; i++) {
        atomic_store(&s->n_cancels, 0);
        atomic_store(&s->n_done, 0);
        int fd = ask_stream(s, body);
        struct answer a = client_read(fd, 0);
        answer_free(&a);
        CHECK(client_read_chunks(fd, &b, "data: ") >= 0, "an event has come");
        if (i == 0)
            close(fd);
        else
            shutdown(fd, SHUT_WR);
        CHECK(becomes(&s->n_cancels, 2) && becomes(&s->n_done, 2), "%s: both are cancelled",
              i == 0 ? "closed" : "closed for sending");
        if (i == 1)
            close(fd);
    }
    for (int i = 0; i < 2000 && counted(s, OUTCOME_CANCELLED) < 2; i++)
        client_sleep_ms(1);
    CHECK(counted(s, OUTCOME_CANCELLED) == 2 && becomes(&s->metrics.connections, 0),
          "nothing is left");
    buf_fini(&b);
    server_stop(s);
}

/* While another connection has been quiet for longer: libmicrohttpd looks at that one first,
 * and for a while lost the descriptor of a stream that ended otherwise than by a last chunk. */
static void test_stream_descriptors(void)
{
    static const char body[] = "{\"prompt\":[5,6],\"max_tokens\":%d,\"stream\":true}";
    static const char *const names[] = {"a hang-up", "HTTP/1.0, a hang-up",
                                        "HTTP/1.0, which ends by a close",
                                        "a client that wants a close"};
    struct server *s = server_start(NULL);
    int quiet = client_connect(s->address);
    client_sends(quiet, "GET /version HTTP/1.1\r\nHost: t\r\n\r\n");
    expect(client_read(quiet, 1), 200, "9.9", "a connection that then is quiet");
    atomic_store(&s->token_ms, 20);
    for (int i = 0; i < 4; i++) {
        char text[256], request[512];
        int fd = client_connect(s->address);
        int len = snprintf(text, sizeof(text), body, i < 2 ? 90 : 5);
        snprintf(request, sizeof(request),
                 "POST /v1/completions HTTP/1.%d\r\nHost: t\r\nConnection: "
                 "%s\r\nContent-Length: %d\r\n\r\n%s",
                 i == 0 || i == 3, i == 3 ? "close" : "keep-alive", len, text);
        client_sends(fd, request);
        struct answer a = client_read(fd, 0);
        CHECK(a.status == 200, "%s: it begins", names[i]);
        answer_free(&a);
        char c[4096];
        ssize_t n = 1, n_all = 0;
        while (n > 0 && (i >= 2 || n_all == 0)) {
            n = client_recv(fd, c + n_all, 1);
            n_all += n;
        }
        CHECK(i != 2 ||
                  (n == 0 && n_all > 14 && memcmp(c + n_all - 14, "data: [DONE]\n\n", 14) == 0),
              "%s: to the end, and nothing more", names[i]);
        close(fd);
        CHECK(becomes(&s->metrics.connections, 1), "%s: its descriptor is closed", names[i]);
    }
    close(quiet);
    CHECK(becomes(&s->metrics.connections, 0), "nothing is left");
    server_stop(s);
}

/* A wall clock, not the engine, keeps a stream alive: also before its first token. */
static void test_ping(void)
{
    struct server *s = server_start(NULL);
    struct buf b;
    buf_init(&b);
    atomic_store(&s->is_held, true);
    int fd = ask_stream(s, "{\"prompt\":[5,6],\"max_tokens\":1,\"stream\":true}");
    struct answer a = client_read(fd, 0);
    CHECK(a.status == 200, "a ping begins the stream");
    answer_free(&a);
    CHECK(client_read_chunks(fd, &b, ": ping\n\n") >= 0, "a comment");
    atomic_store(&s->is_held, false);
    CHECK(client_read_chunks(fd, &b, NULL) >= 0 && strstr(buf_cstr(&b), "\ndata: [DONE]"),
          "then the rest");
    close(fd);
    buf_fini(&b);
    server_stop(s);
}

/* Closing the server in the middle of streams, parked and not. */
static void test_stream_close(void)
{
    struct server *s = server_start(NULL);
    int fds[4];
    atomic_store(&s->token_ms, 10);
    for (int i = 0; i < 4; i++)
        fds[i] = ask_stream(s, "{\"prompt\":[5,6],\"max_tokens\":90,\"stream\":true}");
    for (int i = 0; i < 4; i++) {
        struct answer a = client_read(fds[i], 0);
        CHECK(a.status == 200, "stream %d", i);
        answer_free(&a);
    }
    /* http_close is what hangs up; the stub goes on until the queue is stopped. */
    http_quiesce(s->http);
    CHECK(!http_flush(s->http, request_now_us() + 1000), "streams are under way");
    atomic_store(&s->token_ms, 0);
    server_stop(s);
    for (int i = 0; i < 4; i++)
        close(fds[i]);
}

enum { READERS = 6, READS = 60 };

/* Readers that come and go while steps end: each connection is let go, and none is touched
 * after.
 * */
struct reader {
    struct server *s;
    uint64_t seed;
};

static void *reader_main(void *arg)
{
    struct reader *me = arg;
    struct server *s = me->s;
    struct rng r = {me->seed};
    static const char request[] = "GET /v1/steps HTTP/1.1\r\nHost: t\r\n\r\n";
    for (int i = 0; i < READS; i++) {
        int fd = client_connect(s->address);
        char scratch[4096];
        client_sends(fd, request);
        for (int n = rng_int(&r, 4); n > 0; n--)
            if (recv(fd, scratch, sizeof(scratch), 0) <= 0)
                break;
        close(fd);
    }
    return NULL;
}

static void test_steps_readers(void)
{
    struct server *s = server_start(NULL);
    static struct steps steps;
    struct steps_record record = {.trace = {.n_tokens = 3, .n_pieces = 1},
                                  .pieces = {{.id = "x"}}};
    pthread_t threads[READERS];
    struct reader readers[READERS];
    steps_init(&steps);
    steps_readers_init(&s->api.readers);
    s->api.steps = &steps;
    steps_set_listener(&steps, api_steps_notify, &s->api);
    for (int i = 0; i < READERS; i++) {
        readers[i] = (struct reader){s, 4711 + (uint64_t)i};
        pthread_create(&threads[i], NULL, reader_main, &readers[i]);
    }
    for (int i = 0; i < 4000; i++) {
        record.trace.number = i;
        steps_add(&steps, &record);
        if (i % 16 == 0)
            client_sleep_ms(1);
    }
    for (int i = 0; i < READERS; i++)
        pthread_join(threads[i], NULL);
    steps_add(&steps, &record);
    bool have_gone = false;
    for (int i = 0; i < 10 && !have_gone; i++)
        have_gone = becomes(&s->metrics.connections, 0);
    CHECK(have_gone, "%d readers came and went", READERS * READS);
    /* A worker takes a reader out a moment after its connection has ended. */
    bool is_empty = false;
    for (int i = 0; i < 5000 && !is_empty; i++) {
        pthread_mutex_lock(&s->api.readers.lock);
        is_empty = s->api.readers.first == NULL;
        pthread_mutex_unlock(&s->api.readers.lock);
        client_sleep_ms(1);
    }
    CHECK(is_empty, "the list is empty");
    int fd = client_connect(s->address);
    client_sends(fd, "GET /v1/steps HTTP/1.1\r\nHost: t\r\n\r\n");
    static char text[1 << 20];
    ssize_t len = recv(fd, text, 1, 0), n;
    CHECK(len == 1, "one more is served");
    api_steps_close(&s->api);
    while (len > 0 && (len < 5 || memcmp(text + len - 5, "0\r\n\r\n", 5) != 0) &&
           (n = recv(fd, text + len, sizeof(text) - (size_t)len, 0)) > 0)
        len += n;
    CHECK(len > 5 && memcmp(text + len - 5, "0\r\n\r\n", 5) == 0, "its stream ends whole");
    close(fd);
    CHECK(becomes(&s->metrics.connections, 0), "and let go");
    server_stop(s);
    steps_fini(&steps);
}

static void count_told(void *arg)
{
    ++*(int *)arg;
}

static int count_events(const struct buf *b)
{
    int n = 0;
    for (size_t i = 0; i + 1 < b->len; i++)
        n += b->data[i] == '\n' && b->data[i + 1] == '\n';
    return n;
}

/* Readers are told of many steps at a time, soon, of each one once, and share the text. */
static void test_steps_told(void)
{
    enum { RECORDS = 20000, HOUR_US = 1000000000 };
    static struct steps steps;
    struct steps_record record = {.trace = {.n_tokens = 3}};
    struct buf one, other, more;
    int n_told = 0;
    buf_init(&one);
    buf_init(&other);
    buf_init(&more);
    steps_init(&steps);
    steps_set_listener(&steps, count_told, &n_told);
    int64_t from_us = request_now_us();
    for (int i = 0; i < RECORDS; i++) {
        record.trace.number = i;
        steps_add(&steps, &record);
    }
    int64_t n_times = 1 + (request_now_us() - from_us) / STEPS_TELL_US;
    CHECK(n_told >= 1 && n_told <= n_times, "%d steps are told of %d times", RECORDS, n_told);
    int64_t later_us = request_now_us() + HOUR_US;
    CHECK(steps_tell(&steps, later_us) && steps_tell(&steps, later_us), "all is told");
    int64_t place = steps_render(&steps, 0, &one);
    CHECK(place == RECORDS && steps_render(&steps, 0, &other) == RECORDS &&
              count_events(&one) == STEPS_KEPT && one.len == other.len &&
              memcmp(one.data, other.data, one.len) == 0 &&
              strstr(buf_cstr(&one), "{\"step\": 19999, "),
          "and two readers have the latest");
    n_told = 0;
    for (int i = 0; i < 3; i++) {
        record.trace.number = RECORDS + i;
        steps_add(&steps, &record);
    }
    CHECK(n_told == 0 && !steps_tell(&steps, later_us + STEPS_TELL_US - 1) &&
              steps_render(&steps, place, &more) == place && more.len == 0,
          "what comes right behind is kept for a moment");
    CHECK(steps_tell(&steps, later_us + STEPS_TELL_US) && n_told == 1 &&
              steps_render(&steps, place, &more) == place + 3 && count_events(&more) == 3 &&
              strstr(buf_cstr(&more), "data: {\"step\": 20000, ") == more.data,
          "and told then");
    buf_fini(&one);
    buf_fini(&other);
    buf_fini(&more);
    steps_fini(&steps);
}

/* A reader that takes nothing costs no more than a bound, and goes on where it can. */
static void test_steps_unread(void)
{
    enum { RECORDS = 10000 }; /* of 3 KiB: more than any stream may leave unread */
    struct server *s = server_start(NULL);
    static struct steps steps;
    static char text[1 << 16];
    struct steps_record record = {.trace = {.n_tokens = 3, .n_pieces = STEPS_PIECES}};
    for (int i = 0; i < STEPS_PIECES; i++)
        memset(record.pieces[i].id, 'x', STEPS_ID - 1);
    steps_init(&steps);
    steps_readers_init(&s->api.readers);
    s->api.steps = &steps;
    steps_set_listener(&steps, api_steps_notify, &s->api);
    int fd = client_connect(s->address);
    client_sends(fd, "GET /v1/steps HTTP/1.1\r\nHost: t\r\n\r\n");
    CHECK(recv(fd, text, 1, 0) == 1, "it is served");
    for (int i = 0; i < RECORDS; i++) {
        record.trace.number = i;
        steps_add(&steps, &record);
        if (i % 16 == 0)
            client_sleep_ms(1);
    }
    CHECK(s->metrics.connections == 1, "who takes nothing stays");
    size_t n_read = 0;
    ssize_t n;
    while (recv(fd, text, 1, MSG_PEEK | MSG_DONTWAIT) == 1) {
        while ((n = recv(fd, text, sizeof(text), MSG_DONTWAIT)) > 0)
            n_read += (size_t)n;
        client_sleep_ms(50);
    }
    record.trace.number = RECORDS;
    steps_add(&steps, &record);
    CHECK(n_read < (16u << 20) && recv(fd, text, 1, 0) == 1, "and goes on: %zu bytes", n_read);
    api_steps_close(&s->api);
    close(fd);
    CHECK(becomes(&s->metrics.connections, 0), "and is let go");
    server_stop(s);
    steps_fini(&steps);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    log_init(LOG_LEVEL_ERROR, NULL);
    test_stream();
    test_progress();
    test_generate();
    test_stream_fails();
    test_stream_hangup();
    test_stream_descriptors();
    test_ping();
    test_stream_close();
    test_steps_readers();
    test_steps_told();
    test_steps_unread();
    return tap_done();
}
