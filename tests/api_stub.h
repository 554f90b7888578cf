/* The API over real sockets, with a stub for the engine whose numbers are known: prompts are
 * said again, and FIRST_NEW, FIRST_NEW + 1, ... is generated. What needs a model's numbers is
 * in the end-to-end tests. */
#ifndef PREFILLD_TESTS_API_STUB_H
#define PREFILLD_TESTS_API_STUB_H

#include <pthread.h>
#include <stdatomic.h>

#include "http_client.h"
#include "tap.h"

#include "api.h"
#include "log.h"

enum { QUEUE_LENGTH = 8, MAX_TOKENS = 100, VOCAB = 2100, FIRST_NEW = 300 };

struct server {
    struct api api;
    struct metrics metrics;
    struct queue *queue;
    struct sessions *sessions;
    struct work *work;
    struct http *http;
    struct tokenizer *tokenizer;
    char address[256];
    pthread_t engine;
    atomic_bool is_held;   /* the engine takes requests, but ends none */
    atomic_bool is_frozen; /* and does not even take them */
    atomic_int outcome;    /* of the next requests */
    atomic_int n_taken, n_cancels, n_done;
    atomic_llong stall_us; /* what /v1/debug/stall asked for */
    atomic_int token_ms;   /* between two generated tokens */
};

/* What a model of two tokens would say: the last id again, then the one after it. */
static void fill_answer(struct request *r)
{
    int32_t last = r->ids[r->n_prompt - 1];
    r->next_top[0] = (struct top_entry){last, -0.25f};
    r->next_top[1] = (struct top_entry){last + 1, -2.5f};
    for (int32_t t = r->logprobs_from > 1 ? r->logprobs_from : 1;
         r->prompt_logprobs && t < r->n_prompt; t++)
        r->prompt_logprobs[t] = -0.5f * (float)t;
    for (int32_t t = 1; r->prompt_top && t < r->n_prompt; t++)
        for (int32_t i = 0; i < r->n_top; i++)
            r->prompt_top[t * r->n_top + i] =
                i < 2 ? (struct top_entry){i + 7, -(float)i} : (struct top_entry){-1, 0};
    request_add_piece(r, 3, 0, r->n_prompt);
}

static void end_request(struct server *s, struct request *r)
{
    bool is_cancelled = atomic_load(&r->cancelled);
    r->outcome = is_cancelled ? OUTCOME_CANCELLED : (enum outcome)atomic_load(&s->outcome);
    errmsg_set(&r->error, 0, "%s", outcome_name(r->outcome));
    r->ended_us = request_now_us();
    atomic_fetch_add(&s->n_done, 1);
    r->done(r, r->done_arg);
    request_unref(r);
}

/* One token more: FIRST_NEW, and the ids behind it. Returns whether r goes on. */
static bool generate(struct server *s, struct request *r)
{
    const struct sampling *p = r->sampling;
    if (!p || atomic_load(&s->outcome) != OUTCOME_OK || atomic_load(&r->cancelled))
        return false;
    int32_t at = atomic_load(&r->n_new), id = FIRST_NEW + at;
    r->ids[r->n_prompt + at] = id;
    r->new_logprobs[at] = -0.125f * (float)(at + 1);
    for (int32_t i = 0; i < r->n_top; i++)
        r->new_top[at * r->n_top + i] =
            i < 2 ? (struct top_entry){id + i, -0.125f * (float)(at + i + 1)}
                  : (struct top_entry){-1, 0};
    for (int32_t i = 0; i < r->n_labels; i++)
        r->new_labels[at * r->n_labels + i] = -4.0f - (float)i;
    bool stops = false;
    for (int32_t i = 0; i < p->n_stop; i++)
        stops |= at >= p->min_new && p->stop_ids[i] == id;
    r->finish = stops ? FINISH_STOP : FINISH_LENGTH;
    atomic_store(&r->n_new, at + 1);
    if (r->on_token)
        r->on_token(r, r->done_arg);
    return !stops && at + 1 < p->max_new;
}

/* A prompt in two pieces. */
static void tell_progress(struct request *r)
{
    int32_t ends[] = {(r->n_prompt + 1) / 2, r->n_prompt};
    for (int i = 0; r->tells_progress && i < 2; i++) {
        atomic_store(&r->n_read, ends[i]);
        r->on_token(r, r->done_arg);
        client_sleep_ms(20); /* a worker looks at it */
    }
}

static void *engine_main(void *arg)
{
    struct server *s = arg;
    struct request *held[64];
    int32_t n = 0;
    while (!queue_is_stopped(s->queue) || n > 0) {
        if (atomic_load(&s->is_frozen)) {
            client_sleep_ms(1);
            continue;
        }
        int32_t got = queue_take(s->queue, held + n, 64 - n, n > 0 ? 100 : 1000);
        for (int32_t i = n; i < n + got; i++) {
            held[i]->started_us = request_now_us();
            queue_leave(s->queue, held[i]);
            tell_progress(held[i]);
            fill_answer(held[i]);
        }
        n += got;
        atomic_fetch_add(&s->n_taken, got);
        int32_t kept = 0;
        for (int32_t i = 0; i < n; i++) {
            if (atomic_load(&s->is_held) ? !atomic_load(&held[i]->cancelled)
                                         : generate(s, held[i]))
                held[kept++] = held[i];
            else
                end_request(s, held[i]);
        }
        n = kept;
        if (n > 0 && atomic_load(&s->token_ms) > 0)
            client_sleep_ms(atomic_load(&s->token_ms));
        if (!atomic_load(&s->is_held))
            atomic_store(&s->metrics.last_progress_us, request_now_us());
    }
    return NULL;
}

