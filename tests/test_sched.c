/* The scheduler against a planner that sorts everything, written from the header's words, under
 * random arrivals, cancels, deadlines, rates and pools; bounds on waiting; odd calls. Named
 * scenarios are in test_replay.c. */
#include <criterion/criterion.h>

#include "leaks.h"
#include "rng.h"
#include "sched_world.h"

TestSuite(sched, .fini = leaks_check);

/* ---- the reference: sorts all that wait and run, O(n log n) */

struct candidate {
    struct job *job;
    int64_t key_us;
    bool is_waiting;
};

static int compare_candidates(const void *va, const void *vb)
{
    const struct candidate *a = va, *b = vb;
    if (a->job->item.priority != b->job->item.priority)
        return a->job->item.priority < b->job->item.priority ? -1 : 1;
    if (a->key_us != b->key_us)
        return a->key_us < b->key_us ? -1 : 1;
    return a->job->item.seq < b->job->item.seq ? -1 : 1;
}

struct expected {
    struct job *job;
    int32_t n_tokens;
};

/* rate is the rate in use. Returns the number of pieces in out. */
static int32_t plan_by_sorting(const struct world *w, double rate, struct expected *out)
{
    struct candidate *c = calloc((size_t)w->n_jobs + 1, sizeof(*c));
    cr_assert(c);
    int32_t n = 0, n_out = 0;
    for (int32_t i = 0; i < w->n_jobs; i++) {
        struct job *j = w->jobs[i];
        int32_t n_left = j->item.n_tokens - j->item.n_planned;
        if (j->is_gone || j->is_ending || n_left == 0)
            continue;
        int64_t service_us = w->c.policy == SCHED_FCFS ? 0 : (int64_t)(n_left * (1 / rate));
        c[n++] = (struct candidate){j, j->item.arrival_us + service_us, j->slot < 0};
    }
    qsort(c, (size_t)n, sizeof(*c), compare_candidates);

    /* Those that could share the step: running, or admitted in order while room lasts. */
    int32_t n_slots = w->slots.n_free, n_pages = w->pages.n_free, n_able = 0;
    bool is_blocked = false;
    for (int32_t i = 0; i < n; i++) {
        const struct sched_item *item = &c[i].job->item;
        if (c[i].is_waiting) {
            is_blocked = is_blocked || n_slots == 0 || item->n_pages > n_pages;
            if (is_blocked)
                continue;
            n_slots--;
            n_pages -= item->n_pages;
        }
        c[n_able++] = c[i];
    }
    if (n_able > w->c.max_seqs)
        n_able = w->c.max_seqs;

    int32_t budget = w->c.max_step_tokens, share = budget * 3 / 4 / 64 * 64;
    for (int32_t i = 0; i < n_able && budget >= 64; i++) {
        const struct sched_item *item = &c[i].job->item;
        int32_t n_tokens = item->n_tokens - item->n_planned, limit = budget;
        for (int32_t k = 0; k < n_able; k++)
            if (k != i && c[k].job->item.priority <= item->priority && share < limit)
                limit = share < 64 ? 64 : share;
        if (n_tokens > limit)
            n_tokens = limit / 64 * 64;
        out[n_out++] = (struct expected){c[i].job, n_tokens};
        budget -= n_tokens;
    }
    free(c);
    return n_out;
}

/* ---- random worlds */

struct drive {
    struct world w;
    struct rng rng;
    uint64_t seed;
    double rate_in_use;
    int32_t max_tokens; /* of a prompt */
    int64_t n_pieces;
    char where[64];
};

static int32_t draw_length(struct drive *d)
{
    /* Uniform in the logarithm, with the neighbours of 64's multiples often. */
    int32_t n = (int32_t)exp(rng_unit(&d->rng) * log(d->max_tokens));
    if (rng_int(&d->rng, 4) == 0)
        n = n / 64 * 64 + rng_int(&d->rng, 3) - 1;
    return n < 1 ? 1 : n > d->max_tokens ? d->max_tokens : n;
}

