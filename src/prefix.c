#include "prefix.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_BUCKETS = 64 };

/* ---- the table ---- */

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 m = (unsigned __int128)a * b;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

/* Of a node's first block (a root: of its key) and its parent. Multiplication and folding,
 * eight tokens at a time in four lanes, since a product takes some cycles; derived here. Equal
 * hashes are told apart by comparing. */
static uint64_t hash_of(const struct prefix_node *parent, const int32_t *tokens, int32_t n)
{
    static const uint64_t odd[4] = {0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu,
                                    0x8ebc6af09c88c6e3u, 0x589965cc75374cc3u};
    uint64_t h[4], x[4];
    int32_t i = 0;
    for (int k = 0; k < 4; k++)
        h[k] = ((uint64_t)(uintptr_t)parent + (uint64_t)n) * odd[k];
    for (; i + 8 <= n; i += 8) {
        memcpy(x, tokens + i, sizeof(x));
        for (int k = 0; k < 4; k++)
            h[k] = fold(h[k] ^ x[k], odd[k]) + (h[k] << 9);
    }
    for (; i < n; i++)
        h[i % 4] = fold(h[i % 4] ^ (uint32_t)tokens[i], odd[i % 4]) + (h[i % 4] << 9);
    return fold(h[0] ^ h[2], odd[1]) ^ fold(h[1] ^ (h[3] << 1), odd[3]);
}

static int32_t first_tokens(const struct prefix *p, const struct prefix_node *v)
{
    return v->parent ? p->block_tokens : v->n_tokens;
}

static void table_add(struct prefix *p, struct prefix_node *v)
{
    v->hash = hash_of(v->parent, v->tokens, first_tokens(p, v));
    struct prefix_node **bucket = &p->buckets[v->hash & (p->n_buckets - 1)];
    v->next = *bucket;
    *bucket = v;
}

static void table_remove(struct prefix *p, struct prefix_node *v)
{
    struct prefix_node **at = &p->buckets[v->hash & (p->n_buckets - 1)];
    while (*at != v)
        at = &(*at)->next;
    *at = v->next;
}

/* When memory is short the table stays as small as it is. */
static void table_grow(struct prefix *p)
{
    uint32_t n = 2 * p->n_buckets;
    struct prefix_node **buckets = calloc(n, sizeof(struct prefix_node *));
    if (!buckets)
        return;
    for (uint32_t i = 0; i < p->n_buckets; i++) {
        for (struct prefix_node *v = p->buckets[i], *next; v; v = next) {
            next = v->next;
            v->next = buckets[v->hash & (n - 1)];
            buckets[v->hash & (n - 1)] = v;
        }
    }
    free(p->buckets);
    p->buckets = buckets;
    p->n_buckets = n;
}

/* The child of parent (NULL: a root) that begins with these tokens. */
static struct prefix_node *table_find(const struct prefix *p, const struct prefix_node *parent,
                                      const int32_t *tokens, int32_t n)
{
    uint64_t hash = hash_of(parent, tokens, n);
    struct prefix_node *v = p->buckets[hash & (p->n_buckets - 1)];
    for (; v; v = v->next)
        if (v->hash == hash && v->parent == parent && first_tokens(p, v) == n &&
            (n == 0 || memcmp(v->tokens, tokens, (size_t)n * sizeof(*tokens)) == 0))
            return v;
    return NULL;
}

/* ---- nodes ---- */

/* With copies of n tokens. */
static struct prefix_node *node_new(struct prefix *p, struct prefix_node *parent,
                                    const int32_t *tokens, int32_t n)
{
    struct prefix_node *v = calloc(1, sizeof(*v));
    int32_t *copy = malloc((size_t)(n ? n : 1) * sizeof(*copy));
    if (!v || !copy) {
        free(v);
        free(copy);
        return NULL;
    }
    if (n > 0)
        memcpy(copy, tokens, (size_t)n * sizeof(*copy));
    v->tokens = copy;
    v->n_tokens = n;
    v->parent = parent;
    v->depth = parent ? parent->depth + n : 0;
    v->slot = v->i_rank = -1;
    v->used_step = -1;
    if (parent)
        parent->n_children++;
    if (++p->n_nodes > (int32_t)p->n_buckets)
        table_grow(p);
    table_add(p, v);
    return v;
}

