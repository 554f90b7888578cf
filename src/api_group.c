#include "api_group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"

#define ONE_ENDED (1ll << 32)

/* ---- one line for each call, and its count ---- */

/* g NULL: it never had requests. */
static void finish_line(struct api *a, const struct exchange *x, int status, enum outcome o,
                        const struct group *g)
{
    char more[64] = "";
    int64_t arrival_us = 0, started_us = INT64_MAX, ended_us = 0;
    int32_t n_tokens = 0, n_cached = 0, n_pieces = 0, n_new = 0;
    metrics_count(a->metrics, o);
    for (int32_t i = 0; g && i < g->n; i++) {
        struct request *r = g->requests[i];
        int64_t from_us = r->started_us ? r->started_us : r->ended_us;
        arrival_us = r->arrival_us;
        started_us = from_us < started_us ? from_us : started_us;
        ended_us = r->ended_us > ended_us ? r->ended_us : ended_us;
        n_tokens += r->n_prompt;
        n_cached += r->n_cached;
        n_pieces += r->n_pieces;
        n_new += atomic_load(&r->n_new);
    }
    if (!g || g->n == 0)
        started_us = 0;
    if (n_new > 0 || (g && g->n > 1))
        snprintf(more, sizeof(more), " requests=%d new=%d", g->n, n_new);
    log_info("id=%s status=%d outcome=%s tokens=%d cached=%d pieces=%d queue_ms=%.1f "
             "prefill_ms=%.1f%s",
             exchange_id(x), status, outcome_name(o), n_tokens, n_cached, n_pieces,
             (double)(started_us - arrival_us) / 1e3, (double)(ended_us - started_us) / 1e3,
             more);
}

void api_count_refused(struct api *a, const struct exchange *x, int status)
{
    enum outcome o = status == 503   ? OUTCOME_OVERLOAD
                     : status >= 500 ? OUTCOME_ERROR
                                     : OUTCOME_INVALID;
    finish_line(a, x, status, o, NULL);
}

void api_refuse(struct api *a, struct exchange *x, int status, const char *param,
                const char *message)
{
    api_count_refused(a, x, status);
    api_error(a, x, status, param, message);
}

void api_refuse_body(struct api *a, struct exchange *x, int rc, const struct json_error *e)
{
    api_count_refused(a, x, api_status_of(rc));
    api_bad_body(a, x, rc, e);
}

/* Nobody reads the answer. */
static void drop(struct api *a, struct exchange *x, const struct group *g)
{
    struct buf none;
    buf_init(&none);
    finish_line(a, x, 0, OUTCOME_CANCELLED, g);
    api_reply(x, 200, &none);
}

void api_drop(struct api *a, struct exchange *x)
{
    drop(a, x, NULL);
}

/* ---- making one ---- */

int group_init(struct group *g, struct api *a, struct exchange *x, const struct api_common *c,
               int32_t cap)
{
    g->api = a;
    g->exchange = x;
    g->common = *c;
    g->members = calloc((size_t)cap, sizeof(*g->members));
    g->requests = calloc((size_t)cap, sizeof(*g->requests));
    if (!g->members || !g->requests)
        return ERR_NOMEM;
    g->cap = cap;
    return 0;
}

/* What the engine did not take from r, because it never got it. */
static void give_sessions(struct api *a, struct request *r)
{
    if (r->source)
        sessions_end(a->sessions, r->source, r->is_fork);
    if (r->keeps)
        sessions_unref(a->sessions, r->keeps);
    r->source = r->keeps = NULL;
}

void group_fini(struct group *g)
{
    if (g->key)
        api_keys_leave(g->api->keys, g->key, g->n, g->n_used_tokens);
    for (int32_t i = 0; i < g->n; i++) {
        give_sessions(g->api, g->requests[i]);
        request_unref(g->requests[i]);
    }
    free(g->members);
    free(g->requests);
}

static void on_done(struct request *r, void *arg);
static void on_token(struct request *r, void *arg);

/* Copies the bias, which belongs to each request. */
static int generate(struct request *r, const struct choosing *c, int32_t max_new, uint64_t seed,
                    int32_t page_tokens)
{
    struct sampling s = c->sampling;
    s.max_new = max_new;
    s.seed = seed;
    if (c->n_bias > 0) {
        s.bias = malloc((size_t)c->n_bias * sizeof(*s.bias));
        if (!s.bias)
            return ERR_NOMEM;
        memcpy(s.bias, c->bias, (size_t)c->n_bias * sizeof(*s.bias));
        s.n_bias = c->n_bias;
    }
    int rc = request_generate(r, &s, page_tokens);
    return rc == 0 && c->n_labels > 0 ? request_label(r, c->labels, c->n_labels) : rc;
}

