/* What the parts of the tokenizer share; for tokenizer_*.c and their tests.
 *
 * struct tokenizer is filled by tokenizer_load.c and the build functions here, once, by one
 * thread; afterwards all of it is read only. */
#ifndef PREFILLD_TOKENIZER_INTERNAL_H
#define PREFILLD_TOKENIZER_INTERNAL_H

#include "tokenizer.h"

/* An id takes 21 bits and a rank 22 in the table of merges, so that an entry is one uint64_t.
 * The bounds also keep a hostile file from asking for memory. All ones is no entry. */
#define TOKENIZER_ID_BITS 21
#define TOKENIZER_RANK_BITS 22
#define TOKENIZER_MAX_IDS ((1 << TOKENIZER_ID_BITS) - 1)
#define TOKENIZER_MAX_MERGES ((1 << TOKENIZER_RANK_BITS) - 1)
#define TOKENIZER_NO_RANK INT32_MAX

/* ---- characters (tokenizer_chars.c) */

enum {
    CHAR_LETTER = 1,     /* \p{L}; this and the next three as of Unicode 16 */
    CHAR_MARK = 2,       /* \p{M} */
    CHAR_NUMBER = 4,     /* \p{N} */
    CHAR_SPACE = 8,      /* White_Space: what the reference's \s is */
    CHAR_NFC_CHECK = 16, /* NFC may change it or join it to the character before */
    CHAR_NFC_CCC = 32,   /* has a combining class: NFC may move it */
    CHAR_NFC_INERT = 64  /* the reference's older NFC data do not know it: NFC stops here */
};

/* Generated: first code point << 8 | flags, of each run of equal flags, ascending from 0. */
extern const uint32_t tokenizer_unicode_runs[];
extern const size_t tokenizer_unicode_n_runs;

#define CHAR_BLOCK 256
#define CHAR_N_BLOCKS (0x110000 / CHAR_BLOCK)

struct char_table {
    uint8_t
        block_of[CHAR_N_BLOCKS]; /* which block has code point c: block_of[c / CHAR_BLOCK] */
    uint8_t *blocks;             /* [n, CHAR_BLOCK] flags; equal blocks are stored once */
};

int char_table_init(struct char_table *c);
void char_table_fini(struct char_table *c);

/* Flags of the character at p (well-formed UTF-8), and its length. */
static inline uint8_t char_flags(const struct char_table *c, const unsigned char *p,
                                 size_t *used)
{
    uint32_t code = utf8_decode(p, used);
    return c->blocks[(size_t)c->block_of[code / CHAR_BLOCK] * CHAR_BLOCK + code % CHAR_BLOCK];
}

/* The same for any code point. */
static inline uint8_t char_flags_of(const struct char_table *c, uint32_t code)
{
    return c->blocks[(size_t)c->block_of[code / CHAR_BLOCK] * CHAR_BLOCK + code % CHAR_BLOCK];
}

/* ---- NFC (tokenizer_nfc.c) */

/* Memory of one call, zero-initialised; freed with nfc_scratch_fini. */
struct nfc_scratch {
    struct buf text;
    int32_t *codes; /* [cap] */
    size_t cap;
};

void nfc_scratch_fini(struct nfc_scratch *s);

/* Sets *out and *out_len to text, well-formed UTF-8, in NFC as the reference does it: text
 * itself when that is so already, else bytes of s, valid until its next use. Returns 0 or
 * ERR_NOMEM. */
int nfc_normalize(const struct char_table *c, struct nfc_scratch *s, const char *text,
                  size_t len, const char **out, size_t *out_len);

/* ---- splitting (tokenizer_split.c) */

/* The two regular expressions of the released models. They differ in where \p{M} belongs. */
enum split_family { SPLIT_QWEN2, SPLIT_QWEN3_5, SPLIT_N_FAMILIES };
extern const char *const split_patterns[SPLIT_N_FAMILIES]; /* as tokenizer.json has them */

/* The length of the regular expression's match at p; end > p. Every character belongs to
 * one. */
size_t split_next(const struct char_table *c, enum split_family family, const unsigned char *p,
                  const unsigned char *end);

/* ---- added tokens (tokenizer_added.c) */

struct added_token {
    char *content;
    size_t len;
    int32_t id;
};

struct added_set {
    struct added_token *tokens; /* [n], ascending by bytes once added_set_sort was called */
    size_t n;
    bool starts[256]; /* does one start with this byte? */
};

void added_set_sort(struct added_set *a);
void added_set_fini(struct added_set *a);
/* The leftmost added token in text from offset `from`, the longest at that place. Returns the
 * index in a->tokens and *at, or -1. */
ptrdiff_t added_set_find(const struct added_set *a, const char *text, size_t len, size_t from,
                         size_t *at);

