#include "session.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "random_name.h"
#include "request.h"

enum { LOST_NAMES = 256 }; /* remembered, to say why they went */

struct lost {
    char id[SESSION_ID_MAX + 1];
    const char *why;
};

struct sessions {
    pthread_mutex_t lock;
    struct session *first; /* listed, or off the list and not yet taken by the engine */
    int32_t n_listed, n_exports;
    bool has_dead;
    int64_t next_expiry_us; /* not before it; INT64_MAX: none */
    struct lost lost[LOST_NAMES];
    int64_t n_lost;
};

int sessions_open(struct sessions **out)
{
    struct sessions *t = calloc(1, sizeof(*t));
    *out = t;
    if (!t)
        return ERR_NOMEM;
    t->next_expiry_us = INT64_MAX;
    pthread_mutex_init(&t->lock, NULL);
    return 0;
}

static void session_free(struct session *s)
{
    free(s->ids);
    free(s->pages);
    free(s);
}

void sessions_close(struct sessions *t)
{
    if (!t)
        return;
    while (t->first) {
        struct session *s = t->first;
        t->first = s->next;
        session_free(s);
    }
    pthread_mutex_destroy(&t->lock);
    free(t);
}

/* ---- with the lock ---- */

static void unref(struct session *s)
{
    if (--s->refs == 0)
        session_free(s);
}

static struct session *find(const struct sessions *t, const char *id)
{
    struct session *s = t->first;
    while (s && !(s->is_listed && strcmp(s->id, id) == 0))
        s = s->next;
    return s;
}

static int say_why(const struct sessions *t, const char *id, struct errmsg *e)
{
    for (int64_t i = t->n_lost - 1; i >= 0 && i >= t->n_lost - LOST_NAMES; i--)
        if (strcmp(t->lost[i % LOST_NAMES].id, id) == 0)
            return errmsg_set(e, ERR_NOT_FOUND, "the session %s", t->lost[i % LOST_NAMES].why);
    return errmsg_set(e, ERR_NOT_FOUND,
                      "there is no such session: it never was, or went long ago or before a "
                      "restart");
}

/* Nobody finds s any more. It stays in the list until the engine takes it. */
static void hide(struct sessions *t, struct session *s, const char *why)
{
    struct lost *l = &t->lost[t->n_lost++ % LOST_NAMES];
    memcpy(l->id, s->id, sizeof(l->id));
    l->why = why;
    s->is_listed = false;
    t->n_listed--;
}

/* The list's reference goes to the caller. */
static void take(struct sessions *t, struct session *s)
{
    struct session **at = &t->first;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
}

static int64_t expiry_of(const struct session *s)
{
    return s->is_busy || s->n_users ? INT64_MAX : s->used_us + s->ttl_us;
}

static void touch(struct sessions *t, struct session *s)
{
    s->used_us = request_now_us();
    if (expiry_of(s) < t->next_expiry_us)
        t->next_expiry_us = expiry_of(s);
}

static struct session_info info_of(const struct session *s, int64_t now_us)
{
    struct session_info i = {.created_unix_s = s->created_unix_s,
                             .idle_us = now_us - s->used_us,
                             .expires_us = s->used_us + s->ttl_us - now_us,
                             .n_tokens = s->n_tokens,
                             .is_busy = s->is_busy || s->n_users > 0,
                             .is_pinned = s->is_pinned};
    memcpy(i.id, s->id, sizeof(i.id));
    return i;
}

/* ---- any thread ---- */

static struct session *new_session(const char *id, int64_t ttl_us)
{
    struct session *s = calloc(1, sizeof(*s));
    if (!s)
        return NULL;
    memcpy(s->id, id, strlen(id) + 1);
    s->ttl_us = ttl_us;
    s->slot = -1;
    s->refs = 1;
    return s;
}

struct session *sessions_new(int64_t ttl_us)
{
    char id[SESSION_ID_MAX + 1];
    return random_name(id, "s-") ? new_session(id, ttl_us) : NULL;
}

struct session *sessions_new_named(const char *id, int64_t ttl_us)
{
    return new_session(id, ttl_us);
}