static void arrive(struct drive *d)
{
    struct sched_item item = {.n_tokens = draw_length(d)};
    item.priority = rng_int(&d->rng, 4) ? 0 : rng_int(&d->rng, 3) - 1;
    if (rng_int(&d->rng, 8) == 0)
        item.deadline_us = d->w.now_us + 1 + rng_int(&d->rng, 3000000);
    if (rng_int(&d->rng, 8) == 0 && item.n_tokens > 64)
        item.n_planned = (1 + rng_int(&d->rng, (item.n_tokens - 1) / 64)) * 64;
    int32_t n_waiting = sched_n_waiting(d->w.sched);
    bool is_added = world_add(&d->w, "job", &item) != NULL;
    cr_assert_eq(is_added, n_waiting < d->w.c.max_waiting, "%s", d->where);
}

static void disturb(struct drive *d)
{
    int32_t kind = rng_int(&d->rng, 16);
    if (kind == 0 && d->w.n_jobs > 0) {
        struct job *j = d->w.jobs[rng_int(&d->rng, d->w.n_jobs)];
        if (!j->is_gone && !j->is_ending)
            world_cancel(&d->w, j);
    } else if (kind == 1) {
        d->w.rate *= exp(4 * rng_unit(&d->rng) - 2);
    } else {
        d->w.rate *= 0.98 + 0.04 * rng_unit(&d->rng);
    }
    if (d->w.rate < 1e-3 || d->w.rate > 1)
        d->w.rate = 0.01;
    /* The earliest deadline first, none left out. */
    int64_t last_us = 0;
    for (struct job *j; (j = world_expire(&d->w)); last_us = j->item.deadline_us)
        cr_assert(j->item.deadline_us >= last_us && j->item.deadline_us <= d->w.now_us, "%s",
                  d->where);
    for (int32_t i = 0; i < d->w.n_jobs; i++) {
        const struct job *j = d->w.jobs[i];
        bool is_late = j->item.deadline_us && j->item.deadline_us <= d->w.now_us &&
                       j->item.n_planned < j->item.n_tokens;
        cr_assert(!is_late || j->is_ending, "%s: missed a deadline", d->where);
    }
}

/* Plans with both and compares. Returns whether there was a step. */
static bool step_both(struct drive *d)
{
    static struct expected e[WORLD_MAX_SEQS];
    double change = fabs(d->w.rate - d->rate_in_use);
    if (change > d->rate_in_use / 32)
        d->rate_in_use = d->w.rate;
    int32_t n = plan_by_sorting(&d->w, d->rate_in_use, e);
    const struct world_step *s = world_plan(&d->w);
    cr_assert_eq(s->n, n, "%s: %d pieces, not %d", d->where, s->n, n);
    for (int32_t i = 0; i < n; i++)
        cr_assert(world_job_of(s->pieces[i].item) == e[i].job &&
                      s->pieces[i].n_tokens == e[i].n_tokens,
                  "%s: piece %d: seq %d with %d tokens, not seq %d with %d", d->where, i,
                  (int)s->pieces[i].item->seq, s->pieces[i].n_tokens, (int)e[i].job->item.seq,
                  e[i].n_tokens);
    d->n_pieces += n;
    return n > 0;
}

/* A pipeline of one or two steps: plan while there is room in it, else end the oldest. */
static void turn(struct drive *d, int32_t max_flight)
{
    bool was_idle = d->w.n_flight == 0;
    bool is_launched = d->w.n_flight < max_flight && step_both(d);
    if (d->w.n_flight > 0 && (!is_launched || d->w.n_flight == max_flight))
        d->w.now_us += (int64_t)(world_end_step(&d->w, NULL, 0) / d->w.rate);
    else if (!is_launched)
        d->w.now_us += 1000;
    /* With nothing in flight, nothing may keep the first in rank from running. */
    if (was_idle && !is_launched)
        cr_assert(sched_n_waiting(d->w.sched) == 0 && sched_n_running(d->w.sched) == 0,
                  "%s: nothing runs, yet some wait", d->where);
}

