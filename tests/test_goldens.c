/* Whole models against the float32 answers of ../shared/fixtures. The bars are the issue's:
 * |logprob difference| <= 1e-3 (the answers' own error is under 1e-4), state, conv and KV
 * within 1e-4 of the tensor's largest value. Every test prints the worst difference it saw. */
#include <criterion/criterion.h>
#include <math.h>

#include "model_fixture.h"

enum { MAX_T = 1024, CASES = 16 };

static const float LOGPROB_BAR = 1e-3f, STATE_BAR = 1e-4f;

struct worst {
    float logprob, top, lse, state, conv, kv, hidden;
    int n_logprobs;
};

struct golden {
    struct fixture f;
    struct st_set *answers;
    int32_t ids[MAX_T];
    int32_t n_ids;
    int32_t pages[MAX_T / 64];
    struct row_result rows[MAX_T];
    struct worst w;
};

static const float *answer(const struct golden *g, int i_case, const char *what, int64_t *n)
{
    char name[64];
    snprintf(name, sizeof(name), "case%d.%s", i_case, what);
    const struct st_tensor *t = st_find(g->answers, name);
    if (!t)
        return NULL;
    *n = 1;
    for (int32_t d = 0; d < t->n_dims; d++)
        *n *= t->dims[d];
    return t->data;
}

static float max_diff(const float *a, const float *b, int64_t n, float *largest)
{
    float d = 0;
    *largest = 0;
    for (int64_t i = 0; i < n; i++) {
        cr_assert(isfinite(a[i]));
        d = fmaxf(d, fabsf(a[i] - b[i]));
        *largest = fmaxf(*largest, fabsf(b[i]));
    }
    return d;
}

/* Runs the case's prompt in slot 1 on pages laid out backwards, with a row for every token. */
static bool run_case(struct golden *g, int i_case)
{
    int64_t n;
    const void *ids = answer(g, i_case, "ids", &n);
    if (!ids)
        return false;
    cr_assert(n <= MAX_T);
    g->n_ids = (int32_t)n;
    memcpy(g->ids, ids, (size_t)n * 4);
    static int32_t positions[MAX_T], rows[MAX_T], targets[MAX_T], tops[MAX_T];
    int32_t cu[2] = {0, (int32_t)n}, start = 0, slot = 1;
    for (int32_t t = 0; t < n; t++) {
        positions[t] = rows[t] = t;
        targets[t] = t + 1 < n ? g->ids[t + 1] : -1;
        tops[t] = TOP_MAX;
    }
    for (int i = 0; i < MAX_T / 64; i++)
        g->pages[i] = MAX_T / 64 - i;
    struct batch_host h = {.n_tokens = (int32_t)n,
                           .n_seqs = 1,
                           .n_chunks = (int32_t)(n + 63) / 64,
                           .n_rows = (int32_t)n,
                           .max_pages = MAX_T / 64,
                           .max_len = (int32_t)n,
                           .tokens = g->ids,
                           .positions = positions,
                           .cu_seqlens = cu,
                           .start = &start,
                           .slots = &slot,
                           .page_table = g->pages,
                           .rows = rows,
                           .targets = targets,
                           .row_top = tops};
    cr_assert_eq(model_launch(g->f.model, &h, g->rows), 0);
    cr_assert_eq(model_done(g->f.model, true), 1);
    return true;
}

static void check_rows(struct golden *g, int i_case)
{
    int64_t n, n_lse;
    const float *lp = answer(g, i_case, "logprobs", &n);
    const float *lse = answer(g, i_case, "lse", &n_lse);
    int64_t n_all = 0, n_last = 0;
    const float *all = answer(g, i_case, "all_logits", &n_all);
    const float *last = answer(g, i_case, "last_logits", &n_last);
    for (int32_t t = 0; t < g->n_ids; t++) {
        const struct row_result *r = &g->rows[t];
        cr_assert_eq(r->n_bad, 0);
        g->w.lse = fmaxf(g->w.lse, fabsf(r->lse - lse[t]));
        if (t + 1 < g->n_ids) {
            g->w.logprob = fmaxf(g->w.logprob, fabsf(r->target_logprob - lp[t]));
            g->w.n_logprobs++;
        }
        const float *logits = all ? all + (int64_t)t * g->f.arch.vocab : last;
        if (!all && t + 1 < g->n_ids)
            continue;
        for (int k = 0; k < TOP_MAX; k++) {
            cr_assert(r->top_id[k] >= 0 && r->top_id[k] < g->f.arch.vocab);
            float want = logits[r->top_id[k]] - lse[t];
            g->w.top = fmaxf(g->w.top, fabsf(r->top_logprob[k] - want));
        }
    }
    cr_assert_lt(g->w.logprob, LOGPROB_BAR, "case %d: %g", i_case, g->w.logprob);
    cr_assert_lt(g->w.top, LOGPROB_BAR, "case %d: %g", i_case, g->w.top);
    cr_assert_lt(g->w.lse, LOGPROB_BAR, "case %d: %g", i_case, g->w.lse);
}

