/* Sessions: prompts whose state is kept under a name, to be continued, or copied and continued.
 *
 * Owns the table: names, tokens, times, who uses one, and why those that are gone went. Workers
 * find and list; the engine keeps, replaces and ends. One lock, a leaf, held for a few
 * instructions and a copy of tokens. A session's slot and pages are numbers that only the
 * engine reads and writes. */
#ifndef PREFILLD_SESSION_H
#define PREFILLD_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum { SESSION_ID_MAX = 31, SESSION_MAX_TTL_S = 30 * 24 * 60 * 60 };

struct session {
    char id[SESSION_ID_MAX + 1];
    /* The table's, under its lock. */
    int64_t ttl_us; /* unused for so long it ends */
    struct session *next;
    int32_t refs;
    int32_t *ids; /* [n_tokens] whose state is kept */
    int32_t n_tokens;
    int32_t n_users;   /* forks and exports under way */
    int32_t n_exports; /* of these, exports: it stays with what it holds until they are over */
    bool is_busy;      /* being continued */
    bool is_listed;    /* can be found */
    bool is_pinned;
    int64_t created_unix_s;
    int64_t used_us; /* monotonic */
    /* The engine's. */
    int32_t slot;   /* -1: none */
    int32_t *pages; /* [n_pages] */
    int32_t n_pages;
};

/* How a request wants its session kept. */
struct session_terms {
    int64_t ttl_us;   /* 0: as it was */
    bool is_pinned;   /* goes last when room is needed */
    bool has_pinning; /* else as it was */
};

/* What a list says of one. */
struct session_info {
    char id[SESSION_ID_MAX + 1];
    int64_t created_unix_s, idle_us, expires_us; /* from now */
    int32_t n_tokens;
    bool is_busy, is_pinned;
};

struct sessions; /* opaque */

int sessions_open(struct sessions **out);
/* Frees all; their slots and pages are with the pools, which go, too. */
void sessions_close(struct sessions *t);

/* ---- any thread ---- */

/* A session under a new random name, not listed, with one reference. NULL: memory is short. */
struct session *sessions_new(int64_t ttl_us);
/* The same under a name that it had before; at most SESSION_ID_MAX characters. */
struct session *sessions_new_named(const char *id, int64_t ttl_us);
/* Finds one to continue, or to fork, and marks that; *out has a reference, and *ids is a copy
 * of its tokens, the caller's. Returns 0; ERR_NOT_FOUND, e says why; ERR_FULL: another uses it
 * so that this must wait; ERR_NOMEM. */
int sessions_begin(struct sessions *t, const char *id, bool is_fork, struct session **out,
                   int32_t **ids, int32_t *n_ids, struct errmsg *e);
/* Takes the mark and the reference back. */
void sessions_end(struct sessions *t, struct session *s, bool is_fork);
/* As sessions_begin of a fork, to read its state: until sessions_end_export its slot and pages
 * stay, also when it is deleted or room is needed. info: what it is like. */
int sessions_begin_export(struct sessions *t, const char *id, struct session **out,
                          int32_t **ids, int32_t *n_ids, struct session_info *info,
                          struct errmsg *e);
void sessions_end_export(struct sessions *t, struct session *s);
/* Exports under way. */
int32_t sessions_n_exports(struct sessions *t);
/* Its time begins anew, on other terms where they say so. Errors as sessions_get. */
int sessions_renew(struct sessions *t, const char *id, const struct session_terms *terms,
                   struct session_info *out, struct errmsg *e);
void sessions_ref(struct sessions *t, struct session *s);
void sessions_unref(struct sessions *t, struct session *s); /* NULL is legal */
/* Up to cap of them, the latest first; returns how many there are. */
int32_t sessions_list(struct sessions *t, struct session_info *out, int32_t cap);
/* 0, or ERR_NOT_FOUND with e saying why. */
int sessions_get(struct sessions *t, const char *id, struct session_info *out,
                 struct errmsg *e);
/* Takes it off the list; the engine gives back what it holds (sessions_next_dead). Errors as
 * sessions_get. */
int sessions_delete(struct sessions *t, const char *id, struct errmsg *e);

/* ---- engine ---- */

/* s's state is that of these tokens (copied) now, on these terms; a new one is listed. Returns
 * 0, ERR_NOMEM, or ERR_NOT_FOUND: it has gone meanwhile. */
int sessions_keep(struct sessions *t, struct session *s, const int32_t *ids, int32_t n_ids,
                  const struct session_terms *terms);
/* s, which is listed, was made then and has been idle so long. */
void sessions_restore(struct sessions *t, struct session *s, int64_t created_unix_s,
                      int64_t idle_us);
/* One that was deleted or has expired at now_us and is not being exported: off the list, with a
 * reference for the caller; NULL: none. O(sessions) when there may be one, else O(1). */
struct session *sessions_next_dead(struct sessions *t, int64_t now_us);
/* The one that was not used for longest, off the list, with a reference. Those that are in use
 * or pinned are spared unless is_needed, and then the pinned go last; those that are exported
 * are spared. NULL: none. O(sessions). */
struct session *sessions_evict(struct sessions *t, bool is_needed);
/* Sets marks [pages of the pool] for the pages of sessions that sessions_evict(t, false)
 * spares. */
void sessions_mark_spared(struct sessions *t, bool *marks);
/* Sessions on the list. */
int32_t sessions_count(struct sessions *t);

#endif
