/* POST /v1/score: one context, many continuations, each with the numbers that /v1/prefill gives
 * for the two joined. POST /generative_scoring and /rerank, in vLLM's shapes: how probable a
 * label is behind a query and an item.
 *
 * Each pair is a request of its own. They share what they begin with (api_group.c): the context
 * is computed once, up to the last page that lies before its last token, whose row gives the
 * first number; so the numbers are those of the joined prompt alone, bit for bit. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api_group.h"
#include "api_logprobs.h"
#include "backend.h"

enum { MAX_CONTINUATIONS = 256 };

struct scoring {
    struct group group;
    int32_t n_top;     /* of the requests */
    bool with_top;     /* in the answer of /v1/score */
    int32_t *n_tails;  /* [group.n]: tokens of each request's end that are scored */
    int64_t n_numbers; /* in the answer */
    int64_t created;
    /* Labels: */
    int32_t n_labels;  /* requests for each item, one a label; the first is the one */
    bool normalizes;   /* among the labels; else among all tokens */
    int32_t n_best;    /* /rerank: so many are answered, the best first; 0: it is no rerank */
    json_t *documents; /* /rerank: to say them again; NULL: not */
};

static void release(struct group *g)
{
    struct scoring *s = (struct scoring *)g;
    free(s->n_tails);
    json_decref(s->documents);
    group_fini(g);
    free(s);
}

static int fail_memory(struct json_error *e)
{
    return json_fail(e, ERR_NOMEM, NULL, "memory is short");
}

/* Of an empty text ids is NULL, which memcpy must not get. */
static void copy_ids(int32_t *to, const struct prompt *p)
{
    if (p->n_ids > 0)
        memcpy(to, p->ids, (size_t)p->n_ids * sizeof(*to));
}

/* Adds head and tail, joined. name is the tail's in messages. */
static int add_pair(struct scoring *s, const struct prompt *head, const struct prompt *tail,
                    const char *field, const char *name, struct json_error *e)
{
    const struct api *a = s->group.api;
    int64_t n = (int64_t)head->n_ids + tail->n_ids;
    if (tail->n_ids == 0)
        return json_fail(e, ERR_INVALID, field, "%s is empty; at least one token is needed",
                         name);
    if (n > a->max_prompt_tokens)
        return json_fail(e, ERR_TOO_LARGE, field,
                         "%s has, with what is before it, %lld tokens; at most %d are accepted",
                         name, (long long)n, a->max_prompt_tokens);
    struct prompt p = {malloc((size_t)n * sizeof(*p.ids)), (int32_t)n};
    if (!p.ids)
        return fail_memory(e);
    copy_ids(p.ids, head);
    copy_ids(p.ids + head->n_ids, tail);
    s->n_numbers += (int64_t)tail->n_ids * (s->n_top + 1);
    if (s->n_numbers > GROUP_MAX_NUMBERS) {
        free(p.ids);
        return json_fail(e, ERR_INVALID, field,
                         "%s: the answer has more than %d numbers, of all tokens and their "
                         "candidates; so many are accepted in one call",
                         field, GROUP_MAX_NUMBERS);
    }
    int32_t n_head = head->n_ids, i = s->group.n;
    s->n_tails[i] = tail->n_ids;
    if (group_add(&s->group, &p, LOGPROBS_ALL, s->n_top, NULL, 0, 0) != 0)
        return fail_memory(e);
    /* The head of the model is not computed for the context. */
    s->group.requests[i]->logprobs_from = n_head;
    return 0;
}

/* Room for n requests; says when there are more than the queue ever takes. */
static int init_scoring(struct scoring *s, struct api *a, struct exchange *x,
                        const struct api_common *c, const char *field, size_t n,
                        struct json_error *e)
{
    if (n > (size_t)queue_max_waiting(a->queue))
        return json_fail(
            e, ERR_INVALID, field,
            "%s makes %zu prompts; at most %d, which is queue-length, are accepted", field, n,
            queue_max_waiting(a->queue));
    s->n_tails = calloc(n, sizeof(*s->n_tails));
    if (!s->n_tails || group_init(&s->group, a, x, c, (int32_t)n) != 0)
        return fail_memory(e);
    return 0;
}