static void node_free(struct prefix *p, struct prefix_node *v)
{
    table_remove(p, v);
    p->n_nodes--;
    prefix_rows_free(v->rows);
    free(v->tokens);
    free(v->pages);
    free(v);
}

/* Frees v and what is above it as far as nothing keeps it. */
static void collect(struct prefix *p, struct prefix_node *v)
{
    while (v && v->n_children == 0 && v->n_refs == 0) {
        struct prefix_node *parent = v->parent;
        assert(v->state == PREFIX_NONE && v->n_users == 0 && v->n_wanted == 0 && !v->parked);
        if (parent)
            parent->n_children--;
        node_free(p, v);
        v = parent;
    }
}

/* Cuts v's edge behind its first n tokens; v keeps the lower part. Returns the node between. */
static struct prefix_node *split(struct prefix *p, struct prefix_node *v, int32_t n)
{
    int32_t n_below = v->n_tokens - n;
    int32_t *below = malloc((size_t)n_below * sizeof(*below));
    /* Out of the table before another node with its first block is in it. */
    table_remove(p, v);
    struct prefix_node *u = below ? node_new(p, v->parent, v->tokens, n) : NULL;
    if (!u) {
        free(below);
        table_add(p, v);
        return NULL;
    }
    memcpy(below, v->tokens + n, (size_t)n_below * sizeof(*below));
    free(v->tokens);
    v->tokens = below;
    v->n_tokens = n_below;
    if (v->parent)
        v->parent->n_children--;
    v->parent = u;
    u->n_children = 1;
    u->n_users = v->n_users;
    u->maker = v->maker;
    if (prefix_rows_split(u, v, below[0]) != 0) { /* memory is short: none, rather than wrong */
        prefix_rows_free(v->rows);
        v->rows = NULL;
    }
    table_add(p, v);
    return u;
}

/* Whole blocks that a and b have in common from their start. */
static int32_t common_tokens(const struct prefix *p, const int32_t *a, const int32_t *b,
                             int32_t n)
{
    int32_t i = 0;
    while (i + p->block_tokens <= n &&
           memcmp(a + i, b + i, (size_t)p->block_tokens * sizeof(*a)) == 0)
        i += p->block_tokens;
    return i;
}

/* ---- public ---- */

int prefix_init(struct prefix *p, int32_t block_tokens)
{
    *p = (struct prefix){.block_tokens = block_tokens};
    if (block_tokens < 1)
        return ERR_INVALID;
    p->buckets = calloc(FIRST_BUCKETS, sizeof(struct prefix_node *));
    p->n_buckets = FIRST_BUCKETS;
    return p->buckets ? 0 : ERR_NOMEM;
}

void prefix_fini(struct prefix *p)
{
    for (uint32_t i = 0; p->buckets && i < p->n_buckets; i++)
        while (p->buckets[i])
            node_free(p, p->buckets[i]);
    free(p->buckets);
    free(p->ranking);
    *p = (struct prefix){0};
}

struct prefix_node *prefix_insert(struct prefix *p, const int32_t *key, int32_t n_key,
                                  const int32_t *ids, int32_t n)
{
    n -= n % p->block_tokens;
    struct prefix_node *v = table_find(p, NULL, key, n_key);
    if (!v)
        v = node_new(p, NULL, key, n_key);
    while (v && v->depth < n) {
        int32_t at = v->depth;
        struct prefix_node *child = table_find(p, v, ids + at, p->block_tokens);
        struct prefix_node *parent = v;
        if (!child) {
            v = node_new(p, parent, ids + at, n - at);
        } else {
            int32_t n_edge = child->n_tokens < n - at ? child->n_tokens : n - at;
            int32_t n_common = common_tokens(p, child->tokens, ids + at, n_edge);
            v = n_common < child->n_tokens ? split(p, child, n_common) : child;
        }
        if (!v)
            collect(p, parent);
    }
    if (v)
        v->n_refs++;
    return v;
}

struct prefix_node *prefix_above(struct prefix *p, struct prefix_node *at, int32_t depth)
{
    assert(depth >= 0 && depth <= at->depth && depth % p->block_tokens == 0);
    while (at->depth - at->n_tokens >= depth && at->parent && at->depth > depth)
        at = at->parent;
    if (at->depth == depth)
        return at;
    return split(p, at, depth - (at->depth - at->n_tokens));
}

