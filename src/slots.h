/* The pool of state slots: which are free, held or cached. Numbers only; the memory is the
 * model's. Engine thread only.
 *
 * Invariant: n_free + n_held + n_cached == n_total, always. A slot is handed out in an order
 * that tests may shuffle; nothing may depend on it. */
#ifndef PREFILLD_SLOTS_H
#define PREFILLD_SLOTS_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

struct slots {
    int32_t n_total, n_free, n_held, n_cached;
    int32_t *free_list; /* [n_total] stack of the free ids */
    uint8_t *state;     /* [n_total] enum slot_state */
};

enum slot_state { SLOT_FREE, SLOT_HELD, SLOT_CACHED };

/* All n_total (>= 1) slots are free. Returns 0, ERR_INVALID or ERR_NOMEM. */
int slots_init(struct slots *s, int32_t n_total);
void slots_fini(struct slots *s);
/* A held slot, or -1 when none is free. */
int32_t slots_alloc(struct slots *s);
/* Held or cached to free. Freeing a free or unknown slot aborts: it is a bug that would mix two
 * requests' states. */
void slots_free(struct slots *s, int32_t slot);
/* Held to cached (a checkpoint keeps it) and back. */
void slots_cache(struct slots *s, int32_t slot);
void slots_hold(struct slots *s, int32_t slot);
/* Recounts and compares, O(n_total); for tests and when idle. False also when memory for the
 * count is short. */
bool slots_is_sound(const struct slots *s);

#endif
