/* Steps that are replayed (src/cuda_graph.c): counts are rounded up as said, a replayed step
 * gives the bits of the same step launched operation by operation, and making, dropping and
 * making records anew for more shapes than are kept takes no memory in the end. */
#include <math.h>

#include "../model_fixture.h"
#include "../tap.h"
#include "cuda_impl.h"

enum {
    N_SHAPES = 160, /* more than are kept, also when rounded */
    N_REPEATS = 8,  /* recorded at the third, in each entry of the ring */
    N_CYCLES = 8,
    WARM_CYCLES = 4, /* all records were dropped and made several times */
    /* A record's host memory is some 0.3 MiB here: these shapes leaked once, let alone in each
     * of the last cycles, would be far more. */
    MAX_GROWTH_KIB = 8 * 1024
};

/* ---- rounding ---- */

static void test_rounding(void)
{
    const struct backend_limits l = {
        .max_tokens = 8192, .max_seqs = 100, .max_rows = 8192, .max_pages = 300};
    int n_wrong = 0, n_shapes = 0;
    for (int32_t T = 1; T <= l.max_tokens; T += T < 700 ? 1 : 37) {
        for (int32_t N = 1; N <= l.max_seqs && N <= T; N += N < 40 ? 1 : 7) {
            struct cuda_shape s = {T, N, T / CHUNK_TOKENS + N, T - N + 1, 1 + T % 300}, r = s;
            cuda_shape_round(&l, &r);
            struct cuda_shape again = r;
            cuda_shape_round(&l, &again);
            bool is_good = r.n_tokens >= T && r.n_tokens <= l.max_tokens && r.n_seqs >= N &&
                           r.n_seqs <= l.max_seqs && r.max_len >= s.max_len &&
                           r.max_len <= r.n_tokens && r.max_pages >= s.max_pages &&
                           r.max_pages <= l.max_pages &&
                           /* N sequences of T tokens have at most so many chunks */
                           r.n_chunks >= (T - N) / CHUNK_TOKENS + N &&
                           r.n_tokens - T < (T <= 64    ? 16
                                             : T <= 512 ? 64
                                                        : 128) &&
                           memcmp(&r, &again, sizeof(r)) == 0;
            n_wrong += !is_good;
            n_shapes++;
        }
    }
    CHECK(n_wrong == 0, "rounding: %d of %d shapes are wrong", n_wrong, n_shapes);
}

/* ---- steps ---- */

enum { MAX_PROMPTS = 8, MAX_LEN = 320, N_TOP = 3 };

/* What n prompts gave. */
struct answers {
    float logprobs[MAX_PROMPTS][MAX_LEN];
    struct top_entry next[MAX_PROMPTS][N_TOP];
};

static void run(struct fixture *f, int32_t n, int32_t len, struct answers *out)
{
    struct request *r[MAX_PROMPTS];
    int32_t ids[MAX_LEN];
    int n_done = 0;
    memset(out, 0, sizeof(*out));
    for (int32_t p = 0; p < n; p++) {
        for (int32_t t = 0; t < len; t++)
            ids[t] = (7919 * (t + 1) + 104729 * (p + 1) + len) % f->arch.vocab;
        r[p] = fixture_request(f, ids, len, LOGPROBS_ALL, N_TOP, &n_done);
        queue_push(f->queue, r[p]);
    }
    while (n_done < n)
        engine_turn(f->engine);
    for (int32_t p = 0; p < n; p++) {
        if (r[p]->outcome != OUTCOME_OK) {
            printf("Bail out! %s\n", r[p]->error.text);
            exit(1);
        }
        memcpy(out->logprobs[p], r[p]->prompt_logprobs, (size_t)len * sizeof(float));
        memcpy(out->next[p], r[p]->next_top, sizeof(out->next[p]));
        request_unref(r[p]);
    }
}

static long rss_kib(void)
{
    char line[256];
    long kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "VmRSS: %ld", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib;
}

/* All shapes, each some times in a row. Returns how many answers differ from its first. */
static int run_cycle(struct fixture *f)
{
    static struct answers first, got;
    int n_differ = 0;
    for (int32_t s = 0; s < N_SHAPES; s++) {
        int32_t n = 1 + s % MAX_PROMPTS, len = 16 * (1 + s / MAX_PROMPTS) - s % 3;
        run(f, n, len, &first);
        for (int i = 1; i < N_REPEATS; i++) {
            run(f, n, len, &got);
            n_differ += memcmp(&first, &got, sizeof(got)) != 0;
        }
    }
    return n_differ;
}

static void test_replays(void)
{
    char dir[512];
    struct fixture f;
    struct model_options o = {.max_step_tokens = 2048};
    struct engine_config c = {.max_waiting = 16};
    size_t free_bytes[2], total;
    long kib = 0;
    int n_differ = 0;
    fixture_path(dir, "tests/models/demo");
    if (fixture_open(&f, dir, &o, 0) != 0 || fixture_open_engine(&f, &c) != 0)
        exit(1);
    for (int i = 0; i < N_CYCLES; i++) {
        n_differ += run_cycle(&f);
        f.backend.ops->memory(&f.backend, &free_bytes[i >= WARM_CYCLES], &total);
        printf("# cycle %d: %ld KiB resident, %zu MiB of the device free\n", i, rss_kib(),
               free_bytes[i >= WARM_CYCLES] >> 20);
        if (i == WARM_CYCLES - 1)
            kib = rss_kib();
    }
    long long steps = atomic_load(&f.metrics.steps);
    long long replayed = atomic_load(&f.metrics.steps_replayed);
    CHECK(n_differ == 0, "%lld of %lld steps were replayed: %d answers differ", replayed, steps,
          n_differ);
    CHECK(replayed > steps / 4 && replayed < steps * 3 / 4,
          "records were used, dropped and made anew");
    CHECK(rss_kib() - kib < MAX_GROWTH_KIB, "memory stays flat: %ld KiB and %ld more", kib,
          rss_kib() - kib);
    long long device_kib = ((long long)free_bytes[0] - (long long)free_bytes[1]) / 1024;
    CHECK(device_kib < MAX_GROWTH_KIB, "so does the device's: %lld KiB more", device_kib);
    fixture_close(&f);
}

int main(void)
{
    int n_devices = 0;
    test_rounding();
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        tap_skip("replayed steps", "no CUDA device");
        return tap_done();
    }
    setenv("TEST_BACKEND", "cuda", 1);
    test_replays();
    return tap_done();
}
