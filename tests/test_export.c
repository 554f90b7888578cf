/* Sessions out of the pools as files, and in again, in random order on pools of any size, among
 * prompts that want the room, deletions while one is read, imports that are given up, and
 * memory that is short: what was brought in goes on with the bits of the original, the file is
 * the same each time, and nothing leaks. Plain program; TEST_BACKEND=cuda on a card. */
#include <stdlib.h>

#include "engine_world.h"
#include "log.h"
#include "short_memory.h"
#include "state_file.h"
#include "tap.h"
#include "tiny_model.h"

enum { MAX_TOKENS = 300, MAX_FILES = 4, N_TOP = 3 };

/* Sanitizers look for other faults and are slow: fewer cases there. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_WORLDS = 4, N_STEPS = 25 };
#else
enum { N_WORLDS = 25, N_STEPS = 50 };
#endif

/* A session's file, and how the session went on before. */
struct file {
    struct buf bytes; /* empty: none */
    int32_t ids[MAX_TOKENS];
    int32_t n, n_more;
    struct top_entry next[N_TOP];
    float logprobs[MAX_TOKENS];
};

struct world {
    struct fixture f;
    struct state_shape shape;
    struct rng *rng;
    void *stage, *tmp;
    struct file files[MAX_FILES];
    int32_t fail_one_in; /* allocations while a job runs; 0: none */
};

static struct {
    long long out, in, dropped, full, short_of_memory, deleted, compared, cuts;
    int differ, unsound, failed;
} count;

/* A backend whose copies are queued: they are made when they are seen to be done, which may be
 * many turns later; what must not change until then shows. Some fail with the device. */
enum { MAX_QUEUED = 64 };

static struct {
    const struct backend_ops *real;
    struct backend_ops ops;
    struct queued {
        bool is_put, is_page, is_value;
        struct gdn_dims gd;
        struct attn_dims ad;
        const struct state_pool *states;
        const struct kv_pool *kvs;
        int32_t at;
        char *stage;
    } copies[MAX_QUEUED];
    int n, marks[COPY_MARKS]; /* copies before the mark, of those in the queue */
    uint32_t n_asked;
    bool is_lost;
} late;

static int add_late(struct queued q)
{
    late.copies[late.n++] = q;
    return 0;
}

static int late_slot_get(struct backend *b, const struct gdn_dims *d,
                         const struct state_pool *p, int32_t slot, void *stage)
{
    (void)b;
    return add_late((struct queued){.gd = *d, .states = p, .at = slot, .stage = stage});
}

static int late_slot_put(struct backend *b, const struct gdn_dims *d,
                         const struct state_pool *p, int32_t slot, const void *stage)
{
    (void)b;
    return add_late((struct queued){
        .is_put = true, .gd = *d, .states = p, .at = slot, .stage = (char *)stage});
}

static int late_page_get(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                         int32_t page, bool is_value, void *stage)
{
    (void)b;
    return add_late((struct queued){
        .is_page = true, .is_value = is_value, .ad = *d, .kvs = p, .at = page, .stage = stage});
}

static int late_page_put(struct backend *b, const struct attn_dims *d, const struct kv_pool *p,
                         int32_t page, bool is_value, const void *stage)
{
    (void)b;
    return add_late((struct queued){.is_put = true,
                                    .is_page = true,
                                    .is_value = is_value,
                                    .ad = *d,
                                    .kvs = p,
                                    .at = page,
                                    .stage = (char *)stage});
}

static void make_first(struct backend *b)
{
    const struct queued *q = &late.copies[0];
    const struct backend_ops *o = late.real;
    if (q->is_page && q->is_put)
        o->page_put(b, &q->ad, q->kvs, q->at, q->is_value, q->stage);
    else if (q->is_page)
        o->page_get(b, &q->ad, q->kvs, q->at, q->is_value, q->stage);
    else if (q->is_put)
        o->slot_put(b, &q->gd, q->states, q->at, q->stage);
    else
        o->slot_get(b, &q->gd, q->states, q->at, q->stage);
    memmove(late.copies, late.copies + 1, sizeof(late.copies[0]) * (size_t)--late.n);
    for (int i = 0; i < COPY_MARKS; i++)
        late.marks[i] -= late.marks[i] > 0;
}

