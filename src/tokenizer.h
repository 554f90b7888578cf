/* Text to token ids and back: byte-level BPE as Hugging Face's tokenizer.json describes it.
 *
 * Owns what was read from tokenizer.json, constant after tokenizer_load, so that any number of
 * threads may use one struct tokenizer at once; what a call needs besides is its own. It takes
 * the tokenizers of the Qwen2 to Qwen3.5 families and refuses, by the name of the field,
 * whatever it would not reproduce id for id. It never logs, and never puts the text into a
 * message. */
#ifndef PREFILLD_TOKENIZER_H
#define PREFILLD_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "err.h"
#include "utf8.h"

struct tokenizer;

enum { TOKENIZER_MAX_END_IDS = 8 };

/* Reads tokenizer.json at path, and the files beside it that struct tokenizer_info is from.
 * Returns 0 and *out, freed with tokenizer_free; or ERR_NOT_FOUND, ERR_IO, ERR_INVALID (not
 * what such a file holds), ERR_UNSUPPORTED (a part that prefilld does not do), ERR_TOO_LARGE,
 * ERR_NOMEM, with the field in *e (may be NULL). */
int tokenizer_load(const char *path, struct tokenizer **out, struct errmsg *e);
void tokenizer_free(struct tokenizer *t); /* NULL is legal */

/* ---- text to ids */

/* The ids of text, len bytes of UTF-8 in which NUL is a character like any other. Added and
 * special tokens in the text are recognised; no id is added before or after.
 * *ids (caller frees with free(); NULL when there are none) and *n_ids are set on success.
 * max_ids > 0 bounds the answer: ERR_TOO_LARGE as soon as it is certain that there are more,
 * before the rest is looked at. Also ERR_INVALID: not UTF-8, with the offset; ERR_NOMEM. Time
 * and memory are O(len), whatever the text. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, int32_t max_ids,
                     int32_t **ids, int32_t *n_ids, struct errmsg *e);

/* ---- ids to text */

/* The largest id + 1. Smaller than the model's vocab_size, as a rule. */
int32_t tokenizer_size(const struct tokenizer *t);

/* The bytes of a token, which may be a part of a character; borrowed, not NUL-terminated. NULL
 * and *len = 0 for an id without a token, which is any other int32_t. */
const char *tokenizer_token_bytes(const struct tokenizer *t, int32_t id, size_t *len);

/* Is it an added token with "special": true, as <|im_end|>? (<think> is not.) */
bool tokenizer_is_special(const struct tokenizer *t, int32_t id);

/* Appends the token's text as a JSON string, quotes included. Bytes that are not UTF-8 by
 * themselves become U+FFFD, and then the answer is false: tokenizer_token_bytes has them. An id
 * without a token is "" and true. */
bool tokenizer_json_token(const struct tokenizer *t, int32_t id, struct buf *out);

/* Appends the token as tokenizer.json spells it, in the byte alphabet (a blank is U+0120), as a
 * JSON string: what vLLM calls token_strs. An id without a token is "". */
void tokenizer_json_spelling(const struct tokenizer *t, int32_t id, struct buf *out);

/* One sequence of ids that becomes text as it grows. Belongs to one thread. */
struct tokenizer_stream {
    const struct tokenizer *tokenizer; /* borrowed */
    bool skip_special;
    struct utf8_lossy lossy;
};

/* skip_special: special tokens (tokenizer_is_special) add nothing. */
void tokenizer_stream_init(struct tokenizer_stream *s, const struct tokenizer *t,
                           bool skip_special);
/* Appends to out the text that is certain now that id is known: everything but the bytes at the
 * end that a later id may complete to a character. Bytes of no character are U+FFFD, one for
 * each maximal subpart. Ids without a token add nothing. */
void tokenizer_stream_push(struct tokenizer_stream *s, int32_t id, struct buf *out);
/* The same for one who only counts: pushes id and returns how many characters of text that is,
 * or -1, and then nothing was pushed, when that needs its bytes. */
int32_t tokenizer_stream_skip(struct tokenizer_stream *s, int32_t id);
/* No id follows: appends U+FFFD for a cut character. s is as after init. */
void tokenizer_stream_finish(struct tokenizer_stream *s, struct buf *out);

/* Appends the text of n_ids ids: the pieces of a stream, joined. out->failed tells of a lack of
 * memory. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n_ids,
                      bool skip_special, struct buf *out);

/* ---- what the model's files say besides */

/* For GET /tokenizer_info, and where generating ends. NUL-terminated UTF-8, NULL where not
 * known. The tokens are from tokenizer_config.json, else by id from generation_config.json,
 * else from config.json (of a list of ids the first); the template is from chat_template.jinja,
 * else from tokenizer_config.json. */
struct tokenizer_info {
    char *eos_token;
    char *bos_token;
    char *pad_token;
    char *chat_template;
    /* The tokens that end a text: eos_token, and all that generation_config.json and
     * config.json give as eos_token_id. */
    int32_t end_ids[TOKENIZER_MAX_END_IDS];
    int32_t n_end_ids;
};

const struct tokenizer_info *tokenizer_get_info(const struct tokenizer *t);

#endif
