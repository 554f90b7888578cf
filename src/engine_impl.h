/* Inside of engine*.c: the engine's state, and what its parts call of each other. Engine thread
 * only, but for the atomics. */
#ifndef PREFILLD_ENGINE_IMPL_H
#define PREFILLD_ENGINE_IMPL_H

#include <pthread.h>
#include <stddef.h>

#include "engine.h"
#include "pages.h"
#include "prefix.h"
#include "rate.h"
#include "slots.h"
#include "step.h"
#include "steps.h"

enum { STEPS_IN_FLIGHT = 2 };

struct engine {
    struct model *model;
    struct queue *queue;
    struct metrics *metrics;
    struct sched *sched;
    struct slots slots;
    struct pages pages;
    struct prefix prefix;
    struct sessions *sessions;
    int32_t checkpoint_tokens, min_shared_tokens;
    int32_t max_cached_slots, max_cached_pages;
    int32_t n_kept_slots; /* of nodes, made or to be made */
    struct step steps[STEPS_IN_FLIGHT];
    struct steps_record records[STEPS_IN_FLIGHT]; /* of the same steps */
    struct steps feed;
    int32_t i_oldest, n_in_flight;
    int64_t step_number;
    int64_t plan_number; /* of the step being planned and packed, or planned last */
    int64_t last_end_us;
    struct rate rate;      /* of ended steps */
    struct request *first; /* every request the engine holds */
    int32_t n_held, n_admitted;
    int64_t admitted_left;    /* tokens of admitted requests not yet computed */
    struct sched_piece *plan; /* [max_seqs] */
    bool shuffle;
    uint64_t shuffle_state;
    bool is_lost;
    struct engine_job *_Atomic jobs; /* posted, the latest first */
    struct engine_job *first_job;    /* of those taken, in order */
    struct engine_job *copying[COPY_MARKS];
    int32_t n_copying;
    int32_t n_slots_coming, n_pages_coming; /* held by sessions that are brought in */
    int32_t n_cancels_seen;
    atomic_int n_cancels; /* raised by engine_cancel */
    atomic_int n_alive;   /* requests the engine holds; for engine_drain */
    atomic_bool stopping;
    atomic_llong stall_until_us; /* engine_stall */
    pthread_t thread;
    bool has_thread;
};

/* ---- engine_end.c: what a request holds, and the one way out ---- */

static inline struct request *engine_request_of(struct sched_item *item)
{
    return (struct request *)((char *)item - offsetof(struct request, item));
}

/* Where a request begins: behind depth tokens, at a copy of slot, sharing n_shared whole pages,
 * its next page being a copy of copy_page. */
struct engine_start {
    int32_t depth, slot; /* slot -1: none, depth 0 */
    const int32_t *pages;
    int32_t n_shared;
    int32_t copy_page; /* -1: none */
};

/* Takes a slot and pages for r, which are free; it begins at `at`. */
void engine_admit(struct engine *en, struct request *r, const struct engine_start *at);
void engine_publish_metrics(struct engine *en);
/* A slot that nothing holds any more. wipe: a fault left numbers there that must not be met
 * again, whatever the build. */
void engine_free_slot(struct engine *en, int32_t slot, bool wipe);
/* Ends r, from whatever state it is in: takes it out of the scheduler, gives back all it holds,
 * hands it to its owner. With pieces in flight the rest happens when the last of them ends. */
void engine_end_request(struct engine *en, struct request *r, enum outcome outcome,
                        const char *why);
void engine_end_all(struct engine *en, const char *why);

/* ---- engine_session.c: what sessions hold ---- */

/* Where r begins as its session says; depth 0 when it has none, or its state went. */
struct engine_start engine_session_start(const struct engine *en, const struct request *r);
/* Gives back what deleted and expired ones held. */
void engine_session_tick(struct engine *en);
/* Gives up the one that was not used for longest; is_needed: also one that is pinned, or that
 * requests wait to begin at, which then begin at their start. False: there is none. */
bool engine_session_evict(struct engine *en, bool is_needed);
/* r has ended well: the session that is to keep its end takes its slot and shares its pages.
 * False: it does not, and r has them still. */
bool engine_session_keep(struct engine *en, struct request *r);
/* r has ended: its sessions are free for others. */
void engine_session_leave(struct engine *en, struct request *r);

/* ---- engine_job.c: sessions read and brought in ---- */

/* Between steps: ends copies, starts what was posted. Returns 0 or ERR_DEVICE. */
int engine_job_tick(struct engine *en);
/* Within a step that runs on this thread: one copy. */
void engine_job_copy(struct engine *en);
bool engine_job_is_left(const struct engine *en);
/* Ends all; later ones end at once, with ERR_STOPPED. */
void engine_job_stop(struct engine *en);

/* ---- engine_prefix.c: what prompts share ---- */

int engine_prefix_open(struct engine *en, const struct engine_config *c);
/* Puts r's prompt into the tree, before sched_add. */
void engine_prefix_enter(struct engine *en, struct request *r);
/* sched_room's admit; arg is the engine. */
enum sched_answer engine_try_admit(void *arg, struct sched_item *item);
/* The piece [start, end) of r was added to the step being packed: keeps its state where that is
 * wanted. */
void engine_prefix_pack(struct engine *en, struct step *s, struct request *r, int32_t start,
                        int32_t end);
/* The step was launched, whole or not: what it keeps can be used, or is dropped. */
void engine_prefix_launched(struct engine *en, struct step *s, bool is_whole);
/* A piece of r's prompt has ended well: keeps the numbers of its tokens. */
void engine_prefix_publish(struct engine *en, struct request *r);
/* r is in no plan any more; is_bad: the states it left go, too. */
void engine_prefix_leave(struct engine *en, struct request *r, bool is_bad);
/* Evicts the kept state that is worth least; false: there is none that may go. */
bool engine_prefix_evict(struct engine *en);
/* Evicts until kept states are within their share. */
void engine_prefix_trim(struct engine *en);

#endif
