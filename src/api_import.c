/* POST /v1/sessions: a session from a file, brought into the pools as it comes.
 *
 * Its slot and pages are taken when the header was read, and it can be found once the checksum
 * at the file's end was right: until then a fault, a hang-up or a stop gives all of it back. */
#include <stdlib.h>
#include <string.h>

#include "api_priv.h"
#include "api_transfer.h"

enum { INTAKE_BYTES = 1 << 20, CHUNK_BYTES = 1 << 18 };

enum phase { READING, OPENING, KEEPING, DROPPING };

struct import {
    struct api *api;
    struct exchange *x;
    struct session *session;
    struct transfer_room *room;
    struct session_terms terms;
    struct state_reader reader;
    char *chunk; /* [CHUNK_BYTES], of which [at, n) are not taken */
    size_t at, n;
    void *tmp; /* for state_pack, when dtypes differ */
    enum phase phase;
    struct transfer_copy copies[TRANSFER_STAGES]; /* to the pools */
    struct transfer_copy step;                    /* the other jobs */
    int32_t n_put;
    bool is_open, has_part,
        is_checked; /* slot and pages; a part to be put; the sum was right */
    bool is_over;   /* the body */
    int status;     /* of the refusal; 0: none; -1: nobody is there */
    struct errmsg why;
    int64_t n_bytes;
    atomic_bool is_gone;
};

static void free_import(void *call)
{
    struct import *t = call;
    sessions_unref(t->api->sessions, t->session);
    transfers_give(t->api->transfers, t->room);
    state_reader_fini(&t->reader);
    free(t->chunk);
    free(t->tmp);
    free(t);
}

static void on_hangup(void *call)
{
    struct import *t = call;
    atomic_store(&t->is_gone, true);
    exchange_notice(t->x);
}

static void fail(struct import *t, int rc)
{
    static const char *const words[] = {[-ERR_NOMEM] = "memory is short",
                                        [-ERR_DEVICE] = "device lost",
                                        [-ERR_STOPPED] =
                                            "draining: this server is about to stop"};
    if (t->status != 0)
        return;
    t->status = rc == ERR_NOMEM                                           ? 500
                : rc == ERR_FULL || rc == ERR_DEVICE || rc == ERR_STOPPED ? 503
                                                                          : 400;
    if (rc == ERR_NOMEM || rc == ERR_DEVICE || rc == ERR_STOPPED)
        errmsg_set(&t->why, rc, "%s", words[-rc]);
}

/* ---- what comes ---- */

static void ask(struct import *t, struct transfer_copy *c, enum engine_job_kind kind)
{
    c->exchange = t->x;
    c->job.kind = kind;
    c->job.session = t->session;
    transfer_ask(t->api->transfers, c);
}

/* The header was read. */
static void open_session(struct import *t)
{
    const struct state_shape *z = &t->api->transfers->shape;
    if (t->reader.info.dtype != z->act) {
        t->tmp = malloc(state_max_bytes(z, z->act));
        if (!t->tmp) {
            fail(t, ERR_NOMEM);
            return;
        }
    }
    t->phase = OPENING;
    t->step.job = (struct engine_job){.n_ids = t->reader.info.n_tokens};
    ask(t, &t->step, ENGINE_JOB_OPEN);
}

/* The part that is complete goes to the pools. False: no stage is free. */
static bool put_part(struct import *t)
{
    struct transfers *all = t->api->transfers;
    const struct state_part *p = &t->reader.part;
    int32_t i = t->n_put % TRANSFER_STAGES;
    int rc = 0;
    t->has_part = p->raw_bytes > 0;
    if (!t->has_part)
        return true;
    if (!transfer_is_here(&t->copies[i], &rc))
        return false;
    t->has_part = false;
    if (rc != 0) {
        fail(t, rc);
        return true;
    }
    state_pack(&all->shape, all->ops, p, t->reader.info.dtype, t->reader.data, t->tmp,
               t->room->stages[i]);
    t->copies[i].job = (struct engine_job){.part = *p, .stage = t->room->stages[i]};
    ask(t, &t->copies[i], ENGINE_JOB_PUT);
    t->n_put++;
    return true;
}

