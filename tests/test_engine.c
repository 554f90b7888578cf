/* The engine with its thread: requests from several threads, cancelled, expired, refused and
 * answered; pools full again after each; drain and stop. Plain program: runs under TSan too. */
#include <pthread.h>

#include "model_fixture.h"
#include "rng.h"
#include "tap.h"

/* TSan is slow, and looks at each access of every request. */
#if defined(__SANITIZE_THREAD__)
enum { N_THREADS = 4, N_EACH = 24 };
#else
enum { N_THREADS = 4, N_EACH = 60 };
#endif

struct client {
    struct fixture *f;
    uint64_t seed;
    pthread_t thread;
    int outcomes[OUTCOME_COUNT];
    int n_refused;
    int n_short; /* generated fewer tokens than asked for */
};

static void on_done(struct request *r, void *arg)
{
    (void)r;
    atomic_fetch_add((atomic_int *)arg, 1);
}

static struct request *new_request(struct fixture *f, struct rng *rng, atomic_int *done,
                                   int32_t n)
{
    int32_t *ids = malloc((size_t)n * sizeof(*ids));
    for (int32_t t = 0; t < n; t++)
        ids[t] = rng_int(rng, f->arch.vocab);
    struct request *r =
        request_new(ids, n, rng_int(rng, 3), rng_int(rng, 6), f->sizes.o.page_tokens);
    r->arrival_us = r->item.arrival_us = request_now_us();
    r->item.priority = rng_int(rng, 3) - 1;
    r->done = on_done;
    r->done_arg = done;
    return r;
}

static void *client_main(void *arg)
{
    struct client *c = arg;
    struct rng rng = {c->seed};
    for (int i = 0; i < N_EACH; i++) {
        atomic_int done = 0;
        struct request *r = new_request(c->f, &rng, &done, 1 + rng_int(&rng, 200));
        int fate = rng_int(&rng, 4);
        /* Half of them generate, whatever their fate. */
        struct sampling s = {.max_new = 1 + rng_int(&rng, 24),
                             .temperature = rng_int(&rng, 2) ? 0.8f : 0,
                             .top_k = rng_int(&rng, 40),
                             .frequency_penalty = rng_int(&rng, 2) ? 0.5f : 0,
                             .seed = (uint64_t)i};
        if (rng_int(&rng, 2) && request_generate(r, &s, c->f->sizes.o.page_tokens) != 0)
            exit(1);
        if (fate == 1)
            r->item.deadline_us = request_now_us() + rng_int(&rng, 3000);
        if (queue_push(c->f->queue, r) != 0) {
            c->n_refused++;
            request_unref(r);
            continue;
        }
        if (fate == 2) {
            usleep((useconds_t)rng_int(&rng, 2000));
            engine_cancel(c->f->engine, r);
        }
        while (!atomic_load(&done))
            usleep(100);
        c->outcomes[r->outcome]++;
        if (r->outcome == OUTCOME_OK && r->sampling && atomic_load(&r->n_new) != s.max_new)
            c->n_short++;
        request_unref(r);
    }
    return NULL;
}

static bool pools_are_full(struct fixture *f)
{
    struct metrics_pools p;
    metrics_get_pools(&f->metrics, &p);
    return p.slots_held == 0 && p.pages_held == 0 &&
           p.slots_free + p.slots_cached == f->sizes.o.state_slots &&
           p.pages_free + p.pages_cached == f->sizes.n_pages && p.requests_running == 0 &&
           p.requests_waiting == 0;
}

static void open_all(struct fixture *f, int32_t max_waiting)
{
    char dir[512];
    fixture_path(dir, "tests/models/demo");
    struct model_options o = {
        .max_step_tokens = 128, .max_seqs = 4, .kv_tokens = 1024, .state_slots = 3};
    struct engine_config c = {.max_waiting = max_waiting};
    struct errmsg e;
    if (fixture_open(f, dir, &o, 2) != 0 || fixture_open_engine(f, &c) != 0 ||
        engine_start(f->engine, &e) != 0)
        exit(1);
}

