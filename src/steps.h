/* The latest steps: for the live page, as the feed of GET /v1/steps, and for GET /v1/trace.
 *
 * The engine thread adds one record a step; workers render them, as server-sent events or as a
 * trace. Holds the last STEPS_KEPT: a reader that falls behind misses the older ones. Steps may
 * be shorter than the work of telling many readers: they are told of some at a time, and those
 * that have read alike share the text. */
#ifndef PREFILLD_STEPS_H
#define PREFILLD_STEPS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "buf.h"
#include "metrics.h"
#include "step.h"
#include "trace.h"

enum {
    STEPS_KEPT = 256,
    STEPS_PIECES = 32,
    STEPS_ID = 40,
    STEPS_TELL_US = 20000 /* from one time that readers are told to the next, at least */
};

struct steps_piece {
    char id[STEPS_ID]; /* of the request, cut short */
    int32_t start, n_tokens;
    bool is_last;
    int64_t latency_us; /* since its request's arrival, where the prompt ends; else -1 */
};

struct steps_record {
    struct trace_step trace;
    struct steps_piece pieces[STEPS_PIECES]; /* the first of trace.n_pieces */
    struct metrics_pools pools;              /* behind it */
    int64_t queue_age_us; /* of the request that waits longest, behind it; 0: none waits */
};

struct steps {
    pthread_mutex_t lock; /* a leaf: nothing else is locked under it */
    struct steps_record records[STEPS_KEPT];
    int64_t n_added;
    int64_t ended_us; /* of the step added last, on the device */

    void (*listener)(void *arg); /* NULL: none */
    void *listener_arg;
    atomic_llong n_told; /* of n_added: what readers may have */
    int64_t told_us;     /* engine thread */

    pthread_mutex_t text_lock; /* before lock */
    struct buf text;           /* the events of [text_from, text_end), rendered last */
    int64_t text_from, text_end;
};

int steps_init(struct steps *s);
void steps_fini(struct steps *s);

/* Fills r's pieces from a step whose requests are still there. */
void steps_take(struct steps_record *r, const struct step *step);
/* fn is called by the engine thread when there is more to render; it must not block. Before the
 * engine starts. */
void steps_set_listener(struct steps *s, void (*fn)(void *arg), void *arg);
/* Engine thread. */
void steps_add(struct steps *s, const struct steps_record *r);
/* Tells of what was added, if there is any and it is time; returns whether all is told. Engine
 * thread; steps_add does so itself, and others when no step ends for a while. */
bool steps_tell(struct steps *s, int64_t now_us);
/* What was added is no more, as before the engine starts. */
void steps_forget(struct steps *s);

/* One event for each record that was told of, from place `from` on (0: the oldest that is
 * held), as `data: {..}` and an empty line. Returns the place behind the last. Any thread. */
int64_t steps_render(struct steps *s, int64_t from, struct buf *out);
/* The last n steps (all that are held when there are fewer) as a trace. Any thread. */
void steps_render_trace(struct steps *s, int64_t n, struct buf *out);
/* The place behind the latest record. */
int64_t steps_end(struct steps *s);

#endif
