/* What tokenizer.json may say. prefilld does one pipeline: NFC, one of two splits, byte-level
 * BPE by merges. Each member of the file that could change it is a row here, with the values
 * under which it changes nothing; anything else is refused by its name, as is a member that is
 * not known. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "tokenizer_cursor.h"
#include "tokenizer_internal.h"

/* The values that a row accepts. */
enum {
    IS_ABSENT = 1,
    IS_NULL = 2,
    IS_FALSE = 4,
    IS_TRUE = 8,
    IS_EMPTY = 16, /* "" */
    IS_TEXT = 32,  /* row->text */
    IS_STRING = 64,
    IS_INTEGER = 128,
    IS_LIST = 256,
    IS_OBJECT = 512,
    IS_BOOL = IS_FALSE | IS_TRUE,
    IS_ANY = 1023
};

struct row {
    const char *name;
    unsigned accepted;
    const char *text;
};

static bool is_text(const json_t *value, const char *text)
{
    return json_string_length(value) == strlen(text) &&
           memcmp(json_string_value(value), text, strlen(text)) == 0;
}

static bool is_accepted(const struct row *row, const json_t *value)
{
    unsigned a = row->accepted;
    if (a == IS_ANY)
        return true;
    if (!value)
        return a & IS_ABSENT;
    switch (json_typeof(value)) {
    case JSON_NULL:
        return a & IS_NULL;
    case JSON_FALSE:
        return a & IS_FALSE;
    case JSON_TRUE:
        return a & IS_TRUE;
    case JSON_INTEGER:
        return a & IS_INTEGER;
    case JSON_ARRAY:
        return a & IS_LIST;
    case JSON_OBJECT:
        return a & IS_OBJECT;
    case JSON_STRING:
        if ((a & IS_STRING) || ((a & IS_EMPTY) && json_string_length(value) == 0))
            return true;
        return (a & IS_TEXT) && is_text(value, row->text);
    default:
        return false;
    }
}

bool tokenizer_add_quoted(struct errmsg *e, const char *s)
{
    if (strlen(s) > 60)
        return false;
    for (const char *p = s; *p; p++)
        if (*p < 0x20 || *p > 0x7e)
            return false;
    errmsg_add(e, "\"%s\"", s);
    return true;
}

static void add_found(struct errmsg *e, const json_t *value)
{
    static const char *const kinds[] = {
        [JSON_OBJECT] = "an object",   [JSON_ARRAY] = "a list",  [JSON_STRING] = "a string",
        [JSON_INTEGER] = "an integer", [JSON_REAL] = "a number", [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",        [JSON_NULL] = "null",
    };
    if (!json_is_string(value) || !tokenizer_add_quoted(e, json_string_value(value)))
        errmsg_add(e, "%s", value ? kinds[json_typeof(value)] : "absent");
}

static int refuse_member(struct errmsg *e, const char *path, const char *name)
{
    errmsg_set(e, 0, "tokenizer.json: %s has a member that prefilld does not know: ", path);
    if (!tokenizer_add_quoted(e, name))
        errmsg_add(e, "an unprintable or long name");
    return ERR_UNSUPPORTED;
}

static int refuse(struct errmsg *e, const char *path, const struct row *row,
                  const json_t *value)
{
    static const struct {
        unsigned bit;
        const char *name;
    } names[] = {
        {IS_NULL, "null"},          {IS_FALSE, "false"},      {IS_TRUE, "true"},
        {IS_EMPTY, "\"\""},         {IS_STRING, "a string"},  {IS_LIST, "a list"},
        {IS_INTEGER, "an integer"}, {IS_OBJECT, "an object"},
    };
    const char *separator = "";

    errmsg_set(e, 0, "tokenizer.json: %s%s%s is ", path, *path && *row->name ? "." : "",
               row->name);
    add_found(e, value);
    errmsg_add(e, "; prefilld takes ");
    if (row->accepted & IS_TEXT) {
        errmsg_add(e, "\"%s\"", row->text);
        separator = " or ";
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!(row->accepted & names[i].bit))
            continue;
        errmsg_add(e, "%s%s", separator, names[i].name);
        separator = " or ";
    }
    return ERR_UNSUPPORTED;
}

/* Checks every member of object against the rows. */
static int check_object(const json_t *object, const char *path, const struct row *rows,
                        size_t n, struct errmsg *e)
{
    const char *key;
    json_t *value;

    if (!json_is_object(object))
        return refuse(e, path, &(struct row){"", IS_OBJECT, NULL}, object);
    for (size_t i = 0; i < n; i++) {
        value = json_object_get(object, rows[i].name);
        if (!is_accepted(&rows[i], value))
            return refuse(e, path, &rows[i], value);
    }
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;
        while (i < n && strcmp(rows[i].name, key) != 0)
            i++;
        if (i == n && !json_is_null(value))
            return refuse_member(e, path, key);
    }
    return 0;
}

