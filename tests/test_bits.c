/* The promise that results are the same bits however a request was scheduled: alone, in any
 * place of any batch, cut at any multiples of 64, in any slot, on any page layout, with any
 * number of threads. Random schedules from a printed seed are compared with memcmp to the
 * request alone. (gdn.md section 4, faults 18, 23, 24, 31.) Plain program: runs under TSan
 * too. */
#include <math.h>

#include "model_fixture.h"
#include "rng.h"
#include "tap.h"

enum { N_PROMPTS = 10, MAX_IN_FLIGHT = 8, N_TOP = 5 };

/* Sanitizers look for other faults and are slow: fewer schedules there. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_CONFIGS = 4, N_SCHEDULES = 5 };
#else
enum { N_CONFIGS = 12, N_SCHEDULES = 20 };
#endif

static const int32_t lengths[N_PROMPTS] = {1, 2, 20, 63, 64, 65, 129, 130, 300, 513};

struct reference {
    int32_t *ids;
    int32_t n;
    float *logprobs;
    struct top_entry *top;
    struct top_entry next[N_TOP];
};

static struct reference refs[N_PROMPTS];

static bool same_bits(const struct request *r, const struct reference *ref)
{
    size_t from = r->logprobs_from > 1 ? (size_t)r->logprobs_from : 1;
    size_t n = (size_t)ref->n - from;
    bool is_left_out = true;
    for (size_t t = 1; t < from; t++)
        is_left_out &= r->prompt_logprobs[t] == 0;
    return is_left_out && memcmp(r->next_top, ref->next, sizeof(ref->next)) == 0 &&
           memcmp(r->prompt_logprobs + from, ref->logprobs + from, n * sizeof(float)) == 0 &&
           memcmp(r->prompt_top + from * N_TOP, ref->top + from * N_TOP,
                  n * N_TOP * sizeof(struct top_entry)) == 0;
}

static void make_references(const char *dir)
{
    struct fixture f;
    struct rng rng = {42};
    struct engine_config c = {.max_waiting = 4};
    struct model_options o = {.max_step_tokens = 1024};
    int n_done = 0;
    if (fixture_open(&f, dir, &o, 1) != 0 || fixture_open_engine(&f, &c) != 0)
        exit(1);
    for (int i = 0; i < N_PROMPTS; i++) {
        struct reference *ref = &refs[i];
        ref->n = lengths[i];
        ref->ids = malloc((size_t)ref->n * sizeof(int32_t));
        for (int32_t t = 0; t < ref->n; t++)
            ref->ids[t] = rng_int(&rng, f.arch.vocab);
        struct request *r = fixture_request(&f, ref->ids, ref->n, LOGPROBS_ALL, N_TOP, &n_done);
        fixture_run(&f, r);
        CHECK(r->outcome == OUTCOME_OK && r->n_pieces == 1, "prompt of %d tokens alone",
              ref->n);
        ref->logprobs = malloc((size_t)ref->n * sizeof(float));
        ref->top = malloc((size_t)ref->n * N_TOP * sizeof(struct top_entry));
        memcpy(ref->logprobs, r->prompt_logprobs, (size_t)ref->n * sizeof(float));
        memcpy(ref->top, r->prompt_top, (size_t)ref->n * N_TOP * sizeof(struct top_entry));
        memcpy(ref->next, r->next_top, sizeof(ref->next));
        request_unref(r);
    }
    fixture_close(&f);
}

struct count {
    int schedules, requests, cuts, differ;
    long long steps, replayed;
};

/* One schedule: requests join at random turns, some with a companion that is cancelled. */
static void run_schedule(struct fixture *f, struct rng *rng, struct count *count)
{
    struct request *r[MAX_IN_FLIGHT], *noise = NULL;
    int which[MAX_IN_FLIGHT], n_done = 0, n_noise = 0;
    int n = 1 + rng_int(rng, MAX_IN_FLIGHT), n_pushed = 0;
    if (rng_int(rng, 3) == 0) {
        const struct reference *ref = &refs[N_PROMPTS - 1];
        noise = fixture_request(f, ref->ids, ref->n, LOGPROBS_NEXT, 0, &n_noise);
        noise->item.priority = -rng_int(rng, 2);
        queue_push(f->queue, noise);
    }
    while (n_done < n || (noise && !n_noise)) {
        while (n_pushed < n && rng_int(rng, 3) != 0) {
            int i = which[n_pushed] = rng_int(rng, N_PROMPTS);
            r[n_pushed] =
                fixture_request(f, refs[i].ids, refs[i].n, LOGPROBS_ALL, N_TOP, &n_done);
            r[n_pushed]->item.priority = rng_int(rng, 2);
            /* Some want the numbers of their end alone. */
            if (rng_int(rng, 3) == 0)
                r[n_pushed]->logprobs_from = 1 + rng_int(rng, refs[i].n);
            queue_push(f->queue, r[n_pushed++]);
        }
        engine_turn(f->engine);
        if (noise && rng_int(rng, 3) == 0)
            engine_cancel(f->engine, noise);
    }
    for (int i = 0; i < n; i++) {
        count->requests++;
        count->cuts += r[i]->n_pieces - 1;
        count->differ += r[i]->outcome != OUTCOME_OK || !same_bits(r[i], &refs[which[i]]);
        request_unref(r[i]);
    }
    if (noise)
        request_unref(noise);
    count->schedules++;
}

