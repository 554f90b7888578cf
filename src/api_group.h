/* A group: the engine's requests of one HTTP call, and their one answer.
 *
 * A worker makes it, adds requests and starts it: all of them are queued or none. The engine
 * ends them one by one; when the last has ended, a worker formats the answer. A hang-up, or the
 * failure of one, cancels them all. Every call of the API that needs the engine is a group;
 * each embeds struct group as its first member.
 *
 * The exchange owns the group from group_start on. Engine threads touch only `progress` and the
 * members' flags; a group is formatted by one worker at a time, as group_notice takes care. */
#ifndef PREFILLD_API_GROUP_H
#define PREFILLD_API_GROUP_H

#include "api_fields.h"

/* Numbers that one call may be answered with, some 25 bytes each in the answer and 8 before: a
 * call of many prompts must not take all memory. A prompt of 262,144 tokens with 20 candidates
 * fits. */
enum { GROUP_MAX_NUMBERS = 8 << 20 };

struct group;

struct group_member {
    struct group *group;
    struct request *request; /* a reference */
    atomic_bool is_ended;    /* its results are in place */
    bool is_cut; /* workers: ended by us, as at a stop string: its cancellation is no failure */
};

struct group {
    struct api *api;
    struct exchange *exchange;
    struct api_common common;
    struct group_member *members; /* [cap], n in use */
    struct request **requests;    /* the same requests, as the queue takes them */
    int32_t n, cap;
    /* What its key has in flight, of which n_used_tokens are this one's; NULL: not counted. */
    struct api_key *key;
    int64_t n_used_tokens;
    /* Set before the start: the answer goes out as it grows. */
    bool is_stream;
    /* Set before the first group_add, with update, which is then called after pieces of
     * prompts. */
    bool tells_progress;
    /* Requests that ended, times 2^32, and notices that no worker has taken yet. One number, so
     * that the engine's last touch of the group is the addition that tells of the end. */
    atomic_llong progress;
    atomic_bool is_failing; /* one has failed: the others are being cancelled */

    /* Workers. All but update are needed. */
    void (*update)(struct group *g); /* there is more of something, or requests ended; may be
                                        NULL */
    void (*format)(struct group *g,
                   struct buf *out);  /* all went well: the answer's body, or the
                                                         last of a stream */
    void (*release)(struct group *g); /* calls group_fini and frees what g is part of */
};

/* g is zero but for the callbacks; cap: requests to come. Returns 0 or ERR_NOMEM: release g. */
int group_init(struct group *g, struct api *a, struct exchange *x, const struct api_common *c,
               int32_t cap);
void group_fini(struct group *g);

/* Adds a request for a prompt, whose ids it takes, also on failure. c NULL: nothing is
 * generated; else up to max_new tokens, as c says, from seed. Returns 0 or ERR_NOMEM. Of the
 * request, which is g->requests[g->n - 1], logprobs_from may be set before the start. */
int group_add(struct group *g, struct prompt *p, enum logprobs_mode mode, int32_t n_top,
              const struct choosing *c, int32_t max_new, uint64_t seed);

/* Hands g to the exchange, and its requests to the engine; g may be gone on return. */
void group_start(struct group *g);

/* Workers: ends a member whose text is complete. */
void group_cut(struct group_member *m);

/* Counts a call that ended with status before it was queued, and writes its line. */
void api_count_refused(struct api *a, const struct exchange *x, int status);
/* Counts it, and answers. */
void api_refuse(struct api *a, struct exchange *x, int status, const char *param,
                const char *message);
/* The same for a body that was refused with rc and e. */
void api_refuse_body(struct api *a, struct exchange *x, int rc, const struct json_error *e);
/* The client went before its body was read: nobody reads an answer. */
void api_drop(struct api *a, struct exchange *x);

#endif
