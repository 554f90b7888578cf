/* The HTTP API: bodies to requests, results to answers (../shared/api.md, README).
 *
 * api_handle runs on a worker thread for each complete HTTP request; answers that need the
 * engine are formatted on a worker, too, after the engine's done(). Knows JSON, statuses and
 * messages; touches neither sockets nor the device. */
#ifndef PREFILLD_API_H
#define PREFILLD_API_H

#include <stdatomic.h>
#include <stdint.h>

#include "api_keys.h"
#include "api_steps.h"
#include "http.h"
#include "metrics.h"
#include "queue.h"
#include "session.h"
#include "steps.h"
#include "tokenizer.h"

struct transfers;

enum server_phase { PHASE_LOADING, PHASE_READY, PHASE_DRAINING };

/* What needs a key where there are keys. */
enum api_key_scope {
    API_KEY_CALLS,          /* /v1/ and all that compute */
    API_KEY_ALL_BUT_HEALTH, /* all but /health and /ready */
    API_KEY_ALL
};

/* Everything handlers need; made by main before the socket opens. Members after `phase` are
 * set before phase becomes PHASE_READY and constant from then on. */
struct api {
    struct metrics *metrics;
    const char *version;
    const char *backend_name;
    int32_t stall_s;
    int32_t key_scope;          /* enum api_key_scope */
    atomic_int loaded_permille; /* progress while loading */
    atomic_int phase;           /* enum server_phase */

    const struct tokenizer *tokenizer; /* NULL: ids only */
    struct queue *queue;
    struct steps *steps;
    struct steps_readers readers;
    void (*cancel)(void *arg, struct request *r); /* engine_cancel */
    void *cancel_arg;
    /* engine_stall, of cancel_arg; NULL: there are no calls for debugging. */
    void (*stall)(void *arg, int64_t stall_us);
    const char *model_id;
    int32_t vocab;             /* of config.json */
    int32_t max_prompt_tokens; /* what is accepted */
    int32_t max_adjust;        /* of one request, among those a step may have; 0: any number */
    int32_t page_tokens;
    struct sessions *sessions;
    struct transfers *transfers;        /* api_transfer.h */
    int32_t session_ttl_s;              /* of those that do not say */
    int32_t kv_lease_s;                 /* of prompts kept for a decode server; 0: none are */
    char engine_id[SESSION_ID_MAX + 1]; /* this run of the daemon, in handles */
    char kv_host[256];                  /* "": a decode server cannot be told */
    int32_t kv_port;
    bool prefix_cache; /* calls may share what their prompts begin with */
    int64_t started_unix_s;

    struct api_keys *keys;            /* owned; made by the first api_read_keys */
    struct api_key_limits key_limits; /* of each key */
    bool hands_over; /* a successor gets the sockets: what comes while draining is answered */
};

/* Reads the keys of api_key_file (one a line; NULL: calls need no key), at start and on reload;
 * from then on they count. Main thread. Returns 0, or ERR_IO, ERR_INVALID (no key in it) or
 * ERR_NOMEM; the former keys then stay. */
int api_read_keys(struct api *a, const char *api_key_file, struct errmsg *e);
void api_close(struct api *a);

/* The callbacks of http_config; arg is the struct api. api_admit refuses before the body is
 * read what needs no body to be refused: loading, no such path or method, no key, draining. */
void api_admit(void *arg, struct exchange *x);
/* POST /v1/sessions takes a file as it comes. */
int64_t api_intake(void *arg, const struct exchange *x);
enum work_lane api_lane(void *arg, const struct exchange *x);
void api_handle(void *arg, struct exchange *x);
void api_refused(void *arg, const struct exchange *x, int status);

#endif
