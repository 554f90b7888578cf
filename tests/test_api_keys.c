/* Keys over real sockets: who is let in, what a key may have in flight, and reloads. A plain
 * program, so that it also runs under TSan. */
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>

#include "api_stub.h"

/* Puts text in path's place at once, as who renews a file of keys does. */
static void write_keys(const char *path, const char *text)
{
    char beside[64];
    snprintf(beside, sizeof(beside), "%s.new", path);
    int fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text) ||
        rename(beside, path) != 0)
        printf("Bail out! write %s\n", path);
    close(fd);
}

/* Two keys in a new file at path, and the server. */
static struct server *start_with_keys(char *path)
{
    close(mkstemp(path));
    write_keys(path, "first-key\r\n\n  second key \n");
    return server_start(path);
}

static void test_keys(void)
{
    char path[] = "/tmp/prefilld-keys-XXXXXX";
    struct server *s = start_with_keys(path);
    static const struct {
        const char *header;
        int status;
    } cases[] = {{"", 401},
                 {"Authorization: Bearer first-key\r\n", 200},
                 {"authorization: bearer   first-key\r\n", 200},
                 {"Authorization: Bearer second key\r\n", 200},
                 {"Authorization: Bearer first-ke\r\n", 401},
                 {"Authorization: Bearer first-keyy\r\n", 401},
                 {"Authorization: Bearer first-kez\r\n", 401},
                 {"Authorization: Bearer\r\n", 401},
                 {"Authorization: Bearer \r\n", 401},
                 {"Authorization: Basic first-key\r\n", 401},
                 {"Authorization: first-key\r\n", 401}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char request[300];
        snprintf(request, sizeof(request),
                 "POST /v1/prefill HTTP/1.1\r\nHost: t\r\n%sContent-Length: 14\r\n\r\n"
                 "{\"prompt\":[1]}",
                 cases[i].header);
        struct answer a = client_ask(s->address, request);
        CHECK(a.status == cases[i].status &&
                  (a.status == 200 || (strstr(a.body, "authentication_error") &&
                                       answer_header(&a, "WWW-Authenticate"))),
              "key case %zu: %d", i, a.status);
        answer_free(&a);
    }
    server_stop(s);
    unlink(path);
}

static void test_scopes(void)
{
    char path[] = "/tmp/prefilld-keys-XXXXXX";
    struct server *s = start_with_keys(path);
    expect(ask(s, "GET", "/health", ""), 200, "ok", "calls outside of /v1 need no key");
    expect(ask(s, "GET", "/v1/models", ""), 401, "authentication_error", "all of /v1 does");
    expect(ask(s, "POST", "/generate", "{}"), 401, "authentication_error",
           "what computes, too");
    expect(ask(s, "POST", "/rerank", "{}"), 401, "authentication_error", "as does /rerank");
    static const char *const paths[] = {"/tokenizer_info", "/metrics", "/version", "/",
                                        "/health",         "/ready"};
    static const int n_open[] = {[API_KEY_CALLS] = 6, [API_KEY_ALL_BUT_HEALTH] = 2};
    for (int scope = API_KEY_CALLS; scope <= API_KEY_ALL; scope++) {
        s->api.key_scope = scope;
        for (int i = 0; i < 6; i++) {
            struct answer a = ask(s, "GET", paths[i], "");
            int wanted = scope != API_KEY_ALL && i >= 6 - n_open[scope] ? 200 : 401;
            CHECK(a.status == wanted, "scope %d, %s: %d", scope, paths[i], a.status);
            answer_free(&a);
            char request[200];
            snprintf(request, sizeof(request),
                     "GET %s HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer first-key\r\n\r\n",
                     paths[i]);
            a = client_ask(s->address, request);
            CHECK(a.status == 200, "with a key: %d", a.status);
            answer_free(&a);
        }
    }
    expect(ask(s, "GET", "/nothing", ""), 404, "not_found", "what is not there is said to all");
    server_stop(s);
    unlink(path);
}

static void test_files(void)
{
    char path[] = "/tmp/prefilld-keys-XXXXXX";
    struct api none = {0};
    struct errmsg e;
    close(mkstemp(path));
    write_keys(path, "one\n");
    CHECK(api_read_keys(&none, path, &e) == 0 && !api_keys_allow(none.keys, NULL),
          "keys are read");
    write_keys(path, "\n \n");
    CHECK(api_read_keys(&none, path, &e) == ERR_INVALID && strstr(e.text, "no key"), "%s",
          e.text);
    unlink(path);
    CHECK(api_read_keys(&none, path, &e) == ERR_NOT_FOUND && strstr(e.text, path), "%s",
          e.text);
    CHECK(api_keys_allow(none.keys, "Bearer one") && !api_keys_allow(none.keys, NULL),
          "what cannot be read changes nothing");
    CHECK(api_read_keys(&none, NULL, &e) == 0 && api_keys_allow(none.keys, NULL),
          "no file, no keys");
    api_close(&none);
}

