/* The tree of prompts: what is found is what a list of prompts would say, whatever was
 * inserted, split and given up before; ranking; running out of memory leaks nothing, and no
 * number that is kept is another token's. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "leaks.h"
#include "prefix.h"
#include "request.h"
#include "rng.h"
#include "short_memory.h"

TestSuite(prefix, .fini = leaks_check);

enum {
    BLOCK = 4,
    MAX_PROMPTS = 60,
    MAX_TOKENS = 1200,
    FEW_TOKENS = 60,
    LONG_TOKENS = 40 * BLOCK, /* longer than what is looked ahead at */
    N_DOCUMENTS = 3
};

struct prompt {
    int32_t key, ids[MAX_TOKENS], n;
    struct prefix_node *node; /* NULL: not in the tree */
};

/* Blocks that a and b begin with alike. */
static int32_t common(const struct prompt *a, const struct prompt *b)
{
    int32_t n = 0;
    if (a->key != b->key)
        return 0;
    while (n < a->n && n < b->n && a->ids[n] == b->ids[n])
        n++;
    return n / BLOCK * BLOCK;
}

/* Two tokens, the same one mostly: prompts part anywhere, and soon. */
static void make_parting(struct rng *rng, struct prompt *p)
{
    p->key = rng_int(rng, 3);
    p->n = rng_int(rng, FEW_TOKENS);
    for (int32_t t = 0; t < p->n; t++)
        p->ids[t] = rng_int(rng, 12) == 0;
}

/* A document, or the beginning of one, perhaps with one token that is another: prompts part
 * far down. Documents begin alike. Some end where others do, and some anywhere, so there
 * are long edges and rows of short ones. */
static void make_cut(struct rng *rng, struct prompt *p)
{
    int32_t document = rng_int(rng, N_DOCUMENTS), n = rng_int(rng, MAX_TOKENS);
    p->key = 0;
    p->n = rng_int(rng, 2) ? n : n - n % LONG_TOKENS;
    for (int32_t t = 0; t < p->n; t++)
        p->ids[t] = t < MAX_TOKENS / 4 ? t : N_DOCUMENTS * t + document;
    if (p->n > 0 && rng_int(rng, 2))
        p->ids[rng_int(rng, p->n)] = -1 - rng_int(rng, 2);
}

static int32_t depth_of_common(const struct prefix_node *a, const struct prefix_node *b)
{
    while (a && b && a != b) {
        if (a->depth >= b->depth)
            a = a->parent;
        else
            b = b->parent;
    }
    return a && b ? a->depth : 0;
}

static void compare_with_list(void (*make)(struct rng *, struct prompt *), int n_steps)
{
    static struct prompt all[MAX_PROMPTS];
    struct prefix p;
    struct rng rng = {20261130};
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    for (int step = 0; step < n_steps; step++) {
        struct prompt *q = &all[rng_int(&rng, MAX_PROMPTS)];
        if (q->node) {
            prefix_unref(&p, q->node);
            q->node = NULL;
        } else {
            make(&rng, q);
            q->node = prefix_insert(&p, &q->key, 1, q->ids, q->n);
            cr_assert(q->node && q->node->depth == q->n / BLOCK * BLOCK);
            for (int i = 0; i < MAX_PROMPTS; i++)
                if (all[i].node)
                    cr_assert_eq(depth_of_common(q->node, all[i].node), common(q, &all[i]));
        }
        if (q->node && rng_int(&rng, 2)) {
            int32_t depth = BLOCK * rng_int(&rng, q->node->depth / BLOCK + 1);
            struct prefix_node *v = prefix_above(&p, q->node, depth);
            cr_assert(v && v->depth == depth && depth_of_common(v, q->node) == depth);
            /* A node that nobody refers to goes with what is below it. */
        }
        if (step % 16 == 0)
            cr_assert(prefix_is_sound(&p), "after step %d", step);
    }
    for (int i = 0; i < MAX_PROMPTS; i++)
        prefix_unref(&p, all[i].node);
    cr_assert_eq(p.n_nodes, 0, "nothing is left");
    prefix_fini(&p);
}

Test(prefix, finds_what_prompts_share)
{
    compare_with_list(make_parting, 4000);
}

Test(prefix, finds_what_long_prompts_share)
{
    compare_with_list(make_cut, 2000);
}

