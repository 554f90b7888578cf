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

int pages_init(struct pages *p, int32_t n_total, int32_t page_tokens);
void pages_fini(struct pages *p);
/* n pages with one held reference each into out[n]; all or none. Returns 0 or ERR_FULL. */
int pages_alloc(struct pages *p, int32_t n, int32_t *out);
/* One more / one less reference. The last one frees the page; is_freed tells (may be NULL).
 * A reference that does not exist aborts. */
void pages_hold(struct pages *p, int32_t page);
void pages_cache(struct pages *p, int32_t page);
void pages_unhold(struct pages *p, int32_t page, bool *is_freed);
void pages_uncache(struct pages *p, int32_t page, bool *is_freed);
/* Pages that n_tokens take. */
int32_t pages_for_tokens(const struct pages *p, int64_t n_tokens);
bool pages_is_sound(const struct pages *p);

#endif
