#include "config.h"

#include "session_dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "log.h"
#include "request.h"

static const char ending[] = ".safetensors";

int session_dir_check(const char *path, struct errmsg *e)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return errmsg_set(e, ERR_INVALID, "session-dir %s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode) || access(path, R_OK | W_OK | X_OK) != 0)
        return errmsg_set(e, ERR_INVALID,
                          "session-dir %s is no folder that can be read and written", path);
    return 0;
}

/* ---- one daemon at a time ---- */

/* What its holder wrote there; of no use to a program. */
static void read_holder(int fd, char *out, size_t cap)
{
    ssize_t n = pread(fd, out, cap - 1, 0);
    out[n > 0 ? n : 0] = '\0';
    out[strcspn(out, "\n\"")] = '\0';
}

/* When it cannot be written, whoever waits is told less. */
static void write_holder(int fd)
{
    char host[65] = "";
    gethostname(host, sizeof(host) - 1);
    if (ftruncate(fd, 0) == 0)
        dprintf(fd, "process %d on %s\n", (int)getpid(), host);
}

/* Returns 0, ERR_FULL (another has it) or ERR_IO, with errno. */
static int try_lock(int fd)
{
    if (flock(fd, LOCK_EX | LOCK_NB) == 0)
        return 0;
    return errno == EWOULDBLOCK || errno == EINTR ? ERR_FULL : ERR_IO;
}

int session_dir_lock(struct session_dir *d, int64_t wait_us, struct errmsg *e)
{
    enum { LOOK_US = 100000 };
    char path[PATH_MAX + 16], holder[128];
    long long wait_s = wait_us / 1000000;
    int64_t until_us = request_now_us() + wait_us;
    bool goes_on = true;
    snprintf(path, sizeof(path), "%s/prefilld.lock", d->path);
    d->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int rc = d->lock_fd < 0 ? ERR_IO : try_lock(d->lock_fd);
    if (rc == ERR_FULL) {
        read_holder(d->lock_fd, holder, sizeof(holder));
        log_warn("event=session_dir_is_held path=%s by=\"%s\" waits_s=%lld", d->path, holder,
                 wait_s);
    }
    while (rc == ERR_FULL && request_now_us() < until_us && (goes_on = d->goes_on(d->arg))) {
        usleep(LOOK_US);
        rc = try_lock(d->lock_fd);
    }
    if (rc == 0) {
        write_holder(d->lock_fd);
        return 0;
    }
    if (!goes_on)
        rc = ERR_STOPPED;
    else if (rc == ERR_IO)
        errmsg_set(e, rc, "session-dir: %s cannot be locked: %s", path, strerror(errno));
    else
        errmsg_set(e, rc,
                   "session-dir %s: another daemon has it and has not ended in %lld s (%s); "
                   "each daemon needs a folder of its own",
                   d->path, wait_s, holder);
    session_dir_unlock(d);
    return rc;
}

void session_dir_unlock(struct session_dir *d)
{
    if (d->lock_fd >= 0)
        close(d->lock_fd);
    d->lock_fd = -1;
}

/* ---- saving ---- */

struct writer {
    const struct session_dir *dir;
    int fd;
    struct state_info info;
    struct state_sum sum;
    void *stage;
    char *out; /* [out_cap] */
    size_t out_cap;
};

static int write_all(int fd, const void *data, size_t len)
{
    const char *p = data;
    while (len > 0) {
        ssize_t n = write(fd, p, len);
        if (n < 0 && errno != EINTR)
            return ERR_IO;
        p += n > 0 ? n : 0;
        len -= n > 0 ? (size_t)n : 0;
    }
    return 0;
}

/* The disk writes while the next part is made. */
static int put(struct writer *w, const void *data, size_t len)
{
    state_sum_add(&w->sum, data, len);
    int rc = write_all(w->fd, data, len);
    if (rc == 0) /* a hint: fsync has the last word */
        sync_file_range(w->fd, (off_t)(w->sum.n_bytes - len), (off_t)len,
                        SYNC_FILE_RANGE_WRITE);
    return rc;
}