static void drive_once(uint64_t seed, int64_t *n_pieces)
{
    static const int32_t steps[] = {64, 100, 128, 200, 512, 1000, 8192};
    struct drive d = {.rng = {seed}, .seed = seed};
    struct sched_config c = {.policy = rng_int(&d.rng, 3) ? SCHED_SHORT_FIRST : SCHED_FCFS,
                             .max_step_tokens = steps[rng_int(&d.rng, 7)],
                             .max_seqs = 1 + rng_int(&d.rng, rng_int(&d.rng, 2) ? 3 : 40),
                             .max_waiting = 1 + rng_int(&d.rng, 100)};
    int32_t n_pages = 10 + rng_int(&d.rng, 500), page_tokens = 64 << rng_int(&d.rng, 3);
    snprintf(d.where, sizeof(d.where), "seed %llu", (unsigned long long)seed);
    world_open(&d.w, &c, 1 + rng_int(&d.rng, 40), n_pages, page_tokens);
    d.w.where = d.where;
    d.max_tokens = c.max_step_tokens * 20;
    if (d.max_tokens > n_pages * page_tokens)
        d.max_tokens = n_pages * page_tokens;
    int32_t max_flight = 1 + rng_int(&d.rng, 2), load = 1 + rng_int(&d.rng, 8);
    for (int t = 0; t < 120; t++) {
        for (int32_t k = rng_int(&d.rng, load); k > 0; k--)
            arrive(&d);
        disturb(&d);
        turn(&d, max_flight);
    }
    while (sched_n_waiting(d.w.sched) || sched_n_running(d.w.sched) || d.w.n_flight)
        turn(&d, max_flight);
    world_check_idle(&d.w);
    *n_pieces += d.n_pieces;
    world_close(&d.w);
}

Test(sched, plans_as_one_that_sorts_everything)
{
    enum { WORLDS = 300, SEED = 20250101 };
    int64_t n_pieces = 0;
    for (uint64_t i = 0; i < WORLDS; i++)
        drive_once(SEED + i, &n_pieces);
    printf("# seed %d, %d worlds, %lld pieces\n", SEED, WORLDS, (long long)n_pieces);
    cr_assert_gt(n_pieces, 50 * WORLDS);
}

/* ---- bounds on waiting */

/* Time until a long prompt is done beside a stream of short ones that asks for `load` times
 * what the device can do. */
static int64_t time_beside_stream(enum sched_policy policy, double load, int32_t n_pages,
                                  int32_t long_tokens)
{
    enum { SHORT_TOKENS = 200, PAGE_TOKENS = 64 };
    const double rate = 0.01;
    struct sched_config c = {policy, 1024, 64, 100000, 0};
    struct world w;
    world_open(&w, &c, 64, n_pages, PAGE_TOKENS);
    w.rate = rate;
    struct sched_item is_long = {.n_tokens = long_tokens},
                      is_short = {.n_tokens = SHORT_TOKENS};
    struct job *j = world_add(&w, "long", &is_long);
    int64_t every_us = (int64_t)(SHORT_TOKENS / rate / load), next_us = 0;
    while (!j->is_gone) {
        int64_t plan_us = w.now_us;
        for (; next_us <= plan_us; next_us += every_us) {
            w.now_us = next_us;
            cr_assert(world_add(&w, "short", &is_short), "the queue is full");
        }
        w.now_us = plan_us;
        world_plan(&w);
        cr_assert_gt(w.n_flight, 0, "nothing runs");
        w.now_us += (int64_t)(world_end_step(&w, NULL, 0) / rate);
    }
    int64_t end_us = w.now_us;
    for (int32_t i = 0; i < w.n_jobs; i++)
        if (!w.jobs[i]->is_gone)
            world_cancel(&w, w.jobs[i]);
    world_check_idle(&w);
    world_close(&w);
    return end_us;
}

Test(sched, a_stream_of_short_prompts_starves_no_long_one)
{
    /* Service time of the long prompt: n / rate. Short-first: those that arrive within it come
     * first, load * n tokens; then the long one takes at least 768 of each 1024 tokens. Three
     * steps of slack for pieces that were under way or straddle the moments. */
    const double loads[] = {0.5, 1, 3};
    const int32_t n = 40000;
    for (int i = 0; i < 3; i++) {
        int64_t got_us = time_beside_stream(SCHED_SHORT_FIRST, loads[i], 4096, n);
        int64_t bound_us = (int64_t)((loads[i] * n + n * 4.0 / 3 + 3 * 1024) / 0.01);
        printf("# load %.1f: %.1f s, bound %.1f s\n", loads[i], (double)got_us / 1e6,
               (double)bound_us / 1e6);
        cr_assert_leq(got_us, bound_us, "load %.1f: %lld us", loads[i], (long long)got_us);
    }
    /* fcfs: nothing comes first. */
    int64_t got_us = time_beside_stream(SCHED_FCFS, 3, 4096, n);
    cr_assert_leq(got_us, (int64_t)((n * 4.0 / 3 + 3 * 1024) / 0.01));
}

