/* The scheduler: which pieces of which prompts make the next step. PURE: no clock, no I/O, no
 * locks, no memory beyond its own tables; time and the measured rate are inputs, so every
 * scenario is a replay file (tests/replay). Engine thread only.
 *
 * Policies, priority first in both (lower number first):
 *   fcfs         by arrival
 *   short-first  by (tokens left / rate) - (now - arrival), smallest first: a prompt is passed
 *                only by those that arrive within its own service time, so none starves
 * Rules: a step holds at most max_step_tokens tokens of at most max_seqs requests; a piece that
 * does not end its prompt holds a multiple of 64 tokens; while others of the same or a better
 * priority wait and could run, one prompt takes at most 3/4 of a step, rounded down to 64. A
 * request is admitted (gets a slot and the pages of its whole prompt) with its first piece. */
#ifndef PREFILLD_SCHED_H
#define PREFILLD_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum sched_policy { SCHED_SHORT_FIRST, SCHED_FCFS };

struct sched_config {
    enum sched_policy policy;
    int32_t max_step_tokens; /* >= 64 */
    int32_t max_seqs;
    int32_t max_waiting; /* capacity of the waiting set */
};

/* One request as the scheduler sees it. Embedded in struct request. */
struct sched_item {
    /* set by the caller before sched_add, constant afterwards */
    int64_t arrival_us;
    int64_t deadline_us; /* 0: none */
    int32_t priority;
    int32_t n_tokens; /* of the prompt */
    int32_t n_pages;  /* the whole prompt takes */
    uint64_t seq;     /* order of arrival; breaks ties */
    /* the scheduler's own */
    int32_t n_planned; /* tokens in pieces so far; starts at what was cached */
    int32_t i_heap;    /* place in the waiting heap, or -1 */
    int32_t i_running; /* place in the running list, or -1 */
    double key;
};

struct sched_piece {
    struct sched_item *item;
    int32_t start;    /* first token of the prompt */
    int32_t n_tokens; /* of this piece */
    bool is_first;    /* admitted with this piece */
    bool is_last;     /* ends the prompt */
};

/* What a plan may use. */
struct sched_room {
    int64_t now_us;
    double rate_tokens_per_us; /* measured; > 0 */
    int32_t n_free_slots;
    int32_t n_free_pages;
};

struct sched; /* opaque */

int sched_open(const struct sched_config *c, struct sched **out);
void sched_close(struct sched *s);

/* A new request waits. Returns 0 or ERR_FULL. */
int sched_add(struct sched *s, struct sched_item *item);
/* Takes it out, waiting or running (cancelled, expired, failed, finished). No-op when it is in
 * neither. Its tokens in steps already planned are the engine's business. */
void sched_remove(struct sched *s, struct sched_item *item);
/* Removes and returns one waiting or running item past its deadline at now_us, or NULL. */
struct sched_item *sched_pop_expired(struct sched *s, int64_t now_us);

/* Plans one step into pieces[max_seqs]; items advance (n_planned) and waiting ones become
 * running. An item whose last piece was planned leaves the running list. Returns the number of
 * pieces. Cost O((running + admitted) log waiting). */
int32_t sched_plan(struct sched *s, const struct sched_room *room, struct sched_piece *pieces);

int32_t sched_n_waiting(const struct sched *s);
int32_t sched_n_running(const struct sched *s);
/* Prompt tokens not yet planned, of all items. */
int64_t sched_backlog_tokens(const struct sched *s);

#endif
