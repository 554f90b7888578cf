/* Prompts that share prefixes: whoever begins at another's state has the bits of a cold start,
 * and nothing leaks, whatever is cancelled, expired, evicted or broken meanwhile, or when
 * memory is short. Random trees of prompts from a printed seed, on pools of any size down to
 * one slot, compared with memcmp to each prompt alone. (gdn.md section 4, faults 20-25, 39.)
 * Plain program. */
#include <math.h>

#include "engine_world.h"
#include "log.h"
#include "short_memory.h"
#include "tap.h"
#include "tiny_model.h"

enum { N_PROMPTS = 40, N_TRUNKS = 3, MAX_AT_ONCE = 12, N_TOP = 3, MAX_TOKENS = 260 };

/* Sanitizers look for other faults and are slow: fewer cases there. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_WORLDS = 10, N_ROUNDS = 6 };
#else
enum { N_WORLDS = 50, N_ROUNDS = 14 };
#endif

struct reference {
    int32_t ids[MAX_TOKENS];
    int32_t n;
    float logprobs[MAX_TOKENS];
    struct top_entry top[MAX_TOKENS * N_TOP];
    struct top_entry next[N_TOP];
};

static struct reference refs[N_PROMPTS];

static const struct backend_ops *real_ops;
static struct backend_ops hooked;
static int bad_in;        /* steps until one has a bad row; negative: none */
static int n_mixed;       /* steps that depend on an order that a device may not keep */
static long long n_saves; /* states that were written to a slot of their own */

/* Copies whose order matters, or a slot that gets two states. */
static bool is_mixed(const struct batch_host *h)
{
    const struct slot_copy *c = h->copies;
    for (int32_t i = 0; i < h->n_copies; i++)
        for (int32_t k = 0; k < h->n_copies; k++)
            if (c[i].to == c[k].from || (i != k && c[i].to == c[k].to))
                return true;
    for (int32_t i = 0; i < h->n_chunks; i++) {
        int32_t slot = h->save_slots[i];
        n_saves += slot >= 0;
        for (int32_t k = 0; slot >= 0 && k < h->n_seqs; k++)
            if (h->slots[k] == slot)
                return true;
        for (int32_t k = 0; slot >= 0 && k < i; k++)
            if (h->save_slots[k] == slot)
                return true;
    }
    return false;
}

static int hook_begin(struct backend *b, const struct batch_host *h, struct batch *out)
{
    n_mixed += is_mixed(h);
    return real_ops->step_begin(b, h, out);
}

/* Results are in host memory when the step is done. */
static struct {
    struct row_result *results[2];
    bool is_bad[2];
    int n;
} ended;

static int hook_end(struct backend *b, const struct batch *batch, const struct row_result *src,
                    struct row_result *dst)
{
    ended.results[ended.n] = dst;
    ended.is_bad[ended.n++] = bad_in >= 0 && batch->n_rows > 0 && bad_in-- == 0;
    return real_ops->step_end(b, batch, src, dst);
}

/* As on a device: a step may not have ended when the next one is planned. */
static uint32_t n_asked;

static int hook_done(struct backend *b, bool wait)
{
    if (!wait && ++n_asked % 3)
        return 0;
    int rc = real_ops->step_done(b, wait);
    if (rc != 1)
        return rc;
    if (ended.is_bad[0])
        ended.results[0][0].n_bad = 1;
    ended.results[0] = ended.results[1];
    ended.is_bad[0] = ended.is_bad[1];
    ended.n--;
    return rc;
}

/* A few trunks; the others go on where one of those before them was cut, often at a multiple of
 * 64 or next to it. */
static void make_prompts(struct rng *rng, int32_t vocab)
{
    for (int i = 0; i < N_PROMPTS; i++) {
        struct reference *p = &refs[i];
        const struct reference *of = i < N_TRUNKS ? p : &refs[rng_int(rng, i)];
        int32_t n_shared = 0;
        p->n = i < N_TRUNKS ? MAX_TOKENS - rng_int(rng, 100) : 0;
        if (i >= N_TRUNKS) {
            n_shared = 64 * (1 + rng_int(rng, 4)) + rng_int(rng, 5) - 2;
            n_shared = n_shared < of->n ? n_shared : of->n;
            p->n = n_shared + rng_int(rng, 40);
            p->n = p->n < MAX_TOKENS ? p->n : MAX_TOKENS;
            memcpy(p->ids, of->ids, (size_t)n_shared * sizeof(int32_t));
        }
        for (int32_t t = n_shared; t < p->n; t++)
            p->ids[t] = rng_int(rng, vocab);
    }
}