static void late_follow(struct backend *b)
{
    (void)b;
}

static int late_mark(struct backend *b, int32_t i)
{
    (void)b;
    late.marks[i] = late.n;
    return 0;
}

static int late_done(struct backend *b, int32_t i, bool wait)
{
    if (late.is_lost)
        return ERR_DEVICE;
    if (!wait && late.n_asked++ % 4)
        return 0;
    while (late.marks[i] > 0)
        make_first(b);
    return 1;
}

static void on_done(struct engine_job *j)
{
    j->next = j; /* it has come back */
}

static int run_job(struct world *w, struct engine_job *j)
{
    j->done = on_done;
    j->next = NULL;
    engine_post(w->f.engine, j);
    short_memory.one_in = w->fail_one_in;
    do
        engine_turn(w->f.engine);
    while (j->next != j);
    short_memory.one_in = 0;
    count.short_of_memory += j->rc == ERR_NOMEM;
    return j->rc;
}

static bool is_sound(const struct world *w)
{
    const struct engine *en = w->f.engine;
    return world_is_sound(&w->f) && en->slots.n_held == en->n_slots_coming &&
           en->pages.n_held == en->n_pages_coming;
}

/* Prompts that want room. */
static void press(struct world *w)
{
    int n_done = 0;
    int32_t ids[MAX_TOKENS], n = 1 + rng_int(w->rng, MAX_TOKENS);
    for (int32_t i = 0; i < n; i++)
        ids[i] = rng_int(w->rng, w->f.arch.vocab);
    struct request *r = fixture_request(&w->f, ids, n, LOGPROBS_NEXT, 0, &n_done);
    r->shares = rng_int(w->rng, 2);
    queue_push(w->f.queue, r);
    for (int i = 0; i < 200 && !n_done; i++)
        engine_turn(w->f.engine);
    if (!n_done) { /* what is read, or comes in, has the room */
        engine_cancel(w->f.engine, r);
        while (!n_done)
            engine_turn(w->f.engine);
    }
    request_unref(r);
}

/* Goes on behind a session, which stays. False: it could not. */
static bool go_on(struct world *w, const char *id, const struct file *f, struct request **out)
{
    struct errmsg why;
    struct session *s;
    int32_t *ids, n;
    int n_done = 0;
    if (sessions_begin(w->f.sessions, id, true, &s, &ids, &n, &why) != 0)
        return false;
    bool is_same = n == f->n && memcmp(ids, f->ids, (size_t)n * sizeof(*ids)) == 0;
    free(ids);
    struct request *r =
        fixture_request(&w->f, f->ids, f->n + f->n_more, LOGPROBS_ALL, N_TOP, &n_done);
    r->source = s;
    r->n_source = n;
    r->is_fork = true;
    r->logprobs_from = n + 1;
    fixture_run(&w->f, r);
    count.differ += !is_same;
    if (r->outcome == OUTCOME_OK && r->n_cached == f->n) {
        *out = r;
        return true;
    }
    request_unref(r); /* evicted while it waited */
    return false;
}

static void make_session(struct world *w, struct file *f, char id[SESSION_ID_MAX + 1])
{
    struct request *r;
    int n_done = 0;
    f->n = 1 + rng_int(w->rng, MAX_TOKENS - 70);
    f->n_more = 1 + rng_int(w->rng, 70);
    for (int32_t i = 0; i < MAX_TOKENS; i++)
        f->ids[i] = rng_int(w->rng, w->f.arch.vocab);
    r = fixture_request(&w->f, f->ids, f->n, LOGPROBS_NEXT, N_TOP, &n_done);
    r->keeps = sessions_new(1000000000);
    fixture_run(&w->f, r);
    count.failed += r->outcome != OUTCOME_OK;
    memcpy(id, r->kept_as, SESSION_ID_MAX + 1);
    request_unref(r);
}

/* What is between two parts on their way. */
static void meddle(struct world *w, const char *id, bool *is_deleted)
{
    struct errmsg why;
    if (rng_int(w->rng, 12) == 0)
        press(w);
    if (id && !*is_deleted && rng_int(w->rng, 12) == 0) {
        *is_deleted = sessions_delete(w->f.sessions, id, &why) == 0;
        count.deleted += *is_deleted;
    }
    count.unsound += !is_sound(w);
}

