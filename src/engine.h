/* The engine: one thread that owns the running set, the pools and the device.
 *
 * Takes requests from the queue, finds what they share (engine_prefix.c), plans steps with
 * sched, packs them with step, runs them on the model with up to two in flight, publishes
 * results and ends requests. A request leaves through one function (engine_end_request in
 * engine.c) from every state it can be in. Never touches a socket, never allocates per token.
 * Only this module decides that the device is lost. */
#ifndef PREFILLD_ENGINE_H
#define PREFILLD_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "metrics.h"
#include "model.h"
#include "queue.h"
#include "session.h"
#include "steps.h"

struct engine_config {
    enum sched_policy policy;
    int32_t max_waiting; /* the queue's length */
    int32_t max_decodes; /* generated tokens computed in a step; 0: no limit of its own */
    /* Shared prefixes: a prompt leaves a state every so many tokens, at least, and at its end
     * when it computed so many; 0: 2048. */
    int32_t checkpoint_tokens;
    int32_t min_shared_tokens; /* that it must save to cut a prompt where others part; 0: 256 */
    int32_t cache_share;       /* thousandths of each pool that kept states may take; 0: 500 */
    struct sessions *sessions; /* borrowed; NULL: none are kept */
    bool shuffle;              /* tests: hand out slots and pages in random order */
    uint64_t shuffle_seed;
};

struct engine;

/* Borrows model, queue and metrics until engine_close. */
int engine_open(const struct engine_config *c, struct model *model, struct queue *queue,
                struct metrics *metrics, struct engine **out, struct errmsg *e);
void engine_close(struct engine *en);

/* One step of made-up tokens on the calling thread, before engine_start: numbers that are
 * finite, and the first measure of the rate, without which Retry-After is a guess. Counts as no
 * request. Returns 0, ERR_NOMEM, ERR_DEVICE, or ERR_INVALID when the model gives NaN or
 * infinities. */
int engine_self_test(struct engine *en, int32_t vocab, struct errmsg *e);

/* Starts the thread. */
int engine_start(struct engine *en, struct errmsg *e);

/* Runs one round on the calling thread (tests without a thread): takes arrivals, ends the
 * cancelled and expired, launches what fits, publishes what ended. Returns true while work is
 * left. */
bool engine_turn(struct engine *en);

/* Marks r cancelled and wakes the engine. Any thread that holds a reference. */
void engine_cancel(struct engine *en, struct request *r);

/* The thread stands still for stall_us, from the end of the steps under way on: what a hung
 * device looks like, to try the watchdog and alarms. engine_stop ends it. Any thread. */
void engine_stall(struct engine *en, int64_t stall_us);

/* The latest steps, for GET /v1/steps and /v1/trace; lives as long as the engine. */
struct steps *engine_feed(struct engine *en);

/* Copies and what they need (engine_job.c); other threads post them, any number, in their
 * order. */
enum engine_job_kind {
    ENGINE_JOB_GET,  /* part of session, which is being exported, to stage */
    ENGINE_JOB_OPEN, /* a slot and pages for n_ids tokens of session, which is new */
    ENGINE_JOB_PUT,  /* part of such a session from stage */
    ENGINE_JOB_KEEP, /* lists it, with ids [n_ids] (copied) and terms */
    ENGINE_JOB_DROP  /* gives back what it holds, if anything */
};

/* The poster's; the engine's from engine_post until done. */
struct engine_job {
    enum engine_job_kind kind;
    struct session *session;
    struct state_part part;
    void *stage; /* of model_stage_alloc */
    const int32_t *ids;
    int32_t n_ids;
    bool takes_free_only; /* ENGINE_JOB_OPEN: nothing that is kept goes for it */
    struct session_terms terms;
    /* Engine thread, or the poster's own when the engine has stopped; must not block. rc: 0,
     * ERR_FULL: there is no room now, ERR_TOO_LARGE: there never is, ERR_NOMEM, ERR_NOT_FOUND,
     * ERR_DEVICE or ERR_STOPPED. */
    void (*done)(struct engine_job *j);
    int rc;
    struct engine_job *next; /* the engine's */
};

void engine_post(struct engine *en, struct engine_job *j);
/* Does j on the calling thread and waits for it, before engine_start or after engine_stop.
 * Returns what would be rc. */
int engine_run_job(struct engine *en, struct engine_job *j);

/* Drain: the queue was stopped by the caller; returns when nothing is left or deadline_us
 * (monotonic) has passed; false: requests are left. Any thread. */
bool engine_drain(struct engine *en, int64_t deadline_us);
/* Ends everything left with outcome ERROR ("shutting down"), then joins the thread. */
void engine_stop(struct engine *en);

#endif