int group_add(struct group *g, struct prompt *p, enum logprobs_mode mode, int32_t n_top,
              const struct choosing *c, int32_t max_new, uint64_t seed)
{
    const struct api *a = g->api;
    struct exchange *x = g->exchange;
    struct request *r = request_new(p->ids, p->n_ids, mode, n_top, a->page_tokens);
    p->ids = NULL;
    if (!r)
        return ERR_NOMEM;
    struct group_member *m = &g->members[g->n];
    g->requests[g->n++] = r;
    *m = (struct group_member){.group = g, .request = r};
    memcpy(r->id, exchange_id(x), strlen(exchange_id(x)) + 1);
    r->arrival_us = exchange_arrival_us(x);
    r->item.arrival_us = r->arrival_us;
    r->item.priority = (int32_t)g->common.priority;
    r->item.deadline_us =
        g->common.deadline_ms ? r->arrival_us + g->common.deadline_ms * 1000 : 0;
    r->done = on_done;
    r->done_arg = m;
    r->tells_progress = g->tells_progress;
    /* Stop strings are looked for as the text grows; other answers are read at their end. */
    if (g->update)
        r->on_token = on_token;
    if (!c)
        return 0;
    return generate(r, c, max_new, seed, a->page_tokens);
}

/* ---- its life ---- */

static void cancel_all(struct group *g)
{
    for (int32_t i = 0; i < g->n; i++)
        g->api->cancel(g->api->cancel_arg, g->requests[i]);
}

void group_cut(struct group_member *m)
{
    m->is_cut = true;
    m->group->api->cancel(m->group->api->cancel_arg, m->request);
}

static void on_hangup(void *arg)
{
    cancel_all(arg);
}

static void free_group(void *arg)
{
    struct group *g = arg;
    g->release(g);
}

static void finish(struct group *g);

/* A worker; never two at a time for a group: whoever finds notices already there leaves them to
 * the worker that was posted for the first. */
static void run(struct exchange *x)
{
    struct group *g = exchange_call(x);
    long long seen, left;
    do {
        seen = atomic_load(&g->progress);
        if (seen / ONE_ENDED == g->n) {
            finish(g);
            return;
        }
        if (g->update)
            g->update(g);
        left = atomic_fetch_sub(&g->progress, seen % ONE_ENDED) - seen % ONE_ENDED;
    } while (left % ONE_ENDED > 0);
}

/* Engine thread: adds n to progress, and posts a worker unless one is to come anyway. From the
 * addition on, g is touched only when no worker was to come, so that none can have freed it. */
static void notice(struct group *g, long long n)
{
    if (atomic_fetch_add(&g->progress, n) % ONE_ENDED == 0)
        exchange_post(g->exchange, run);
}

static void on_token(struct request *r, void *arg)
{
    struct group_member *m = arg;
    (void)r;
    notice(m->group, 1);
}

static void on_done(struct request *r, void *arg)
{
    struct group_member *m = arg;
    struct group *g = m->group;
    bool is_bad = r->outcome != OUTCOME_OK && r->outcome != OUTCOME_CANCELLED;
    if (is_bad && g->n > 1 && !atomic_exchange(&g->is_failing, true))
        cancel_all(g);
    atomic_store(&m->is_ended, true);
    if (g->update) {
        notice(g, ONE_ENDED + 1);
    } else {
        /* Nobody looks before the last; then a worker is posted for it alone. */
        int32_t n = g->n;
        struct exchange *x = g->exchange;
        if (atomic_fetch_add(&g->progress, ONE_ENDED) / ONE_ENDED == n - 1)
            exchange_post(x, run);
    }
}

/* Who may share what prompts begin with: with a prefix cache all calls of one salt, else those
 * of this call. A salt is one number a byte; the call's own key begins with one that no byte
 * is. */
static int share(struct group *g)
{
    const struct api_common *c = &g->common;
    const uint64_t own = (uint64_t)(uintptr_t)g;
    const bool once = !g->api->prefix_cache;
    for (int32_t i = 0; i < g->n && (!once || g->n > 1); i++) {
        struct request *r = g->requests[i];
        size_t n = once ? 3 : c->salt_len;
        r->share_key = malloc((n ? n : 1) * sizeof(*r->share_key));
        if (!r->share_key)
            return ERR_NOMEM;
        r->n_share_key = (int32_t)n;
        r->shares = true;
        r->shares_once = once;
        for (size_t k = 0; k < n && !once; k++)
            r->share_key[k] = (unsigned char)c->salt[k];
        if (once) {
            r->share_key[0] = -1;
            memcpy(r->share_key + 1, &own, sizeof(own));
        }
    }
    return 0;
}

