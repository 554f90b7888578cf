/* The worker pool: a few threads that parse, tokenize and format.
 *
 * Owns the threads and the list of jobs that wait. Jobs are embedded in their owners, so
 * posting allocates nothing. Four lanes, served in order: quick answers (health, metrics),
 * results that wait to be formatted, new requests, new requests with large bodies, which take
 * seconds and at most half of the threads. Only new requests are bounded: a result belongs to a
 * request that was accepted before. One thread more than asked for never takes a request, so
 * that long prompts in all the others do not hold up /health. Never touches a socket or the
 * device. */
#ifndef PREFILLD_WORK_H
#define PREFILLD_WORK_H

#include <stdint.h>

#include "err.h"

enum work_lane { WORK_QUICK, WORK_RESULT, WORK_REQUEST, WORK_BULK, WORK_N_LANES };

/* Embedded in its owner. Free for another post as soon as run was called. */
struct work_job {
    void (*run)(struct work_job *job);
    struct work_job *next; /* the pool's */
};

struct work;

/* n_threads: that take requests. max_requests: jobs that may wait in WORK_REQUEST and
 * WORK_BULK. Returns 0, ERR_NOMEM or ERR_IO. */
int work_open(int32_t n_threads, int32_t max_requests, struct work **out);

/* Any thread, never waits for a job. Returns 0 or ERR_FULL (requests only). */
int work_post(struct work *w, enum work_lane lane, struct work_job *job);

/* Runs what is left, also what those jobs post, then ends the threads. No post may follow. */
void work_close(struct work *w);

#endif
