/* What /v1/completions and /v1/chat/completions answer, whole or as a stream of events. */
#include "api_completion.h"

#include <stdio.h>
#include <string.h>

/* What one event says of a choice, or the whole answer: tokens and the text they gave. */
struct part {
    int32_t i;        /* the choice */
    int32_t from, to; /* rows: of the prompt, too, with echo */
    size_t text_from, text_to;
    bool is_first, is_last;
    struct text_offsets *offsets; /* stand at `from` */
};

/* ---- pieces ---- */

static const struct request *request_of(const struct completion *c, int32_t i)
{
    return c->group.requests[i];
}

static void add_text(const struct completion *c, struct buf *b, const struct part *p)
{
    const struct choice *choice = &c->choices[p->i];
    const struct request *r = request_of(c, p->i);
    struct buf all;
    buf_init(&all);
    if (c->echo && p->is_first && c->group.api->tokenizer)
        tokenizer_decode(c->group.api->tokenizer, r->ids, (size_t)r->n_prompt, false, &all);
    if (p->text_to > p->text_from)
        buf_add(&all, choice->text.data + p->text_from, p->text_to - p->text_from);
    buf_json_string(b, all.data ? all.data : "", all.len);
    b->failed |= all.failed || choice->text.failed;
    buf_fini(&all);
}

static void add_end(const struct completion *c, struct buf *b, const struct part *p)
{
    const struct choice *choice = &c->choices[p->i];
    if (p->is_last) {
        buf_printf(b, ", \"finish_reason\": \"%s\", \"stop_reason\": ", choice_reason(choice));
        choice_write_stop_reason(choice, b);
    } else {
        buf_adds(b, ", \"finish_reason\": null, \"stop_reason\": null");
    }
}

static void add_part_ids(const struct completion *c, struct buf *b, const struct part *p)
{
    const struct request *r = request_of(c, p->i);
    if (!c->with_ids)
        return;
    if (p->is_first) {
        buf_adds(b, ", \"prompt_token_ids\": ");
        write_ids(b, r->ids, 0, r->n_prompt);
    }
    buf_adds(b, ", \"token_ids\": ");
    write_ids(b, r->ids, p->from > r->n_prompt ? p->from : r->n_prompt, p->to);
}

static void add_text_choice(const struct completion *c, struct buf *b, const struct part *p)
{
    const struct row_style style = {c->n_top, c->as_ids, c->choosing.skips_special};
    buf_printf(b, "{\"index\": %d, \"text\": ", p->i);
    add_text(c, b, p);
    buf_adds(b, ", \"logprobs\": ");
    if (c->n_top >= 0)
        write_logprobs(c->group.api, b, request_of(c, p->i), p->from, p->to, &style,
                       p->offsets);
    else
        buf_adds(b, "null");
    add_end(c, b, p);
    if (c->n_prompt_top >= 0) {
        buf_adds(b, ", \"prompt_logprobs\": ");
        write_prompt_logprobs(c->group.api, b, request_of(c, p->i), c->n_prompt_top);
    }
    add_part_ids(c, b, p);
    buf_addc(b, '}');
}

static void add_message_choice(const struct completion *c, struct buf *b, const struct part *p)
{
    bool is_stream = c->group.is_stream;
    buf_printf(b, "{\"index\": %d, \"%s\": {", p->i, is_stream ? "delta" : "message");
    if (p->is_first)
        buf_adds(b, "\"role\": \"assistant\", ");
    buf_adds(b, "\"content\": ");
    add_text(c, b, p);
    buf_adds(b, "}, \"logprobs\": ");
    if (c->n_top >= 0)
        write_chat_logprobs(c->group.api, b, request_of(c, p->i), p->from, p->to, c->n_top);
    else
        buf_adds(b, "null");
    add_end(c, b, p);
    add_part_ids(c, b, p);
    buf_addc(b, '}');
}

static void add_choice(const struct completion *c, struct buf *b, const struct part *p)
{
    if (c->is_chat)
        add_message_choice(c, b, p);
    else
        add_text_choice(c, b, p);
}

/* A prompt counts once, however many choices it has. */
static void add_usage(const struct completion *c, struct buf *b)
{
    int64_t n_prompt = 0, n_cached = 0, n_new = 0;
    for (int32_t i = 0; i < c->group.n; i++) {
        const struct request *r = request_of(c, i);
        bool is_counted = i % c->n == 0;
        n_prompt += is_counted ? r->n_prompt : 0;
        n_cached += is_counted && atomic_load(&c->group.members[i].is_ended) ? r->n_cached : 0;
        n_new += c->choices[i].n_tokens;
    }
    buf_printf(b,
               ", \"usage\": {\"prompt_tokens\": %lld, \"total_tokens\": %lld, "
               "\"completion_tokens\": %lld, \"prompt_tokens_details\": {\"cached_tokens\": "
               "%lld}}",
               (long long)n_prompt, (long long)(n_prompt + n_new), (long long)n_new,
               (long long)n_cached);
}

