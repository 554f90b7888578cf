/* What GET /tokenizer_info answers and where a text ends, from the files beside tokenizer.json;
 * and that none of them wants other ids. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_internal.h"

#define MAX_FILE_BYTES ((size_t)16 << 20)

/* Reads dir/name. Not there: 0, and out stays empty. */
static int read_beside(const char *dir, const char *name, struct buf *out, struct errmsg *e)
{
    struct buf path;
    buf_init(&path);
    buf_adds(&path, dir);
    buf_adds(&path, name);
    int code = ERR_NOMEM;
    if (buf_cstr(&path))
        code = file_read(path.data, MAX_FILE_BYTES, out, e);
    buf_fini(&path);
    return code == ERR_NOT_FOUND ? errmsg_set(e, 0, "%s", "") : code;
}

/* Reads the object in dir/name; flags: jansson's. Not there: 0, and *object is NULL. */
static int read_object(const char *dir, const char *name, size_t flags, json_t **object,
                       struct errmsg *e)
{
    json_error_t error;
    struct buf text;

    *object = NULL;
    buf_init(&text);
    int code = read_beside(dir, name, &text, e);
    if (code == 0 && text.data) {
        *object = json_loadb(text.data, text.len, flags, &error);
        if (!*object)
            code = errmsg_set(e, ERR_INVALID, "%s: line %d: %s", name, error.line, error.text);
        else if (!json_is_object(*object))
            code = errmsg_set(e, ERR_INVALID, "%s is no JSON object", name);
    }
    buf_fini(&text);
    return code;
}

static int copy_text(char **out, const char *text, size_t len)
{
    *out = malloc(len + 1);
    if (!*out)
        return ERR_NOMEM;
    memcpy(*out, text, len);
    (*out)[len] = '\0';
    return 0;
}

static int copy_string(char **out, const json_t *value)
{
    return copy_text(out, json_string_value(value), json_string_length(value));
}

/* A token in tokenizer_config.json is a string or an object with its content. */
static int take_token(char **out, const json_t *value)
{
    if (json_is_object(value))
        value = json_object_get(value, "content");
    return json_is_string(value) ? copy_string(out, value) : 0;
}

/* A token by its id, or by the first of a list of ids, unless it is known already. */
static int take_id(const struct tokenizer *t, char **out, const json_t *value)
{
    size_t len;
    if (json_is_array(value))
        value = json_array_get(value, 0);
    if (*out || !json_is_integer(value))
        return 0;
    json_int_t id = json_integer_value(value);
    if (id < 0 || id >= t->tokens.n || !(t->tokens.flags[id] & TOKEN_UTF8))
        return 0;
    const char *bytes = tokenizer_token_bytes(t, (int32_t)id, &len);
    return memchr(bytes, '\0', len) ? 0 : copy_text(out, bytes, len);
}

static int add_end_id(struct tokenizer *t, int64_t id, struct errmsg *e)
{
    struct tokenizer_info *info = &t->info;
    for (int32_t i = 0; i < info->n_end_ids; i++)
        if (info->end_ids[i] == id)
            return 0;
    if (id < 0 || id >= t->tokens.n)
        return 0;
    if (info->n_end_ids == TOKENIZER_MAX_END_IDS)
        return errmsg_set(
            e, ERR_UNSUPPORTED,
            "eos_token_id of generation_config.json and config.json and eos_token "
            "of tokenizer_config.json are more than %d tokens",
            TOKENIZER_MAX_END_IDS);
    info->end_ids[info->n_end_ids++] = (int32_t)id;
    return 0;
}

/* eos_token_id of object: an id or a list of ids. */
static int take_end_ids(struct tokenizer *t, const json_t *object, struct errmsg *e)
{
    const json_t *value = json_object_get(object, "eos_token_id"), *each;
    size_t i;
    int code = 0;
    if (json_is_integer(value))
        code = add_end_id(t, json_integer_value(value), e);
    json_array_foreach(value, i, each)
    {
        if (code == 0 && json_is_integer(each))
            code = add_end_id(t, json_integer_value(each), e);
    }
    return code;
}