static void test_clients(void)
{
    struct fixture f;
    struct client c[N_THREADS] = {{0}};
    int total = 0, sum[OUTCOME_COUNT] = {0};
    open_all(&f, 64);
    for (int i = 0; i < N_THREADS; i++) {
        c[i].f = &f;
        c[i].seed = 100 + (uint64_t)i;
        pthread_create(&c[i].thread, NULL, client_main, &c[i]);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(c[i].thread, NULL);
        for (int o = 0; o < OUTCOME_COUNT; o++) {
            sum[o] += c[i].outcomes[o];
            total += c[i].outcomes[o];
        }
        total += c[i].n_refused;
        CHECK(c[i].n_short == 0, "client %d: all tokens were generated", i);
    }
    printf("# %d clients, %d requests each: ok %d deadline %d cancelled %d error %d\n",
           N_THREADS, N_EACH, sum[OUTCOME_OK], sum[OUTCOME_DEADLINE], sum[OUTCOME_CANCELLED],
           sum[OUTCOME_ERROR]);
    CHECK(total == N_THREADS * N_EACH, "every request ended");
    CHECK(sum[OUTCOME_ERROR] == 0, "none failed");
    CHECK(sum[OUTCOME_OK] > 0 && sum[OUTCOME_CANCELLED] > 0,
          "some were answered, some cancelled");
    CHECK(engine_drain(f.engine, request_now_us() + 5000000), "drained");
    CHECK(pools_are_full(&f), "pools are full again");
    engine_stop(f.engine);
    fixture_close(&f);
}

/* A queue of two: the third waiting request is refused at once, and what waits is ended by
 * engine_stop with an error, not lost. */
static void test_full_and_stop(void)
{
    struct fixture f;
    struct rng rng = {7};
    atomic_int done = 0;
    struct request *r[12];
    int n_ok = 0, n_full = 0, n_error = 0, n_answered = 0;
    open_all(&f, 2);
    for (int i = 0; i < 12; i++) {
        r[i] = new_request(&f, &rng, &done, 800);
        int rc = queue_push(f.queue, r[i]);
        n_ok += rc == 0;
        n_full += rc == ERR_FULL;
        if (rc != 0) {
            request_unref(r[i]);
            r[i] = NULL;
        }
    }
    CHECK(n_full > 0 && n_ok + n_full == 12, "%d taken, %d refused", n_ok, n_full);
    engine_stop(f.engine);
    CHECK(atomic_load(&done) == n_ok, "every accepted request ended");
    for (int i = 0; i < 12; i++) {
        if (!r[i])
            continue;
        n_error += r[i]->outcome == OUTCOME_ERROR;
        n_answered += r[i]->outcome == OUTCOME_OK;
        request_unref(r[i]);
    }
    CHECK(n_error + n_answered == n_ok && n_error > 0, "%d stopped, %d answered", n_error,
          n_answered);
    CHECK(pools_are_full(&f), "pools are full again");
    r[0] = new_request(&f, &rng, &done, 5);
    CHECK(queue_push(f.queue, r[0]) == ERR_STOPPED, "a stopped queue refuses");
    request_unref(r[0]);
    fixture_close(&f);
}

/* Between the layers of the first step: what the case says happens to its requests. */
struct mishap {
    struct fixture *f;
    struct request *r[2]; /* of the step; [1] may be NULL */
    bool cancels[2];
    bool is_late; /* r[0]'s deadline has passed */
    bool stops;
    atomic_bool is_started; /* engine_start has returned */
    int n_layers_seen;
    pthread_t stopper;
};

static void *stop_main(void *arg)
{
    engine_stop(arg);
    return NULL;
}

