#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "config.h"
#include "engine_impl.h"
#include "log.h"

/* Tokens a microsecond, until a step has ended. */
#define UNKNOWN_RATE 1e-3

enum {
    TAKE_MAX = 256,         /* arrivals a turn */
    IDLE_WAIT_US = 500000,  /* an idle tick: /health sees a live engine */
    BLOCKED_WAIT_US = 1000, /* nothing runs, and what waits has no room: exports hold it */
    FLIGHT_WAIT_US = 100,   /* nothing to launch while a step runs: look for arrivals */
    STALL_LOOK_US = 10000,
};

static bool engine_goes_on(void *arg);

int engine_open(const struct engine_config *c, struct model *model, struct queue *queue,
                struct metrics *metrics, struct engine **out, struct errmsg *e)
{
    const struct model_sizes *sizes = model_sizes_of(model);
    struct engine *en = calloc(1, sizeof(*en));
    if (!en)
        return errmsg_set(e, ERR_NOMEM, "no memory for the engine");
    en->model = model;
    en->queue = queue;
    en->metrics = metrics;
    en->rate = rate_start(sizes->o.max_step_tokens);
    en->sessions = c->sessions;
    en->shuffle = c->shuffle;
    en->shuffle_state = c->shuffle_seed;
    struct sched_config sc = {.policy = c->policy,
                              .max_decodes = c->max_decodes,
                              .max_step_tokens = sizes->o.max_step_tokens,
                              .max_seqs = sizes->o.max_seqs,
                              .max_waiting = c->max_waiting};
    struct step_limits lim = {.max_tokens = sizes->o.max_step_tokens,
                              .max_seqs = sizes->o.max_seqs,
                              .max_rows = sizes->max_rows,
                              .max_pages = sizes->max_pages,
                              .page_tokens = sizes->o.page_tokens};
    en->plan = calloc((size_t)sizes->o.max_seqs, sizeof(*en->plan));
    int rc = en->plan ? sched_open(&sc, &en->sched) : ERR_NOMEM;
    if (rc == 0)
        rc = slots_init(&en->slots, sizes->o.state_slots);
    if (rc == 0)
        rc = pages_init(&en->pages, sizes->n_pages, sizes->o.page_tokens);
    if (rc == 0)
        rc = engine_prefix_open(en, c);
    if (rc == 0)
        rc = steps_init(&en->feed);
    for (int i = 0; i < STEPS_IN_FLIGHT && rc == 0; i++)
        rc = step_open(&en->steps[i], &lim);
    if (rc != 0) {
        errmsg_set(e, rc, "no memory for the engine's step buffers and pools");
        engine_close(en);
        return rc;
    }
    for (int32_t i = 0; PREFILLD_POISON && i < en->slots.n_total; i++)
        model_poison_slot(model, i);
    for (int32_t i = 0; PREFILLD_POISON && i < en->pages.n_total; i++)
        model_poison_page(model, i);
    model_set_goes_on(model, engine_goes_on, en);
    *out = en;
    return 0;
}

void engine_close(struct engine *en)
{
    if (!en)
        return;
    sched_close(en->sched);
    slots_fini(&en->slots);
    pages_fini(&en->pages);
    prefix_fini(&en->prefix);
    for (int i = 0; i < STEPS_IN_FLIGHT; i++)
        step_close(&en->steps[i]);
    free(en->plan);
    steps_fini(&en->feed);
    if (en->model)
        model_set_goes_on(en->model, NULL, NULL);
    free(en);
}

/* ---- a turn ---- */

static void engine_add(struct engine *en, struct request *r)
{
    engine_prefix_enter(en, r);
    int rc = sched_add(en->sched, &r->item);
    if (rc == ERR_FULL)
        engine_end_request(en, r, OUTCOME_OVERLOAD, "the queue is full");
    else if (rc != 0)
        engine_end_request(en, r, OUTCOME_ERROR, "memory is short");
}

static void engine_take(struct engine *en, int64_t wait_us)
{
    struct request *batch[TAKE_MAX];
    int32_t n = queue_take(en->queue, batch, TAKE_MAX, wait_us);
    for (int32_t i = 0; i < n; i++) {
        struct request *r = batch[i];
        r->slot = -1;
        r->n_all_pages = r->item.n_pages;
        r->prev = NULL;
        r->next = en->first;
        if (en->first)
            en->first->prev = r;
        en->first = r;
        en->n_held++;
        atomic_fetch_add(&en->n_alive, 1);
        if (en->is_lost)
            engine_end_request(en, r, OUTCOME_ERROR, "device lost");
        else if (atomic_load(&r->cancelled))
            engine_end_request(en, r, OUTCOME_CANCELLED, "cancelled");
        else
            engine_add(en, r);
    }
}

