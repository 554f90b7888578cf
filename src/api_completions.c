/* POST /v1/completions, as OpenAI and vLLM have it: prompts in, texts and numbers out. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api_completion.h"
#include "backend.h"

enum { DEFAULT_MAX_TOKENS = 16, MAX_N = 128 };

static const char *const own_fields[] = {"prompt",
                                         "model",
                                         "echo",
                                         "logprobs",
                                         "prompt_logprobs",
                                         "max_tokens",
                                         "n",
                                         "best_of",
                                         "stream",
                                         "stream_options",
                                         "return_progress",
                                         "return_token_ids",
                                         "return_tokens_as_token_ids",
                                         "priority",
                                         "truncate_prompt_tokens",
                                         "deadline_ms",
                                         "cache_salt",
                                         "truncation_side",
                                         "request_id",
                                         "add_special_tokens",
                                         "user",
                                         "kv_transfer_params",
                                         "logprob_token_ids",
                                         "response_format",
                                         NULL};

/* What would change the text, and is not done. */
static const char *const unserved[] = {"suffix",
                                       "prompt_embeds",
                                       "use_beam_search",
                                       "bad_words",
                                       "allowed_token_ids",
                                       "structured_outputs",
                                       "guided_json",
                                       "guided_regex",
                                       "guided_choice",
                                       "guided_grammar",
                                       NULL};

/* ---- the question ---- */

int completion_read_n(const json_t *root, struct completion *c, struct json_error *e)
{
    int64_t n = 1;
    int rc = json_get_int(root, "n", 1, MAX_N, &n, e);
    c->n = (int32_t)n;
    return rc;
}

static int read_counts(const json_t *root, struct completion *c, struct json_error *e)
{
    int64_t best_of = 0, max_new = -1, n_top = -1, n_prompt_top = -1;
    int rc = completion_read_n(root, c, e);
    if (rc == 0)
        rc = json_get_int(root, "best_of", INT64_MIN, INT64_MAX, &best_of, e);
    if (rc == 0 && best_of != 0 && best_of != 1 && best_of != c->n)
        rc = json_fail(e, ERR_INVALID, "best_of",
                       "best_of is another number than n; 1 or n is accepted: all choices "
                       "are returned");
    if (rc == 0)
        rc = json_get_int(root, "max_tokens", 0, INT32_MAX, &max_new, e);
    if (rc == 0)
        rc = json_get_int(root, "logprobs", 0, TOP_MAX, &n_top, e);
    if (rc == 0)
        rc = json_get_int(root, "prompt_logprobs", 0, TOP_MAX, &n_prompt_top, e);
    c->max_new = (int32_t)max_new;
    c->n_top = (int32_t)n_top;
    c->n_prompt_top = (int32_t)n_prompt_top;
    return rc;
}

int completion_read_format(const json_t *root, struct json_error *e)
{
    const json_t *v = json_object_get(root, "response_format");
    const char *type = json_string_value(json_object_get(v, "type"));
    if (!v || json_is_null(v) || (type && strcmp(type, "text") == 0))
        return 0;
    return json_fail(e, ERR_INVALID, "response_format",
                     "response_format asks for a form; only {\"type\": \"text\"} is accepted");
}

int completion_read_stream(const json_t *root, struct completion *c, struct json_error *e)
{
    const json_t *o = json_object_get(root, "stream_options");
    int rc = json_get_bool(root, "stream", &c->group.is_stream, e);
    if (rc == 0)
        rc = json_get_bool(root, "return_progress", &c->group.tells_progress, e);
    if (rc == 0 && c->group.tells_progress && !c->group.is_stream)
        rc =
            json_fail(e, ERR_INVALID, "return_progress",
                      "return_progress is true without a stream; beside \"stream\": true it is "
                      "accepted");
    if (rc != 0 || !o || json_is_null(o))
        return rc;
    if (!json_is_object(o) || !c->group.is_stream)
        return json_fail(
            e, ERR_INVALID, "stream_options",
            "stream_options is %s%s; an object beside \"stream\": true is accepted",
            json_kind(o), c->group.is_stream ? "" : " without a stream");
    rc = json_get_bool(o, "include_usage", &c->with_usage, e);
    if (rc == 0)
        rc = json_get_bool(o, "continuous_usage_stats", &c->usage_in_each, e);
    return rc;
}

