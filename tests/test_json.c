/* Request bodies: what is taken, what is refused, and by which name. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buf.h"
#include "json.h"
#include "rng.h"

static const char *const fields[] = {"prompt", "model", "top_logprobs", NULL};
static const struct json_rules rules = {fields, "prompt", 512, 8, false};

static int parse(const char *text, struct json_body *b, struct json_error *e)
{
    memset(e, 0, sizeof(*e));
    /* A copy of the exact size, so that a read past the end is found. */
    size_t len = strlen(text);
    char *copy = malloc(len ? len : 1);
    memcpy(copy, text, len);
    int rc = json_parse(copy, len, &rules, b, e);
    free(copy);
    return rc;
}

Test(json, takes_ids)
{
    static const struct {
        const char *text;
        int n;
        int32_t ids[8];
    } cases[] = {
        {"{\"prompt\":[1,2,511]}", 3, {1, 2, 511}},
        {" \n{ \"prompt\" : [ 0 ,\t1 ] , \"model\":\"x\" } ", 2, {0, 1}},
        {"{\"prompt\":[]}", 0, {0}},
        {"{\"prompt\":[ ]}", 0, {0}},
        {"{\"prompt\":[-0]}", 1, {0}},
        {"{\"\\u0070ro\\u006dpt\":[7]}", 1, {7}},
        {"{\"a\":{\"prompt\":[\"x\"]},\"prompt\":[7]}", 1, {7}},
        {"{\"a\":[\"prompt\",\"\\\"prompt\\\":[9]\"],\"prompt\":[7]}", 1, {7}},
        {"{\"prompt\":[1,2,3,4,5,6,7,8]}", 8, {1, 2, 3, 4, 5, 6, 7, 8}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct json_body b;
        struct json_error e;
        cr_assert_eq(parse(cases[i].text, &b, &e), 0, "%s: %s", cases[i].text, e.message.text);
        cr_assert(b.has_ids && b.n_ids == cases[i].n, "%s", cases[i].text);
        for (int j = 0; j < b.n_ids; j++)
            cr_assert_eq(b.ids[j], cases[i].ids[j], "%s", cases[i].text);
        json_fini(&b);
    }
}

/* A list of lists, where the rules take them: ids in a row, and where each list ends. */
Test(json, takes_lists_of_ids)
{
    static const struct json_rules lists = {fields, "prompt", 512, 8, true};
    static const struct {
        const char *text;
        int n_lists, n_ids; /* n_lists -1: refused, with says in the message */
        int32_t ends[4];
        const char *says;
    } cases[] = {
        {"{\"prompt\":[[1,2],[3]]}", 2, 3, {2, 3}, NULL},
        {"{ \"prompt\" : [ [ 1 ] , [2 , 3 ] ,[4]] , \"model\":\"x\" }", 3, 4, {1, 3, 4}, NULL},
        {"{\"prompt\":[[1,2,3,4],[5,6,7,8]]}", 2, 8, {4, 8}, NULL},
        {"{\"prompt\":[1,2]}", 0, 2, {0}, NULL},
        {"{\"prompt\":[[1,2,3,4],[5,6,7,8],[9]]}", -1, 0, {0}, "9 tokens; at most 8"},
        {"{\"prompt\":[[]]}", -1, 0, {0}, "prompt[0] is empty"},
        {"{\"prompt\":[[1],[ ]]}", -1, 0, {0}, "prompt[1] is empty"},
        {"{\"prompt\":[[1],2]}", -1, 0, {0}, "prompt[1] is an integer"},
        {"{\"prompt\":[[1],\"x\"]}", -1, 0, {0}, "prompt[1] is a string"},
        {"{\"prompt\":[[1],[2,x]]}", -1, 0, {0}, "prompt[1][1] is not JSON"},
        {"{\"prompt\":[[1],[2]", -1, 0, {0}, "ends behind prompt[1]"},
        {"{\"prompt\":[[1],[2", -1, 0, {0}, "ends behind prompt[1][0]"},
        {"{\"prompt\":[[1],", -1, 0, {0}, "prompt[1] is not JSON"},
        {"{\"prompt\":[[1],]}", -1, 0, {0}, "prompt[1] is not JSON"},
        {"{\"prompt\":[[1]],\"prompt\":[[1]]}", -1, 0, {0}, "given twice"},
        {"{\"prompt\":[\"x\"],\"prompt\":[[1]]}", -1, 0, {0}, "given twice"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct json_body b;
        struct json_error e;
        size_t len = strlen(cases[i].text);
        char *copy = malloc(len);
        memcpy(copy, cases[i].text, len);
        int rc = json_parse(copy, len, &lists, &b, &e);
        free(copy);
        if (cases[i].n_lists < 0) {
            cr_assert_neq(rc, 0, "%s", cases[i].text);
            cr_assert(strstr(e.message.text, cases[i].says), "%s: %s", cases[i].text,
                      e.message.text);
            continue;
        }
        cr_assert_eq(rc, 0, "%s: %s", cases[i].text, e.message.text);
        cr_assert(b.has_ids && b.n_ids == cases[i].n_ids && b.n_lists == cases[i].n_lists, "%s",
                  cases[i].text);
        for (int j = 0; j < b.n_lists; j++)
            cr_assert_eq(b.list_ends[j], cases[i].ends[j], "%s", cases[i].text);
        json_fini(&b);
    }
    /* Strings are left alone. */
    struct json_body b;
    struct json_error e;
    static const char strings[] = "{\"prompt\":[ \"a\",\"b\"]}";
    cr_assert_eq(json_parse(strings, strlen(strings), &lists, &b, &e), 0);
    cr_assert(!b.has_ids && json_array_size(json_object_get(b.root, "prompt")) == 2);
    json_fini(&b);
}

/* Each length of number, at each distance from the end of the text. */
Test(json, takes_ids_of_every_length)
{
    static const struct json_rules wide = {fields, "prompt", INT32_MAX, 100, false};
    struct rng r = {3};
    for (int i = 0; i < 20000; i++) {
        char text[300], *p = text + sprintf(text, "{\"prompt\":[");
        int32_t want[16];
        int n = 1 + rng_int(&r, 16);
        for (int j = 0; j < n; j++) {
            want[j] = (int32_t)(rng_u64(&r) % INT32_MAX) >> rng_int(&r, 31);
            p += sprintf(p, "%s%d", j ? rng_int(&r, 2) ? "," : ", " : "", want[j]);
        }
        p += sprintf(p, "]}");
        struct json_body b;
        struct json_error e;
        cr_assert_eq(json_parse(text, (size_t)(p - text), &wide, &b, &e), 0, "%s: %s", text,
                     e.message.text);
        cr_assert_eq(b.n_ids, n);
        cr_assert_eq(memcmp(b.ids, want, (size_t)n * sizeof(want[0])), 0, "%s", text);
        json_fini(&b);
    }
}

Test(json, leaves_other_fields)
{
    struct json_body b;
    struct json_error e;
    cr_assert_eq(
        parse("{\"top_logprobs\":3,\"prompt\":[1],\"model\":\"m\",\"b\":true}", &b, &e), 0);
    int64_t n = -1;
    bool flag = false;
    const char *s = NULL;
    size_t len = 0;
    cr_assert_eq(json_get_int(b.root, "top_logprobs", 0, 20, &n, &e), 0);
    cr_assert_eq(json_get_bool(b.root, "b", &flag, &e), 0);
    cr_assert_eq(json_get_string(b.root, "model", &s, &len, &e), 0);
    cr_assert(n == 3 && flag && len == 1 && s[0] == 'm');
    json_fini(&b);
}

/* Text, not a list: jansson reads it; NUL is text. */
Test(json, takes_text)
{
    struct json_body b;
    struct json_error e;
    cr_assert_eq(parse("{\"prompt\":\"a\\u0000b\\ud83d\\ude00\"}", &b, &e), 0, "%s",
                 e.message.text);
    cr_assert(!b.has_ids);
    const json_t *v = json_object_get(b.root, "prompt");
    cr_assert_eq(json_string_length(v), 7);
    cr_assert_eq(memcmp(json_string_value(v), "a\0b\xf0\x9f\x98\x80", 7), 0);
    json_fini(&b);
}

static const struct {
    const char *text, *field, *says;
} bad[] = {
    {"", "", "empty"},
    {"[1]", "", "a list"},
    {"\"prompt\"", "", "a string"},
    {"{\"prompt\":[1]}{\"prompt\":[1]}", "", "follows the object"},
    {"{\"prompt\":[1]", "prompt", "ends too early"},
    {"{\"prompt\":[1", "prompt", "ends behind prompt[0]"},
    {"{\"prompt\":[", "prompt", "prompt[0] is not JSON"},
    {"{\"prompt\":[1,]}", "prompt", "prompt[1] is not JSON"},
    {"{\"prompt\":[,1]}", "prompt", "prompt[0] is not JSON"},
    {"{\"prompt\":[1 2]}", "prompt", "behind prompt[0]"},
    {"{\"prompt\":[01]}", "prompt", "leading zero"},
    {"{\"prompt\":[1,\"secret\"]}", "prompt",
     "prompt[1] is a string; ids are integers in [0, 512)"},
    {"{\"prompt\":[[1]]}", "prompt", "prompt[0] is a list"},
    {"{\"prompt\":[{}]}", "prompt", "prompt[0] is an object"},
    {"{\"prompt\":[true]}", "prompt", "prompt[0] is a boolean"},
    {"{\"prompt\":[null]}", "prompt", "prompt[0] is null"},
    {"{\"prompt\":[1.0]}", "prompt", "fraction"},
    {"{\"prompt\":[1e2]}", "prompt", "exponent"},
    {"{\"prompt\":[5,-1]}", "prompt", "prompt[1] is negative"},
    {"{\"prompt\":[512]}", "prompt", "prompt[0] is out of range"},
    {"{\"prompt\":[2147483648]}", "prompt", "out of range"},
    {"{\"prompt\":[4294967296]}", "prompt", "out of range"},
    {"{\"prompt\":[18446744073709551617]}", "prompt", "out of range"},
    {"{\"prompt\":[1],\"prompt\":[2]}", "prompt", "twice"},
    {"{\"prompt\":[1],\"\\u0070rompt\":[2]}", "prompt", "twice"},
    {"{\"prompt\":[1],\"prompt\":\"secret\"}", "prompt", "twice"},
    {"{\"model\":\"a\",\"mode\\u006c\":\"b\"}", "model", "twice"},
    {"{\"prompt\":\"\\ud800secret\"}", "prompt", "syntax"},
    {"{\"prompt\":\"\\udc00\"}", "prompt", "syntax"},
    {"{\"prompt\":\"\\ud800\\ud800\"}", "prompt", "syntax"},
    {"{\"prompt\":\"\xed\xa0\x80\"}", "prompt", "UTF-8"},
    {"{\"prompt\":\"\xff\"}", "prompt", "UTF-8"},
    {"{\"prompt\":\"\xc0\x80\"}", "prompt", "UTF-8"},
    {"{\"prompt\":\"a\nb\"}", "prompt", "syntax"},
    {"{\"prompt\":\"a\\xb\"}", "prompt", "syntax"},
    {"{\"top_logprobs\":1e400}", "top_logprobs", "too large"},
    {"{\"prompt\":[1],\"top_logprobs\":99999999999999999999}", "top_logprobs", "too large"},
    {"{\"prompt\":[1],\"top_logprobs\":NaN}", "top_logprobs", "syntax"},
    {"{\"prompt\":[1],\"top_logprobs\":+1}", "top_logprobs", "syntax"},
    {"{\"top_logprobs\":\"x\" \"prompt\":[1]}", "prompt", "syntax"},
    {"{\"secret\":1e400}", "", "too large"},
    {"{\"secret\":1,\"secret\":1}", "", "twice"},
    {"{\"a\\u0000b\":1}", "", "NUL"},
    {"{\"prompt\":[1]} x", "", "follows"},
    {"{\"prompt\":[1]}{}", "", "follows"},
    {"\xef\xbb\xbf{}", "", ""},
    {"{\"prompt\":[1,2,3,4,5,6,7,8,9]}", "prompt", "9 tokens; at most 8"},
    {"{'prompt':[1]}", "", "syntax"},
    {"{\"prompt\":[1]]}", "prompt", "syntax"},
    {"{\"prompt\":}", "prompt", "syntax"},
    {"{\"prompt\"", "", "early"},
    {"{\"prompt\\", "", ""},
    {"{\"prompt\":\"abc\\", "prompt", ""},
    {"{\"\\u00", "", ""},
};

Test(json, refuses_and_names)
{
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct json_body b;
        struct json_error e;
        int rc = parse(bad[i].text, &b, &e);
        cr_expect(rc == ERR_INVALID || rc == ERR_TOO_LARGE, "%s: %d", bad[i].text, rc);
        cr_expect_str_eq(e.field, bad[i].field, "%s: field '%s': %s", bad[i].text, e.field,
                         e.message.text);
        cr_expect(strstr(e.message.text, bad[i].says), "%s: %s", bad[i].text, e.message.text);
        cr_expect(!strstr(e.message.text, "secret"), "%s: %s", bad[i].text, e.message.text);
    }
}

Test(json, refuses_depth)
{
    enum { DEPTH = 40000 };
    char *text = malloc(2 * DEPTH + 64), *p = text;
    p += sprintf(p, "{\"model\":");
    memset(p, '[', DEPTH);
    memset(p + DEPTH, ']', DEPTH);
    strcpy(p + 2 * DEPTH, "}");
    struct json_body b;
    struct json_error e;
    cr_assert_eq(parse(text, &b, &e), ERR_INVALID);
    cr_assert_str_eq(e.field, "model");
    cr_assert(strstr(e.message.text, "2048"), "%s", e.message.text);
    free(text);
}

Test(json, names_the_place_behind_the_list)
{
    struct json_body b;
    struct json_error e;
    const char *text = "{\"prompt\":[1,2,3,4,5,6],\"x\":tru}";
    cr_assert_eq(parse(text, &b, &e), ERR_INVALID);
    int at = -1;
    const char *byte = strstr(e.message.text, "byte ");
    cr_assert(byte && sscanf(byte, "byte %d", &at) == 1);
    cr_assert(at >= 28 && at <= 32, "%s", e.message.text);
}

/* jansson takes up to 230 bytes for a value: 64 MiB of them took 5 GB. */
Test(json, bounds_the_values)
{
    static const char *const forms[] = {"[", "{},", "[],", "1,"};
    for (int i = 0; i < 4; i++)
        for (int more = 0; more < 2; more++) {
            struct buf text;
            struct json_body b;
            struct json_error e;
            int n = i == 0 ? 1000 : JSON_MAX_VALUES / (i == 3 ? 1 : 2) - 10;
            buf_init(&text);
            buf_adds(&text, "{\"prompt\":[1,2,3],\"x\":[");
            for (int k = 0; i > 0 && k < n + 20 * more; k++)
                buf_adds(&text, forms[i]);
            buf_adds(&text, "1]}");
            int rc = parse(buf_cstr(&text), &b, &e);
            cr_expect(more && i > 0 ? rc == ERR_INVALID && strstr(e.message.text, "values")
                                    : rc == 0,
                      "%s: %s", forms[i], rc ? e.message.text : "taken");
            if (rc == 0)
                json_fini(&b);
            buf_fini(&text);
        }
}

Test(json, types_of_fields)
{
    struct json_body b;
    struct json_error e;
    cr_assert_eq(
        parse("{\"a\":1.5,\"b\":true,\"c\":\"x\",\"d\":null,\"e\":21,\"f\":[1]}", &b, &e), 0);
    int64_t n = 5;
    bool flag = true;
    const char *s = "old";
    size_t len = 3;
    cr_expect_eq(json_get_int(b.root, "a", 0, 20, &n, &e), ERR_INVALID);
    cr_expect(strstr(e.message.text, "a is a number with a fraction") != NULL);
    cr_expect_eq(json_get_int(b.root, "b", 0, 20, &n, &e), ERR_INVALID);
    cr_expect_eq(json_get_int(b.root, "c", 0, 20, &n, &e), ERR_INVALID);
    cr_expect_eq(json_get_int(b.root, "e", 0, 20, &n, &e), ERR_INVALID);
    cr_expect(strstr(e.message.text, "from 0 to 20") != NULL);
    cr_expect_eq(json_get_bool(b.root, "c", &flag, &e), ERR_INVALID);
    cr_expect_eq(json_get_string(b.root, "f", &s, &len, &e), ERR_INVALID);
    cr_expect_str_eq(e.field, "f");
    cr_expect_eq(json_get_int(b.root, "d", 0, 20, &n, &e), 0, "null is absent");
    cr_expect_eq(json_get_int(b.root, "absent", 0, 20, &n, &e), 0);
    cr_expect_eq(json_get_bool(b.root, "d", &flag, &e), 0);
    cr_expect_eq(json_get_string(b.root, "d", &s, &len, &e), 0);
    cr_expect(n == 5 && flag && strcmp(s, "old") == 0, "absent leaves the default");
    json_fini(&b);
}

/* Any damage: no crash, no read past the end; and what jansson alone takes or refuses, so does
 * json_parse (ids apart). */
Test(json, damaged_texts)
{
    static const char *const seeds[] = {
        "{\"prompt\":[1,2,3],\"model\":\"a\\u0041\",\"top_logprobs\":5,\"x\":{\"y\":[1,{}]}}",
        "{\"model\":\"\\\\\\\"\",\"prompt\":[ 10 , 0 ]}",
        "{\"pr\\u006fmpt\":[5],\"e\":[],\"f\":-1.5e3}"};
    static const char bytes[] = "{}[]\",:\\u0123456789eE+-. tfn\n\x80\xff";
    const uint64_t seed = 7;
    struct rng r = {seed};
    int n_taken = 0;
    for (int i = 0; i < 200000; i++) {
        char text[256];
        const char *from = seeds[rng_int(&r, 3)];
        size_t len = strlen(from);
        memcpy(text, from, len + 1);
        for (int n = 1 + rng_int(&r, 3); n > 0; n--) {
            size_t at = (size_t)rng_int(&r, (int32_t)len);
            int what = rng_int(&r, 3);
            if (what == 0) {
                text[at] = bytes[rng_int(&r, sizeof(bytes) - 1)];
            } else if (what == 1 && len > 2) {
                memmove(text + at, text + at + 1, len - at);
                len--;
            } else if (len < sizeof(text) - 2) {
                memmove(text + at + 1, text + at, len - at + 1);
                text[at] = bytes[rng_int(&r, sizeof(bytes) - 1)];
                len++;
            }
        }
        struct json_body b;
        struct json_error e;
        json_error_t je;
        json_t *alone = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &je);
        int rc = parse(text, &b, &e);
        cr_assert(rc == 0 ? alone != NULL : 1, "seed %llu: taken, but not JSON: %s",
                  (unsigned long long)seed, text);
        if (rc != 0 && alone && json_is_object(alone))
            cr_assert_str_eq(e.field, "prompt", "seed %llu: JSON, but refused: %s: %s",
                             (unsigned long long)seed, text, e.message.text);
        if (rc == 0) {
            json_t *ids = json_object_get(alone, "prompt");
            if (b.has_ids) {
                cr_assert_eq((size_t)b.n_ids, json_array_size(ids), "%s", text);
                for (int32_t j = 0; j < b.n_ids; j++)
                    cr_assert_eq(b.ids[j], json_integer_value(json_array_get(ids, (size_t)j)));
            } else {
                cr_assert(!json_is_array(ids), "%s", text);
            }
            n_taken++;
            json_fini(&b);
        }
        json_decref(alone);
    }
    cr_assert(n_taken > 1000, "only %d texts were taken", n_taken);
}
