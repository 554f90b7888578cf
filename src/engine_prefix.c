/* Prefixes that prompts share: who begins at whose state, where states are kept, and what is
 * given up for room.
 *
 * A kept state (checkpoint) is a node of the tree with a slot of its own, cached, and a
 * reference on every page before it. It lies at a multiple of the page size, which is one of
 * 64, so that it has the bits of a cold start and no page is written by two. A request that
 * begins there gets a copy of the slot in its first step; of a piece that passes it the layers
 * write the state to its slot, too, so no piece is cut for it. Both are part of the step, so
 * the order of steps is theirs.
 *
 * When a request is admitted the nodes it will pass become its own (maker). Those where another
 * waiting prompt parts from it, and its end, are pending: its state is kept there. A request
 * that could begin at a pending node is parked until the step that makes it is launched. */
#include <stdlib.h>

#include "config.h"
#include "engine_impl.h"

enum { CHECKPOINT_TOKENS = 2048, MIN_SHARED_TOKENS = 256, CACHE_SHARE = 500 };

int engine_prefix_open(struct engine *en, const struct engine_config *c)
{
    int64_t share = c->cache_share ? c->cache_share : CACHE_SHARE;
    en->checkpoint_tokens = c->checkpoint_tokens ? c->checkpoint_tokens : CHECKPOINT_TOKENS;
    en->min_shared_tokens = c->min_shared_tokens ? c->min_shared_tokens : MIN_SHARED_TOKENS;
    en->max_cached_slots = (int32_t)(en->slots.n_total * share / 1000);
    en->max_cached_pages = (int32_t)(en->pages.n_total * share / 1000);
    return prefix_init(&en->prefix, en->pages.page_tokens);
}

/* ---- what a request takes ---- */

/* hit NULL: no kept prefix. */
static struct engine_start start_of(const struct engine *en, const struct request *r,
                                    const struct prefix_node *hit)
{
    if (!hit)
        return engine_session_start(en, r);
    return (struct engine_start){.depth = hit->depth,
                                 .slot = hit->slot,
                                 .pages = hit->pages,
                                 .n_shared = hit->n_pages,
                                 .copy_page = -1};
}

static void begin_at(struct request *r, const struct engine_start *at)
{
    r->item.n_planned = at->depth;
    r->item.n_pages = r->n_all_pages - at->n_shared;
}

/* The deepest state that r can begin at: it must be told the numbers of the tokens before. */
static struct prefix_node *nearest(const struct request *r)
{
    struct prefix_node *v = r->path ? prefix_nearest(r->use) : NULL;
    while (v && r->wants_rows && !prefix_rows_cover(v, r))
        v = v->parent ? prefix_nearest(v->parent) : NULL;
    return v;
}

static void begin_at_nearest(struct engine *en, struct request *r)
{
    struct engine_start at = start_of(en, r, nearest(r));
    begin_at(r, &at);
}

void engine_prefix_enter(struct engine *en, struct request *r)
{
    /* The row of a token comes from the token before it, which must be computed, or kept. So
     * only a longer prompt could begin where r ends: what r keeps lies before its last
     * token. */
    int32_t n_use = r->n_prompt - 1, n_end = r->n_prompt - 1, P = en->pages.page_tokens;
    r->wants_rows = r->logprobs == LOGPROBS_ALL && r->logprobs_from <= 1;
    if (r->logprobs == LOGPROBS_ALL && !r->wants_rows && r->logprobs_from - 1 < n_use)
        n_use = r->logprobs_from - 1;
    if (r->shares_once)
        n_end = n_use;
    begin_at_nearest(en, r);
    if (!r->shares || r->source || n_end < P)
        return;
    r->path = prefix_insert(&en->prefix, r->share_key, r->n_share_key, r->ids, n_end);
    r->use = r->path ? prefix_above(&en->prefix, r->path, n_use - n_use % P) : NULL;
    if (!r->use) { /* memory is short: it goes alone */
        prefix_unref(&en->prefix, r->path);
        r->path = NULL;
        return;
    }
    prefix_add_user(r->use, 1);
    begin_at_nearest(en, r);
}