int completion_read_labels(const struct api *a, const json_t *root, struct completion *c,
                           struct json_error *e)
{
    int rc = api_read_labels(a, root, &c->choosing, e);
    if (c->choosing.n_labels > 0 && c->n_top < 0)
        c->n_top = 0;
    return rc;
}

static int read_options(const struct api *a, const json_t *root, struct completion *c,
                        struct json_error *e)
{
    bool adds_special;
    int rc = api_refuse_fields(root, unserved, e);
    if (rc == 0)
        rc = completion_read_format(root, e);
    if (rc == 0)
        rc = read_counts(root, c, e);
    if (rc == 0)
        rc = json_get_bool(root, "echo", &c->echo, e);
    if (rc == 0)
        rc = json_get_bool(root, "return_token_ids", &c->with_ids, e);
    if (rc == 0)
        rc = json_get_bool(root, "return_tokens_as_token_ids", &c->as_ids, e);
    if (rc == 0)
        rc = json_get_bool(root, "add_special_tokens", &adds_special, e);
    if (rc == 0)
        rc = completion_read_stream(root, c, e);
    if (rc == 0)
        rc = api_kv_read(a, root, &c->kv, e);
    if (rc == 0 && c->group.is_stream && c->n_prompt_top >= 0)
        rc = json_fail(
            e, ERR_INVALID, "prompt_logprobs",
            "prompt_logprobs is given with a stream; only its absence is accepted there");
    if (rc == 0)
        rc = api_read_choosing(a, root, &c->choosing, e);
    return rc ? rc : completion_read_labels(a, root, c, e);
}

/* After max_tokens: what fits is what that leaves. */
static int read_truncation(const struct api *a, const struct completion *c, const json_t *root,
                           struct prompt_rules *r, struct json_error *e)
{
    int64_t n = 0;
    int32_t n_fit = a->max_prompt_tokens - (c->max_new > 1 ? c->max_new - 1 : 0);
    const char *side = "left";
    size_t len = 4;
    int rc = json_get_int(root, "truncate_prompt_tokens", -1, INT32_MAX, &n, e);
    if (rc == 0)
        rc = json_get_string(root, "truncation_side", &side, &len, e);
    if (rc == 0 && strcmp(side, "left") != 0 && strcmp(side, "right") != 0)
        rc =
            json_fail(e, ERR_INVALID, "truncation_side",
                      "truncation_side is another string; \"left\" and \"right\" are accepted");
    if (rc == 0 && n == 0 && json_is_integer(json_object_get(root, "truncate_prompt_tokens")))
        rc = json_fail(e, ERR_INVALID, "truncate_prompt_tokens",
                       "truncate_prompt_tokens is 0; -1, for all that fit, and 1 or more are "
                       "accepted");
    r->truncate = n >= 0 ? (int32_t)n : n_fit > 0 ? n_fit : 1;
    r->from_left = strcmp(side, "left") == 0;
    return rc;
}

static bool wants_prompt_rows(const struct completion *c)
{
    return (c->echo && c->n_top >= 0) || c->n_prompt_top >= 0;
}

/* What is left for it when max_tokens was not said. */
static int32_t max_new_of(const struct api *a, const struct completion *c,
                          const struct prompt *p)
{
    if (c->max_new >= 0)
        return c->max_new;
    int32_t room = a->max_prompt_tokens - p->n_ids + 1;
    return room < c->default_new ? room : c->default_new;
}

/* Numbers in the answer to p: for each row that is asked for its own and its candidates. */
static int64_t n_numbers_of(const struct api *a, const struct completion *c,
                            const struct prompt *p)
{
    int32_t n_top = c->n_top > c->n_prompt_top ? c->n_top : c->n_prompt_top;
    int64_t n_rows = wants_prompt_rows(c) ? p->n_ids : 0;
    int64_t n_new = c->n_top >= 0 ? max_new_of(a, c, p) : 0;
    return ((n_rows + n_new) * (n_top + 1) + n_new * c->choosing.n_labels) * c->n;
}

