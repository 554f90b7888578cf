/* What the engine does when the device misbehaves, through a table whose steps can be made to
 * fail: a lost device fails what it holds and what comes, and gives all memory back; numbers
 * that are not finite fail their request alone. */
#include <math.h>

#include "model_fixture.h"
#include "tap.h"

static const struct backend_ops *real_ops;
static struct backend_ops hooked;
static int steps_until_lost; /* step_done's that still succeed; negative: all */
static int bad_row;          /* of the next step's results; negative: none */

static int hook_done(struct backend *b, bool wait)
{
    if (steps_until_lost == 0) {
        b->lost = "a test";
        return ERR_DEVICE;
    }
    int rc = real_ops->step_done(b, wait);
    if (rc == 1 && steps_until_lost > 0)
        steps_until_lost--;
    return rc;
}

static int hook_end(struct backend *b, const struct batch *batch, const struct row_result *src,
                    struct row_result *dst)
{
    int rc = real_ops->step_end(b, batch, src, dst);
    if (rc == 0 && bad_row >= 0 && bad_row < batch->n_rows) {
        dst[bad_row].lse = NAN;
        dst[bad_row].n_bad = 1;
    }
    return rc;
}

static void open_hooked(struct fixture *f)
{
    char dir[512];
    struct model_options o = {.max_step_tokens = 128, .max_seqs = 8, .state_slots = 4};
    struct engine_config c = {.max_waiting = 64};
    fixture_path(dir, "tests/models/demo");
    if (fixture_open(f, dir, &o, 1) != 0 || fixture_open_engine(f, &c) != 0)
        exit(1);
    real_ops = f->backend.ops;
    hooked = *real_ops;
    hooked.step_done = hook_done;
    hooked.step_end = hook_end;
    f->backend.ops = &hooked;
    steps_until_lost = bad_row = -1;
}

static void close_hooked(struct fixture *f)
{
    f->backend.ops = real_ops;
    fixture_close(f);
}

static bool pools_are_free(struct fixture *f)
{
    struct metrics_pools p;
    metrics_get_pools(&f->metrics, &p);
    return p.slots_held == 0 && p.pages_held == 0 && p.slots_free == f->sizes.o.state_slots &&
           p.pages_free == f->sizes.n_pages && p.requests_running == 0;
}

static struct request *push(struct fixture *f, int32_t n, enum logprobs_mode mode, int *n_done)
{
    int32_t ids[600];
    for (int32_t i = 0; i < n; i++)
        ids[i] = (7 * i + n) % f->arch.vocab;
    struct request *r = fixture_request(f, ids, n, mode, 2, n_done);
    if (queue_push(f->queue, r) != 0)
        exit(1);
    return r;
}

/* As a request ends when the device is lost. */
static bool is_lost(const struct request *r)
{
    return r->outcome == OUTCOME_ERROR && strstr(r->error.text, "device lost");
}

static void test_lost(int n_steps)
{
    enum { N = 8 };
    struct fixture f;
    struct request *r[N];
    int n_done = 0, n_lost = 0, n_ok = 0;
    open_hooked(&f);
    steps_until_lost = n_steps;
    /* More than slots: some run, some wait. */
    for (int i = 0; i < N; i++)
        r[i] = push(&f, 40 + 60 * i, LOGPROBS_NEXT, &n_done);
    for (int turn = 0; turn < 1000 && n_done < N; turn++)
        engine_turn(f.engine);
    for (int i = 0; i < N; i++) {
        n_ok += r[i]->outcome == OUTCOME_OK;
        n_lost += is_lost(r[i]);
        request_unref(r[i]);
    }
    CHECK(n_done == N && n_ok + n_lost == N && n_lost > 0 && (n_steps > 0) == (n_ok > 0),
          "lost after %d steps: %d answered, %d lost", n_steps, n_ok, n_lost);
    CHECK(atomic_load(&f.metrics.device_lost), "/health can say so");
    CHECK(pools_are_free(&f), "slots and pages are back");
    r[0] = push(&f, 10, LOGPROBS_NEXT, &n_done);
    engine_turn(f.engine);
    CHECK(n_done == N + 1 && is_lost(r[0]), "what comes later is lost at once");
    request_unref(r[0]);
    close_hooked(&f);
}

static void test_not_finite(void)
{
    struct fixture f;
    int n_done = 0;
    open_hooked(&f);
    bad_row = 20; /* of the first request, which has rows 0 to 39 */
    struct request *bad = push(&f, 40, LOGPROBS_ALL, &n_done);
    struct request *good = push(&f, 50, LOGPROBS_ALL, &n_done);
    while (n_done < 2)
        engine_turn(f.engine);
    struct request *one = bad->outcome == OUTCOME_ERROR ? bad : good;
    struct request *other = one == bad ? good : bad;
    CHECK(one->outcome == OUTCOME_ERROR && strstr(one->error.text, "not finite") &&
              other->outcome == OUTCOME_OK,
          "one of two in a step has a bad row: it fails alone (%d, %d)", bad->outcome,
          good->outcome);
    CHECK(atomic_load(&f.metrics.nan_rows) == 1 && !atomic_load(&f.metrics.device_lost),
          "it is counted");
    CHECK(pools_are_free(&f), "slots and pages are back");
    request_unref(bad);
    request_unref(good);
    bad_row = -1;
    struct request *after = push(&f, 40, LOGPROBS_ALL, &n_done);
    while (n_done < 3)
        engine_turn(f.engine);
    bool is_finite = after->outcome == OUTCOME_OK;
    for (int i = 1; i < 40; i++)
        is_finite = is_finite && isfinite(after->prompt_logprobs[i]);
    CHECK(is_finite, "the same prompt in the wiped slot is right");
    request_unref(after);
    close_hooked(&f);
}

int main(void)
{
    test_lost(0);
    test_lost(1);
    test_lost(5);
    test_not_finite();
    return tap_done();
}
