/* The API over real sockets, with a stub for the engine: phases, health, overload, outcomes,
 * hang-ups. What needs numbers of a model is in the end-to-end tests. A plain program, so that
 * it also runs under TSan. */
#include <signal.h>

#include "api_stub.h"
#include "rng.h"

static void test_answers(void)
{
    struct server *s = server_start(NULL);
    struct answer a = prefill(s, "{\"prompt\":[5,6,7],\"logprobs\":\"all\",\"top_logprobs\":3,"
                                 "\"return_token_ids\":true,\"request_id\":\"my/id\"}");
    static const char *const parts[] = {
        "{\"id\": \"my/id\", \"object\": \"prefill\", \"created\": ",
        "\"model\": \"stub-model\", \"usage\": {\"prompt_tokens\": 3, \"cached_tokens\": 0, "
        "\"total_tokens\": 3}, \"next\": {\"id\": 7, \"token\": ",
        "\"logprob\": -0.25, \"top\": [{\"id\": 7, \"token\": ",
        "\"prompt_logprobs\": [null, -0.5, -1]",
        "\"prompt_top\": [null, [{\"id\": 7, \"logprob\": -0}, {\"id\": 8, \"logprob\": -1}], "
        "[",
        "\"prompt_token_ids\": [5, 6, 7]",
        "\"timings\": {\"queue_ms\": ",
        "\"pieces\": [{\"step\": 3, \"start\": 0, \"tokens\": 3}]}"};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        CHECK(a.status == 200 && strstr(a.body, parts[i]), "the answer has %.60s", parts[i]);
    CHECK(answer_has(&a, "X-Request-Id", "my/id"), "the body's id is the header's");
    answer_free(&a);
    expect(prefill(s, "{\"prompt\":[1,2,187]}"), 200, "\"bytes\": [", "bytes that are no text");
    a = prefill(s, "{\"prompt\":[1,2,2090]}");
    CHECK(a.status == 200 && strstr(a.body, "{\"id\": 2090, \"token\": \"\", \"logprob\""),
          "an id without a token");
    answer_free(&a);
    a = prefill(s, "{\"prompt\":\"And God said\",\"logprobs\":\"none\"}");
    CHECK(a.status == 200 && !strstr(a.body, "\"next\"") && !strstr(a.body, "prompt_logprobs"),
          "none: no numbers");
    answer_free(&a);
    CHECK(counted(s, OUTCOME_OK) == 4, "four are counted as ok");
    a = prefill(s, "{\"prompt\":[1],\"a\":1,\"b.c-d_E\":null,\"e f\":1,\"top_logprobs\":0}");
    CHECK(a.status == 200 && answer_has(&a, "X-Prefilld-Ignored", "a,b.c-d_E,?"),
          "ignored fields are named");
    CHECK(strstr(a.body, "\"top\": []"), "no candidates asked, none given");
    answer_free(&a);
    char many[2000] = "{\"prompt\":[1]";
    for (int i = 0; i < 20; i++)
        sprintf(many + strlen(many), ",\"x%d\":1", i);
    strcat(many, "}");
    a = prefill(s, many);
    CHECK(answer_has(&a, "X-Prefilld-Ignored",
                     "x0,x1,x2,x3,x4,x5,x6,x7,x8,x9,x10,x11,x12,x13,x14,x15"),
          "the first 16");
    answer_free(&a);
    server_stop(s);
}

