/* Requests: what request_new sets and sizes, pieces, references. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>

#include "backend.h"
#include "leaks.h"
#include "request.h"

TestSuite(request, .fini = leaks_check);

static struct request *make(int32_t n_ids, enum logprobs_mode mode, int32_t n_top)
{
    int32_t *ids = malloc((size_t)n_ids * sizeof(*ids));
    cr_assert(ids);
    for (int32_t i = 0; i < n_ids; i++)
        ids[i] = i;
    struct request *r = request_new(ids, n_ids, mode, n_top, 64);
    cr_assert(r);
    cr_assert(r->ids == ids && r->n_ids == n_ids && r->logprobs == mode && r->n_top == n_top);
    return r;
}

Test(request, starts_in_no_state)
{
    struct request *r = make(65, LOGPROBS_NEXT, 5);
    cr_assert_eq(atomic_load(&r->refs), 1);
    cr_assert_not(atomic_load(&r->cancelled));
    cr_assert(r->slot == -1 && r->n_pages == 0 && r->n_in_flight == 0 && r->n_pieces == 0);
    cr_assert(r->item.n_tokens == 65 && r->item.n_pages == 2 && r->item.n_planned == 0);
    cr_assert_eq(r->item.i_entry, -1);
    for (int i = 0; i < TOP_MAX; i++)
        cr_assert_eq(r->next_top[i].id, -1);
    r->pages[0] = r->pages[1] = 1; /* there is room for the whole prompt */
    request_unref(r);
}

Test(request, page_tables_hold_the_whole_prompt)
{
    const int32_t n[] = {1, 63, 64, 65, 128, 129, 262144};
    const int32_t pages[] = {1, 1, 1, 2, 2, 3, 4096};
    for (int i = 0; i < 7; i++) {
        struct request *r = make(n[i], LOGPROBS_NONE, 0);
        cr_assert_eq(r->item.n_pages, pages[i], "%d ids", n[i]);
        r->pages[pages[i] - 1] = 7;
        request_unref(r);
    }
}

Test(request, has_room_for_what_its_mode_returns)
{
    struct request *r = make(100, LOGPROBS_NONE, 20);
    cr_assert(!r->prompt_logprobs && !r->prompt_top);
    request_unref(r);
    r = make(100, LOGPROBS_NEXT, 20);
    cr_assert(!r->prompt_logprobs && !r->prompt_top);
    request_unref(r);
    r = make(100, LOGPROBS_ALL, 0);
    cr_assert(r->prompt_logprobs && !r->prompt_top);
    r->prompt_logprobs[99] = -1;
    request_unref(r);
    r = make(100, LOGPROBS_ALL, 20);
    for (int i = 0; i < 20; i++)
        cr_assert_eq(r->prompt_top[i].id, -1);
    r->prompt_top[100 * 20 - 1].id = 1;
    request_unref(r);
}

/* Whatever the scheduler does, a step adds pieces without allocating. */
Test(request, pieces_of_whole_chunks_fit_from_the_start)
{
    const int32_t n[] = {1, 64, 65, 6400, 6401};
    for (int k = 0; k < 5; k++) {
        struct request *r = make(n[k], LOGPROBS_NEXT, 0);
        const struct request_piece *first = r->pieces;
        for (int32_t at = 0; at < n[k]; at += CHUNK_TOKENS) {
            int32_t len = n[k] - at < CHUNK_TOKENS ? n[k] - at : CHUNK_TOKENS;
            cr_assert_eq(request_add_piece(r, at, at, len), 0);
        }
        cr_assert_eq(r->pieces, first, "%d ids", n[k]);
        cr_assert_eq(r->pieces_cap, r->n_pieces, "%d ids", n[k]);
        request_unref(r);
    }
}

Test(request, more_pieces_than_that_are_kept_too)
{
    struct request *r = make(10, LOGPROBS_NEXT, 0);
    for (int32_t i = 0; i < 10; i++)
        cr_assert_eq(request_add_piece(r, INT64_C(1) << 40 | i, i, 1), 0);
    cr_assert_eq(r->n_pieces, 10);
    for (int32_t i = 0; i < 10; i++)
        cr_assert(r->pieces[i].step == (INT64_C(1) << 40 | i) && r->pieces[i].start == i &&
                  r->pieces[i].n_tokens == 1);
    request_unref(r);
}

/* The answer of 2^31 - 1 ids with 20 candidates each, 343 GB, is refused or got, not
 * wrapped. */
Test(request, sizes_do_not_wrap)
{
#ifdef __SANITIZE_ADDRESS__
    cr_skip_test("the sanitizer ends a program that asks for so much");
#endif
    struct request *r = request_new(malloc(4), INT32_MAX, LOGPROBS_ALL, TOP_MAX, 64);
    if (r)
        r->prompt_top[(size_t)INT32_MAX * TOP_MAX - 1].id = 1;
    request_unref(r);
}

static void *ref_and_unref(void *arg)
{
    struct request *r = arg;
    for (int i = 0; i < 100000; i++) {
        request_ref(r);
        request_unref(r);
    }
    request_unref(r);
    return NULL;
}

Test(request, references_count_from_all_threads)
{
    enum { THREADS = 4 };
    pthread_t t[THREADS];
    struct request *r = make(10, LOGPROBS_NEXT, 0);
    for (int i = 0; i < THREADS; i++) {
        request_ref(r);
        cr_assert_eq(pthread_create(&t[i], NULL, ref_and_unref, r), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    cr_assert_eq(atomic_load(&r->refs), 1);
    request_unref(r);
    request_unref(NULL);
}

Test(request, clock_goes_on)
{
    int64_t a_us = request_now_us(), b_us = request_now_us();
    cr_assert(a_us > 0 && b_us >= a_us && b_us - a_us < 60000000);
}