static void engine_end_cancelled(struct engine *en)
{
    int32_t n = atomic_load(&en->n_cancels);
    if (n == en->n_cancels_seen)
        return;
    en->n_cancels_seen = n;
    struct request *next;
    for (struct request *r = en->first; r; r = next) {
        next = r->next;
        if (atomic_load(&r->cancelled) && !r->is_ending)
            engine_end_request(en, r, OUTCOME_CANCELLED, "cancelled");
    }
}

static void engine_end_expired(struct engine *en)
{
    struct sched_item *item;
    int64_t now_us = request_now_us();
    while ((item = sched_pop_expired(en->sched, now_us)) != NULL)
        engine_end_request(en, engine_request_of(item), OUTCOME_DEADLINE,
                           "deadline_ms has passed");
}

static void engine_lose_device(struct engine *en)
{
    if (!en->is_lost)
        log_error("event=device_lost step=%lld why=%s", (long long)en->step_number,
                  model_why_lost(en->model));
    en->is_lost = true;
    atomic_store(&en->metrics->device_lost, true);
    for (; en->n_in_flight > 0; en->n_in_flight--) {
        struct step *s = &en->steps[en->i_oldest];
        for (int32_t i = 0; i < s->n_pieces; i++)
            s->pieces[i].req->n_in_flight--;
        en->i_oldest = (en->i_oldest + 1) % STEPS_IN_FLIGHT;
    }
    engine_end_all(en, "device lost");
}

/* How r stands that nobody waits for any more, or that cannot be waited for; OUTCOME_OK: it is
 * wanted. */
static enum outcome engine_doom(const struct engine *en, const struct request *r,
                                int64_t now_us)
{
    if (r->is_ending)
        return r->outcome;
    if (atomic_load(&r->cancelled))
        return OUTCOME_CANCELLED;
    if (r->item.deadline_us && now_us > r->item.deadline_us)
        return OUTCOME_DEADLINE;
    return atomic_load(&en->stopping) ? OUTCOME_ERROR : OUTCOME_OK;
}

/* Between the layers of the step that is being launched, which on the CPU is when it runs: a
 * long one is alive, and it is abandoned when none of its requests is wanted. */
static bool engine_goes_on(void *arg)
{
    struct engine *en = arg;
    struct step *s = &en->steps[(en->i_oldest + en->n_in_flight - 1) % STEPS_IN_FLIGHT];
    int64_t now_us = request_now_us();
    atomic_store(&en->metrics->last_progress_us, now_us);
    steps_tell(&en->feed, now_us);
    engine_job_copy(en);
    for (int32_t i = 0; i < s->n_pieces; i++)
        if (engine_doom(en, s->pieces[i].req, now_us) == OUTCOME_OK)
            return true;
    s->is_abandoned = true;
    return false;
}

/* Plans, packs and launches one step. Returns whether there was one. */
static bool engine_launch(struct engine *en)
{
    struct sched_room room = {.now_us = request_now_us(),
                              .rate_tokens_per_us = rate_tokens_per_us(&en->rate, UNKNOWN_RATE),
                              .n_free_slots = en->slots.n_free + en->slots.n_cached,
                              .n_free_pages = en->pages.n_free + en->pages.n_cached,
                              .admit = engine_try_admit,
                              .arg = en};
    en->plan_number = en->step_number + 1;
    int32_t n = sched_plan(en->sched, &room, en->plan);
    int64_t planned_us = request_now_us();
    if (n == 0)
        return false;
    struct step *s = &en->steps[(en->i_oldest + en->n_in_flight) % STEPS_IN_FLIGHT];
    step_reset(s, ++en->step_number);
    for (int32_t i = 0; i < n; i++) {
        const struct sched_piece *p = &en->plan[i];
        struct request *r = engine_request_of(p->item);
        if (p->is_first && r->copy_from >= 0)
            step_copy_slot(s, r->copy_from, r->slot);
        if (p->is_first && r->copy_page >= 0)
            step_copy_page(s, r->copy_page, r->pages[p->start / en->pages.page_tokens]);
        if (r->started_us == 0)
            r->started_us = planned_us;
        r->n_in_flight++;
        step_add(s, r, p->start, p->n_tokens, p->is_last);
        engine_prefix_pack(en, s, r, p->start, p->start + p->n_tokens);
    }
    step_seal(s);
    engine_publish_metrics(en);
    s->launched_us = planned_us;
    en->n_in_flight++;
    trace_start(&en->records[s - en->steps].trace, s->number, &s->host, room.now_us,
                planned_us);
    int rc = model_launch(en->model, &s->host, s->results);
    engine_prefix_launched(en, s, rc == 0 && !s->is_abandoned);
    if (rc != 0)
        engine_lose_device(en);
    en->records[s - en->steps].trace.launched_us = request_now_us();
    return true;
}