static const struct {
    const char *body, *param, *says;
    int status;
} bad[] = {
    {"", "null", "empty", 400},
    {"{}", "\"prompt\"", "prompt is missing", 400},
    {"{\"prompt\":null}", "\"prompt\"", "prompt is null", 400},
    {"{\"prompt\":7}", "\"prompt\"", "prompt is an integer", 400},
    {"{\"prompt\":\"\"}", "\"prompt\"", "empty", 400},
    {"{\"prompt\":[]}", "\"prompt\"", "empty", 400},
    {"{\"prompt\":[2100]}", "\"prompt\"",
     "prompt[0] is out of range; ids are integers in [0, 2100)", 400},
    {"{\"prompt\":[1],\"model\":\"secret\"}", "\"model\"", "stub-model", 404},
    {"{\"prompt\":[1],\"model\":7}", "\"model\"", "model is an integer; a string", 400},
    {"{\"prompt\":[1],\"logprobs\":\"secret\"}", "\"logprobs\"", "\\\"none\\\", \\\"next\\\"",
     400},
    {"{\"prompt\":[1],\"logprobs\":5}", "\"logprobs\"", "logprobs is an integer", 400},
    {"{\"prompt\":[1],\"top_logprobs\":21}", "\"top_logprobs\"", "from 0 to 20", 400},
    {"{\"prompt\":[1],\"top_logprobs\":-1}", "\"top_logprobs\"", "from 0 to 20", 400},
    {"{\"prompt\":[1],\"top_logprobs\":2.0}", "\"top_logprobs\"", "fraction", 400},
    {"{\"prompt\":[1],\"priority\":1001}", "\"priority\"", "-1000 to 1000", 400},
    {"{\"prompt\":[1],\"deadline_ms\":0}", "\"deadline_ms\"", "1 to 86400000", 400},
    {"{\"prompt\":[1],\"return_token_ids\":1}", "\"return_token_ids\"", "true or false", 400},
    {"{\"prompt\":[1],\"request_id\":\"\"}", "\"request_id\"", "visible ASCII", 400},
    {"{\"prompt\":[1],\"request_id\":\"a secret\"}", "\"request_id\"", "visible ASCII", 400},
    {"{\"prompt\":[1],\"session\":\"secret\"}", "\"session\"",
     "session: there is no such session", 404},
    {"{\"prompt\":[1],\"fork\":\"secret\"}", "\"fork\"", "fork: there is no such session", 404},
    {"{\"prompt\":[1],\"keep\":1}", "\"keep\"", "keep is an integer", 400},
    {"{\"prompt\":[1],\"keep\":{\"ttl_s\":0}}", "\"ttl_s\"", "ttl_s", 400},
};

static void test_refusals(void)
{
    struct server *s = server_start(NULL);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct answer a = prefill(s, bad[i].body);
        char param[64];
        snprintf(param, sizeof(param), "\"param\": %s", bad[i].param);
        CHECK(a.status == bad[i].status && strstr(a.body, param) &&
                  strstr(a.body, bad[i].says) && !strstr(a.body, "secret"),
              "%s: %d %s", bad[i].body, a.status, a.body);
        answer_free(&a);
    }
    int n = sizeof(bad) / sizeof(bad[0]);
    CHECK(counted(s, OUTCOME_INVALID) == n, "each is counted as invalid");
    server_stop(s);
}

/* The limit of tokens, as ids and as text, with both numbers. */
static void test_too_long(void)
{
    struct server *s = server_start(NULL);
    struct buf b;
    buf_init(&b);
    buf_adds(&b, "{\"prompt\":[1");
    for (int i = 1; i < MAX_TOKENS; i++)
        buf_adds(&b, ",1");
    buf_adds(&b, "]}");
    expect(prefill(s, buf_cstr(&b)), 200, "\"prompt_tokens\": 100", "100 of 100 tokens");
    b.len -= 2;
    buf_adds(&b, ",1]}");
    expect(prefill(s, buf_cstr(&b)), 400, "prompt has 101 tokens; at most 100 are accepted",
           "101 of 100 tokens");
    b.len = 0;
    buf_adds(&b, "{\"prompt\":\"");
    for (int i = 0; i < 101; i++)
        buf_adds(&b, "\\u0001");
    buf_adds(&b, "\"}");
    expect(prefill(s, buf_cstr(&b)), 400, "prompt has 101 tokens; at most 100 are accepted",
           "101 tokens of text");
    b.len = 0;
    buf_adds(&b, "{\"prompt\":\"");
    for (int i = 0; i < 10000; i++)
        buf_adds(&b, " the");
    buf_adds(&b, "\"}");
    expect(prefill(s, buf_cstr(&b)), 400, "prompt has 10000 tokens; at most 100",
           "a long text");
    b.len -= 2;
    for (int i = 10000; i < 257 * 1024; i++)
        buf_adds(&b, " the");
    buf_adds(&b, "\"}");
    expect(prefill(s, buf_cstr(&b)), 400, "more than 100 tokens; at most 100",
           "a very long text");
    buf_fini(&b);
    server_stop(s);
}

