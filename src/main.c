/* prefilld: the daemon's life. Reads options, opens things in order, waits for a signal, closes
 * them in reverse. Only this file exits. */
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "api.h"
#include "api_kv.h"
#include "api_transfer.h"
#include "conf.h"
#include "config.h"
#include "engine.h"
#include "log.h"
#include "model.h"
#include "model_print.h"
#include "notify.h"
#include "session_dir.h"
#include "sizing.h"
#include "utf8.h"
#include "work.h"

enum {
    EXIT_DEVICE_LOST = 70,
    EXIT_BAD_CONFIG = 78,
    EXTEND_US = 60 * 1000000 /* what the service manager is asked for, while something moves */
};

/* Everything that lives as long as the daemon, in the order it is opened. */
struct server {
    int argc;
    char **argv;
    struct conf conf;
    struct notify notify;
    struct notify_sockets sockets;
    struct metrics metrics;
    struct arch arch;
    struct st_set *set; /* NULL: dummy weights */
    struct tokenizer *tokenizer;
    struct backend backend;
    struct model_sizes sizes;
    struct work *work;
    struct http *http;
    struct model *model;
    struct queue *queue;
    struct engine *engine;
    struct sessions *sessions;
    struct transfers transfers;
    struct session_dir session_dir; /* of conf.session_dir */
    struct api api;
    char model_id[PATH_MAX];
    int64_t progress_logged_us;
};

/* ---- signals ---- */

/* Before the first thread, which inherits it; until then a signal simply ends the program. */
static void signals_block(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* the write fails instead, and is logged */
}

/* Waits up to wait_ms for SIGTERM, SIGINT or, when asked for, SIGHUP; 0 when none came. */
static int signals_wait(int32_t wait_ms, bool with_hup)
{
    sigset_t set;
    struct timespec ts = {.tv_sec = wait_ms / 1000, .tv_nsec = (wait_ms % 1000) * 1000000L};
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    if (with_hup)
        sigaddset(&set, SIGHUP);
    int sig = sigtimedwait(&set, NULL, &ts);
    return sig > 0 ? sig : 0;
}

/* ---- before the socket: what can be refused without reading weights ---- */

/* The id stands in every answer and in the `ready` line. */
static int server_name(struct server *s, struct errmsg *e)
{
    char real[PATH_MAX];
    const char *path = realpath(s->conf.model, real) ? real : s->conf.model;
    const char *slash = strrchr(path, '/');
    const char *last = slash && slash[1] ? slash + 1 : path;
    const char *name = s->conf.served_name ? s->conf.served_name : last;
    bool is_text = utf8_is_valid(name, strlen(name), NULL);
    for (const char *p = name; *p; p++)
        is_text &= (unsigned char)*p >= 0x20 && *p != 0x7f;
    if (!is_text)
        return errmsg_set(e, ERR_INVALID,
                          "%s: found control characters or bytes that are not UTF-8, "
                          "accepted: UTF-8 text without them%s",
                          s->conf.served_name ? "served-name" : "model: its last component",
                          s->conf.served_name ? "" : "; or give --served-name");
    snprintf(s->model_id, sizeof(s->model_id), "%s", name);
    return 0;
}

static int server_open_tokenizer(struct server *s, struct errmsg *e)
{
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/tokenizer.json", s->conf.model);
    if (s->conf.load == CONF_LOAD_DUMMY && access(path, R_OK) != 0) {
        log_warn("event=no_tokenizer text prompts are refused; ids are served");
        return 0;
    }
    return tokenizer_load(path, &s->tokenizer, e);
}

static int server_open_checkpoint(struct server *s, struct errmsg *e)
{
    int rc = arch_read(s->conf.model, &s->arch, e);
    if (rc == 0 && s->conf.load == CONF_LOAD_FILE) {
        rc = st_open_dir(s->conf.model, &s->set, e);
        if (rc == 0)
            rc = weights_check(&s->arch, s->set, e);
    }
    if (rc == 0)
        rc = server_open_tokenizer(s, e);
    if (rc == 0 && s->tokenizer && tokenizer_size(s->tokenizer) > s->arch.vocab)
        rc = errmsg_set(e, ERR_INVALID,
                        "tokenizer.json has ids up to %d, but config.json's vocab_size is %d",
                        tokenizer_size(s->tokenizer) - 1, s->arch.vocab);
    return rc;
}

