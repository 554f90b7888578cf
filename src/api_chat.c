#define _GNU_SOURCE /* memmem */
/* POST /v1/chat/completions: messages become a ChatML prompt, as the templates of the
 * Qwen3-Next and Qwen3.5 models write it without tools; the rest is a completion. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api_completion.h"
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
                                         "tools",
                                         "tool_choice",
                                         "functions",
                                         "kv_transfer_params",
                                         "chat_template_kwargs",
                                         "add_generation_prompt",
                                         "continue_final_message",
                                         "chat_template",
                                         "documents",
                                         "audio",
                                         "structured_outputs",
                                         "guided_json",
                                         "guided_regex",
                                         "guided_choice",
                                         "guided_grammar",
                                         "logprob_token_ids",
                                         "echo",
                                         "best_of",
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
                                       NULL};

/* What the model's template does that ChatML alone does not, read from its text, which no
 * interpreter runs here: what it opens an answer with, and what it cuts from messages. */
struct template
{
    bool thinks;     /* when not told otherwise */
    bool has_switch; /* enable_thinking is known to it */
    bool opens;      /* "<think>" is part of the prompt when it thinks */
    bool trims;      /* blanks around a message are dropped */
    bool forgets;    /* what was thought in earlier answers is dropped */
};

static struct template read_template(const struct api *a)
{
    struct template o = {0};
    const char *text = tokenizer_get_info(a->tokenizer)->chat_template, *next, *end = NULL;
    for (next = text; next && (next = strstr(next, "add_generation_prompt")); next++)
        end = next;
    if (!end)
        return o;
    const char *think = strstr(end, "<think>");
    const char *known = strstr(end, "enable_thinking");
    o.has_switch = known != NULL;
    o.thinks = known ? !strstr(known, "enable_thinking is true") : think != NULL;
    o.opens = think && (!known || strstr(think + 1, "<think>"));
    o.trims = strstr(text, "render_content(message.content, true)|trim") != NULL;
    o.forgets = strstr(text, "split('</think>')") != NULL;
    return o;
}

/* ---- messages ---- */

static int fail_message(struct json_error *e, size_t i, const char *what)
{
    return json_fail(e, ERR_INVALID, "messages", "messages[%zu] %s", i, what);
}

/* As OpenAI's two calls name them; some clients leave the type out. */
static bool is_text_type(const json_t *type)
{
    const char *name = json_string_value(type);
    if (!name)
        return !type || json_is_null(type);
    return strcmp(name, "text") == 0 || strcmp(name, "input_text") == 0 ||
           strcmp(name, "output_text") == 0;
}

/* A string, or a list of parts of which each is a text. */
static int add_content(struct buf *b, const json_t *content, size_t i, struct json_error *e)
{
    const json_t *part;
    size_t j;
    if (!content || json_is_null(content))
        return 0;
    if (json_is_string(content)) {
        buf_add(b, json_string_value(content), json_string_length(content));
        return 0;
    }
    if (!json_is_array(content))
        return fail_message(e, i, "has content that is neither a string nor a list of parts");
    json_array_foreach(content, j, part)
    {
        const json_t *text = json_object_get(part, "text");
        if (!json_is_string(text) || !is_text_type(json_object_get(part, "type")))
            return fail_message(e, i, "has a part that is no text; only text is served");
        buf_add(b, json_string_value(text), json_string_length(text));
    }
    return 0;
}

static bool is_role(const char *role)
{
    return role && (strcmp(role, "system") == 0 || strcmp(role, "user") == 0 ||
                    strcmp(role, "assistant") == 0);
}

static bool is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* The content as the template shows it. */
static void add_shown(struct buf *b, const struct template *o, const struct buf *content,
                      bool is_answer)
{
    static const char mark[] = "</think>";
    const char *p = content->data, *end = p + content->len, *at;
    if (!p)
        return;
    while (is_answer && o->forgets &&
           (at = memmem(p, (size_t)(end - p), mark, sizeof(mark) - 1)) != NULL)
        for (p = at + sizeof(mark) - 1; p < end && *p == '\n';)
            p++;
    while (o->trims && p < end && is_blank(*p))
        p++;
    while (o->trims && p < end && is_blank(end[-1]))
        end--;
    buf_add(b, p, (size_t)(end - p));
}

