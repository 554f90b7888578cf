/* The pool of KV pages, reference-counted. Numbers only; the memory is the model's. Engine
 * thread only.
 *
 * A page is free (no reference), held (a live request refers to it, alone or with others), or
 * cached (only checkpoints refer to it). Invariant: n_free + n_held + n_cached == n_total. */
#ifndef PREFILLD_PAGES_H
#define PREFILLD_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

struct pages {
    int32_t n_total, n_free, n_held, n_cached;
    int32_t page_tokens;
    int32_t *free_list;   /* [n_total] */
    int32_t *held_refs;   /* [n_total] references of live requests */
    int32_t *cached_refs; /* [n_total] references of checkpoints */
};

/* All n_total (>= 1) pages are free. Returns 0, ERR_INVALID or ERR_NOMEM. */
int pages_init(struct pages *p, int32_t n_total, int32_t page_tokens);
void pages_fini(struct pages *p);
/* n (>= 0) pages with one held reference each into out[n]; all or none. Returns 0 or
 * ERR_FULL. */
int pages_alloc(struct pages *p, int32_t n, int32_t *out);
/* One more / one less reference, of a live request (hold) or of a checkpoint (cache). The last
 * one frees the page; is_freed tells (may be NULL). Taking away a reference that does not exist
 * aborts, and so does adding one to a free page: it is a bug that would mix two requests'
 * keys and values. */
void pages_hold(struct pages *p, int32_t page);
void pages_cache(struct pages *p, int32_t page);
void pages_unhold(struct pages *p, int32_t page, bool *is_freed);
void pages_uncache(struct pages *p, int32_t page, bool *is_freed);
/* Pages that n_tokens (>= 0) take; INT32_MAX when they would be more. */
int32_t pages_for_tokens(const struct pages *p, int64_t n_tokens);
/* Recounts and compares, O(n_total); for tests and when idle. False also when memory for the
 * count is short. */
bool pages_is_sound(const struct pages *p);

#endif
