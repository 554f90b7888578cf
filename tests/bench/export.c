/* How fast a session becomes a file and a file a session, against copying its bytes.
 *
 *   tests/bench/export FOLDER [tokens] [folder to write to]
 *
 * FOLDER has a checkpoint, or config.json alone; TEST_BACKEND=cuda on a card. One thread, as a
 * worker of the daemon: copy is the pools' copy to a stage alone; export adds the file's form
 * and the checksum; import reads, checks, packs and copies. With a folder: written and synced,
 * against the same bytes written and synced. Bars: 80% of the slower of copy and disk. The best
 * of five. */
#include "config.h"

#include <fcntl.h>
#include <time.h>

#include "../model_fixture.h"
#include "../rng.h"
#include "state_file.h"

enum { N_TIMES = 5 };

struct bench {
    struct fixture f;
    struct state_shape shape;
    struct session *session;
    struct buf file;
    int32_t *ids;
    int32_t n;
    void *stages[2];
    int fd; /* -1: to memory alone */
};

static double now_s(void)
{
    return (double)request_now_us() / 1e6;
}

static void must(int rc, const char *what)
{
    if (rc == 0)
        return;
    fprintf(stderr, "%s failed: %d\n", what, rc);
    exit(1);
}

static int get(struct bench *b, const struct state_part *p, int32_t i)
{
    const struct session *s = b->session;
    int rc = model_part_get(b->f.model, p, s->slot, s->pages, b->stages[i]);
    return rc ? rc : model_copies_mark(b->f.model, i);
}

static struct state_part next_raw(struct bench *b, struct state_walk *w)
{
    struct state_part p;
    do
        p = state_next(&b->shape, b->n, b->shape.act, w);
    while (p.raw_bytes == 0 && p.kind != STATE_END);
    return p;
}

static void emit(struct bench *b, struct state_sum *sum, const void *data, size_t len)
{
    state_sum_add(sum, data, len);
    if (b->fd >= 0 && write(b->fd, data, len) != (ssize_t)len)
        must(ERR_IO, "write");
    if (b->fd >= 0) /* as session_dir.c does */
        sync_file_range(b->fd, (off_t)(sum->n_bytes - len), (off_t)len, SYNC_FILE_RANGE_WRITE);
}

/* One copy under way while the part before it is worked on. is_copy: the copies alone. Returns
 * seconds. */
static double export_once(struct bench *b, bool is_copy, bool keeps)
{
    const struct state_info info = {.n_tokens = b->n, .dtype = b->shape.act};
    struct state_sum sum;
    struct state_walk walk = {0};
    struct buf head;
    buf_init(&head);
    state_sum_start(&sum);
    state_head_write(&b->shape, &info, &head);
    buf_add(&head, b->ids, (size_t)b->n * 4);
    char *out = malloc(state_max_bytes(&b->shape, b->shape.act));
    memset(out, 0, state_max_bytes(&b->shape, b->shape.act));
    double from = now_s();
    if (!is_copy)
        emit(b, &sum, head.data, head.len);
    if (keeps)
        buf_add(&b->file, head.data, head.len);
    struct state_part p = next_raw(b, &walk), after;
    must(get(b, &p, 0), "copy");
    for (int32_t i = 0; p.kind != STATE_END; i ^= 1, p = after) {
        after = next_raw(b, &walk);
        if (after.kind != STATE_END)
            must(get(b, &after, i ^ 1), "copy");
        must(model_copies_done(b->f.model, i, true) == 1 ? 0 : ERR_DEVICE, "copy");
        if (is_copy)
            continue;
        state_unpack(&b->shape, b->f.backend.ops, &p, b->stages[i], out);
        emit(b, &sum, out, p.bytes);
        if (keeps)
            buf_add(&b->file, out, p.bytes);
    }
    uint64_t of = state_sum_of(&sum);
    if (keeps)
        buf_add(&b->file, &of, sizeof(of));
    if (b->fd >= 0)
        must(fsync(b->fd), "fsync");
    double s = now_s() - from;
    free(out);
    buf_fini(&head);
    return s;
}

static double import_once(struct bench *b)
{
    struct state_reader r;
    struct errmsg e = {{0}};
    int event = 0;
    int32_t i = 0;
    bool is_out[2] = {false, false};
    state_reader_init(&r, &b->shape, b->n);
    double from = now_s();
    for (size_t at = 0, n; at < b->file.len && event >= 0; at += n) {
        /* As the daemon's intake gives them. */
        size_t len = b->file.len - at < 1 << 18 ? b->file.len - at : 1 << 18;
        event = state_reader_take(&r, b->file.data + at, len, &n, &e);
        if (event != STATE_PART || r.part.raw_bytes == 0)
            continue;
        if (is_out[i])
            must(model_copies_done(b->f.model, i, true) == 1 ? 0 : ERR_DEVICE, "copy");
        state_pack(&b->shape, b->f.backend.ops, &r.part, r.info.dtype, r.data, NULL,
                   b->stages[i]);
        must(model_part_put(b->f.model, &r.part, b->session->slot, b->session->pages,
                            b->stages[i]),
             "copy");
        must(model_copies_mark(b->f.model, i), "copy");
        is_out[i] = true;
        i ^= 1;
    }
    for (i = 0; i < 2; i++)
        must(model_copies_done(b->f.model, i, true) == 1 ? 0 : ERR_DEVICE, "copy");
    double s = now_s() - from;
    must(event < 0 ? event : state_reader_end(&r, &e), e.text);
    state_reader_fini(&r);
    return s;
}

