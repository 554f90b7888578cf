#include "api_keys.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "buf.h"
#include "file.h"

enum { MAX_KEY_FILE_BYTES = 1 << 20 };

struct key {
    char *text;
    size_t len;
    struct key_use *use;
    bool owns_use; /* else it is a key's of an older set */
};

struct api_keys {
    struct key *list; /* [n] */
    int32_t n;        /* 0: calls need no key */
    struct api_keys *older;
};

/* ---- reading ---- */

static struct key_use *find_use(const struct api_keys *k, const char *text, size_t len)
{
    for (; k; k = k->older)
        for (int32_t i = 0; i < k->n; i++)
            if (k->list[i].len == len && memcmp(k->list[i].text, text, len) == 0)
                return k->list[i].use;
    return NULL;
}

/* One key a line; blanks around it are not part of it. Returns 0, ERR_INVALID or ERR_NOMEM. */
static int add_key(struct api_keys *to, const char *line, size_t len)
{
    while (len > 0 && strchr(" \t\r", line[len - 1]))
        len--;
    while (len > 0 && (*line == ' ' || *line == '\t')) {
        line++;
        len--;
    }
    if (len == 0)
        return 0;
    for (size_t i = 0; i < len; i++)
        if (line[i] < 0x20 || line[i] > 0x7e)
            return ERR_INVALID;
    struct key *list = realloc(to->list, ((size_t)to->n + 1) * sizeof(*list));
    if (!list)
        return ERR_NOMEM;
    to->list = list;
    struct key k = {.text = strndup(line, len), .len = len, .use = find_use(to, line, len)};
    if (k.text && !k.use) {
        k.use = calloc(1, sizeof(*k.use));
        k.owns_use = true;
    }
    if (!k.text || !k.use) {
        free(k.text);
        return ERR_NOMEM;
    }
    to->list[to->n++] = k;
    return 0;
}

/* Adds the keys of the file. */
static int read_keys(struct api_keys *to, const char *path, struct errmsg *e)
{
    struct buf text;
    struct errmsg why;
    buf_init(&text);
    int rc = file_read(path, MAX_KEY_FILE_BYTES, &text, &why);
    if (rc != 0)
        errmsg_set(e, rc, "api-key-file %s", why.text);
    int n = 0;
    for (size_t from = 0; rc == 0 && from < text.len;) {
        const char *line = text.data + from;
        const char *end = memchr(line, '\n', text.len - from);
        size_t len = end ? (size_t)(end - line) : text.len - from;
        from += len + 1;
        n++;
        rc = add_key(to, line, len);
        if (rc == ERR_INVALID)
            errmsg_set(e, rc,
                       "api-key-file %s:%d: found bytes that are not visible ASCII, "
                       "accepted: one key of visible ASCII a line",
                       path, n);
        else if (rc != 0)
            errmsg_set(e, rc, "api-key-file %s: no memory", path);
    }
    buf_fini(&text);
    if (rc == 0 && to->n == 0)
        rc = errmsg_set(e, ERR_INVALID, "api-key-file %s: no key in it; one key a line", path);
    return rc;
}

void api_keys_free(struct api_keys *k)
{
    struct api_keys *older;
    for (; k; k = older) {
        older = k->older;
        for (int32_t i = 0; i < k->n; i++) {
            free(k->list[i].text);
            if (k->list[i].owns_use)
                free(k->list[i].use);
        }
        free(k->list);
        free(k);
    }
}

int api_keys_read(const char *path, struct api_keys *older, struct api_keys **out,
                  struct errmsg *e)
{
    struct api_keys *k = calloc(1, sizeof(*k));
    if (!k)
        return errmsg_set(e, ERR_NOMEM, "no memory for keys");
    k->older = older;
    int rc = path ? read_keys(k, path, e) : 0;
    if (rc != 0) {
        k->older = NULL;
        api_keys_free(k);
        return rc;
    }
    *out = k;
    return 0;
}

/* ---- asking ---- */

/* Takes a time that depends on what was presented and on the number of keys, not on how much of a
 * key was right. */
static const struct key *find_key(const struct api_keys *k, const char *authorization)
{
    static const char scheme[] = "Bearer ";
    if (!authorization || strncasecmp(authorization, scheme, sizeof(scheme) - 1) != 0)
        return NULL;
    const char *given = authorization + sizeof(scheme) - 1;
    given += strspn(given, " ");
    size_t len = strlen(given);
    const struct key *found = NULL;
    for (int32_t i = 0; i < k->n; i++) {
        const struct key *key = &k->list[i];
        size_t differs = len ^ key->len;
        for (size_t j = 0; j < len; j++)
            differs |= (size_t)(given[j] ^ key->text[j < key->len ? j : 0]) & 0xff;
        found = differs == 0 ? key : found;
    }
    return found;
}

bool api_keys_allow(const struct api_keys *k, const char *authorization)
{
    return k->n == 0 || find_key(k, authorization);
}

struct key_use *api_keys_use(const struct api_keys *k, const char *authorization)
{
    const struct key *key = NULL;
    /* A reload may have taken away the key of a call that was let in. */
    for (; k && !key; k = k->older)
        key = find_key(k, authorization);
    return key ? key->use : NULL;
}

/* ---- what is in flight ---- */

static bool add_within(atomic_llong *count, int64_t n, int64_t max)
{
    long long now = atomic_load(count);
    do {
        if (max > 0 && now + n > max)
            return false;
    } while (!atomic_compare_exchange_weak(count, &now, now + n));
    return true;
}

bool key_use_enter(struct key_use *u, const struct key_limits *l, int64_t n_requests,
                   int64_t n_tokens)
{
    if (!add_within(&u->n_requests, n_requests, l->max_requests))
        return false;
    if (add_within(&u->n_tokens, n_tokens, l->max_tokens))
        return true;
    atomic_fetch_sub(&u->n_requests, n_requests);
    return false;
}

void key_use_leave(struct key_use *u, int64_t n_requests, int64_t n_tokens)
{
    atomic_fetch_sub(&u->n_requests, n_requests);
    atomic_fetch_sub(&u->n_tokens, n_tokens);
}
