/* Sessions on their way out of a daemon and into it, as files (state_file.h).
 *
 * A transfer belongs to its exchange. Workers look at it, one at a time (exchange_start_looks):
 * they bring parts into the file's form or the pools', add them up, and ask the engine for
 * copies between the pools and the transfer's stages. So it holds a few parts, whatever the
 * session's size. Only so many run at a time; one more is told to come back. */
#ifndef PREFILLD_API_TRANSFER_H
#define PREFILLD_API_TRANSFER_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine.h"
#include "state_file.h"

enum { TRANSFER_STAGES = 4, MAX_TRANSFERS = 4 };

/* Memory that parts are copied through; the daemon's. */
struct transfer_room {
    void *stages[TRANSFER_STAGES]; /* state_max_raw each */
    bool is_taken;
};

struct transfers {
    pthread_mutex_t lock; /* a leaf */
    struct transfer_room rooms[MAX_TRANSFERS];
    struct state_shape shape;
    const struct backend_ops *ops;
    struct model *model;
    struct engine *engine;
    int32_t max_tokens; /* of a session that comes in */
    int64_t max_file_bytes;
};

/* Allocates the stages. max_tokens: of a session. Returns 0 or ERR_NOMEM; transfers_fini also
 * then. */
int transfers_init(struct transfers *t, struct model *m, struct engine *en,
                   const struct state_shape *z, const struct backend_ops *ops,
                   int32_t max_tokens);
void transfers_fini(struct transfers *t);
/* NULL: all are taken. Any thread. */
struct transfer_room *transfers_take(struct transfers *t);
void transfers_give(struct transfers *t, struct transfer_room *r);

/* A copy that the engine was asked for. */
struct exchange;

struct transfer_copy {
    struct engine_job job;
    struct exchange *exchange;
    bool is_out;         /* the worker's: asked for, and not seen back */
    atomic_bool is_back; /* set by the engine */
};

/* Asks the engine for c->job. A notice comes when it is done. */
void transfer_ask(struct transfers *t, struct transfer_copy *c);
/* Is it with the worker? First time after it came back: *rc is its result, else 0. */
bool transfer_is_here(struct transfer_copy *c, int *rc);

/* A transfer has ended: counts it, and writes its line. status 0: nobody was there any more. */
void transfer_finish(struct metrics *m, const struct exchange *x, bool is_in, int status,
                     int32_t n_tokens, int64_t n_bytes);

#endif