/* A refusal has the id that was asked for, by header or body. */
static void test_refused_ids(void)
{
    struct server *s = server_start(NULL);
    struct answer a = client_ask(s->address, "POST /v1/prefill HTTP/1.1\r\nHost: t\r\n"
                                             "X-Request-Id: h1\r\nContent-Length: 2\r\n\r\n{}");
    CHECK(answer_has(&a, "X-Request-Id", "h1"), "a refusal carries the header's id");
    answer_free(&a);
    a = prefill(s, "{\"request_id\":\"b1\",\"top_logprobs\":99,\"prompt\":[1]}");
    CHECK(a.status == 400 && answer_has(&a, "X-Request-Id", "b1"), "or the body's");
    answer_free(&a);
    static const char *const broken[] = {
        "{\"request_id\":\"b2\",\"prompt\":[-1]}",
        "{\"prompt\":[1,999999],\"request_id\":\"\\u0062\\u0032\"}",
        "{\"request_id\" : \"b2\", \"prompt\":[1],}"};
    for (int i = 0; i < 3; i++) {
        a = prefill(s, broken[i]);
        CHECK(a.status == 400 && answer_has(&a, "X-Request-Id", "b2"),
              "also of a body that does not parse: %d", i);
        if (i < 2)
            answer_free(&a);
    }
    answer_free(&a);
    server_stop(s);
}

static void test_other_calls(void)
{
    struct server *s = server_start(NULL);
    expect(ask(s, "GET", "/version", ""), 200, "{\"version\": \"9.9\", \"backend\": \"stub\"}",
           "version");
    expect(ask(s, "GET", "/v1/models", ""), 200,
           "{\"object\": \"list\", \"data\": [{\"id\": \"stub-model\", \"object\": \"model\", "
           "\"created\": 1, \"owned_by\": \"prefilld\", \"root\": \"stub-model\", "
           "\"max_model_len\": 100, \"vocab_size\": ",
           "models");
    becomes(&s->metrics.connections, 0);
    expect(ask(s, "GET", "/metrics", ""), 200, "\nprefilld_connections 1\n", "metrics");
    expect(ask(s, "GET", "/health", ""), 200, "{\"status\": \"ok\"}", "health");
    expect(ask(s, "GET", "/ready", ""), 200, "{\"status\": \"ready\"}", "ready");
    expect(ask(s, "POST", "/tokenize", "{\"prompt\":\"a\\u0000b\",\"return_token_strs\":true}"),
           200, "{\"count\": 3, \"max_model_len\": 100, \"tokens\": [", "tokenize");
    expect(ask(s, "POST", "/tokenize", "{\"prompt\":\"\"}"), 200, "{\"count\": 0, ", "no text");
    expect(ask(s, "POST", "/tokenize", "{\"prompt\":[1]}"), 400, "prompt is a list; a string",
           "tokenize ids");
    expect(ask(s, "POST", "/tokenize", "{}"), 400, "prompt is missing", "tokenize nothing");
    expect(ask(s, "POST", "/tokenize", "{\"prompt\":\"a\",\"add_special_tokens\":1}"), 400,
           "add_special_tokens is an integer", "tokenize options");
    expect(ask(s, "POST", "/detokenize", "{\"tokens\":[39,576,78,2099]}"), 200,
           "{\"prompt\": \"Hello\"}", "detokenize; ids without a token give nothing");
    expect(ask(s, "POST", "/detokenize", "{\"tokens\":[]}"), 200, "{\"prompt\": \"\"}",
           "detokenize nothing");
    expect(ask(s, "POST", "/detokenize", "{\"tokens\":[2100]}"), 400,
           "tokens[0] is out of range; ids are integers in [0, 2100)", "past vocab_size");
    expect(ask(s, "POST", "/detokenize", "{\"tokens\":\"a\"}"), 400, "tokens is a string",
           "detokenize text");
    expect(ask(s, "GET", "/tokenizer_info", ""), 200, "\"eos_token\": \"<|endoftext|>\"",
           "tokenizer_info");
    expect(ask(s, "GET", "/secret", ""), 404, "\"type\": \"not_found_error\"", "no such call");
    expect(ask(s, "GET", "/v1/prefill/", ""), 404, "not_found_error", "no such call either");
    expect(ask(s, "POST", "/v1/embeddings", "{\"input\":[]}"), 404, "not_found_error",
           "a call of later");
    struct answer a = ask(s, "GET", "/v1/prefill", "");
    CHECK(a.status == 405 && answer_has(&a, "Allow", "POST"), "405 with Allow");
    answer_free(&a);
    a = ask(s, "DELETE", "/health", "");
    CHECK(a.status == 405 && answer_has(&a, "Allow", "GET, HEAD"),
          "405 for a call without a body");
    answer_free(&a);
    server_stop(s);
}

