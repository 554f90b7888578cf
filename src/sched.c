/* Heaps, four children a node, over one table of entries: the waiting, the running and the
 * generating by rank, and those with a deadline by deadline. Heap nodes carry their keys, and
 * places in the heaps are kept in arrays of their own: items lie in requests, some kilobytes
 * apart, and touching one for each level of a heap would cost a cache miss each. */
#include "sched.h"

#include <assert.h>
#include <stdlib.h>

enum { WAYS = 4 }; /* children of a node; with nodes of 16 bytes one line of the cache */

/* Ordered as one number of 128 bits: priority, key, seq, and below them the entry. */
struct node {
    uint64_t rank; /* priority above the key's KEY_BITS */
    uint64_t tie;  /* seq above the entry's ENTRY_BITS */
};

enum { KEY_BITS = 53, ENTRY_BITS = 22 };
#define KEY_MAX ((INT64_C(1) << KEY_BITS) - 1) /* 285 years of microseconds */
#define ENTRY_MAX ((INT32_C(1) << ENTRY_BITS) - 1)

struct heap {
    struct node *nodes; /* [cap] */
    int32_t *place;     /* [cap] of each entry in nodes, or -1 */
    int32_t n;
};

/* What a plan reads of an item, beside the node. */
struct entry {
    struct sched_item *item; /* NULL: not in use */
    int64_t arrival_us;
    int32_t n_pages;
    int32_t n_left; /* tokens not yet planned */
};

struct sched {
    struct sched_config c;
    double rate;         /* in use, tokens a microsecond; 0 before the first plan */
    double us_per_token; /* 1 / rate; 0 before the first plan */
    struct heap waiting, running, decoding, deadlines;
    struct entry *entries; /* [cap] */
    int32_t *free_entries; /* [cap] stack */
    int32_t n_free, cap;
    int64_t backlog_tokens;
};

/* ---- heaps ---- */

static struct node node_make(int32_t priority, int64_t key_us, uint64_t seq, int32_t i_entry)
{
    int64_t key = key_us < KEY_MAX ? key_us : KEY_MAX;
    return (struct node){(uint64_t)(priority + SCHED_MAX_PRIORITY) << KEY_BITS | (uint64_t)key,
                         seq << ENTRY_BITS | (uint64_t)i_entry};
}

static int32_t entry_of(const struct node *x)
{
    return (int32_t)(x->tie & ENTRY_MAX);
}

/* Without branches: which of two children comes first is a coin toss. */
static bool comes_before(const struct node *a, const struct node *b)
{
    return ((unsigned __int128)a->rank << 64 | a->tie) <
           ((unsigned __int128)b->rank << 64 | b->tie);
}

static void heap_set(struct heap *h, int32_t i, const struct node *x)
{
    h->nodes[i] = *x;
    h->place[entry_of(x)] = i;
}

/* Puts x at i or higher up. */
static void heap_rise(struct heap *h, int32_t i, struct node x)
{
    for (int32_t up; i > 0 && comes_before(&x, &h->nodes[up = (i - 1) / WAYS]); i = up)
        heap_set(h, i, &h->nodes[up]);
    heap_set(h, i, &x);
}

/* The first in rank of the children of i, or -1. */
static int32_t first_child(const struct heap *h, int32_t i)
{
    int32_t child = WAYS * i + 1, end = child + WAYS;
    if (child >= h->n)
        return -1;
    if (end <= h->n) { /* of two pairs the winners: shorter than one after another */
        int32_t a = child + comes_before(&h->nodes[child + 1], &h->nodes[child]);
        int32_t b = child + 2 + comes_before(&h->nodes[child + 3], &h->nodes[child + 2]);
        return comes_before(&h->nodes[b], &h->nodes[a]) ? b : a;
    }
    int32_t first = child;
    while (++child < h->n)
        first = comes_before(&h->nodes[child], &h->nodes[first]) ? child : first;
    return first;
}

/* Puts x at i or further down. */
static void heap_sink(struct heap *h, int32_t i, struct node x)
{
    for (int32_t child; (child = first_child(h, i)) >= 0; i = child) {
        if (!comes_before(&h->nodes[child], &x))
            break;
        heap_set(h, i, &h->nodes[child]);
    }
    heap_set(h, i, &x);
}