static void make_references(const char *dir, struct rng *rng)
{
    struct fixture f;
    struct engine_config c = {.max_waiting = 4};
    struct model_options o = {.max_step_tokens = 512};
    int n_done = 0;
    if (fixture_open_as(&f, dir, &o, 2, true) != 0 || fixture_open_engine(&f, &c) != 0)
        exit(1);
    make_prompts(rng, f.arch.vocab);
    for (int i = 0; i < N_PROMPTS; i++) {
        struct reference *p = &refs[i];
        struct request *r = fixture_request(&f, p->ids, p->n, LOGPROBS_ALL, N_TOP, &n_done);
        fixture_run(&f, r);
        memcpy(p->logprobs, r->prompt_logprobs, (size_t)p->n * sizeof(float));
        memcpy(p->top, r->prompt_top, (size_t)p->n * N_TOP * sizeof(struct top_entry));
        memcpy(p->next, r->next_top, sizeof(p->next));
        request_unref(r);
    }
    fixture_close(&f);
}

static bool same_top(const struct top_entry *a, const struct top_entry *b, int32_t n)
{
    return memcmp(a, b, (size_t)n * sizeof(*a)) == 0;
}

static bool same_bits(const struct request *r, const struct reference *p)
{
    int32_t from = r->logprobs_from > 1 ? r->logprobs_from : 1, n_top = r->n_top;
    /* Of one that generates they are those of its last token. */
    const struct top_entry *next = r->sampling ? r->new_top : r->next_top;
    bool is_same = n_top == 0 || same_top(next, p->next, n_top);
    for (int32_t t = from; r->logprobs == LOGPROBS_ALL && t < p->n; t++)
        is_same &=
            memcmp(&r->prompt_logprobs[t], &p->logprobs[t], sizeof(float)) == 0 &&
            (n_top == 0 || same_top(r->prompt_top + t * n_top, p->top + t * N_TOP, n_top));
    return is_same;
}

struct count {
    long long requests, ok, hits, told, tokens_saved, cancelled, late, failed, kept;
    int differ, unsound;
};

/* Whether a state of r's is kept. */
static bool has_left(const struct fixture *f, const struct request *r)
{
    const struct prefix *p = &f->engine->prefix;
    for (int32_t i = 0; i < p->n_ranked; i++)
        if (p->ranking[i]->made_by == r->item.seq)
            return true;
    return false;
}

/* With penalties, which take memory for each token. */
static void generate(struct fixture *f, struct rng *rng, struct request *r)
{
    struct sampling s = {.max_new = 1 + rng_int(rng, 4), .presence_penalty = 1};
    if (request_generate(r, &s, f->sizes.o.page_tokens) != 0)
        abort();
}

static struct request *new_request(struct fixture *f, struct rng *rng, int i, int32_t key,
                                   bool once, int *n_done)
{
    const struct reference *p = &refs[i];
    enum logprobs_mode mode = rng_int(rng, 2) ? LOGPROBS_NEXT : LOGPROBS_ALL;
    struct request *r = fixture_request(f, p->ids, p->n, mode, rng_int(rng, N_TOP + 1), n_done);
    if (mode == LOGPROBS_ALL && rng_int(rng, 2))
        r->logprobs_from = p->n - rng_int(rng, p->n < 40 ? p->n : 40);
    r->shares = rng_int(rng, 16) > 0;
    r->shares_once = once;
    r->n_share_key = 1;
    r->share_key = malloc(sizeof(int32_t));
    *r->share_key = key;
    r->item.priority = rng_int(rng, 8) ? 0 : rng_int(rng, 3) - 1;
    if (rng_int(rng, 16) == 0)
        r->item.deadline_us = request_now_us() + rng_int(rng, 4000);
    return r;
}