static void check_tensor(struct golden *g, int i_case, const char *what, int32_t layer,
                         const float *got, float *worst)
{
    char name[32];
    int64_t n;
    float largest;
    snprintf(name, sizeof(name), "%s%d", what, layer);
    const float *want = answer(g, i_case, name, &n);
    cr_assert_not_null(want, "case %d has no %s", i_case, name);
    float d = max_diff(got, want, n, &largest);
    cr_assert_leq(d, STATE_BAR * largest, "case %d %s: %g of %g", i_case, name, d, largest);
    *worst = fmaxf(*worst, d / largest);
}

/* State, conv window and KV after the prompt, where the folder has them. */
static void check_state(struct golden *g, int i_case)
{
    const struct arch *a = &g->f.arch;
    int64_t n;
    char name[32];
    int32_t first_gdn = -1;
    for (int32_t l = 0; l < a->n_layers && first_gdn < 0; l++)
        first_gdn = a->layers[l] == LAYER_GDN ? l : -1;
    snprintf(name, sizeof(name), "state%d", first_gdn);
    if (!answer(g, i_case, name, &n))
        return;
    float *S = malloc((size_t)a->HV * a->K * a->V * 4);
    float *conv = malloc((size_t)a->conv_dim * 3 * 4);
    float *k = malloc((size_t)a->HK * g->n_ids * a->D * 4);
    float *v = malloc((size_t)a->HK * g->n_ids * a->D * 4);
    int32_t i_gdn = 0, i_attn = 0;
    for (int32_t l = 0; l < a->n_layers; l++) {
        if (a->layers[l] == LAYER_GDN) {
            cr_assert_eq(model_state_read(g->f.model, i_gdn++, 1, S, conv), 0);
            check_tensor(g, i_case, "state", l, S, &g->w.state);
            check_tensor(g, i_case, "conv", l, conv, &g->w.conv);
        } else {
            cr_assert_eq(model_kv_read(g->f.model, i_attn++, g->pages, g->n_ids, k, v), 0);
            check_tensor(g, i_case, "k", l, k, &g->w.kv);
            check_tensor(g, i_case, "v", l, v, &g->w.kv);
        }
    }
    free(S);
    free(conv);
    free(k);
    free(v);
}

struct tap {
    struct golden *g;
    int i_case;
};

/* Hidden states may differ by what ten roundings of their largest value make; the folders give
 * 2e-5 between two float32 forms, so 2e-4 relative is a fault and not noise. */
static void check_hidden(void *arg, int32_t layer, const float *x)
{
    struct tap *t = arg;
    char name[32];
    int64_t n;
    float largest;
    snprintf(name, sizeof(name), "hidden%d", layer);
    const float *want = answer(t->g, t->i_case, name, &n);
    if (!want)
        return;
    float d = max_diff(x, want, n, &largest);
    cr_assert_leq(d, 2e-4f * largest, "case %d %s: %g of %g", t->i_case, name, d, largest);
    t->g->w.hidden = fmaxf(t->g->w.hidden, d / largest);
}

static void open_golden(struct golden *g, const char *name)
{
    char dir[512], file[640];
    memset(g, 0, sizeof(*g));
    if (!fixture_find(dir, name))
        cr_skip_test("../shared/fixtures/%s is not there", name);
    snprintf(file, sizeof(file), "%s/goldens.safetensors", dir);
    if (strcmp(name, "demo") == 0)
        fixture_path(dir, "tests/models/demo");
    struct model_options o = {.max_step_tokens = MAX_T};
    cr_assert_eq(fixture_open(&g->f, dir, &o, 0), 0);
    struct errmsg e;
    cr_assert_eq(st_open_file(file, &g->answers, &e), 0, "%s", e.text);
}

static void run_folder(const char *name)
{
    static struct golden g;
    open_golden(&g, name);
    int n_cases = 0;
    for (int i = 0; i < CASES; i++) {
        struct tap tap = {&g, i};
        model_set_tap(g.f.model, check_hidden, &tap);
        if (!run_case(&g, i))
            continue;
        check_rows(&g, i);
        check_state(&g, i);
        n_cases++;
    }
    cr_assert_gt(n_cases, 0);
    fprintf(stderr,
            "# %s: %d cases, %d logprobs: worst logprob %.2g top %.2g lse %.2g; relative: "
            "state %.2g conv %.2g kv %.2g hidden %.2g\n",
            name, n_cases, g.w.n_logprobs, g.w.logprob, g.w.top, g.w.lse, g.w.state, g.w.conv,
            g.w.kv, g.w.hidden);
    st_close(g.answers);
    fixture_close(&g.f);
}