static void heap_add(struct heap *h, struct node x)
{
    h->n++;
    heap_rise(h, h->n - 1, x);
}

static void heap_remove(struct heap *h, int32_t i_entry)
{
    int32_t i = h->place[i_entry];
    if (i < 0)
        return;
    struct node last = h->nodes[--h->n];
    h->place[i_entry] = -1;
    if (i == h->n)
        return;
    if (i > 0 && comes_before(&last, &h->nodes[(i - 1) / WAYS]))
        heap_rise(h, i, last);
    else
        heap_sink(h, i, last);
}

static int heap_grow(struct heap *h, int32_t cap, int32_t new_cap)
{
    struct node *nodes = realloc(h->nodes, (size_t)new_cap * sizeof(*nodes));
    if (!nodes)
        return ERR_NOMEM;
    h->nodes = nodes;
    int32_t *place = realloc(h->place, (size_t)new_cap * sizeof(*place));
    if (!place)
        return ERR_NOMEM;
    h->place = place;
    for (int32_t i = cap; i < new_cap; i++)
        place[i] = -1;
    return 0;
}

static void heap_fini(struct heap *h)
{
    free(h->nodes);
    free(h->place);
}

/* ---- entries ---- */

/* When it fails, what has grown already stays larger; cap says what is used. */
static int grow(struct sched *s, int32_t new_cap)
{
    struct heap *heaps[] = {&s->waiting, &s->running, &s->decoding, &s->deadlines};
    for (int i = 0; i < 4; i++)
        if (heap_grow(heaps[i], s->cap, new_cap))
            return ERR_NOMEM;
    struct entry *entries = realloc(s->entries, (size_t)new_cap * sizeof(*entries));
    if (!entries)
        return ERR_NOMEM;
    s->entries = entries;
    int32_t *list = realloc(s->free_entries, (size_t)new_cap * sizeof(*list));
    if (!list)
        return ERR_NOMEM;
    s->free_entries = list;
    for (int32_t i = new_cap - 1; i >= s->cap; i--) {
        entries[i] = (struct entry){0};
        list[s->n_free++] = i;
    }
    s->cap = new_cap;
    return 0;
}

/* Brings what a plan reads up to what the item says now. */
static void entry_read(struct sched *s, struct entry *e)
{
    const struct sched_item *item = e->item;
    int32_t n_left = item->n_tokens - item->n_planned;
    s->backlog_tokens += n_left - e->n_left;
    e->n_left = n_left;
    e->n_pages = item->n_pages;
}

static int64_t key_of(const struct sched *s, const struct entry *e)
{
    if (s->c.policy == SCHED_FCFS)
        return e->arrival_us;
    double service_us = e->n_left * s->us_per_token;
    return e->arrival_us + (service_us < (double)SCHED_MAX_SERVICE_US ? (int64_t)service_us
                                                                      : SCHED_MAX_SERVICE_US);
}

static struct node node_of(const struct sched *s, int32_t i_entry)
{
    const struct entry *e = &s->entries[i_entry];
    return node_make(e->item->priority, key_of(s, e), e->item->seq, i_entry);
}

static void drop(struct sched *s, int32_t i_entry)
{
    struct entry *e = &s->entries[i_entry];
    heap_remove(&s->waiting, i_entry);
    heap_remove(&s->running, i_entry);
    heap_remove(&s->decoding, i_entry);
    heap_remove(&s->deadlines, i_entry);
    s->backlog_tokens -= e->n_left;
    e->item->i_entry = -1;
    *e = (struct entry){0};
    s->free_entries[s->n_free++] = i_entry;
}

static void rank_anew(struct sched *s, struct heap *h)
{
    for (int32_t i = 0; i < h->n; i++)
        h->nodes[i].rank = (h->nodes[i].rank & ~(uint64_t)KEY_MAX) |
                           (uint64_t)key_of(s, &s->entries[entry_of(&h->nodes[i])]);
    for (int32_t i = (h->n - 2) / WAYS; h->n > 1 && i >= 0; i--)
        heap_sink(h, i, h->nodes[i]);
}