static bool is_cuda(const struct server *s)
{
    return strcmp(s->backend.ops->name, "cuda") == 0;
}

static int server_open_backend(struct server *s, struct errmsg *e)
{
    const struct conf *c = &s->conf;
    s->backend.ops = backend_find(c->backend, e);
    if (!s->backend.ops)
        return ERR_UNSUPPORTED;
    signals_block();
    int rc = s->backend.ops->open(&s->backend, is_cuda(s) ? c->cuda_device : c->cpu_threads, e);
    s->backend.cache_dir = c->cache_dir;
    return rc;
}

static int server_size(struct server *s, struct errmsg *e)
{
    const struct conf *c = &s->conf;
    struct model_options o = {.max_step_tokens = c->max_step_tokens,
                              .max_seqs = c->max_seqs,
                              .page_tokens = c->page_tokens,
                              .max_prompt_tokens = c->max_prompt_tokens,
                              .state_slots = c->state_slots,
                              .kv_tokens = c->kv_tokens};
    if (is_cuda(s))
        o.memory_share = c->gpu_memory;
    int rc = model_size(&s->arch, s->set, &s->backend, &o, &s->sizes, e);
    if (rc != 0)
        return rc;
    const struct model_sizes *z = &s->sizes;
    s->metrics.model_name = s->model_id;
    s->metrics.page_tokens = z->o.page_tokens;
    s->metrics.weights_bytes = (int64_t)z->weights_bytes;
    s->metrics.scratch_bytes = (int64_t)(z->scratch_bytes + z->workspace_bytes);
    s->metrics.slots_bytes = (int64_t)z->slots_bytes;
    s->metrics.pages_bytes = (int64_t)z->pages_bytes;
    metrics_set_pools(&s->metrics, &(struct metrics_pools){.slots_free = s->sizes.o.state_slots,
                                                           .pages_free = s->sizes.n_pages});
    return rc;
}

/* ---- the socket ---- */

static void server_cancel(void *arg, struct request *r)
{
    struct server *s = arg;
    engine_cancel(s->engine, r);
}

static void server_stall(void *arg, int64_t stall_us)
{
    struct server *s = arg;
    engine_stall(s->engine, stall_us);
}

static int server_open_http(struct server *s, struct errmsg *e)
{
    const struct conf *c = &s->conf;
    s->api.metrics = &s->metrics;
    s->api.version = PACKAGE_VERSION;
    s->api.backend_name = s->backend.ops->name;
    s->api.stall_s = c->stall_s;
    s->api.key_scope = c->api_key_scope;
    s->api.key_limits = (struct api_key_limits){c->max_key_requests, c->max_key_tokens};
    s->api.started_unix_s = (int64_t)time(NULL);
    s->api.tokenizer = s->tokenizer;
    s->api.cancel = server_cancel;
    s->api.cancel_arg = s;
    s->api.stall = c->debug_calls ? server_stall : NULL;
    s->api.model_id = s->model_id;
    s->api.vocab = s->arch.vocab;
    s->api.max_prompt_tokens = s->sizes.o.max_prompt_tokens;
    s->api.max_adjust = s->backend.ops->max_adjust / s->sizes.o.max_seqs;
    s->api.page_tokens = s->sizes.o.page_tokens;
    if (work_open(c->workers, c->queue_length + c->max_connections, &s->work) != 0)
        return errmsg_set(e, ERR_NOMEM, "cannot start %d worker threads", c->workers);
    struct http_config h = {.listen = (const char *const *)c->listen,
                            .n_listen = c->n_listen,
                            .inherited = s->sockets.fds,
                            .n_inherited = s->sockets.n,
                            .max_connections = c->max_connections,
                            .max_body_bytes = c->max_body_bytes,
                            .header_timeout_s = c->header_timeout_s,
                            .body_timeout_s = c->body_timeout_s,
                            .idle_timeout_s = c->idle_timeout_s,
                            .file_timeout_s = c->transfer_timeout_s,
                            .ping_s = c->sse_ping_s,
                            .work = s->work,
                            .n_connections = &s->metrics.connections,
                            .arg = &s->api,
                            .admit = api_admit,
                            .intake = api_intake,
                            .lane = api_lane,
                            .handle = api_handle,
                            .refused = api_refused};
    if (s->sockets.n > 0 && c->listen_is_default)
        h.n_listen = 0;
    s->api.hands_over = s->sockets.n > 0 && h.n_listen == 0;
    return http_open(&h, &s->http, e);
}