/* Blocks whose hashes are equal, by a factor that is 0: with tokens that no vocabulary has. */
Test(prefix, tells_equal_hashes_apart)
{
    enum { N_TOKENS = 3 * BLOCK };
    static const uint64_t odd_pair = 0xe7037ed1a0b428dbu;
    int32_t ids[4][N_TOKENS] = {{0}};
    struct prefix p;
    struct prefix_node *v[4];
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    for (int i = 0; i < 4; i++) { /* two ways on behind each of the two blocks */
        memcpy(&ids[i][2], &odd_pair, sizeof(odd_pair));
        ids[i][0] = i / 2;
        ids[i][BLOCK] = i % 2;
        v[i] = prefix_insert(&p, NULL, 0, ids[i], N_TOKENS);
    }
    cr_assert_eq(v[0]->parent->hash, v[2]->parent->hash, "they are no such blocks");
    cr_assert_eq(v[1]->hash, v[3]->hash, "and so it is behind them");
    cr_assert_neq(v[0]->hash, v[1]->hash);
    cr_assert_neq(v[0]->parent, v[2]->parent);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(v[i]->parent, v[i / 2 * 2]->parent);
        cr_assert_eq(v[i]->parent->tokens[0], i / 2);
        cr_assert_eq(prefix_insert(&p, NULL, 0, ids[i], N_TOKENS), v[i], "the same node again");
    }
    cr_assert(prefix_is_sound(&p));
    prefix_fini(&p);
}

enum { MAX_TOP = 2 };

/* Numbers of a prompt's tokens that tell all tokens up to each one. */
struct numbers {
    float logprobs[FEW_TOKENS];
    struct top_entry top[FEW_TOKENS * MAX_TOP];
    struct request r;
};

static void fill_numbers(struct numbers *k, struct prompt *q, int32_t n_top)
{
    uint32_t so_far = 1 + (uint32_t)q->key;
    k->r = (struct request){
        .ids = q->ids, .n_top = n_top, .prompt_logprobs = k->logprobs, .prompt_top = k->top};
    for (int32_t t = 0; t < q->n; t++) {
        so_far = (so_far * 31 + (uint32_t)q->ids[t]) % (1u << 23); /* whole as a float */
        k->logprobs[t] = (float)so_far;
        for (int32_t i = 0; i < n_top; i++)
            k->top[t * n_top + i] = (struct top_entry){(int32_t)so_far, (float)i};
    }
}

/* Kept as the engine does it: from the end of what was computed upwards. */
static void keep_numbers(struct numbers *k, struct prefix_node *v)
{
    for (; v->parent && prefix_rows_top(v) < k->r.n_top; v = v->parent)
        if (prefix_rows_store(v, &k->r) != 0)
            break;
}

/* Whether q is told its own numbers where it is told any; how many times is counted. */
static bool tells_own(struct prompt *q, int32_t n_top, int *n_told)
{
    struct numbers want, got;
    fill_numbers(&want, q, n_top);
    for (const struct prefix_node *v = q->node; v->parent; v = v->parent) {
        fill_numbers(&got, q, n_top);
        if (!prefix_rows_cover(v, &got.r))
            continue;
        memset(got.logprobs, 0, sizeof(got.logprobs));
        memset(got.top, 0, sizeof(got.top));
        prefix_rows_load(v, &got.r);
        size_t n = (size_t)v->depth + 1;
        if (memcmp(got.logprobs, want.logprobs, n * sizeof(*got.logprobs)) != 0 ||
            memcmp(got.top, want.top, n * (size_t)n_top * sizeof(*got.top)) != 0)
            return false;
        ++*n_told;
    }
    return true;
}

Test(prefix, goes_on_when_memory_is_short)
{
    static struct prompt all[MAX_PROMPTS];
    static struct numbers k;
    struct prefix p;
    struct rng rng = {20261130};
    int n_told = 0;
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    for (int step = 0; step < 8000; step++) {
        struct prompt *q = &all[rng_int(&rng, MAX_PROMPTS)];
        int32_t n_top = rng_int(&rng, MAX_TOP + 1);
        short_memory.one_in = rng_int(&rng, 3) ? 3 : 0;
        if (q->node && rng_int(&rng, 2)) {
            prefix_unref(&p, q->node);
            q->node = NULL;
        } else if (!q->node) {
            make_parting(&rng, q);
            q->key = rng_int(&rng, 8) ? q->key : step; /* or a root of its own */
            q->node = q->n ? prefix_insert(&p, &q->key, 1, q->ids, q->n - 1) : NULL;
        }
        if (q->node && rng_int(&rng, 2)) {
            fill_numbers(&k, q, n_top);
            keep_numbers(&k, q->node);
        }
        if (q->node)
            prefix_above(&p, q->node, BLOCK * rng_int(&rng, q->node->depth / BLOCK + 1));
        short_memory.one_in = 0;
        cr_assert(!q->node || tells_own(q, n_top, &n_told), "after step %d", step);
        if (step % 16 == 0)
            cr_assert(prefix_is_sound(&p), "after step %d", step);
    }
    cr_assert(n_told > 1000 && short_memory.n_failed > 1000, "%d told, %lld allocations failed",
              n_told, short_memory.n_failed);
    for (int i = 0; i < MAX_PROMPTS; i++)
        prefix_unref(&p, all[i].node);
    cr_assert_eq(p.n_nodes, 0, "nothing is left");
    prefix_fini(&p);
}