/* Every token that a penalty or a bias touches is an adjustment of the logits. */
static int check_adjustments(const struct api *a, const struct completion *c,
                             struct json_error *e)
{
    const struct sampling *s = &c->choosing.sampling;
    bool repeats = s->repetition_penalty != 1;
    bool counts = repeats || s->presence_penalty != 0 || s->frequency_penalty != 0;
    for (int32_t i = 0; i < c->n_prompts && a->max_adjust > 0; i++) {
        int32_t max_new = max_new_of(a, c, &c->prompts[i]);
        int64_t n = (int64_t)c->choosing.n_bias + s->n_stop + (counts ? max_new : 0) +
                    (repeats ? c->prompts[i].n_ids : 0);
        if (max_new > 0 && n > a->max_adjust)
            return json_fail(e, ERR_UNSUPPORTED, repeats ? "repetition_penalty" : "max_tokens",
                             "%s: on backend %s the biased, the generated and, with "
                             "repetition_penalty, the prompt's tokens may be %d together; "
                             "found up to %lld",
                             repeats ? "repetition_penalty" : "max_tokens", a->backend_name,
                             a->max_adjust, (long long)n);
    }
    return 0;
}

/* Are the tokens to generate within what a request may hold? The last one is never computed, so
 * it takes no room. */
int completion_check_lengths(const struct api *a, const struct completion *c,
                             const char *max_field, struct json_error *e)
{
    int rc = check_adjustments(a, c, e);
    if (rc != 0)
        return rc;
    for (int32_t i = 0; i < c->n_prompts && c->max_new > 0; i++)
        if (c->max_new - 1 > a->max_prompt_tokens - c->prompts[i].n_ids)
            return json_fail(e, ERR_INVALID, max_field,
                             "%s is %d and the prompt has %d tokens; together at most "
                             "%d are accepted",
                             max_field, c->max_new, c->prompts[i].n_ids,
                             a->max_prompt_tokens + 1);
    if (c->max_new >= 0 && c->choosing.sampling.min_new > c->max_new)
        return json_fail(e, ERR_INVALID, "min_tokens",
                         "min_tokens is %d; at most %s, which is %d, is accepted",
                         c->choosing.sampling.min_new, max_field, c->max_new);
    int64_t n_all = (int64_t)c->n_prompts * c->n, n_numbers = 0;
    for (int32_t i = 0; i < c->n_prompts; i++)
        n_numbers += n_numbers_of(a, c, &c->prompts[i]);
    if (n_numbers > GROUP_MAX_NUMBERS)
        return json_fail(e, ERR_INVALID, "logprobs",
                         "the answer has %lld numbers, of all tokens and their candidates; at "
                         "most %d in one call are accepted",
                         (long long)n_numbers, GROUP_MAX_NUMBERS);
    if (n_all > queue_max_waiting(a->queue))
        return json_fail(e, ERR_INVALID, "n",
                         "n times the number of prompts is %lld; at most %d, which is "
                         "queue-length, are accepted",
                         (long long)n_all, queue_max_waiting(a->queue));
    return 0;
}

static int read_question(struct api *a, struct exchange *x, struct completion *c,
                         struct api_common *common, struct json_error *e)
{
    const char *fields[API_MAX_FIELDS];
    api_join_fields(fields, own_fields, unserved, api_choosing_fields);
    const struct json_rules rules = {.fields = fields,
                                     .ids_field = "prompt",
                                     .vocab = a->vocab,
                                     .max_ids = INT32_MAX,
                                     .takes_lists = true};
    struct prompt_rules prompt = {.field = "prompt", .max_ids = a->max_prompt_tokens};
    struct json_body body;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    rc = api_read_common(a, x, body.root, common, e);
    if (rc == 0)
        rc = read_options(a, body.root, c, e);
    if (rc == 0)
        rc = read_truncation(a, c, body.root, &prompt, e);
    if (rc == 0)
        rc = api_read_prompts(a, &body, &prompt, &c->prompts, &c->n_prompts, e);
    if (rc == 0)
        rc = completion_check_lengths(a, c, "max_tokens", e);
    json_fini(&body);
    return rc;
}

/* ---- to the engine ---- */

static void release(struct group *g)
{
    struct completion *c = (struct completion *)g;
    for (int32_t i = 0; c->choices && i < g->n; i++)
        choice_fini(&c->choices[i]);
    for (int32_t i = 0; c->offsets && i < g->n; i++)
        text_offsets_fini(&c->offsets[i]);
    free(c->choices);
    free(c->offsets);
    free(c->n_read);
    prompts_free(c->prompts, c->n_prompts);
    choosing_fini(&c->choosing);
    group_fini(g);
    free(c);
}

