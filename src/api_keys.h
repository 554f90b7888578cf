/* Keys: who may call, and how much of each key's work is under way at a time.
 *
 * The file is read on the main thread, at start and on reload; any thread asks. A key that was
 * taken out of the file lets nobody in, and is kept only while calls that it let in are under
 * way. One lock, a leaf. */
#ifndef PREFILLD_API_KEYS_H
#define PREFILLD_API_KEYS_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

struct api_key_limits {
    int64_t max_requests, max_tokens; /* of one key, in flight; 0: any number */
};

struct api_key;  /* one, with what it has in flight: queued or running */
struct api_keys; /* all of them */

/* No keys, and none is asked for. NULL: memory is short. */
struct api_keys *api_keys_new(void);
void api_keys_free(struct api_keys *k); /* NULL is legal */

/* The keys of path (one a line; NULL: none, and none is asked for) replace those there. Returns
 * 0, or ERR_IO, ERR_INVALID (no key in it) or ERR_NOMEM; all then stays as it is. */
int api_keys_read(struct api_keys *k, const char *path, struct errmsg *e);

/* Is authorization (the header's value, or NULL) enough? */
bool api_keys_allow(struct api_keys *k, const char *authorization);

/* Counts a call that was let in among what its key has in flight until api_keys_leave; *key is
 * NULL when it is nobody's, and not counted. Returns 0, ERR_FULL when there would be more than
 * l then, or ERR_NOMEM. */
int api_keys_enter(struct api_keys *k, const char *authorization,
                   const struct api_key_limits *l, int64_t n_requests, int64_t n_tokens,
                   struct api_key **key);
void api_keys_leave(struct api_keys *k, struct api_key *key, int64_t n_requests,
                    int64_t n_tokens);

#endif