static void add_part(struct world *w, struct session *s, const struct state_part *p,
                     struct buf *out)
{
    struct engine_job j = {.kind = ENGINE_JOB_GET, .session = s, .part = *p, .stage = w->stage};
    count.failed += run_job(w, &j) != 0;
    buf_reserve(out, p->bytes);
    state_unpack(&w->shape, w->f.backend.ops, p, w->stage, out->data + out->len);
    out->len += p->bytes;
}

/* False: there is no such session. */
static bool send_out(struct world *w, const char *id, struct buf *out)
{
    struct state_info info = {.dtype = w->shape.act};
    struct session_info si;
    struct session *s;
    struct errmsg why;
    struct state_walk walk = {0};
    struct state_sum sum;
    bool is_deleted = false;
    int32_t *ids;
    if (sessions_begin_export(w->f.sessions, id, &s, &ids, &info.n_tokens, &si, &why) != 0)
        return false;
    buf_init(out);
    state_head_write(&w->shape, &info, out);
    for (;;) {
        struct state_part p = state_next(&w->shape, info.n_tokens, info.dtype, &walk);
        if (p.kind == STATE_SUM)
            break;
        if (p.kind == STATE_IDS)
            buf_add(out, ids, p.bytes);
        else
            add_part(w, s, &p, out);
        meddle(w, id, &is_deleted);
    }
    state_sum_start(&sum);
    state_sum_add(&sum, out->data, out->len);
    uint64_t of = state_sum_of(&sum);
    buf_add(out, &of, sizeof(of));
    sessions_end_export(w->f.sessions, s);
    free(ids);
    engine_turn(w->f.engine);
    count.out++;
    return true;
}

/* Brings f in; it may be given up before its end. True: id names it. */
static bool bring_in(struct world *w, const struct file *f, char id[SESSION_ID_MAX + 1])
{
    struct state_reader r;
    struct errmsg e;
    struct engine_job j = {.session = sessions_new(1000000000)};
    bool is_open = false, is_deleted = false;
    int event = 0;
    size_t at = 0, n;
    /* Some are cut short. */
    size_t len = f->bytes.len;
    if (rng_int(w->rng, 3) == 0)
        len = (size_t)(rng_u64(w->rng) % len);
    state_reader_init(&r, &w->shape, MAX_TOKENS);
    for (; at < len && event >= 0; at += n) {
        event = state_reader_take(&r, f->bytes.data + at, len - at, &n, &e);
        j.n_ids = r.info.n_tokens;
        j.part = r.part;
        j.stage = w->stage;
        if (event == STATE_HEAD) {
            j.kind = ENGINE_JOB_OPEN;
            int rc = run_job(w, &j);
            is_open = rc == 0;
            count.full += rc == ERR_FULL || rc == ERR_TOO_LARGE;
            event = is_open ? event : rc;
        } else if (event == STATE_PART && r.part.raw_bytes > 0) {
            state_pack(&w->shape, w->f.backend.ops, &r.part, r.info.dtype, r.data, w->tmp,
                       w->stage);
            j.kind = ENGINE_JOB_PUT;
            count.failed += run_job(w, &j) != 0;
            meddle(w, NULL, &is_deleted);
        }
    }
    bool is_whole = event >= 0 && state_reader_end(&r, &e) == 0;
    count.cuts += !is_whole && is_open;
    count.unsound += is_whole != (is_open && len == f->bytes.len);
    if (is_whole) {
        j.kind = ENGINE_JOB_KEEP;
        j.ids = r.ids;
        j.terms = (struct session_terms){.is_pinned = rng_int(w->rng, 2), .has_pinning = true};
    } else {
        j.kind = ENGINE_JOB_DROP;
        count.dropped++;
    }
    int rc = run_job(w, &j);
    if (is_whole && rc == ERR_NOMEM) {
        is_whole = false;
        j.kind = ENGINE_JOB_DROP;
        count.dropped++;
        rc = run_job(w, &j);
    }
    count.failed += rc != 0;
    memcpy(id, j.session->id, SESSION_ID_MAX + 1);
    sessions_unref(w->f.sessions, j.session);
    state_reader_fini(&r);
    count.in += is_whole;
    return is_whole;
}