static double write_once(struct bench *b)
{
    double from = now_s();
    for (size_t at = 0; at < b->file.len; at += 4 << 20) {
        size_t n = b->file.len - at < 4 << 20 ? b->file.len - at : 4 << 20;
        if (write(b->fd, b->file.data + at, n) != (ssize_t)n)
            must(ERR_IO, "write");
        sync_file_range(b->fd, (off_t)at, (off_t)n, SYNC_FILE_RANGE_WRITE);
    }
    must(fsync(b->fd), "fsync");
    return now_s() - from;
}

static double line(const char *what, double bytes, double seconds, double bar)
{
    double rate = bytes / seconds / 1e9;
    printf("%-16s %8.2f ms %8.2f GB/s", what, seconds * 1e3, rate);
    if (bar > 0)
        printf("  %3.0f%%", 100 * rate / bar);
    printf("\n");
    return rate;
}

#define BEST(best, expression)                                                                 \
    double best = 1e9;                                                                         \
    for (int i_time = 0; i_time < N_TIMES; i_time++) {                                         \
        double s_time = (expression);                                                          \
        best = s_time < best ? s_time : best;                                                  \
    }

/* A file on the disk, anew. */
static double on_disk(struct bench *b, const char *folder, bool is_plain)
{
    char path[600];
    snprintf(path, sizeof(path), "%s/export.bench", folder);
    b->fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    must(b->fd < 0 ? ERR_IO : 0, path);
    double s = is_plain ? write_once(b) : export_once(b, false, false);
    close(b->fd);
    unlink(path);
    b->fd = -1;
    return s;
}

/* A session of random numbers. */
static void make(struct bench *b)
{
    struct rng rng = {20261130};
    struct state_walk walk = {0};
    struct state_part p;
    struct engine_job open = {.kind = ENGINE_JOB_OPEN, .n_ids = b->n};
    open.session = b->session = sessions_new(1000000);
    must(engine_run_job(b->f.engine, &open), "room in the pools");
    b->ids = calloc((size_t)b->n, sizeof(*b->ids));
    for (int i = 0; i < 2; i++) {
        b->stages[i] = model_stage_alloc(b->f.model, state_max_raw(&b->shape));
        for (size_t k = 0; k + 8 <= state_max_raw(&b->shape); k += 8) {
            uint64_t x = rng_u64(&rng) & 0x3fff3fff3fff3fffu;
            memcpy((char *)b->stages[i] + k, &x, 8);
        }
    }
    while ((p = next_raw(b, &walk)).kind != STATE_END) {
        must(model_part_put(b->f.model, &p, b->session->slot, b->session->pages, b->stages[0]),
             "copy");
        must(model_copies_mark(b->f.model, 0), "copy");
        model_copies_done(b->f.model, 0, true);
    }
}

int main(int argc, char **argv)
{
    struct bench b = {.n = argc > 2 ? atoi(argv[2]) : 8192, .fd = -1};
    struct model_options o = {.max_step_tokens = 64,
                              .max_seqs = 1,
                              .max_prompt_tokens = b.n,
                              .kv_tokens = b.n + 64,
                              .state_slots = 1};
    struct engine_config c = {.max_waiting = 4};
    char path[600];
    snprintf(path, sizeof(path), "%s/model.safetensors.index.json", argc > 1 ? argv[1] : "");
    bool is_dummy = argc > 1 && access(path, R_OK) != 0;
    if (argc < 2 || fixture_open_as(&b.f, argv[1], &o, 0, is_dummy) != 0 ||
        fixture_open_engine(&b.f, &c) != 0)
        return 1;
    b.shape = model_state_shape(b.f.model);
    make(&b);
    buf_init(&b.file);
    export_once(&b, false, true);
    double bytes = (double)b.file.len;
    printf("%s, %d tokens, %.1f MB, backend %s\n", argv[1], b.n, bytes / 1e6,
           b.f.backend.ops->name);
    BEST(copy, export_once(&b, true, false));
    double rate = line("copy", bytes, copy, 0);
    BEST(out, export_once(&b, false, false));
    line("export", bytes, out, rate);
    BEST(in, import_once(&b));
    line("import", bytes, in, rate);
    if (argc > 3) {
        BEST(plain, on_disk(&b, argv[3], true));
        rate = line("disk", bytes, plain, 0);
        BEST(saved, on_disk(&b, argv[3], false));
        line("export to disk", bytes, saved, rate);
    }
    buf_fini(&b.file);
    return 0;
}
