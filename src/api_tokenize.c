/* Text to ids and back, in vLLM's shapes. */
#include <stdlib.h>
#include <string.h>

#include "api_priv.h"

static const char no_tokenizer[] = "the model has no tokenizer.json";

static void reply_tokens(struct api *a, struct exchange *x, const int32_t *ids, int32_t n_ids,
                         bool with_strings)
{
    struct buf b;
    buf_init(&b);
    buf_printf(&b, "{\"count\": %d, \"max_model_len\": %d, \"tokens\": [", n_ids,
               a->max_prompt_tokens);
    for (int32_t i = 0; i < n_ids; i++) {
        if (i)
            buf_adds(&b, ", ");
        buf_json_i64(&b, ids[i]);
    }
    buf_adds(&b, "]");
    if (with_strings) {
        buf_adds(&b, ", \"token_strs\": [");
        for (int32_t i = 0; i < n_ids; i++) {
            if (i)
                buf_adds(&b, ", ");
            tokenizer_json_spelling(a->tokenizer, ids[i], &b);
        }
        buf_adds(&b, "]");
    }
    buf_adds(&b, "}");
    api_reply(x, 200, &b);
}

void api_tokenize(struct api *a, struct exchange *x)
{
    static const char *const fields[] = {"prompt", "model", "add_special_tokens",
                                         "return_token_strs", NULL};
    const struct json_rules rules = {.fields = fields};
    struct json_body body;
    struct json_error e;
    const char *text = NULL;
    size_t len = 0;
    bool with_strings = false, adds_special = false;
    int rc = api_read_body(x, &rules, &body, &e);
    if (rc != 0) {
        api_bad_body(a, x, rc, &e);
        return;
    }
    rc = api_check_model(a, body.root, &e);
    if (rc == 0)
        rc = json_get_string(body.root, "prompt", &text, &len, &e);
    if (rc == 0 && !text)
        rc = json_fail(&e, ERR_INVALID, "prompt", "prompt is missing; a string is accepted");
    if (rc == 0)
        rc = json_get_bool(body.root, "return_token_strs", &with_strings, &e);
    if (rc == 0)
        rc = json_get_bool(body.root, "add_special_tokens", &adds_special, &e);
    if (rc == 0 && !a->tokenizer)
        rc = json_fail(&e, ERR_INVALID, "prompt", "%s", no_tokenizer);
    int32_t *ids = NULL, n_ids = 0;
    struct errmsg why;
    if (rc == 0) {
        rc = tokenizer_encode(a->tokenizer, text, len, 0, &ids, &n_ids, &why);
        if (rc != 0)
            json_fail(&e, rc, "prompt", "prompt: %s", why.text);
    }
    if (rc == 0)
        reply_tokens(a, x, ids, n_ids, with_strings);
    else
        api_bad_body(a, x, rc, &e);
    free(ids);
    json_fini(&body);
}

void api_detokenize(struct api *a, struct exchange *x)
{
    static const char *const fields[] = {"tokens", "model", NULL};
    const struct json_rules rules = {
        .fields = fields, .ids_field = "tokens", .vocab = a->vocab, .max_ids = INT32_MAX};
    struct json_body body;
    struct json_error e;
    int rc = api_read_body(x, &rules, &body, &e);
    if (rc != 0) {
        api_bad_body(a, x, rc, &e);
        return;
    }
    rc = api_check_model(a, body.root, &e);
    if (rc == 0 && !body.has_ids)
        rc = json_fail(&e, ERR_INVALID, "tokens", "tokens is %s; a list of ids is accepted",
                       json_object_get(body.root, "tokens")
                           ? json_kind(json_object_get(body.root, "tokens"))
                           : "missing");
    if (rc == 0 && !a->tokenizer)
        rc = json_fail(&e, ERR_INVALID, "tokens", "%s", no_tokenizer);
    if (rc == 0) {
        struct buf text, b;
        buf_init(&text);
        buf_init(&b);
        tokenizer_decode(a->tokenizer, body.ids, (size_t)body.n_ids, false, &text);
        buf_adds(&b, "{\"prompt\": ");
        buf_json_string(&b, text.data ? text.data : "", text.len);
        buf_adds(&b, "}");
        b.failed |= text.failed;
        buf_fini(&text);
        api_reply(x, 200, &b);
    } else {
        api_bad_body(a, x, rc, &e);
    }
    json_fini(&body);
}

static void add_string(struct buf *b, const char *name, const char *value)
{
    if (!value)
        return;
    buf_printf(b, "%s\"%s\": ", b->len > 1 ? ", " : "", name);
    buf_json_string(b, value, strlen(value));
}

void api_tokenizer_info(struct api *a, struct exchange *x)
{
    if (!a->tokenizer) {
        api_error(a, x, 404, NULL, no_tokenizer);
        return;
    }
    const struct tokenizer_info *info = tokenizer_get_info(a->tokenizer);
    struct buf b;
    buf_init(&b);
    buf_adds(&b, "{");
    add_string(&b, "eos_token", info->eos_token);
    add_string(&b, "bos_token", info->bos_token);
    add_string(&b, "pad_token", info->pad_token);
    add_string(&b, "chat_template", info->chat_template);
    buf_adds(&b, "}");
    api_reply(x, 200, &b);
}
