/* A world around the scheduler for tests: named jobs, real pools, steps in flight that end in
 * order. Does with pieces what the engine does, and checks every step against the rules that
 * hold for any plan. Messages start with world.where, as replay file and line. */
#ifndef PREFILLD_TESTS_SCHED_WORLD_H
#define PREFILLD_TESTS_SCHED_WORLD_H

#include <criterion/criterion.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pages.h"
#include "sched.h"
#include "slots.h"

enum { WORLD_MAX_SEQS = 512, WORLD_MAX_FLIGHT = 4 };

struct job {
    char name[16];
    struct sched_item item;
    int32_t slot; /* -1: not admitted */
    int32_t *pages;
    int32_t n_in_flight;
    int32_t n_done; /* tokens in steps that have ended */
    bool is_ending; /* cancelled or expired */
    bool is_gone;   /* all it held was returned */
};

struct world_step {
    struct sched_piece pieces[WORLD_MAX_SEQS];
    int32_t n;
};

struct world {
    const char *where;
    struct sched_config c;
    struct sched *sched;
    struct slots slots;
    struct pages pages;
    int64_t now_us;
    double rate;
    uint64_t next_seq;
    struct job **jobs; /* [n_jobs], all there ever were */
    int32_t n_jobs, jobs_cap;
    struct world_step flight[WORLD_MAX_FLIGHT]; /* oldest first */
    int32_t n_flight;
};

static inline void world_open(struct world *w, const struct sched_config *c, int32_t n_slots,
                              int32_t n_pages, int32_t page_tokens)
{
    cr_assert_leq(c->max_seqs, WORLD_MAX_SEQS);
    *w = (struct world){.where = "world", .c = *c, .rate = 0.01};
    cr_assert_eq(sched_open(c, &w->sched), 0);
    cr_assert_eq(slots_init(&w->slots, n_slots), 0);
    cr_assert_eq(pages_init(&w->pages, n_pages, page_tokens), 0);
}

static inline void world_close(struct world *w)
{
    sched_close(w->sched);
    slots_fini(&w->slots);
    pages_fini(&w->pages);
    for (int32_t i = 0; i < w->n_jobs; i++) {
        free(w->jobs[i]->pages);
        free(w->jobs[i]);
    }
    free(w->jobs);
}

static inline struct job *world_job_of(struct sched_item *item)
{
    return (struct job *)((char *)item - offsetof(struct job, item));
}

/* A job with arrival now; NULL when the scheduler is full. */
static inline struct job *world_add(struct world *w, const char *name,
                                    const struct sched_item *item)
{
    struct job *j = calloc(1, sizeof(*j));
    cr_assert(j);
    snprintf(j->name, sizeof(j->name), "%s", name);
    j->item = *item;
    j->item.arrival_us = w->now_us;
    j->item.seq = w->next_seq++;
    j->item.n_pages = pages_for_tokens(&w->pages, item->n_tokens);
    j->item.i_entry = -1;
    j->slot = -1;
    j->n_done = item->n_planned;
    j->pages = malloc((size_t)j->item.n_pages * sizeof(int32_t));
    cr_assert(j->pages);
    int rc = sched_add(w->sched, &j->item);
    cr_assert(rc == 0 || rc == ERR_FULL, "%s: sched_add gave %d", w->where, rc);
    if (rc) {
        free(j->pages);
        free(j);
        return NULL;
    }
    if (w->n_jobs == w->jobs_cap) {
        w->jobs_cap = 2 * w->jobs_cap + 16;
        w->jobs = realloc(w->jobs, (size_t)w->jobs_cap * sizeof(struct job *));
        cr_assert(w->jobs);
    }
    return w->jobs[w->n_jobs++] = j;
}

/* Returns what j holds once no step in flight has a piece of it. */
static inline void world_release(struct world *w, struct job *j)
{
    if (j->n_in_flight > 0)
        return;
    j->is_gone = true;
    if (j->slot < 0)
        return;
    slots_free(&w->slots, j->slot);
    for (int32_t i = 0; i < j->item.n_pages; i++)
        pages_unhold(&w->pages, j->pages[i], NULL);
    j->slot = -1;
}

static inline void world_cancel(struct world *w, struct job *j)
{
    sched_remove(w->sched, &j->item);
    j->is_ending = true;
    world_release(w, j);
}

/* The next expired job, or NULL. */
static inline struct job *world_expire(struct world *w)
{
    struct sched_item *item = sched_pop_expired(w->sched, w->now_us);
    if (!item)
        return NULL;
    world_cancel(w, world_job_of(item));
    return world_job_of(item);
}