Test(sched, a_full_pool_starves_no_large_prompt)
{
    /* The long prompt needs all 640 pages, so it runs only after every short one has left. What
     * is new to the bound above: it runs alone, and waits for those admitted before (at most 64
     * slots of 200 tokens). */
    const int32_t n = 40960;
    int64_t got_us = time_beside_stream(SCHED_SHORT_FIRST, 3, 640, n);
    int64_t bound_us = (int64_t)((3.0 * n + 64 * 200 + n + 3 * 1024) / 0.01);
    printf("# %.1f s, bound %.1f s\n", (double)got_us / 1e6, (double)bound_us / 1e6);
    cr_assert_leq(got_us, bound_us);
    got_us = time_beside_stream(SCHED_FCFS, 3, 640, n);
    cr_assert_leq(got_us, (int64_t)((n + 64 * 200 + 3 * 1024) / 0.01));
}

/* ---- odd calls */

Test(sched, refuses_odd_limits)
{
    const struct sched_config bad[] = {
        {SCHED_FCFS, 63, 1, 1, 0}, {SCHED_FCFS, 64, 0, 1, 0}, {SCHED_FCFS, 64, 1, 0, 0}};
    for (int i = 0; i < 3; i++) {
        struct sched *s = (struct sched *)&s;
        cr_assert_eq(sched_open(&bad[i], &s), ERR_INVALID);
        cr_assert_null(s);
    }
    sched_close(NULL);
}

Test(sched, plans_nothing_of_nothing)
{
    struct sched_config c = {SCHED_SHORT_FIRST, 64, 1, 1, 0};
    struct sched *s;
    struct sched_piece piece;
    struct sched_item item = {.n_tokens = 1, .n_pages = 1, .i_entry = -1};
    cr_assert_eq(sched_open(&c, &s), 0);
    cr_assert_eq(sched_plan(s, &(struct sched_room){0, 1, 1, 1, NULL, NULL}, &piece), 0);
    sched_remove(s, &item); /* was never added */
    cr_assert_null(sched_pop_expired(s, INT64_MAX));
    cr_assert_eq(sched_add(s, &item), 0);
    cr_assert_null(sched_pop_expired(s, INT64_MAX), "it has no deadline");
    cr_assert_eq(sched_plan(s, &(struct sched_room){0, 1, 0, 1, NULL, NULL}, &piece), 0,
                 "no slot");
    cr_assert_eq(sched_plan(s, &(struct sched_room){0, 1, 1, 0, NULL, NULL}, &piece), 0,
                 "no page");
    cr_assert_eq(sched_plan(s, &(struct sched_room){0, 1, 1, 1, NULL, NULL}, &piece), 1);
    cr_assert(piece.item == &item && piece.is_first && piece.is_last && piece.n_tokens == 1);
    sched_remove(s, &item); /* left with its last piece */
    cr_assert_eq(sched_backlog_tokens(s), 0);
    sched_close(s);
}

/* The smaller one goes first, or at equal keys the older; no key leaves its range. */
Test(sched, extreme_rates_keep_keys_in_range)
{
    enum { OLD, NEW };
    const struct {
        double rate;
        int32_t old_tokens, new_tokens;
        int first;
    } cases[] = {
        {1e-300, 60, 50, OLD},     /* both at the limit: by arrival */
        {1e300, 60, 50, OLD},      /* both of no service time */
        {1e-12, 60, 50, NEW},      /* 2 and 1.6 years: the shorter */
        {1e-14, 1000000, 1, NEW},  /* past what an int64_t holds, and 3 years */
        {1e-300, 1000000, 1, OLD}, /* both at the limit */
    };
    for (int i = 0; i < 5; i++) {
        struct sched_config c = {SCHED_SHORT_FIRST, 64, 1, 4, 0};
        struct sched *s;
        struct sched_piece piece;
        struct sched_item items[2] = {
            {.arrival_us = 1000000, .n_tokens = cases[i].old_tokens, .n_pages = 1, .seq = 1},
            {.arrival_us = 2000000, .n_tokens = cases[i].new_tokens, .n_pages = 1, .seq = 2}};
        cr_assert_eq(sched_open(&c, &s), 0);
        cr_assert(sched_add(s, &items[NEW]) == 0 && sched_add(s, &items[OLD]) == 0);
        cr_assert_eq(
            sched_plan(s, &(struct sched_room){0, cases[i].rate, 9, 9, NULL, NULL}, &piece), 1);
        cr_assert_eq(piece.item, &items[cases[i].first], "case %d", i);
        sched_close(s);
    }
}