#define CHECK_OBJECT(object, path, rows, e)                                                    \
    check_object(object, path, rows, sizeof(rows) / sizeof((rows)[0]), e)

/* Parses a part that jansson can hold. *value is NULL when the part is not there. */
static int parse_part(struct json_slice part, const char *path, json_t **value,
                      struct errmsg *e)
{
    json_error_t error;
    *value = NULL;
    if (!part.at)
        return 0;
    *value = json_loadb(part.at, part.len,
                        JSON_DECODE_ANY | JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (!*value)
        return errmsg_set(e, ERR_INVALID, "tokenizer.json: %s: %s", path, error.text);
    return 0;
}

/* ---- where the parts are */

struct member {
    const char *name;
    enum file_part part;
};

static const struct member file_members[] = {
    {"version", PART_VERSION},       {"truncation", PART_TRUNCATION},
    {"padding", PART_PADDING},       {"added_tokens", PART_ADDED_TOKENS},
    {"normalizer", PART_NORMALIZER}, {"pre_tokenizer", PART_PRE_TOKENIZER},
    {"decoder", PART_DECODER},       {"post_processor", PART_POST_PROCESSOR},
    {"model", PART_MODEL},
};

static const struct member model_members[] = {
    {"type", PART_MODEL_TYPE},
    {"dropout", PART_MODEL_DROPOUT},
    {"unk_token", PART_MODEL_UNK_TOKEN},
    {"continuing_subword_prefix", PART_MODEL_PREFIX},
    {"end_of_word_suffix", PART_MODEL_SUFFIX},
    {"fuse_unk", PART_MODEL_FUSE_UNK},
    {"byte_fallback", PART_MODEL_BYTE_FALLBACK},
    {"ignore_merges", PART_MODEL_IGNORE_MERGES},
    {"vocab", PART_MODEL_VOCAB},
    {"merges", PART_MODEL_MERGES},
};

/* Notes where one member's value is. path is the object, for messages. */
static int note_member(struct cursor *j, const char *path, const struct member *members,
                       size_t n, struct buf *key, struct json_slice *parts, struct errmsg *e)
{
    key->len = 0;
    if (cursor_string(j, key) != 0 || !cursor_take(j, ':') || !buf_cstr(key))
        return errmsg_set(e, ERR_INVALID, "tokenizer.json: %s: a name is cut or ill-formed",
                          path);
    cursor_peek(j); /* past blanks */
    const char *from = j->at;
    if (cursor_skip(j) != 0) {
        errmsg_set(e, 0, "tokenizer.json: %s: cut or ill-formed is the value of ", path);
        tokenizer_add_quoted(e, key->data);
        return ERR_INVALID;
    }
    for (size_t i = 0; i < n; i++) {
        if (strcmp(members[i].name, key->data) != 0)
            continue;
        if (parts[members[i].part].at)
            return errmsg_set(e, ERR_INVALID, "tokenizer.json: %s has %s twice", path,
                              members[i].name);
        parts[members[i].part] = (struct json_slice){from, (size_t)(j->at - from)};
        return 0;
    }
    bool is_null = j->at - from == 4 && memcmp(from, "null", 4) == 0;
    return is_null ? 0 : refuse_member(e, path, key->data);
}

static int note_members(struct cursor *j, const char *path, const struct member *members,
                        size_t n, struct json_slice *parts, struct errmsg *e)
{
    struct buf key;
    size_t n_seen = 0;
    int code;

    if (!cursor_take(j, '{'))
        return errmsg_set(e, ERR_INVALID, "tokenizer.json: %s is no JSON object", path);
    buf_init(&key);
    while (cursor_more(j, '}', &n_seen, &code)) {
        code = note_member(j, path, members, n, &key, parts, e);
        if (code != 0)
            goto done;
    }
    if (code != 0)
        errmsg_set(e, code, "tokenizer.json: %s is cut or ill-formed", path);
done:
    buf_fini(&key);
    return code;
}

/* ---- what they must be */

struct part_row {
    enum file_part part;
    struct row row;
};

/* Truncation and padding are what the tokenizer was last asked for in training, where
 * transformers has saved it; a call that does not ask for them gets neither. */
static const struct part_row part_rows[] = {
    {PART_VERSION, {"version", IS_ABSENT | IS_TEXT, "1.0"}},
    {PART_TRUNCATION, {"truncation", IS_ANY, NULL}},
    {PART_PADDING, {"padding", IS_ANY, NULL}},
    {PART_MODEL_TYPE, {"model.type", IS_ABSENT | IS_TEXT, "BPE"}},
    {PART_MODEL_DROPOUT, {"model.dropout", IS_ABSENT | IS_NULL, NULL}},
    {PART_MODEL_UNK_TOKEN, {"model.unk_token", IS_ABSENT | IS_NULL, NULL}},
    {PART_MODEL_PREFIX,
     {"model.continuing_subword_prefix", IS_ABSENT | IS_NULL | IS_EMPTY, NULL}},
    {PART_MODEL_SUFFIX, {"model.end_of_word_suffix", IS_ABSENT | IS_NULL | IS_EMPTY, NULL}},
    {PART_MODEL_FUSE_UNK, {"model.fuse_unk", IS_ABSENT | IS_BOOL, NULL}},
    {PART_MODEL_BYTE_FALLBACK, {"model.byte_fallback", IS_ABSENT | IS_FALSE, NULL}},
    {PART_MODEL_IGNORE_MERGES, {"model.ignore_merges", IS_ABSENT | IS_FALSE, NULL}},
};

/* trim_offsets moves offsets only, and of them prefilld has none. */
static const struct row byte_level_rows[] = {
    {"type", IS_TEXT, "ByteLevel"},
    {"add_prefix_space", IS_FALSE, NULL},
    {"trim_offsets", IS_ABSENT | IS_BOOL, NULL},
    {"use_regex", IS_FALSE, NULL},
};

/* In a decoder or a post-processor none of the options changes ids or text. */
static const struct row byte_level_end_rows[] = {
    {"type", IS_TEXT, "ByteLevel"},
    {"add_prefix_space", IS_ABSENT | IS_BOOL, NULL},
    {"trim_offsets", IS_ABSENT | IS_BOOL, NULL},
    {"use_regex", IS_ABSENT | IS_BOOL, NULL},
};

/* What it adds: nothing, when the text is all of `single`. prefilld has no pairs. */
static const struct row template_rows[] = {
    {"type", IS_TEXT, "TemplateProcessing"},
    {"single", IS_LIST, NULL},
    {"pair", IS_ANY, NULL},
    {"special_tokens", IS_ANY, NULL},
};

static const struct row nfc_rows[] = {{"type", IS_TEXT, "NFC"}};

static const struct row sequence_rows[] = {
    {"type", IS_TEXT, "Sequence"},
    {"pretokenizers", IS_LIST, NULL},
};

static const struct row split_rows[] = {
    {"type", IS_TEXT, "Split"},
    {"pattern", IS_OBJECT, NULL},
    {"behavior", IS_TEXT, "Isolated"},
    {"invert", IS_FALSE, NULL},
};

static const struct row pattern_rows[] = {{"Regex", IS_STRING, NULL}};

#define SEQUENCE "pre_tokenizer.pretokenizers"

static int check_pre_tokenizer(const json_t *p, enum split_family *family, struct errmsg *e)
{
    int code = CHECK_OBJECT(p, "pre_tokenizer", sequence_rows, e);
    if (code != 0)
        return code;
    const json_t *list = json_object_get(p, "pretokenizers");
    if (json_array_size(list) != 2)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "tokenizer.json: " SEQUENCE " has %zu elements; prefilld takes "
                          "2, a Split and a ByteLevel",
                          json_array_size(list));
    const json_t *split = json_array_get(list, 0);
    const json_t *pattern = json_object_get(split, "pattern");
    code = CHECK_OBJECT(split, SEQUENCE "[0]", split_rows, e);
    if (code == 0)
        code = CHECK_OBJECT(pattern, SEQUENCE "[0].pattern", pattern_rows, e);
    if (code == 0)
        code = CHECK_OBJECT(json_array_get(list, 1), SEQUENCE "[1]", byte_level_rows, e);
    if (code != 0)
        return code;
    for (int f = 0; f < SPLIT_N_FAMILIES; f++) {
        if (is_text(json_object_get(pattern, "Regex"), split_patterns[f])) {
            *family = (enum split_family)f;
            return 0;
        }
    }
    return errmsg_set(e, ERR_UNSUPPORTED,
                      "tokenizer.json: " SEQUENCE "[0].pattern.Regex is neither that of Qwen2 "
                      "to Qwen3-Next nor that of Qwen3.5; prefilld takes these two");
}