/* With the lock. */
static int begin(struct sessions *t, const char *id, bool is_fork, struct session **out,
                 int32_t **ids, int32_t *n_ids, struct errmsg *e)
{
    int rc = 0;
    struct session *s = find(t, id);
    if (!s)
        rc = say_why(t, id, e);
    else if (s->is_busy || (!is_fork && s->n_users > 0))
        rc = errmsg_set(e, ERR_FULL, "another request %s this session; come back after it",
                        s->is_busy     ? "continues"
                        : s->n_exports ? "reads"
                                       : "forks");
    if (rc == 0) {
        *ids = malloc((size_t)s->n_tokens * sizeof(**ids));
        if (!*ids)
            rc = errmsg_set(e, ERR_NOMEM, "memory is short");
    }
    if (rc == 0) {
        memcpy(*ids, s->ids, (size_t)s->n_tokens * sizeof(**ids));
        *n_ids = s->n_tokens;
        if (is_fork)
            s->n_users++;
        else
            s->is_busy = true;
        s->refs++;
        *out = s;
    }
    return rc;
}

int sessions_begin(struct sessions *t, const char *id, bool is_fork, struct session **out,
                   int32_t **ids, int32_t *n_ids, struct errmsg *e)
{
    pthread_mutex_lock(&t->lock);
    int rc = begin(t, id, is_fork, out, ids, n_ids, e);
    pthread_mutex_unlock(&t->lock);
    return rc;
}

