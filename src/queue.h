/* The bounded queue between the workers and the engine.
 *
 * Many producers (workers), one consumer (engine). Owns the count of waiting requests, which
 * includes those the scheduler has taken but not admitted: full means ERR_FULL at once, never a
 * wait. One lock, held for a few instructions. */
#ifndef PREFILLD_QUEUE_H
#define PREFILLD_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "request.h"

struct queue;

/* max_waiting (>= 1): requests that may wait for admission. Returns 0, ERR_INVALID or
 * ERR_NOMEM. */
int queue_open(int32_t max_waiting, struct queue **out);
/* Gives up the references of requests never taken, without their done(). No other thread may
 * use q any more. */
void queue_close(struct queue *q);

/* Takes a reference of its own on success; from then on r is the engine's to write. Returns 0,
 * ERR_FULL or ERR_STOPPED. Assigns item.seq, in the order of pushes. */
int queue_push(struct queue *q, struct request *r);
/* The same for n (>= 1) requests: all of them, or none. */
int queue_push_all(struct queue *q, struct request *const *r, int32_t n);
/* How many may wait: more than these together are never taken. */
int32_t queue_max_waiting(const struct queue *q);

/* Engine: moves up to max requests to out (the queue's references go along). Waits up to
 * wait_us for one when there is none (0: does not wait; -1: until one comes or queue_wake or
 * queue_stop). Returns how many. */
int32_t queue_take(struct queue *q, struct request **out, int32_t max, int64_t wait_us);

/* Ends the engine's wait; for cancellations and shutdown. Any thread. When the engine does not
 * wait, its next wait ends at once: only a queue_take that may wait and finds the queue empty
 * uses a wake up. */
void queue_wake(struct queue *q);

/* Engine: r waits no longer (admitted or ended). Once, with as many ids as it was pushed
 * with. */
void queue_leave(struct queue *q, struct request *r);

/* From now on queue_push gives ERR_STOPPED; what is in the queue stays. Wakes once, as
 * queue_wake. */
void queue_stop(struct queue *q);
bool queue_is_stopped(const struct queue *q);

/* Requests and prompt tokens pushed and not left. Any thread. */
int32_t queue_n_waiting(const struct queue *q);
int64_t queue_waiting_tokens(const struct queue *q);
/* The arrival of the request that was pushed first of those that wait, monotonic; 0: none
 * waits. Any thread. */
int64_t queue_oldest_us(struct queue *q);

/* Whole seconds, rounded up, until the backlog would be gone at the measured rate; at least 1,
 * at most 3600; 1 while no rate was measured (0). backlog_tokens: waiting plus admitted but not
 * computed. */
int32_t queue_retry_after_s(int64_t backlog_tokens, double tokens_per_s);

#endif