/* The list under field, 1 to max long; NULL: refused. */
static const json_t *get_list(const json_t *root, const char *field, size_t max,
                              struct json_error *e)
{
    const json_t *v = json_object_get(root, field);
    size_t n = json_array_size(v);
    if (json_is_array(v) && n >= 1 && n <= max)
        return v;
    if (json_is_array(v))
        json_fail(e, ERR_INVALID, field, "%s has %zu entries; 1 to %zu are accepted", field, n,
                  max);
    else
        json_fail(e, ERR_INVALID, field, "%s is %s; a list is accepted", field,
                  v ? json_kind(v) : "missing");
    return NULL;
}

/* ---- /v1/score ---- */

static int add_continuations(struct scoring *s, struct api *a, struct exchange *x,
                             const struct api_common *common, const json_t *root,
                             const struct prompt *context, struct json_error *e)
{
    const json_t *list = get_list(root, "continuations", MAX_CONTINUATIONS, e);
    if (!list)
        return ERR_INVALID;
    size_t n = json_array_size(list);
    int rc = init_scoring(s, a, x, common, "continuations", n, e);
    for (size_t i = 0; i < n && rc == 0; i++) {
        char name[40];
        struct prompt tail;
        snprintf(name, sizeof(name), "continuations[%zu]", i);
        rc = api_read_text_or_ids(a, json_array_get(list, i), "continuations", name, &tail, e);
        if (rc == 0)
            rc = add_pair(s, context, &tail, "continuations", name, e);
        free(tail.ids);
    }
    return rc;
}

static int read_score(struct scoring *s, struct api *a, struct exchange *x,
                      struct json_error *e)
{
    static const char *const fields[] = {"model",        "context",    "continuations",
                                         "top_logprobs", "priority",   "deadline_ms",
                                         "cache_salt",   "request_id", NULL};
    const struct json_rules rules = {.fields = fields,
                                     .ids_field = "context",
                                     .vocab = a->vocab,
                                     .max_ids = a->max_prompt_tokens};
    const struct prompt_rules one = {
        .field = "context", .max_ids = a->max_prompt_tokens, .only_one = true};
    struct json_body body;
    struct api_common common;
    struct prompt *context = NULL;
    int32_t n_context = 0;
    int64_t n_top = 0;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    rc = api_read_common(a, x, body.root, &common, e);
    if (rc == 0)
        rc = json_get_int(body.root, "top_logprobs", 0, TOP_MAX, &n_top, e);
    s->with_top = n_top > 0;
    s->n_top = n_top > 0 ? (int32_t)n_top : 1; /* is_greedy needs the best */
    if (rc == 0)
        rc = api_read_prompts(a, &body, &one, &context, &n_context, e);
    if (rc == 0)
        rc = add_continuations(s, a, x, &common, body.root, context, e);
    prompts_free(context, n_context);
    json_fini(&body);
    return rc;
}

static void add_score(const struct scoring *s, struct buf *b, int32_t i)
{
    const struct request *r = s->group.requests[i];
    int32_t from = r->n_prompt - s->n_tails[i];
    bool is_greedy = true;
    double sum = 0;
    for (int32_t t = from; t < r->n_prompt; t++) {
        sum += (double)r->prompt_logprobs[t];
        is_greedy &= row_top(r, t)[0].id == r->ids[t];
    }
    buf_printf(b, "{\"index\": %d, \"tokens\": ", i);
    write_ids(b, r->ids, from, r->n_prompt);
    buf_printf(b, ", \"logprob\": %.17g, \"logprobs\": [", sum);
    for (int32_t t = from; t < r->n_prompt; t++) {
        buf_adds(b, t > from ? ", " : "");
        buf_json_f32(b, r->prompt_logprobs[t]);
    }
    buf_printf(b, "], \"is_greedy\": %s", is_greedy ? "true" : "false");
    if (s->with_top) {
        buf_adds(b, ", \"top\": [");
        for (int32_t t = from; t < r->n_prompt; t++) {
            buf_adds(b, t > from ? ", " : "");
            write_candidates(s->group.api, b, row_top(r, t), s->n_top);
        }
        buf_addc(b, ']');
    }
    buf_addc(b, '}');
}