/* A new session, as a file, twice the same, with how it goes on. */
static void make_file(struct world *w, struct file *f)
{
    char id[SESSION_ID_MAX + 1];
    struct request *r;
    struct buf again;
    make_session(w, f, id);
    if (!id[0] || !go_on(w, id, f, &r))
        return;
    memcpy(f->next, r->next_top, sizeof(f->next));
    memcpy(f->logprobs, r->prompt_logprobs, (size_t)r->n_prompt * sizeof(float));
    request_unref(r);
    if (!send_out(w, id, &f->bytes))
        return;
    if (send_out(w, id, &again)) {
        count.differ +=
            again.len != f->bytes.len || memcmp(again.data, f->bytes.data, again.len) != 0;
        buf_fini(&again);
    }
}

static void use_file(struct world *w, struct file *f)
{
    char id[SESSION_ID_MAX + 1];
    struct request *r;
    struct buf again;
    if (!bring_in(w, f, id))
        return;
    if (go_on(w, id, f, &r)) {
        size_t from = (size_t)f->n + 1, n = (size_t)(f->n + f->n_more) - from;
        count.compared++;
        count.differ +=
            memcmp(f->next, r->next_top, sizeof(f->next)) != 0 ||
            memcmp(f->logprobs + from, r->prompt_logprobs + from, n * sizeof(float)) != 0;
        request_unref(r);
    }
    if (rng_int(w->rng, 3) == 0 && send_out(w, id, &again)) {
        count.differ +=
            again.len != f->bytes.len || memcmp(again.data, f->bytes.data, again.len) != 0;
        buf_fini(&again);
    }
    if (rng_int(w->rng, 4) == 0)
        buf_fini(&f->bytes);
}

static void step(struct world *w)
{
    struct file *f = &w->files[rng_int(w->rng, MAX_FILES)];
    if (rng_int(w->rng, 6) == 0)
        press(w);
    else if (f->bytes.len == 0)
        make_file(w, f);
    else
        use_file(w, f);
    engine_turn(w->f.engine);
    count.unsound += !is_sound(w) || w->f.engine->n_slots_coming != 0;
}

static void make_late(struct world *w)
{
    late.real = w->f.backend.ops;
    late.ops = *late.real;
    late.ops.slot_get = late_slot_get;
    late.ops.slot_put = late_slot_put;
    late.ops.page_get = late_page_get;
    late.ops.page_put = late_page_put;
    late.ops.copies_follow = late_follow;
    late.ops.copies_mark = late_mark;
    late.ops.copies_done = late_done;
    w->f.backend.ops = &late.ops;
}

static void run_world(const char *dir, struct rng *rng, int i_world)
{
    struct world w = {.rng = rng};
    /* CUDA's own calls are not to fail. */
    if (i_world % 4 == 3 && strcmp(fixture_backend(), "cpu") == 0)
        w.fail_one_in = 4;
    world_open_random(&w.f, dir, rng, MAX_TOKENS, 2 + rng_int(rng, 3));
    w.shape = model_state_shape(w.f.model);
    w.shape.part_pages = 1 + rng_int(rng, 4);
    bool is_late = w.f.backend.ops == &backend_cpu_ops && rng_int(rng, 2);
    if (is_late)
        make_late(&w);
    w.stage = model_stage_alloc(w.f.model, state_max_raw(&w.shape));
    w.tmp = malloc(state_max_bytes(&w.shape, w.shape.act));
    for (int i = 0; i < MAX_FILES; i++)
        buf_init(&w.files[i].bytes);
    for (int i = 0; i < N_STEPS; i++)
        step(&w);
    for (int i = 0; i < MAX_FILES; i++)
        buf_fini(&w.files[i].bytes);
    model_stage_free(w.f.model, w.stage);
    free(w.tmp);
    if (is_late)
        w.f.backend.ops = late.real;
    fixture_close(&w.f);
}

/* With several jobs posted at once the device fails: each comes back, with words, and so do
 * those that are posted afterwards, and after the end. */
