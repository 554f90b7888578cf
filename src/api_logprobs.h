/* Writes the numbers of a request's tokens in the shapes that clients of vLLM and SGLang read.
 *
 * Rows are the tokens of the prompt, then those generated: row t is r->ids[t]. The number of a
 * row's own token is printed from one float wherever it stands, so that a client that compares
 * them (lm-evaluation-harness's is_greedy) finds them equal. Workers; pure. */
#ifndef PREFILLD_API_LOGPROBS_H
#define PREFILLD_API_LOGPROBS_H

#include "api_priv.h"
#include "request.h"

/* Where each token begins in a text, in characters; a sequence of rows. */
struct text_offsets {
    const struct tokenizer *tokenizer; /* may be NULL: all are 0 */
    struct tokenizer_stream stream;
    struct buf scratch;
    int64_t n_chars;
};
void text_offsets_init(struct text_offsets *o, const struct tokenizer *t, bool skip_special);
void text_offsets_fini(struct text_offsets *o);

struct row_style {
    int32_t n_top; /* beside the token's own; -1: none, not even that */
    bool as_ids;   /* tokens are written "token_id:17" */
    bool skips_special;
};

float row_logprob(const struct request *r, int32_t t);
/* [r->n_top]; NULL when r->n_top is 0. */
const struct top_entry *row_top(const struct request *r, int32_t t);

/* A token's text, as a JSON string. Returns whether it is the text of no other token: neither
 * "" nor with bytes of no character. */
bool write_token(const struct api *a, struct buf *b, int32_t id, bool as_ids);

/* {"id", "token", "logprob", without the closing brace; bytes of no character as "bytes",
 * too. */
void open_candidate(const struct api *a, struct buf *b, const struct top_entry *e);
/* A list of these: the first n, or up to the first that is none. */
void write_candidates(const struct api *a, struct buf *b, const struct top_entry *top,
                      int32_t n);

/* {"text_offset", "token_logprobs", "tokens", "top_logprobs"} of rows [from, to): row 0 has
 * null numbers. o goes on behind the row before from. */
void write_logprobs(const struct api *a, struct buf *b, const struct request *r, int32_t from,
                    int32_t to, const struct row_style *s, struct text_offsets *o);
/* vLLM's prompt_logprobs: [null, {"id": {"logprob", "rank", "decoded_token"}}, ...]. rank is
 * null when it is beyond the n_top candidates. */
void write_prompt_logprobs(const struct api *a, struct buf *b, const struct request *r,
                           int32_t n_top);
/* OpenAI's chats: {"content": [{"token", "logprob", "bytes", "top_logprobs"}]}. */
void write_chat_logprobs(const struct api *a, struct buf *b, const struct request *r,
                         int32_t from, int32_t to, int32_t n_top);
/* [ids] of rows [from, to). */
void write_ids(struct buf *b, const int32_t *ids, int32_t from, int32_t to);

#endif