static void test_loading(void)
{
    struct server *s = server_start(NULL);
    atomic_store(&s->api.phase, PHASE_LOADING);
    atomic_store(&s->api.loaded_permille, 437);
    struct answer a = prefill(s, "{\"prompt\":[1]}");
    CHECK(a.status == 503 && strstr(a.body, "loading") && strstr(a.body, "overloaded_error") &&
              answer_header(&a, "Retry-After"),
          "503 while loading: %s", a.body);
    answer_free(&a);
    expect(ask(s, "GET", "/ready", ""), 503, "{\"status\": \"loading\", \"progress\": 0.437}",
           "ready while loading");
    expect(ask(s, "GET", "/health", ""), 200, "ok", "health while loading");
    expect(ask(s, "GET", "/version", ""), 200, "9.9", "version while loading");
    expect(ask(s, "GET", "/metrics", ""), 200, "prefilld_", "metrics while loading");
    expect(ask(s, "GET", "/v1/models", ""), 503, "loading", "models while loading");
    expect(ask(s, "GET", "/secret", ""), 503, "loading", "anything while loading");
    CHECK(counted(s, OUTCOME_OVERLOAD) == 1, "counted as overload");
    atomic_store(&s->api.phase, PHASE_READY);
    expect(prefill(s, "{\"prompt\":[1]}"), 200, "prefill", "and then it is served");
    server_stop(s);
}

static void test_health(void)
{
    struct server *s = server_start(NULL);
    freeze(s);
    int fd = client_connect(s->address);
    client_sends(fd, "POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n"
                     "{\"prompt\":[1]}");
    waits_for(s, 1);
    expect(ask(s, "GET", "/health", ""), 200, "ok", "a queue alone is no stall");
    client_sleep_ms(1200);
    expect(ask(s, "GET", "/health", ""), 503, "{\"status\": \"stalled\"}",
           "no step for stall-s with work queued");
    atomic_store(&s->is_frozen, false);
    struct answer a = client_read(fd, 1);
    CHECK(a.status == 200, "when the engine goes on, so does the request");
    answer_free(&a);
    close(fd);
    client_sleep_ms(5);
    expect(ask(s, "GET", "/health", ""), 200, "ok", "and health is back");
    atomic_store(&s->metrics.device_lost, true);
    atomic_store(&s->outcome, OUTCOME_ERROR);
    expect(ask(s, "GET", "/health", ""), 503, "{\"status\": \"device lost\"}", "device lost");
    expect(ask(s, "GET", "/ready", ""), 503, "device lost", "not ready either");
    expect(prefill(s, "{\"prompt\":[1]}"), 503, "\"type\": \"server_error\"",
           "requests fail with server_error");
    server_stop(s);
}