/* ---- a node's state ---- */

/* v has no state any more, nor is to have one. wipe: as engine_free_slot. */
static void give_up(struct engine *en, struct prefix_node *v, bool wipe)
{
    for (int32_t i = 0; i < v->n_pages; i++) {
        bool is_freed;
        pages_uncache(&en->pages, v->pages[i], &is_freed);
        if (is_freed && (PREFILLD_POISON || wipe))
            model_poison_page(en->model, v->pages[i]);
    }
    if (v->slot >= 0) {
        engine_free_slot(en, v->slot, wipe);
        en->n_kept_slots--;
        v->slot = -1;
    }
    free(v->pages);
    v->pages = NULL;
    v->n_pages = 0;
    v->state = PREFIX_NONE;
}

static void drop(struct engine *en, struct prefix_node *v, bool is_bad)
{
    prefix_unrank(&en->prefix, v, false);
    give_up(en, v, is_bad);
    prefix_unref(&en->prefix, v);
}

static void drop_for_room(struct engine *en, struct prefix_node *v)
{
    atomic_fetch_add(&en->metrics->prefix_evicted, 1);
    prefix_unrank(&en->prefix, v, true);
    give_up(en, v, false);
    prefix_unref(&en->prefix, v);
}

static void unwant(struct request *r)
{
    if (r->wanted)
        r->wanted->n_wanted--;
    r->wanted = NULL;
}

/* Those that waited for v wait for their turn: with its state, or with what there is. */
static void unpark(struct engine *en, struct prefix_node *v)
{
    struct request *r;
    while ((r = v->parked) != NULL) {
        v->parked = r->parked_next;
        r->parked_at = NULL;
        unwant(r);
        if (v->state == PREFIX_READY) {
            r->wanted = v;
            v->n_wanted++;
        }
        begin_at_nearest(en, r);
        sched_unpark(en->sched, &r->item);
    }
}

static bool pend(struct prefix_node *v, struct request *maker, int32_t page_tokens)
{
    v->pages = malloc((size_t)(v->depth / page_tokens) * sizeof(*v->pages));
    if (!v->pages)
        return false;
    v->state = PREFIX_PENDING;
    v->maker = maker;
    v->is_spare = false;
    prefix_ref(v);
    return true;
}

static void unpend(struct engine *en, struct prefix_node *v)
{
    give_up(en, v, false);
    unpark(en, v);
    prefix_unref(&en->prefix, v);
}

/* Tokens that v's state saves, and the bytes that it alone takes. Spare ones above it, which
 * nobody may ever want and which go first, make it worth no less. */
static int32_t saved_by(const struct engine *en, const struct prefix_node *v, double *bytes)
{
    const struct model_sizes *z = model_sizes_of(en->model);
    const struct prefix_node *above = v->parent;
    /* Those with a slot are kept, or will be by a step under way. */
    while (above && (above->slot < 0 || (above->is_spare && !v->is_spare)))
        above = above->parent;
    int32_t n = v->depth - (above ? above->depth : 0);
    *bytes = (double)z->slot_bytes + (double)z->page_bytes * (n / en->pages.page_tokens);
    return n;
}

static int rank(struct engine *en, struct prefix_node *v)
{
    double bytes;
    int32_t n = saved_by(en, v, &bytes);
    return prefix_rank(&en->prefix, v, n, bytes);
}

/* ---- room ---- */

/* What a waiting request was unparked for goes only when nothing runs that could end instead;
 * and what the step being packed reads stays. */
static bool can_evict(const struct engine *en, const struct prefix_node *v,
                      const struct prefix_node *except)
{
    return v != except && v->used_step != en->plan_number && !v->parked &&
           (v->n_wanted == 0 || en->n_admitted == 0);
}

