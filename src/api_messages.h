/* Messages of a chat to the text of its prompt: ChatML, as the templates of the Qwen3-Next and
 * Qwen3.5 models write it without tools.
 *
 * Pure; worker threads. No interpreter runs a template: what it does beyond ChatML is known by
 * its words, and what it does that is not done here is refused. */
#ifndef PREFILLD_API_MESSAGES_H
#define PREFILLD_API_MESSAGES_H

#include "buf.h"
#include "json.h"

/* Appends the prompt to b. root: the body, of which `messages`, add_generation_prompt,
 * continue_final_message and chat_template_kwargs are read. chat_template: the model's, NULL
 * when it has none. Returns 0 or ERR_INVALID with e filled; a lack of memory is b->failed. */
int messages_write(const char *chat_template, const json_t *root, struct buf *b,
                   struct json_error *e);

#endif