/* More run than may wait: the tables grow, whatever the limits said at first. */
Test(sched, holds_more_than_may_wait)
{
    enum { JOBS = 200 };
    struct sched_config c = {SCHED_SHORT_FIRST, 64, 1, 1, 0};
    struct world w;
    world_open(&w, &c, JOBS, 4096, 64);
    for (int i = 0; i < JOBS; i++) {
        w.now_us += 1;
        struct sched_item item = {.n_tokens = 100, .priority = -i, .deadline_us = 1000};
        cr_assert(world_add(&w, "job", &item));
        world_plan(&w); /* the newest goes first */
        world_end_step(&w, NULL, 0);
        cr_assert_eq(sched_n_running(w.sched), i + 1);
    }
    w.now_us = 1000;
    for (int i = 0; i < JOBS; i++)
        cr_assert(world_expire(&w));
    world_check_idle(&w);
    world_close(&w);
}

/* Ten requests that generate and one long prompt that came after them: at most max_decodes
 * tokens of the ten are in a step, those whose turn it is, and the prompt goes on beside
 * them. */
Test(sched, generated_tokens_leave_room_for_prompts)
{
    enum { GENERATING = 10, DECODES = 3 };
    struct sched_config c = {SCHED_FCFS, 256, 4, 100, DECODES};
    struct sched *s;
    struct sched_item items[GENERATING + 1];
    struct sched_piece pieces[4];
    struct sched_room room = {0, 0.1, GENERATING + 1, 1000, NULL, NULL};
    cr_assert_eq(sched_open(&c, &s), 0);
    for (int i = 0; i < GENERATING; i++) {
        items[i] = (struct sched_item){
            .arrival_us = i, .n_tokens = 10, .n_pages = 1, .seq = (uint64_t)i, .i_entry = -1};
        cr_assert_eq(sched_add(s, &items[i]), 0);
    }
    for (int n = 0; n < GENERATING;)
        n += sched_plan(s, &room, pieces);
    cr_assert_eq(sched_n_waiting(s) + sched_n_running(s), 0);
    for (int i = 0; i < GENERATING; i++)
        cr_assert_eq(sched_continue(s, &items[i]), 0);
    struct sched_item *prompt = &items[GENERATING];
    *prompt = (struct sched_item){.arrival_us = 1000,
                                  .n_tokens = 256 * 20,
                                  .n_pages = 1,
                                  .seq = GENERATING,
                                  .i_entry = -1};
    cr_assert_eq(sched_add(s, prompt), 0);
    cr_expect_eq(sched_n_running(s), GENERATING);
    int n_tokens[GENERATING] = {0};
    for (int step = 0; step < 10; step++) {
        int32_t n = sched_plan(s, &room, pieces);
        cr_assert_eq(n, DECODES + 1);
        for (int i = 0; i < n; i++) {
            int at = (int)(pieces[i].item - items);
            if (at == GENERATING) {
                cr_expect_eq(pieces[i].n_tokens, 192, "three quarters, beside others");
                continue;
            }
            cr_expect_eq(at, i, "the oldest first");
            cr_expect(pieces[i].n_tokens == 1 && pieces[i].is_last && !pieces[i].is_first);
            cr_expect_eq(pieces[i].start, 10 + n_tokens[at]);
            n_tokens[at]++;
            cr_assert_eq(sched_continue(s, pieces[i].item), 0);
        }
    }
    sched_remove(s, &items[0]);
    cr_expect_eq(sched_n_running(s), GENERATING);
    cr_expect_eq(sched_plan(s, &room, pieces), DECODES + 1);
    cr_expect(pieces[0].item == &items[1]);
    sched_close(s);
}

