/* Counters and gauges, and their Prometheus text.
 *
 * Owns numbers only. Counters are atomics written by whoever counts; the pools are published as
 * one snapshot by the engine, so that a scrape never sees a slot in two states or in none. */
#ifndef PREFILLD_METRICS_H
#define PREFILLD_METRICS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "buf.h"
#include "histogram.h"
#include "request.h"

struct metrics_pools {
    int32_t slots_free, slots_held, slots_cached;
    int32_t pages_free, pages_held, pages_cached;
    int32_t requests_running; /* admitted, not ended */
    int32_t requests_waiting; /* queued, not admitted */
};

struct metrics {
    pthread_mutex_t lock; /* of pools; a leaf: nothing else is locked under it */
    struct metrics_pools pools;
    atomic_llong requests[OUTCOME_COUNT];
    atomic_llong steps;
    atomic_llong step_tokens;
    atomic_llong steps_replayed;
    atomic_llong prompt_tokens; /* of requests answered */
    atomic_llong new_tokens;    /* generated */
    atomic_llong nan_rows;
    /* Prompts that looked for a kept prefix, with their tokens, and that began at one; states
     * kept and evicted. */
    atomic_llong prefix_queries, prefix_query_tokens, prefix_hits, prefix_hit_tokens;
    atomic_llong prefix_kept, prefix_evicted;
    /* Sessions on their way as files: out (0) and in (1), their bytes, and those that did not
     * end well. */
    atomic_llong files[2], file_bytes[2], files_failed[2];
    atomic_int connections;
    /* Of requests that were answered: until the first piece, until the first token, all; and
     * how long their prompts were. */
    struct histogram queue_us, prefill_us, first_us, total_us, prompt_sizes;
    struct histogram steps_us, step_sizes, step_pieces, gaps_ns; /* of steps */
    /* Constant once the model is sized; for the names that others read. */
    const char *model_name;
    int32_t page_tokens;
    int64_t weights_bytes, scratch_bytes, slots_bytes, pages_bytes;
    /* For /health and Retry-After. */
    atomic_llong last_progress_us;  /* monotonic: a step ended or the engine was idle */
    atomic_llong backlog_tokens;    /* accepted and not yet computed */
    atomic_llong rate_tokens_per_s; /* measured over the last steps; 0: not yet */
    atomic_bool device_lost;
};

int metrics_init(struct metrics *m);
void metrics_fini(struct metrics *m);
void metrics_set_pools(struct metrics *m, const struct metrics_pools *p);
void metrics_get_pools(struct metrics *m, struct metrics_pools *p);
void metrics_count(struct metrics *m, enum outcome o);
/* Counts of steps and tokens begin anew. */
void metrics_zero_steps(struct metrics *m);

/* Prometheus text format 0.0.4, with HELP and TYPE for each. queue_age_us: how long the request
 * that waits longest has waited; the queue knows. */
void metrics_render(struct metrics *m, int64_t queue_age_us, struct buf *out);

const char *outcome_name(enum outcome o);

#endif