static struct prefix_node *least(const struct engine *en, const struct prefix_node *except)
{
    struct prefix_node *found = NULL;
    for (int32_t i = 0; i < en->prefix.n_ranked; i++) {
        struct prefix_node *v = en->prefix.ranking[i];
        if (can_evict(en, v, except) && (!found || v->worth < found->worth))
            found = v;
        if (found && i == 0) /* the first of the heap */
            break;
    }
    return found;
}

static bool evict(struct engine *en, const struct prefix_node *except)
{
    struct prefix_node *v = least(en, except);
    if (v)
        drop_for_room(en, v);
    return v != NULL;
}

bool engine_prefix_evict(struct engine *en)
{
    return evict(en, NULL);
}

/* Pages that are free or would be if all that is kept were evicted, but for those of `at`. */
static int32_t pages_in_reach(const struct engine *en, const struct engine_start *at)
{
    int32_t n = en->pages.n_free + en->pages.n_cached;
    for (int32_t i = 0; i < at->n_shared; i++)
        n -= en->pages.held_refs[at->pages[i]] == 0;
    return n;
}

/* Evicts until r, which begins at *hit (NULL: elsewhere), has a slot and its pages. When
 * nothing else could make room *hit is given up, too, and is then another, and so is a
 * session. */
static bool make_room(struct engine *en, struct request *r, struct prefix_node **hit)
{
    for (;;) {
        struct engine_start at = start_of(en, r, *hit);
        int32_t own = r->n_all_pages - at.n_shared;
        begin_at(r, &at);
        if (en->slots.n_free > 0 && en->pages.n_free >= own)
            return true;
        if (pages_in_reach(en, &at) >= own &&
            (evict(en, *hit) || engine_session_evict(en, false)))
            continue;
        if (en->n_admitted > 0)
            return false;
        if (*hit) {
            drop_for_room(en, *hit);
            *hit = nearest(r);
        } else if (!engine_session_evict(en, true)) {
            return false;
        }
    }
}

/* A slot for v's state. is_wanted: others wait for it; else it must be worth more than what
 * goes for it. */
static bool get_slot(struct engine *en, struct prefix_node *v, bool is_wanted)
{
    double bytes;
    int32_t n = saved_by(en, v, &bytes);
    struct prefix_node *above = v->parent ? prefix_nearest(v->parent) : NULL;
    bool is_full =
        en->slots.n_free == 0 || (!is_wanted && en->n_kept_slots >= en->max_cached_slots);
    if (is_full) {
        struct prefix_node *u = least(en, above);
        if (!u || (!is_wanted && u->worth > prefix_worth(&en->prefix, v, n, bytes)))
            return false;
        drop_for_room(en, u);
    }
    v->slot = slots_alloc(&en->slots);
    if (v->slot < 0)
        return false;
    slots_cache(&en->slots, v->slot);
    en->n_kept_slots++;
    return true;
}

/* ---- admission ---- */

/* Whether r, which runs, has v ahead. A piece of the plan under way is not packed yet: what it
 * passes is ahead. */
static bool is_ahead(const struct prefix_node *v, const struct request *r)
{
    return r->item.n_planned < v->depth;
}

/* Whether v's maker, which is under way, will leave its state there. */
static bool ask(const struct engine *en, struct prefix_node *v)
{
    return v->state == PREFIX_PENDING ||
           (is_ahead(v, v->maker) && pend(v, v->maker, en->pages.page_tokens));
}

/* Whether r, which begins at v when its maker has passed it, can be told all its numbers. */
static bool tells_rows(const struct prefix_node *v, const struct request *r)
{
    const struct request *m = v->maker;
    return !r->wants_rows ||
           (m->wants_rows && m->n_top >= r->n_top && m->ids[v->depth] == r->ids[v->depth]);
}

static void park_at(struct request *r, struct prefix_node *v)
{
    r->parked_at = v;
    r->parked_next = v->parked;
    v->parked = r;
}