/* ---- byte pair encoding (tokenizer_bpe.c, tokenizer_cut.c, tokenizer_merge.c) */

struct token_table {
    int32_t n;         /* largest id + 1 */
    uint32_t *offsets; /* [n + 1] */
    char *bytes;       /* token id is bytes[offsets[id]] up to bytes[offsets[id + 1]] */
    uint8_t *flags;    /* [n] TOKEN_* */
    /* How answers write them: token id is json[json_offsets[id]] up to
     * json[json_offsets[id + 1]], quotes included, "" for an id without a token. */
    uint32_t *json_offsets; /* [n + 1] */
    char *json;
    uint8_t *n_chars; /* [n] of a token with TOKEN_UTF8; TOKEN_MANY_CHARS: so many or more */
};

enum { TOKEN_MANY_CHARS = 255 };

enum {
    TOKEN_EXISTS = 1,
    TOKEN_SPECIAL = 2,  /* added, with "special": true */
    TOKEN_ALPHABET = 4, /* spelt in the byte alphabet, else its bytes are its spelling */
    TOKEN_UTF8 = 8      /* its bytes are well-formed UTF-8 by themselves */
};

/* Fills json, json_offsets and n_chars from the rest (tokenizer_decode.c). Returns 0 or
 * ERR_NOMEM. */
int tokenizer_write_tokens(struct token_table *table);

/* Open addressing with linear probes, at most half full. */
struct hash_table {
    uint64_t *slots; /* [1 << (64 - shift)]; all ones: empty */
    int shift;
};

/* Makes room for n entries, all empty. */
int hash_table_init(struct hash_table *h, size_t n);

/* Where the probes for a hash start, and the next place. */
static inline size_t hash_table_first(const struct hash_table *h, uint64_t hash)
{
    return (size_t)(hash >> h->shift);
}

static inline size_t hash_table_next(const struct hash_table *h, size_t i)
{
    return (i + 1) & (size_t)(UINT64_MAX >> h->shift);
}

uint64_t hash_bytes(const char *bytes, size_t len);

struct merge {
    int32_t left;
    int32_t right;
    int32_t made;
};

/* Tables of one vocabulary. */
struct bpe {
    const struct token_table *tokens; /* borrowed */
    int32_t byte_id[256];
    int32_t *byte_ranks; /* [256, 256] rank of the merge of two bytes, or TOKENIZER_NO_RANK */
    int32_t *made;       /* [n_merges] by rank: the id that a merge makes */
    int32_t n_merges;
    struct hash_table pairs; /* entry: left << 43 | right << 22 | rank */
    struct hash_table whole; /* entry: hash of the bytes, its low 21 bits replaced by the id */
    uint64_t *joins;         /* bits: which neighbours a token may join, see tokenizer_cut.c */
    size_t max_whole_bytes;  /* the longest token in `whole` */
    size_t max_made_bytes;   /* no id of a piece stands for more bytes */
};

static inline uint64_t bpe_pair_key(int32_t left, int32_t right)
{
    return (uint64_t)left << TOKENIZER_ID_BITS | (uint64_t)right;
}

static inline uint64_t bpe_pair_hash(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull;
}

/* The rank of the merge of two ids, or TOKENIZER_NO_RANK. */
static inline int32_t bpe_pair_rank(const struct bpe *b, int32_t left, int32_t right)
{
    uint64_t key = bpe_pair_key(left, right);
    size_t i = hash_table_first(&b->pairs, bpe_pair_hash(key));
    for (;; i = hash_table_next(&b->pairs, i)) {
        uint64_t slot = b->pairs.slots[i];
        if (slot >> TOKENIZER_RANK_BITS == key)
            return (int32_t)(slot & ((1 << TOKENIZER_RANK_BITS) - 1));
        if (slot == UINT64_MAX)
            return TOKENIZER_NO_RANK;
    }
}

/* Builds the tables in b, zero-initialised. merges are by rank, each after all
 * that make its parts; byte_id is where each byte starts.
 * tokens is borrowed for as long as b lives. Returns 0, ERR_INVALID when a pair is there twice,
 * or ERR_NOMEM; bpe_fini frees what there is in every case. */
int bpe_init(struct bpe *b, const struct token_table *tokens, const int32_t byte_id[256],
             const struct merge *merges, int32_t n_merges);
void bpe_fini(struct bpe *b);

/* Ids that grow; ids is freed with free(). */
struct id_list {
    int32_t *ids;
    size_t n;
    size_t cap;
};

int id_list_reserve(struct id_list *l, size_t extra);

/* Memory of one call, zero-initialised; freed with bpe_scratch_fini. What it is for:
 * tokenizer_merge.c. */