static int put_head(struct writer *w)
{
    struct buf b;
    buf_init(&b);
    state_head_write(&w->dir->transfers->shape, &w->info, &b);
    int rc = b.failed ? ERR_NOMEM : put(w, b.data, b.len);
    buf_fini(&b);
    return rc;
}

/* A part that lies in the pools. */
static int put_part(struct writer *w, struct session *s, const struct state_part *p)
{
    struct transfers *t = w->dir->transfers;
    struct engine_job job = {
        .kind = ENGINE_JOB_GET, .session = s, .part = *p, .stage = w->stage};
    if (p->bytes > w->out_cap) {
        free(w->out);
        w->out = malloc(p->bytes);
        w->out_cap = w->out ? p->bytes : 0;
        if (!w->out)
            return ERR_NOMEM;
    }
    int rc = engine_run_job(t->engine, &job);
    if (rc != 0)
        return rc;
    state_unpack(&t->shape, t->ops, p, job.stage, w->out);
    return put(w, w->out, p->bytes);
}

static int put_session(struct writer *w, struct session *s, const int32_t *ids)
{
    const struct state_shape *z = &w->dir->transfers->shape;
    struct state_walk walk = {0};
    struct state_part p;
    int rc = put_head(w);
    while (rc == 0 && (p = state_next(z, w->info.n_tokens, z->act, &walk)).kind != STATE_END) {
        uint64_t sum = state_sum_of(&w->sum);
        if (p.kind == STATE_IDS)
            rc = put(w, ids, p.bytes);
        else if (p.kind == STATE_SUM)
            rc = write_all(w->fd, &sum, sizeof(sum));
        else
            rc = put_part(w, s, &p);
    }
    return rc;
}

static const char *why(int rc)
{
    return rc == ERR_IO       ? strerror(errno)
           : rc == ERR_NOMEM  ? "memory is short"
           : rc == ERR_DEVICE ? "device lost"
                              : "its state is not there";
}

static int save_as(struct writer *w, const char *path, struct session *s, const int32_t *ids)
{
    char beside[PATH_MAX + 8];
    snprintf(beside, sizeof(beside), "%s.tmp", path);
    w->fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int rc = w->fd < 0 ? ERR_IO : put_session(w, s, ids);
    if (rc == 0 && fsync(w->fd) != 0)
        rc = ERR_IO;
    int error = errno;
    if (w->fd >= 0 && close(w->fd) != 0 && rc == 0) {
        rc = ERR_IO;
        error = errno;
    }
    if (rc == 0 && rename(beside, path) != 0) {
        rc = ERR_IO;
        error = errno;
    }
    if (rc != 0)
        unlink(beside);
    errno = error;
    return rc;
}

static bool save_one(const struct session_dir *d, const char *id, void *stage)
{
    char path[PATH_MAX];
    struct errmsg e;
    struct session_info info;
    struct session *s;
    int32_t *ids;
    struct writer w = {.dir = d, .stage = stage};
    if (sessions_begin_export(d->sessions, id, &s, &ids, &w.info.n_tokens, &info, &e) != 0)
        return false; /* it has gone */
    state_sum_start(&w.sum);
    w.info.dtype = d->transfers->shape.act;
    w.info.has_terms = true;
    memcpy(w.info.id, info.id, sizeof(w.info.id));
    w.info.ttl_s = (info.idle_us + info.expires_us) / 1000000;
    w.info.ttl_s = w.info.ttl_s < 1 ? 1 : w.info.ttl_s;
    w.info.created_unix_s = info.created_unix_s;
    w.info.idle_s = info.idle_us / 1000000;
    w.info.saved_unix_s = (int64_t)time(NULL);
    w.info.is_pinned = info.is_pinned;
    snprintf(path, sizeof(path), "%s/%s%s", d->path, id, ending);
    int rc = info.expires_us > 0 ? save_as(&w, path, s, ids) : 0;
    if (rc != 0)
        log_error("event=session_not_saved file=%s why=\"%s\"", path, why(rc));
    sessions_end_export(d->sessions, s);
    free(ids);
    free(w.out);
    return rc == 0 && info.expires_us > 0;
}