/* A call with a key; the connection. */
static int send_with_key(struct server *s, const char *key, const char *body)
{
    char request[512];
    int fd = client_connect(s->address);
    snprintf(request, sizeof(request),
             "POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer %s\r\n"
             "Content-Length: %zu\r\n\r\n%s",
             key, strlen(body), body);
    client_sends(fd, request);
    return fd;
}

static void expect_with_key(struct server *s, const char *key, const char *body, int status,
                            const char *text, const char *what)
{
    int fd = send_with_key(s, key, body);
    struct answer a = client_read(fd, 1);
    CHECK(status != 429 || answer_header(&a, "Retry-After"), "429 says when to come back");
    expect(a, status, text, what);
    close(fd);
}

/* What one key has in flight; another has its own; a reload forgets nothing. */
static void test_key_limits(void)
{
    static const char three[] = "{\"prompt\":[5,6,7],\"max_tokens\":1}";
    char path[] = "/tmp/prefilld-keys-XXXXXX";
    struct errmsg e;
    int file = mkstemp(path);
    if (write(file, "one\ntwo\n", 8) != 8)
        CHECK(false, "write");
    struct server *s = server_start(path);
    s->api.key_limits = (struct api_key_limits){3, 8};
    expect_with_key(s, "one", "{\"prompt\":[[5],[6],[7],[8]]}", 400,
                    "too much for one key: one key may have 3 requests and 8 prompt tokens in "
                    "flight; this call has 4 with 4",
                    "a list that the limit never lets in");
    expect_with_key(s, "one", "{\"prompt\":[1,2,3,4,5,6,7,8,9]}", 400, "this call has 1 with 9",
                    "a prompt that it never lets in");
    atomic_store(&s->is_held, true);
    int fds[] = {send_with_key(s, "one", three), send_with_key(s, "one", three)};
    CHECK(becomes(&s->n_taken, 2), "two are under way");
    expect_with_key(s, "one", three, 429, "\"type\": \"rate_limit_error\"",
                    "tokens are too many");
    expect_with_key(s, "one", "{\"prompt\":[[5],[6]]}", 429,
                    "too much of this key is in flight", "requests are too many");
    CHECK(api_read_keys(&s->api, path, &e) == 0, "a reload");
    expect_with_key(s, "one", three, 429, "this call has 1 with 3", "which forgets nothing");
    int other = send_with_key(s, "two", three);
    CHECK(becomes(&s->n_taken, 3), "another key has its own");
    close(fds[0]);
    CHECK(becomes(&s->n_done, 1), "one hangs up");
    int next = -1;
    for (int i = 0; i < 200 && atomic_load(&s->n_taken) == 3; i++) {
        if (next >= 0)
            close(next);
        next = send_with_key(s, "one", three);
        client_sleep_ms(10);
    }
    CHECK(becomes(&s->n_taken, 4), "and another may come");
    atomic_store(&s->is_held, false);
    expect(client_read(next, 1), 200, "choices", "which is answered");
    expect(client_read(fds[1], 1), 200, "choices", "as is the first");
    expect(client_read(other, 1), 200, "choices", "and the other key's");
    for (int i = 0; i < 5; i++)
        expect_with_key(s, "one", three, 200, "choices", "one after another");
    CHECK(counted(s, OUTCOME_INVALID) >= 5, "refusals count");
    close(next);
    close(fds[1]);
    close(other);
    server_stop(s);
    close(file);
    unlink(path);
}

/* Memory in use does not grow with the number of reloads, be the keys the same or others. */
static void test_reload_memory(void)
{
    enum { N_KEYS = 100, N_RELOADS = 400, SLACK_BYTES = 4096 };
    char path[] = "/tmp/prefilld-keys-XXXXXX";
    struct api a = {0};
    struct errmsg e;
    size_t before = 0, after = 0;
    close(mkstemp(path));
    for (int k = 0; k < N_RELOADS; k++) {
        char text[N_KEYS * 40] = "";
        for (int i = 0, at = 0; i < N_KEYS; i++)
            at += sprintf(text + at, "key-of-client-%d-%05d\n", i, i % 2 ? k : 0);
        write_keys(path, text);
        if (api_read_keys(&a, path, &e) != 0)
            printf("Bail out! %s\n", e.text);
        after = mallinfo2().uordblks;
        before = k == 1 ? after : before;
    }
    CHECK(after <= before + SLACK_BYTES, "%d reloads: %zu bytes in use, then %zu", N_RELOADS,
          before, after);
    api_close(&a);
    unlink(path);
}