/* ---- after the socket: the model ---- */

/* Each word asks for time for what comes next. */
static void server_say_loading(struct server *s, double done)
{
    notify_send(&s->notify, "STATUS=loading %.0f%%\nEXTEND_TIMEOUT_USEC=%d", done * 100,
                EXTEND_US);
}

/* A signal came: nothing was accepted yet. */
static _Noreturn void server_stop_loading(struct server *s)
{
    log_info("event=stop why=signal while=loading");
    notify_send(&s->notify, "STOPPING=1");
    http_quiesce(s->http);
    http_close(s->http);
    exit(0);
}

/* Called while weights load, on the main thread. */
static void server_on_progress(void *arg, double done)
{
    enum { LOG_EVERY_US = 1000000 };
    struct server *s = arg;
    atomic_store(&s->api.loaded_permille, (int)(done * 1000));
    if (signals_wait(0, false))
        server_stop_loading(s);
    int64_t now_us = request_now_us();
    if (now_us - s->progress_logged_us >= LOG_EVERY_US) {
        s->progress_logged_us = now_us;
        log_info("event=loading percent=%.0f", done * 100);
        server_say_loading(s, done);
    }
}

/* What sessions are read and brought in with. */
static int server_open_transfers(struct server *s, struct errmsg *e)
{
    struct state_shape z = model_state_shape(s->model);
    z.fingerprint =
        model_print(&s->arch, s->set, (uint64_t)s->conf.dummy_seed, s->backend.ops->name);
    z.model = s->model_id;
    int rc = transfers_init(&s->transfers, s->model, s->engine, &z, s->backend.ops,
                            s->sizes.o.max_prompt_tokens);
    s->api.transfers = &s->transfers;
    if (rc != 0)
        return errmsg_set(e, rc, "no memory for copies of sessions (%d of %zu bytes)",
                          MAX_TRANSFERS * TRANSFER_STAGES, state_max_raw(&z));
    log_info("event=fingerprint model=%016llx", (unsigned long long)z.fingerprint);
    return 0;
}

/* Asked before each file of a session, and while a predecessor has them: nobody is
 * impatient. */
static bool server_goes_on(void *arg)
{
    struct server *s = arg;
    notify_send(&s->notify, "EXTEND_TIMEOUT_USEC=%d", EXTEND_US);
    return !signals_wait(0, false);
}

static void server_save_sessions(struct server *s)
{
    if (s->session_dir.lock_fd >= 0 && !atomic_load(&s->metrics.device_lost))
        session_dir_save(&s->session_dir);
    session_dir_unlock(&s->session_dir);
}

/* A predecessor may still be draining, and has sessions to save. */
static int server_load_sessions(struct server *s, struct errmsg *e)
{
    enum { SAVE_S = 60 };
    struct session_dir *d = &s->session_dir;
    *d = (struct session_dir){
        s->conf.session_dir, &s->transfers, s->sessions, server_goes_on, s, -1};
    int rc = session_dir_lock(d, ((int64_t)s->conf.drain_s + SAVE_S) * 1000000, e);
    if (rc == ERR_STOPPED)
        server_stop_loading(s);
    if (rc == 0)
        session_dir_load(d);
    return rc;
}

