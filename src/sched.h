/* The scheduler: which pieces of which prompts make the next step. PURE: no clock, no I/O, no
 * locks, no memory beyond its own tables; time and the measured rate are inputs, so every
 * scenario is a replay file (tests/replay). Engine thread only.
 *
 * Rank, running and waiting alike, smallest first: priority, then the policy's key, then seq.
 *   fcfs         key = arrival
 *   short-first  key = (tokens left / rate) - (now - arrival): a prompt is passed only by those
 *                that arrive within its own service time, so none starves. `now` is the same in
 *                all keys of a plan and cancels, so keys of waiting requests stand until the
 *                rate changes. Whole microseconds, at most SCHED_MAX_SERVICE_US of service.
 *                The rate in use stays until the one given differs from it by more than 1/32
 *                of it; then it is the one given.
 *
 * A step is filled in the order of rank, one piece a request, until max_seqs pieces or less
 * than 64 tokens of max_step_tokens are left. A piece that does not end its prompt holds a
 * multiple of 64 tokens. In a step that another request of the same or a better priority could
 * share when it is planned, one prompt takes at most 3/4 of max_step_tokens, rounded down to
 * 64, at least 64; what the others turn out not to need stays unused.
 *
 * A request that generates comes back after each token with a piece of one (sched_continue). Of
 * these at most max_decodes are in a step, so that they leave room for prompts; they rank as
 * all do.
 *
 * A request is admitted (gets a slot and the pages of its whole prompt) with its first piece.
 * A waiting one that does not fit the free slots and pages holds back all waiting ones that
 * rank behind it, so that what is freed gathers for it and small requests do not slip past for
 * ever; running ones go on, also those that rank behind it. The device has work all the while:
 * what the request lacks is held by requests that run or whose last step is in flight. When
 * nothing holds pool memory the first in rank fits, because a prompt larger than the pools is
 * refused before it comes here: no deadlock.
 *
 * Who admits may also park a waiting request that had better begin where another, which runs,
 * will soon be: it keeps its deadline and is in no step until sched_unpark. */
#ifndef PREFILLD_SCHED_H
#define PREFILLD_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum { SCHED_ALIGN_TOKENS = 64, SCHED_MAX_PRIORITY = 1000 };
#define SCHED_MAX_SERVICE_US INT64_C(1000000000000000) /* 31 years */

enum sched_policy { SCHED_SHORT_FIRST, SCHED_FCFS };

struct sched_config {
    enum sched_policy policy;
    int32_t max_step_tokens; /* >= 64 */
    int32_t max_seqs;        /* pieces of a step; >= 1 */
    int32_t max_waiting;     /* capacity of the waiting set; 1 to 2^22 - 1 */
    int32_t max_decodes;     /* pieces of a step that are generated tokens; 0: max_seqs */
};

/* One request as the scheduler sees it. Embedded in struct request. */
struct sched_item {
    /* set by the caller before sched_add, constant afterwards */
    int64_t arrival_us;
    int64_t deadline_us; /* 0: none */
    int32_t priority;    /* -SCHED_MAX_PRIORITY..SCHED_MAX_PRIORITY */
    int32_t n_tokens;    /* of the prompt */
    int32_t n_pages;     /* the whole prompt takes */
    uint64_t seq;        /* order of arrival, under 2^42; breaks ties */
    int32_t n_planned; /* tokens in pieces so far; before sched_add: what was cached, less than
                          n_tokens; then the scheduler's */
    int32_t i_entry;   /* the scheduler's: place in its table; -1 when neither waits nor runs
                          (set by request_new) */
};

struct sched_piece {
    struct sched_item *item;
    int32_t start;    /* first token of the prompt */
    int32_t n_tokens; /* of this piece */
    bool is_first;    /* admitted with this piece */
    bool is_last;     /* ends the prompt */
};

enum sched_answer { SCHED_ADMIT, SCHED_NO_ROOM, SCHED_PARK };

/* What a plan may use. */
struct sched_room {
    int64_t now_us;            /* of the plan; no piece depends on it, see above */
    double rate_tokens_per_us; /* measured; > 0 */
    int32_t n_free_slots;
    int32_t n_free_pages;
    /* Asked of a waiting item that fits, before its first piece; NULL: admitted. May change its
     * n_planned and n_pages. SCHED_NO_ROOM: it waits on, and so do all behind it. */
    enum sched_answer (*admit)(void *arg, struct sched_item *item);
    void *arg;
};

struct sched; /* opaque */

/* Returns 0, ERR_INVALID or ERR_NOMEM. */
int sched_open(const struct sched_config *c, struct sched **out);
void sched_close(struct sched *s);

/* A new request waits; borrows item until it leaves. Returns 0, ERR_FULL or ERR_NOMEM.
 * O(log waiting). The only call that may allocate, when more wait and run than ever before. */
int sched_add(struct sched *s, struct sched_item *item);
/* One whose last piece was planned runs on with one token more (item->n_tokens is raised by
 * it); it holds its slot and pages. Returns 0 or ERR_NOMEM. O(log running). */
int sched_continue(struct sched *s, struct sched_item *item);
/* Takes it out, waiting or running (cancelled, expired, failed). No-op when it is in neither,
 * as after its last piece. Its tokens in steps already planned are the engine's business.
 * O(log waiting). */
void sched_remove(struct sched *s, struct sched_item *item);
/* Removes and returns the waiting or running item whose deadline is the earliest, if that is
 * at or before now_us, or NULL. O(log waiting). */
struct sched_item *sched_pop_expired(struct sched *s, int64_t now_us);

/* Plans one step into pieces[max_seqs], in order of rank; items advance (n_planned) and waiting
 * ones become running. An item whose last piece was planned leaves. Returns the number of
 * pieces. Cost O(pieces log(waiting + running)); O(waiting + running) when the rate in use
 * changes. Room for what is_first pieces take must still be there when the caller takes it. */
int32_t sched_plan(struct sched *s, const struct sched_room *room, struct sched_piece *pieces);

/* A parked item waits again, with n_planned and n_pages as they are now. O(log waiting). */
void sched_unpark(struct sched *s, struct sched_item *item);

int32_t sched_n_waiting(const struct sched *s);
int32_t sched_n_running(const struct sched *s);
/* Prompt tokens not yet planned, of all items that wait or run. */
int64_t sched_backlog_tokens(const struct sched *s);

#endif