/* is_open: the message is the start of the answer: shown as it is, and its end is left out. */
static int add_message(struct buf *b, const struct template *o, const json_t *m, size_t i,
                       bool is_open, struct json_error *e)
{
    const char *role = json_string_value(json_object_get(m, "role"));
    if (role && strcmp(role, "developer") == 0)
        role = "system";
    if (!json_is_object(m) || !is_role(role))
        return fail_message(e, i,
                            "is no object with a role of system, developer, user or assistant");
    if (json_array_size(json_object_get(m, "tool_calls")) > 0)
        return fail_message(e, i, "has tool_calls; tools are not served by this version");
    const json_t *said = json_object_get(m, "content");
    if ((!said || json_is_null(said)) && strcmp(role, "assistant") != 0)
        return fail_message(e, i, "has no content; a string or a list of texts is accepted");
    struct buf content;
    buf_init(&content);
    int rc = add_content(&content, said, i, e);
    buf_printf(b, "<|im_start|>%s\n", role);
    if (is_open)
        buf_add(b, content.data, content.len);
    else
        add_shown(b, o, &content, strcmp(role, "assistant") == 0);
    if (!is_open)
        buf_adds(b, "<|im_end|>\n");
    b->failed |= content.failed;
    buf_fini(&content);
    return rc;
}

static int read_thinking(const json_t *root, bool *thinks, const struct template *o,
                         struct json_error *e)
{
    const json_t *v = json_object_get(root, "chat_template_kwargs");
    *thinks = o->thinks;
    if (!v || json_is_null(v))
        return 0;
    if (!json_is_object(v))
        return json_fail(e, ERR_INVALID, "chat_template_kwargs",
                         "chat_template_kwargs is %s; an object is accepted", json_kind(v));
    return json_get_bool(v, "enable_thinking", thinks, e);
}

static int write_prompt(const struct api *a, const json_t *root, struct buf *b,
                        struct json_error *e)
{
    const json_t *messages = json_object_get(root, "messages");
    bool opens = true, goes_on = false, thinks;
    const struct template o = read_template(a);
    size_t n = json_array_size(messages);
    if (n == 0)
        return json_fail(e, ERR_INVALID, "messages",
                         "messages is %s; a list of at least one message is accepted",
                         !messages                 ? "missing"
                         : json_is_array(messages) ? "empty"
                                                   : json_kind(messages));
    int rc = json_get_bool(root, "continue_final_message", &goes_on, e);
    opens = !goes_on;
    if (rc == 0)
        rc = json_get_bool(root, "add_generation_prompt", &opens, e);
    if (rc == 0 && opens && goes_on)
        rc = json_fail(e, ERR_INVALID, "continue_final_message",
                       "continue_final_message and add_generation_prompt are both true; one "
                       "of them is accepted");
    if (rc == 0)
        rc = read_thinking(root, &thinks, &o, e);
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = add_message(b, &o, json_array_get(messages, i), i, goes_on && i == n - 1, e);
    if (rc != 0 || !opens)
        return rc;
    buf_adds(b, "<|im_start|>assistant\n");
    if (thinks && o.opens)
        buf_adds(b, "<think>\n");
    else if (!thinks && o.has_switch)
        buf_adds(b, "<think>\n\n</think>\n\n");
    return 0;
}

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
    rc = write_prompt(a, root, &text, e);
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

/* An empty list of tools is none. */
static int refuse_unserved(json_t *root, struct json_error *e)
{
    static const char *const lists[] = {"tools", "functions", "documents"};
    for (int i = 0; i < 3; i++) {
        const json_t *v = json_object_get(root, lists[i]);
        if (json_is_array(v) && json_array_size(v) == 0)
            json_object_del(root, lists[i]);
    }
    return api_refuse_fields(root, unserved, e);
}

static int read_chat(struct api *a, struct exchange *x, struct completion *c,
                     struct api_common *common, struct json_error *e)
{
    const char *fields[API_MAX_FIELDS];
    api_join_fields(fields, own_fields, api_choosing_fields);
    const struct json_rules rules = {.fields = fields};
    struct json_body body;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    c->is_chat = true;
    c->default_new = CHAT_DEFAULT_NEW;
    rc = api_read_common(a, x, body.root, common, e);
    if (rc == 0)
        rc = refuse_unserved(body.root, e);
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