static int server_open_model(struct server *s, struct errmsg *e)
{
    int64_t from_us = request_now_us();
    s->progress_logged_us = from_us;
    server_say_loading(s, 0);
    int rc = model_open(&s->arch, s->set, (uint64_t)s->conf.dummy_seed, &s->backend, &s->sizes,
                        server_on_progress, s, &s->model, e);
    if (rc != 0)
        return rc;
    server_say_loading(s, 1);
    double seconds = (double)(request_now_us() - from_us) / 1e6;
    log_info("event=loaded seconds=%.2f gb_per_s=%.2f", seconds,
             (double)s->sizes.weights_bytes / 1e9 / seconds);
    rc = sessions_open(&s->sessions);
    if (rc != 0)
        return errmsg_set(e, rc, "no memory for the table of sessions");
    s->api.sessions = s->sessions;
    int64_t max_decodes = (int64_t)s->conf.max_seqs * s->conf.max_decode_share / 1000;
    struct engine_config c = {.policy = s->conf.policy,
                              .max_waiting = s->conf.queue_length,
                              .max_decodes = max_decodes > 1 ? (int32_t)max_decodes : 1,
                              .checkpoint_tokens = s->conf.checkpoint_tokens,
                              .cache_share = s->conf.prefix_cache_share,
                              .sessions = s->sessions};
    s->api.session_ttl_s = s->conf.session_ttl_s;
    s->api.kv_lease_s = s->conf.kv_lease_s;
    api_kv_set_address(&s->api, http_addresses(s->http));
    s->api.prefix_cache = s->conf.prefix_cache;
    rc = queue_open(s->conf.queue_length, &s->queue);
    if (rc != 0)
        return errmsg_set(e, rc, "no memory for a queue of %d", s->conf.queue_length);
    s->api.queue = s->queue;
    if (s->conf.trace_operations && s->backend.ops->trace)
        s->backend.ops->trace(&s->backend, true);
    rc = engine_open(&c, s->model, s->queue, &s->metrics, &s->engine, e);
    if (rc == 0) {
        s->api.steps = engine_feed(s->engine);
        steps_set_listener(s->api.steps, api_steps_notify, &s->api);
    }
    if (rc == 0)
        rc = server_open_transfers(s, e);
    if (rc == 0)
        rc = engine_self_test(s->engine, s->arch.vocab, e);
    if (rc == 0 && s->conf.session_dir)
        rc = server_load_sessions(s, e);
    if (rc == 0)
        rc = engine_start(s->engine, e);
    return rc;
}

static void server_ready(struct server *s)
{
    const struct model_sizes *z = &s->sizes;
    atomic_store(&s->api.phase, PHASE_READY);
    http_accept_inherited(s->http);
    /* Tests and scripts read this line; its words are a contract (README). */
    fprintf(stderr,
            "ready listen=%s model=%s backend=%s slots=%d kv_tokens=%lld max_step_tokens=%d "
            "max_prompt_tokens=%d queue_length=%d\n",
            http_addresses(s->http), s->model_id, s->backend.ops->name, z->o.state_slots,
            (long long)z->n_pages * z->o.page_tokens, z->o.max_step_tokens,
            z->o.max_prompt_tokens, s->conf.queue_length);
    notify_send(&s->notify, "READY=1\nSTATUS=ready");
}

static void server_tick(struct server *s, const char *phase)
{
    char status[64];
    struct metrics_pools p;
    metrics_get_pools(&s->metrics, &p);
    snprintf(status, sizeof(status), "%s, %d running, %d waiting", phase, p.requests_running,
             queue_n_waiting(s->queue));
    notify_tick(&s->notify, request_now_us(), atomic_load(&s->metrics.last_progress_us),
                status);
}

/* SIGHUP: log-level and api-key-file anew, from file and command line. */
static void server_reload(struct server *s)
{
    struct conf c;
    struct errmsg e;
    notify_send(&s->notify, "RELOADING=1\nMONOTONIC_USEC=%lld", (long long)request_now_us());
    int rc = conf_parse(s->argc, s->argv, &c, &e);
    if (rc == 0) {
        rc = api_read_keys(&s->api, c.api_key_file, &e);
        if (rc == 0)
            log_set_level(c.log_level);
        conf_fini(&c);
    }
    if (rc == 0)
        log_info("event=reload log-level and api-key-file were read");
    else
        log_error("event=reload_failed what=\"%s\" log-level and keys stay as they were",
                  e.text);
    notify_send(&s->notify, "READY=1");
}

