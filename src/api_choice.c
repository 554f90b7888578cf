#define _GNU_SOURCE /* memmem */
#include "api_choice.h"

#include <string.h>

void choice_init(struct choice *c, const struct api *a, const struct choosing *choosing,
                 struct group_member *m, int32_t max_new)
{
    memset(c, 0, sizeof(*c));
    c->choosing = choosing;
    c->member = m;
    c->has_text = a->tokenizer != NULL;
    buf_init(&c->text);
    if (c->has_text)
        tokenizer_stream_init(&c->stream, a->tokenizer, choosing->skips_special);
    c->end = max_new > 0 ? CHOICE_OPEN : CHOICE_LENGTH;
}

void choice_fini(struct choice *c)
{
    buf_fini(&c->text);
}

/* The first stop string that ends in the bytes behind old_len; false: none. */
static bool find_stop(struct choice *c, size_t old_len)
{
    const struct choosing *o = c->choosing;
    size_t best = SIZE_MAX;
    for (int32_t i = 0; i < o->n_stops; i++) {
        size_t len = o->stops[i].len;
        size_t from = old_len + 1 > len ? old_len + 1 - len : 0;
        if (from >= c->text.len)
            continue;
        const char *at = memmem(c->text.data + from, c->text.len - from, o->stops[i].text, len);
        if (at && (size_t)(at - c->text.data) < best) {
            best = (size_t)(at - c->text.data);
            c->i_stop = i;
        }
    }
    if (best == SIZE_MAX)
        return false;
    c->text.len = best + (o->with_stop ? o->stops[c->i_stop].len : 0);
    return true;
}

static int32_t find_stop_id(const struct sampling *s, int32_t id)
{
    for (int32_t i = 0; i < s->n_stop; i++)
        if (s->stop_ids[i] == id)
            return i;
    return -1;
}

bool choice_step(struct choice *c)
{
    const struct request *r = c->member->request;
    const struct sampling *s = r->sampling;
    if (c->end != CHOICE_OPEN || c->n_tokens >= atomic_load(&r->n_new))
        return false;
    int32_t id = r->ids[r->n_prompt + c->n_tokens++];
    size_t old_len = c->text.len;
    int32_t i_stop = c->n_tokens > s->min_new ? find_stop_id(s, id) : -1;
    if (i_stop >= 0) {
        c->end = CHOICE_STOP_TOKEN;
        c->i_stop = i_stop;
    } else if (c->n_tokens == s->max_new) {
        c->end = CHOICE_LENGTH;
    }
    if (!c->has_text)
        return true;
    /* The token that ended it is no part of the text, unless it was asked to be. */
    if (i_stop < 0 || c->choosing->with_stop)
        tokenizer_stream_push(&c->stream, id, &c->text);
    if (c->end != CHOICE_OPEN)
        tokenizer_stream_finish(&c->stream, &c->text);
    if (c->n_tokens > s->min_new && i_stop < 0 && find_stop(c, old_len)) {
        c->end = CHOICE_STOP_TEXT;
        if (c->n_tokens < s->max_new)
            group_cut(c->member);
    }
    return true;
}

size_t choice_certain(const struct choice *c)
{
    size_t held = 0;
    if (c->end != CHOICE_OPEN)
        return c->text.len;
    for (int32_t i = 0; i < c->choosing->n_stops; i++) {
        const struct stop_text *s = &c->choosing->stops[i];
        size_t n = s->len - 1 < c->text.len ? s->len - 1 : c->text.len;
        for (; n > held; n--)
            if (memcmp(c->text.data + c->text.len - n, s->text, n) == 0)
                held = n;
    }
    return c->text.len - held;
}

const char *choice_reason(const struct choice *c)
{
    return c->end == CHOICE_OPEN ? NULL : c->end == CHOICE_LENGTH ? "length" : "stop";
}

void choice_write_stop_reason(const struct choice *c, struct buf *out)
{
    const struct choosing *o = c->choosing;
    if (c->end == CHOICE_STOP_TEXT)
        buf_json_string(out, o->stops[c->i_stop].text, o->stops[c->i_stop].len);
    else if (c->end == CHOICE_STOP_TOKEN && c->i_stop >= o->stop_ids_from)
        buf_json_i64(out, o->sampling.stop_ids[c->i_stop]);
    else
        buf_adds(out, "null");
}