/* A key that was taken away lets nobody in, and what it let in before counts until it ends. */
static void test_taken_away(void)
{
    static const struct api_key_limits two = {.max_requests = 2};
    char path[] = "/tmp/prefilld-keys-XXXXXX";
    struct api a = {0};
    struct errmsg e;
    struct api_key *first, *second, *other, *none;
    close(mkstemp(path));
    write_keys(path, "one\none\ntwo\n");
    if (api_read_keys(&a, path, &e) != 0)
        printf("Bail out! %s\n", e.text);
    struct api_keys *k = a.keys;
    CHECK(api_keys_enter(k, "Bearer one", &two, 1, 5, &first) == 0 && first, "one enters");
    write_keys(path, "two\n");
    CHECK(api_read_keys(&a, path, &e) == 0 && !api_keys_allow(k, "Bearer one") &&
              api_keys_allow(k, "Bearer two"),
          "and is taken away");
    CHECK(api_keys_enter(k, "Bearer one", &two, 1, 5, &second) == 0 && second == first,
          "a call that it let in before counts with the other");
    CHECK(api_keys_enter(k, "Bearer one", &two, 1, 5, &none) == ERR_FULL && !none,
          "up to the limit");
    CHECK(api_keys_enter(k, "Bearer two", &two, 3, 5, &none) == ERR_FULL && !none &&
              api_keys_enter(k, "Bearer two", &two, 2, 5, &other) == 0 && other != first,
          "two has its own");
    api_keys_leave(k, first, 1, 5);
    write_keys(path, "one\n");
    CHECK(api_read_keys(&a, path, &e) == 0 &&
              api_keys_enter(k, "Bearer one", &two, 2, 5, &none) == ERR_FULL,
          "one comes back, and has one in flight");
    api_keys_leave(k, second, 1, 5);
    api_keys_leave(k, other, 2, 5);
    CHECK(api_keys_enter(k, "Bearer one", &two, 2, 5, &first) == 0, "then none");
    api_keys_leave(k, first, 2, 5);
    CHECK(api_keys_enter(k, "Bearer gone", &two, 3, 5, &none) == ERR_FULL &&
              api_keys_enter(k, "Bearer gone", &two, 1, 5, &first) == 0 && first,
          "one that is in no file any more counts, too");
    api_keys_leave(k, first, 1, 5);
    CHECK(api_keys_enter(k, NULL, &two, 9, 5, &none) == 0 && !none &&
              api_keys_enter(k, "Basic one", &two, 9, 5, &none) == 0 && !none,
          "what is no key is nobody's");
    CHECK(api_read_keys(&a, NULL, &e) == 0 && api_keys_allow(k, NULL) &&
              api_keys_enter(k, "Bearer one", &two, 9, 5, &none) == 0 && !none,
          "without a file nothing is asked for, nor counted");
    api_close(&a);
    unlink(path);
}

struct caller {
    struct api *api;
    atomic_bool *is_over;
    atomic_int *n_turns;
    const char *authorization;
    bool was_refused;
};

static void *caller_main(void *arg)
{
    static const struct api_key_limits any = {.max_requests = 1000};
    struct caller *c = arg;
    while (!atomic_load(c->is_over)) {
        struct api_key *key = NULL;
        if (api_keys_allow(c->api->keys, c->authorization) &&
            api_keys_enter(c->api->keys, c->authorization, &any, 1, 10, &key) != 0)
            c->was_refused = true;
        else if (key)
            api_keys_leave(c->api->keys, key, 1, 10);
        atomic_fetch_add(c->n_turns, 1);
    }
    return NULL;
}

/* Callers of a key that stays and of one that comes and goes, while the file is read anew. */
static void test_reload_threads(void)
{
    enum { N_THREADS = 4, N_RELOADS = 200 };
    char path[] = "/tmp/prefilld-keys-XXXXXX";
    struct api a = {0};
    struct errmsg e;
    atomic_bool is_over = false;
    atomic_int n_turns = 0;
    bool all_read = true, stays = true, none_refused = true;
    pthread_t threads[N_THREADS];
    struct caller callers[N_THREADS];
    close(mkstemp(path));
    write_keys(path, "stays\ngoes\n");
    if (api_read_keys(&a, path, &e) != 0)
        printf("Bail out! %s\n", e.text);
    for (int i = 0; i < N_THREADS; i++) {
        callers[i] = (struct caller){&a, &is_over, &n_turns,
                                     i % 2 ? "Bearer stays" : "Bearer goes", false};
        pthread_create(&threads[i], NULL, caller_main, &callers[i]);
    }
    for (int k = 0; k < N_RELOADS; k++) {
        write_keys(path, k % 2 ? "stays\ngoes\n" : "stays\n");
        all_read &= api_read_keys(&a, path, &e) == 0;
        stays &= api_keys_allow(a.keys, "Bearer stays");
    }
    while (atomic_load(&n_turns) < N_THREADS)
        client_sleep_ms(1);
    atomic_store(&is_over, true);
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
        none_refused &= !callers[i].was_refused;
    }
    CHECK(all_read && stays && none_refused, "%d reloads amid %d calls", N_RELOADS,
          atomic_load(&n_turns));
    api_close(&a);
    unlink(path);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    log_init(LOG_LEVEL_WARN, NULL);
    test_reload_memory();
    test_taken_away();
    test_reload_threads();
    test_keys();
    test_scopes();
    test_files();
    test_key_limits();
    return tap_done();
}
