/* What sessions hold of the pools: a slot, cached, and references on the pages of their tokens.
 *
 * A request that continues or forks one gets a copy of its slot and of its last page, where
 * that is not full, in its first step, and shares the pages before; so the session is as it was
 * until the request has ended well. */
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "engine_impl.h"

struct engine_start engine_session_start(const struct engine *en, const struct request *r)
{
    const struct session *s = r->source;
    struct engine_start at = {.slot = -1, .copy_page = -1};
    if (!s || s->slot < 0)
        return at;
    at = (struct engine_start){.depth = r->n_source,
                               .slot = s->slot,
                               .pages = s->pages,
                               .n_shared = r->n_source / en->pages.page_tokens,
                               .copy_page = -1};
    if (at.n_shared < s->n_pages)
        at.copy_page = s->pages[at.n_shared];
    return at;
}

/* Gives back what s holds. */
static void let_go(struct engine *en, struct session *s)
{
    for (int32_t i = 0; i < s->n_pages; i++) {
        bool is_freed;
        pages_uncache(&en->pages, s->pages[i], &is_freed);
        if (is_freed && PREFILLD_POISON)
            model_poison_page(en->model, s->pages[i]);
    }
    if (s->slot >= 0)
        engine_free_slot(en, s->slot, false);
    free(s->pages);
    s->pages = NULL;
    s->n_pages = 0;
    s->slot = -1;
}

void engine_session_tick(struct engine *en)
{
    struct session *s;
    while (en->sessions && (s = sessions_next_dead(en->sessions, request_now_us())) != NULL) {
        let_go(en, s);
        sessions_unref(en->sessions, s);
    }
}

bool engine_session_evict(struct engine *en, bool is_needed)
{
    struct session *s = en->sessions ? sessions_evict(en->sessions, is_needed) : NULL;
    if (!s)
        return false;
    let_go(en, s);
    sessions_unref(en->sessions, s);
    return true;
}

bool engine_session_keep(struct engine *en, struct request *r)
{
    struct session *s = r->keeps;
    if (!s || r->outcome != OUTCOME_OK)
        return false;
    /* All but the last token generated, if any was, which was not computed. */
    int32_t n = r->n_computed, n_pages = pages_for_tokens(&en->pages, n);
    int32_t *pages = malloc((size_t)n_pages * sizeof(*pages));
    if (!pages || sessions_keep(en->sessions, s, r->ids, n, &r->keep_terms) != 0) {
        free(pages);
        return false;
    }
    for (int32_t i = 0; i < n_pages; i++) {
        pages[i] = r->pages[i];
        pages_cache(&en->pages, pages[i]);
    }
    let_go(en, s);
    s->slot = r->slot;
    s->pages = pages;
    s->n_pages = n_pages;
    slots_cache(&en->slots, s->slot);
    memcpy(r->kept_as, s->id, sizeof(s->id));
    return true;
}

void engine_session_leave(struct engine *en, struct request *r)
{
    if (r->source)
        sessions_end(en->sessions, r->source, r->is_fork);
    if (r->keeps)
        sessions_unref(en->sessions, r->keeps);
    r->source = r->keeps = NULL;
}