static void add_head(const struct completion *c, struct buf *b)
{
    const struct api *a = c->group.api;
    char id[HTTP_ID_MAX + 16];
    snprintf(id, sizeof(id), "%s%s", c->is_chat ? "chatcmpl-" : "cmpl-",
             exchange_id(c->group.exchange));
    buf_adds(b, "{\"id\": ");
    buf_json_string(b, id, strlen(id));
    buf_printf(b, ", \"object\": \"%s%s\", \"created\": %lld, \"model\": ",
               c->is_chat ? "chat.completion" : "text_completion",
               c->is_chat && c->group.is_stream ? ".chunk" : "", (long long)c->created);
    buf_json_string(b, a->model_id, strlen(a->model_id));
    buf_adds(b, ", \"choices\": [");
}

static void add_kv(const struct completion *c, struct buf *b)
{
    api_kv_add(c->group.api, &c->kv, c->group.n == 1 ? c->group.requests[0] : NULL, b);
}

/* ---- streams ---- */

void completion_add_event(struct completion *c, struct buf *b, int32_t i)
{
    struct choice *choice = &c->choices[i];
    int32_t n_prompt = request_of(c, i)->n_prompt;
    int32_t to = n_prompt + choice->n_tokens;
    struct part p = {.i = i,
                     .to = to,
                     .text_from = choice->sent_len,
                     .text_to = choice_certain(choice),
                     .is_first = choice->n_tokens <= 1,
                     .is_last = choice->end != CHOICE_OPEN,
                     .offsets = &c->offsets[i]};
    p.from = p.is_first ? (c->echo ? 0 : n_prompt) : to - 1;
    choice->sent_len = p.text_to;
    buf_adds(b, "data: ");
    add_head(c, b);
    add_choice(c, b, &p);
    buf_addc(b, ']');
    if (c->usage_in_each)
        add_usage(c, b);
    buf_adds(b, "}\n\n");
}

/* How much of choice i's prompt is computed, in llama.cpp's words; with an empty text, so that
 * who joins texts need not look. */
static void add_progress(struct completion *c, struct buf *b, int32_t i)
{
    const struct request *r = request_of(c, i);
    c->n_read[i] = atomic_load(&r->n_read);
    buf_adds(b, "data: ");
    add_head(c, b);
    buf_printf(b,
               "{\"index\": %d, %s, \"logprobs\": null, \"finish_reason\": null}], "
               "\"prompt_progress\": {\"total\": %d, \"cache\": %d, \"processed\": %d, "
               "\"time_ms\": %.3f}}\n\n",
               i, c->is_chat ? "\"delta\": {}" : "\"text\": \"\"", r->n_prompt, r->n_cached,
               c->n_read[i], (double)(request_now_us() - r->started_us) / 1e3);
}

static void add_last_events(struct completion *c, struct buf *b)
{
    for (int32_t i = 0; i < c->group.n; i++)
        if (!request_of(c, i)->sampling)
            c->add_event(c, b, i);
    if (c->with_usage || c->kv.is_given) {
        buf_adds(b, "data: ");
        add_head(c, b);
        buf_addc(b, ']');
        add_usage(c, b);
        add_kv(c, b);
        buf_adds(b, "}\n\n");
    }
    buf_adds(b, "data: [DONE]\n\n");
}

/* ---- the group's callbacks ---- */

static void take_tokens(struct completion *c, struct buf *b)
{
    for (int32_t i = 0; i < c->group.n; i++) {
        if (c->n_read && atomic_load(&request_of(c, i)->n_read) > c->n_read[i])
            add_progress(c, b, i);
        while (choice_step(&c->choices[i]))
            if (c->group.is_stream)
                c->add_event(c, b, i);
    }
}

void completion_update(struct group *g)
{
    struct completion *c = (struct completion *)g;
    struct buf b;
    buf_init(&b);
    take_tokens(c, &b);
    if (b.len > 0)
        exchange_stream_write(g->exchange, &b);
    buf_fini(&b);
}

void completion_format(struct group *g, struct buf *b)
{
    struct completion *c = (struct completion *)g;
    take_tokens(c, b);
    if (g->is_stream) {
        add_last_events(c, b);
        return;
    }
    add_head(c, b);
    for (int32_t i = 0; i < g->n; i++) {
        const struct choice *choice = &c->choices[i];
        struct text_offsets o;
        int32_t n_prompt = request_of(c, i)->n_prompt;
        const struct part p = {.i = i,
                               .from = c->echo ? 0 : n_prompt,
                               .to = n_prompt + choice->n_tokens,
                               .text_to = choice->text.len,
                               .is_first = true,
                               .is_last = true,
                               .offsets = &o};
        text_offsets_init(&o, g->api->tokenizer, !c->echo && c->choosing.skips_special);
        buf_adds(b, i ? ", " : "");
        add_choice(c, b, &p);
        b->failed |= o.scratch.failed;
        text_offsets_fini(&o);
    }
    buf_addc(b, ']');
    add_usage(c, b);
    add_kv(c, b);
    buf_addc(b, '}');
}