/* Of its own: calls that are being cut off may still read theirs. */
static void *stage_of(const struct session_dir *d)
{
    return model_stage_alloc(d->transfers->model, state_max_raw(&d->transfers->shape));
}

/* Renames are on the disk when their folder is. */
static void sync_dir(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0)
        log_error("event=session_dir_not_synced path=%s why=\"%s\"", path, strerror(errno));
    if (fd >= 0)
        close(fd);
}

void session_dir_save(const struct session_dir *d)
{
    int32_t n = sessions_count(d->sessions), n_saved = 0, i = 0;
    struct session_info *list = calloc((size_t)n + 1, sizeof(*list));
    void *stage = stage_of(d);
    if (list)
        n = sessions_list(d->sessions, list, n);
    while (list && stage && i < n && d->goes_on(d->arg))
        n_saved += save_one(d, list[i++].id, stage);
    if (n_saved > 0)
        sync_dir(d->path);
    if (n > 0)
        log_info("event=sessions_saved sessions=%d of=%d", n_saved, n);
    model_stage_free(d->transfers->model, stage);
    free(list);
}

/* ---- bringing back ---- */

struct loader {
    const struct session_dir *dir;
    struct state_reader reader;
    struct session *session; /* NULL: none yet */
    void *stage;
    char *chunk, *tmp;
};

enum { CHUNK_BYTES = 1 << 20 };

static int64_t idle_s_of(const struct state_info *i)
{
    int64_t away_s = (int64_t)time(NULL) - i->saved_unix_s;
    return i->idle_s + (away_s > 0 ? away_s : 0);
}

static int run_job(struct loader *l, enum engine_job_kind kind, struct errmsg *e)
{
    const struct state_info *i = &l->reader.info;
    struct transfers *t = l->dir->transfers;
    struct engine_job job = {.kind = kind,
                             .session = l->session,
                             .part = l->reader.part,
                             .stage = l->stage,
                             .ids = l->reader.ids,
                             .n_ids = i->n_tokens,
                             .takes_free_only = true,
                             .terms = {i->ttl_s * 1000000, i->is_pinned, true}};
    int rc = engine_run_job(t->engine, &job);
    if (rc == 0)
        return 0;
    return errmsg_set(e, rc, "%s",
                      rc == ERR_FULL || rc == ERR_TOO_LARGE ? "the pools have no room for it"
                                                            : why(rc));
}

static int open_session(struct loader *l, struct errmsg *e)
{
    const struct state_shape *z = &l->dir->transfers->shape;
    const struct state_info *i = &l->reader.info;
    struct session_info other;
    struct errmsg ignored;
    if (!i->has_terms)
        return errmsg_set(e, ERR_UNSUPPORTED,
                          "it has no id and no ttl_s: it was exported, and "
                          "POST /v1/sessions takes it");
    if (idle_s_of(i) >= i->ttl_s)
        return errmsg_set(e, ERR_NOT_FOUND, "it has expired meanwhile");
    if (sessions_get(l->dir->sessions, i->id, &other, &ignored) == 0)
        return errmsg_set(e, ERR_UNSUPPORTED, "another file had the same id");
    l->session = sessions_new_named(i->id, i->ttl_s * 1000000);
    if (i->dtype != z->act)
        l->tmp = malloc(state_max_bytes(z, z->act));
    if (!l->session || (i->dtype != z->act && !l->tmp))
        return errmsg_set(e, ERR_NOMEM, "memory is short");
    return run_job(l, ENGINE_JOB_OPEN, e);
}