static void test_outcomes(void)
{
    struct server *s = server_start(NULL);
    atomic_store(&s->outcome, OUTCOME_DEADLINE);
    expect(prefill(s, "{\"prompt\":[1],\"deadline_ms\":5}"), 504,
           "\"type\": \"timeout_error\", \"param\": \"deadline_ms\", \"code\": 504", "504");
    atomic_store(&s->outcome, OUTCOME_ERROR);
    expect(prefill(s, "{\"prompt\":[1]}"), 500, "\"type\": \"server_error\"", "500");
    atomic_store(&s->outcome, OUTCOME_OVERLOAD);
    expect(prefill(s, "{\"prompt\":[1]}"), 503, "overloaded_error", "503");
    CHECK(counted(s, OUTCOME_DEADLINE) == 1 && counted(s, OUTCOME_ERROR) == 1 &&
              counted(s, OUTCOME_OVERLOAD) == 1,
          "each is counted");
    server_stop(s);
}

static void test_overload(void)
{
    struct server *s = server_start(NULL);
    int fds[QUEUE_LENGTH];
    freeze(s);
    for (int i = 0; i < QUEUE_LENGTH; i++) {
        fds[i] = client_connect(s->address);
        client_sends(fds[i],
                     "POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n"
                     "{\"prompt\":[1]}");
    }
    CHECK(waits_for(s, QUEUE_LENGTH), "the queue is full");
    atomic_store(&s->metrics.backlog_tokens, 70000);
    atomic_store(&s->metrics.rate_tokens_per_s, 10000);
    long long start = client_now_ms();
    struct answer a = prefill(s, "{\"prompt\":[1]}");
    CHECK(a.status == 503 && answer_has(&a, "Retry-After", "7") &&
              strstr(a.body, "overloaded_error") && strstr(a.body, "8 requests"),
          "503 with the time that the backlog takes: %s", answer_header(&a, "Retry-After"));
    CHECK(client_now_ms() - start < 1000, "at once");
    answer_free(&a);
    expect(ask(s, "GET", "/health", ""), 200, "ok", "health is asked meanwhile");
    atomic_store(&s->is_frozen, false);
    int n_ok = 0;
    for (int i = 0; i < QUEUE_LENGTH; i++) {
        a = client_read(fds[i], 1);
        n_ok += a.status == 200;
        answer_free(&a);
        close(fds[i]);
    }
    CHECK(n_ok == QUEUE_LENGTH, "those that waited are answered");
    CHECK(counted(s, OUTCOME_OVERLOAD) == 1 && counted(s, OUTCOME_OK) == QUEUE_LENGTH,
          "counted");
    server_stop(s);
}

static void test_hangup(void)
{
    struct server *s = server_start(NULL);
    atomic_store(&s->is_held, true);
    int fd = client_connect(s->address);
    client_sends(fd, "POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n"
                     "{\"prompt\":[1]}");
    client_sleep_ms(50);
    close(fd);
    CHECK(becomes(&s->n_cancels, 1) && becomes(&s->n_done, 1), "a hang-up cancels the request");
    for (int i = 0; i < 2000 && counted(s, OUTCOME_CANCELLED) == 0; i++)
        client_sleep_ms(1);
    CHECK(counted(s, OUTCOME_CANCELLED) == 1 && counted(s, OUTCOME_OK) == 0,
          "counted as cancelled");
    server_stop(s);
}

static void test_draining(void)
{
    struct server *s = server_start(NULL);
    atomic_store(&s->is_held, true);
    int fd = client_connect(s->address);
    client_sends(fd, "POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n"
                     "{\"prompt\":[1]}");
    CHECK(becomes(&s->n_taken, 1), "one is under way");
    atomic_store(&s->api.phase, PHASE_DRAINING);
    struct answer a = prefill(s, "{\"prompt\":[1]}");
    CHECK(a.status == 503 && strstr(a.body, "draining") && answer_header(&a, "Retry-After") &&
              answer_has(&a, "Connection", "close"),
          "new requests are refused");
    answer_free(&a);
    expect(ask(s, "GET", "/ready", ""), 503, "{\"status\": \"draining\"}", "not ready");
    expect(ask(s, "GET", "/health", ""), 200, "ok", "but healthy");
    atomic_store(&s->is_held, false);
    a = client_read(fd, 1);
    CHECK(a.status == 200 && answer_has(&a, "Connection", "close"),
          "what was under way ends, and its connection with it");
    answer_free(&a);
    close(fd);
    server_stop(s);
}