/* Nodes are found also while the table is smaller than it should be. */
Test(prefix, finds_all_when_its_table_cannot_grow)
{
    enum { N = 4000 };
    static struct prefix_node *v[N];
    struct prefix p;
    uint32_t n_late = 0;
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    for (int32_t key = 0; key < N; key++) {
        short_memory.one_in = 2;
        v[key] = prefix_insert(&p, &key, 1, NULL, 0);
        short_memory.one_in = 0;
        n_late += p.n_nodes > (int32_t)p.n_buckets;
    }
    cr_assert_gt(n_late, 0, "it was never too small");
    for (int32_t key = 0; key < N; key++) {
        if (!v[key])
            continue;
        cr_assert_eq(prefix_insert(&p, &key, 1, NULL, 0), v[key]);
        prefix_unref(&p, v[key]);
        prefix_unref(&p, v[key]);
    }
    cr_assert_eq(p.n_nodes, 0, "nothing is left");
    prefix_fini(&p);
}

Test(prefix, keys_keep_apart)
{
    static const int32_t ids[2 * BLOCK] = {0}, keys[] = {7, 7};
    struct prefix p;
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    struct prefix_node *none = prefix_insert(&p, NULL, 0, ids, 2 * BLOCK);
    struct prefix_node *one = prefix_insert(&p, keys, 1, ids, 2 * BLOCK);
    struct prefix_node *two = prefix_insert(&p, keys, 2, ids, 2 * BLOCK + 1);
    cr_assert(none != one && one != two && none != two && two->depth == 2 * BLOCK);
    cr_assert_eq(prefix_insert(&p, keys, 2, ids, 2 * BLOCK), two, "the same node again");
    cr_assert_eq(prefix_insert(&p, keys, 2, ids, 3), two->parent,
                 "a root, for less than a block");
    prefix_fini(&p); /* with all that is in it */
}

Test(prefix, counts_users_and_finds_the_nearest_state)
{
    int32_t ids[4 * BLOCK] = {0};
    struct prefix p;
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    struct prefix_node *a = prefix_insert(&p, NULL, 0, ids, 4 * BLOCK);
    prefix_add_user(a, 1);
    ids[2 * BLOCK] = 1;
    struct prefix_node *b = prefix_insert(&p, NULL, 0, ids, 4 * BLOCK);
    prefix_add_user(b, 1);
    struct prefix_node *fork = b->parent;
    cr_assert(a->parent == fork && fork->depth == 2 * BLOCK && fork->n_children == 2);
    cr_assert(fork->n_users == 2 && a->n_users == 1 && fork->parent->n_users == 2);
    cr_assert_null(prefix_nearest(a));
    fork->state = PREFIX_READY;
    cr_assert_eq(prefix_nearest(a), fork);
    struct prefix_node *above = prefix_above(&p, b, BLOCK);
    cr_assert(above->n_users == 2 && fork->parent == above && !prefix_nearest(above));
    fork->state = PREFIX_NONE;
    prefix_add_user(a, -1);
    prefix_add_user(b, -1);
    prefix_unref(&p, a);
    prefix_unref(&p, b);
    cr_assert_eq(p.n_nodes, 0);
    prefix_fini(&p);
}

/* What saves most tokens a byte stays; what is used again outlives what is not. */
Test(prefix, ranks_by_worth_and_use)
{
    enum { N = 200 };
    struct prefix p;
    struct prefix_node *v[N];
    struct rng rng = {3};
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    for (int32_t i = 0; i < N; i++) {
        int32_t ids[BLOCK] = {i};
        v[i] = prefix_insert(&p, NULL, 0, ids, BLOCK);
        v[i]->state = PREFIX_READY;
        cr_assert_eq(prefix_rank(&p, v[i], 1 + rng_int(&rng, 50), 10), 0);
    }
    cr_assert(prefix_is_sound(&p));
    for (int32_t i = 0; i < N / 2; i++) { /* from anywhere in the heap */
        if (i % 3 == 0)
            continue;
        prefix_unrank(&p, v[i], false);
        v[i]->state = PREFIX_NONE;
    }
    cr_assert(prefix_is_sound(&p));
    double worth = 0;
    while (p.n_ranked > 10) {
        struct prefix_node *least = p.ranking[0];
        cr_assert_geq(least->worth, worth);
        worth = least->worth;
        prefix_unrank(&p, least, true);
        least->state = PREFIX_NONE;
    }
    cr_assert_float_eq(p.level, worth, 1e-12, "the level rises with what goes");
    struct prefix_node *used = p.ranking[0];
    cr_assert_eq(prefix_rank(&p, used, 1, 10), 0);
    cr_assert_gt(used->worth, worth, "used again, even for one token");
    cr_assert(prefix_is_sound(&p));
    prefix_fini(&p);
}
