/* tokenizer.json to struct tokenizer. The file is read whole; the vocabulary and the merges are
 * taken from its text directly, for their number, the rest through tokenizer_check.c. */
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_cursor.h"
#include "tokenizer_internal.h"

/* Some ten times the largest released. Offsets into spellings are 32 bits. */
#define MAX_FILE_BYTES ((size_t)256 << 20)

/* A token as the file spells it. */
struct spelling {
    uint32_t offset; /* in loader.spellings */
    uint32_t len;
    int32_t id;
    bool special;
};

struct loader {
    struct tokenizer *t;
    struct json_slice parts[N_FILE_PARTS];
    struct buf spellings;    /* the bytes of all, joined */
    struct spelling *tokens; /* [n]: the vocabulary in the file's order, then the added ones */
    int32_t n, cap;
    int32_t n_vocab;
    int32_t n_ids; /* largest id + 1 */
    struct hash_table
        by_bytes;   /* of the vocabulary; entry: the hash, the index in the low 21 bits */
    int32_t *by_id; /* [n_ids] index in tokens, or -1 */
    struct merge *merges;
    int32_t n_merges, cap_merges;
    struct nfc_scratch nfc;
    struct errmsg *e;
};

/* ---- spellings */

static const char *bytes_of(const struct loader *l, int32_t i)
{
    return l->spellings.data + l->tokens[i].offset;
}

static uint64_t index_slot(uint64_t hash, int32_t i)
{
    return (hash & ~(uint64_t)TOKENIZER_MAX_IDS) | (uint64_t)i;
}

/* The slot of the token that is spelled so in the vocabulary, or the empty one where it would
 * be. */
static size_t find_slot(const struct loader *l, const char *bytes, size_t len, uint64_t hash)
{
    size_t i = hash_table_first(&l->by_bytes, hash);
    for (; l->by_bytes.slots[i] != UINT64_MAX; i = hash_table_next(&l->by_bytes, i)) {
        int32_t k = (int32_t)(l->by_bytes.slots[i] & TOKENIZER_MAX_IDS);
        if (l->by_bytes.slots[i] == index_slot(hash, k) && l->tokens[k].len == len &&
            memcmp(bytes_of(l, k), bytes, len) == 0)
            break;
    }
    return i;
}

/* The index of the token that is spelled so in the vocabulary, or -1. */
static int32_t find_spelling(const struct loader *l, const char *bytes, size_t len)
{
    uint64_t slot = l->by_bytes.slots[find_slot(l, bytes, len, hash_bytes(bytes, len))];
    return slot == UINT64_MAX ? -1 : (int32_t)(slot & TOKENIZER_MAX_IDS);
}

/* Notes a token whose bytes are at the end of l->spellings, from offset on. */
static int note_token(struct loader *l, size_t offset, int32_t id, bool special)
{
    if (l->n == TOKENIZER_MAX_IDS)
        return errmsg_set(l->e, ERR_TOO_LARGE, "tokenizer.json: more than %d tokens",
                          TOKENIZER_MAX_IDS);
    if (l->n == l->cap) {
        int32_t cap = l->cap ? 2 * l->cap : 1024;
        struct spelling *tokens = realloc(l->tokens, (size_t)cap * sizeof(*tokens));
        if (!tokens)
            return ERR_NOMEM;
        l->tokens = tokens;
        l->cap = cap;
    }
    l->tokens[l->n++] =
        (struct spelling){(uint32_t)offset, (uint32_t)(l->spellings.len - offset), id, special};
    if (id >= l->n_ids)
        l->n_ids = id + 1;
    return 0;
}

/* ---- model.vocab */

static int read_vocab(struct loader *l)
{
    struct json_slice part = l->parts[PART_MODEL_VOCAB];
    struct cursor j = {part.at, part.at + part.len};
    size_t n = 0;
    int code;

    if (!part.at || !cursor_take(&j, '{'))
        return errmsg_set(l->e, ERR_INVALID,
                          "tokenizer.json: model.vocab is absent or no object");
    while (cursor_more(&j, '}', &n, &code)) {
        size_t offset = l->spellings.len;
        int32_t id;
        if (cursor_string(&j, &l->spellings) != 0 || !cursor_take(&j, ':'))
            return errmsg_set(
                l->e, ERR_INVALID,
                "tokenizer.json: model.vocab: the token of member %zu is ill-formed", n - 1);
        if (cursor_int32(&j, &id) != 0 || id >= TOKENIZER_MAX_IDS)
            return errmsg_set(l->e, ERR_INVALID,
                              "tokenizer.json: model.vocab: the id of member %zu is no integer "
                              "in 0..%d",
                              n - 1, TOKENIZER_MAX_IDS - 1);
        code = note_token(l, offset, id, false);
        if (code != 0)
            return code;
    }
    if (code != 0)
        return errmsg_set(l->e, code,
                          "tokenizer.json: model.vocab is ill-formed after member %zu", n);
    l->n_vocab = l->n;
    return 0;
}