struct bpe_scratch {
    uint32_t *marks;   /* [cap] */
    uint32_t *next;    /* [cap] */
    uint32_t *prev;    /* [cap] */
    uint32_t *heads;   /* [n_merges] */
    uint64_t *waiting; /* [n_merges] bits */
    size_t cap;
};

void bpe_scratch_fini(struct bpe_scratch *s);

/* Appends the ids of one piece of the split, len > 0 bytes of well-formed UTF-8. */
int bpe_encode(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
               size_t len, struct id_list *out);

/* Fills b->joins (tokenizer_cut.c). Returns 0 or ERR_NOMEM. */
int bpe_init_joins(struct bpe *b);

/* The length of the start of a piece that merges by itself whatever follows: the ids of a piece
 * are those of this part and those of the rest. len when there is no such place before the
 * end. */
size_t bpe_next_cut(const struct bpe *b, const unsigned char *piece, size_t len);

/* The two bodies of merging, for any bytes. The first takes len <= BPE_MAX_SCAN_BYTES; about
 * there the second becomes faster (tests/bench/tokenizer). */
#define BPE_MAX_SCAN_BYTES 96
int bpe_merge_scan(const struct bpe *b, const unsigned char *piece, size_t len,
                   struct id_list *out);
int bpe_merge_lists(const struct bpe *b, struct bpe_scratch *s, const unsigned char *piece,
                    size_t len, struct id_list *out);

/* ---- the byte alphabet: how tokenizer.json spells bytes */

static inline uint32_t byte_alphabet_code(unsigned char byte)
{
    if (byte <= 0x20)
        return 0x100u + byte;
    if (byte >= 0x7f && byte <= 0xa0)
        return 0x121u + (byte - 0x7fu);
    return byte == 0xad ? 0x143 : byte;
}

/* The byte that a code point stands for, or -1. */
static inline int byte_alphabet_byte(uint32_t code)
{
    if (code >= 0x100 && code <= 0x120)
        return (int)(code - 0x100);
    if (code >= 0x121 && code <= 0x142)
        return (int)(code - 0x121 + 0x7f);
    if (code == 0x143)
        return 0xad;
    return code < 0x100 && byte_alphabet_code((unsigned char)code) == code ? (int)code : -1;
}

/* ---- the whole */

struct tokenizer {
    struct token_table tokens;
    struct char_table chars;
    struct added_set added;     /* searched in the raw text */
    struct added_set added_nfc; /* with normalized: in its NFC, and spelt so */
    struct bpe bpe;
    enum split_family family;
    struct tokenizer_info info;
};

/* Fills t->info from the files in dir (tokenizer_info.c). Files that are not there are passed
 * over; one that is not what its name says is an error, as is what would make other ids than
 * tokenizer.json does. */
int tokenizer_info_load(struct tokenizer *t, const char *dir, struct errmsg *e);
void tokenizer_info_fini(struct tokenizer_info *info);

/* ---- the parts of tokenizer.json but for the vocabulary (tokenizer_check.c) */

struct json_slice {
    const char *at; /* NULL: not there */
    size_t len;
};

/* The values of the file's members, and of those of its model. */
enum file_part {
    PART_VERSION,
    PART_TRUNCATION,
    PART_PADDING,
    PART_ADDED_TOKENS,
    PART_NORMALIZER,
    PART_PRE_TOKENIZER,
    PART_POST_PROCESSOR,
    PART_DECODER,
    PART_MODEL,
    PART_MODEL_TYPE,
    PART_MODEL_DROPOUT,
    PART_MODEL_UNK_TOKEN,
    PART_MODEL_PREFIX,
    PART_MODEL_SUFFIX,
    PART_MODEL_FUSE_UNK,
    PART_MODEL_BYTE_FALLBACK,
    PART_MODEL_IGNORE_MERGES,
    PART_MODEL_VOCAB,
    PART_MODEL_MERGES,
    N_FILE_PARTS
};

/* Short printable text of a file, for a message; false, and nothing added, when it is not
 * that. */
bool tokenizer_add_quoted(struct errmsg *e, const char *s);

/* Finds the parts in a file's text, and refuses by name whatever would make other ids or text
 * than prefilld does. Sets *family. */
int tokenizer_check_file(const char *text, size_t len, struct json_slice parts[N_FILE_PARTS],
                         enum split_family *family, struct errmsg *e);

/* Parses the list of added tokens and calls add for each, in order, with its place in the
 * list. */
int tokenizer_check_added(struct json_slice list,
                          int (*add)(void *arg, size_t index, const char *content, size_t len,
                                     int32_t id, bool special, bool normalized),
                          void *arg, struct errmsg *e);

#endif