/* Some requests at once, joining at random turns; then all pools are looked at. */
static void run_round(struct fixture *f, struct rng *rng, struct count *count, int32_t key,
                      bool once, int32_t fail_one_in)
{
    struct request *r[MAX_AT_ONCE];
    int which[MAX_AT_ONCE], n_done = 0, n = 1 + rng_int(rng, MAX_AT_ONCE), n_pushed = 0;
    bool is_rough = rng_int(rng, 3) == 0;
    bad_in = rng_int(rng, 8) ? -1 : rng_int(rng, 4);
    while (n_done < n) {
        while (n_pushed < n && rng_int(rng, 8) != 0) {
            int i = which[n_pushed] = rng_int(rng, N_PROMPTS);
            r[n_pushed] = new_request(f, rng, i, key, once, &n_done);
            if (fail_one_in && rng_int(rng, 4) == 0)
                generate(f, rng, r[n_pushed]);
            queue_push(f->queue, r[n_pushed++]);
        }
        short_memory.one_in = fail_one_in;
        engine_turn(f->engine);
        short_memory.one_in = 0;
        if (is_rough && n_pushed > 0 && rng_int(rng, 3) == 0)
            engine_cancel(f->engine, r[rng_int(rng, n_pushed)]);
        count->unsound += !world_is_sound(f);
    }
    bad_in = -1;
    for (int i = 0; i < n; i++) {
        count->requests++;
        count->cancelled += r[i]->outcome == OUTCOME_CANCELLED;
        count->late += r[i]->outcome == OUTCOME_DEADLINE;
        count->failed += r[i]->outcome == OUTCOME_ERROR;
        if (r[i]->outcome == OUTCOME_OK) {
            count->ok++;
            count->hits += r[i]->n_cached > 0;
            /* With numbers of tokens that it did not compute. */
            count->told += r[i]->n_cached > 0 && r[i]->wants_rows;
            count->tokens_saved += r[i]->n_cached;
            count->differ += !same_bits(r[i], &refs[which[i]]);
        }
        count->unsound += r[i]->outcome == OUTCOME_ERROR && has_left(f, r[i]);
        request_unref(r[i]);
    }
    const struct engine *en = f->engine;
    bool is_idle = world_is_idle(f) && en->slots.n_cached == en->prefix.n_ranked;
    if (once)
        is_idle &= en->prefix.n_ranked == 0 && en->prefix.n_nodes == 0;
    count->kept += en->prefix.n_ranked;
    count->unsound += !is_idle;
}

static void run_world(const char *dir, struct rng *rng, struct count *count, int i_world)
{
    struct fixture f;
    /* CUDA's own calls are not to fail. */
    bool is_short = i_world % 5 == 4 && strcmp(fixture_backend(), "cpu") == 0;
    int32_t fail_one_in = is_short ? 2 << i_world / 5 % 5 : 0;
    bool once = rng_int(rng, 4) == 0;
    int32_t page_tokens = rng_int(rng, 4) ? 64 : 128;
    struct model_options o = {.max_step_tokens = 64 * (1 + rng_int(rng, 6)),
                              .max_seqs = 1 + rng_int(rng, 8),
                              .page_tokens = page_tokens,
                              .kv_tokens = MAX_TOKENS + 128 + 64 * rng_int(rng, 32),
                              .max_prompt_tokens = MAX_TOKENS,
                              .state_slots = 1 + rng_int(rng, 16)};
    struct engine_config c = {.max_waiting = 64,
                              .policy = rng_int(rng, 2) ? SCHED_FCFS : SCHED_SHORT_FIRST,
                              .checkpoint_tokens = 64 * (1 + rng_int(rng, 4)),
                              .min_shared_tokens = 1 + rng_int(rng, 200),
                              .cache_share = 200 + rng_int(rng, 801),
                              .shuffle = true,
                              .shuffle_seed = rng_u64(rng)};
    world_open(&f, dir, &o, &c);
    real_ops = f.backend.ops;
    hooked = *real_ops;
    hooked.step_begin = hook_begin;
    hooked.step_end = hook_end;
    hooked.step_done = hook_done;
    f.backend.ops = &hooked;
    for (int i = 0; i < N_ROUNDS; i++)
        run_round(&f, rng, count, rng_int(rng, 8) == 0, once, fail_one_in);
    f.backend.ops = real_ops;
    fixture_close(&f);
}

/* Runs the first n tokens of the first prompt, sharing under a key (negative: not); returns how
 * many it took from a state. */
static int32_t run_lone(struct fixture *f, int32_t n, int32_t key, struct top_entry *next,
                        int32_t *n_pieces)
{
    int n_done = 0;
    struct request *r = fixture_request(f, refs[0].ids, n, LOGPROBS_NEXT, N_TOP, &n_done);
    r->shares = key >= 0;
    r->n_share_key = 1;
    r->share_key = malloc(sizeof(int32_t));
    *r->share_key = key;
    fixture_run(f, r);
    memcpy(next, r->next_top, N_TOP * sizeof(*next));
    *n_pieces = r->n_pieces;
    int32_t n_cached = r->n_cached;
    request_unref(r);
    return n_cached;
}