static int index_vocab(struct loader *l)
{
    if (hash_table_init(&l->by_bytes, (size_t)l->n_vocab) != 0)
        return ERR_NOMEM;
    for (int32_t i = 0; i < l->n_vocab; i++) {
        uint64_t hash = hash_bytes(bytes_of(l, i), l->tokens[i].len);
        size_t slot = find_slot(l, bytes_of(l, i), l->tokens[i].len, hash);
        if (l->by_bytes.slots[slot] != UINT64_MAX)
            return errmsg_set(l->e, ERR_INVALID,
                              "tokenizer.json: model.vocab has the token of id %d twice",
                              l->tokens[i].id);
        l->by_bytes.slots[slot] = index_slot(hash, i);
    }
    return 0;
}

/* ---- added_tokens */

/* An added token may also be in the vocabulary; then it is the same token and has the same
 * id. */
static int add_added(void *arg, size_t index, const char *content, size_t len, int32_t id,
                     bool special, bool normalized)
{
    struct loader *l = arg;
    struct added_set *set = normalized ? &l->t->added_nfc : &l->t->added;

    if (normalized && nfc_normalize(&l->t->chars, &l->nfc, content, len, &content, &len) != 0)
        return ERR_NOMEM;
    int32_t known = find_spelling(l, content, len);
    if (known >= 0 && l->tokens[known].id != id)
        return errmsg_set(l->e, ERR_UNSUPPORTED,
                          "tokenizer.json: added_tokens[%zu].id is %d, but model.vocab has its "
                          "content as %d",
                          index, id, l->tokens[known].id);
    struct added_token *tokens = realloc(set->tokens, (set->n + 1) * sizeof(*tokens));
    char *copy = malloc(len);
    if (tokens)
        set->tokens = tokens;
    if (!tokens || !copy) {
        free(copy);
        return ERR_NOMEM;
    }
    memcpy(copy, content, len);
    set->tokens[set->n++] = (struct added_token){copy, len, id};
    if (known >= 0) {
        l->tokens[known].special |= special;
        return 0;
    }
    size_t offset = l->spellings.len;
    buf_add(&l->spellings, content, len);
    return l->spellings.failed ? ERR_NOMEM : note_token(l, offset, id, special);
}

/* Sorts a set; two tokens of it must not be spelt alike. */
static int sort_added(struct loader *l, struct added_set *set)
{
    added_set_sort(set);
    for (size_t i = 1; i < set->n; i++)
        if (set->tokens[i].len == set->tokens[i - 1].len &&
            memcmp(set->tokens[i].content, set->tokens[i - 1].content, set->tokens[i].len) == 0)
            return errmsg_set(l->e, ERR_INVALID,
                              "tokenizer.json: added_tokens: ids %d and %d have one content",
                              set->tokens[i - 1].id, set->tokens[i].id);
    return 0;
}

static int read_added(struct loader *l)
{
    int code = tokenizer_check_added(l->parts[PART_ADDED_TOKENS], add_added, l, l->e);
    if (code == 0)
        code = sort_added(l, &l->t->added);
    return code == 0 ? sort_added(l, &l->t->added_nfc) : code;
}

/* ---- ids */

static int index_ids(struct loader *l)
{
    if (l->n_ids == 0)
        return errmsg_set(l->e, ERR_INVALID, "tokenizer.json: model.vocab is empty");
    l->by_id = malloc((size_t)l->n_ids * sizeof(*l->by_id));
    if (!l->by_id)
        return ERR_NOMEM;
    for (int32_t id = 0; id < l->n_ids; id++)
        l->by_id[id] = -1;
    for (int32_t i = 0; i < l->n; i++) {
        int32_t id = l->tokens[i].id;
        if (l->by_id[id] >= 0)
            return errmsg_set(l->e, ERR_INVALID,
                              "tokenizer.json: two tokens have id %d, one in %s", id,
                              i < l->n_vocab ? "model.vocab" : "added_tokens");
        l->by_id[id] = i;
    }
    return 0;
}

/* Writes the bytes that a spelling stands for, at most as many as it has, to out. */
static size_t spell_bytes(const char *spelling, size_t len, char *out, uint8_t *flags)
{
    size_t n = 0, used;
    for (size_t i = 0; i < len; i += used) {
        int byte = byte_alphabet_byte(utf8_decode((const unsigned char *)spelling + i, &used));
        if (byte < 0) {
            memcpy(out, spelling, len);
            return len;
        }
        out[n++] = (char)byte;
    }
    *flags |= TOKEN_ALPHABET;
    return n;
}

