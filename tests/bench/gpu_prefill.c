/* Prefill speed of whole models through the engine, and where the time goes.
 *
 * gpu_prefill MODEL_DIR LAYERS REPEATS [table|readback|direct|keep|all] NxLEN...   (8x1024: 8
 * of 1024)
 *
 * Dummy weights; LAYERS 0 takes the model's own number. Each shape prints a line: wall time
 * from the first push to the last end (median), the device's time of its steps, the host's time
 * of a launch, and the gap between steps of one run on the device's clock. With `table` a
 * traced run follows: milliseconds, bytes, FLOP and the share of the roofline by operation,
 * from the shapes alone. With `readback` the shape runs twice, as it is and with the chunk
 * counts copied back to the host in each step, as code that asks a device tensor for its list
 * does: what that costs in host time and idle device; the last steps of both go to $TRACE_DIR
 * (if set) as files for Perfetto, as GET /v1/trace gives them. With `direct` it runs again
 * without replaying recorded steps; with `keep` again with the prompts' states kept, which no
 * prompt after it begins at. `all` asks for every token's logprob. TEST_BACKEND picks the
 * backend (cuda).
 *
 * Ceilings: ../shared/peers.md, copy 4.28 TB/s, bf16 777 TFLOP/s, one H200. */
#include <math.h>
#include <time.h>

#include "../model_fixture.h"

/* A step is recorded when its shape comes for the third time, in each of two entries of a
 * ring. */
enum { WARM_UPS = 6 };
enum { MAX_REPEATS = 64, MAX_STEPS = 4096, MAX_KINDS = 48 };

static const double COPY_BYTES_S = 4.28e12, BF16_FLOP_S = 777e12;

/* One kind of operation over a run. */
struct kind {
    char name[32];
    double us, host_us;
    int64_t n;
};

/* What the hooks saw of the steps since it was cleared. */
struct seen {
    int n_steps, n_replayed;
    int64_t T; /* tokens of all steps */
    double device_us, launch_us;
    float gaps[MAX_STEPS];
    int n_gaps;
    struct kind kinds[MAX_KINDS];
    int n_kinds;
};

static struct seen seen;
static const struct backend_ops *real_ops;
static struct backend_ops hooked;
static int64_t begun_ns;
static enum logprobs_mode mode = LOGPROBS_NEXT;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A product is named by its neighbours: one before a block's body goes in, one after it out. */
static const char *span_name(const struct step_span *s, int32_t i, int32_t n)
{
    static const char *const in[][2] = {
        {"gdn_conv", "gdn_in"}, {"attn_prep", "attn_in"}, {"swiglu", "mlp_up"}};
    static const char *const out[][2] = {
        {"gdn_norm", "gdn_out"}, {"attn", "attn_out"}, {"swiglu", "mlp_down"}};
    if (strcmp(s[i].name, "matmul") != 0)
        return s[i].name;
    for (int k = 0; k < 3; k++) {
        if (i + 1 < n && strcmp(s[i + 1].name, in[k][0]) == 0)
            return in[k][1];
        if (i > 0 && strcmp(s[i - 1].name, out[k][0]) == 0)
            return out[k][1];
    }
    return "matmul";
}

static void add_span(const char *name, const struct step_span *s)
{
    int k = 0;
    while (k < seen.n_kinds && strcmp(seen.kinds[k].name, name) != 0)
        k++;
    if (k == MAX_KINDS)
        return;
    if (k == seen.n_kinds) {
        seen.n_kinds++;
        snprintf(seen.kinds[k].name, sizeof(seen.kinds[k].name), "%s", name);
    }
    seen.kinds[k].us += (double)s->us;
    seen.kinds[k].host_us += (double)s->host_us;
    seen.kinds[k].n++;
}

static int hook_begin(struct backend *b, const struct batch_host *h, struct batch *out)
{
    begun_ns = now_ns();
    seen.T += h->n_tokens;
    return real_ops->step_begin(b, h, out);
}

/* The chunk map, and a wait for it on the host. */
static void hook_chunk_map(struct backend *b, struct batch *batch)
{
    int32_t first[64 + 1];
    real_ops->chunk_map(b, batch);
    if (batch->n_seqs <= 64)
        real_ops->download(b, first, batch->map.seq_first,
                           (size_t)(batch->n_seqs + 1) * sizeof(int32_t));
}

static int hook_end(struct backend *b, const struct batch *batch, const struct row_result *src,
                    struct row_result *dst)
{
    int rc = real_ops->step_end(b, batch, src, dst);
    seen.launch_us += (double)(now_ns() - begun_ns) / 1e3;
    return rc;
}