/* ---- admission is asked for */

struct answers {
    enum sched_answer of[8]; /* by seq */
    int32_t n_asked;
};

static enum sched_answer answer(void *arg, struct sched_item *item)
{
    struct answers *a = arg;
    a->n_asked++;
    if (a->of[item->seq] == SCHED_ADMIT && item->seq == 2) { /* begins further on */
        item->n_planned = 64;
        item->n_pages = 2;
    }
    return a->of[item->seq];
}

Test(sched, asks_before_it_admits)
{
    struct sched_config c = {SCHED_FCFS, 576, 8, 8, 0};
    static const int32_t n_tokens[] = {300, 500, 192, 300, 300};
    struct answers a = {{SCHED_PARK, SCHED_ADMIT, SCHED_ADMIT, SCHED_NO_ROOM, SCHED_ADMIT}, 0};
    struct sched_room room = {0, 1, 8, 20, answer, &a};
    struct sched *s;
    struct sched_item items[5];
    struct sched_piece p[8];
    cr_assert_eq(sched_open(&c, &s), 0);
    for (int i = 0; i < 5; i++) {
        items[i] = (struct sched_item){.arrival_us = i,
                                       .n_tokens = n_tokens[i],
                                       .n_pages = 5,
                                       .seq = (uint64_t)i,
                                       .deadline_us = i == 0 ? 10 : 0,
                                       .i_entry = -1};
        cr_assert_eq(sched_add(s, &items[i]), 0);
    }
    /* 0 is parked, 1 has three quarters, 2 what is left to it from where it begins, 3 holds
     * back 4. */
    cr_assert_eq(sched_plan(s, &room, p), 2);
    cr_expect_eq(a.n_asked, 4);
    cr_expect(p[0].item == &items[1] && p[0].start == 0 && p[0].n_tokens == 384);
    cr_expect(p[1].item == &items[2] && p[1].start == 64 && p[1].n_tokens == 128);
    cr_expect(!p[0].is_last && p[1].is_last);
    cr_expect_eq(sched_n_waiting(s), 2);
    cr_expect_eq(sched_backlog_tokens(s), 300 + 116 + 300 + 300);
    /* The parked one waits again and expires. */
    a.of[0] = a.of[3] = SCHED_ADMIT;
    sched_unpark(s, &items[0]);
    cr_expect_eq(sched_n_waiting(s), 3);
    cr_assert_eq(sched_plan(s, &(struct sched_room){0, 1, 0, 0, answer, &a}, p), 1);
    cr_expect(p[0].item == &items[1] && p[0].n_tokens == 116 && p[0].is_last);
    cr_expect_eq(sched_pop_expired(s, 11), &items[0]);
    cr_expect_eq(sched_plan(s, &room, p), 2);
    cr_expect(p[0].item == &items[3] && p[0].n_tokens == 300 && p[0].is_last);
    cr_expect(p[1].item == &items[4] && p[1].n_tokens == 256 && !p[1].is_last);
    sched_remove(s, &items[4]);
    cr_expect_eq(sched_backlog_tokens(s), 0);
    sched_close(s);
}

/* A parked one keeps its deadline. */
Test(sched, a_parked_one_expires)
{
    struct sched_config c = {SCHED_FCFS, 512, 8, 8, 0};
    struct answers a = {{SCHED_PARK}, 0};
    struct sched_room room = {0, 1, 8, 20, answer, &a};
    struct sched_item item = {.n_tokens = 300, .n_pages = 5, .deadline_us = 10, .i_entry = -1};
    struct sched_piece p[8];
    struct sched *s;
    cr_assert_eq(sched_open(&c, &s), 0);
    cr_assert_eq(sched_add(s, &item), 0);
    cr_expect_eq(sched_plan(s, &room, p), 0);
    cr_expect_eq(sched_n_waiting(s), 0);
    cr_expect_eq(sched_backlog_tokens(s), 300);
    cr_expect_eq(sched_pop_expired(s, 11), &item);
    cr_expect_eq(sched_backlog_tokens(s), 0);
    sched_close(s);
}