static void use_rate(struct sched *s, double rate)
{
    assert(rate > 0);
    double change = rate > s->rate ? rate - s->rate : s->rate - rate;
    if (s->c.policy == SCHED_FCFS || change <= s->rate / 32)
        return;
    s->rate = rate;
    s->us_per_token = 1 / rate;
    rank_anew(s, &s->waiting);
    rank_anew(s, &s->running);
    rank_anew(s, &s->decoding);
}

/* ---- public ---- */

int sched_open(const struct sched_config *c, struct sched **out)
{
    *out = NULL;
    if (c->max_step_tokens < SCHED_ALIGN_TOKENS || c->max_seqs < 1 || c->max_waiting < 1 ||
        c->max_waiting > ENTRY_MAX)
        return ERR_INVALID;
    struct sched *s = calloc(1, sizeof(*s));
    if (!s)
        return ERR_NOMEM;
    s->c = *c;
    if (c->max_decodes <= 0 || c->max_decodes > c->max_seqs)
        s->c.max_decodes = c->max_seqs;
    if (grow(s, c->max_waiting)) {
        sched_close(s);
        return ERR_NOMEM;
    }
    *out = s;
    return 0;
}

void sched_close(struct sched *s)
{
    if (!s)
        return;
    heap_fini(&s->waiting);
    heap_fini(&s->running);
    heap_fini(&s->decoding);
    heap_fini(&s->deadlines);
    free(s->entries);
    free(s->free_entries);
    free(s);
}

/* Gives item an entry and puts it into h. */
static int enter(struct sched *s, struct sched_item *item, struct heap *h)
{
    if (s->n_free == 0 && (s->cap > ENTRY_MAX / 2 || grow(s, s->cap + s->cap / 2 + 1)))
        return ERR_NOMEM;
    int32_t i = s->free_entries[--s->n_free];
    s->entries[i] = (struct entry){.item = item, .arrival_us = item->arrival_us};
    item->i_entry = i;
    entry_read(s, &s->entries[i]);
    heap_add(h, node_of(s, i));
    if (item->deadline_us)
        heap_add(&s->deadlines, node_make(0, item->deadline_us, item->seq, i));
    return 0;
}

int sched_add(struct sched *s, struct sched_item *item)
{
    assert(item->n_planned >= 0 && item->n_planned < item->n_tokens);
    assert(item->priority >= -SCHED_MAX_PRIORITY && item->priority <= SCHED_MAX_PRIORITY);
    assert(item->arrival_us >= 0 && item->deadline_us >= 0);
    if (s->waiting.n >= s->c.max_waiting)
        return ERR_FULL;
    return enter(s, item, &s->waiting);
}

int sched_continue(struct sched *s, struct sched_item *item)
{
    assert(item->i_entry < 0 && item->n_planned == item->n_tokens);
    item->n_tokens++;
    return enter(s, item, &s->decoding);
}

void sched_unpark(struct sched *s, struct sched_item *item)
{
    assert(item->i_entry >= 0 && s->waiting.place[item->i_entry] < 0);
    entry_read(s, &s->entries[item->i_entry]);
    heap_add(&s->waiting, node_of(s, item->i_entry));
}

void sched_remove(struct sched *s, struct sched_item *item)
{
    if (item->i_entry >= 0)
        drop(s, item->i_entry);
}

struct sched_item *sched_pop_expired(struct sched *s, int64_t now_us)
{
    if (s->deadlines.n == 0 || (int64_t)(s->deadlines.nodes[0].rank & KEY_MAX) > now_us)
        return NULL;
    struct sched_item *item = s->entries[entry_of(&s->deadlines.nodes[0])].item;
    drop(s, item->i_entry);
    return item;
}

/* The heap whose first could have the next piece, or NULL. A first of the waiting that does not
 * fit hides all the waiting; room only shrinks in a plan, so it stays hidden. */
static struct heap *next_heap(struct sched *s, int32_t n_slots, int32_t n_pages,
                              int32_t n_decodes)
{
    struct heap *best = s->running.n > 0 ? &s->running : NULL;
    if (s->decoding.n > 0 && n_decodes > 0 &&
        (!best || comes_before(&s->decoding.nodes[0], &best->nodes[0])))
        best = &s->decoding;
    bool can_admit = s->waiting.n > 0 && n_slots > 0 &&
                     s->entries[entry_of(&s->waiting.nodes[0])].n_pages <= n_pages;
    if (can_admit && (!best || comes_before(&s->waiting.nodes[0], &best->nodes[0])))
        best = &s->waiting;
    return best;
}

