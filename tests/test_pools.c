/* Slots and pages: random operations against models that count afresh, and the faults that must
 * abort. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "leaks.h"
#include "pages.h"
#include "rng.h"
#include "slots.h"

enum { SEED = 4711 };

TestSuite(slots, .fini = leaks_check);
TestSuite(pages, .fini = leaks_check);

/* ---- slots */

Test(slots, hand_out_each_once_and_then_none)
{
    enum { N = 5 };
    struct slots s;
    bool is_out[N] = {false};
    cr_assert_eq(slots_init(&s, N), 0);
    cr_assert(slots_is_sound(&s));
    for (int i = 0; i < N; i++) {
        int32_t slot = slots_alloc(&s);
        cr_assert(slot >= 0 && slot < N && !is_out[slot]);
        is_out[slot] = true;
    }
    cr_assert_eq(slots_alloc(&s), -1);
    cr_assert(s.n_free == 0 && s.n_held == N && slots_is_sound(&s));
    slots_free(&s, 3);
    cr_assert_eq(slots_alloc(&s), 3);
    slots_fini(&s);
}

Test(slots, refuse_no_slots)
{
    struct slots s;
    cr_assert_eq(slots_init(&s, 0), ERR_INVALID);
    cr_assert_eq(slots_init(&s, -1), ERR_INVALID);
    slots_fini(&s);
}

static void check_slots(const struct slots *s, const enum slot_state *model, int32_t n)
{
    int32_t count[3] = {0};
    for (int32_t i = 0; i < n; i++) {
        cr_assert_eq(s->state[i], model[i], "slot %d", i);
        count[model[i]]++;
    }
    cr_assert_eq(s->n_free, count[SLOT_FREE]);
    cr_assert_eq(s->n_held, count[SLOT_HELD]);
    cr_assert_eq(s->n_cached, count[SLOT_CACHED]);
    cr_assert_eq(s->n_free + s->n_held + s->n_cached, s->n_total);
    cr_assert(slots_is_sound(s));
}

Test(slots, agree_with_a_model_under_random_operations)
{
    enum { N = 37, OPERATIONS = 20000 };
    struct rng rng = {SEED};
    struct slots s;
    enum slot_state model[N] = {SLOT_FREE};
    printf("# seed %d\n", SEED);
    cr_assert_eq(slots_init(&s, N), 0);
    for (int t = 0; t < OPERATIONS; t++) {
        /* Mostly allocating in one half of the time, mostly freeing in the other. */
        bool is_filling = t / 200 % 2, wants_alloc = rng_int(&rng, 4) != 0;
        if (is_filling == wants_alloc) {
            int32_t n_free = s.n_free, slot = slots_alloc(&s);
            cr_assert_eq(slot < 0, n_free == 0);
            if (slot >= 0) {
                cr_assert_eq(model[slot], SLOT_FREE);
                model[slot] = SLOT_HELD;
            }
        } else {
            int32_t slot = rng_int(&rng, N);
            if (model[slot] == SLOT_FREE)
                continue;
            bool frees = rng_int(&rng, 2);
            if (frees)
                slots_free(&s, slot);
            else if (model[slot] == SLOT_HELD)
                slots_cache(&s, slot);
            else
                slots_hold(&s, slot);
            model[slot] = frees                      ? SLOT_FREE
                          : model[slot] == SLOT_HELD ? SLOT_CACHED
                                                     : SLOT_HELD;
        }
        check_slots(&s, model, N);
    }
    slots_fini(&s);
}

Test(slots, soundness_sees_faults)
{
    struct slots s;
    cr_assert_eq(slots_init(&s, 4), 0);
    int32_t a = slots_alloc(&s);
    s.state[a] = SLOT_FREE; /* free, but on no list */
    cr_assert_not(slots_is_sound(&s));
    s.state[a] = SLOT_CACHED; /* counted as held */
    cr_assert_not(slots_is_sound(&s));
    s.state[a] = SLOT_HELD;
    cr_assert(slots_is_sound(&s));
    int32_t kept = s.free_list[0];
    s.free_list[0] = s.free_list[1]; /* one twice */
    cr_assert_not(slots_is_sound(&s));
    s.free_list[0] = kept;
    s.n_free--; /* one lost */
    cr_assert_not(slots_is_sound(&s));
    slots_fini(&s);
}

static struct slots four_slots(void)
{
    struct slots s;
    cr_assert_eq(slots_init(&s, 4), 0);
    return s;
}