/* Counts g among what its key has in flight, and says whether it may be: with 429, to come
 * back, or with 400 when the limit would never let it in. Answers then. */
static bool enter_key(struct group *g)
{
    struct api *a = g->api;
    const struct api_key_limits *l = &a->key_limits;
    if (l->max_requests == 0 && l->max_tokens == 0)
        return true;
    int64_t n_tokens = 0;
    for (int32_t i = 0; i < g->n; i++)
        n_tokens += g->requests[i]->n_prompt;
    int rc = api_keys_enter(a->keys, exchange_authorization(g->exchange), l, g->n, n_tokens,
                            &g->key);
    if (rc == 0) {
        g->n_used_tokens = n_tokens;
        return true;
    }
    if (rc == ERR_NOMEM) {
        api_refuse(a, g->exchange, 500, NULL, "memory is short");
        return false;
    }
    bool never = (l->max_requests > 0 && g->n > l->max_requests) ||
                 (l->max_tokens > 0 && n_tokens > l->max_tokens);
    char text[200], limits[80] = "";
    if (l->max_requests > 0)
        snprintf(limits, sizeof(limits), " %lld requests%s", (long long)l->max_requests,
                 l->max_tokens > 0 ? " and" : "");
    if (l->max_tokens > 0)
        snprintf(limits + strlen(limits), sizeof(limits) - strlen(limits),
                 " %lld prompt tokens", (long long)l->max_tokens);
    snprintf(text, sizeof(text), "%s: one key may have%s in flight; this call has %d with %lld",
             never ? "too much for one key" : "too much of this key is in flight", limits, g->n,
             (long long)n_tokens);
    api_refuse(a, g->exchange, never ? 400 : 429, NULL, text);
    return false;
}

void group_start(struct group *g)
{
    struct api *a = g->api;
    struct exchange *x = g->exchange;
    if (share(g) != 0) {
        api_refuse(a, x, 500, NULL, "memory is short");
        g->release(g);
        return;
    }
    if (!exchange_set_call(x, g, on_hangup, free_group)) {
        drop(a, x, g);
        return;
    }
    if (!enter_key(g))
        return;
    /* From a successful push on x is the engine's: it may be answered and gone by now. */
    if (g->is_stream)
        exchange_stream_open(x);
    int rc = queue_push_all(a->queue, g->requests, g->n);
    if (rc == 0)
        return;
    char text[160] = "draining: this server is about to stop";
    if (rc == ERR_FULL)
        snprintf(text, sizeof(text), "the queue is full: %d requests with %lld tokens wait",
                 queue_n_waiting(a->queue), (long long)queue_waiting_tokens(a->queue));
    api_refuse(a, x, 503, NULL, text);
}

/* The first failure that stands for the group; NULL: none. What was cancelled because another
 * failed is not it. */
static const struct request *failure_of(const struct group *g)
{
    const struct request *cancelled = NULL;
    for (int32_t i = 0; i < g->n; i++) {
        const struct request *r = g->requests[i];
        if (r->outcome == OUTCOME_OK)
            continue;
        if (r->outcome != OUTCOME_CANCELLED)
            return r;
        if (!g->members[i].is_cut)
            cancelled = r;
    }
    return cancelled;
}

static void finish(struct group *g)
{
    struct api *a = g->api;
    struct exchange *x = g->exchange;
    if (exchange_is_gone(x)) {
        drop(a, x, g);
        return;
    }
    bool is_ending = atomic_load(&a->phase) == PHASE_DRAINING;
    if (is_ending)
        exchange_set_close(x);
    const struct request *failed = failure_of(g);
    if (!failed) {
        struct buf b;
        buf_init(&b);
        g->format(g, &b);
        finish_line(a, x, b.failed ? 500 : 200, b.failed ? OUTCOME_ERROR : OUTCOME_OK, g);
        if (g->is_stream && !b.failed)
            exchange_stream_end(x, &b);
        else
            api_reply(x, 200, &b);
        return;
    }
    bool is_lost = atomic_load(&a->metrics->device_lost);
    int status = failed->outcome == OUTCOME_DEADLINE   ? 504
                 : failed->outcome == OUTCOME_OVERLOAD ? 503
                 : is_lost || is_ending                ? 503
                                                       : 500;
    const char *param = failed->outcome == OUTCOME_DEADLINE ? "deadline_ms" : NULL;
    char text[sizeof(failed->error.text)];
    memcpy(text, failed->error.text, sizeof(text));
    finish_line(a, x, status, failed->outcome, g);
    api_error(a, x, status, param, text);
}