static void on_layer(void *arg, int32_t layer, const float *x)
{
    struct mishap *m = arg;
    (void)x;
    m->n_layers_seen++;
    if (layer != 1)
        return;
    for (int i = 0; i < 2; i++)
        if (m->cancels[i])
            engine_cancel(m->f->engine, m->r[i]);
    while (m->is_late && request_now_us() <= m->r[0]->item.deadline_us)
        usleep(100);
    if (!m->stops)
        return;
    while (!atomic_load(&m->is_started))
        usleep(100);
    pthread_create(&m->stopper, NULL, stop_main, m->f->engine);
    usleep(20000);
}

static const struct abandoned {
    const char *name;
    bool cancels[2], is_late, stops;
    int n_requests, n_layers; /* seen: the embedding and so many layers */
    enum outcome outcomes[2];
} abandoned[] = {
    {"cancelled alone", {true}, false, false, 1, 2, {OUTCOME_CANCELLED}},
    {"late alone", {false}, true, false, 1, 2, {OUTCOME_DEADLINE}},
    {"cancelled, the other stays",
     {true, false},
     false,
     false,
     2,
     9,
     {OUTCOME_CANCELLED, OUTCOME_OK}},
    {"both cancelled",
     {true, true},
     false,
     false,
     2,
     2,
     {OUTCOME_CANCELLED, OUTCOME_CANCELLED}},
    {"late and cancelled",
     {false, true},
     true,
     false,
     2,
     2,
     {OUTCOME_DEADLINE, OUTCOME_CANCELLED}},
    {"stopped", {false}, false, true, 2, 2, {OUTCOME_ERROR, OUTCOME_ERROR}},
};

static void run_abandoned(const struct abandoned *t, uint64_t seed)
{
    struct fixture f;
    struct rng rng = {seed};
    atomic_int done = 0;
    struct mishap m = {.f = &f, .is_late = t->is_late, .stops = t->stops};
    char dir[512];
    fixture_path(dir, "tests/models/demo");
    struct model_options o = {
        .max_step_tokens = 128, .max_seqs = 4, .kv_tokens = 1024, .state_slots = 3};
    struct engine_config c = {.max_waiting = 8};
    struct errmsg e;
    if (fixture_open(&f, dir, &o, 2) != 0 || fixture_open_engine(&f, &c) != 0)
        exit(1);
    model_set_tap(f.model, on_layer, &m);
    for (int k = 0; k < t->n_requests; k++) {
        m.r[k] = new_request(&f, &rng, &done, 40);
        m.r[k]->item.priority = 0;
        m.cancels[k] = t->cancels[k];
        if (k == 0 && m.is_late)
            m.r[k]->item.deadline_us = request_now_us() + 300000;
        queue_push(f.queue, m.r[k]);
    }
    engine_start(f.engine, &e);
    atomic_store(&m.is_started, true);
    for (int turn = 0; turn < 50000 && atomic_load(&done) < t->n_requests; turn++)
        usleep(100);
    if (m.stops)
        pthread_join(m.stopper, NULL);
    engine_stop(f.engine);
    bool is_right = atomic_load(&done) == t->n_requests;
    for (int k = 0; k < t->n_requests; k++)
        is_right &= m.r[k]->outcome == t->outcomes[k];
    CHECK(is_right && m.n_layers_seen == t->n_layers, "%s: %d of %d layers", t->name,
          m.n_layers_seen - 1, f.arch.n_layers);
    CHECK(pools_are_full(&f), "%s: pools are full again", t->name);
    for (int k = 0; k < t->n_requests; k++)
        request_unref(m.r[k]);
    fixture_close(&f);
}

/* A step that nobody waits for any more ends at its next layer; one that somebody waits for
 * runs to its end. A step of 8,192 tokens takes most of a minute on two cores with a 0.8B
 * model: a deadline, a hang-up and a second SIGTERM used to wait for it. */
static void test_abandoned(void)
{
    for (size_t i = 0; i < sizeof(abandoned) / sizeof(abandoned[0]); i++)
        run_abandoned(&abandoned[i], i);
}

int main(void)
{
    test_abandoned();
    test_clients();
    test_full_and_stop();
    return tap_done();
}
