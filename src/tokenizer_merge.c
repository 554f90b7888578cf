/* The merges of one piece: again and again the pair of lowest rank, the leftmost of equals.
 *
 * Two bodies that give the same ids. For short pieces every step scans all ranks, which is
 * quickest there and quadratic. For long ones the pairs are in lists by rank, and one pass over
 * the ranks makes all merges: a merge never makes a pair of a lower rank, as tokenizer_load.c
 * has seen to. That takes linear time and goes through memory in order; a piece can be a whole
 * request. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_internal.h"

static inline int32_t byte_pair_rank(const struct bpe *b, const unsigned char *p)
{
    return b->byte_ranks[p[0] << 8 | p[1]];
}

static inline size_t token_bytes(const struct bpe *b, uint32_t id)
{
    return b->tokens->offsets[id + 1] - b->tokens->offsets[id];
}

/* ---- short pieces */

int bpe_merge_scan(const struct bpe *b, const unsigned char *piece, size_t len,
                   struct id_list *out)
{
    /* ids[i] and ids[i + 1] merge with ranks[i]. */
    int32_t ids[BPE_MAX_SCAN_BYTES], ranks[BPE_MAX_SCAN_BYTES];
    size_t n = len;

    for (size_t i = 0; i < n; i++)
        ids[i] = b->byte_id[piece[i]];
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = byte_pair_rank(b, piece + i);
    while (n > 1) {
        size_t at = 0;
        for (size_t i = 1; i + 1 < n; i++)
            at = ranks[i] < ranks[at] ? i : at;
        if (ranks[at] == TOKENIZER_NO_RANK)
            break;
        ids[at] = b->made[ranks[at]];
        n--;
        memmove(ids + at + 1, ids + at + 2, (n - at - 1) * sizeof(*ids));
        if (at + 1 < n) {
            memmove(ranks + at + 1, ranks + at + 2, (n - at - 2) * sizeof(*ranks));
            ranks[at] = bpe_pair_rank(b, ids[at], ids[at + 1]);
        }
        if (at > 0)
            ranks[at - 1] = bpe_pair_rank(b, ids[at - 1], ids[at]);
    }
    if (id_list_reserve(out, n) != 0)
        return ERR_NOMEM;
    memcpy(out->ids + out->n, ids, n * sizeof(*ids));
    out->n += n;
    return 0;
}

/* ---- long pieces */

/* In prev: the first of a list, the rest is its rank; or in no list. */
#define LIST_FIRST 0x80000000u
#define LIST_NONE UINT32_MAX
/* In next and heads. */
#define LIST_END UINT32_MAX

/* A piece in work. A token of the bytes [i, j) has its id in marks[i] and in marks[j - 1]: so
 * its neighbours are found with no links. The pair of the tokens that start at i and j, if it
 * has a rank, is in the list of that rank as i. */
struct work {
    const struct bpe *b;
    struct bpe_scratch *s;
    size_t len;
};

static void list_add(struct bpe_scratch *s, uint32_t at, int32_t rank)
{
    uint32_t head = s->heads[rank];
    s->next[at] = head;
    s->prev[at] = LIST_FIRST | (uint32_t)rank;
    if (head != LIST_END)
        s->prev[head] = at;
    s->heads[rank] = at;
    s->waiting[rank / 64] |= 1ull << rank % 64;
}

static void list_remove(struct bpe_scratch *s, uint32_t at)
{
    uint32_t prev = s->prev[at], next = s->next[at];
    if (prev == LIST_NONE)
        return;
    if (prev & LIST_FIRST)
        s->heads[prev & ~LIST_FIRST] = next;
    else
        s->next[prev] = next;
    if (next != LIST_END)
        s->prev[next] = prev;
    s->prev[at] = LIST_NONE;
}

/* The id of the token that starts, or ends, at a byte. */
static uint32_t id_at(const struct work *w, size_t at)
{
    return w->s->marks[at];
}

static size_t next_of(const struct work *w, size_t at)
{
    return at + token_bytes(w->b, id_at(w, at));
}

/* Where the token before starts; at > 0. */
static size_t before(const struct work *w, size_t at)
{
    return at - token_bytes(w->b, id_at(w, at - 1));
}

