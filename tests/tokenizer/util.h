/* What the tests of the tokenizer share: where the files are, and cases in JSON lines. */
#ifndef PREFILLD_TESTS_TOKENIZER_UTIL_H
#define PREFILLD_TESTS_TOKENIZER_UTIL_H

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "file.h"
#include "tokenizer_internal.h"

#define DEMO "tests/models/demo/tokenizer.json"
#define FIXTURES "../shared/fixtures/tokenizer/"

/* A path below the source tree; of two buffers, so that two fit in one call. */
static inline const char *source_path(const char *name)
{
    static char paths[2][1024];
    static int turn;
    const char *root = getenv("SRCDIR");
    turn ^= 1;
    snprintf(paths[turn], sizeof(paths[turn]), "%s/%s", root ? root : ".", name);
    return paths[turn];
}

static inline bool is_there(const char *name)
{
    return access(source_path(name), R_OK) == 0;
}

static inline struct tokenizer *load_tokenizer(const char *name)
{
    struct tokenizer *t = NULL;
    struct errmsg e = {""};
    int code = tokenizer_load(source_path(name), &t, &e);
    cr_assert_eq(code, 0, "%s: %s", name, e.text);
    return t;
}

/* Calls check with each line of a JSON lines file; returns how many there were. */
static inline size_t each_case(const char *name, void (*check)(void *arg, const json_t *line),
                               void *arg)
{
    FILE *f = fopen(source_path(name), "r");
    char *line = NULL;
    size_t cap = 0, n = 0;
    cr_assert_not_null(f, "%s", name);
    while (getline(&line, &cap, f) > 0) {
        json_error_t error;
        json_t *value = json_loads(line, JSON_ALLOW_NUL, &error);
        cr_assert_not_null(value, "%s line %zu: %s", name, n + 1, error.text);
        check(arg, value);
        json_decref(value);
        n++;
    }
    free(line);
    fclose(f);
    return n;
}

static inline const char *text_of(const json_t *line, const char *key, size_t *len)
{
    const json_t *value = json_object_get(line, key);
    *len = json_string_length(value);
    return json_string_value(value);
}

/* The ids of text, which has some. Freed by the caller. */
static inline int32_t *encode(const struct tokenizer *t, const char *text, size_t len,
                              int32_t *n_ids)
{
    struct errmsg e = {""};
    int32_t *ids;
    int code = tokenizer_encode(t, text, len, 0, &ids, n_ids, &e);
    cr_assert_eq(code, 0, "%s", e.text);
    return ids;
}

/* Asserts that text has just these ids. */
static inline void expect_ids(const struct tokenizer *t, const char *text, size_t len,
                              const int32_t *want, int32_t n_want)
{
    int32_t n, *ids = encode(t, text, len, &n);
    cr_expect_eq(n, n_want, "%d ids, not %d", n, n_want);
    for (int32_t i = 0; i < n && i < n_want; i++)
        cr_expect_eq(ids[i], want[i], "id %d is %d, not %d", i, ids[i], want[i]);
    free(ids);
}

/* Writes text to a new file in /tmp. path has 64 bytes. */
static inline void write_temporary(char *path, const char *text, size_t len)
{
    snprintf(path, 64, "/tmp/prefilld-test-XXXXXX");
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, text, len), (ssize_t)len);
    close(fd);
}

static inline void read_whole(const char *name, struct buf *out)
{
    struct errmsg e = {""};
    buf_init(out);
    cr_assert_eq(file_read(source_path(name), (size_t)1 << 28, out, &e), 0, "%s", e.text);
}

#endif
