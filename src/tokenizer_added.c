/* Added tokens in raw text. The tokens are sorted by their bytes, so that those which begin
 * with the bytes read so far are always a range, which each further byte narrows. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_internal.h"

static int compare_tokens(const void *a, const void *b)
{
    const struct added_token *x = a, *y = b;
    int order = memcmp(x->content, y->content, x->len < y->len ? x->len : y->len);
    return order != 0 ? order : (x->len > y->len) - (x->len < y->len);
}

void added_set_sort(struct added_set *a)
{
    if (a->n > 0)
        qsort(a->tokens, a->n, sizeof(*a->tokens), compare_tokens);
    for (size_t i = 0; i < a->n; i++)
        a->starts[(unsigned char)a->tokens[i].content[0]] = true;
}

void added_set_fini(struct added_set *a)
{
    for (size_t i = 0; i < a->n; i++)
        free(a->tokens[i].content);
    free(a->tokens);
    memset(a, 0, sizeof(*a));
}

/* The first token of [from, to) whose byte at depth is at least value. All of them are longer
 * than depth. */
static size_t lower_bound(const struct added_set *a, size_t from, size_t to, size_t depth,
                          int value)
{
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if ((unsigned char)a->tokens[middle].content[depth] < value)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

/* The longest token that text begins with, or -1. */
static ptrdiff_t longest_at(const struct added_set *a, const char *text, size_t len)
{
    ptrdiff_t found = -1;
    size_t from = 0, to = a->n;
    for (size_t depth = 0; depth < len; depth++) {
        int byte = (unsigned char)text[depth];
        from = lower_bound(a, from, to, depth, byte);
        to = lower_bound(a, from, to, depth, byte + 1);
        if (from == to)
            break;
        /* Of those that share depth + 1 bytes, the one that ends there comes first. */
        if (a->tokens[from].len == depth + 1) {
            found = (ptrdiff_t)from++;
            if (from == to)
                break;
        }
    }
    return found;
}

ptrdiff_t added_set_find(const struct added_set *a, const char *text, size_t len, size_t from,
                         size_t *at)
{
    for (size_t i = from; i < len; i++) {
        if (!a->starts[(unsigned char)text[i]])
            continue;
        ptrdiff_t found = longest_at(a, text + i, len - i);
        if (found >= 0) {
            *at = i;
            return found;
        }
    }
    return -1;
}