static int build_tokens(struct loader *l)
{
    struct token_table *table = &l->t->tokens;
    size_t n = 0;

    table->n = l->n_ids;
    table->offsets = malloc(((size_t)l->n_ids + 1) * sizeof(*table->offsets));
    table->bytes = malloc(l->spellings.len + 1);
    table->flags = calloc((size_t)l->n_ids, 1);
    if (!table->offsets || !table->bytes || !table->flags)
        return ERR_NOMEM;
    for (int32_t id = 0; id < l->n_ids; id++) {
        int32_t i = l->by_id[id];
        table->offsets[id] = (uint32_t)n;
        if (i < 0)
            continue;
        uint8_t *flags = &table->flags[id];
        *flags = TOKEN_EXISTS | (l->tokens[i].special ? TOKEN_SPECIAL : 0);
        size_t len = spell_bytes(bytes_of(l, i), l->tokens[i].len, table->bytes + n, flags);
        if (utf8_is_valid(table->bytes + n, len, NULL))
            *flags |= TOKEN_UTF8;
        n += len;
    }
    table->offsets[l->n_ids] = (uint32_t)n;
    return tokenizer_write_tokens(table);
}

/* ---- model.merges */

/* Reads one merge, "left right" or ["left", "right"], into pair: the two parts joined, the
 * first of *left_len bytes. */
static int read_pair(struct cursor *j, struct buf *pair, size_t *left_len)
{
    pair->len = 0;
    if (cursor_take(j, '[')) {
        if (cursor_string(j, pair) != 0)
            return ERR_INVALID;
        *left_len = pair->len;
        if (!cursor_take(j, ',') || cursor_string(j, pair) != 0 || !cursor_take(j, ']'))
            return ERR_INVALID;
        return 0;
    }
    if (cursor_string(j, pair) != 0)
        return ERR_INVALID;
    char *blank = pair->len > 0 ? memchr(pair->data, ' ', pair->len) : NULL;
    if (!blank)
        return ERR_INVALID;
    size_t right_len = pair->len - (size_t)(blank + 1 - pair->data);
    *left_len = (size_t)(blank - pair->data);
    if (memchr(blank + 1, ' ', right_len))
        return ERR_INVALID;
    memmove(blank, blank + 1, right_len);
    pair->len--;
    return 0;
}

static int note_merge(struct loader *l, size_t index, const struct buf *pair, size_t left_len)
{
    int32_t left = find_spelling(l, pair->data, left_len);
    int32_t right = find_spelling(l, pair->data + left_len, pair->len - left_len);
    int32_t made = find_spelling(l, pair->data, pair->len);

    if (left < 0 || right < 0 || made < 0)
        return errmsg_set(l->e, ERR_INVALID,
                          "tokenizer.json: model.merges[%zu]: %s is not in model.vocab", index,
                          left < 0    ? "the left part"
                          : right < 0 ? "the right part"
                                      : "what it makes");
    if (l->n_merges == TOKENIZER_MAX_MERGES)
        return errmsg_set(l->e, ERR_TOO_LARGE, "tokenizer.json: more than %d model.merges",
                          TOKENIZER_MAX_MERGES);
    if (l->n_merges == l->cap_merges) {
        int32_t cap = l->cap_merges ? 2 * l->cap_merges : 1024;
        struct merge *merges = realloc(l->merges, (size_t)cap * sizeof(*merges));
        if (!merges)
            return ERR_NOMEM;
        l->merges = merges;
        l->cap_merges = cap;
    }
    l->merges[l->n_merges++] =
        (struct merge){l->tokens[left].id, l->tokens[right].id, l->tokens[made].id};
    return 0;
}

static int read_merges(struct loader *l)
{
    struct json_slice part = l->parts[PART_MODEL_MERGES];
    struct cursor j = {part.at, part.at + part.len};
    struct buf pair;
    size_t n = 0, left_len;
    int code;

    if (!part.at || !cursor_take(&j, '['))
        return errmsg_set(l->e, ERR_INVALID,
                          "tokenizer.json: model.merges is absent or no list");
    buf_init(&pair);
    if (buf_reserve(&pair, 256) != 0)
        return ERR_NOMEM;
    while (cursor_more(&j, ']', &n, &code)) {
        if (read_pair(&j, &pair, &left_len) != 0)
            code =
                errmsg_set(l->e, ERR_INVALID,
                           "tokenizer.json: model.merges[%zu] is neither \"a b\" nor [\"a\", "
                           "\"b\"]",
                           n - 1);
        else
            code = note_merge(l, n - 1, &pair, left_len);
        if (code != 0)
            goto done;
    }
    if (code != 0)
        errmsg_set(l->e, code, "tokenizer.json: model.merges is ill-formed after [%zu]", n);
done:
    buf_fini(&pair);
    return code;
}

