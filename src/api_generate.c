/* POST /generate, in SGLang's shape: a text or ids, or lists of them, with sampling_params.
 * What is answered is an object for one prompt, a list for a list. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api_completion.h"
#include "backend.h"

enum { GENERATE_DEFAULT_NEW = 128 };

static const char *const fields[] = {"text",
                                     "input_ids",
                                     "sampling_params",
                                     "return_logprob",
                                     "model",
                                     "logprob_start_len",
                                     "top_logprobs_num",
                                     "return_text_in_logprobs",
                                     "rid",
                                     "stream",
                                     "priority",
                                     "deadline_ms",
                                     "cache_salt",
                                     "request_id",
                                     "input_embeds",
                                     "image_data",
                                     "token_ids_logprob",
                                     "session_params",
                                     "lora_path",
                                     "return_hidden_states",
                                     NULL};

static const char *const unserved[] = {
    "input_embeds",         "image_data", "token_ids_logprob", "session_params", "lora_path",
    "return_hidden_states", NULL};

static const char *const unserved_params[] = {
    "json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params", NULL};

/* rid is SGLang's name of request_id. */
static int read_rid(struct exchange *x, const json_t *root, struct json_error *e)
{
    const char *id = NULL;
    size_t len;
    int rc = json_get_string(root, "rid", &id, &len, e);
    if (rc == 0 && id && !exchange_id_is_valid(id, len))
        rc =
            json_fail(e, ERR_INVALID, "rid",
                      "rid has other than 1 to %d visible ASCII characters; these are accepted",
                      HTTP_ID_MAX);
    if (rc == 0 && id)
        exchange_set_id(x, id);
    return rc;
}

/* The names that differ from those that api_read_choosing reads. */
static int rename_params(json_t *params, struct json_error *e)
{
    static const char *const names[][2] = {{"min_new_tokens", "min_tokens"},
                                           {"sampling_seed", "seed"}};
    for (int i = 0; i < 2; i++) {
        json_t *v = json_object_get(params, names[i][0]);
        if (v && json_object_set(params, names[i][1], v) != 0)
            return json_fail(e, ERR_NOMEM, NULL, "memory is short");
    }
    return 0;
}

static int read_params(const struct api *a, json_t *root, struct completion *c,
                       struct json_error *e)
{
    json_t *params = json_object_get(root, "sampling_params"), *none = NULL;
    int64_t max_new = -1;
    if (!params || json_is_null(params))
        params = none = json_object();
    int rc = 0;
    if (!json_is_object(params))
        rc = json_fail(e, ERR_INVALID, "sampling_params",
                       "sampling_params is %s; an object is accepted", json_kind(params));
    if (rc == 0)
        rc = api_refuse_fields(params, unserved_params, e);
    if (rc == 0)
        rc = rename_params(params, e);
    if (rc == 0)
        rc = json_get_int(params, "max_new_tokens", 0, INT32_MAX, &max_new, e);
    if (rc == 0)
        rc = completion_read_n(params, c, e);
    if (rc == 0)
        rc = api_read_choosing(a, params, &c->choosing, e);
    c->max_new = (int32_t)max_new;
    json_decref(none);
    return rc;
}

/* Which numbers are wanted: of what is generated, and of the prompt from logprob_start_len on;
 * -1 is none of it. */
static int read_logprobs(const json_t *root, struct completion *c, struct json_error *e)
{
    bool wants = false, with_text = false;
    int64_t start = -1, n_top = 0;
    int rc = json_get_bool(root, "return_logprob", &wants, e);
    if (rc == 0)
        rc = json_get_bool(root, "return_text_in_logprobs", &with_text, e);
    if (rc == 0)
        rc = json_get_int(root, "logprob_start_len", -1, INT32_MAX, &start, e);
    if (rc == 0)
        rc = json_get_int(root, "top_logprobs_num", 0, TOP_MAX, &n_top, e);
    c->n_top = wants ? (int32_t)n_top : -1;
    c->n_prompt_top = wants && start >= 0 ? (int32_t)n_top : -1;
    c->shown_from = start >= 0 ? (int32_t)start : INT32_MAX;
    c->as_ids = !with_text;
    return rc;
}

static int read_prompts(struct api *a, struct json_body *body, struct completion *c,
                        struct json_error *e)
{
    bool has_text = json_object_get(body->root, "text") != NULL &&
                    !json_is_null(json_object_get(body->root, "text"));
    bool has_ids = body->has_ids || json_object_get(body->root, "input_ids");
    const struct prompt_rules r = {.field = has_ids ? "input_ids" : "text",
                                   .max_ids = a->max_prompt_tokens};
    if (has_text == has_ids)
        return json_fail(e, ERR_INVALID, "text",
                         "text and input_ids are %s; one of them is accepted",
                         has_text ? "both given" : "both missing");
    c->is_batch = body->n_lists > 0 || json_is_array(json_object_get(body->root, r.field));
    return api_read_prompts(a, body, &r, &c->prompts, &c->n_prompts, e);
}

static int read_generate(struct api *a, struct exchange *x, struct completion *c,
                         struct api_common *common, struct json_error *e)
{
    const struct json_rules rules = {.fields = fields,
                                     .ids_field = "input_ids",
                                     .vocab = a->vocab,
                                     .max_ids = INT32_MAX,
                                     .takes_lists = true};
    struct json_body body;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    c->default_new = GENERATE_DEFAULT_NEW;
    rc = api_read_common(a, x, body.root, common, e);
    if (rc == 0)
        rc = read_rid(x, body.root, e);
    if (rc == 0)
        rc = api_refuse_fields(body.root, unserved, e);
    if (rc == 0)
        rc = json_get_bool(body.root, "stream", &c->group.is_stream, e);
    if (rc == 0)
        rc = read_params(a, body.root, c, e);
    if (rc == 0)
        rc = read_logprobs(body.root, c, e);
    if (rc == 0)
        rc = read_prompts(a, &body, c, e);
    if (rc == 0)
        rc = completion_check_lengths(a, c, "max_new_tokens", e);
    json_fini(&body);
    return rc;
}

