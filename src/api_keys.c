#include "api_keys.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "buf.h"
#include "file.h"

enum { MAX_KEY_FILE_BYTES = 1 << 20 };

struct api_key {
    struct api_key *next;
    size_t len;
    bool is_valid; /* in the file, as it was read last */
    int64_t n_requests, n_tokens;
    char text[]; /* [len + 1] */
};

struct api_keys {
    pthread_mutex_t lock;
    struct api_key *first;
    bool are_asked; /* else calls need no key */
};

/* ---- the list ---- */

static struct api_key *find_text(struct api_key *first, const char *text, size_t len)
{
    while (first && (first->len != len || memcmp(first->text, text, len) != 0))
        first = first->next;
    return first;
}

/* Puts a key in front of *first. NULL: memory is short. */
static struct api_key *add_text(struct api_key **first, const char *text, size_t len)
{
    struct api_key *key = calloc(1, sizeof(*key) + len + 1);
    if (!key)
        return NULL;
    key->len = len;
    memcpy(key->text, text, len);
    key->next = *first;
    *first = key;
    return key;
}

static void free_list(struct api_key *first)
{
    while (first) {
        struct api_key *next = first->next;
        free(first);
        first = next;
    }
}

/* Frees keys that are good for nothing any more. */
static void sweep(struct api_keys *k)
{
    for (struct api_key **at = &k->first; *at;) {
        struct api_key *key = *at;
        if (key->is_valid || key->n_requests > 0) {
            at = &key->next;
            continue;
        }
        *at = key->next;
        free(key);
    }
}

/* Moves the keys of fresh to k; one that is there keeps its counts. */
static void merge(struct api_keys *k, struct api_key *fresh)
{
    struct api_key *const old = k->first;
    for (struct api_key *key = old; key; key = key->next)
        key->is_valid = false;
    while (fresh) {
        struct api_key *key = fresh, *same = find_text(old, key->text, key->len);
        fresh = key->next;
        if (same) {
            same->is_valid = true;
            free(key);
            continue;
        }
        key->is_valid = true;
        key->next = k->first;
        k->first = key;
    }
    sweep(k);
}

struct api_keys *api_keys_new(void)
{
    struct api_keys *k = calloc(1, sizeof(*k));
    if (k && pthread_mutex_init(&k->lock, NULL) != 0) {
        free(k);
        k = NULL;
    }
    return k;
}

void api_keys_free(struct api_keys *k)
{
    if (!k)
        return;
    free_list(k->first);
    pthread_mutex_destroy(&k->lock);
    free(k);
}

/* ---- reading ---- */

/* One key a line; blanks around it are not part of it. Returns 0, ERR_INVALID or ERR_NOMEM. */
static int add_line(struct api_key **first, const char *line, size_t len)
{
    while (len > 0 && strchr(" \t\r", line[len - 1]))
        len--;
    while (len > 0 && (*line == ' ' || *line == '\t')) {
        line++;
        len--;
    }
    for (size_t i = 0; i < len; i++)
        if (line[i] < 0x20 || line[i] > 0x7e)
            return ERR_INVALID;
    if (len == 0 || find_text(*first, line, len))
        return 0;
    return add_text(first, line, len) ? 0 : ERR_NOMEM;
}

static int read_list(const char *path, struct api_key **first, struct errmsg *e)
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
        rc = add_line(first, line, len);
        if (rc == ERR_INVALID)
            errmsg_set(e, rc,
                       "api-key-file %s:%d: found bytes that are not visible ASCII, "
                       "accepted: one key of visible ASCII a line",
                       path, n);
        else if (rc != 0)
            errmsg_set(e, rc, "api-key-file %s: no memory", path);
    }
    buf_fini(&text);
    if (rc == 0 && !*first)
        rc = errmsg_set(e, ERR_INVALID, "api-key-file %s: no key in it; one key a line", path);
    return rc;
}

int api_keys_read(struct api_keys *k, const char *path, struct errmsg *e)
{
    struct api_key *fresh = NULL;
    int rc = path ? read_list(path, &fresh, e) : 0;
    if (rc != 0) {
        free_list(fresh);
        return rc;
    }
    pthread_mutex_lock(&k->lock);
    k->are_asked = path != NULL;
    merge(k, fresh);
    pthread_mutex_unlock(&k->lock);
    return 0;
}

/* ---- asking ---- */

/* The key in the header's value; NULL: none. */
static const char *key_in(const char *authorization)
{
    static const char scheme[] = "Bearer ";
    if (!authorization || strncasecmp(authorization, scheme, sizeof(scheme) - 1) != 0)
        return NULL;
    authorization += sizeof(scheme) - 1;
    return authorization + strspn(authorization, " ");
}

/* Takes a time that depends on what was presented and on the number of keys, not on how much of
 * a key was right. */
static struct api_key *find_given(const struct api_keys *k, const char *given)
{
    size_t len = strlen(given);
    struct api_key *found = NULL;
    for (struct api_key *key = k->first; key; key = key->next) {
        size_t differs = len ^ key->len;
        for (size_t j = 0; j < len; j++)
            differs |= (size_t)(given[j] ^ key->text[j < key->len ? j : 0]) & 0xff;
        found = differs == 0 ? key : found;
    }
    return found;
}

bool api_keys_allow(struct api_keys *k, const char *authorization)
{
    const char *given = key_in(authorization);
    pthread_mutex_lock(&k->lock);
    const struct api_key *key = k->are_asked && given ? find_given(k, given) : NULL;
    bool is_allowed = !k->are_asked || (key && key->is_valid);
    pthread_mutex_unlock(&k->lock);
    return is_allowed;
}

/* ---- what is in flight ---- */

static void sweep_after(struct api_keys *k, const struct api_key *key)
{
    if (!key->is_valid && key->n_requests == 0)
        sweep(k);
}

static bool is_within(int64_t n, int64_t max)
{
    return max == 0 || n <= max;
}

int api_keys_enter(struct api_keys *k, const char *authorization,
                   const struct api_key_limits *l, int64_t n_requests, int64_t n_tokens,
                   struct api_key **key)
{
    const char *given = key_in(authorization);
    int rc = 0;
    *key = NULL;
    pthread_mutex_lock(&k->lock);
    if (k->are_asked && given) {
        struct api_key *own = find_given(k, given);
        /* A reload may have taken away the key of a call that was let in. */
        own = own ? own : add_text(&k->first, given, strlen(given));
        if (!own) {
            rc = ERR_NOMEM;
        } else if (!is_within(own->n_requests + n_requests, l->max_requests) ||
                   !is_within(own->n_tokens + n_tokens, l->max_tokens)) {
            rc = ERR_FULL;
            sweep_after(k, own);
        } else {
            own->n_requests += n_requests;
            own->n_tokens += n_tokens;
            *key = own;
        }
    }
    pthread_mutex_unlock(&k->lock);
    return rc;
}

void api_keys_leave(struct api_keys *k, struct api_key *key, int64_t n_requests,
                    int64_t n_tokens)
{
    pthread_mutex_lock(&k->lock);
    key->n_requests -= n_requests;
    key->n_tokens -= n_tokens;
    sweep_after(k, key);
    pthread_mutex_unlock(&k->lock);
}