int sessions_begin_export(struct sessions *t, const char *id, struct session **out,
                          int32_t **ids, int32_t *n_ids, struct session_info *info,
                          struct errmsg *e)
{
    pthread_mutex_lock(&t->lock);
    int rc = begin(t, id, true, out, ids, n_ids, e);
    if (rc == 0) {
        (*out)->n_exports++;
        t->n_exports++;
        *info = info_of(*out, request_now_us());
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}

void sessions_end_export(struct sessions *t, struct session *s)
{
    pthread_mutex_lock(&t->lock);
    s->n_exports--;
    t->n_exports--;
    t->has_dead |= !s->is_listed;
    pthread_mutex_unlock(&t->lock);
    sessions_end(t, s, true);
}

int32_t sessions_n_exports(struct sessions *t)
{
    pthread_mutex_lock(&t->lock);
    int32_t n = t->n_exports;
    pthread_mutex_unlock(&t->lock);
    return n;
}

int sessions_renew(struct sessions *t, const char *id, const struct session_terms *terms,
                   struct session_info *out, struct errmsg *e)
{
    pthread_mutex_lock(&t->lock);
    struct session *s = find(t, id);
    int rc = s ? 0 : say_why(t, id, e);
    if (s) {
        s->ttl_us = terms->ttl_us ? terms->ttl_us : s->ttl_us;
        s->is_pinned = terms->has_pinning ? terms->is_pinned : s->is_pinned;
        touch(t, s);
        *out = info_of(s, request_now_us());
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}

void sessions_end(struct sessions *t, struct session *s, bool is_fork)
{
    pthread_mutex_lock(&t->lock);
    if (is_fork)
        s->n_users--;
    else
        s->is_busy = false;
    if (s->is_listed)
        touch(t, s);
    unref(s);
    pthread_mutex_unlock(&t->lock);
}

void sessions_ref(struct sessions *t, struct session *s)
{
    pthread_mutex_lock(&t->lock);
    s->refs++;
    pthread_mutex_unlock(&t->lock);
}

void sessions_unref(struct sessions *t, struct session *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&t->lock);
    unref(s);
    pthread_mutex_unlock(&t->lock);
}

int32_t sessions_list(struct sessions *t, struct session_info *out, int32_t cap)
{
    int32_t n = 0;
    pthread_mutex_lock(&t->lock);
    int64_t now_us = request_now_us();
    for (const struct session *s = t->first; s && n < cap; s = s->next)
        if (s->is_listed)
            out[n++] = info_of(s, now_us);
    n = t->n_listed;
    pthread_mutex_unlock(&t->lock);
    return n;
}

int sessions_get(struct sessions *t, const char *id, struct session_info *out, struct errmsg *e)
{
    pthread_mutex_lock(&t->lock);
    struct session *s = find(t, id);
    int rc = s ? 0 : say_why(t, id, e);
    if (s)
        *out = info_of(s, request_now_us());
    pthread_mutex_unlock(&t->lock);
    return rc;
}

int sessions_delete(struct sessions *t, const char *id, struct errmsg *e)
{
    pthread_mutex_lock(&t->lock);
    struct session *s = find(t, id);
    int rc = s ? 0 : say_why(t, id, e);
    if (s) {
        hide(t, s, "was deleted");
        t->has_dead = true;
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}

/* ---- engine ---- */

int sessions_keep(struct sessions *t, struct session *s, const int32_t *ids, int32_t n_ids,
                  const struct session_terms *terms)
{
    int32_t *copy = malloc((size_t)n_ids * sizeof(*copy));
    if (!copy)
        return ERR_NOMEM;
    memcpy(copy, ids, (size_t)n_ids * sizeof(*copy));
    pthread_mutex_lock(&t->lock);
    if (s->created_unix_s && !s->is_listed) {
        pthread_mutex_unlock(&t->lock);
        free(copy);
        return ERR_NOT_FOUND;
    }
    free(s->ids);
    s->ids = copy;
    s->n_tokens = n_ids;
    s->ttl_us = terms->ttl_us ? terms->ttl_us : s->ttl_us;
    s->is_pinned = terms->has_pinning ? terms->is_pinned : s->is_pinned;
    if (!s->created_unix_s) {
        s->created_unix_s = (int64_t)time(NULL);
        s->is_listed = true;
        s->refs++;
        s->next = t->first;
        t->first = s;
        t->n_listed++;
    }
    touch(t, s);
    pthread_mutex_unlock(&t->lock);
    return 0;
}

void sessions_restore(struct sessions *t, struct session *s, int64_t created_unix_s,
                      int64_t idle_us)
{
    pthread_mutex_lock(&t->lock);
    s->created_unix_s = created_unix_s;
    s->used_us -= idle_us;
    if (expiry_of(s) < t->next_expiry_us)
        t->next_expiry_us = expiry_of(s);
    pthread_mutex_unlock(&t->lock);
}

struct session *sessions_next_dead(struct sessions *t, int64_t now_us)
{
    struct session *dead = NULL;
    int64_t next_us = INT64_MAX;
    pthread_mutex_lock(&t->lock);
    if (t->has_dead || now_us >= t->next_expiry_us) {
        for (struct session *s = t->first; s; s = s->next) {
            if (s->is_listed && now_us >= expiry_of(s))
                hide(t, s, "expired: it was not used for its ttl_s");
            if (!s->is_listed && !s->n_exports && !dead)
                dead = s;
            if (s->is_listed && expiry_of(s) < next_us)
                next_us = expiry_of(s);
        }
        t->has_dead = dead != NULL; /* there may be more */
        t->next_expiry_us = next_us;
        if (dead)
            take(t, dead);
    }
    pthread_mutex_unlock(&t->lock);
    return dead;
}

/* Those of a lower number go first. */
static int order_of(const struct session *s)
{
    return 2 * s->is_pinned + (s->is_busy || s->n_users > 0);
}

void sessions_mark_spared(struct sessions *t, bool *marks)
{
    pthread_mutex_lock(&t->lock);
    for (const struct session *s = t->first; s; s = s->next)
        if (s->n_exports || (s->is_listed && order_of(s) > 0))
            for (int32_t i = 0; i < s->n_pages; i++)
                marks[s->pages[i]] = true;
    pthread_mutex_unlock(&t->lock);
}

struct session *sessions_evict(struct sessions *t, bool is_needed)
{
    struct session *first = NULL;
    pthread_mutex_lock(&t->lock);
    for (struct session *s = t->first; s; s = s->next) {
        if (!s->is_listed || s->n_exports || (!is_needed && order_of(s) > 0))
            continue;
        if (!first || order_of(s) < order_of(first) ||
            (order_of(s) == order_of(first) && s->used_us < first->used_us))
            first = s;
    }
    if (first) {
        hide(t, first, "was evicted: other requests needed its memory");
        take(t, first);
    }
    pthread_mutex_unlock(&t->lock);
    return first;
}

int32_t sessions_count(struct sessions *t)
{
    pthread_mutex_lock(&t->lock);
    int32_t n = t->n_listed;
    pthread_mutex_unlock(&t->lock);
    return n;
}
