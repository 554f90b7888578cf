/* The tree of prompts: what is found is what a list of prompts would say, whatever was
 * inserted, split and given up before; ranking; running out of memory leaks nothing. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "leaks.h"
#include "prefix.h"
#include "rng.h"

TestSuite(prefix, .fini = leaks_check);

enum { BLOCK = 4, MAX_PROMPTS = 60, MAX_TOKENS = 60 };

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

static struct prompt random_prompt(struct rng *rng)
{
    struct prompt p = {.key = rng_int(rng, 3), .n = rng_int(rng, MAX_TOKENS)};
    /* Two tokens, the same one mostly: prompts part anywhere. */
    for (int32_t t = 0; t < p.n; t++)
        p.ids[t] = rng_int(rng, 12) == 0;
    return p;
}

static int32_t depth_of_common(const struct prefix_node *a, const struct prefix_node *b)
{
    for (; a; a = a->parent)
        for (const struct prefix_node *v = b; v; v = v->parent)
            if (v == a)
                return v->depth;
    return 0;
}

Test(prefix, finds_what_prompts_share)
{
    struct prefix p;
    struct rng rng = {20261130};
    struct prompt all[MAX_PROMPTS] = {{0}};
    cr_assert_eq(prefix_init(&p, BLOCK), 0);
    for (int step = 0; step < 4000; step++) {
        struct prompt *q = &all[rng_int(&rng, MAX_PROMPTS)];
        if (q->node) {
            prefix_unref(&p, q->node);
            q->node = NULL;
        } else {
            *q = random_prompt(&rng);
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