static void engine_measure(struct engine *en, const struct step *s)
{
    int64_t now_us = request_now_us();
    int64_t from_us = s->launched_us > en->last_end_us ? s->launched_us : en->last_end_us;
    rate_add(&en->rate, s->host.n_tokens, now_us > from_us ? now_us - from_us : 1);
    en->last_end_us = now_us;
    atomic_fetch_add(&en->metrics->steps, 1);
    atomic_fetch_add(&en->metrics->step_tokens, s->host.n_tokens);
    histogram_add(&en->metrics->steps_us, now_us - from_us);
    histogram_add(&en->metrics->step_sizes, s->host.n_tokens);
    histogram_add(&en->metrics->step_pieces, s->n_pieces);
    atomic_store(&en->metrics->last_progress_us, now_us);
    atomic_store(&en->metrics->rate_tokens_per_s,
                 (long long)(rate_tokens_per_us(&en->rate, UNKNOWN_RATE) * 1e6));
    log_debug("event=step step=%lld tokens=%d pieces=%d us=%lld", (long long)s->number,
              s->host.n_tokens, s->n_pieces, (long long)(now_us - from_us));
}

/* The prompt of r, or its last token, was computed, and the next was chosen. */
static void engine_generate(struct engine *en, struct request *r)
{
    const struct sampling *s = r->sampling;
    int32_t at = atomic_load(&r->n_new), id = r->chosen.id;
    r->ids[r->n_prompt + at] = id;
    r->new_logprobs[at] = r->chosen.logprob;
    for (int32_t i = 0; i < r->n_top; i++)
        r->new_top[(size_t)at * (size_t)r->n_top + (size_t)i] = r->next_top[i];
    bool stops = sampler_is_stop(&r->sampler, id);
    r->finish = stops ? FINISH_STOP : FINISH_LENGTH;
    atomic_store(&r->n_new, at + 1);
    atomic_fetch_add(&en->metrics->new_tokens, 1);
    if (r->on_token)
        r->on_token(r, r->done_arg);
    if (stops || at + 1 == s->max_new) {
        engine_end_request(en, r, OUTCOME_OK, "");
        return;
    }
    r->n_ids++;
    en->admitted_left++;
    if (sampler_add(&r->sampler, id) != 0 || sched_continue(en->sched, &r->item) != 0)
        engine_end_request(en, r, OUTCOME_ERROR, "no memory");
}

static void engine_publish_piece(struct engine *en, const struct step *s, int32_t i)
{
    const struct step_piece *p = &s->pieces[i];
    struct request *r = p->req;
    r->n_in_flight--;
    r->n_computed += p->n_tokens;
    if (r->is_ending) {
        engine_end_request(en, r, r->outcome, r->error.text);
        return;
    }
    en->admitted_left -= p->n_tokens;
    if (p->is_last && p->start < r->n_prompt)
        r->prompt_us = request_now_us();
    int32_t n_bad = step_publish(s, i);
    if (n_bad > 0) {
        atomic_fetch_add(&en->metrics->nan_rows, n_bad);
        log_error("id=%s event=not_finite rows=%d step=%lld", r->id, n_bad,
                  (long long)s->number);
        engine_end_request(en, r, OUTCOME_ERROR, "the model gave numbers that are not finite");
        return;
    }
    if (r->tells_progress && p->start < r->n_prompt) {
        atomic_store(&r->n_read, p->start + p->n_tokens);
        r->on_token(r, r->done_arg);
    }
    if (p->start < r->n_prompt)
        engine_prefix_publish(en, r);
    if (p->start < r->n_prompt && request_add_piece(r, s->number, p->start, p->n_tokens) != 0)
        engine_end_request(en, r, OUTCOME_ERROR, "no memory");
    else if (atomic_load(&r->cancelled))
        engine_end_request(en, r, OUTCOME_CANCELLED, "cancelled");
    else if (p->is_last && r->item.deadline_us && request_now_us() > r->item.deadline_us)
        engine_end_request(en, r, OUTCOME_DEADLINE, "deadline_ms has passed");
    else if (p->is_last && r->sampling)
        engine_generate(en, r);
    else if (p->is_last)
        engine_end_request(en, r, OUTCOME_OK, "");
}

