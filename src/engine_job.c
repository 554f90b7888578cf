/* What others ask of the pools between steps: parts of kept sessions out, parts of new ones in.
 *
 * A session that is read is spared by eviction (sessions_begin_export), so its slot and pages
 * do not change. One that is brought in holds a slot and pages from ENGINE_JOB_OPEN to _KEEP or
 * _DROP; nobody finds it before. Copies are made at once, or, where the backend queues them,
 * beside the steps; a few at a time, so that a step never waits long. */
#include <stdlib.h>

#include "config.h"
#include "engine_impl.h"

enum { COPIES_A_TICK = 4 };

/* Stands in en->jobs when no more are taken. */
static struct engine_job no_more;

void engine_post(struct engine *en, struct engine_job *j)
{
    struct engine_job *first = atomic_load(&en->jobs);
    do {
        j->next = first;
    } while (first != &no_more && !atomic_compare_exchange_weak(&en->jobs, &first, j));
    if (first == &no_more) {
        j->rc = ERR_STOPPED;
        j->done(j);
        return;
    }
    queue_wake(en->queue);
}

/* The latest comes first. */
static void append(struct engine *en, struct engine_job *j)
{
    struct engine_job *sorted = NULL, *next;
    for (; j; j = next) {
        next = j->next;
        j->next = sorted;
        sorted = j;
    }
    struct engine_job **end = &en->first_job;
    while (*end) /* a few */
        end = &(*end)->next;
    *end = sorted;
}

static struct engine_job *take_first(struct engine *en)
{
    struct engine_job *j = en->first_job;
    en->first_job = j->next;
    return j;
}

static void finish(struct engine_job *j, int rc)
{
    j->rc = rc;
    j->done(j);
}

/* ---- sessions that are brought in ---- */

/* Pages that are free or would be without all that may be evicted for a session. */
static int32_t pages_in_reach(const struct engine *en)
{
    int32_t n = en->pages.n_free + en->pages.n_cached;
    bool *spared = calloc((size_t)en->pages.n_total, sizeof(*spared));
    if (!spared)
        return n;
    sessions_mark_spared(en->sessions, spared);
    for (int32_t i = 0; i < en->pages.n_total; i++)
        n -= spared[i] && en->pages.held_refs[i] == 0;
    free(spared);
    return n;
}

/* Evicts nothing where that would not be enough. */
static int make_room(struct engine *en, int32_t n_pages, bool takes_free_only)
{
    if (n_pages > en->pages.n_total)
        return ERR_TOO_LARGE;
    if (en->pages.n_free < n_pages && (takes_free_only || pages_in_reach(en) < n_pages))
        return ERR_FULL;
    while (en->slots.n_free == 0 || en->pages.n_free < n_pages) {
        if (takes_free_only || (!engine_prefix_evict(en) && !engine_session_evict(en, false)))
            return ERR_FULL;
    }
    return 0;
}

static int open_session(struct engine *en, const struct engine_job *j)
{
    struct session *s = j->session;
    int32_t n_pages = pages_for_tokens(&en->pages, j->n_ids);
    int rc = make_room(en, n_pages, j->takes_free_only);
    if (rc != 0)
        return rc;
    s->pages = malloc((size_t)n_pages * sizeof(*s->pages));
    if (!s->pages)
        return ERR_NOMEM;
    s->slot = slots_alloc(&en->slots);
    pages_alloc(&en->pages, n_pages, s->pages); /* they were counted */
    s->n_pages = n_pages;
    en->n_slots_coming++;
    en->n_pages_coming += n_pages;
    model_copies_follow(en->model);
    return 0;
}

/* It holds them no more as a request does. */
static void leave(struct engine *en, const struct session *s)
{
    en->n_slots_coming--;
    en->n_pages_coming -= s->n_pages;
}

static int keep_session(struct engine *en, struct engine_job *j)
{
    struct session *s = j->session;
    int rc = sessions_keep(en->sessions, s, j->ids, j->n_ids, &j->terms);
    if (rc != 0)
        return rc;
    leave(en, s);
    slots_cache(&en->slots, s->slot);
    for (int32_t i = 0; i < s->n_pages; i++) {
        pages_cache(&en->pages, s->pages[i]);
        pages_unhold(&en->pages, s->pages[i], NULL);
    }
    return 0;
}