/* The id of the end token that the tokenizer's own files name. */
static int take_end_token(struct tokenizer *t, struct errmsg *e)
{
    const char *text = t->info.eos_token;
    int32_t *ids = NULL, n_ids = 0;
    if (!text)
        return 0;
    int code = tokenizer_encode(t, text, strlen(text), 0, &ids, &n_ids, NULL);
    code = code == ERR_NOMEM ? code : 0;
    if (code == 0 && n_ids == 1)
        code = add_end_id(t, ids[0], e);
    free(ids);
    return code;
}

/* ---- what tokenizer_config.json may say of ids */

static bool has_token(const struct added_set *set, const char *text, size_t len)
{
    size_t at;
    ptrdiff_t found = added_set_find(set, text, len, 0, &at);
    return found >= 0 && at == 0 && set->tokens[found].len == len;
}

/* A token that tokenizer_config.json has in a list must be an added token of tokenizer.json
 * with the same flags: other readers add it to them. */
static int check_token(const struct tokenizer *t, const char *list, const json_t *token,
                       struct errmsg *e)
{
    static const char *const flags[] = {"lstrip", "rstrip", "single_word"};
    bool is_object = json_is_object(token);
    bool normalized = json_is_true(json_object_get(token, "normalized"));
    const json_t *content = is_object ? json_object_get(token, "content") : token;
    const char *text = json_string_value(content), *flag = normalized ? "normalized" : NULL;
    size_t len = json_string_length(content);
    bool is_known =
        text && (((!is_object || !normalized) && has_token(&t->added, text, len)) ||
                 ((!is_object || normalized) && has_token(&t->added_nfc, text, len)));
    for (int i = 0; i < 3; i++)
        if (json_is_true(json_object_get(token, flags[i]))) {
            flag = flags[i];
            is_known = false;
        }
    if (is_known)
        return 0;
    errmsg_set(e, 0, "tokenizer_config.json: %s has ", list);
    if (!text)
        errmsg_add(e, "an entry without content");
    else if (!tokenizer_add_quoted(e, text))
        errmsg_add(e, "an unprintable or long token");
    if (flag)
        errmsg_add(e, " with %s true", flag);
    errmsg_add(e, ", which added_tokens of tokenizer.json do not have; prefilld takes those");
    return ERR_UNSUPPORTED;
}

/* list: tokens in a list, or by id or name. */
static int check_tokens(const struct tokenizer *t, const char *name, json_t *list,
                        struct errmsg *e)
{
    const char *key;
    json_t *token;
    size_t i;
    int code = 0;
    json_array_foreach(list, i, token)
    {
        if (code == 0)
            code = check_token(t, name, token, e);
    }
    json_object_foreach(list, key, token)
    {
        if (code == 0)
            code = check_token(t, name, token, e);
    }
    return code;
}

/* tokenizer.json has the ids of a text. What would change them from here is refused by name. */
static int check_config(const struct tokenizer *t, json_t *config, struct errmsg *e)
{
    static const char *const lists[] = {"added_tokens_decoder", "additional_special_tokens",
                                        "extra_special_tokens"};
    static const char *const switches[] = {"add_bos_token", "add_eos_token", "add_prefix_space",
                                           "split_special_tokens"};
    for (int k = 0; k < 3; k++) {
        int code = check_tokens(t, lists[k], json_object_get(config, lists[k]), e);
        if (code != 0)
            return code;
    }
    for (int k = 0; k < 4; k++) {
        const json_t *v = json_object_get(config, switches[k]);
        if (v && !json_is_null(v) && !json_is_false(v))
            return errmsg_set(e, ERR_UNSUPPORTED,
                              "tokenizer_config.json: %s is not false; prefilld takes false: a "
                              "text has the ids of tokenizer.json and no others",
                              switches[k]);
    }
    return 0;
}