/* A prompt that is alone is one piece, and leaves its end and a state every checkpoint_tokens;
 * who begins at any of them has the bits of a cold start. Often enough that a backend that
 * replays steps does so with states kept at other slots. */
static void test_lone(const char *dir)
{
    enum { N_KEYS = 8 };
    struct fixture f;
    struct model_options o = {.max_step_tokens = 512, .kv_tokens = 8192, .state_slots = 64};
    struct engine_config c = {.max_waiting = 8, .checkpoint_tokens = 64, .cache_share = 900};
    const struct reference *p = &refs[0];
    struct top_entry hit[N_TOP], cold[N_TOP];
    int32_t n_pieces, n_kept = p->n / 64;
    int n_differ = 0, n_elsewhere = 0, n_cut = 0;
    world_open(&f, dir, &o, &c);
    for (int32_t key = 0; key < N_KEYS; key++) {
        n_elsewhere += run_lone(&f, p->n, key, cold, &n_pieces) != 0;
        n_differ += !same_top(cold, p->next, N_TOP);
        n_cut += n_pieces - 1;
    }
    CHECK(n_cut == 0 && f.engine->slots.n_cached == N_KEYS * n_kept,
          "%d prompts of %d tokens: %d cuts, %d states", N_KEYS, p->n, n_cut,
          f.engine->slots.n_cached);
    for (int32_t at = n_kept * 64; at > 0; at -= 64) {
        run_lone(&f, at + 1, -1, cold, &n_pieces);
        for (int32_t key = 0; key < N_KEYS; key++) {
            n_elsewhere += run_lone(&f, at + 1, key, hit, &n_pieces) != at;
            n_differ += !same_top(hit, cold, N_TOP);
        }
    }
    CHECK(n_differ == 0 && n_elsewhere == 0,
          "begun at each of them: %d differ from a cold start, %d began elsewhere", n_differ,
          n_elsewhere);
    long long n_replayed = atomic_load(&f.metrics.steps_replayed);
    CHECK(f.backend.ops->replay ? n_replayed > N_KEYS : n_replayed == 0,
          "%lld steps were replayed", n_replayed);
    fixture_close(&f);
}

/* What a prompt leaves in its middle, unasked, goes before the ends of others and takes no room
 * from them. */
static void test_spare(const char *dir)
{
    enum { N_KEYS = 6, N_TOKENS = 160 }; /* the end is at 128, a spare one at 64 */
    struct fixture f;
    struct model_options o = {.max_step_tokens = 512, .kv_tokens = 8192, .state_slots = 8};
    struct engine_config c = {.max_waiting = 8, .checkpoint_tokens = 64, .cache_share = 500};
    struct top_entry next[N_TOP];
    int32_t n_pieces;
    int n_full = 0, n_ends = 0;
    world_open(&f, dir, &o, &c);
    const struct engine *en = f.engine;
    for (int32_t key = 0; key < N_KEYS; key++) {
        run_lone(&f, N_TOKENS, key, next, &n_pieces);
        n_full += en->slots.n_cached == (key == 0 ? 2 : 4);
    }
    for (int32_t key = N_KEYS - 4; key < N_KEYS; key++)
        n_ends += run_lone(&f, N_TOKENS, key, next, &n_pieces) == 128;
    CHECK(n_full == N_KEYS && n_ends == 4,
          "half of 8 slots keep states: %d of %d times; %d of 4 are ends", n_full, N_KEYS,
          n_ends);
    fixture_close(&f);
}

/* A prompt that comes again begins as far on as it can: at the last page that ends before its
 * last token, also where that token ends a page. */