static int check_post_processor(const json_t *p, struct errmsg *e)
{
    static const char name[] = "post_processor";
    if (!p || json_is_null(p))
        return 0;
    if (!is_text(json_object_get(p, "type"), "TemplateProcessing"))
        return CHECK_OBJECT(p, name, byte_level_end_rows, e);
    int code = CHECK_OBJECT(p, name, template_rows, e);
    if (code != 0)
        return code;
    const json_t *single = json_object_get(p, "single");
    const json_t *text = json_object_get(json_array_get(single, 0), "Sequence");
    if (json_array_size(single) == 1 && is_text(json_object_get(text, "id"), "A"))
        return 0;
    return errmsg_set(e, ERR_UNSUPPORTED,
                      "tokenizer.json: post_processor.single adds tokens to the text; prefilld "
                      "takes the text alone, [{\"Sequence\": {\"id\": \"A\"}}]");
}

static int check_parts(const struct json_slice *parts, enum split_family *family,
                       struct errmsg *e)
{
    json_t *value = NULL;
    int code;

    for (size_t i = 0; i < sizeof(part_rows) / sizeof(part_rows[0]); i++) {
        const struct row *row = &part_rows[i].row;
        code = parse_part(parts[part_rows[i].part], row->name, &value, e);
        if (code == 0 && !is_accepted(row, value))
            code = refuse(e, "", row, value);
        json_decref(value);
        if (code != 0)
            return code;
    }
    code = parse_part(parts[PART_NORMALIZER], "normalizer", &value, e);
    if (code == 0)
        code = CHECK_OBJECT(value, "normalizer", nfc_rows, e);
    json_decref(value);
    if (code != 0)
        return code;
    code = parse_part(parts[PART_PRE_TOKENIZER], "pre_tokenizer", &value, e);
    if (code == 0)
        code = check_pre_tokenizer(value, family, e);
    json_decref(value);
    if (code != 0)
        return code;
    code = parse_part(parts[PART_DECODER], "decoder", &value, e);
    if (code == 0)
        code = CHECK_OBJECT(value, "decoder", byte_level_end_rows, e);
    json_decref(value);
    if (code != 0)
        return code;
    code = parse_part(parts[PART_POST_PROCESSOR], "post_processor", &value, e);
    if (code == 0)
        code = check_post_processor(value, e);
    json_decref(value);
    return code;
}