static void add_head(const struct group *g, struct buf *b, const char *object, int64_t created)
{
    const char *id = exchange_id(g->exchange), *model = g->api->model_id;
    buf_adds(b, "{\"id\": ");
    buf_json_string(b, id, strlen(id));
    buf_printf(b, ", \"object\": \"%s\", \"created\": %lld, \"model\": ", object,
               (long long)created);
    buf_json_string(b, model, strlen(model));
}

/* What was computed: each pair counts in whole. */
static void add_usage(const struct group *g, struct buf *b)
{
    long long n = 0, n_cached = 0;
    for (int32_t i = 0; i < g->n; i++) {
        n += g->requests[i]->n_prompt;
        n_cached += g->requests[i]->n_cached;
    }
    buf_printf(b,
               ", \"usage\": {\"prompt_tokens\": %lld, \"completion_tokens\": 0, "
               "\"total_tokens\": %lld, \"cached_tokens\": %lld}",
               n, n, n_cached);
}

static void format_score(struct group *g, struct buf *b)
{
    const struct scoring *s = (const struct scoring *)g;
    add_head(g, b, "score", s->created);
    buf_adds(b, ", \"data\": [");
    for (int32_t i = 0; i < g->n; i++) {
        buf_adds(b, i ? ", " : "");
        add_score(s, b, i);
    }
    buf_addc(b, ']');
    add_usage(g, b);
    buf_addc(b, '}');
}

/* Runs a call: read makes the requests, format writes the answer. */
static void run(struct api *a, struct exchange *x,
                int (*read)(struct scoring *s, struct api *a, struct exchange *x,
                            struct json_error *e),
                void (*format)(struct group *g, struct buf *b))
{
    struct json_error e;
    if (exchange_is_gone(x)) {
        api_drop(a, x);
        return;
    }
    struct scoring *s = calloc(1, sizeof(*s));
    if (!s) {
        api_refuse(a, x, 500, NULL, "memory is short");
        return;
    }
    s->group.format = format;
    s->group.release = release;
    s->created = (int64_t)time(NULL);
    int rc = read(s, a, x, &e);
    if (rc != 0) {
        api_refuse_body(a, x, rc, &e);
        release(&s->group);
        return;
    }
    group_start(&s->group);
}

void api_score(struct api *a, struct exchange *x)
{
    run(a, x, read_score, format_score);
}

/* ---- labels ---- */

static const char *const label_fields[] = {
    "model",         "query",      "items",       "documents",        "label_token_ids",
    "top_n",         "priority",   "deadline_ms", "cache_salt",       "add_special_tokens",
    "apply_softmax", "item_first", "request_id",  "return_documents", NULL};

/* A document may also be {"text": string}. */
static const json_t *text_of(const json_t *document)
{
    const json_t *text = json_is_object(document) ? json_object_get(document, "text") : NULL;
    return text ? text : document;
}