static inline void world_check_piece(const struct world *w, const struct sched_piece *p)
{
    const struct job *j = world_job_of(p->item);
    cr_assert(!j->is_gone && !j->is_ending, "%s: a piece of %s, which ended", w->where,
              j->name);
    cr_assert_gt(p->n_tokens, 0, "%s: an empty piece of %s", w->where, j->name);
    cr_assert_eq(p->start + p->n_tokens, p->item->n_planned, "%s: a gap in %s", w->where,
                 j->name);
    cr_assert_eq(p->is_last, p->item->n_planned == p->item->n_tokens, "%s: is_last of %s",
                 w->where, j->name);
    cr_assert(p->is_last || p->n_tokens % 64 == 0, "%s: %s is cut at %d", w->where, j->name,
              p->n_tokens);
    cr_assert_eq(p->is_first, j->slot < 0, "%s: is_first of %s", w->where, j->name);
}

/* Plans a step and puts it in flight, if it has pieces. The step stays valid until it ends. */
static inline const struct world_step *world_plan(struct world *w)
{
    cr_assert_lt(w->n_flight, WORLD_MAX_FLIGHT, "%s: too many steps in flight", w->where);
    struct world_step *s = &w->flight[w->n_flight];
    struct sched_room room = {w->now_us, w->rate, w->slots.n_free, w->pages.n_free, NULL, NULL};
    int64_t backlog = sched_backlog_tokens(w->sched);
    s->n = sched_plan(w->sched, &room, s->pieces);
    cr_assert_leq(s->n, w->c.max_seqs, "%s: %d pieces", w->where, s->n);
    int32_t n_tokens = 0;
    for (int32_t i = 0; i < s->n; i++) {
        const struct sched_piece *p = &s->pieces[i];
        struct job *j = world_job_of(p->item);
        world_check_piece(w, p);
        for (int32_t k = 0; k < i; k++)
            cr_assert_neq(s->pieces[k].item, p->item, "%s: two pieces of %s", w->where,
                          j->name);
        if (p->is_first) {
            j->slot = slots_alloc(&w->slots);
            cr_assert_geq(j->slot, 0, "%s: no slot for %s", w->where, j->name);
            cr_assert_eq(pages_alloc(&w->pages, p->item->n_pages, j->pages), 0,
                         "%s: no pages for %s", w->where, j->name);
        }
        j->n_in_flight++;
        n_tokens += p->n_tokens;
    }
    cr_assert_leq(n_tokens, w->c.max_step_tokens, "%s: %d tokens", w->where, n_tokens);
    cr_assert_eq(sched_backlog_tokens(w->sched), backlog - n_tokens, "%s: backlog", w->where);
    if (s->n > 0)
        w->n_flight++;
    return s;
}

/* Ends the oldest step. Names of the jobs it completes, joined by blanks, go to names (may be
 * NULL). Returns its tokens. */
static inline int32_t world_end_step(struct world *w, char *names, size_t names_cap)
{
    cr_assert_gt(w->n_flight, 0, "%s: no step in flight", w->where);
    int32_t n_tokens = 0;
    if (names)
        names[0] = 0;
    for (int32_t i = 0; i < w->flight[0].n; i++) {
        const struct sched_piece *p = &w->flight[0].pieces[i];
        struct job *j = world_job_of(p->item);
        j->n_in_flight--;
        n_tokens += p->n_tokens;
        cr_assert_eq(p->start, j->n_done, "%s: %s ran out of order", w->where, j->name);
        j->n_done += p->n_tokens;
        if (p->is_last || j->is_ending)
            world_release(w, j);
        if (names && p->is_last && !j->is_ending)
            snprintf(names + strlen(names), names_cap - strlen(names), "%s%s",
                     names[0] ? " " : "", j->name);
    }
    memmove(&w->flight[0], &w->flight[1], (size_t)(--w->n_flight) * sizeof(w->flight[0]));
    return n_tokens;
}

/* Nothing waits, runs or is held. */
static inline void world_check_idle(const struct world *w)
{
    cr_assert_eq(w->n_flight, 0, "%s: a step is in flight", w->where);
    cr_assert_eq(sched_n_waiting(w->sched), 0, "%s: some wait", w->where);
    cr_assert_eq(sched_n_running(w->sched), 0, "%s: some run", w->where);
    cr_assert_eq(sched_backlog_tokens(w->sched), 0, "%s: backlog", w->where);
    cr_assert(slots_is_sound(&w->slots) && w->slots.n_held == 0, "%s: slots leak", w->where);
    cr_assert(pages_is_sound(&w->pages) && w->pages.n_held == 0, "%s: pages leak", w->where);
    for (int32_t i = 0; i < w->n_jobs; i++) {
        const struct job *j = w->jobs[i];
        cr_assert(j->is_gone, "%s: %s is left", w->where, j->name);
        cr_assert(j->is_ending || j->n_done == j->item.n_tokens, "%s: %s stopped at %d",
                  w->where, j->name, j->n_done);
    }
}

#endif