int tokenizer_check_file(const char *text, size_t len, struct json_slice parts[N_FILE_PARTS],
                         enum split_family *family, struct errmsg *e)
{
    struct cursor j = {text, text + len};

    memset(parts, 0, N_FILE_PARTS * sizeof(*parts));
    int code = note_members(&j, "the file", file_members,
                            sizeof(file_members) / sizeof(file_members[0]), parts, e);
    if (code != 0)
        return code;
    if (cursor_peek(&j) != '\0' || j.at != j.end)
        return errmsg_set(e, ERR_INVALID, "tokenizer.json: something follows the object");
    if (!parts[PART_MODEL].at)
        return errmsg_set(e, ERR_INVALID, "tokenizer.json: model is absent");
    j = (struct cursor){parts[PART_MODEL].at, parts[PART_MODEL].at + parts[PART_MODEL].len};
    code = note_members(&j, "model", model_members,
                        sizeof(model_members) / sizeof(model_members[0]), parts, e);
    return code != 0 ? code : check_parts(parts, family, e);
}

int tokenizer_check_added(struct json_slice list,
                          int (*add)(void *arg, size_t index, const char *content, size_t len,
                                     int32_t id, bool special, bool normalized),
                          void *arg, struct errmsg *e)
{
    /* The reference refuses a token without single_word, lstrip or rstrip; false is all that
     * their absence could mean. */
    static const struct row rows[] = {
        {"id", IS_INTEGER, NULL},
        {"content", IS_STRING, NULL},
        {"single_word", IS_ABSENT | IS_FALSE, NULL},
        {"lstrip", IS_ABSENT | IS_FALSE, NULL},
        {"rstrip", IS_ABSENT | IS_FALSE, NULL},
        {"normalized", IS_BOOL, NULL},
        {"special", IS_BOOL, NULL},
    };
    json_t *tokens;
    int code = parse_part(list, "added_tokens", &tokens, e);

    if (code != 0 || !tokens)
        return code;
    if (!json_is_array(tokens))
        code = refuse(e, "", &(struct row){"added_tokens", IS_LIST, NULL}, tokens);
    for (size_t i = 0; code == 0 && i < json_array_size(tokens); i++) {
        const json_t *token = json_array_get(tokens, i);
        char path[48];
        snprintf(path, sizeof(path), "added_tokens[%zu]", i);
        code = CHECK_OBJECT(token, path, rows, e);
        if (code != 0)
            break;
        json_int_t id = json_integer_value(json_object_get(token, "id"));
        const json_t *content = json_object_get(token, "content");
        if (id < 0 || id >= TOKENIZER_MAX_IDS)
            code = errmsg_set(e, ERR_INVALID, "tokenizer.json: %s.id is not in 0..%d", path,
                              TOKENIZER_MAX_IDS - 1);
        else if (json_string_length(content) == 0)
            code = errmsg_set(e, ERR_INVALID, "tokenizer.json: %s.content is empty", path);
        else
            code = add(arg, i, json_string_value(content), json_string_length(content),
                       (int32_t)id, json_is_true(json_object_get(token, "special")),
                       json_is_true(json_object_get(token, "normalized")));
    }
    json_decref(tokens);
    return code;
}