static void engine_end_abandoned(struct engine *en, struct request *r)
{
    static const char *const why[OUTCOME_COUNT] = {
        [OUTCOME_CANCELLED] = "cancelled",
        [OUTCOME_DEADLINE] = "deadline_ms has passed",
        [OUTCOME_ERROR] = "the server is shutting down"};
    enum outcome o = engine_doom(en, r, request_now_us());
    r->n_in_flight--;
    engine_end_request(en, r, o, why[o]);
}

static void engine_trace_step(struct engine *en, struct trace_step *t)
{
    struct step_times times;
    if (model_times(en->model, &times)) {
        trace_set_times(t, &times);
        atomic_fetch_add(&en->metrics->steps_replayed, times.is_replayed);
        if (times.gap_us >= 0)
            histogram_add(&en->metrics->gaps_ns, (int64_t)(times.gap_us * 1e3f));
    }
    t->published_us = request_now_us();
}

/* After steps_take. */
static void engine_feed_step(struct engine *en, struct steps_record *r)
{
    metrics_get_pools(en->metrics, &r->pools);
    int64_t oldest_us = queue_oldest_us(en->queue);
    r->queue_age_us = oldest_us ? request_now_us() - oldest_us : 0;
    steps_add(&en->feed, r);
}

/* Publishes the oldest step when it has ended. */
static bool engine_collect(struct engine *en, bool wait)
{
    int rc = model_done(en->model, wait);
    if (rc < 0) {
        engine_lose_device(en);
        return true;
    }
    if (rc == 0)
        return false;
    struct step *s = &en->steps[en->i_oldest];
    struct steps_record *r = &en->records[en->i_oldest];
    r->trace.done_us = request_now_us();
    en->i_oldest = (en->i_oldest + 1) % STEPS_IN_FLIGHT;
    en->n_in_flight--;
    if (!s->is_abandoned)
        engine_measure(en, s);
    steps_take(r, s);
    for (int32_t i = 0; i < s->n_pieces; i++) {
        if (s->is_abandoned)
            engine_end_abandoned(en, s->pieces[i].req);
        else
            engine_publish_piece(en, s, i);
    }
    engine_trace_step(en, &r->trace);
    engine_publish_metrics(en);
    engine_feed_step(en, r);
    return true;
}

/* Do others than requests hold room that requests may wait for? */
static bool is_blocked(const struct engine *en)
{
    return en->n_slots_coming > 0 || (en->sessions && sessions_n_exports(en->sessions) > 0);
}

bool engine_turn(struct engine *en)
{
    engine_take(en, 0);
    engine_end_cancelled(en);
    engine_end_expired(en);
    engine_session_tick(en);
    if (engine_job_tick(en) != 0)
        engine_lose_device(en);
    bool is_launched = en->n_in_flight < STEPS_IN_FLIGHT && !en->is_lost && engine_launch(en);
    if (en->n_in_flight > 0)
        engine_collect(en, en->n_in_flight == STEPS_IN_FLIGHT);
    if (!is_launched && en->n_in_flight > 0)
        engine_take(en, FLIGHT_WAIT_US);
    else if (!is_launched && en->n_copying > 0)
        engine_take(en, FLIGHT_WAIT_US);
    else if (!is_launched && en->n_held > 0 && is_blocked(en))
        engine_take(en, BLOCKED_WAIT_US);
    if (en->n_in_flight == 0 && is_blocked(en)) /* nobody waits for the device */
        atomic_store(&en->metrics->last_progress_us, request_now_us());
    return en->n_held > 0 || queue_n_waiting(en->queue) > 0 || engine_job_is_left(en);
}

/* ---- the thread ---- */

static void engine_on_self_test(struct request *r, void *arg)
{
    (void)r;
    *(bool *)arg = true;
}