/* All requests of one item: query and item, in their order, then a label. */
static int add_item(struct scoring *s, const struct prompt *query, const struct prompt *item,
                    bool item_first, const struct prompt *labels, const char *field,
                    const char *name, struct json_error *e)
{
    const struct prompt *first = item_first ? item : query, *then = item_first ? query : item;
    int64_t n = (int64_t)first->n_ids + then->n_ids;
    struct prompt head = {malloc((size_t)(n ? n : 1) * sizeof(*head.ids)), (int32_t)n};
    if (!head.ids)
        return fail_memory(e);
    copy_ids(head.ids, first);
    copy_ids(head.ids + first->n_ids, then);
    int rc = n > 0 ? 0
                   : json_fail(e, ERR_INVALID, field,
                               "%s and query are empty; at least one token is needed", name);
    for (int32_t i = 0; i < s->n_labels && rc == 0; i++) {
        struct prompt label = {labels->ids + i, 1};
        rc = add_pair(s, &head, &label, field, name, e);
    }
    free(head.ids);
    return rc;
}

static int add_items(struct scoring *s, const json_t *items, const char *field,
                     const struct prompt *query, bool item_first, const struct prompt *labels,
                     struct json_error *e)
{
    int rc = 0;
    for (size_t i = 0; i < json_array_size(items) && rc == 0; i++) {
        char name[40];
        struct prompt item;
        snprintf(name, sizeof(name), "%s[%zu]", field, i);
        rc = api_read_text_or_ids(s->group.api, text_of(json_array_get(items, i)), field, name,
                                  &item, e);
        if (rc == 0)
            rc = add_item(s, query, &item, item_first, labels, field, name, e);
        free(item.ids);
    }
    return rc;
}

static int read_labels(const struct api *a, const json_t *root, struct prompt *labels,
                       struct json_error *e)
{
    enum { MAX_LABELS = 256 };
    static const char field[] = "label_token_ids";
    const json_t *v = get_list(root, field, MAX_LABELS, e);
    return v ? api_read_text_or_ids(a, v, field, field, labels, e) : ERR_INVALID;
}

/* The items are under field. */
static int read_items(struct scoring *s, struct api *a, struct exchange *x, const json_t *root,
                      const char *field, struct json_error *e)
{
    struct api_common common;
    struct prompt query = {0}, labels = {0};
    const json_t *items = NULL, *q = json_object_get(root, "query");
    bool item_first = false, adds_special;
    int rc = api_read_common(a, x, root, &common, e);
    s->normalizes = true;
    if (rc == 0)
        rc = json_get_bool(root, "apply_softmax", &s->normalizes, e);
    if (rc == 0)
        rc = json_get_bool(root, "item_first", &item_first, e);
    if (rc == 0)
        rc = json_get_bool(root, "add_special_tokens", &adds_special, e);
    if (rc == 0 && !q)
        rc = json_fail(e, ERR_INVALID, "query",
                       "query is missing; a string or a list of ids is accepted");
    if (rc == 0)
        rc = api_read_text_or_ids(a, q, "query", "query", &query, e);
    if (rc == 0)
        rc = read_labels(a, root, &labels, e);
    /* Without softmax the other labels do not matter. */
    s->n_labels = s->normalizes ? labels.n_ids : 1;
    if (rc == 0 && !(items = get_list(root, field, (size_t)queue_max_waiting(a->queue), e)))
        rc = ERR_INVALID;
    if (rc == 0)
        rc = init_scoring(s, a, x, &common, field, json_array_size(items) * (size_t)s->n_labels,
                          e);
    if (rc == 0)
        rc = add_items(s, items, field, &query, item_first, &labels, e);
    free(query.ids);
    free(labels.ids);
    return rc;
}

static int read_generative(struct scoring *s, struct api *a, struct exchange *x,
                           struct json_error *e)
{
    const struct json_rules rules = {.fields = label_fields};
    struct json_body body;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    rc = read_items(s, a, x, body.root, "items", e);
    json_fini(&body);
    return rc;
}

