/* Inside of /v1/completions and /v1/chat/completions: the call, from its body to its answer.
 *
 * api_completions.c reads bodies and makes the requests, api_completion_write.c writes what
 * comes back, whole or as a stream; api_chat.c has what is different for chats. */
#ifndef PREFILLD_API_COMPLETION_H
#define PREFILLD_API_COMPLETION_H

#include "api_choice.h"
#include "api_kv.h"
#include "api_logprobs.h"

struct completion {
    struct group group;
    struct choosing choosing;
    struct prompt *prompts; /* [n_prompts], until their requests are made */
    int32_t n_prompts, n;   /* n: choices for each */
    int32_t max_new;        /* -1: not said */
    int32_t default_new;    /* then so many, or what fits */
    int32_t n_top;          /* of logprobs; -1: none wanted */
    int32_t n_prompt_top;   /* of prompt_logprobs; -1: none wanted */
    bool echo, with_ids, as_ids;
    struct kv_terms kv;             /* of kv_transfer_params */
    bool is_chat;                   /* messages in, a message out */
    bool is_batch;                  /* /generate: a list was asked, and is answered */
    int32_t shown_from;             /* /generate: the first row that is shown */
    bool with_usage, usage_in_each; /* of a stream */
    struct choice *choices;         /* [group.n], as the group's members */
    struct text_offsets *offsets;   /* [group.n], of a stream; else NULL */
    int32_t *n_read;                /* [group.n], of a stream with progress: as told last */
    /* Of a stream: writes what choice i has that is new, one event. */
    void (*add_event)(struct completion *c, struct buf *b, int32_t i);
    int64_t created;
};

/* ---- api_completions.c: what its relatives share */

/* Reads a body into c, from its prompts to how tokens are chosen. Returns 0 or as
 * json_parse. */
typedef int completion_read(struct api *a, struct exchange *x, struct completion *c,
                            struct api_common *common, struct json_error *e);
/* Runs a call, whose body read reads; format writes the answer, or the last of a stream of
 * add_event's events. */
void completion_run(struct api *a, struct exchange *x, completion_read *read,
                    void (*format)(struct group *g, struct buf *out),
                    void (*add_event)(struct completion *c, struct buf *b, int32_t i));
/* `stream`, `stream_options` and `return_progress`. */
int completion_read_stream(const json_t *root, struct completion *c, struct json_error *e);
/* `logprob_token_ids`, after the numbers that say which are wanted. */
int completion_read_labels(const struct api *a, const json_t *root, struct completion *c,
                           struct json_error *e);
/* `response_format`: that of a text is what is done anyway. */
int completion_read_format(const json_t *root, struct json_error *e);
/* `n`. */
int completion_read_n(const json_t *root, struct completion *c, struct json_error *e);
/* With c->prompts and all numbers read: do they fit? max_field: what messages call max_new. */
int completion_check_lengths(const struct api *a, const struct completion *c,
                             const char *max_field, struct json_error *e);

/* ---- api_completion_write.c: workers */

/* The group's callbacks. */
void completion_format(struct group *g, struct buf *out);
void completion_update(struct group *g); /* takes what was generated; streams send it */
/* completion's add_event for the two. */
void completion_add_event(struct completion *c, struct buf *b, int32_t i);

#endif