static void test_twice(const char *dir)
{
    enum { CHECKPOINT = 128 };
    struct fixture f;
    struct top_entry cold[N_TOP], hit[N_TOP];
    int32_t n_pieces, key = 0;
    for (int32_t P = 64; P <= 128; P *= 2) {
        struct model_options o = {
            .max_step_tokens = 512, .page_tokens = P, .kv_tokens = 8192, .state_slots = 32};
        struct engine_config c = {
            .max_waiting = 8, .checkpoint_tokens = CHECKPOINT, .cache_share = 900};
        world_open(&f, dir, &o, &c);
        for (int32_t n = 191; n <= 257; n += n % 64 == 1 ? 62 : 1) {
            int32_t first = run_lone(&f, n, ++key, cold, &n_pieces);
            int32_t again = run_lone(&f, n, key, hit, &n_pieces);
            CHECK(first == 0 && again == (n - 1) / P * P && same_top(cold, hit, N_TOP),
                  "%d tokens, pages of %d: %d are not computed again", n, P, again);
        }
        fixture_close(&f);
    }
}

static struct {
    struct engine *engine;
    struct request *r; /* to be cancelled behind the next layer's first operation */
} doomed;

static void hook_conv(struct backend *b, const struct op_gdn_conv *a)
{
    real_ops->gdn_conv(b, a);
    if (doomed.r)
        engine_cancel(doomed.engine, doomed.r);
    doomed.r = NULL;
}

/* A step that is abandoned has written some layers' states: none of them is kept. */
static void test_abandoned(const char *dir)
{
    struct fixture f;
    struct model_options o = {.max_step_tokens = 512, .kv_tokens = 4096, .state_slots = 16};
    struct engine_config c = {.max_waiting = 8, .checkpoint_tokens = 64, .cache_share = 900};
    const struct reference *p = &refs[0];
    struct top_entry next[N_TOP];
    int32_t n_pieces;
    int n_done = 0;
    world_open(&f, dir, &o, &c);
    real_ops = f.backend.ops;
    hooked = *real_ops;
    hooked.gdn_conv = hook_conv;
    f.backend.ops = &hooked;
    const struct engine *en = f.engine;
    struct request *r = fixture_request(&f, p->ids, p->n, LOGPROBS_NEXT, N_TOP, &n_done);
    r->shares = true;
    doomed.engine = f.engine;
    doomed.r = r;
    fixture_run(&f, r);
    CHECK(r->outcome == OUTCOME_CANCELLED && en->prefix.n_ranked == 0 &&
              en->prefix.n_nodes == 0 && en->slots.n_free == en->slots.n_total &&
              en->pages.n_free == en->pages.n_total && world_is_sound(&f),
          "a step that is abandoned leaves no state: %d slots of %d are free", en->slots.n_free,
          en->slots.n_total);
    request_unref(r);
    bool is_cold = run_lone(&f, p->n, 0, next, &n_pieces) == 0;
    CHECK(is_cold && same_top(next, p->next, N_TOP), "and the same prompt is right then");
    f.backend.ops = real_ops;
    fixture_close(&f);
}

/* test_share [seed] [worlds] */
int main(int argc, char **argv)
{
    char dir[64];
    struct rng rng = {argc > 1 ? strtoull(argv[1], NULL, 10) : 20261130};
    int n_worlds = argc > 2 ? atoi(argv[2]) : N_WORLDS;
    struct count count = {0};
    tiny_make(dir);
    bad_in = -1;
    log_set_level(-1); /* faults are part of it */
    printf("# seed %llu\n", (unsigned long long)rng.s);
    make_references(dir, &rng);
    test_lone(dir);
    test_spare(dir);
    test_twice(dir);
    test_abandoned(dir);
    for (int i = 0; i < n_worlds; i++)
        run_world(dir, &rng, &count, i);
    tiny_remove(dir);
    printf("# %lld requests: %lld answered, %lld of them from a state (%lld tokens), %lld "
           "told kept numbers, %lld cancelled, %lld late, %lld failed; states kept %lld\n",
           count.requests, count.ok, count.hits, count.tokens_saved, count.told,
           count.cancelled, count.late, count.failed, count.kept);
    CHECK(count.differ == 0, "%lld answers have the bits of a cold start, %d have not",
          count.ok, count.differ);
    CHECK(count.unsound == 0, "nothing leaks (%d)", count.unsound);
    CHECK(n_mixed == 0 && n_saves > 0, "no slot gets two states, of %lld kept (%d)", n_saves,
          n_mixed);
    CHECK(count.hits > count.ok / 8 && count.told > 0, "prompts share");
    CHECK(count.cancelled > 0 && count.failed > 0, "some were cancelled, some failed");
    CHECK(short_memory.n_failed > 0 || strcmp(fixture_backend(), "cpu") != 0,
          "memory was short %lld times", short_memory.n_failed);
    return tap_done();
}
