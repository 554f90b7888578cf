/* GET /v1/sessions/ID/state: a session as one file, sent as it is read. */
#include <stdlib.h>
#include <string.h>

#include "api_priv.h"
#include "api_transfer.h"

static const char file_type[] = "application/octet-stream";

struct exporting {
    struct api *api;
    struct exchange *x;
    struct session *session;
    struct transfer_room *room;
    int32_t *ids; /* [info.n_tokens] */
    struct state_info info;
    struct state_sum sum;
    struct state_walk asked, sent; /* parts that the engine was asked for; that were written */
    struct transfer_copy copies[TRANSFER_STAGES];
    int32_t n_asked, n_sent; /* of those in pools */
    bool is_all_asked, has_begun;
    int failed; /* enum err; 0: it is not */
    int64_t n_bytes;
    atomic_bool is_gone;
};

/* With the call: no copy is out. */
static void free_export(void *call)
{
    struct exporting *t = call;
    if (t->session) {
        sessions_end_export(t->api->sessions, t->session);
        queue_wake(t->api->queue);
    }
    transfers_give(t->api->transfers, t->room);
    free(t->ids);
    free(t);
}

static void on_hangup(void *call)
{
    struct exporting *t = call;
    atomic_store(&t->is_gone, true);
    exchange_notice(t->x);
}

/* Asks for parts while there are stages free. */
static void ask(struct exporting *t)
{
    const struct state_shape *z = &t->api->transfers->shape;
    while (!t->is_all_asked && t->n_asked - t->n_sent < TRANSFER_STAGES) {
        struct state_part p = state_next(z, t->info.n_tokens, t->info.dtype, &t->asked);
        t->is_all_asked = p.kind == STATE_SUM;
        if (p.raw_bytes == 0)
            continue;
        int32_t i = t->n_asked++ % TRANSFER_STAGES;
        t->copies[i].exchange = t->x;
        t->copies[i].job = (struct engine_job){.kind = ENGINE_JOB_GET,
                                               .session = t->session,
                                               .part = p,
                                               .stage = t->room->stages[i]};
        transfer_ask(t->api->transfers, &t->copies[i]);
    }
}

/* Takes the bytes. */
static void send_bytes(struct exporting *t, struct buf *b)
{
    state_sum_add(&t->sum, b->data, b->len);
    t->n_bytes += (int64_t)b->len;
    if (!exchange_stream_write(t->x, b))
        t->failed = ERR_STOPPED;
}

static void begin(struct exporting *t)
{
    struct transfers *all = t->api->transfers;
    struct buf b;
    buf_init(&b);
    state_head_write(&all->shape, &t->info, &b);
    exchange_file_open(t->x, file_type,
                       (int64_t)b.len + state_data_bytes(&all->shape, &t->info));
    send_bytes(t, &b);
    t->has_begun = true;
}

/* The next part, as far as it is here: 1: it was sent; 0: it is not here; negative: an
 * error. */
static int send_next(struct exporting *t, bool *is_last)
{
    struct transfers *all = t->api->transfers;
    struct state_walk after = t->sent;
    struct state_part p = state_next(&all->shape, t->info.n_tokens, t->info.dtype, &after);
    struct transfer_copy *c = &t->copies[t->n_sent % TRANSFER_STAGES];
    struct buf b;
    int rc = 0;
    if (p.raw_bytes > 0 && !transfer_is_here(c, &rc))
        return 0;
    if (rc != 0)
        return rc;
    buf_init(&b);
    if (buf_reserve(&b, p.bytes) != 0)
        return ERR_NOMEM;
    if (p.kind == STATE_IDS) {
        buf_add(&b, t->ids, p.bytes);
    } else if (p.kind == STATE_SUM) {
        uint64_t sum = state_sum_of(&t->sum);
        buf_add(&b, &sum, sizeof(sum));
    } else {
        state_unpack(&all->shape, all->ops, &p, t->room->stages[t->n_sent % TRANSFER_STAGES],
                     b.data);
        b.len = p.bytes;
        t->n_sent++;
    }
    t->sent = after;
    *is_last = p.kind == STATE_SUM;
    send_bytes(t, &b);
    return 1;
}