/* One template, or a list of named ones, of which "default" is the one. */
static int take_template(char **out, const json_t *value)
{
    size_t i;
    const json_t *each;
    json_array_foreach(value, i, each)
    {
        const char *name = json_string_value(json_object_get(each, "name"));
        const json_t *text = json_object_get(each, "template");
        if (name && strcmp(name, "default") == 0 && json_is_string(text))
            return copy_string(out, text);
    }
    return json_is_string(value) ? copy_string(out, value) : 0;
}

static const char *const token_names[] = {"eos_token", "bos_token", "pad_token"};
static const char *const id_names[] = {"eos_token_id", "bos_token_id", "pad_token_id"};
#define N_TOKENS 3

/* The ids in object, or in its text_config. settled[k]: the tokenizer's own file has said. */
static int take_ids(const struct tokenizer *t, char **tokens[N_TOKENS], const bool *settled,
                    const json_t *object)
{
    int code = 0;
    for (int k = 0; k < N_TOKENS && code == 0; k++) {
        if (settled[k])
            continue;
        code = take_id(t, tokens[k], json_object_get(object, id_names[k]));
        if (code == 0)
            code =
                take_id(t, tokens[k],
                        json_object_get(json_object_get(object, "text_config"), id_names[k]));
    }
    return code;
}

static int load_template(struct tokenizer_info *info, const char *dir, struct errmsg *e)
{
    struct buf text;
    int code;

    buf_init(&text);
    code = read_beside(dir, "chat_template.jinja", &text, e);
    if (code == 0 && text.data) {
        if (!utf8_is_valid(text.data, text.len, NULL) || memchr(text.data, '\0', text.len))
            code = errmsg_set(e, ERR_INVALID, "chat_template.jinja is not UTF-8 text");
        else
            code = copy_text(&info->chat_template, text.data, text.len);
    }
    buf_fini(&text);
    return code;
}

int tokenizer_info_load(struct tokenizer *t, const char *dir, struct errmsg *e)
{
    static const char *const id_files[] = {"generation_config.json", "config.json"};
    struct tokenizer_info *info = &t->info;
    char **tokens[N_TOKENS] = {&info->eos_token, &info->bos_token, &info->pad_token};
    bool settled[N_TOKENS] = {false};
    json_t *object;

    int code = load_template(info, dir, e);
    if (code != 0)
        return code;
    /* Where a tokenizer has no model_max_length, transformers writes 10^30. No integer of this
     * file is read. */
    code = read_object(dir, "tokenizer_config.json", JSON_DECODE_INT_AS_REAL, &object, e);
    if (code == 0)
        code = check_config(t, object, e);
    for (int k = 0; k < N_TOKENS && code == 0 && object; k++) {
        const json_t *value = json_object_get(object, token_names[k]);
        settled[k] =
            value != NULL; /* also null: the tokenizer has none, whatever the model says */
        code = take_token(tokens[k], value);
    }
    if (code == 0 && object && !info->chat_template)
        code = take_template(&info->chat_template, json_object_get(object, "chat_template"));
    json_decref(object);
    for (size_t i = 0; i < sizeof(id_files) / sizeof(id_files[0]) && code == 0; i++) {
        code = read_object(dir, id_files[i], 0, &object, e);
        if (code == 0)
            code = take_ids(t, tokens, settled, object);
        if (code == 0)
            code = take_end_ids(t, object, e);
        if (code == 0)
            code = take_end_ids(t, json_object_get(object, "text_config"), e);
        json_decref(object);
    }
    return code ? code : take_end_token(t, e);
}

void tokenizer_info_fini(struct tokenizer_info *info)
{
    free(info->eos_token);
    free(info->bos_token);
    free(info->pad_token);
    free(info->chat_template);
    memset(info, 0, sizeof(*info));
}

const struct tokenizer_info *tokenizer_get_info(const struct tokenizer *t)
{
    return &t->info;
}