/* Waits for the end: 0 after a signal, EXIT_DEVICE_LOST. */
static int server_wait(struct server *s)
{
    enum { LOOK_MS = 200, LOOKS = 8 }; /* several in an interval of the watchdog */
    int64_t look_ms = LOOK_MS;
    if (s->notify.watchdog_us > 0 && s->notify.watchdog_us / 1000 / LOOKS < look_ms)
        look_ms = s->notify.watchdog_us / 1000 / LOOKS;
    for (;;) {
        server_tick(s, "ready");
        int sig = signals_wait((int32_t)look_ms, true);
        if (sig == SIGHUP) {
            server_reload(s);
            continue;
        }
        if (sig) {
            log_info("event=stop why=%s", sig == SIGTERM ? "SIGTERM" : "SIGINT");
            return 0;
        }
        if (atomic_load(&s->metrics.device_lost))
            return EXIT_DEVICE_LOST;
    }
}

/* Refuses new work, lets the old end; a second signal or drain-s aborts what is left. With
 * inherited sockets alone nothing is refused: who connects waits for the successor, and each
 * connection that is left gets one more answer. */
static void server_drain(struct server *s)
{
    enum { LOOK_US = 50000, INCOMING_US = 5000000, READ_US = 1000000, READ_CUT_US = 4000000 };
    int64_t now_us = request_now_us();
    int64_t deadline_us = now_us + (int64_t)s->conf.drain_s * 1000000;
    int64_t incoming_us = s->api.hands_over ? now_us + INCOMING_US : now_us;
    notify_send(&s->notify, "STOPPING=1\nEXTEND_TIMEOUT_USEC=%lld",
                (long long)s->conf.drain_s * 1000000 + EXTEND_US);
    /* Own sockets stay open meanwhile: /ready says draining, new work gets 503. */
    atomic_store(&s->api.phase, PHASE_DRAINING);
    http_release_inherited(s->http);
    api_steps_close(&s->api);
    bool is_done, is_over;
    do {
        int64_t look_us = request_now_us() + LOOK_US;
        server_tick(s, "draining");
        is_done = engine_drain(s->engine, look_us) && http_flush(s->http, look_us);
        if (is_done && request_now_us() < incoming_us && http_n_incoming(s->http) > 0)
            is_done = signals_wait(LOOK_US / 1000, false) != 0;
        is_over = request_now_us() >= deadline_us || signals_wait(0, false);
    } while (!is_done && !is_over);
    if (is_done)
        log_info("event=drained");
    else
        log_warn(
            "event=drain_cut waiting=%d the step under way ends, its requests may still be "
            "answered; the others get 503",
            queue_n_waiting(s->queue));
    if (is_done && s->api.hands_over) {
        /* What comes now meets a close, not a refusal, and goes to the successor. */
        http_close(s->http);
        s->http = NULL;
        engine_stop(s->engine);
        server_save_sessions(s);
        return;
    }
    http_quiesce(s->http);
    engine_stop(s->engine);
    server_save_sessions(s);
    if (!http_flush(s->http, request_now_us() + READ_US)) {
        http_cut(s->http);
        http_flush(s->http, request_now_us() + READ_CUT_US);
    }
}

static void server_close(struct server *s)
{
    if (s->engine)
        engine_stop(s->engine);
    if (s->http) {
        http_quiesce(s->http);
        http_close(s->http);
    }
    if (s->work)
        work_close(s->work);
    engine_close(s->engine);
    transfers_fini(&s->transfers);
    sessions_close(s->sessions);
    queue_close(s->queue);
    model_close(s->model);
    if (s->backend.impl)
        s->backend.ops->close(&s->backend);
    tokenizer_free(s->tokenizer);
    st_close(s->set);
    arch_fini(&s->arch);
    api_close(&s->api);
    steps_readers_fini(&s->api.readers);
    metrics_fini(&s->metrics);
    notify_close(&s->notify);
    conf_fini(&s->conf);
}