static bool pools_are_full(const struct fixture *f)
{
    struct metrics_pools p;
    metrics_get_pools((struct metrics *)&f->metrics, &p);
    return p.slots_held == 0 && p.pages_held == 0 && p.slots_cached == 0 &&
           p.pages_cached == 0 && p.slots_free == f->sizes.o.state_slots &&
           p.pages_free == f->sizes.n_pages && p.requests_running == 0 &&
           p.requests_waiting == 0;
}

static void run_config(const char *dir, struct rng *rng, int n_schedules, struct count *total)
{
    static const int32_t budgets[] = {64, 128, 192, 320, 512, 1024};
    struct fixture f;
    struct model_options o = {.max_step_tokens = budgets[rng_int(rng, 6)],
                              .max_seqs = 1 + rng_int(rng, 8),
                              .page_tokens = rng_int(rng, 2) ? 64 : 192,
                              .kv_tokens = 4096,
                              .state_slots = 1 + rng_int(rng, 9)};
    int32_t n_threads = 1 + rng_int(rng, 3);
    struct engine_config c = {.policy = rng_int(rng, 2) ? SCHED_SHORT_FIRST : SCHED_FCFS,
                              .max_waiting = 64,
                              .shuffle = true,
                              .shuffle_seed = rng_u64(rng)};
    if (fixture_open(&f, dir, &o, n_threads) != 0 || fixture_open_engine(&f, &c) != 0)
        exit(1);
    struct count n = {0};
    for (int i = 0; i < n_schedules; i++)
        run_schedule(&f, rng, &n);
    CHECK(n.differ == 0,
          "step %d seqs %d page %d slots %d threads %d: %d schedules, %d requests, %d cuts, "
          "%d differ",
          o.max_step_tokens, o.max_seqs, o.page_tokens, o.state_slots, n_threads, n.schedules,
          n.requests, n.cuts, n.differ);
    CHECK(pools_are_full(&f), "pools are full again");
    total->schedules += n.schedules;
    total->requests += n.requests;
    total->cuts += n.cuts;
    total->steps += atomic_load(&f.metrics.steps);
    total->replayed += atomic_load(&f.metrics.steps_replayed);
    fixture_close(&f);
}

/* The comparison must be able to fail: a prompt that differs in one token of its middle. */
static void run_control(const char *dir)
{
    struct fixture f;
    struct engine_config c = {.max_waiting = 4};
    struct model_options o = {0};
    int n_done = 0;
    if (fixture_open(&f, dir, &o, 1) != 0 || fixture_open_engine(&f, &c) != 0)
        exit(1);
    struct reference *ref = &refs[N_PROMPTS - 2];
    ref->ids[150] ^= 1;
    struct request *r = fixture_request(&f, ref->ids, ref->n, LOGPROBS_ALL, N_TOP, &n_done);
    fixture_run(&f, r);
    CHECK(r->outcome == OUTCOME_OK && !same_bits(r, ref), "another prompt has other bits");
    CHECK(memcmp(r->prompt_logprobs + 1, ref->logprobs + 1, 149 * sizeof(float)) == 0,
          "and the same bits before the change");
    request_unref(r);
    ref->ids[150] ^= 1;
    fixture_close(&f);
}

int main(int argc, char **argv)
{
    char dir[512];
    struct rng rng = {argc > 1 ? strtoull(argv[1], NULL, 0) : 20261129};
    int n_configs = argc > 2 ? atoi(argv[2]) : N_CONFIGS;
    int n_schedules = argc > 3 ? atoi(argv[3]) : N_SCHEDULES;
    printf("# seed %llu, %d configurations of %d schedules\n", (unsigned long long)rng.s,
           n_configs, n_schedules);
    fixture_path(dir, "tests/models/demo");
    make_references(dir);
    struct count total = {0};
    for (int i = 0; i < n_configs; i++)
        run_config(dir, &rng, n_schedules, &total);
    run_control(dir);
    printf("# %d schedules, %d requests, %d cuts compared bit by bit; %lld of %lld steps were "
           "replayed\n",
           total.schedules, total.requests, total.cuts, total.replayed, total.steps);
    /* Where steps are replayed, enough schedules must have met that. */
    const char *backend = getenv("TEST_BACKEND");
    bool replays = backend && strcmp(backend, "cuda") == 0;
    CHECK(replays ? total.replayed > 0 || total.steps < 200 : total.replayed == 0,
          "steps are replayed on the backend that does");
    for (int i = 0; i < N_PROMPTS; i++) {
        free(refs[i].ids);
        free(refs[i].logprobs);
        free(refs[i].top);
    }
    return tap_done();
}