static int32_t align_down(int32_t n_tokens)
{
    return n_tokens - n_tokens % SCHED_ALIGN_TOKENS;
}

/* Cuts the next piece, of at most limit (>= 64) tokens, all of it but what is read from the
 * item. */
static struct sched_piece cut(struct sched *s, int32_t i_entry, int32_t limit)
{
    struct entry *e = &s->entries[i_entry];
    struct sched_piece p = {.item = e->item};
    p.is_last = e->n_left <= limit;
    p.n_tokens = p.is_last ? e->n_left : align_down(limit);
    e->n_left -= p.n_tokens;
    s->backlog_tokens -= p.n_tokens;
    return p;
}

/* Advances a piece's item, which runs on or leaves. */
static void settle(struct sched *s, struct sched_piece *p)
{
    p->start = p->item->n_planned;
    p->item->n_planned += p->n_tokens;
    if (p->is_last)
        drop(s, p->item->i_entry);
    else
        heap_add(&s->running, node_of(s, p->item->i_entry));
}

static enum sched_answer admit(struct sched *s, const struct sched_room *room, int32_t i_entry)
{
    if (!room->admit)
        return SCHED_ADMIT;
    struct entry *e = &s->entries[i_entry];
    enum sched_answer answer = room->admit(room->arg, e->item);
    entry_read(s, e);
    return answer;
}

int32_t sched_plan(struct sched *s, const struct sched_room *room, struct sched_piece *pieces)
{
    use_rate(s, room->rate_tokens_per_us);
    int32_t n_slots = room->n_free_slots, n_pages = room->n_free_pages;
    int32_t left = s->c.max_step_tokens;
    int32_t shared_limit = align_down((int32_t)(3 * (int64_t)left / 4));
    if (shared_limit < SCHED_ALIGN_TOKENS)
        shared_limit = SCHED_ALIGN_TOKENS;

    int32_t n = 0;
    int32_t n_decodes = s->c.max_decodes;
    struct heap *from = next_heap(s, n_slots, n_pages, n_decodes);
    while (from && n < s->c.max_seqs && left >= SCHED_ALIGN_TOKENS) {
        uint64_t priority = from->nodes[0].rank >> KEY_BITS;
        int32_t i_entry = entry_of(&from->nodes[0]);
        bool is_first = from == &s->waiting;
        enum sched_answer answer = is_first ? admit(s, room, i_entry) : SCHED_ADMIT;
        if (answer == SCHED_NO_ROOM)
            n_slots = 0;
        if (answer == SCHED_PARK)
            heap_remove(from, i_entry);
        if (answer != SCHED_ADMIT) {
            from = next_heap(s, n_slots, n_pages, n_decodes);
            continue;
        }
        __builtin_prefetch(&s->entries[i_entry].item->n_planned, 1);
        heap_remove(from, i_entry);
        if (is_first) {
            n_slots--;
            n_pages -= s->entries[i_entry].n_pages;
        }
        n_decodes -= from == &s->decoding;
        from = next_heap(s, n_slots, n_pages, n_decodes);
        /* Those with a piece already rank before: the same or a better priority. Of those
         * behind, the next one has the best. */
        bool is_shared =
            n > 0 || (from && s->c.max_seqs > 1 && from->nodes[0].rank >> KEY_BITS == priority);
        pieces[n] = cut(s, i_entry, is_shared && shared_limit < left ? shared_limit : left);
        pieces[n].is_first = is_first;
        left -= pieces[n++].n_tokens;
    }
    /* Only now, so that none gets two pieces, and that the items come from memory meanwhile. */
    for (int32_t i = 0; i < n; i++)
        settle(s, &pieces[i]);
    return n;
}

int32_t sched_n_waiting(const struct sched *s)
{
    return s->waiting.n;
}

int32_t sched_n_running(const struct sched *s)
{
    return s->running.n + s->decoding.n;
}

int64_t sched_backlog_tokens(const struct sched *s)
{
    return s->backlog_tokens;
}