static void drop_session(struct engine *en, struct session *s)
{
    if (s->slot < 0)
        return;
    leave(en, s);
    for (int32_t i = 0; i < s->n_pages; i++) {
        bool is_freed;
        pages_unhold(&en->pages, s->pages[i], &is_freed);
        if (PREFILLD_POISON)
            model_poison_page(en->model, s->pages[i]);
    }
    engine_free_slot(en, s->slot, false);
    free(s->pages);
    s->pages = NULL;
    s->n_pages = 0;
    s->slot = -1;
}

/* ---- jobs ---- */

static bool is_copy(const struct engine_job *j)
{
    return j->kind == ENGINE_JOB_GET || j->kind == ENGINE_JOB_PUT;
}

static int start_copy(struct engine *en, struct engine_job *j)
{
    const struct session *s = j->session;
    if (s->slot < 0)
        return ERR_NOT_FOUND;
    return j->kind == ENGINE_JOB_GET
               ? model_part_get(en->model, &j->part, s->slot, s->pages, j->stage)
               : model_part_put(en->model, &j->part, s->slot, s->pages, j->stage);
}

static int run(struct engine *en, struct engine_job *j)
{
    switch (j->kind) {
    case ENGINE_JOB_OPEN:
        return open_session(en, j);
    case ENGINE_JOB_KEEP:
        return keep_session(en, j);
    case ENGINE_JOB_DROP:
        drop_session(en, j->session);
        return 0;
    default:
        return start_copy(en, j);
    }
}

int engine_run_job(struct engine *en, struct engine_job *j)
{
    int rc = en->is_lost ? ERR_DEVICE : run(en, j);
    if (rc != 0 || !is_copy(j))
        return rc;
    rc = model_copies_mark(en->model, 0);
    if (rc == 0)
        rc = model_copies_done(en->model, 0, true);
    return rc < 0 ? rc : 0;
}

/* A place among the copies under way; negative: there is none. */
static int32_t free_mark(const struct engine *en)
{
    for (int32_t i = 0; i < COPY_MARKS; i++)
        if (!en->copying[i])
            return i;
    return -1;
}

/* Starts the first job. False: it has to wait. */
static bool start_first(struct engine *en)
{
    bool is_queued = is_copy(en->first_job) && model_copies_are_queued(en->model);
    int32_t mark = is_queued ? free_mark(en) : 0;
    if (mark < 0)
        return false;
    struct engine_job *j = take_first(en);
    int rc = en->is_lost ? ERR_DEVICE : run(en, j);
    if (rc == 0 && is_queued)
        rc = model_copies_mark(en->model, mark);
    if (rc == 0 && is_queued) {
        en->copying[mark] = j;
        en->n_copying++;
    } else {
        finish(j, rc);
    }
    return true;
}

/* Copies that have ended. */
static int collect(struct engine *en, bool wait)
{
    int lost = 0;
    for (int32_t i = 0; i < COPY_MARKS && en->n_copying > 0; i++) {
        struct engine_job *j = en->copying[i];
        int rc = j ? model_copies_done(en->model, i, wait) : 0;
        if (rc == 0)
            continue;
        en->copying[i] = NULL;
        en->n_copying--;
        lost = rc < 0 ? rc : lost;
        finish(j, rc < 0 ? rc : 0);
    }
    return lost;
}

int engine_job_tick(struct engine *en)
{
    int rc = collect(en, false), n_copies = 0;
    if (atomic_load(&en->jobs))
        append(en, atomic_exchange(&en->jobs, NULL));
    while (en->first_job && n_copies < COPIES_A_TICK) {
        n_copies += is_copy(en->first_job);
        if (!start_first(en))
            break;
    }
    return rc;
}

void engine_job_copy(struct engine *en)
{
    if (model_copies_are_queued(en->model))
        return;
    if (!en->first_job && atomic_load(&en->jobs))
        append(en, atomic_exchange(&en->jobs, NULL));
    if (en->first_job && is_copy(en->first_job))
        start_first(en);
}

bool engine_job_is_left(const struct engine *en)
{
    return en->first_job || en->n_copying > 0 || atomic_load(&en->jobs);
}

void engine_job_stop(struct engine *en)
{
    struct engine_job *j = atomic_exchange(&en->jobs, &no_more);
    if (j != &no_more)
        append(en, j);
    collect(en, true);
    while (en->first_job)
        finish(take_first(en), ERR_STOPPED);
}