static int hook_done(struct backend *b, bool wait)
{
    int rc = real_ops->step_done(b, wait);
    if (rc != 1 || !real_ops->step_times)
        return rc;
    struct step_times t;
    real_ops->step_times(b, &t);
    seen.n_steps++;
    seen.n_replayed += t.is_replayed;
    seen.device_us += (double)t.device_us;
    if (t.gap_us >= 0 && seen.n_gaps < MAX_STEPS)
        seen.gaps[seen.n_gaps++] = t.gap_us;
    for (int32_t i = 0; i < t.n_spans; i++)
        add_span(span_name(t.spans, i, t.n_spans), &t.spans[i]);
    return rc;
}

static int by_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static int by_float(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void hook(struct backend *b)
{
    real_ops = b->ops;
    hooked = *real_ops;
    hooked.step_begin = hook_begin;
    hooked.step_end = hook_end;
    hooked.step_done = hook_done;
    b->ops = &hooked;
}

/* ---- a run ---- */

static bool keeps;     /* states, each prompt under a key of its own */
static int32_t n_keys; /* taken */

static double run_once(struct fixture *f, int32_t n, int32_t len, int32_t repeat)
{
    struct request **r = calloc((size_t)n, sizeof(struct request *));
    int32_t *ids = malloc((size_t)len * sizeof(int32_t));
    int n_done = 0;
    for (int32_t p = 0; p < n; p++) {
        for (int64_t t = 0; t < len; t++)
            ids[t] = (int32_t)((7919 * (t + 1) + 104729 * (p + 1) + 1299709 * (int64_t)repeat) %
                               f->arch.vocab);
        r[p] = fixture_request(f, ids, len, mode, 1, &n_done);
        if (!keeps)
            continue;
        r[p]->shares = true;
        r[p]->n_share_key = 1;
        r[p]->share_key = malloc(sizeof(int32_t));
        *r[p]->share_key = n_keys++;
    }
    int64_t from_ns = now_ns();
    for (int32_t p = 0; p < n; p++)
        queue_push(f->queue, r[p]);
    while (n_done < n)
        engine_turn(f->engine);
    double seconds = (double)(now_ns() - from_ns) / 1e9;
    for (int32_t p = 0; p < n; p++) {
        if (r[p]->outcome != OUTCOME_OK) {
            printf("FAIL prompt %d: %s\n", p, r[p]->error.text);
            exit(1);
        }
        request_unref(r[p]);
    }
    free(r);
    free(ids);
    return seconds;
}

static void run_shape(struct fixture *f, const char *name, int32_t n, int32_t len,
                      int32_t repeats)
{
    double s[MAX_REPEATS];
    size_t free_bytes[2], total;
    real_ops->memory(&f->backend, &free_bytes[0], &total);
    for (int i = 0; i < WARM_UPS; i++)
        run_once(f, n, len, 0);
    real_ops->memory(&f->backend, &free_bytes[1], &total);
    memset(&seen, 0, sizeof(seen));
    for (int32_t k = 0; k < repeats; k++)
        s[k] = run_once(f, n, len, k + 1);
    qsort(s, (size_t)repeats, sizeof(s[0]), by_double);
    qsort(seen.gaps, (size_t)seen.n_gaps, sizeof(seen.gaps[0]), by_float);
    double median = s[repeats / 2];
    printf(
        "%-10s wall %9.3f ms (%8.0f tok/s, best %.3f)  device %9.3f ms  launch %7.1f us a step",
        name, median * 1e3, n * (double)len / median, s[0] * 1e3,
        seen.device_us / repeats / 1e3, seen.launch_us / (seen.n_steps ? seen.n_steps : 1));
    if (seen.n_gaps)
        printf("  gaps %d: p50 %.1f p99 %.1f max %.1f us", seen.n_gaps,
               (double)seen.gaps[seen.n_gaps / 2],
               (double)seen.gaps[(int)((seen.n_gaps - 1) * 0.99)],
               (double)seen.gaps[seen.n_gaps - 1]);
    if (seen.n_replayed)
        printf("  replayed %d of %d, records take %.1f MB", seen.n_replayed, seen.n_steps,
               ((double)free_bytes[0] - (double)free_bytes[1]) / 1e6);
    printf("\n");
    fflush(stdout);
}

/* The last steps, as $TRACE_DIR/NAME.json. */
static void save_trace(struct fixture *f, const char *name)
{
    const char *dir = getenv("TRACE_DIR");
    char path[600];
    struct buf text;
    if (!dir)
        return;
    snprintf(path, sizeof(path), "%s/%s.json", dir, name);
    buf_init(&text);
    steps_render_trace(engine_feed(f->engine), 16, &text);
    FILE *out = fopen(path, "w");
    if (!out || fwrite(text.data, 1, text.len, out) != text.len || fclose(out) != 0)
        printf("FAIL %s is not written\n", path);
    buf_fini(&text);
}

/* ---- the table ---- */

struct cost {
    double flop, bytes;
};

static struct cost product(double T, double rows, double cols)
{
    return (struct cost){2 * T * rows * cols, 2 * (rows * cols + T * (rows + cols))};
}

/* One launch of an operation for T tokens of prompts of len tokens; 0 where it is not known. */
static struct cost cost_of(const struct arch *a, const char *name, double T, double len)
{
    const double C = 64, D = 128, M = a->M, HV = a->HV, H = a->H, F = a->F ? a->F : a->shared_F;
    const double HQ = a->HQ, HK = a->HK, qkv = (2 * HQ + 2 * HK) * a->D, top = a->top_k;
    const struct {
        const char *name;
        struct cost c;
    } table[] = {
        {"embed", {0, T * M * 6}},
        {"rmsnorm", {0, T * M * 12}},
        {"gdn_in", product(T, 2 * H * D + 2 * HV * D + 2 * HV, M)},
        {"gdn_conv", {0, T * (4 * a->conv_dim + 12 * HV)}},
        /* K K', Q K', the solve's two products, W S, Q S, P V, S += K' V; a chunk and head. */
        {"gdn_delta",
         {T / C * HV * 2 * (5 * C * C * D + 3 * C * D * D),
          T * (4 * H * D + 4 * HV * D + 8 * HV)}},
        {"gdn_norm", {0, T * HV * D * 6}},
        {"gdn_out", product(T, M, HV * D)},
        {"attn_in", product(T, qkv, M)},
        {"attn_prep", {0, T * (HQ + 2 * HK) * a->D * 4}},
        /* Half of the square, for two products. */
        {"attn", {2 * T * len * HQ * a->D, T * (3 * HQ + 2 * HK) * a->D * 2}},
        {"attn_out", product(T, M, HQ * a->D)},
        {"mlp_up", product(T, 2 * F, M)},
        {"swiglu", {0, T * F * 6}},
        {"mlp_down", product(T, M, F)},
        {"moe_route", product(T, a->E, M)},
        {"moe_sort", {0, T * top * 16}},
        {"moe_gate_up",
         {4 * T * top * a->moe_F * M,
          2 * (2.0 * a->E * a->moe_F * M + T * top * (M + a->moe_F))}},
        {"moe_down",
         {2 * T * top * a->moe_F * M,
          2 * (1.0 * a->E * a->moe_F * M + T * top * (M + a->moe_F))}},
        {"moe_combine", {0, T * M * 2 * (top + 3)}},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        if (strcmp(table[i].name, name) == 0)
            return table[i].c;
    return (struct cost){0, 0};
}

static int by_time(const void *a, const void *b)
{
    double x = ((const struct kind *)a)->us, y = ((const struct kind *)b)->us;
    return x > y ? -1 : x < y;
}

static void run_table(struct fixture *f, const char *name, int32_t n, int32_t len,
                      int32_t repeats)
{
    if (!real_ops->trace || real_ops->trace(&f->backend, true) != 0)
        return;
    run_once(f, n, len, 0);
    memset(&seen, 0, sizeof(seen));
    for (int32_t k = 0; k < repeats; k++)
        run_once(f, n, len, k + 1);
    real_ops->trace(&f->backend, false);
    double sum = 0, host_us = 0, T = (double)seen.T / seen.n_steps;
    qsort(seen.kinds, (size_t)seen.n_kinds, sizeof(seen.kinds[0]), by_time);
    printf("\n| %s: operation | calls | ms | share | GB | GFLOP | roofline | host us |\n",
           name);
    printf("|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; i < seen.n_kinds; i++) {
        const struct kind *k = &seen.kinds[i];
        double n_runs = (double)k->n / repeats, ms = k->us / repeats / 1e3;
        struct cost c = cost_of(&f->arch, k->name, T, len);
        double floor_s = fmax(c.bytes / COPY_BYTES_S, c.flop / BF16_FLOP_S) * n_runs;
        sum += k->us;
        printf("| %s | %.0f | %.3f | %.1f%% | %.3f | %.1f | ", k->name, n_runs, ms,
               100 * k->us / seen.device_us, c.bytes * n_runs / 1e9, c.flop * n_runs / 1e9);
        printf(c.bytes > 0 ? "%.0f%% | " : "| ", 100 * floor_s * 1e3 / ms);
        printf("%.0f |\n", k->host_us / repeats);
        host_us += k->host_us;
    }
    printf("| sum | | %.3f | %.1f%% of the traced %.3f ms | | | | %.0f |\n\n",
           sum / repeats / 1e3, 100 * sum / seen.device_us, seen.device_us / repeats / 1e3,
           host_us / repeats);
    fflush(stdout);
}

/* ---- opening ---- */

/* MODEL_DIR's config with another number of layers, in a folder of its own under $TMPDIR. */
static const char *with_layers(const char *dir, int layers, char out[512])
{
    char from[600], command[2048];
    const char *tmp = getenv("TMPDIR");
    if (layers == 0)
        return dir;
    snprintf(out, 512, "%s/gpu_prefill.XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(out))
        return NULL;
    snprintf(from, sizeof(from), "%s/config.json", dir);
    snprintf(command, sizeof(command),
             "sed 's/\"num_hidden_layers\": [0-9]*/\"num_hidden_layers\": %d/' '%s' "
             ">'%s/config.json'",
             layers, from, out);
    return system(command) == 0 ? out : NULL;
}

int main(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr, "usage: gpu_prefill MODEL_DIR LAYERS REPEATS "
                        "[table|readback|direct|keep|all] NxLEN...\n");
        return 2;
    }
    char temporary[512];
    struct fixture f;
    struct model_options o = {
        .max_step_tokens = 8192, .max_seqs = 64, .page_tokens = 64, .kv_tokens = 1 << 18};
    struct engine_config c = {.max_waiting = 256};
    int32_t repeats = atoi(argv[3]);
    setenv("TEST_BACKEND", "cuda", 0);
    const char *dir = with_layers(argv[1], atoi(argv[2]), temporary);
    int64_t from_ns = now_ns();
    if (!dir || repeats < 1 || repeats > MAX_REPEATS ||
        fixture_open_as(&f, dir, &o, 0, true) != 0)
        return 1;
    if (dir == temporary) {
        char path[600];
        snprintf(path, sizeof(path), "%s/config.json", dir);
        unlink(path);
        rmdir(dir);
    }
    printf("# %s, %d layers, %.1f GB of weights, opened in %.1f s\n", argv[1], f.arch.n_layers,
           (double)f.sizes.weights_bytes / 1e9, (double)(now_ns() - from_ns) / 1e9);
    hook(&f.backend);
    if (fixture_open_engine(&f, &c) != 0)
        return 1;
    bool is_table = false, is_readback = false, is_direct = false, is_keep = false;
    for (int i = 4; i < argc; i++) {
        int n, len;
        if (strcmp(argv[i], "table") == 0) {
            is_table = true;
            continue;
        }
        if (strcmp(argv[i], "all") == 0) {
            mode = LOGPROBS_ALL;
            continue;
        }
        if (strcmp(argv[i], "readback") == 0) {
            is_readback = true;
            continue;
        }
        if (strcmp(argv[i], "direct") == 0) {
            is_direct = true;
            continue;
        }
        if (strcmp(argv[i], "keep") == 0) {
            is_keep = true;
            continue;
        }
        if (sscanf(argv[i], "%dx%d", &n, &len) != 2)
            return 2;
        run_shape(&f, argv[i], n, len, repeats);
        if (is_table)
            run_table(&f, argv[i], n, len, 3);
        if (is_readback) {
            char name[64];
            snprintf(name, sizeof(name), "%s-as-it-is", argv[i]);
            save_trace(&f, name);
            hooked.chunk_map = hook_chunk_map;
            run_shape(&f, "readback", n, len, repeats);
            hooked.chunk_map = real_ops->chunk_map;
            snprintf(name, sizeof(name), "%s-readback", argv[i]);
            save_trace(&f, name);
        }
        if (is_direct) {
            hooked.replay = NULL;
            run_shape(&f, "direct", n, len, repeats);
            hooked.replay = real_ops->replay;
        }
        if (is_keep) {
            keeps = true;
            run_shape(&f, "keep", n, len, repeats);
            keeps = false;
        }
        is_table = is_readback = is_direct = is_keep = false;
        mode = LOGPROBS_NEXT;
    }
    f.backend.ops = real_ops;
    fixture_close(&f);
    return 0;
}