/* A merge comes after every one that makes one of its parts. Trained merges do;
 * tokenizer_merge.c relies on it. */
static int check_order(struct loader *l)
{
    int32_t *last =
        malloc((size_t)l->n_ids * sizeof(*last)); /* by id: the last that makes it */
    int code = 0;

    if (!last)
        return ERR_NOMEM;
    memset(last, 0xff, (size_t)l->n_ids * sizeof(*last));
    for (int32_t rank = 0; rank < l->n_merges; rank++)
        last[l->merges[rank].made] = rank;
    for (int32_t rank = 0; rank < l->n_merges && code == 0; rank++) {
        const struct merge *m = &l->merges[rank];
        if (last[m->left] >= rank || last[m->right] >= rank)
            code = errmsg_set(
                l->e, ERR_UNSUPPORTED,
                "tokenizer.json: model.merges[%d] has a part that it or a later merge "
                "makes; prefilld takes merges in the order of their making",
                rank);
    }
    free(last);
    return code;
}

static int find_bytes(struct loader *l, int32_t byte_id[256])
{
    for (int byte = 0; byte < 256; byte++) {
        char c[4];
        size_t len = utf8_encode(byte_alphabet_code((unsigned char)byte), c);
        int32_t i = find_spelling(l, c, len);
        if (i < 0)
            return errmsg_set(l->e, ERR_INVALID,
                              "tokenizer.json: model.vocab has no token for byte 0x%02x", byte);
        byte_id[byte] = l->tokens[i].id;
    }
    return 0;
}

/* ---- the whole */

static int build(struct loader *l, const char *text, size_t len)
{
    int32_t byte_id[256];
    size_t bad_at;
    int code;

    if (buf_reserve(&l->spellings, len) != 0)
        return ERR_NOMEM;
    if (!utf8_is_valid(text, len, &bad_at))
        return errmsg_set(l->e, ERR_INVALID, "tokenizer.json: not UTF-8 at byte %zu", bad_at);
    if ((code = tokenizer_check_file(text, len, l->parts, &l->t->family, l->e)) != 0 ||
        (code = char_table_init(&l->t->chars)) != 0 || (code = read_vocab(l)) != 0 ||
        (code = index_vocab(l)) != 0 || (code = find_bytes(l, byte_id)) != 0 ||
        (code = read_added(l)) != 0 || (code = index_ids(l)) != 0 ||
        (code = build_tokens(l)) != 0 || (code = read_merges(l)) != 0 ||
        (code = check_order(l)) != 0)
        return code;
    code = bpe_init(&l->t->bpe, &l->t->tokens, byte_id, l->merges, l->n_merges);
    if (code == ERR_INVALID)
        errmsg_set(l->e, code, "tokenizer.json: model.merges has a pair twice");
    return code;
}

static int load_info(struct tokenizer *t, const char *path, struct errmsg *e)
{
    const char *slash = strrchr(path, '/');
    char *dir = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup("");
    if (!dir)
        return ERR_NOMEM;
    int code = tokenizer_info_load(t, dir, e);
    free(dir);
    return code;
}

int tokenizer_load(const char *path, struct tokenizer **out, struct errmsg *e)
{
    struct loader l = {.e = e};
    struct buf file;
    int code;

    buf_init(&file);
    *out = NULL;
    l.t = calloc(1, sizeof(*l.t));
    if (!l.t)
        return errmsg_set(e, ERR_NOMEM, "%s: no memory to load it", path);
    code = file_read(path, MAX_FILE_BYTES, &file, e);
    if (code == 0)
        code = build(&l, file.data, file.len);
    buf_fini(&file);
    if (code == 0)
        code = load_info(l.t, path, e);
    free(l.by_bytes.slots);
    buf_fini(&l.spellings);
    nfc_scratch_fini(&l.nfc);
    free(l.tokens);
    free(l.by_id);
    free(l.merges);
    if (code != 0) {
        tokenizer_free(l.t);
        if (code == ERR_NOMEM)
            errmsg_set(e, code, "%s: no memory to load it", path);
        return code;
    }
    *out = l.t;
    return 0;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t)
        return;
    bpe_fini(&t->bpe);
    added_set_fini(&t->added);
    added_set_fini(&t->added_nfc);
    char_table_fini(&t->chars);
    tokenizer_info_fini(&t->info);
    free(t->tokens.offsets);
    free(t->tokens.bytes);
    free(t->tokens.flags);
    free(t->tokens.json_offsets);
    free(t->tokens.json);
    free(t->tokens.n_chars);
    free(t);
}
