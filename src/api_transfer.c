#include "api_transfer.h"

#include <string.h>

#include "http.h"
#include "log.h"

int transfers_init(struct transfers *t, struct model *m, struct engine *en,
                   const struct state_shape *z, const struct backend_ops *ops,
                   int32_t max_tokens)
{
    const struct state_info largest = {.n_tokens = max_tokens, .dtype = DTYPE_F32};
    *t = (struct transfers){
        .shape = *z, .ops = ops, .model = m, .engine = en, .max_tokens = max_tokens};
    t->max_file_bytes = 8 + STATE_MAX_HEAD + state_data_bytes(z, &largest);
    pthread_mutex_init(&t->lock, NULL);
    for (int i = 0; i < MAX_TRANSFERS * TRANSFER_STAGES; i++) {
        void **stage = &t->rooms[i / TRANSFER_STAGES].stages[i % TRANSFER_STAGES];
        *stage = model_stage_alloc(m, state_max_raw(z));
        if (!*stage)
            return ERR_NOMEM;
    }
    return 0;
}

void transfers_fini(struct transfers *t)
{
    if (!t->model)
        return;
    for (int i = 0; i < MAX_TRANSFERS * TRANSFER_STAGES; i++)
        if (t->rooms[i / TRANSFER_STAGES].stages[i % TRANSFER_STAGES])
            model_stage_free(t->model,
                             t->rooms[i / TRANSFER_STAGES].stages[i % TRANSFER_STAGES]);
    pthread_mutex_destroy(&t->lock);
}

struct transfer_room *transfers_take(struct transfers *t)
{
    struct transfer_room *found = NULL;
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < MAX_TRANSFERS && !found; i++)
        if (!t->rooms[i].is_taken)
            found = &t->rooms[i];
    if (found)
        found->is_taken = true;
    pthread_mutex_unlock(&t->lock);
    return found;
}

void transfers_give(struct transfers *t, struct transfer_room *r)
{
    if (!r)
        return;
    pthread_mutex_lock(&t->lock);
    r->is_taken = false;
    pthread_mutex_unlock(&t->lock);
}

/* Engine thread, or the worker that asked. */
static void on_done(struct engine_job *j)
{
    struct transfer_copy *c = (struct transfer_copy *)j;
    struct exchange *x = c->exchange;
    /* From here on c, and what it is part of, may be gone; x is held. */
    atomic_store(&c->is_back, true);
    exchange_notice(x);
    exchange_unref(x);
}

void transfer_ask(struct transfers *t, struct transfer_copy *c)
{
    c->job.done = on_done;
    c->is_out = true;
    atomic_store(&c->is_back, false);
    exchange_ref(c->exchange);
    engine_post(t->engine, &c->job);
}

bool transfer_is_here(struct transfer_copy *c, int *rc)
{
    *rc = 0;
    if (!c->is_out)
        return true;
    if (!atomic_load(&c->is_back))
        return false;
    c->is_out = false;
    *rc = c->job.rc;
    return true;
}

void transfer_finish(struct metrics *m, const struct exchange *x, bool is_in, int status,
                     int32_t n_tokens, int64_t n_bytes)
{
    atomic_fetch_add(status == 200 ? &m->files[is_in] : &m->files_failed[is_in], 1);
    atomic_fetch_add(&m->file_bytes[is_in], n_bytes);
    log_info("id=%s call=session_%s status=%d tokens=%d bytes=%lld ms=%.1f", exchange_id(x),
             is_in ? "import" : "export", status, n_tokens, (long long)n_bytes,
             (double)(request_now_us() - exchange_arrival_us(x)) / 1e3);
}