/* ---- the answer ---- */

/* [logprob, id, text or null] */
static void add_triple(const struct completion *c, struct buf *b, int32_t id, float logprob,
                       bool is_known)
{
    buf_addc(b, '[');
    if (is_known)
        buf_json_f32(b, logprob);
    else
        buf_adds(b, "null");
    buf_adds(b, ", ");
    buf_json_i64(b, id);
    buf_adds(b, ", ");
    if (c->as_ids)
        buf_adds(b, "null");
    else
        write_token(c->group.api, b, id, false);
    buf_addc(b, ']');
}

static void add_rows(const struct completion *c, struct buf *b, const struct request *r,
                     const char *which, int32_t from, int32_t to)
{
    buf_printf(b, ", \"%s_token_logprobs\": [", which);
    for (int32_t t = from; t < to; t++) {
        buf_adds(b, t > from ? ", " : "");
        add_triple(c, b, r->ids[t], t > 0 ? row_logprob(r, t) : 0, t > 0);
    }
    buf_addc(b, ']');
    if (c->n_top <= 0)
        return;
    buf_printf(b, ", \"%s_top_logprobs\": [", which);
    for (int32_t t = from; t < to; t++) {
        buf_adds(b, t > from ? ", " : "");
        if (t == 0) {
            buf_adds(b, "null");
            continue;
        }
        const struct top_entry *top = row_top(r, t);
        buf_addc(b, '[');
        for (int32_t i = 0; i < c->n_top && top[i].id >= 0; i++) {
            buf_adds(b, i ? ", " : "");
            /* The row's own number is one float wherever it stands. */
            add_triple(c, b, top[i].id,
                       top[i].id == r->ids[t] ? row_logprob(r, t) : top[i].logprob, true);
        }
        buf_addc(b, ']');
    }
    buf_addc(b, ']');
}

static void add_finish(struct buf *b, const struct choice *choice)
{
    if (choice->end == CHOICE_LENGTH) {
        buf_printf(b, "{\"type\": \"length\", \"length\": %d}", choice->n_tokens);
        return;
    }
    if (choice->end == CHOICE_OPEN) {
        buf_adds(b, "null");
        return;
    }
    const struct choosing *o = choice->choosing;
    buf_adds(b, "{\"type\": \"stop\", \"matched\": ");
    if (choice->end == CHOICE_STOP_TEXT)
        buf_json_string(b, o->stops[choice->i_stop].text, o->stops[choice->i_stop].len);
    else
        buf_json_i64(b, o->sampling.stop_ids[choice->i_stop]);
    buf_addc(b, '}');
}

static bool is_list(const struct completion *c)
{
    return c->is_batch || c->group.n > 1;
}

/* As far as it has come. The prompt's numbers are in the first and the last event of a
 * stream. */
static void add_answer(const struct completion *c, struct buf *b, int32_t i)
{
    const struct choice *choice = &c->choices[i];
    const struct request *r = c->group.requests[i];
    const char *id = exchange_id(c->group.exchange);
    int32_t to = r->n_prompt + choice->n_tokens;
    bool with_prompt = choice->n_tokens <= 1 || choice->end != CHOICE_OPEN;
    buf_adds(b, "{\"text\": ");
    buf_json_string(b, choice->text.data ? choice->text.data : "", choice_certain(choice));
    b->failed |= choice->text.failed;
    buf_adds(b, ", \"output_ids\": ");
    write_ids(b, r->ids, r->n_prompt, to);
    buf_adds(b, ", \"meta_info\": {\"id\": ");
    buf_json_string(b, id, strlen(id));
    buf_adds(b, ", \"finish_reason\": ");
    add_finish(b, choice);
    buf_printf(b,
               ", \"prompt_tokens\": %d, \"completion_tokens\": %d, \"cached_tokens\": %d, "
               "\"e2e_latency\": %.6f",
               r->n_prompt, choice->n_tokens, r->n_cached,
               (double)(request_now_us() - r->arrival_us) / 1e6);
    if (c->n_prompt_top >= 0 && with_prompt)
        add_rows(c, b, r, "input", c->shown_from < r->n_prompt ? c->shown_from : r->n_prompt,
                 r->n_prompt);
    else if (c->n_top >= 0 && with_prompt)
        buf_adds(b, ", \"input_token_logprobs\": []");
    if (c->n_top >= 0)
        add_rows(c, b, r, "output", r->n_prompt, to);
    buf_adds(b, "}");
    if (c->group.is_stream && is_list(c))
        buf_printf(b, ", \"index\": %d", i);
    buf_adds(b, "}");
}

static void add_event(struct completion *c, struct buf *b, int32_t i)
{
    buf_adds(b, "data: ");
    add_answer(c, b, i);
    buf_adds(b, "\n\n");
}

static void format(struct group *g, struct buf *b)
{
    const struct completion *c = (const struct completion *)g;
    if (g->is_stream) {
        completion_format(g, b);
        return;
    }
    completion_update(g);
    if (is_list(c))
        buf_addc(b, '[');
    for (int32_t i = 0; i < g->n; i++) {
        buf_adds(b, i ? ", " : "");
        add_answer(c, b, i);
    }
    if (is_list(c))
        buf_addc(b, ']');
}

void api_generate(struct api *a, struct exchange *x)
{
    completion_run(a, x, read_generate, format, add_event);
}
