/* The HTTP API: bodies to requests, results to answers (../shared/api.md, README).
 *
 * api_handle runs on a worker thread for each complete HTTP request; answers that need the
 * engine are formatted on a worker, too, after the engine's done(). Knows JSON, statuses and
 * messages; touches neither sockets nor the device. */
#ifndef PREFILLD_API_H
#define PREFILLD_API_H

#include <stdatomic.h>
#include <stdint.h>

#include "http.h"
#include "metrics.h"
#include "queue.h"
#include "tokenizer.h"

enum server_phase { PHASE_LOADING, PHASE_READY, PHASE_DRAINING };

/* Everything handlers need; made by main before the socket opens. Members after `phase` are
 * set before phase becomes PHASE_READY and constant from then on. */
struct api {
    struct metrics *metrics;
    const char *version;
    const char *backend_name;
    int32_t stall_s;
    atomic_int loaded_permille; /* progress while loading */
    atomic_int phase;           /* enum server_phase */

    const struct tokenizer *tokenizer;
    struct queue *queue;
    void (*cancel)(void *arg, struct request *r); /* engine_cancel */
    void *cancel_arg;
    const char *model_id;
    int32_t vocab;             /* of config.json */
    int32_t max_prompt_tokens; /* what is accepted */
    int32_t page_tokens;
    int64_t started_unix_s;
};

/* The http_handler. arg is the struct api. */
void api_handle(void *arg, struct exchange *x);

#endif