static int engine_try(struct engine *en, int32_t vocab, int32_t n, struct errmsg *e)
{
    const struct model_sizes *z = model_sizes_of(en->model);
    bool is_done = false;
    int32_t *ids = calloc((size_t)n, sizeof(*ids));
    for (int32_t i = 0; ids && i < n; i++)
        ids[i] = (int32_t)(i * INT64_C(7919) % vocab);
    struct request *r = ids ? request_new(ids, n, LOGPROBS_NEXT, 0, z->o.page_tokens) : NULL;
    if (!r)
        return errmsg_set(e, ERR_NOMEM, "no memory for the self-test");
    r->done = engine_on_self_test;
    r->done_arg = &is_done;
    /* Nobody else knows the queue yet: it has room. */
    queue_push(en->queue, r);
    while (!is_done)
        engine_turn(en);
    int rc = 0;
    if (r->outcome != OUTCOME_OK)
        rc = errmsg_set(e, en->is_lost ? ERR_DEVICE : ERR_INVALID,
                        "the self-test step failed: %s", r->error.text);
    request_unref(r);
    return rc;
}

int engine_self_test(struct engine *en, int32_t vocab, struct errmsg *e)
{
    enum { TOKENS = 256 };
    const struct model_sizes *z = model_sizes_of(en->model);
    int32_t n = TOKENS;
    n = n < z->o.max_step_tokens ? n : z->o.max_step_tokens;
    n = n < z->o.max_prompt_tokens ? n : z->o.max_prompt_tokens;
    int rc = engine_try(en, vocab, n, e);
    /* The first one touched its memory for the first time: its time says little. */
    en->rate = rate_start(z->o.max_step_tokens);
    if (rc == 0)
        rc = engine_try(en, vocab, n, e);
    en->step_number = 0;
    steps_forget(&en->feed);
    metrics_zero_steps(en->metrics);
    return rc;
}

static void *engine_main(void *arg)
{
    struct engine *en = arg;
    prctl(PR_SET_NAME, "engine"); /* for top -H, and for a test that stops it */
    while (!atomic_load(&en->stopping)) {
        if (request_now_us() < atomic_load(&en->stall_until_us)) {
            usleep(STALL_LOOK_US);
            continue;
        }
        if (engine_turn(en))
            continue;
        bool is_told = steps_tell(&en->feed, request_now_us());
        atomic_store(&en->metrics->last_progress_us, request_now_us());
        engine_publish_metrics(en);
        engine_take(en, is_told ? IDLE_WAIT_US : STEPS_TELL_US);
    }
    while (en->n_in_flight > 0)
        engine_collect(en, true);
    do {
        engine_take(en, 0);
        engine_end_all(en, "the server is shutting down");
    } while (queue_n_waiting(en->queue) > 0);
    engine_publish_metrics(en);
    return NULL;
}

int engine_start(struct engine *en, struct errmsg *e)
{
    atomic_store(&en->metrics->last_progress_us, request_now_us());
    engine_publish_metrics(en);
    int rc = pthread_create(&en->thread, NULL, engine_main, en);
    if (rc != 0)
        return errmsg_set(e, ERR_IO, "cannot start the engine thread: %s", strerror(rc));
    en->has_thread = true;
    return 0;
}

void engine_cancel(struct engine *en, struct request *r)
{
    atomic_store(&r->cancelled, true);
    atomic_fetch_add(&en->n_cancels, 1);
    queue_wake(en->queue);
}

void engine_stall(struct engine *en, int64_t stall_us)
{
    atomic_store(&en->stall_until_us, request_now_us() + stall_us);
    queue_wake(en->queue);
}

struct steps *engine_feed(struct engine *en)
{
    return &en->feed;
}

bool engine_drain(struct engine *en, int64_t deadline_us)
{
    enum { POLL_US = 2000 };
    while (atomic_load(&en->n_alive) > 0 || queue_n_waiting(en->queue) > 0) {
        if (request_now_us() >= deadline_us)
            return false;
        usleep(POLL_US);
    }
    return true;
}

void engine_stop(struct engine *en)
{
    queue_stop(en->queue);
    atomic_store(&en->stopping, true);
    queue_wake(en->queue);
    if (en->has_thread)
        pthread_join(en->thread, NULL);
    en->has_thread = false;
    engine_job_stop(en);
}