static int copy_prompt(struct prompt *out, const struct prompt *p)
{
    out->n_ids = p->n_ids;
    out->ids = malloc((size_t)p->n_ids * sizeof(*out->ids));
    if (!out->ids)
        return ERR_NOMEM;
    memcpy(out->ids, p->ids, (size_t)p->n_ids * sizeof(*out->ids));
    return 0;
}

/* Choice i of prompt p; its number among all is p times n plus i. */
static int add_choice(struct completion *c, struct prompt *p, int32_t i)
{
    struct group *g = &c->group;
    struct prompt ids;
    int32_t max_new = max_new_of(g->api, c, p);
    int32_t n_top = c->n_top > c->n_prompt_top ? c->n_top : c->n_prompt_top;
    enum logprobs_mode mode = wants_prompt_rows(c) ? LOGPROBS_ALL
                              : max_new > 0        ? LOGPROBS_NEXT
                                                   : LOGPROBS_NONE;
    if (copy_prompt(&ids, p) != 0 ||
        group_add(g, &ids, mode, n_top > 0 ? n_top : 0, max_new > 0 ? &c->choosing : NULL,
                  max_new, c->choosing.sampling.seed + (uint64_t)i) != 0)
        return ERR_NOMEM;
    g->requests[g->n - 1]->logprobs_from = c->shown_from < p->n_ids ? c->shown_from : p->n_ids;
    choice_init(&c->choices[g->n - 1], g->api, &c->choosing, &g->members[g->n - 1], max_new);
    if (c->offsets)
        text_offsets_init(&c->offsets[g->n - 1], g->api->tokenizer,
                          !c->echo && c->choosing.skips_special);
    return 0;
}

static int add_choices(struct completion *c)
{
    int rc = 0;
    c->choices = calloc((size_t)c->group.cap, sizeof(*c->choices));
    if (c->group.is_stream)
        c->offsets = calloc((size_t)c->group.cap, sizeof(*c->offsets));
    if (c->group.tells_progress)
        c->n_read = calloc((size_t)c->group.cap, sizeof(*c->n_read));
    if (!c->choices || (c->group.is_stream && !c->offsets) ||
        (c->group.tells_progress && !c->n_read))
        return ERR_NOMEM;
    for (int32_t p = 0; p < c->n_prompts && rc == 0; p++) {
        for (int32_t i = 0; i < c->n && rc == 0; i++)
            rc = add_choice(c, &c->prompts[p], i);
        free(c->prompts[p].ids);
        c->prompts[p].ids = NULL;
    }
    if (rc == 0 && c->group.n == 1)
        rc = api_kv_bind(c->group.api, &c->kv, c->group.requests[0]);
    return rc;
}

void completion_run(struct api *a, struct exchange *x, completion_read *read,
                    void (*format)(struct group *g, struct buf *out),
                    void (*add_event)(struct completion *c, struct buf *b, int32_t i))
{
    struct api_common common;
    struct json_error e;
    if (exchange_is_gone(x)) {
        api_drop(a, x);
        return;
    }
    struct completion *c = calloc(1, sizeof(*c));
    if (!c) {
        api_refuse(a, x, 500, NULL, "memory is short");
        return;
    }
    c->group.format = format;
    c->group.release = release;
    c->add_event = add_event;
    c->created = (int64_t)time(NULL);
    c->n_prompt_top = -1;
    c->default_new = DEFAULT_MAX_TOKENS;
    int rc = read(a, x, c, &common, &e);
    if (c->choosing.n_stops > 0 || c->group.is_stream)
        c->group.update = completion_update;
    if (rc == 0)
        rc = group_init(&c->group, a, x, &common, c->n_prompts * c->n);
    if (rc == 0)
        rc = add_choices(c);
    if (rc == ERR_NOMEM)
        json_fail(&e, rc, NULL, "memory is short");
    if (rc != 0) {
        api_refuse_body(a, x, rc, &e);
        release(&c->group);
        return;
    }
    group_start(&c->group);
}

void api_completions(struct api *a, struct exchange *x)
{
    completion_run(a, x, read_question, completion_format, completion_add_event);
}