static void cancel(void *arg, struct request *r)
{
    struct server *s = arg;
    atomic_store(&r->cancelled, true);
    atomic_fetch_add(&s->n_cancels, 1);
    queue_wake(s->queue);
}

static inline struct server *server_start(const char *key_file)
{
    static const char *const any[] = {"127.0.0.1:0"};
    struct server *s = calloc(1, sizeof(*s));
    struct errmsg e = {{0}};
    char path[512];
    const char *src = getenv("SRCDIR");
    snprintf(path, sizeof(path), "%s/tests/models/demo/tokenizer.json", src ? src : ".");
    metrics_init(&s->metrics);
    if (tokenizer_load(path, &s->tokenizer, &e) != 0 || sessions_open(&s->sessions) != 0 ||
        queue_open(QUEUE_LENGTH, &s->queue) != 0 || work_open(2, 1000, &s->work) != 0) {
        printf("Bail out! %s\n", e.text);
        exit(1);
    }
    s->api = (struct api){.metrics = &s->metrics,
                          .version = "9.9",
                          .backend_name = "stub",
                          .stall_s = 1,
                          .phase = PHASE_READY,
                          .tokenizer = s->tokenizer,
                          .queue = s->queue,
                          .sessions = s->sessions,
                          .session_ttl_s = 60,
                          .cancel = cancel,
                          .cancel_arg = s,
                          .model_id = "stub-model",
                          .vocab = VOCAB,
                          .max_prompt_tokens = MAX_TOKENS,
                          .page_tokens = 64,
                          .started_unix_s = 1};
    struct http_config c = {.listen = any,
                            .n_listen = 1,
                            .max_connections = 300,
                            .max_body_bytes = 2 << 20,
                            .header_timeout_s = 10,
                            .body_timeout_s = 10,
                            .idle_timeout_s = 30,
                            .ping_s = 1,
                            .work = s->work,
                            .n_connections = &s->metrics.connections,
                            .arg = &s->api,
                            .admit = api_admit,
                            .lane = api_lane,
                            .handle = api_handle,
                            .refused = api_refused};
    atomic_store(&s->metrics.last_progress_us, request_now_us());
    if (api_read_keys(&s->api, key_file, &e) != 0 || http_open(&c, &s->http, &e) != 0) {
        printf("Bail out! %s\n", e.text);
        exit(1);
    }
    snprintf(s->address, sizeof(s->address), "%s", http_addresses(s->http));
    pthread_create(&s->engine, NULL, engine_main, s);
    return s;
}

static void server_stop(struct server *s)
{
    atomic_store(&s->is_held, false);
    atomic_store(&s->is_frozen, false);
    queue_stop(s->queue);
    pthread_join(s->engine, NULL);
    http_close(s->http);
    work_close(s->work);
    queue_close(s->queue);
    api_close(&s->api);
    sessions_close(s->sessions);
    tokenizer_free(s->tokenizer);
    metrics_fini(&s->metrics);
    free(s);
}

static inline void freeze(struct server *s)
{
    atomic_store(&s->is_frozen, true);
    client_sleep_ms(20); /* it may be taking what comes */
}

static inline struct answer ask(struct server *s, const char *method, const char *path,
                                const char *body)
{
    size_t cap = strlen(body) + 512;
    char *request = calloc(1, cap);
    snprintf(request, cap, "%s %s HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n%s", method,
             path, strlen(body), body);
    struct answer a = client_ask(s->address, request);
    free(request);
    return a;
}

static inline struct answer prefill(struct server *s, const char *body)
{
    return ask(s, "POST", "/v1/prefill", body);
}

static inline long long counted(struct server *s, enum outcome o)
{
    return atomic_load(&s->metrics.requests[o]);
}

static inline bool waits_for(struct server *s, int32_t n_waiting)
{
    for (int i = 0; i < 2000 && queue_n_waiting(s->queue) != n_waiting; i++)
        client_sleep_ms(1);
    return queue_n_waiting(s->queue) == n_waiting;
}

static inline bool becomes(atomic_int *value, int want)
{
    for (int i = 0; i < 2000 && atomic_load(value) != want; i++)
        client_sleep_ms(1);
    return atomic_load(value) == want;
}

/* The answer has this status and this text. Frees it. */
static inline void expect(struct answer a, int status, const char *text, const char *what)
{
    const char *body = a.body ? a.body : "";
    CHECK(a.status == status && strstr(body, text), "%s: %d %.*s", what, a.status,
          (int)strcspn(body, "\n"), body);
    answer_free(&a);
}

static inline struct answer complete(struct server *s, const char *body)
{
    return ask(s, "POST", "/v1/completions", body);
}

#endif
