#include "prefix.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_BUCKETS = 64, MAX_AHEAD = 16, LINE_TOKENS = 16 };

#define ODD_STEP 0xa0761d6478bd642fu
#define ODD_PAIR 0xe7037ed1a0b428dbu
#define ODD_END 0x8ebc6af09c88c6e3u

/* ---- the table ---- */

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 m = (unsigned __int128)a * b;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

static uint64_t load64(const int32_t *tokens)
{
    uint64_t x;
    memcpy(&x, tokens, sizeof(x));
    return x;
}

/* Of a block (a root: of its key), where what lies before has the hash `before`: so it does not
 * depend on where nodes are. A sum of folded products, four tokens in each, which wait for
 * nothing; at, another for each place, depends on the seed. The other factor is never 0 for
 * tokens of a vocabulary. Derived here; equal hashes are told apart by comparing. */
static uint64_t hash_of(const struct prefix *p, uint64_t before, const int32_t *tokens,
                        int32_t n)
{
    uint64_t sum = (uint64_t)n, at = p->seed;
    int32_t i = 0;
    for (; i + 4 <= n; i += 4, at += ODD_STEP)
        sum += fold(load64(tokens + i) ^ at, load64(tokens + i + 2) ^ ODD_PAIR);
    for (; i < n; i++, at += ODD_STEP)
        sum += fold((uint32_t)tokens[i] ^ at, ODD_PAIR);
    return fold(sum ^ before, ODD_END) + before;
}

static int32_t first_tokens(const struct prefix *p, const struct prefix_node *v)
{
    return v->parent ? p->block_tokens : v->n_tokens;
}

/* Of v's edge and what lies before. */
static uint64_t end_hash_of(const struct prefix *p, const struct prefix_node *v)
{
    uint64_t hash = v->hash;
    for (int32_t i = first_tokens(p, v); i < v->n_tokens; i += p->block_tokens)
        hash = hash_of(p, hash, v->tokens + i, p->block_tokens);
    return hash;
}

static struct prefix_node **bucket_of(const struct prefix *p, uint64_t hash)
{
    return &p->buckets[hash & (p->n_buckets - 1)];
}

static void table_add(struct prefix *p, struct prefix_node *v)
{
    struct prefix_node **bucket = bucket_of(p, v->hash);
    v->next = *bucket;
    *bucket = v;
}

static void table_remove(struct prefix *p, struct prefix_node *v)
{
    struct prefix_node **at = bucket_of(p, v->hash);
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

/* The child of parent (NULL: a root) that begins with these tokens, which have this hash. */
static struct prefix_node *table_find(const struct prefix *p, const struct prefix_node *parent,
                                      uint64_t hash, const int32_t *tokens, int32_t n)
{
    struct prefix_node *v = *bucket_of(p, hash);
    for (; v; v = v->next)
        if (v->hash == hash && v->parent == parent && first_tokens(p, v) == n &&
            (n == 0 || memcmp(v->tokens, tokens, (size_t)n * sizeof(*tokens)) == 0))
            return v;
    return NULL;
}

/* ---- the walk down a prompt ---- */

/* Hashes of the blocks from the token `from` on. */
struct ahead {
    uint64_t hashes[MAX_AHEAD];
    int32_t from, n_blocks;
    int32_t limit; /* on n_blocks */
};

/* Hashes n_blocks blocks behind the hash `before`, and has memory fetch the nodes of all of
 * them at once, bucket, node and first block: the walk would wait for each in turn. */
static void fetch_ahead(const struct prefix *p, struct ahead *a, uint64_t before,
                        const int32_t *tokens)
{
    for (int32_t i = 0; i < a->n_blocks; i++, tokens += p->block_tokens) {
        before = a->hashes[i] = hash_of(p, before, tokens, p->block_tokens);
        __builtin_prefetch(bucket_of(p, before));
    }
    for (int32_t i = 0; i < a->n_blocks; i++)
        __builtin_prefetch(*bucket_of(p, a->hashes[i]));
    for (int32_t i = 0; i < a->n_blocks; i++) {
        const struct prefix_node *v = *bucket_of(p, a->hashes[i]);
        while (v && v->hash != a->hashes[i])
            v = v->next;
        for (int32_t t = 0; v && t <= p->block_tokens; t += LINE_TOKENS)
            __builtin_prefetch(v->tokens + t);
    }
}

/* The hash of ids' block behind v, which has children and ends before n. Looks further ahead
 * while edges are short, for what lies within a long one is fetched for nothing. */
static uint64_t hash_behind(const struct prefix *p, struct ahead *a,
                            const struct prefix_node *v, const int32_t *ids, int32_t n)
{
    int32_t i = (v->depth - a->from) / p->block_tokens;
    if (i >= a->n_blocks) {
        bool is_dense = i < a->n_blocks + MAX_AHEAD / 2;
        a->limit = !is_dense ? 1 : a->limit < MAX_AHEAD ? 2 * a->limit : MAX_AHEAD;
        a->n_blocks = (n - v->depth) / p->block_tokens;
        a->n_blocks = a->n_blocks < a->limit ? a->n_blocks : a->limit;
        a->from = v->depth;
        fetch_ahead(p, a, v->end_hash, ids + v->depth);
        i = 0;
    }
    return a->hashes[i];
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
    if (parent && parent->n_children++ == 0)
        parent->end_hash = end_hash_of(p, parent);
    v->hash = hash_of(p, parent ? parent->end_hash : 0, tokens, first_tokens(p, v));
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
    u->end_hash = end_hash_of(p, u);
    v->hash = hash_of(p, u->end_hash, below, p->block_tokens);
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
    /* Who sends prompts does not know the address, and so cannot fill one bucket. */
    p->seed = fold((uint64_t)(uintptr_t)p->buckets, ODD_END);
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
    struct ahead ahead = {.limit = 1};
    struct prefix_node *v = table_find(p, NULL, hash_of(p, 0, key, n_key), key, n_key);
    if (!v)
        v = node_new(p, NULL, key, n_key);
    while (v && v->depth < n) {
        int32_t at = v->depth;
        struct prefix_node *child = NULL, *parent = v;
        if (v->n_children > 0)
            child =
                table_find(p, v, hash_behind(p, &ahead, v, ids, n), ids + at, p->block_tokens);
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
           v->hash ==
               hash_of(p, v->parent ? v->parent->end_hash : 0, v->tokens, first_tokens(p, v)) &&
           (v->n_children == 0 || v->end_hash == end_hash_of(p, v)) &&
           table_find(p, v->parent, v->hash, v->tokens, first_tokens(p, v)) == v &&
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
