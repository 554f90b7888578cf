#include "pages.h"

#include <stdlib.h>

#include "log.h"

__attribute__((noreturn)) static void die(const char *what, const struct pages *p, int32_t page)
{
    bool is_known = page >= 0 && page < p->n_total;
    log_error("bug=%s page=%d n_total=%d held_refs=%d cached_refs=%d", what, page, p->n_total,
              is_known ? p->held_refs[page] : -1, is_known ? p->cached_refs[page] : -1);
    abort();
}

static bool is_used(const struct pages *p, int32_t page)
{
    return page >= 0 && page < p->n_total && (p->held_refs[page] || p->cached_refs[page]);
}

/* Where a page counts: held wins over cached. */
static int32_t *counter_of(struct pages *p, int32_t page)
{
    return p->held_refs[page] ? &p->n_held : p->cached_refs[page] ? &p->n_cached : &p->n_free;
}

/* Adds d to one kind of reference of a page and moves the page between the counters. */
static void change_refs(struct pages *p, int32_t *refs, int32_t page, int32_t d)
{
    --*counter_of(p, page);
    refs[page] += d;
    ++*counter_of(p, page);
}

static void drop_ref(struct pages *p, int32_t *refs, int32_t page, bool *is_freed)
{
    change_refs(p, refs, page, -1);
    bool is_free = !is_used(p, page);
    if (is_free)
        p->free_list[p->n_free - 1] = page;
    if (is_freed)
        *is_freed = is_free;
}

int pages_init(struct pages *p, int32_t n_total, int32_t page_tokens)
{
    *p = (struct pages){0};
    if (n_total < 1 || page_tokens < 1)
        return ERR_INVALID;
    p->free_list = malloc((size_t)n_total * sizeof(*p->free_list));
    p->held_refs = calloc((size_t)n_total, sizeof(*p->held_refs));
    p->cached_refs = calloc((size_t)n_total, sizeof(*p->cached_refs));
    if (!p->free_list || !p->held_refs || !p->cached_refs) {
        pages_fini(p);
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < n_total; i++)
        p->free_list[i] = n_total - 1 - i;
    p->n_total = p->n_free = n_total;
    p->page_tokens = page_tokens;
    return 0;
}

void pages_fini(struct pages *p)
{
    free(p->free_list);
    free(p->held_refs);
    free(p->cached_refs);
    *p = (struct pages){0};
}

int pages_alloc(struct pages *p, int32_t n, int32_t *out)
{
    if (n > p->n_free)
        return ERR_FULL;
    for (int32_t i = 0; i < n; i++) {
        int32_t page = p->free_list[p->n_free - 1];
        if (page < 0 || page >= p->n_total || is_used(p, page))
            die("pages_alloc_of_used", p, page);
        change_refs(p, p->held_refs, page, 1);
        out[i] = page;
    }
    return 0;
}

void pages_hold(struct pages *p, int32_t page)
{
    if (!is_used(p, page))
        die("pages_hold_of_free_or_unknown", p, page);
    change_refs(p, p->held_refs, page, 1);
}

void pages_cache(struct pages *p, int32_t page)
{
    if (!is_used(p, page))
        die("pages_cache_of_free_or_unknown", p, page);
    change_refs(p, p->cached_refs, page, 1);
}

void pages_unhold(struct pages *p, int32_t page, bool *is_freed)
{
    if (!is_used(p, page) || !p->held_refs[page])
        die("pages_unhold_of_not_held", p, page);
    drop_ref(p, p->held_refs, page, is_freed);
}

void pages_uncache(struct pages *p, int32_t page, bool *is_freed)
{
    if (!is_used(p, page) || !p->cached_refs[page])
        die("pages_uncache_of_not_cached", p, page);
    drop_ref(p, p->cached_refs, page, is_freed);
}

int32_t pages_for_tokens(const struct pages *p, int64_t n_tokens)
{
    int64_t n = n_tokens / p->page_tokens + (n_tokens % p->page_tokens != 0);
    return n > INT32_MAX ? INT32_MAX : (int32_t)n;
}

bool pages_is_sound(const struct pages *p)
{
    int32_t n_free = 0, n_held = 0, n_cached = 0;
    bool *is_listed = calloc((size_t)p->n_total + 1, sizeof(bool));
    bool ok = is_listed != NULL;
    for (int32_t i = 0; ok && i < p->n_free; i++) {
        int32_t page = p->free_list[i];
        ok = page >= 0 && page < p->n_total && !is_listed[page];
        if (ok)
            is_listed[page] = true;
    }
    for (int32_t i = 0; ok && i < p->n_total; i++) {
        ok = p->held_refs[i] >= 0 && p->cached_refs[i] >= 0 && is_listed[i] == !is_used(p, i);
        if (p->held_refs[i])
            n_held++;
        else if (p->cached_refs[i])
            n_cached++;
        else
            n_free++;
    }
    free(is_listed);
    return ok && n_free == p->n_free && n_held == p->n_held && n_cached == p->n_cached;
}