/* Puts the pair at `at`, which is in no list, into that of its rank. */
static void list_pair(const struct work *w, size_t at)
{
    size_t next = next_of(w, at);
    if (next >= w->len)
        return;
    int32_t rank = bpe_pair_rank(w->b, (int32_t)id_at(w, at), (int32_t)id_at(w, next));
    if (rank != TOKENIZER_NO_RANK)
        list_add(w->s, (uint32_t)at, rank);
}

/* Makes one token of the two at `at`. */
static void join(const struct work *w, size_t at, int32_t rank)
{
    struct bpe_scratch *s = w->s;
    uint32_t made = (uint32_t)w->b->made[rank];
    size_t next = next_of(w, at);

    list_remove(s, (uint32_t)at);
    list_remove(s, (uint32_t)next);
    s->marks[at] = made;
    s->marks[next_of(w, at) - 1] = made;
    if (at > 0) {
        size_t left = before(w, at);
        list_remove(s, (uint32_t)left);
        list_pair(w, left);
    }
    list_pair(w, at);
}

/* Makes all merges of one rank. What they make has higher ranks only. Their order matters only
 * where they share a token, as in "aaa": there it is from the left. */
static void join_all(const struct work *w, int32_t rank)
{
    while (w->s->heads[rank] != LIST_END) {
        size_t at = w->s->heads[rank];
        uint32_t id = id_at(w, at);
        if (id_at(w, next_of(w, at)) != id) {
            join(w, at, rank);
            continue;
        }
        while (at > 0 && id_at(w, at - 1) == id)
            at = before(w, at);
        while (at < w->len && id_at(w, at) == id && next_of(w, at) < w->len &&
               id_at(w, next_of(w, at)) == id) {
            join(w, at, rank);
            at = next_of(w, at);
        }
    }
}

static int reserve_scratch(const struct bpe *b, struct bpe_scratch *s, size_t len)
{
    size_t n_words = (size_t)b->n_merges / 64 + 1;
    if (!s->heads) {
        s->heads = malloc(((size_t)b->n_merges + 1) * sizeof(*s->heads));
        s->waiting = calloc(n_words, sizeof(*s->waiting));
        if (!s->heads || !s->waiting)
            return ERR_NOMEM;
        memset(s->heads, 0xff, (size_t)b->n_merges * sizeof(*s->heads));
    }
    if (len <= s->cap)
        return 0;
    free(s->marks);
    free(s->next);
    free(s->prev);
    s->cap = 0;
    s->marks = malloc(len * sizeof(*s->marks));
    s->next = malloc(len * sizeof(*s->next));
    s->prev = malloc(len * sizeof(*s->prev));
    if (!s->marks || !s->next || !s->prev)
        return ERR_NOMEM;
    s->cap = len;
    return 0;
}

void bpe_scratch_fini(struct bpe_scratch *s)
{
    free(s->marks);
    free(s->next);
    free(s->prev);
    free(s->heads);
    free(s->waiting);
    memset(s, 0, sizeof(*s));
}

int bpe_merge_lists(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
                    size_t len, struct id_list *out)
{
    struct work w = {b, s, len};
    size_t n = 0;

    if (reserve_scratch(b, s, len) != 0)
        return ERR_NOMEM;
    for (size_t i = 0; i < len; i++)
        s->marks[i] = (uint32_t)b->byte_id[piece[i]];
    /* From the right, so that the lists go from the left. */
    for (size_t i = len; i-- > 0;) {
        int32_t rank = i + 1 < len ? byte_pair_rank(b, piece + i) : TOKENIZER_NO_RANK;
        s->prev[i] = LIST_NONE;
        if (rank != TOKENIZER_NO_RANK)
            list_add(s, (uint32_t)i, rank);
    }
    for (size_t word = 0; word <= (size_t)b->n_merges / 64; word++) {
        while (s->waiting[word]) {
            int bit = __builtin_ctzll(s->waiting[word]);
            join_all(&w, (int32_t)(word * 64) + bit);
            s->waiting[word] &= ~(1ull << bit);
        }
    }
    for (size_t i = 0; i < len; i = next_of(&w, i))
        n++;
    if (id_list_reserve(out, n) != 0)
        return ERR_NOMEM;
    for (size_t i = 0; i < len; i = next_of(&w, i))
        out->ids[out->n++] = (int32_t)id_at(&w, i);
    return 0;
}