/* Bytes to the reader. False: more have to come, or something has to end first. */
static bool read_some(struct import *t)
{
    size_t n_taken;
    if (t->has_part && !put_part(t))
        return false;
    if (t->at == t->n && !t->is_over) {
        t->n = exchange_intake_read(t->x, t->chunk, CHUNK_BYTES, &t->is_over);
        t->at = 0;
        t->n_bytes += (int64_t)t->n;
    }
    if (t->at == t->n) {
        int rc = t->is_over ? state_reader_end(&t->reader, &t->why) : 0;
        if (rc != 0)
            fail(t, rc);
        return false;
    }
    int rc = state_reader_take(&t->reader, t->chunk + t->at, t->n - t->at, &n_taken, &t->why);
    t->at += n_taken;
    if (rc < 0)
        fail(t, rc);
    else if (rc == STATE_HEAD)
        open_session(t);
    else if (rc == STATE_DONE)
        t->is_checked = true;
    else if (rc == STATE_PART)
        put_part(t);
    return rc >= 0 && t->phase == READING && t->status == 0;
}

/* ---- its end ---- */

static bool are_puts_here(struct import *t)
{
    bool all = true;
    for (int i = 0; i < TRANSFER_STAGES; i++) {
        int rc;
        if (!transfer_is_here(&t->copies[i], &rc))
            all = false;
        else if (rc != 0)
            fail(t, rc);
    }
    return all;
}

static void keep_session(struct import *t)
{
    t->phase = KEEPING;
    t->step.job = (struct engine_job){
        .ids = t->reader.ids, .n_ids = t->reader.info.n_tokens, .terms = t->terms};
    ask(t, &t->step, ENGINE_JOB_KEEP);
}

/* The job other than a copy has come back. */
static void after_step(struct import *t, int rc)
{
    enum phase was = t->phase;
    t->phase = READING;
    if (was == OPENING && rc == 0)
        t->is_open = true;
    if (was == DROPPING || (was == KEEPING && rc == 0))
        t->is_open = false;
    if (was == DROPPING || rc == 0)
        return;
    if (rc == ERR_FULL)
        errmsg_set(&t->why, rc,
                   "the pools have no room for a session of %d tokens: requests and pinned "
                   "sessions hold it",
                   t->reader.info.n_tokens);
    if (rc == ERR_TOO_LARGE)
        errmsg_set(&t->why, rc, "a session of %d tokens is larger than the pools",
                   t->reader.info.n_tokens);
    fail(t, rc);
}

static void answer(struct import *t)
{
    struct api *a = t->api;
    struct exchange *x = t->x;
    struct session_info info;
    struct errmsg why = t->why;
    struct buf b;
    buf_init(&b);
    if (t->status == 0 && sessions_get(a->sessions, t->session->id, &info, &why) != 0)
        t->status = 503; /* evicted already */
    transfer_finish(a->metrics, x, true,
                    t->status < 0 ? 0
                    : t->status   ? t->status
                                  : 200,
                    t->reader.info.n_tokens, t->n_bytes);
    if (t->status < 0) {
        api_reply(x, 200, &b); /* to nobody */
        return;
    }
    if (t->status != 0) {
        api_error(a, x, t->status, t->status == 400 ? "file" : NULL, why.text);
        return;
    }
    enum dtype from = t->reader.info.dtype, to = a->transfers->shape.act;
    api_add_session(&b, &info);
    b.len--; /* its last brace */
    if (from == to)
        buf_adds(&b, ", \"converted\": null}");
    else
        buf_printf(&b, ", \"converted\": \"%s to %s\"}", state_dtype_name(from),
                   state_dtype_name(to));
    api_reply(x, 200, &b);
}

static bool look(struct exchange *x)
{
    struct import *t = exchange_call(x);
    int rc;
    if (atomic_load(&t->is_gone) && t->status == 0)
        t->status = -1;
    if (!transfer_is_here(&t->step, &rc))
        return true;
    if (t->phase != READING)
        after_step(t, rc);
    while (t->status == 0 && t->phase == READING && t->is_open == t->reader.has_head &&
           !(t->is_checked && t->is_over && t->at == t->n) && read_some(t))
        ;
    if (t->phase != READING || !are_puts_here(t))
        return true;
    if (t->status != 0 && t->is_open) {
        t->phase = DROPPING;
        t->step.job = (struct engine_job){.n_ids = 0};
        ask(t, &t->step, ENGINE_JOB_DROP);
        return true;
    }
    bool is_kept = t->status == 0 && t->is_checked && !t->is_open;
    if (t->status == 0 && t->is_open && t->is_checked && t->is_over && t->at == t->n) {
        keep_session(t);
        return true;
    }
    if (t->status == 0 && !is_kept)
        return true;
    answer(t);
    return false;
}