/* Parks r where it would begin further down than at `from` tokens. */
static bool park(struct engine *en, struct request *r, int32_t from)
{
    for (struct prefix_node *v = r->use; v && v->depth > from; v = v->parent) {
        /* The state is there, and the numbers are in a step under way. */
        if (v->state == PREFIX_READY && r->wants_rows && v->maker && tells_rows(v, r) &&
            v->maker->n_computed < v->depth) {
            park_at(r, v);
            return true;
        }
        bool is_kept = v->state == PREFIX_PENDING;
        if (!v->maker || v->maker->item.priority > r->item.priority || !tells_rows(v, r) ||
            (!is_kept && v->depth - from < en->min_shared_tokens) || !ask(en, v))
            continue;
        if (v->slot < 0 && !get_slot(en, v, true))
            continue;
        park_at(r, v);
        return true;
    }
    return false;
}

/* r was admitted and begins at n_planned tokens: what lies ahead is its own, unless another
 * makes it. */
static void claim(struct engine *en, struct request *r, int32_t n_planned)
{
    const struct prefix_node *below = NULL;
    for (struct prefix_node *v = r->path; v && v->depth > n_planned; v = v->parent) {
        int32_t n = v->depth - n_planned;
        int64_t n_others = v->n_users - (below ? below->n_users : 0);
        bool is_branch = n_others * n >= en->min_shared_tokens ||
                         (v->n_children > 1 && n >= en->min_shared_tokens);
        bool is_end = v == r->path && !r->shares_once && n >= en->checkpoint_tokens;
        below = v;
        if (!v->maker || !is_ahead(v, v->maker))
            v->maker = r;
        if (v->state == PREFIX_NONE && (is_branch || is_end))
            pend(v, v->maker, en->pages.page_tokens);
    }
}

enum sched_answer engine_try_admit(void *arg, struct sched_item *item)
{
    struct engine *en = arg;
    struct request *r = engine_request_of(item);
    struct prefix_node *hit = nearest(r);
    if (r->path && park(en, r, hit ? hit->depth : 0))
        return SCHED_PARK;
    if (!make_room(en, r, &hit))
        return SCHED_NO_ROOM;
    struct engine_start at = start_of(en, r, hit);
    engine_admit(en, r, &at);
    if (!r->path)
        return SCHED_ADMIT;
    atomic_fetch_add(&en->metrics->prefix_queries, 1);
    atomic_fetch_add(&en->metrics->prefix_query_tokens, r->n_prompt);
    if (hit) {
        atomic_fetch_add(&en->metrics->prefix_hits, 1);
        atomic_fetch_add(&en->metrics->prefix_hit_tokens, hit->depth);
        if (r->wants_rows)
            prefix_rows_load(hit, r);
        hit->used_step = en->plan_number;
        hit->is_spare = false;
        rank(en, hit);
    }
    r->kept_at = item->n_planned;
    unwant(r);
    prefix_add_user(r->use, -1);
    claim(en, r, item->n_planned);
    return SCHED_ADMIT;
}

/* ---- keeping ---- */

/* The piece of r added last begins at `start` and passes v, or ends there. */
static void keep(struct engine *en, struct step *s, struct request *r, struct prefix_node *v,
                 int32_t start)
{
    bool is_wanted = v->parked || (r->shares_once && v->n_users > 0);
    if (v->slot < 0 && ((r->shares_once && !is_wanted) || !get_slot(en, v, is_wanted))) {
        unpend(en, v);
        return;
    }
    v->n_pages = v->depth / en->pages.page_tokens;
    for (int32_t i = 0; i < v->n_pages; i++) {
        v->pages[i] = r->pages[i];
        pages_cache(&en->pages, v->pages[i]);
    }
    v->made_by = r->item.seq;
    step_save(s, v->depth - start, v->slot);
    s->taken[s->n_taken++] = v;
}

/* The first node of r's path in (at, end] where its state is to be kept; NULL: there is
 * none. */
static struct prefix_node *pending_in(const struct request *r, int32_t at, int32_t end)
{
    struct prefix_node *found = NULL;
    for (struct prefix_node *v = r->path; v && v->depth > at; v = v->parent)
        if (v->depth <= end && v->state == PREFIX_PENDING && v->maker == r)
            found = v;
    return found;
}

