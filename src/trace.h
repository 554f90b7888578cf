/* What the latest steps did and when, as a Chrome/Perfetto trace.
 *
 * The engine thread adds one record a step, when the step has been published; workers render.
 * Holds the last TRACE_STEPS of them. Times are the host's monotonic clock. How long a step ran on
 * the device, and idled before it, comes from the device's own clock; where that lies on the
 * host's is inferred: after the step before it, or after its launch began, and not after its
 * results were there. */
#ifndef PREFILLD_TRACE_H
#define PREFILLD_TRACE_H

#include <pthread.h>
#include <stdint.h>

#include "backend.h"
#include "buf.h"

enum { TRACE_STEPS = 256, TRACE_KINDS = 32 };

/* All calls of one operation in a step. */
struct trace_kind {
    const char *name; /* a constant */
    float us;         /* on the device */
    int32_t n;
};

struct trace_step {
    int64_t number;
    int32_t n_tokens, n_pieces, n_rows;
    /* Each phase ends where the next begins; the host does other things between launched and
     * done. */
    int64_t plan_us, pack_us, launch_us, launched_us, done_us, published_us;
    float gap_us;    /* as struct step_times; negative: not known */
    float device_us; /* negative: the backend runs steps while they are launched */
    bool is_replayed;
    int32_t n_kinds; /* while operations are traced */
    struct trace_kind kinds[TRACE_KINDS];
    int64_t begun_us; /* trace_add's: on the device */
};

struct trace {
    pthread_mutex_t lock; /* a leaf: nothing else is locked under it */
    struct trace_step steps[TRACE_STEPS];
    int64_t n_added;
    int64_t ended_us; /* of the step added last, on the device */
};

/* A zeroed trace may be ended, too. */
int trace_init(struct trace *t);
void trace_fini(struct trace *t);

/* A step was planned and packed, and is launched now. */
void trace_start(struct trace_step *s, int64_t number, const struct batch_host *h,
                 int64_t plan_us, int64_t pack_us);

/* Fills s's device times from the backend's; spans are summed by name. */
void trace_set_times(struct trace_step *s, const struct step_times *times);
/* Engine thread. */
void trace_add(struct trace *t, const struct trace_step *s);
/* {"traceEvents": [...]} of the last n steps (all that are held when there are fewer). */
void trace_render(struct trace *t, int64_t n, struct buf *out);

#endif