/* ---- calls for debugging ---- */

static void note_stall(void *arg, int64_t stall_us)
{
    struct server *s = arg;
    atomic_store(&s->stall_us, stall_us);
}

static void test_stall(void)
{
    struct server *s = server_start(NULL);
    expect(ask(s, "POST", "/v1/debug/stall", "{\"seconds\": 3}"), 404, "not_found",
           "there is no such call without debug-calls");
    s->api.stall = note_stall;
    expect(ask(s, "POST", "/v1/debug/stall", "{}"), 400, "seconds is missing", "no seconds");
    expect(ask(s, "POST", "/v1/debug/stall", "{\"seconds\": 0}"), 400, "\"seconds\"",
           "too few");
    expect(ask(s, "POST", "/v1/debug/stall", "{\"seconds\": 3601}"), 400, "3600", "too many");
    expect(ask(s, "GET", "/v1/debug/stall", ""), 405, "method", "GET");
    CHECK(atomic_load(&s->stall_us) == 0, "what is refused does nothing");
    expect(ask(s, "POST", "/v1/debug/stall", "{\"seconds\": 3}"), 200, "\"stalled_s\": 3",
           "three seconds");
    CHECK(atomic_load(&s->stall_us) == 3000000, "they reach the engine");
    server_stop(s);
}

/* ---- everything at once ---- */

struct storm {
    struct server *s;
    uint64_t seed;
    atomic_int *n_answers;
};

static void *storm_main(void *arg)
{
    struct storm *t = arg;
    struct rng r = {t->seed};
    static const char *const bodies[] = {
        "{\"prompt\":[1,2,3]}", "{\"prompt\":\"In the beginning\",\"logprobs\":\"all\"}",
        "{\"prompt\":[99999]}", "{\"prompt\":"};
    for (int i = 0; i < 60; i++) {
        const char *body = bodies[rng_int(&r, 4)];
        char request[400];
        int len = sprintf(
            request, "POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n%s",
            strlen(body), body);
        int fd = client_connect(t->s->address);
        bool stays = rng_int(&r, 2);
        client_send(fd, request, stays ? (size_t)len : (size_t)rng_int(&r, len + 1));
        if (stays) {
            struct answer a = client_read(fd, 1);
            if (a.status == 200 || a.status == 400 || a.status == 503)
                atomic_fetch_add(t->n_answers, 1);
            answer_free(&a);
        } else {
            struct timespec pause = {0, rng_int(&r, 1000000)};
            nanosleep(&pause, NULL);
            atomic_fetch_add(t->n_answers, 1);
        }
        close(fd);
    }
    return NULL;
}

static void test_storm(void)
{
    enum { N_THREADS = 16 };
    const uint64_t seed = 77;
    struct server *s = server_start(NULL);
    atomic_int n_answers = 0;
    pthread_t threads[N_THREADS];
    struct storm storms[N_THREADS];
    for (int i = 0; i < N_THREADS; i++) {
        storms[i] = (struct storm){s, seed + (uint64_t)i, &n_answers};
        pthread_create(&threads[i], NULL, storm_main, &storms[i]);
    }
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(atomic_load(&n_answers) == N_THREADS * 60, "seed %llu: who stays is answered: %d",
          (unsigned long long)seed, atomic_load(&n_answers));
    CHECK(becomes(&s->metrics.connections, 0), "no connection is left");
    CHECK(waits_for(s, 0), "nothing waits");
    server_stop(s);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    log_init(LOG_LEVEL_WARN, NULL);
    test_answers();
    test_refusals();
    test_too_long();
    test_refused_ids();
    test_other_calls();
    test_loading();
    test_health();
    test_outcomes();
    test_overload();
    test_hangup();
    test_draining();
    test_stall();
    test_storm();
    return tap_done();
}
