/* Keys: who may call, and how much of each key's work is under way at a time.
 *
 * A set is read on the main thread, at start and on reload, and never changes; those before it stay,
 * since an I/O thread may be looking at one. What is in flight is counted for a key's text, whatever
 * set it is from. Any thread asks. */
#ifndef PREFILLD_API_KEYS_H
#define PREFILLD_API_KEYS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "err.h"

/* Of one key, queued or running. */
struct key_use {
    atomic_llong n_requests, n_tokens;
};

struct key_limits {
    int64_t max_requests, max_tokens; /* in flight; 0: any number */
};

struct api_keys; /* a set, and those before it */

/* Reads the keys of path (one a line; NULL: none, and none is asked for) in front of older, which
 * may be NULL. Returns 0, or ERR_IO, ERR_INVALID (no key in it) or ERR_NOMEM; older then stays as it
 * is. */
int api_keys_read(const char *path, struct api_keys *older, struct api_keys **out,
                  struct errmsg *e);
void api_keys_free(struct api_keys *newest); /* all of them; NULL is legal */

/* Is authorization (the header's value, or NULL) enough? */
bool api_keys_allow(const struct api_keys *k, const char *authorization);
/* Whose it is, in any of the sets; NULL: nobody's. */
struct key_use *api_keys_use(const struct api_keys *k, const char *authorization);

/* Adds n_requests with n_tokens, unless there would be more than l then; key_use_leave takes them
 * off again. */
bool key_use_enter(struct key_use *u, const struct key_limits *l, int64_t n_requests,
                   int64_t n_tokens);
void key_use_leave(struct key_use *u, int64_t n_requests, int64_t n_tokens);

#endif
