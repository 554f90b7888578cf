#include "slots.h"

#include <stdlib.h>

#include "log.h"

__attribute__((noreturn)) static void die(const char *what, const struct slots *s, int32_t slot)
{
    bool is_known = slot >= 0 && slot < s->n_total;
    log_error("bug=%s slot=%d n_total=%d state=%d", what, slot, s->n_total,
              is_known ? s->state[slot] : -1);
    abort();
}

static void check_state(const char *what, const struct slots *s, int32_t slot,
                        enum slot_state expected)
{
    if (slot < 0 || slot >= s->n_total || s->state[slot] != expected)
        die(what, s, slot);
}

int slots_init(struct slots *s, int32_t n_total)
{
    *s = (struct slots){0};
    if (n_total < 1)
        return ERR_INVALID;
    s->free_list = malloc((size_t)n_total * sizeof(*s->free_list));
    s->state = calloc((size_t)n_total, sizeof(*s->state));
    if (!s->free_list || !s->state) {
        slots_fini(s);
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < n_total; i++)
        s->free_list[i] = n_total - 1 - i;
    s->n_total = s->n_free = n_total;
    return 0;
}

void slots_fini(struct slots *s)
{
    free(s->free_list);
    free(s->state);
    *s = (struct slots){0};
}

int32_t slots_alloc(struct slots *s)
{
    if (s->n_free == 0)
        return -1;
    int32_t slot = s->free_list[--s->n_free];
    check_state("slots_alloc_of_used", s, slot, SLOT_FREE);
    s->state[slot] = SLOT_HELD;
    s->n_held++;
    return slot;
}

void slots_free(struct slots *s, int32_t slot)
{
    if (slot < 0 || slot >= s->n_total || s->state[slot] == SLOT_FREE)
        die("slots_free_of_free_or_unknown", s, slot);
    if (s->state[slot] == SLOT_HELD)
        s->n_held--;
    else
        s->n_cached--;
    s->state[slot] = SLOT_FREE;
    s->free_list[s->n_free++] = slot;
}

void slots_cache(struct slots *s, int32_t slot)
{
    check_state("slots_cache_of_not_held", s, slot, SLOT_HELD);
    s->state[slot] = SLOT_CACHED;
    s->n_held--;
    s->n_cached++;
}

void slots_hold(struct slots *s, int32_t slot)
{
    check_state("slots_hold_of_not_cached", s, slot, SLOT_CACHED);
    s->state[slot] = SLOT_HELD;
    s->n_cached--;
    s->n_held++;
}

bool slots_is_sound(const struct slots *s)
{
    int32_t n[3] = {0};
    bool *is_listed = calloc((size_t)s->n_total + 1, sizeof(bool));
    bool ok = is_listed != NULL;
    for (int32_t i = 0; ok && i < s->n_free; i++) {
        int32_t slot = s->free_list[i];
        ok = slot >= 0 && slot < s->n_total && !is_listed[slot];
        if (ok)
            is_listed[slot] = true;
    }
    for (int32_t i = 0; ok && i < s->n_total; i++) {
        ok = s->state[i] <= SLOT_CACHED && is_listed[i] == (s->state[i] == SLOT_FREE);
        if (ok)
            n[s->state[i]]++;
    }
    free(is_listed);
    return ok && n[SLOT_FREE] == s->n_free && n[SLOT_HELD] == s->n_held &&
           n[SLOT_CACHED] == s->n_cached;
}
