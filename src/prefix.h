/* The tree of prompts and checkpoints: which waiting and running requests and which kept states
 * begin with the same tokens. Owns nodes and their tokens; slots and pages are numbers to it,
 * and requests are names. No clock, no I/O, no pool. Engine thread only.
 *
 * An edge holds whole blocks of block_tokens tokens, and children of a node differ in their
 * first block: a node is where two prompts part, where one ends, or where a state is kept.
 * Roots are told apart by a key, so that prompts under different keys never meet. A node is
 * found by a hash of all tokens up to its first block, which a prompt tells without the tree,
 * so that nodes are fetched before the walk comes to them; parent and tokens are compared.
 *
 * Checkpoints are ranked by what they are worth: tokens saved a byte plus a level that rises to
 * the worth of each one evicted, so that what is not used again sinks below what is new
 * (GreedyDual-Size: Cao and Irani, 1997). Spare ones have no level: they take what room is
 * left. */
#ifndef PREFILLD_PREFIX_H
#define PREFILLD_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum prefix_state {
    PREFIX_NONE,
    PREFIX_PENDING, /* its maker will leave its state here */
    PREFIX_READY
};

struct request;
struct prefix_rows;

struct prefix_node {
    struct prefix_node *parent; /* NULL: a root */
    struct prefix_node *next;   /* in its bucket */
    uint64_t hash;              /* of its first block and all that is before it */
    uint64_t end_hash;          /* of all up to depth; kept while there are children */
    int32_t *tokens;            /* [n_tokens], of the edge from parent; a root: its key */
    int32_t n_tokens;
    int32_t depth; /* tokens of a prompt that ends here */
    int32_t n_children;
    int32_t n_refs;  /* paths that end here, and one while its state is other than none */
    int32_t n_users; /* waiting requests that could begin here or further down */

    /* The engine's: */
    enum prefix_state state;
    struct request *maker;  /* runs and has this node ahead or behind it; NULL: none */
    uint64_t made_by;       /* seq of the request whose state is kept */
    bool is_spare;          /* kept unasked and not begun at yet */
    struct request *parked; /* wait for it, linked by parked_next */
    int32_t n_wanted;       /* requests that wait for their turn to begin here */
    int32_t slot;           /* -1: none */
    int32_t *pages;         /* [n_pages], owned by the node */
    int32_t n_pages;
    int64_t used_step;        /* the last step that read the slot */
    struct prefix_rows *rows; /* numbers of the edge's tokens; NULL: none */

    double worth;
    int32_t i_rank; /* in the ranking; -1: not in it */
};

struct prefix {
    int32_t block_tokens;
    struct prefix_node **buckets; /* [n_buckets], a power of two */
    uint32_t n_buckets;
    uint64_t seed; /* of hashes */
    int32_t n_nodes;
    struct prefix_node **ranking; /* [n_ranked], a heap, the least worth first */
    int32_t n_ranked, ranking_cap;
    double level;
};

/* Returns 0, ERR_INVALID or ERR_NOMEM. */
int prefix_init(struct prefix *p, int32_t block_tokens);
/* Frees all nodes. */
void prefix_fini(struct prefix *p);

/* The node of the first n tokens of ids (rounded down to blocks) under a root's key, made where
 * it was missing, with one reference more. NULL: memory is short. O(n). */
struct prefix_node *prefix_insert(struct prefix *p, const int32_t *key, int32_t n_key,
                                  const int32_t *ids, int32_t n);
/* The node at depth (a multiple of block_tokens, at most at's) on the way from at to its root,
 * made where an edge runs through. NULL: memory is short. */
struct prefix_node *prefix_above(struct prefix *p, struct prefix_node *at, int32_t depth);
void prefix_ref(struct prefix_node *v);
/* Gives a reference up; nodes that nothing keeps go. NULL is legal. */
void prefix_unref(struct prefix *p, struct prefix_node *v);
/* One waiting request more, or less, that could begin at v or above it. */
void prefix_add_user(struct prefix_node *v, int32_t d);
/* The deepest kept state at v or above it; NULL: none. */
struct prefix_node *prefix_nearest(struct prefix_node *v);

/* Ranks v, which has a state, anew: a hit, or the first time. bytes: what only it holds.
 * Returns 0 or ERR_NOMEM. O(log ranked). */
int prefix_rank(struct prefix *p, struct prefix_node *v, int32_t saved_tokens, double bytes);
/* What v would be worth. */
double prefix_worth(const struct prefix *p, const struct prefix_node *v, int32_t saved_tokens,
                    double bytes);
/* Takes v out of the ranking; is_evicted: the level rises to its worth. */
void prefix_unrank(struct prefix *p, struct prefix_node *v, bool is_evicted);

/* ---- prefix_rows.c: numbers of tokens */

/* Keeps r's numbers of v's edge, and of r's token behind v, which is before r's end; they are
 * in place in r, which has LOGPROBS_ALL. Replaces what was there. Returns 0 or ERR_NOMEM. */
int prefix_rows_store(struct prefix_node *v, const struct request *r);
/* Candidates kept for each token of v's edge, -1: no numbers. */
int32_t prefix_rows_top(const struct prefix_node *v);
/* seq of the request they are from; UINT64_MAX: no numbers. */
uint64_t prefix_rows_by(const struct prefix_node *v);
/* Whether the numbers of all tokens up to v, and of r's token behind it, are kept, with as many
 * candidates as r wants. v is on r's path and before its end. O(nodes above). */
bool prefix_rows_cover(const struct prefix_node *v, const struct request *r);
/* Puts these into r. */
void prefix_rows_load(const struct prefix_node *v, struct request *r);
/* Of an edge that was cut: u's part goes to u, which ends before the token first_id. Returns 0
 * or ERR_NOMEM, with nothing changed. */
int prefix_rows_split(struct prefix_node *u, struct prefix_node *v, int32_t first_id);
/* NULL is legal. */
void prefix_rows_free(struct prefix_rows *w);

/* Recounts, O(nodes); for tests. */
bool prefix_is_sound(const struct prefix *p);

#endif