static int read_rerank(struct scoring *s, struct api *a, struct exchange *x,
                       struct json_error *e)
{
    const struct json_rules rules = {.fields = label_fields};
    struct json_body body;
    int64_t n_best = INT32_MAX;
    bool says_again = true;
    int rc = api_read_body(x, &rules, &body, e);
    if (rc != 0)
        return rc;
    rc = read_items(s, a, x, body.root, "documents", e);
    if (rc == 0)
        rc = json_get_int(body.root, "top_n", 0, INT32_MAX, &n_best, e);
    if (rc == 0)
        rc = json_get_bool(body.root, "return_documents", &says_again, e);
    s->n_best = n_best > 0 ? (int32_t)n_best : INT32_MAX;
    if (rc == 0 && says_again)
        s->documents = json_incref(json_object_get(body.root, "documents"));
    json_fini(&body);
    return rc;
}

/* The probability of the first label behind item i: among all tokens, or among the labels. */
static double label_score(const struct scoring *s, int32_t i)
{
    double max = -INFINITY, sum = 0;
    struct request *const *r = s->group.requests + (size_t)i * (size_t)s->n_labels;
    double first = (double)r[0]->prompt_logprobs[r[0]->n_prompt - 1];
    if (!s->normalizes)
        return exp(first);
    for (int32_t j = 0; j < s->n_labels; j++)
        max = fmax(max, (double)r[j]->prompt_logprobs[r[j]->n_prompt - 1]);
    for (int32_t j = 0; j < s->n_labels; j++)
        sum += exp((double)r[j]->prompt_logprobs[r[j]->n_prompt - 1] - max);
    return exp(first - max) / sum;
}

static void add_label_usage(const struct scoring *s, struct buf *b)
{
    long long n = 0;
    for (int32_t i = 0; i < s->group.n; i += s->n_labels)
        n += s->group.requests[i]->n_prompt - 1;
    buf_printf(b,
               ", \"usage\": {\"prompt_tokens\": %lld, \"completion_tokens\": 0, "
               "\"total_tokens\": %lld}}",
               n, n);
}

static void format_generative(struct group *g, struct buf *b)
{
    const struct scoring *s = (const struct scoring *)g;
    add_head(g, b, "list", s->created);
    buf_adds(b, ", \"data\": [");
    for (int32_t i = 0; i < g->n / s->n_labels; i++)
        buf_printf(b, "%s{\"index\": %d, \"object\": \"score\", \"score\": %.17g}",
                   i ? ", " : "", i, label_score(s, i));
    buf_addc(b, ']');
    add_label_usage(s, b);
}

struct ranked {
    int32_t index;
    double score;
};

static int by_score(const void *p, const void *q)
{
    const struct ranked *a = p, *b = q;
    if (a->score != b->score)
        return a->score > b->score ? -1 : 1;
    return a->index - b->index;
}

static void format_rerank(struct group *g, struct buf *b)
{
    const struct scoring *s = (const struct scoring *)g;
    int32_t n = g->n / s->n_labels;
    struct ranked *ranks = malloc((size_t)n * sizeof(*ranks));
    if (!ranks) {
        b->failed = true;
        return;
    }
    for (int32_t i = 0; i < n; i++)
        ranks[i] = (struct ranked){i, label_score(s, i)};
    qsort(ranks, (size_t)n, sizeof(*ranks), by_score);
    add_head(g, b, "rerank", s->created);
    buf_adds(b, ", \"results\": [");
    for (int32_t i = 0; i < n && i < s->n_best; i++) {
        const json_t *text = text_of(json_array_get(s->documents, (size_t)ranks[i].index));
        buf_printf(b, "%s{\"index\": %d, \"relevance_score\": %.17g", i ? ", " : "",
                   ranks[i].index, ranks[i].score);
        if (json_is_string(text)) {
            buf_adds(b, ", \"document\": {\"text\": ");
            buf_json_string(b, json_string_value(text), json_string_length(text));
            buf_addc(b, '}');
        }
        buf_addc(b, '}');
    }
    buf_addc(b, ']');
    free(ranks);
    add_label_usage(s, b);
}

void api_generative_scoring(struct api *a, struct exchange *x)
{
    run(a, x, read_generative, format_generative);
}

void api_rerank(struct api *a, struct exchange *x)
{
    run(a, x, read_rerank, format_rerank);
}