/* Greedy continuation by prefilling the growing prompt, always with the golden's token; a miss
 * counts only where the recorded margin exceeds 1e-3. */
static void run_greedy(const char *name)
{
    static struct golden g;
    open_golden(&g, name);
    struct engine_config c = {.max_waiting = 4};
    cr_assert_eq(fixture_open_engine(&g.f, &c), 0);
    int n_steps = 0, n_done = 0;
    for (int i = 0; i < CASES; i++) {
        int64_t n, n_ids;
        const int32_t *greedy = (const int32_t *)answer(&g, i, "greedy", &n);
        const float *margin = answer(&g, i, "greedy_margin", &n);
        const int32_t *ids = (const int32_t *)answer(&g, i, "ids", &n_ids);
        if (!greedy)
            continue;
        memcpy(g.ids, ids, (size_t)n_ids * 4);
        for (int64_t t = 0; t < n; t++) {
            struct request *r =
                fixture_request(&g.f, g.ids, (int32_t)(n_ids + t), LOGPROBS_NEXT, 0, &n_done);
            cr_assert_eq(fixture_run(&g.f, r), 0);
            cr_assert_eq(r->outcome, OUTCOME_OK);
            if (margin[t] > 1e-3f)
                cr_assert_eq(r->next_top[0].id, greedy[t], "case %d token %d", i, (int)t);
            request_unref(r);
            g.ids[n_ids + t] = greedy[t];
            n_steps++;
        }
    }
    cr_assert_gt(n_steps, 0);
    st_close(g.answers);
    fixture_close(&g.f);
}

/* The same tokens by generating them, all cases side by side, up to the first whose margin is
 * within 1e-3. */
static void run_generated(const char *name)
{
    static struct golden g;
    open_golden(&g, name);
    struct engine_config c = {.max_waiting = 2 * CASES};
    cr_assert_eq(fixture_open_engine(&g.f, &c), 0);
    struct request *r[CASES] = {NULL};
    int n_done = 0, n_asked = 0, n_tokens = 0;
    for (int i = 0; i < CASES; i++) {
        int64_t n, n_ids;
        const int32_t *ids = (const int32_t *)answer(&g, i, "ids", &n_ids);
        if (!answer(&g, i, "greedy", &n))
            continue;
        r[i] = fixture_request(&g.f, ids, (int32_t)n_ids, LOGPROBS_NONE, 2, &n_done);
        struct sampling s = {.max_new = (int32_t)n};
        cr_assert_eq(request_generate(r[i], &s, g.f.sizes.o.page_tokens), 0);
        cr_assert_eq(queue_push(g.f.queue, r[i]), 0);
        n_asked++;
    }
    while (n_done < n_asked)
        engine_turn(g.f.engine);
    for (int i = 0; i < CASES; i++) {
        int64_t n;
        if (!r[i])
            continue;
        const int32_t *greedy = (const int32_t *)answer(&g, i, "greedy", &n);
        const float *margin = answer(&g, i, "greedy_margin", &n);
        cr_assert(r[i]->outcome == OUTCOME_OK && r[i]->n_new == n &&
                      r[i]->finish == FINISH_LENGTH,
                  "%s", r[i]->error.text);
        for (int64_t t = 0; t < n && margin[t] > 1e-3f; t++) {
            cr_assert_eq(r[i]->ids[r[i]->n_prompt + t], greedy[t], "case %d token %d", i,
                         (int)t);
            cr_expect_eq(r[i]->new_top[2 * t].id, greedy[t]);
            cr_expect_eq(r[i]->new_logprobs[t], r[i]->new_top[2 * t].logprob);
            n_tokens++;
        }
        request_unref(r[i]);
    }
    cr_assert_gt(n_tokens, 0);
    struct metrics_pools p;
    metrics_get_pools(&g.f.metrics, &p);
    cr_expect(p.slots_held == 0 && p.pages_held == 0);
    st_close(g.answers);
    fixture_close(&g.f);
}

#define FOLDER(id, name)                                                                       \
    Test(goldens, id)                                                                          \
    {                                                                                          \
        run_folder(name);                                                                      \
    }                                                                                          \
    Test(greedy, id)                                                                           \
    {                                                                                          \
        run_greedy(name);                                                                      \
    }                                                                                          \
    Test(generated, id)                                                                        \
    {                                                                                          \
        run_generated(name);                                                                   \
    }

FOLDER(next_moe_r2, "next-moe-r2")
FOLDER(q35_dense_r1, "q35-dense-r1")
FOLDER(q35_dense_r3, "q35-dense-r3")
FOLDER(q35_moe_r2, "q35-moe-r2")
FOLDER(demo, "demo")