Test(slots, freeing_twice_aborts, .signal = SIGABRT)
{
    struct slots s = four_slots();
    int32_t slot = slots_alloc(&s);
    slots_free(&s, slot);
    slots_free(&s, slot);
}

Test(slots, freeing_an_unknown_slot_aborts, .signal = SIGABRT)
{
    struct slots s = four_slots();
    slots_free(&s, 4);
}

Test(slots, freeing_minus_one_aborts, .signal = SIGABRT)
{
    struct slots s = four_slots();
    slots_free(&s, -1);
}

Test(slots, caching_a_free_slot_aborts, .signal = SIGABRT)
{
    struct slots s = four_slots();
    slots_cache(&s, 0);
}

Test(slots, holding_a_held_slot_aborts, .signal = SIGABRT)
{
    struct slots s = four_slots();
    slots_hold(&s, slots_alloc(&s));
}

/* ---- pages */

Test(pages, alloc_is_all_or_none)
{
    struct pages p;
    int32_t out[8];
    memset(out, 0xff, sizeof(out));
    cr_assert_eq(pages_init(&p, 7, 64), 0);
    cr_assert_eq(pages_alloc(&p, 8, out), ERR_FULL);
    cr_assert(p.n_free == 7 && out[0] == -1 && pages_is_sound(&p));
    cr_assert_eq(pages_alloc(&p, 0, out), 0);
    cr_assert_eq(pages_alloc(&p, 7, out), 0);
    cr_assert(p.n_free == 0 && p.n_held == 7 && pages_is_sound(&p));
    cr_assert_eq(pages_alloc(&p, 1, out), ERR_FULL);
    pages_fini(&p);
}

Test(pages, refuse_no_pages)
{
    struct pages p;
    cr_assert_eq(pages_init(&p, 0, 64), ERR_INVALID);
    cr_assert_eq(pages_init(&p, 1, 0), ERR_INVALID);
    pages_fini(&p);
}

Test(pages, count_for_tokens_at_the_edges)
{
    struct pages p;
    cr_assert_eq(pages_init(&p, 1, 64), 0);
    cr_assert_eq(pages_for_tokens(&p, 0), 0);
    cr_assert_eq(pages_for_tokens(&p, 1), 1);
    cr_assert_eq(pages_for_tokens(&p, 63), 1);
    cr_assert_eq(pages_for_tokens(&p, 64), 1);
    cr_assert_eq(pages_for_tokens(&p, 65), 2);
    cr_assert_eq(pages_for_tokens(&p, 262144), 4096);
    cr_assert_eq(pages_for_tokens(&p, INT64_C(64) * INT32_MAX), INT32_MAX);
    cr_assert_eq(pages_for_tokens(&p, INT64_MAX), INT32_MAX);
    pages_fini(&p);
}

/* A prefix shared by two requests and a checkpoint. */
Test(pages, are_freed_with_the_last_reference)
{
    struct pages p;
    int32_t page;
    bool is_freed;
    cr_assert_eq(pages_init(&p, 3, 64), 0);
    cr_assert_eq(pages_alloc(&p, 1, &page), 0);
    pages_cache(&p, page);
    cr_assert(p.n_held == 1 && p.n_cached == 0, "a live request uses it: held");
    pages_hold(&p, page);
    pages_unhold(&p, page, &is_freed);
    cr_assert(!is_freed && p.n_held == 1);
    pages_unhold(&p, page, &is_freed);
    cr_assert(!is_freed && p.n_held == 0 && p.n_cached == 1 && pages_is_sound(&p));
    pages_hold(&p, page); /* a prefix hit */
    cr_assert(p.n_held == 1 && p.n_cached == 0);
    pages_uncache(&p, page, &is_freed);
    cr_assert(!is_freed && p.n_held == 1);
    pages_unhold(&p, page, &is_freed);
    cr_assert(is_freed && p.n_free == 3 && pages_is_sound(&p));
    pages_fini(&p);
}

static void check_pages(const struct pages *p, const int32_t (*refs)[2], int32_t n)
{
    int32_t n_free = 0, n_held = 0, n_cached = 0;
    for (int32_t i = 0; i < n; i++) {
        cr_assert(p->held_refs[i] == refs[i][0] && p->cached_refs[i] == refs[i][1], "page %d",
                  i);
        n_held += refs[i][0] > 0;
        n_cached += refs[i][0] == 0 && refs[i][1] > 0;
        n_free += refs[i][0] == 0 && refs[i][1] == 0;
    }
    cr_assert(p->n_free == n_free && p->n_held == n_held && p->n_cached == n_cached);
    cr_assert(pages_is_sound(p));
}

