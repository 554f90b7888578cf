/* Inside of /v1/completions and /v1/chat/completions: the call, from its body to its answer.
 *
 * api_completions.c reads bodies and makes the requests, api_completion_write.c writes what comes
 * back, whole or as a stream; api_chat.c has what is different for chats. */
#ifndef PREFILLD_API_COMPLETION_H
#define PREFILLD_API_COMPLETION_H

#include "api_choice.h"
#include "api_logprobs.h"

struct completion {
    struct group group;
    struct choosing choosing;
    struct prompt *prompts; /* [n_prompts], until their requests are made */
    int32_t n_prompts, n;   /* n: choices for each */
    int32_t max_new;        /* -1: not said */
    int32_t n_top;          /* of logprobs; -1: none wanted */
    int32_t n_prompt_top;   /* of prompt_logprobs; -1: none wanted */
    bool echo, with_ids, as_ids;
    bool with_kv;                   /* kv_transfer_params was given */
    bool is_chat;                   /* messages in, a message out */
    bool with_usage, usage_in_each; /* of a stream */
    struct choice *choices;         /* [group.n], as the group's members */
    struct text_offsets *offsets;   /* [group.n], of a stream; else NULL */
    int64_t created;
};

/* ---- api_completion_write.c: workers */

/* The group's callbacks. */
void completion_format(struct group *g, struct buf *out);
void completion_update(struct group *g); /* takes what was generated; streams send it */

#endif
