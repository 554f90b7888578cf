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

/* max_waiting: requests that may wait for admission. */
int queue_open(int32_t max_waiting, struct queue **out);
void queue_close(struct queue *q);

/* Takes a reference of its own on success. Returns 0, ERR_FULL or ERR_STOPPED. Assigns
 * item.seq, in arrival order. */
int queue_push(struct queue *q, struct request *r);

/* Engine: moves up to max requests to out (the queue's references go along). Waits up to
 * wait_us for one when there is none (0: does not wait; -1: until one comes or queue_wake or
 * queue_stop). Returns how many. */
int32_t queue_take(struct queue *q, struct request **out, int32_t max, int64_t wait_us);

/* Ends the engine's wait; for cancellations and shutdown. Any thread. */
void queue_wake(struct queue *q);

/* Engine: n requests with n_tokens prompt tokens wait no longer (admitted or ended). */
void queue_leave(struct queue *q, int32_t n, int64_t n_tokens);

/* From now on queue_push gives ERR_STOPPED. */
void queue_stop(struct queue *q);
bool queue_is_stopped(const struct queue *q);

int32_t queue_n_waiting(const struct queue *q);
int64_t queue_waiting_tokens(const struct queue *q);

/* Whole seconds until the backlog would be gone at the measured rate; at least 1, at most
 * 3600. backlog_tokens: waiting plus admitted but not computed. */
int32_t queue_retry_after_s(int64_t backlog_tokens, double tokens_per_s);

#endif
