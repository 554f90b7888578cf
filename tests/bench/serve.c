#define _GNU_SOURCE /* strcasestr */
/* What serving costs beside computing: HTTP, JSON, formatting.
 *
 *     tests/bench/serve scores MODEL [REQUESTS [CONNECTIONS]]
 * Short prompts with echo and logprobs, 5 examples and a question long, one a call: tokens a
 * second through /v1/completions beside those that the engine computes when the same requests
 * are pushed into its queue, in turns.
 *
 *     tests/bench/serve overhead MODEL [CONNECTIONS]
 * An engine that sleeps, as the host does while a GPU computes: steps of 8192 tokens and 24 ms,
 * which is a small model's rate on an H200. Microseconds of a request's time that no step and
 * no queue explains: from the client's send to the push into the queue, and from the step's end
 * to the last byte at the client; where the answers of a step come at once, and where each
 * prompt has a time of its own. Everything is in one process on this machine, the client
 * too. */
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>

#include "../http_client.h"
#include "../model_fixture.h"
#include "../rng.h"
#include "api.h"
#include "log.h"

enum { MAX_CONNECTIONS = 1024, N_PROMPTS = 1024, ROUNDS = 25, WINDOW = 128 };

static int64_t cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* ---- questions ---- */

struct question {
    int32_t *ids;
    int32_t n;
    char *body; /* the HTTP request */
    size_t len;
    int64_t sent_us, pushed_us, taken_us, ended_us, received_us;
};

static struct question questions[N_PROMPTS];

/* 16 subjects of five examples each, then a question and an answer of a few tokens. */
static void make_ids(int32_t vocab)
{
    struct rng r = {7};
    int32_t examples[16][450], lens[16];
    for (int s = 0; s < 16; s++) {
        lens[s] = 250 + rng_int(&r, 200);
        for (int t = 0; t < lens[s]; t++)
            examples[s][t] = rng_int(&r, vocab);
    }
    for (int i = 0; i < N_PROMPTS; i++) {
        struct question *q = &questions[i];
        int s = rng_int(&r, 16), more = 32 + rng_int(&r, 50);
        q->n = lens[s] + more;
        q->ids = malloc((size_t)q->n * sizeof(*q->ids));
        memcpy(q->ids, examples[s], (size_t)lens[s] * sizeof(*q->ids));
        for (int t = lens[s]; t < q->n; t++)
            q->ids[t] = rng_int(&r, vocab);
    }
}