static int on_event(struct loader *l, int event, struct errmsg *e)
{
    struct transfers *t = l->dir->transfers;
    if (event == STATE_HEAD)
        return open_session(l, e);
    if (event != STATE_PART || l->reader.part.raw_bytes == 0)
        return 0;
    state_pack(&t->shape, t->ops, &l->reader.part, l->reader.info.dtype, l->reader.data, l->tmp,
               l->stage);
    return run_job(l, ENGINE_JOB_PUT, e);
}

static int read_file(struct loader *l, int fd, struct errmsg *e)
{
    int rc = 0;
    ssize_t n;
    while (rc == 0 && (n = read(fd, l->chunk, CHUNK_BYTES)) != 0) {
        if (n < 0)
            return errmsg_set(e, ERR_IO, "%s", strerror(errno));
        for (size_t at = 0, n_taken; at < (size_t)n && rc == 0; at += n_taken) {
            int event =
                state_reader_take(&l->reader, l->chunk + at, (size_t)n - at, &n_taken, e);
            rc = event < 0 ? event : on_event(l, event, e);
        }
    }
    return rc ? rc : state_reader_end(&l->reader, e);
}

static int load_file(struct loader *l, const char *path, struct errmsg *e)
{
    l->chunk = malloc(CHUNK_BYTES);
    if (!l->chunk)
        return errmsg_set(e, ERR_NOMEM, "memory is short");
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait for a writer */
    if (fd < 0)
        return errmsg_set(e, ERR_IO, "%s", strerror(errno));
    bool is_file = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    int rc = is_file ? read_file(l, fd, e) : errmsg_set(e, ERR_IO, "it is no regular file");
    close(fd);
    if (rc == 0)
        rc = run_job(l, ENGINE_JOB_KEEP, e);
    if (rc == 0)
        sessions_restore(l->dir->sessions, l->session, l->reader.info.created_unix_s,
                         idle_s_of(&l->reader.info) * 1000000);
    else if (l->session)
        run_job(l, ENGINE_JOB_DROP, NULL);
    return rc;
}

/* Returns whether the session is back. */
static bool load_one(const struct session_dir *d, const char *path, void *stage)
{
    char aside[PATH_MAX + 8];
    struct errmsg e = {{0}};
    struct loader l = {.dir = d, .stage = stage};
    state_reader_init(&l.reader, &d->transfers->shape, d->transfers->max_tokens);
    int rc = load_file(&l, path, &e);
    sessions_unref(d->sessions, l.session);
    state_reader_fini(&l.reader);
    free(l.chunk);
    free(l.tmp);
    if (rc == 0 || rc == ERR_NOT_FOUND) {
        unlink(path);
        return rc == 0;
    }
    log_error("event=session_not_brought_back file=%s why=\"%s\"", path, e.text);
    if (rc == ERR_INVALID) {
        snprintf(aside, sizeof(aside), "%s.bad", path);
        if (rename(path, aside) != 0)
            log_error("event=session_file_stays file=%s why=\"%s\"", path, strerror(errno));
    }
    return false;
}

static bool ends_with(const char *name, const char *tail)
{
    size_t len = strlen(name), n = strlen(tail);
    return len > n && strcmp(name + len - n, tail) == 0;
}

void session_dir_load(const struct session_dir *d)
{
    char path[PATH_MAX];
    struct dirent **names;
    int32_t n_back = 0;
    void *stage = stage_of(d);
    int n = scandir(d->path, &names, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        const char *name = names[i]->d_name;
        snprintf(path, sizeof(path), "%s/%s", d->path, name);
        if (strncmp(name, "s-", 2) == 0 && ends_with(name, ".tmp"))
            unlink(path); /* a save that was cut off */
        else if (strncmp(name, "s-", 2) == 0 && ends_with(name, ending) && stage)
            n_back += load_one(d, path, stage);
        free(names[i]);
    }
    if (n < 0)
        log_error("event=session_dir_not_read path=%s why=\"%s\"", d->path, strerror(errno));
    else
        free(names);
    model_stage_free(d->transfers->model, stage);
    if (n_back > 0)
        log_info("event=sessions_brought_back sessions=%d", n_back);
}
