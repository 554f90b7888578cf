/* What a step did and when, and its events of a Chrome/Perfetto trace.
 *
 * The engine thread fills a record a step, which steps.h keeps; workers render. Times are the
 * host's monotonic clock. How long a step ran on the device, and idled before it, comes from
 * the device's own clock; where that lies on the host's is inferred: after the step before it,
 * or after its launch began, and not after its results were there. */
#ifndef PREFILLD_TRACE_H
#define PREFILLD_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "backend.h"
#include "buf.h"

enum { TRACE_KINDS = 32 };

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
    int64_t begun_us; /* trace_place's: on the device */
};

/* A step was planned and packed, and is launched now. */
void trace_start(struct trace_step *s, int64_t number, const struct batch_host *h,
                 int64_t plan_us, int64_t pack_us);

/* Fills s's device times from the backend's; spans are summed by name. */
void trace_set_times(struct trace_step *s, const struct step_times *times);
/* Sets begun_us; ended_us: of the step before on the device, or 0. Returns this one's. */
int64_t trace_place(struct trace_step *s, int64_t ended_us);

/* {"traceEvents": [...]}: a begin, the steps in order, an end. */
void trace_render_begin(struct buf *out);
void trace_render_step(const struct trace_step *s, struct buf *out);
void trace_render_end(struct buf *out);

#endif