/* Where r, which has come to `at` tokens, leaves a spare state next. */
static int32_t checkpoint_after(const struct engine *en, const struct request *r, int32_t at)
{
    int32_t n = r->kept_at + en->checkpoint_tokens, P = en->pages.page_tokens;
    n = n > at ? n : at + 1;
    return (n + P - 1) / P * P;
}

void engine_prefix_pack(struct engine *en, struct step *s, struct request *r, int32_t start,
                        int32_t end)
{
    if (!r->path)
        return;
    end = end < r->path->depth ? end : r->path->depth;
    struct prefix_node *v;
    for (int32_t at = start; (v = pending_in(r, at, end)) != NULL;) {
        at = v->depth;
        keep(en, s, r, v, start);
    }
    /* Spare ones in what room is left. */
    for (int32_t at = start; !r->shares_once && at < end; r->kept_at = at) {
        int32_t next = checkpoint_after(en, r, at);
        v = pending_in(r, at, end);
        at = v && v->depth <= next ? v->depth : next;
        if (at > end)
            return;
        if (v && v->depth == at)
            continue;
        v = prefix_above(&en->prefix, r->path, at);
        if (!v || v->state != PREFIX_NONE || !pend(v, r, en->pages.page_tokens))
            continue; /* it is kept, or memory is short */
        v->is_spare = true;
        keep(en, s, r, v, start);
    }
}

void engine_prefix_launched(struct engine *en, struct step *s, bool is_whole)
{
    for (int32_t i = 0; i < s->n_taken; i++) {
        struct prefix_node *v = s->taken[i];
        if (!is_whole || rank(en, v) != 0) {
            unpend(en, v);
            continue;
        }
        v->state = PREFIX_READY;
        atomic_fetch_add(&en->metrics->prefix_kept, 1);
        unpark(en, v);
    }
    s->n_taken = 0;
}

void engine_prefix_publish(struct engine *en, struct request *r)
{
    if (!r->path || !r->wants_rows)
        return;
    for (struct prefix_node *v = r->path; v->parent; v = v->parent) {
        if (v->depth > r->n_computed)
            continue;
        if (prefix_rows_top(v) >= r->n_top)
            break; /* and so it is above */
        if (prefix_rows_store(v, r) != 0)
            break;
        if (v->parked && v->state == PREFIX_READY)
            unpark(en, v);
    }
}

/* ---- leaving ---- */

static void leave_parked(struct request *r)
{
    struct request **at = r->parked_at ? &r->parked_at->parked : NULL;
    while (at && *at != r)
        at = &(*at)->parked_next;
    if (at)
        *at = r->parked_next;
    r->parked_at = NULL;
}

void engine_prefix_leave(struct engine *en, struct request *r, bool is_bad)
{
    if (!r->path)
        return;
    leave_parked(r);
    unwant(r);
    if (r->slot < 0)
        prefix_add_user(r->use, -1);
    for (struct prefix_node *v = r->path; v; v = v->parent) {
        if (v->maker == r) {
            v->maker = NULL;
            if (v->state == PREFIX_PENDING)
                unpend(en, v);
            else
                unpark(en, v);
        }
        if (is_bad && prefix_rows_by(v) == r->item.seq) {
            prefix_rows_free(v->rows);
            v->rows = NULL;
        }
        if (v->state == PREFIX_READY &&
            ((is_bad && v->made_by == r->item.seq) ||
             (r->shares_once && v->n_users == 0 && v->n_wanted == 0)))
            drop(en, v, is_bad);
    }
    prefix_unref(&en->prefix, r->path);
    r->path = r->use = NULL;
}

void engine_prefix_trim(struct engine *en)
{
    while (en->pages.n_cached > en->max_cached_pages) {
        struct prefix_node *v = least(en, NULL);
        if (!v || v->n_wanted > 0)
            break;
        drop_for_room(en, v);
    }
}