static int server_run(struct server *s, struct errmsg *e)
{
    if (metrics_init(&s->metrics) != 0)
        return EXIT_FAILURE;
    steps_readers_init(&s->api.readers);
    int rc = server_name(s, e);
    if (rc == 0)
        rc = api_read_keys(&s->api, s->conf.api_key_file, e);
    if (rc == 0)
        rc = server_open_checkpoint(s, e);
    if (rc != 0)
        return EXIT_BAD_CONFIG;
    if (s->conf.session_dir && session_dir_check(s->conf.session_dir, e) != 0)
        return EXIT_BAD_CONFIG;
    rc = server_open_backend(s, e);
    if (rc != 0) /* what is short now may be there later */
        return rc == ERR_NOMEM ? EXIT_FAILURE : EXIT_BAD_CONFIG;
    if (server_size(s, e) != 0)
        return EXIT_BAD_CONFIG;
    if (s->conf.action == CONF_CHECK) {
        e->text[0] = '\0';
        sizing_print(s->model_id, s->backend.ops->name, &s->arch, &s->sizes);
        return 0;
    }
    sizing_log(s->model_id, s->backend.ops->name, &s->arch, &s->sizes);
    rc = server_open_http(s, e);
    if (rc != 0)
        return rc == ERR_NOMEM || rc == ERR_FULL ? EXIT_FAILURE : EXIT_BAD_CONFIG;
    rc = server_open_model(s, e);
    if (rc != 0)
        return rc == ERR_NOMEM || rc == ERR_DEVICE || rc == ERR_FULL ? EXIT_FAILURE
                                                                     : EXIT_BAD_CONFIG;
    /* What is optional and absent may have left words here. */
    e->text[0] = '\0';
    server_ready(s);
    rc = server_wait(s);
    server_drain(s);
    return rc;
}

/* The one place that reads the environment, for what the service manager put there. */
static int server_meet_manager(struct server *s, struct errmsg *e)
{
    if (notify_open(&s->notify, getenv("NOTIFY_SOCKET"), getenv("WATCHDOG_USEC"),
                    getenv("WATCHDOG_PID"), e) != 0)
        log_warn("event=no_manager what=\"%s\"", e->text);
    int rc = notify_sockets_take(&s->sockets, getenv("LISTEN_PID"), getenv("LISTEN_FDS"),
                                 getenv("LISTEN_FDNAMES"), e);
    for (int32_t i = 0; i < s->sockets.n && rc == 0; i++)
        log_info("event=socket fd=%d name=\"%s\"", s->sockets.fds[i], s->sockets.names[i]);
    return rc;
}

int main(int argc, char **argv)
{
    static struct server server = {.notify.fd = -1, .session_dir.lock_fd = -1};
    static struct errmsg e;
    log_init(LOG_LEVEL_INFO, getenv("JOURNAL_STREAM"));
    server.argc = argc;
    server.argv = argv;
    int rc = conf_parse(argc, argv, &server.conf, &e);
    if (rc != 0) {
        fprintf(stderr, "%sprefilld: %s\n", log_prefix(LOG_LEVEL_ERROR), e.text);
        return EXIT_BAD_CONFIG;
    }
    if (server.conf.action == CONF_HELP || server.conf.action == CONF_VERSION) {
        if (server.conf.action == CONF_HELP)
            conf_print_help(stdout);
        else
            printf("prefilld %s\n", PACKAGE_VERSION);
        conf_fini(&server.conf);
        return 0;
    }
    log_set_level(server.conf.log_level);
    if (server.conf.action == CONF_RUN)
        rc = server_meet_manager(&server, &e);
    rc = rc == 0 ? server_run(&server, &e) : EXIT_BAD_CONFIG;
    if (e.text[0])
        fprintf(stderr, "%sprefilld: %s\n", log_prefix(LOG_LEVEL_ERROR), e.text);
    server_close(&server);
    return rc;
}