/* ---- the call ---- */

static bool is_word(const char *at, size_t len, const char *word)
{
    return len == strlen(word) && memcmp(at, word, len) == 0;
}

/* ttl_s and pinned of the query; 0 or a status, and which of them is at fault. */
static int read_terms(const char *query, struct session_terms *terms, const char **param,
                      struct errmsg *e)
{
    for (const char *p = query; p && *p; p += strcspn(p, "&"), p += *p == '&') {
        size_t len = strcspn(p, "&");
        if (len >= 6 && memcmp(p, "ttl_s=", 6) == 0) {
            int64_t n = 0;
            size_t n_digits = strspn(p + 6, "0123456789");
            for (size_t i = 0; i < n_digits && n <= SESSION_MAX_TTL_S; i++)
                n = n * 10 + (p[6 + i] - '0');
            terms->ttl_us = n * 1000000;
            *param = "ttl_s";
            if (n_digits == 0 || n_digits != len - 6 || n < 1 || n > SESSION_MAX_TTL_S)
                return errmsg_set(e, 400, "ttl_s is no number of seconds; 1 to %d is accepted",
                                  SESSION_MAX_TTL_S);
        } else if (len >= 7 && memcmp(p, "pinned=", 7) == 0) {
            terms->has_pinning = true;
            *param = "pinned";
            terms->is_pinned = is_word(p + 7, len - 7, "true");
            if (!terms->is_pinned && !is_word(p + 7, len - 7, "false"))
                return errmsg_set(e, 400,
                                  "pinned is neither true nor false; these are accepted");
        }
    }
    return 0;
}

static int prepare(struct import *t, const char **param, struct errmsg *why)
{
    struct api *a = t->api;
    int status = read_terms(exchange_query(t->x), &t->terms, param, why);
    if (status != 0)
        return status;
    if (!t->terms.ttl_us)
        t->terms.ttl_us = (int64_t)a->session_ttl_s * 1000000;
    t->room = transfers_take(a->transfers);
    if (!t->room) {
        errmsg_set(why, ERR_FULL,
                   "%d sessions are on their way in or out; come back after them",
                   MAX_TRANSFERS);
        return 503;
    }
    t->session = sessions_new(t->terms.ttl_us);
    t->chunk = malloc(CHUNK_BYTES);
    if (t->session && t->chunk && exchange_intake_open(t->x, INTAKE_BYTES) == 0)
        return 0;
    errmsg_set(why, ERR_NOMEM, "memory is short");
    return 500;
}

void api_session_import(struct api *a, struct exchange *x)
{
    struct errmsg why;
    if (!exchange_is_intake(x)) { /* the model was ready between its first line and here */
        api_error(a, x, 503, NULL,
                  "the model was being loaded when the file began; send it again");
        return;
    }
    struct import *t = calloc(1, sizeof(*t));
    if (!t) {
        api_error(a, x, 500, NULL, "memory is short");
        return;
    }
    t->api = a;
    t->x = x;
    state_reader_init(&t->reader, &a->transfers->shape, a->transfers->max_tokens);
    const char *param = NULL;
    int status = prepare(t, &param, &why);
    if (status != 0) {
        free_import(t);
        api_error(a, x, status, status == 400 ? param : NULL, why.text);
        return;
    }
    exchange_start_looks(x, look, t, on_hangup, free_import);
}

int64_t api_intake(void *arg, const struct exchange *x)
{
    const struct api *a = arg;
    bool is_file = strcmp(exchange_method(x), "POST") == 0 &&
                   strcmp(exchange_path(x), "/v1/sessions") == 0;
    return is_file && atomic_load(&a->phase) != PHASE_LOADING ? a->transfers->max_file_bytes
                                                              : 0;
}