Test(pages, agree_with_a_model_under_random_operations)
{
    enum { N = 41, OPERATIONS = 20000 };
    struct rng rng = {SEED};
    struct pages p;
    int32_t refs[N][2] = {{0}}, out[N]; /* held, cached */
    printf("# seed %d\n", SEED);
    cr_assert_eq(pages_init(&p, N, 64), 0);
    for (int t = 0; t < OPERATIONS; t++) {
        bool is_filling = t / 300 % 2;
        if (rng_int(&rng, is_filling ? 3 : 12) == 0) {
            int32_t n = rng_int(&rng, 8), n_free = p.n_free;
            int rc = pages_alloc(&p, n, out);
            cr_assert_eq(rc, n > n_free ? ERR_FULL : 0);
            for (int32_t i = 0; rc == 0 && i < n; i++) {
                cr_assert(out[i] >= 0 && out[i] < N && !refs[out[i]][0] && !refs[out[i]][1]);
                refs[out[i]][0] = 1;
            }
            continue;
        }
        int32_t page = rng_int(&rng, N), kind = rng_int(&rng, 2);
        bool is_freed = false, drops = rng_int(&rng, is_filling ? 4 : 2) == 0;
        if (drops ? refs[page][kind] == 0 : refs[page][0] + refs[page][1] == 0)
            continue;
        if (drops)
            (kind ? pages_uncache : pages_unhold)(&p, page, t % 2 ? &is_freed : NULL);
        else
            (kind ? pages_cache : pages_hold)(&p, page);
        refs[page][kind] += drops ? -1 : 1;
        if (t % 2)
            cr_assert_eq(is_freed, refs[page][0] + refs[page][1] == 0);
        check_pages(&p, refs, N);
    }
    pages_fini(&p);
}

Test(pages, soundness_sees_faults)
{
    struct pages p;
    int32_t page;
    cr_assert_eq(pages_init(&p, 4, 64), 0);
    cr_assert_eq(pages_alloc(&p, 1, &page), 0);
    p.held_refs[page] = 0; /* free, but on no list */
    cr_assert_not(pages_is_sound(&p));
    p.held_refs[page] = -1;
    cr_assert_not(pages_is_sound(&p));
    p.held_refs[page] = 0;
    p.cached_refs[page] = 1; /* counted as held */
    cr_assert_not(pages_is_sound(&p));
    p.held_refs[page] = 1;
    cr_assert(pages_is_sound(&p));
    p.free_list[0] = p.free_list[1]; /* one twice */
    cr_assert_not(pages_is_sound(&p));
    pages_fini(&p);
}

static struct pages four_pages(int32_t *page)
{
    struct pages p;
    cr_assert_eq(pages_init(&p, 4, 64), 0);
    cr_assert_eq(pages_alloc(&p, 1, page), 0);
    return p;
}

Test(pages, unholding_twice_aborts, .signal = SIGABRT)
{
    int32_t page;
    struct pages p = four_pages(&page);
    pages_unhold(&p, page, NULL);
    pages_unhold(&p, page, NULL);
}

Test(pages, unholding_a_cached_page_aborts, .signal = SIGABRT)
{
    int32_t page;
    struct pages p = four_pages(&page);
    pages_cache(&p, page);
    pages_unhold(&p, page, NULL);
    pages_unhold(&p, page, NULL);
}

Test(pages, uncaching_a_held_page_aborts, .signal = SIGABRT)
{
    int32_t page;
    struct pages p = four_pages(&page);
    pages_uncache(&p, page, NULL);
}

Test(pages, holding_a_free_page_aborts, .signal = SIGABRT)
{
    int32_t page;
    struct pages p = four_pages(&page);
    pages_hold(&p, (page + 1) % 4);
}

Test(pages, caching_an_unknown_page_aborts, .signal = SIGABRT)
{
    int32_t page;
    struct pages p = four_pages(&page);
    pages_cache(&p, 4);
}

Test(pages, unholding_an_unknown_page_aborts, .signal = SIGABRT)
{
    int32_t page;
    struct pages p = four_pages(&page);
    pages_unhold(&p, -1, NULL);
}