static void make_bodies(const char *path, const char *fields)
{
    for (int i = 0; i < N_PROMPTS; i++) {
        struct question *q = &questions[i];
        struct buf b, all;
        buf_init(&b);
        buf_init(&all);
        buf_adds(&b, "{\"prompt\": [");
        for (int t = 0; t < q->n; t++)
            buf_printf(&b, "%s%d", t ? ", " : "", q->ids[t]);
        buf_printf(&b, "]%s}", fields);
        buf_printf(&all,
                   "POST %s HTTP/1.1\r\nHost: b\r\nX-Request-Id: %d\r\n"
                   "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                   path, i, b.len);
        buf_add(&all, b.data, b.len);
        buf_fini(&b);
        free(q->body);
        q->body = buf_take(&all, &q->len);
    }
}

/* ---- the client: one thread, a request in flight on each connection ---- */

struct link {
    int fd, i_question;
    char *data;
    size_t len, cap, want; /* want: of the whole answer; 0: not known */
};

static bool send_question(struct link *l, int i)
{
    struct question *q = &questions[i % N_PROMPTS];
    l->i_question = i % N_PROMPTS;
    l->len = l->want = 0;
    q->sent_us = request_now_us();
    return send(l->fd, q->body, q->len, MSG_NOSIGNAL) == (ssize_t)q->len;
}

/* Returns 1 when an answer is whole, 0 before, -1 on failure. */
static int receive(struct link *l)
{
    if (l->cap - l->len < 1 << 16) {
        l->cap = l->cap ? 2 * l->cap : 1 << 17;
        l->data = realloc(l->data, l->cap);
    }
    ssize_t n = recv(l->fd, l->data + l->len, l->cap - l->len - 1, 0);
    if (n <= 0)
        return -1;
    l->len += (size_t)n;
    l->data[l->len] = '\0';
    char *end = l->want ? NULL : strstr(l->data, "\r\n\r\n");
    if (end) {
        const char *length = strcasestr(l->data, "content-length:");
        if (!length || strncmp(l->data, "HTTP/1.1 200", 12) != 0) {
            fprintf(stderr, "%.300s\n", l->data);
            return -1;
        }
        l->want = (size_t)(end + 4 - l->data) + strtoul(length + 15, NULL, 10);
    }
    return l->want && l->len >= l->want;
}

/* Asks n questions; returns tokens, or -1. done is called for each answer. */
static int64_t ask_all(const char *address, int n_links, int n,
                       void (*done)(struct question *q))
{
    static struct link links[MAX_CONNECTIONS];
    static struct pollfd polls[MAX_CONNECTIONS];
    int64_t n_tokens = 0;
    int next = 0, n_open = 0;
    for (int i = 0; i < n_links; i++) {
        links[i] = (struct link){.fd = client_connect(address)};
        polls[i] = (struct pollfd){links[i].fd, POLLIN, 0};
    }
    for (int i = 0; i < n_links && next < n; i++, n_open++)
        if (!send_question(&links[i], next++))
            return -1;
    while (n_open > 0) {
        if (poll(polls, (nfds_t)n_links, 10000) <= 0)
            return -1;
        int whole[MAX_CONNECTIONS], n_whole = 0;
        for (int i = 0; i < n_links; i++) {
            int rc = polls[i].revents ? receive(&links[i]) : 0;
            if (rc < 0)
                return -1;
            if (rc > 0) {
                questions[links[i].i_question].received_us = request_now_us();
                whole[n_whole++] = i;
            }
        }
        /* After all are read: an answer does not wait for the next question of another. */
        for (int k = 0; k < n_whole; k++) {
            struct link *l = &links[whole[k]];
            n_tokens += questions[l->i_question].n;
            if (done)
                done(&questions[l->i_question]);
            if (next < n ? !send_question(l, next++) : (n_open--, false))
                return -1;
        }
    }
    for (int i = 0; i < n_links; i++) {
        close(links[i].fd);
        free(links[i].data);
    }
    return n_tokens;
}

/* ---- the server ---- */

struct server {
    struct api api;
    struct fixture f;
    struct work *work;
    struct http *http;
    struct tokenizer *tokenizer;
    pthread_t sleeper;
    atomic_bool stops;
    bool apart;
};

static void cancel(void *arg, struct request *r)
{
    struct server *s = arg;
    if (s->f.engine)
        engine_cancel(s->f.engine, r);
}

/* What comes back from here has been pushed. */
static void handle(void *arg, struct exchange *x)
{
    struct question *q = &questions[atoi(exchange_id(x)) % N_PROMPTS];
    api_handle(arg, x);
    q->pushed_us = request_now_us();
}

static bool open_server(struct server *s, const char *dir, struct queue *queue,
                        struct metrics *metrics, int32_t vocab, int32_t max_prompt)
{
    static const char *const any[] = {"127.0.0.1:0"};
    struct errmsg e = {{0}};
    char path[600];
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    s->api = (struct api){.metrics = metrics,
                          .version = "bench",
                          .backend_name = "cpu",
                          .stall_s = 60,
                          .phase = PHASE_READY,
                          .queue = queue,
                          .cancel = cancel,
                          .cancel_arg = s,
                          .model_id = "bench",
                          .vocab = vocab,
                          .max_prompt_tokens = max_prompt,
                          .page_tokens = 64};
    struct http_config c = {.listen = any,
                            .n_listen = 1,
                            .max_connections = MAX_CONNECTIONS,
                            .max_body_bytes = 64 << 20,
                            .header_timeout_s = 60,
                            .body_timeout_s = 60,
                            .idle_timeout_s = 60,
                            .arg = &s->api,
                            .admit = api_admit,
                            .lane = api_lane,
                            .handle = handle,
                            .refused = api_refused};
    int rc = tokenizer_load(path, &s->tokenizer, &e);
    s->api.tokenizer = s->tokenizer;
    if (rc == 0)
        rc = work_open(2, 4096, &s->work);
    c.work = s->work;
    if (rc == 0)
        rc = api_read_keys(&s->api, NULL, &e);
    if (rc == 0)
        rc = http_open(&c, &s->http, &e);
    if (rc != 0)
        fprintf(stderr, "serve: %s\n", e.text);
    return rc == 0;
}

static void close_server(struct server *s)
{
    http_close(s->http);
    work_close(s->work);
    api_close(&s->api);
    tokenizer_free(s->tokenizer);
}

/* ---- scores ---- */

static void on_end(struct request *r, void *arg)
{
    if (r->outcome != OUTCOME_OK) {
        fprintf(stderr, "serve: %s\n", r->error.text);
        exit(1);
    }
    sem_post(arg);
}

/* The same requests without HTTP. Returns tokens. */
static int64_t push_all(struct fixture *f, int n, int window)
{
    sem_t room;
    int64_t n_tokens = 0;
    sem_init(&room, 0, (unsigned)window);
    for (int i = 0; i < n; i++) {
        const struct question *q = &questions[i % N_PROMPTS];
        int32_t *ids = malloc((size_t)q->n * sizeof(*ids));
        memcpy(ids, q->ids, (size_t)q->n * sizeof(*ids));
        struct request *r = request_new(ids, q->n, LOGPROBS_ALL, 1, f->sizes.o.page_tokens);
        struct sampling s = {.max_new = 1, .top_p = 1, .repetition_penalty = 1};
        if (!r || request_generate(r, &s, f->sizes.o.page_tokens) != 0)
            exit(1);
        r->arrival_us = r->item.arrival_us = request_now_us();
        r->done = on_end;
        r->done_arg = &room;
        sem_wait(&room);
        if (queue_push(f->queue, r) != 0)
            exit(1);
        request_unref(r);
        n_tokens += q->n;
    }
    for (int i = 0; i < window; i++)
        sem_wait(&room);
    sem_destroy(&room);
    return n_tokens;
}

static double median(double *v, int n)
{
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && v[j] < v[j - 1]; j--) {
            double keep = v[j];
            v[j] = v[j - 1];
            v[j - 1] = keep;
        }
    return v[n / 2];
}

