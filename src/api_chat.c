/* POST /v1/chat/completions: messages become a prompt (api_messages.c), the rest is a
 * completion. */
#include <stdlib.h>
#include <string.h>

#include "api_completion.h"
#include "api_messages.h"
#include "backend.h"

enum { CHAT_DEFAULT_NEW = 1024 };

static const char *const own_fields[] = {"messages",
                                         "model",
                                         "max_tokens",
                                         "max_completion_tokens",
                                         "logprobs",
                                         "top_logprobs",
                                         "n",
                                         "stream",
                                         "stream_options",
                                         "return_progress",
                                         "priority",
                                         "deadline_ms",
                                         "cache_salt",
                                         "request_id",
                                         "user",
                                         "return_token_ids",
                                         "response_format",
                                         "tool_choice",
                                         "kv_transfer_params",
                                         "chat_template_kwargs",
                                         "add_generation_prompt",
                                         "continue_final_message",
                                         "logprob_token_ids",
                                         "add_special_tokens",
                                         NULL};

static const char *const unserved[] = {"tools",
                                       "functions",
                                       "chat_template",
                                       "documents",
                                       "audio",
                                       "guided_json",
                                       "guided_regex",
                                       "guided_choice",
                                       "guided_grammar",
                                       "structured_outputs",
                                       "echo",
                                       "best_of",
                                       "use_beam_search",
                                       "bad_words",
                                       "allowed_token_ids",
                                       "prompt_logprobs",
                                       "truncate_prompt_tokens",
                                       "return_tokens_as_token_ids",
                                       NULL};

/* The template is ChatML: without its tokens the model knows nothing of it. */
static int find_token(const struct api *a, const char *name, int32_t *id, struct json_error *e)
{
    int32_t *ids = NULL, n = 0;
    int rc = tokenizer_encode(a->tokenizer, name, strlen(name), 0, &ids, &n, NULL);
    if (rc == 0 && n == 1)
        *id = ids[0];
    free(ids);
    if (rc == ERR_NOMEM)
        return json_fail(e, rc, NULL, "memory is short");
    if (rc == 0 && n == 1)
        return 0;
    return json_fail(e, ERR_INVALID, "messages",
                     "messages: the model's tokenizer has no token %s; ask /v1/completions "
                     "instead",
                     name);
}

/* A message's end is the answer's, too, unless end tokens are ignored. */
static void add_end(struct choosing *c, int32_t id)
{
    struct sampling *s = &c->sampling;
    bool has_room = s->n_stop < (int32_t)(sizeof(s->stop_ids) / sizeof(s->stop_ids[0]));
    for (int32_t i = 0; i < s->n_stop; i++)
        has_room &= s->stop_ids[i] != id;
    if (c->stop_ids_from == 0 || !has_room)
        return;
    memmove(s->stop_ids + 1, s->stop_ids, (size_t)s->n_stop * sizeof(s->stop_ids[0]));
    s->stop_ids[0] = id;
    s->n_stop++;
    c->stop_ids_from++;
}

static int read_messages(struct api *a, const json_t *root, struct completion *c,
                         struct json_error *e)
{
    struct buf text;
    int32_t start, end;
    if (!a->tokenizer)
        return json_fail(e, ERR_INVALID, "messages",
                         "messages: the model has no tokenizer.json");
    int rc = find_token(a, "<|im_start|>", &start, e);
    if (rc == 0)
        rc = find_token(a, "<|im_end|>", &end, e);
    if (rc != 0)
        return rc;
    add_end(&c->choosing, end);
    buf_init(&text);
    rc = messages_write(tokenizer_get_info(a->tokenizer)->chat_template, root, &text, e);
    c->prompts = rc == 0 ? calloc(1, sizeof(*c->prompts)) : NULL;
    c->n_prompts = c->prompts != NULL;
    if (rc == 0 && (text.failed || !c->prompts))
        rc = json_fail(e, ERR_NOMEM, NULL, "memory is short");
    if (rc == 0)
        rc =
            api_encode(a, "messages", text.data, text.len, a->max_prompt_tokens, c->prompts, e);
    buf_fini(&text);
    return rc;
}

/* ---- the body ---- */

static int read_numbers(const json_t *root, struct completion *c, struct json_error *e)
{
    int64_t max_new = -1, n_top = 0;
    bool with_logprobs = false, adds_special;
    int rc = completion_read_n(root, c, e);
    if (rc == 0)
        rc = json_get_int(root, "max_tokens", 1, INT32_MAX, &max_new, e);
    if (rc == 0)
        rc = json_get_int(root, "max_completion_tokens", 1, INT32_MAX, &max_new, e);
    if (rc == 0)
        rc = json_get_bool(root, "logprobs", &with_logprobs, e);
    if (rc == 0)
        rc = json_get_int(root, "top_logprobs", 0, TOP_MAX, &n_top, e);
    if (rc == 0 && n_top > 0 && !with_logprobs)
        rc = json_fail(e, ERR_INVALID, "top_logprobs",
                       "top_logprobs is given without logprobs; beside \"logprobs\": true it "
                       "is accepted");
    if (rc == 0)
        rc = json_get_bool(root, "return_token_ids", &c->with_ids, e);
    if (rc == 0)
        rc = json_get_bool(root, "add_special_tokens", &adds_special, e);
    c->max_new = (int32_t)max_new;
    c->n_top = with_logprobs ? (int32_t)n_top : -1;
    return rc;
}

static int read_chat(struct api *a, struct exchange *x, struct completion *c,
                     struct api_common *common, struct json_error *e)
{
    const char *fields[API_MAX_FIELDS];
    api_join_fields(fields, own_fields, unserved, api_choosing_fields);
    const struct json_rules rules = {.fields = fields};
    struct json_body body;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    c->is_chat = true;
    c->default_new = CHAT_DEFAULT_NEW;
    rc = api_read_common(a, x, body.root, common, e);
    if (rc == 0)
        rc = api_refuse_fields(body.root, unserved, e);
    if (rc == 0)
        rc = completion_read_format(body.root, e);
    if (rc == 0)
        rc = completion_read_stream(body.root, c, e);
    if (rc == 0)
        rc = read_numbers(body.root, c, e);
    if (rc == 0)
        rc = api_kv_read(a, body.root, &c->kv, e);
    if (rc == 0)
        rc = api_read_choosing(a, body.root, &c->choosing, e);
    if (rc == 0)
        rc = completion_read_labels(a, body.root, c, e);
    if (rc == 0)
        rc = read_messages(a, body.root, c, e);
    if (rc == 0)
        rc = completion_check_lengths(a, c, "max_tokens", e);
    json_fini(&body);
    return rc;
}

void api_chat(struct api *a, struct exchange *x)
{
    completion_run(a, x, read_chat, completion_format, completion_add_event);
}