void prefix_ref(struct prefix_node *v)
{
    v->n_refs++;
}

void prefix_unref(struct prefix *p, struct prefix_node *v)
{
    if (!v)
        return;
    v->n_refs--;
    collect(p, v);
}

void prefix_add_user(struct prefix_node *v, int32_t d)
{
    for (; v; v = v->parent)
        v->n_users += d;
}

struct prefix_node *prefix_nearest(struct prefix_node *v)
{
    while (v && v->state != PREFIX_READY)
        v = v->parent;
    return v;
}

/* ---- the ranking: a heap of two children ---- */

static void rank_set(struct prefix *p, int32_t i, struct prefix_node *v)
{
    p->ranking[i] = v;
    v->i_rank = i;
}

/* Puts v at i, higher up or further down. */
static void rank_place(struct prefix *p, int32_t i, struct prefix_node *v)
{
    for (int32_t up; i > 0 && v->worth < p->ranking[up = (i - 1) / 2]->worth; i = up)
        rank_set(p, i, p->ranking[up]);
    for (int32_t child; (child = 2 * i + 1) < p->n_ranked; i = child) {
        if (child + 1 < p->n_ranked && p->ranking[child + 1]->worth < p->ranking[child]->worth)
            child++;
        if (p->ranking[child]->worth >= v->worth)
            break;
        rank_set(p, i, p->ranking[child]);
    }
    rank_set(p, i, v);
}

double prefix_worth(const struct prefix *p, const struct prefix_node *v, int32_t saved_tokens,
                    double bytes)
{
    return (v->is_spare ? 0 : p->level) + saved_tokens / (bytes > 1 ? bytes : 1);
}

int prefix_rank(struct prefix *p, struct prefix_node *v, int32_t saved_tokens, double bytes)
{
    double worth = prefix_worth(p, v, saved_tokens, bytes);
    if (v->i_rank < 0 && p->n_ranked == p->ranking_cap) {
        int32_t cap = 2 * p->ranking_cap + 16;
        struct prefix_node **r =
            realloc(p->ranking, (size_t)cap * sizeof(struct prefix_node *));
        if (!r)
            return ERR_NOMEM;
        p->ranking = r;
        p->ranking_cap = cap;
    }
    v->worth = worth;
    if (v->i_rank < 0)
        rank_set(p, p->n_ranked++, v);
    rank_place(p, v->i_rank, v);
    return 0;
}

void prefix_unrank(struct prefix *p, struct prefix_node *v, bool is_evicted)
{
    int32_t i = v->i_rank;
    if (is_evicted && v->worth > p->level)
        p->level = v->worth;
    struct prefix_node *last = p->ranking[--p->n_ranked];
    v->i_rank = -1;
    if (last != v)
        rank_place(p, i, last);
}

/* ---- for tests ---- */

static bool node_is_sound(const struct prefix *p, const struct prefix_node *v)
{
    int32_t n_children = 0;
    for (uint32_t i = 0; i < p->n_buckets; i++)
        for (const struct prefix_node *c = p->buckets[i]; c; c = c->next)
            n_children += c->parent == v;
    bool is_kept = v->n_refs > 0 || v->n_children > 0;
    return is_kept && n_children == v->n_children && v->n_refs >= 0 && v->n_users >= 0 &&
           (!v->parent || (v->n_tokens > 0 && v->n_tokens % p->block_tokens == 0 &&
                           v->depth == v->parent->depth + v->n_tokens)) &&
           table_find(p, v->parent, v->tokens, first_tokens(p, v)) == v &&
           (v->state == PREFIX_READY) == (v->i_rank >= 0) &&
           (v->i_rank < 0 || p->ranking[v->i_rank] == v);
}

bool prefix_is_sound(const struct prefix *p)
{
    int32_t n = 0;
    for (uint32_t i = 0; i < p->n_buckets; i++)
        for (const struct prefix_node *v = p->buckets[i]; v; v = v->next, n++)
            if (!node_is_sound(p, v))
                return false;
    for (int32_t i = 1; i < p->n_ranked; i++)
        if (p->ranking[i]->worth < p->ranking[(i - 1) / 2]->worth)
            return false;
    return n == p->n_nodes;
}