static int bench_scores(const char *dir, int n, int n_links)
{
    static struct server s;
    struct errmsg e;
    struct model_options o = {.max_step_tokens = 8192,
                              .max_seqs = 256,
                              .state_slots = WINDOW,
                              .kv_tokens = (int64_t)WINDOW * 640};
    struct engine_config c = {.max_waiting = 1024};
    if (fixture_open(&s.f, dir, &o, 2) != 0 || fixture_open_engine(&s.f, &c) != 0 ||
        engine_start(s.f.engine, &e) != 0)
        return 1;
    make_ids(s.f.arch.vocab);
    make_bodies("/v1/completions",
                ", \"model\": \"bench\", \"temperature\": 0, \"max_tokens\": 1, "
                "\"logprobs\": 1, \"seed\": 1234, \"echo\": true");
    if (!open_server(&s, dir, s.f.queue, &s.f.metrics, s.f.arch.vocab,
                     s.f.sizes.o.max_prompt_tokens))
        return 1;
    push_all(&s.f, 256, n_links); /* memory is touched */
    double ratios[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        int64_t t0 = request_now_us();
        int64_t n_tokens = push_all(&s.f, n, n_links);
        int64_t t1 = request_now_us();
        int64_t n_served = ask_all(http_addresses(s.http), n_links, n, NULL);
        int64_t t2 = request_now_us();
        if (n_served < 0)
            return 1;
        double engine = (double)n_tokens / (double)(t1 - t0) * 1e6;
        double served = (double)n_served / (double)(t2 - t1) * 1e6;
        ratios[i] = served / engine;
        printf(
            "scores requests=%d tokens=%lld connections=%d engine_tok_s=%.0f served_tok_s=%.0f "
            "ratio=%.3f\n",
            n, (long long)n_tokens, n_links, engine, served, ratios[i]);
        fflush(stdout);
    }
    printf("scores rounds=%d median_ratio=%.3f\n", ROUNDS, median(ratios, ROUNDS));
    engine_stop(s.f.engine);
    close_server(&s);
    fixture_close(&s.f);
    return 0;
}

/* ---- overhead ---- */

enum { STEP_TOKENS = 8192, STEP_US = 24000 };

static struct queue *sleeper_queue;

static void end_step(struct request **r, int n)
{
    int64_t now_us = request_now_us();
    for (int i = 0; i < n; i++) {
        questions[atoi(r[i]->id) % N_PROMPTS].ended_us = now_us;
        r[i]->ended_us = now_us;
        r[i]->outcome = OUTCOME_OK;
        for (int t = 1; r[i]->prompt_top && t < r[i]->n_prompt; t++) {
            r[i]->prompt_logprobs[t] = -0.123456789f * (float)(t % 97);
            r[i]->prompt_top[t * r[i]->n_top] = (struct top_entry){t + 1000, -0.0625f};
        }
        if (r[i]->sampling) {
            r[i]->ids[r[i]->n_prompt] = 300;
            atomic_store(&r[i]->n_new, 1);
        }
        r[i]->next_top[0] = (struct top_entry){300, -0.5f};
    }
    for (int i = 0; i < n; i++) {
        r[i]->done(r[i], r[i]->done_arg);
        request_unref(r[i]);
    }
}

static int take(struct request **held, int n_held, int64_t wait_us)
{
    int n = queue_take(sleeper_queue, held + n_held, MAX_CONNECTIONS - n_held, wait_us);
    for (int i = n_held; i < n_held + n; i++) {
        queue_leave(sleeper_queue, held[i]);
        held[i]->started_us = request_now_us();
    }
    return n_held + n;
}