/* Ends the exchange once no copy is out; whether it did not. */
static bool end(struct exporting *t)
{
    struct exchange *x = t->x;
    struct api *a = t->api;
    int ignored, rc = t->failed;
    for (int i = 0; i < TRANSFER_STAGES; i++)
        if (!transfer_is_here(&t->copies[i], &ignored))
            return true;
    transfer_finish(a->metrics, x, false,
                    rc == 0        ? 200
                    : t->has_begun ? 0
                                   : 503,
                    t->info.n_tokens, t->n_bytes);
    if (t->has_begun) {
        struct buf none;
        buf_init(&none);
        exchange_stream_end(x, &none);
    } else {
        api_error(a, x, rc == ERR_NOMEM ? 500 : 503, NULL,
                  rc == ERR_NOMEM    ? "memory is short"
                  : rc == ERR_DEVICE ? "device lost"
                                     : "draining: this server is about to stop");
    }
    return false;
}

/* The status goes out with the first part, which may fail. False: it is not here. */
static bool try_begin(struct exporting *t)
{
    ask(t);
    if (!transfer_is_here(&t->copies[0], &t->failed))
        return false;
    if (!t->failed)
        begin(t);
    return true;
}

static bool look(struct exchange *x)
{
    struct exporting *t = exchange_call(x);
    bool is_last = false;
    if (atomic_load(&t->is_gone) && !t->failed)
        t->failed = ERR_STOPPED;
    if (!t->failed && !t->has_begun && !try_begin(t))
        return true;
    while (!t->failed && !is_last) {
        ask(t);
        if (exchange_stream_waiting(x) >= HTTP_FILE_LOW_BYTES)
            return true;
        int rc = send_next(t, &is_last);
        if (rc == 0)
            return true;
        if (rc < 0)
            t->failed = rc;
    }
    return end(t);
}

/* The session's name without what follows; NULL: memory is short. */
static char *name_of(const struct exchange *x)
{
    const char *from = exchange_path(x) + strlen("/v1/sessions/");
    return strndup(from, strlen(from) - strlen("/state"));
}

/* Takes the room, marks the session. Returns the status of what failed, or 0. */
static int prepare(struct exporting *t, struct errmsg *why)
{
    struct api *a = t->api;
    struct session_info info;
    char *id = name_of(t->x);
    if (!id) {
        errmsg_set(why, ERR_NOMEM, "memory is short");
        return 500;
    }
    int rc = sessions_begin_export(a->sessions, id, &t->session, &t->ids, &t->info.n_tokens,
                                   &info, why);
    free(id);
    if (rc != 0) {
        t->session = NULL;
        return api_status_of(rc);
    }
    t->info.dtype = a->transfers->shape.act;
    t->room = transfers_take(a->transfers);
    if (t->room)
        return 0;
    errmsg_set(why, ERR_FULL, "%d sessions are on their way in or out; come back after them",
               MAX_TRANSFERS);
    return 503;
}

/* HEAD: the length alone. */
static void answer_head(struct api *a, struct exchange *x)
{
    const struct state_shape *z = &a->transfers->shape;
    struct state_info f = {.dtype = z->act};
    struct session_info info;
    struct errmsg why = {"memory is short"};
    struct buf b;
    char *id = name_of(x);
    int rc = id ? sessions_get(a->sessions, id, &info, &why) : ERR_NOMEM;
    free(id);
    if (rc != 0) {
        api_error(a, x, api_status_of(rc), "session", why.text);
        return;
    }
    f.n_tokens = info.n_tokens;
    buf_init(&b);
    state_head_write(z, &f, &b);
    exchange_file_open(x, file_type, (int64_t)b.len + state_data_bytes(z, &f));
    exchange_stream_end(x, &b); /* of which nothing is sent */
}

void api_session_export(struct api *a, struct exchange *x)
{
    struct errmsg why;
    if (strcmp(exchange_method(x), "HEAD") == 0) {
        answer_head(a, x);
        return;
    }
    struct exporting *t = calloc(1, sizeof(*t));
    if (!t) {
        api_error(a, x, 500, NULL, "memory is short");
        return;
    }
    t->api = a;
    t->x = x;
    state_sum_start(&t->sum);
    int status = prepare(t, &why);
    if (status != 0) {
        free_export(t);
        api_error(a, x, status, status == 503 ? NULL : "session", why.text);
        return;
    }
    exchange_start_looks(x, look, t, on_hangup, free_export);
}
