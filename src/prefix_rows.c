/* Numbers of tokens that were computed, kept with the nodes they lie before, so that a prompt
 * that begins at a kept state can be told its tokens' numbers without computing them. */
#include <stdlib.h>
#include <string.h>

#include "prefix.h"
#include "request.h"

/* Of the edge's tokens, and of next_id behind them. */
struct prefix_rows {
    uint64_t stored_by;
    int32_t n_top;
    int32_t next_id;
    float *logprobs;       /* [n_tokens + 1] */
    struct top_entry *top; /* [(n_tokens + 1) * n_top] */
};

static struct prefix_rows *rows_new(int32_t n_tokens, int32_t n_top)
{
    size_t n = (size_t)n_tokens + 1, n_all = n * (size_t)n_top;
    struct prefix_rows *w = calloc(1, sizeof(*w));
    if (!w)
        return NULL;
    w->n_top = n_top;
    w->logprobs = malloc(n * sizeof(*w->logprobs));
    w->top = malloc((n_all ? n_all : 1) * sizeof(*w->top));
    if (w->logprobs && w->top)
        return w;
    prefix_rows_free(w);
    return NULL;
}

void prefix_rows_free(struct prefix_rows *w)
{
    if (!w)
        return;
    free(w->logprobs);
    free(w->top);
    free(w);
}

int32_t prefix_rows_top(const struct prefix_node *v)
{
    return v->rows ? v->rows->n_top : -1;
}

uint64_t prefix_rows_by(const struct prefix_node *v)
{
    return v->rows ? v->rows->stored_by : UINT64_MAX;
}

int prefix_rows_store(struct prefix_node *v, const struct request *r)
{
    struct prefix_rows *w = rows_new(v->n_tokens, r->n_top);
    if (!w)
        return ERR_NOMEM;
    size_t from = (size_t)(v->depth - v->n_tokens), n = (size_t)v->n_tokens + 1;
    size_t n_top = (size_t)r->n_top;
    memcpy(w->logprobs, r->prompt_logprobs + from, n * sizeof(*w->logprobs));
    if (n_top > 0)
        memcpy(w->top, r->prompt_top + from * n_top, n * n_top * sizeof(*w->top));
    w->next_id = r->ids[v->depth];
    w->stored_by = r->item.seq;
    prefix_rows_free(v->rows);
    v->rows = w;
    return 0;
}

bool prefix_rows_cover(const struct prefix_node *v, const struct request *r)
{
    if (!v->rows || v->rows->next_id != r->ids[v->depth])
        return false;
    for (; v->parent; v = v->parent)
        if (prefix_rows_top(v) < r->n_top)
            return false;
    return true;
}

/* n rows from the first of v's to r's of token `at` on. */
static void load(const struct prefix_rows *w, struct request *r, int32_t at, int32_t n)
{
    memcpy(r->prompt_logprobs + at, w->logprobs, (size_t)n * sizeof(*w->logprobs));
    for (int32_t t = 0; r->n_top > 0 && t < n; t++)
        memcpy(r->prompt_top + (size_t)(at + t) * (size_t)r->n_top,
               w->top + (size_t)t * (size_t)w->n_top, (size_t)r->n_top * sizeof(*w->top));
}

void prefix_rows_load(const struct prefix_node *v, struct request *r)
{
    load(v->rows, r, v->depth - v->n_tokens, v->n_tokens + 1);
    for (v = v->parent; v->parent; v = v->parent)
        load(v->rows, r, v->depth - v->n_tokens, v->n_tokens);
}

int prefix_rows_split(struct prefix_node *u, struct prefix_node *v, int32_t first_id)
{
    struct prefix_rows *w = v->rows;
    if (!w)
        return 0;
    size_t n = (size_t)u->n_tokens, n_below = (size_t)v->n_tokens, n_top = (size_t)w->n_top;
    struct prefix_rows *upper = rows_new(u->n_tokens, w->n_top);
    if (!upper)
        return ERR_NOMEM;
    memcpy(upper->logprobs, w->logprobs, (n + 1) * sizeof(*w->logprobs));
    memcpy(upper->top, w->top, (n + 1) * n_top * sizeof(*w->top));
    upper->next_id = first_id;
    upper->stored_by = w->stored_by;
    memmove(w->logprobs, w->logprobs + n, (n_below + 1) * sizeof(*w->logprobs));
    memmove(w->top, w->top + n * n_top, (n_below + 1) * n_top * sizeof(*w->top));
    u->rows = upper;
    return 0;
}