static void test_lost(const char *dir, struct rng *rng)
{
    enum { N = 2 * COPY_MARKS };
    struct world w = {.rng = rng};
    struct model_options o = {.max_step_tokens = 128, .state_slots = 3};
    struct engine_config c = {.max_waiting = 4};
    struct engine_job jobs[N];
    struct file f;
    char id[SESSION_ID_MAX + 1];
    int32_t *ids, n, n_back = 0, n_good = 0;
    struct session_info info;
    struct session *s;
    struct errmsg why;
    world_open_sessions(&w.f, dir, &o, &c);
    make_late(&w);
    w.shape = model_state_shape(w.f.model);
    w.stage = malloc(state_max_raw(&w.shape));
    make_session(&w, &f, id);
    int rc = sessions_begin_export(w.f.sessions, id, &s, &ids, &n, &info, &why);
    const struct state_part slot = {.kind = STATE_SLOT, .raw_bytes = w.shape.slot_bytes};
    for (int i = 0; i < N && rc == 0; i++) {
        jobs[i] = (struct engine_job){.kind = ENGINE_JOB_GET,
                                      .session = s,
                                      .part = slot,
                                      .stage = w.stage,
                                      .done = on_done,
                                      .rc = 1};
        engine_post(w.f.engine, &jobs[i]);
    }
    for (int i = 0; i < 10; i++)
        engine_turn(w.f.engine);
    late.is_lost = true;
    for (int i = 0; i < 100; i++)
        engine_turn(w.f.engine);
    for (int i = 0; i < N; i++) {
        n_back += jobs[i].next == &jobs[i];
        n_good += jobs[i].rc == 0;
        count.failed += jobs[i].rc != 0 && jobs[i].rc != ERR_DEVICE;
    }
    CHECK(rc == 0 && n_back == N && n_good > 0 && n_good < N && w.f.engine->is_lost,
          "a device that fails: %d of %d copies came back, %d good", n_back, N, n_good);
    jobs[0].next = NULL;
    engine_post(w.f.engine, &jobs[0]);
    engine_turn(w.f.engine);
    CHECK(jobs[0].next == &jobs[0] && jobs[0].rc == ERR_DEVICE, "another one: %d", jobs[0].rc);
    engine_stop(w.f.engine);
    jobs[0].next = NULL;
    engine_post(w.f.engine, &jobs[0]);
    CHECK(jobs[0].next == &jobs[0] && jobs[0].rc == ERR_STOPPED, "after the end: %d",
          jobs[0].rc);
    sessions_end_export(w.f.sessions, s);
    free(ids);
    free(w.stage);
    late.is_lost = false;
    w.f.backend.ops = late.real;
    fixture_close(&w.f);
}

/* test_export [seed] [worlds] */
int main(int argc, char **argv)
{
    char dir[64];
    struct rng rng = {argc > 1 ? strtoull(argv[1], NULL, 10) : 20261130};
    int n_worlds = argc > 2 ? atoi(argv[2]) : N_WORLDS;
    tiny_make(dir);
    log_set_level(-1);
    printf("# seed %llu\n", (unsigned long long)rng.s);
    for (int i = 0; i < n_worlds; i++)
        run_world(dir, &rng, i);
    if (strcmp(fixture_backend(), "cpu") == 0)
        test_lost(dir, &rng);
    tiny_remove(dir);
    printf("# %lld out, %lld in, %lld given up (%lld in the middle), %lld without room, %lld "
           "deleted while they were read, %lld without memory\n",
           count.out, count.in, count.dropped, count.cuts, count.full, count.deleted,
           count.short_of_memory);
    CHECK(count.differ == 0,
          "%lld sessions that were brought in go on with the same bits; %d differ",
          count.compared, count.differ);
    CHECK(count.unsound == 0 && count.failed == 0, "nothing leaks or fails (%d, %d)",
          count.unsound, count.failed);
    CHECK(count.compared > 0 && count.cuts > 0 && count.full > 0 && count.deleted > 0,
          "all of it happened");
    CHECK(count.short_of_memory > 0 || strcmp(fixture_backend(), "cpu") != 0,
          "memory was short for %lld jobs", count.short_of_memory);
    return tap_done();
}