/* Takes what fits a step, sleeps for it, ends it: answers come in bursts. */
static void sleep_in_steps(struct server *s)
{
    struct request *held[MAX_CONNECTIONS];
    int n_held = 0;
    while (!atomic_load(&s->stops)) {
        n_held = take(held, n_held, n_held > 0 ? 0 : 10000);
        int n = 0;
        for (int32_t tokens = 0; n < n_held && tokens + held[n]->n_prompt <= STEP_TOKENS; n++)
            tokens += held[n]->n_prompt;
        if (n == 0)
            continue;
        usleep(STEP_US);
        end_step(held, n);
        n_held -= n;
        memmove(held, held + n, (size_t)n_held * sizeof(*held));
    }
}

/* Each has a time of its own, between one and a half and four and a half steps, so that the
 * rate is as above. */
static void sleep_apart(struct server *s)
{
    struct request *held[MAX_CONNECTIONS];
    struct rng r = {3};
    int n_held = 0;
    while (!atomic_load(&s->stops)) {
        int n_before = n_held, kept = 0;
        n_held = take(held, n_held, n_held > 0 ? 100 : 10000);
        int64_t now_us = request_now_us();
        for (int i = n_before; i < n_held; i++)
            held[i]->item.deadline_us = now_us + 3 * (STEP_US / 2 + rng_int(&r, STEP_US));
        for (int i = 0; i < n_held; i++) {
            if (held[i]->item.deadline_us > now_us)
                held[kept++] = held[i];
            else
                end_step(&held[i], 1);
        }
        n_held = kept;
    }
}

static void *sleep_main(void *arg)
{
    struct server *s = arg;
    if (s->apart)
        sleep_apart(s);
    else
        sleep_in_steps(s);
    return NULL;
}

static double before[1 << 16], behind[1 << 16], both[1 << 16];
static int n_seen;

static void note_overhead(struct question *q)
{
    if (n_seen == 1 << 16)
        return;
    before[n_seen] = (double)(q->pushed_us - q->sent_us);
    behind[n_seen] = (double)(q->received_us - q->ended_us);
    both[n_seen] = before[n_seen] + behind[n_seen];
    n_seen++;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_quantiles(const char *what, double *v)
{
    qsort(v, (size_t)n_seen, sizeof(*v), compare);
    printf(" %s p50=%.0f p90=%.0f p99=%.0f", what, v[n_seen / 2], v[n_seen * 9 / 10],
           v[n_seen * 99 / 100]);
}

static int bench_overhead(const char *dir, int n_links)
{
    static struct server s;
    static struct metrics m;
    static const struct {
        const char *name, *path, *fields;
    } kinds[] = {{"prefill", "/v1/prefill", ""},
                 {"completion", "/v1/completions", ", \"max_tokens\": 1, \"temperature\": 0"},
                 {"scores", "/v1/completions",
                  ", \"max_tokens\": 1, \"temperature\": 0, \"echo\": true, \"logprobs\": 1"}};
    metrics_init(&m);
    make_ids(2000);
    if (queue_open(4096, &sleeper_queue) != 0 ||
        !open_server(&s, dir, sleeper_queue, &m, 2000, 4096))
        return 1;
    for (size_t k = 0; k < 2 * sizeof(kinds) / sizeof(kinds[0]); k++) {
        int n = 40 * n_links;
        s.apart = k % 2;
        atomic_store(&s.stops, false);
        pthread_create(&s.sleeper, NULL, sleep_main, &s);
        make_bodies(kinds[k / 2].path, kinds[k / 2].fields);
        n_seen = 0;
        int64_t c0 = cpu_us(), t0 = request_now_us();
        if (ask_all(http_addresses(s.http), n_links, n, note_overhead) < 0)
            return 1;
        printf("overhead %s %s connections=%d requests_s=%.0f cpu_us_a_request=%.0f",
               kinds[k / 2].name, s.apart ? "apart" : "in_steps", n_links,
               n / ((double)(request_now_us() - t0) / 1e6), (double)(cpu_us() - c0) / n);
        print_quantiles("us before", before);
        print_quantiles("behind", behind);
        print_quantiles("both", both);
        printf("\n");
        atomic_store(&s.stops, true);
        queue_wake(sleeper_queue);
        pthread_join(s.sleeper, NULL);
    }
    close_server(&s);
    queue_close(sleeper_queue);
    metrics_fini(&m);
    return 0;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    log_init(LOG_LEVEL_ERROR, NULL);
    if (argc > 2 && strcmp(argv[1], "scores") == 0)
        return bench_scores(argv[2], argc > 3 ? atoi(argv[3]) : 96,
                            argc > 4 ? atoi(argv[4]) : 64);
    if (argc > 2 && strcmp(argv[1], "overhead") == 0)
        return bench_overhead(argv[2], argc > 3 ? atoi(argv[3]) : 64);
    fprintf(stderr,
            "serve scores MODEL [REQUESTS [CONNECTIONS]] | overhead MODEL [CONNECTIONS]\n");
    return 1;
}
