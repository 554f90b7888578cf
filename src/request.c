#include "request.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend.h"

_Static_assert(sizeof(((struct request *)0)->next_top) == TOP_MAX * sizeof(struct top_entry),
               "next_top holds TOP_MAX candidates");

/* calloc, so that what no step has written reads as zeros, and so that the pages of a large
 * answer cost memory only when they are written. */
static int alloc_answer(struct request *r)
{
    size_t n_ids = (size_t)r->n_ids, n_top;
    if (r->logprobs == LOGPROBS_ALL) {
        r->prompt_logprobs = calloc(n_ids, sizeof(*r->prompt_logprobs));
        if (!r->prompt_logprobs)
            return ERR_NOMEM;
    }
    if (r->logprobs == LOGPROBS_ALL && r->n_top > 0) {
        if (__builtin_mul_overflow(n_ids, (size_t)r->n_top, &n_top))
            return ERR_NOMEM;
        r->prompt_top = calloc(n_top, sizeof(*r->prompt_top));
        if (!r->prompt_top)
            return ERR_NOMEM;
        for (int32_t i = 0; i < r->n_top; i++)
            r->prompt_top[i].id = -1;
    }
    /* A piece that does not end the prompt holds at least one chunk: never grows in a step. */
    r->pieces_cap = (r->n_ids - 1) / CHUNK_TOKENS + 1;
    r->pieces = malloc((size_t)r->pieces_cap * sizeof(*r->pieces));
    r->pages = malloc((size_t)r->item.n_pages * sizeof(*r->pages));
    return r->pieces && r->pages ? 0 : ERR_NOMEM;
}

struct request *request_new(int32_t *ids, int32_t n_ids, enum logprobs_mode mode, int32_t n_top,
                            int32_t page_tokens)
{
    assert(ids && n_ids >= 1 && n_top >= 0 && n_top <= TOP_MAX && page_tokens >= 1);
    struct request *r = calloc(1, sizeof(*r));
    if (!r) {
        free(ids);
        return NULL;
    }
    atomic_init(&r->refs, 1);
    atomic_init(&r->cancelled, false);
    r->ids = ids;
    r->n_ids = r->n_prompt = n_ids;
    r->logprobs = mode;
    r->n_top = n_top;
    r->item.n_tokens = n_ids;
    r->item.n_pages = (n_ids - 1) / page_tokens + 1;
    r->item.i_entry = -1;
    r->slot = r->copy_from = r->copy_page = -1;
    for (int32_t i = 0; i < TOP_MAX; i++)
        r->next_top[i].id = -1;
    if (alloc_answer(r)) {
        request_unref(r);
        return NULL;
    }
    return r;
}

int request_generate(struct request *r, const struct sampling *s, int32_t page_tokens)
{
    assert(!r->sampling && s->max_new >= 1);
    r->sampling = malloc(sizeof(*s));
    if (!r->sampling) {
        free(s->bias);
        return ERR_NOMEM;
    }
    *r->sampling = *s;
    size_t n_new = (size_t)s->max_new, n_all = (size_t)r->n_prompt + n_new;
    if (n_all > INT32_MAX)
        return ERR_NOMEM;
    int32_t *ids = realloc(r->ids, n_all * sizeof(*ids));
    if (!ids)
        return ERR_NOMEM;
    r->ids = ids;
    /* The last token is never computed: nothing is behind it. */
    r->item.n_pages = ((int32_t)n_all - 2) / page_tokens + 1;
    int32_t *pages = realloc(r->pages, (size_t)r->item.n_pages * sizeof(*pages));
    if (!pages)
        return ERR_NOMEM;
    r->pages = pages;
    r->new_logprobs = calloc(n_new, sizeof(*r->new_logprobs));
    r->new_top = r->n_top > 0 ? calloc(n_new * (size_t)r->n_top, sizeof(*r->new_top)) : NULL;
    if (!r->new_logprobs || (!r->new_top && r->n_top > 0))
        return ERR_NOMEM;
    return sampler_init(&r->sampler, r->sampling, r->ids, r->n_prompt);
}

int request_label(struct request *r, const int32_t *labels, int32_t n)
{
    assert(r->sampling && !r->labels && n >= 1 && n <= LABELS_MAX);
    r->labels = malloc((size_t)n * sizeof(*r->labels));
    r->new_labels = calloc((size_t)r->sampling->max_new * (size_t)n, sizeof(*r->new_labels));
    if (!r->labels || !r->new_labels)
        return ERR_NOMEM;
    memcpy(r->labels, labels, (size_t)n * sizeof(*r->labels));
    r->n_labels = n;
    return 0;
}

void request_ref(struct request *r)
{
    /* Whoever calls this has a reference already: nothing to order. */
    int before = atomic_fetch_add_explicit(&r->refs, 1, memory_order_relaxed);
    assert(before >= 1);
    (void)before;
}

void request_unref(struct request *r)
{
    if (!r)
        return;
    /* Release: this thread's writes come before the free; acquire: the last one sees all. */
    int before = atomic_fetch_sub_explicit(&r->refs, 1, memory_order_acq_rel);
    assert(before >= 1);
    if (before > 1)
        return;
    free(r->ids);
    free(r->share_key);
    free(r->pages);
    free(r->prompt_logprobs);
    free(r->prompt_top);
    free(r->pieces);
    free(r->new_logprobs);
    free(r->new_top);
    free(r->labels);
    free(r->new_labels);
    sampler_fini(&r->sampler);
    if (r->sampling)
        free(r->sampling->bias);
    free(r->sampling);
    free(r);
}

int request_add_piece(struct request *r, int64_t step, int32_t start, int32_t n_tokens)
{
    if (r->n_pieces == r->pieces_cap) {
        size_t cap = 2 * (size_t)r->pieces_cap;
        struct request_piece *p = realloc(r->pieces, cap * sizeof(*p));
        if (!p)
            return ERR_NOMEM;
        r->pieces = p;
        r->pieces_cap = (int32_t)cap;
    }
    r->pieces[r->n_pieces++] = (struct request_piece){step, start, n_tokens};
    return 0;
}

int64_t request_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}
