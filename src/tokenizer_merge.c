/* The merges of one piece: again and again the pair of lowest rank, the leftmost of equals.
 *
 * Two bodies that give the same ids: for short pieces every step scans all ranks, which is quickest
 * there and quadratic; for long ones a heap holds the pairs. A piece can be a whole request. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_internal.h"

/* In marks: a token starts here. Without it the entry is the id of the token that ends here. */
#define MARK_START 0x80000000u

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

/* A piece in work. A token of the bytes [i, j) has its id in marks[i], with MARK_START, and in
 * marks[j - 1]: so its neighbours are found with no links. */
struct work {
    const struct bpe *b;
    uint32_t *marks;
    size_t len;
    uint64_t *heap; /* rank << 32 | where the left token starts; the least on top; 4 children */
    size_t n_heap;
};

static void sift_down(struct work *w, size_t i)
{
    uint64_t entry = w->heap[i];
    for (;;) {
        size_t child = 4 * i + 1, least = child;
        if (child >= w->n_heap)
            break;
        size_t end = child + 4 < w->n_heap ? child + 4 : w->n_heap;
        for (size_t k = child + 1; k < end; k++)
            least = w->heap[k] < w->heap[least] ? k : least;
        if (w->heap[least] >= entry)
            break;
        w->heap[i] = w->heap[least];
        i = least;
    }
    w->heap[i] = entry;
}

static void heapify(struct work *w)
{
    for (size_t i = w->n_heap / 4 + 1; i-- > 0;)
        if (i < w->n_heap)
            sift_down(w, i);
}

/* The rank of the token at `at` with the next one; sets *next, where that starts, and *id, of the
 * token at `at`. */
static int32_t rank_at(const struct work *w, size_t at, size_t *next, uint32_t *id)
{
    *id = w->marks[at] & ~MARK_START;
    *next = at + token_bytes(w->b, *id);
    if (*next >= w->len)
        return TOKENIZER_NO_RANK;
    return bpe_pair_rank(w->b, (int32_t)*id, (int32_t)(w->marks[*next] & ~MARK_START));
}

static bool is_live(const struct work *w, uint64_t entry)
{
    size_t at = (uint32_t)entry, next;
    uint32_t id;
    return (w->marks[at] & MARK_START) && rank_at(w, at, &next, &id) == (int32_t)(entry >> 32);
}

/* Adds the pair that starts at `at`. The heap has room for a quarter more than there can be live
 * entries; when it is full, the others go. */
static void push(struct work *w, size_t at, size_t cap)
{
    size_t next;
    uint32_t id;
    int32_t rank = rank_at(w, at, &next, &id);
    if (rank == TOKENIZER_NO_RANK)
        return;
    if (w->n_heap == cap) {
        size_t n = 0;
        for (size_t i = 0; i < cap; i++)
            if (is_live(w, w->heap[i]))
                w->heap[n++] = w->heap[i];
        w->n_heap = n;
        heapify(w);
    }
    uint64_t entry = (uint64_t)rank << 32 | at;
    size_t i = w->n_heap++;
    while (i > 0 && w->heap[(i - 1) / 4] > entry) {
        w->heap[i] = w->heap[(i - 1) / 4];
        i = (i - 1) / 4;
    }
    w->heap[i] = entry;
}

static int reserve_scratch(struct bpe_scratch *s, size_t len)
{
    if (len <= s->cap)
        return 0;
    bpe_scratch_fini(s);
    s->marks = malloc(len * sizeof(*s->marks));
    s->heap = malloc((len + len / 4) * sizeof(*s->heap));
    if (!s->marks || !s->heap)
        return ERR_NOMEM;
    s->cap = len;
    return 0;
}

void bpe_scratch_fini(struct bpe_scratch *s)
{
    free(s->marks);
    free(s->heap);
    memset(s, 0, sizeof(*s));
}

int bpe_merge_heap(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
                   size_t len, struct id_list *out)
{
    if (reserve_scratch(s, len) != 0)
        return ERR_NOMEM;
    struct work w = {.b = b, .marks = s->marks, .len = len, .heap = s->heap};
    const size_t heap_cap = len + len / 4;
    size_t n = len;

    for (size_t i = 0; i < len; i++)
        w.marks[i] = (uint32_t)b->byte_id[piece[i]] | MARK_START;
    for (size_t i = 0; i + 1 < len; i++) {
        int32_t rank = byte_pair_rank(b, piece + i);
        if (rank != TOKENIZER_NO_RANK)
            w.heap[w.n_heap++] = (uint64_t)rank << 32 | i;
    }
    heapify(&w);
    while (w.n_heap > 0) {
        size_t at = (uint32_t)w.heap[0], next;
        uint32_t id;
        int32_t rank = (int32_t)(w.heap[0] >> 32);
        bool live = (w.marks[at] & MARK_START) && rank_at(&w, at, &next, &id) == rank;

        w.heap[0] = w.heap[--w.n_heap];
        if (w.n_heap > 0)
            sift_down(&w, 0);
        if (!live)
            continue;
        uint32_t made = (uint32_t)b->made[rank];
        w.marks[next] = 0;
        w.marks[at + token_bytes(b, made) - 1] = made;
        w.marks[at] = made | MARK_START;
        n--;
        if (at > 0)
            push(&w, at - token_bytes(b, w.marks[at - 1] & ~MARK_START), heap_cap);
        push(&w, at, heap_cap);
    }
    if (id_list_reserve(out, n) != 0)
        return ERR_NOMEM;
    for (size_t i = 0; i < len;) {
        uint32_t id = w.marks[i] & ~MARK_START;
        out->ids[out->n++] = (int32_t)id;
        i += token_bytes(b, id);
    }
    return 0;
}
