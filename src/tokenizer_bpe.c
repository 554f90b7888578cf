/* Byte pair encoding: the tables of a vocabulary, and the way of one piece through them. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_internal.h"

static inline uint64_t load_bytes(const char *p, size_t n)
{
    uint64_t x = 0;
    memcpy(&x, p, n);
    return x;
}

static inline uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Only for tables of this process: loads are in the byte order of the machine. */
uint64_t hash_bytes(const char *bytes, size_t len)
{
    uint64_t h = 0x9e3779b97f4a7c15ull ^ len;
    size_t i = 0;
    for (; i + 16 < len; i += 8)
        h = mix(h ^ load_bytes(bytes + i, 8), 0xd6e8feb86659fd93ull);
    uint64_t first, last;
    if (len >= 8) {
        first = load_bytes(bytes + i, 8);
        last = load_bytes(bytes + len - 8, 8);
    } else if (len >= 4) {
        first = load_bytes(bytes, 4);
        last = load_bytes(bytes + len - 4, 4);
    } else {
        const unsigned char *p = (const unsigned char *)bytes;
        first = len ? (uint64_t)p[0] << 16 | (uint64_t)p[len / 2] << 8 | p[len - 1] : 0;
        last = 0;
    }
    return mix(first ^ h, last ^ 0xa0761d6478bd642full);
}

int hash_table_init(struct hash_table *h, size_t n)
{
    int bits = 1;
    while ((size_t)1 << bits < 2 * n)
        bits++;
    h->shift = 64 - bits;
    h->slots = malloc(sizeof(*h->slots) << bits);
    if (!h->slots)
        return ERR_NOMEM;
    memset(h->slots, 0xff, sizeof(*h->slots) << bits);
    return 0;
}

int id_list_reserve(struct id_list *l, size_t extra)
{
    if (extra <= l->cap - l->n)
        return 0;
    size_t cap = l->cap ? 2 * l->cap : 256;
    while (cap - l->n < extra)
        cap *= 2;
    int32_t *ids = realloc(l->ids, cap * sizeof(*ids));
    if (!ids)
        return ERR_NOMEM;
    l->ids = ids;
    l->cap = cap;
    return 0;
}

static size_t token_bytes(const struct bpe *b, int32_t id)
{
    return b->tokens->offsets[id + 1] - b->tokens->offsets[id];
}

static int init_pairs(struct bpe *b, const struct merge *merges, int32_t n_merges)
{
    b->made = malloc(((size_t)n_merges + 1) * sizeof(*b->made));
    b->byte_ranks = malloc(256 * 256 * sizeof(*b->byte_ranks));
    if (!b->made || !b->byte_ranks || hash_table_init(&b->pairs, (size_t)n_merges) != 0)
        return ERR_NOMEM;
    b->n_merges = n_merges;
    b->max_made_bytes = 1;
    for (int32_t rank = 0; rank < n_merges; rank++) {
        const struct merge *m = &merges[rank];
        uint64_t key = bpe_pair_key(m->left, m->right);
        size_t i = hash_table_first(&b->pairs, bpe_pair_hash(key));
        while (b->pairs.slots[i] != UINT64_MAX) {
            if (b->pairs.slots[i] >> TOKENIZER_RANK_BITS == key)
                return ERR_INVALID;
            i = hash_table_next(&b->pairs, i);
        }
        b->pairs.slots[i] = key << TOKENIZER_RANK_BITS | (uint64_t)rank;
        b->made[rank] = m->made;
        if (token_bytes(b, m->made) > b->max_made_bytes)
            b->max_made_bytes = token_bytes(b, m->made);
    }
    for (int i = 0; i < 256 * 256; i++)
        b->byte_ranks[i] = bpe_pair_rank(b, b->byte_id[i >> 8], b->byte_id[i & 255]);
    return 0;
}

static int merge(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
                 size_t len, struct id_list *out)
{
    if (len <= BPE_MAX_SCAN_BYTES)
        return bpe_merge_scan(b, piece, len, out);
    return bpe_merge_lists(b, s, piece, len, out);
}

static inline uint64_t whole_slot(uint64_t hash, int32_t id)
{
    return (hash & ~(uint64_t)TOKENIZER_MAX_IDS) | (uint64_t)id;
}

/* The merges decide what a piece becomes, also one that is a token; so only the tokens which
 * their own merges make again are looked up whole. That is found out here, by merging each. */
static int init_whole(struct bpe *b)
{
    struct bpe_scratch scratch = {0};
    struct id_list made = {0};
    int code =
        hash_table_init(&b->whole, (size_t)b->n_merges); /* each entry is made by a merge */

    for (int32_t id = 0; code == 0 && id < b->tokens->n; id++) {
        const char *bytes = b->tokens->bytes + b->tokens->offsets[id];
        size_t len = token_bytes(b, id);
        if (len < 2)
            continue;
        made.n = 0;
        code = merge(b, &scratch, (const unsigned char *)bytes, len, &made);
        if (code != 0 || made.n != 1 || made.ids[0] != id)
            continue;
        uint64_t hash = hash_bytes(bytes, len);
        size_t i = hash_table_first(&b->whole, hash);
        while (b->whole.slots[i] != UINT64_MAX)
            i = hash_table_next(&b->whole, i);
        b->whole.slots[i] = whole_slot(hash, id);
        if (len > b->max_whole_bytes)
            b->max_whole_bytes = len;
    }
    bpe_scratch_fini(&scratch);
    free(made.ids);
    return code;
}

int bpe_init(struct bpe *b, const struct token_table *tokens, const int32_t byte_id[256],
             const struct merge *merges, int32_t n_merges)
{
    b->tokens = tokens;
    memcpy(b->byte_id, byte_id, sizeof(b->byte_id));
    int code = init_pairs(b, merges, n_merges);
    if (code == 0)
        code = init_whole(b);
    return code != 0 ? code : bpe_init_joins(b);
}

void bpe_fini(struct bpe *b)
{
    free(b->byte_ranks);
    free(b->made);
    free(b->pairs.slots);
    free(b->whole.slots);
    free(b->joins);
    memset(b, 0, sizeof(*b));
}

/* The token that the merges make of all of piece, or -1 when that is not known. */
static inline int32_t find_whole(const struct bpe *b, const unsigned char *piece, size_t len)
{
    if (len == 1)
        return b->byte_id[piece[0]];
    if (len > b->max_whole_bytes)
        return -1;
    uint64_t hash = hash_bytes((const char *)piece, len);
    size_t i = hash_table_first(&b->whole, hash);
    for (; b->whole.slots[i] != UINT64_MAX; i = hash_table_next(&b->whole, i)) {
        int32_t id = (int32_t)(b->whole.slots[i] & TOKENIZER_MAX_IDS);
        if (b->whole.slots[i] == whole_slot(hash, id) && token_bytes(b, id) == len &&
            memcmp(b->tokens->bytes + b->tokens->offsets[id], piece, len) == 0)
            return id;
    }
    return -1;
}

static inline int add_id(struct id_list *out, int32_t id)
{
    if (id_list_reserve(out, 1) != 0)
        return ERR_NOMEM;
    out->ids[out->n++] = id;
    return 0;
}

int bpe_encode(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
               size_t len, struct id_list *out)
{
    int32_t id = find_whole(b, piece, len);
    int code = 0;

    if (id >= 0)
        return add_id(out, id);
    while (len > 0 && code == 0) {
        size_t n = bpe_next_cut(b, piece, len);
        id = find_whole(b, piece, n);
        code = id >= 0 ? add_id(out, id) : merge(b, s, piece, n, out);
        piece += n;
        len -= n;
    }
    return code;
}
