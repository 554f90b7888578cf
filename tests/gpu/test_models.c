/* Whole models on the GPU against the float32 answers of ../shared/fixtures: over all logprobs
 * of a folder pooled, mean and 99th percentile of the error are at most 1.1 times those of
 * transformers' own bfloat16 run (fixtures/README.md, whose figures are copied below). Prints
 * the error of the residual stream by layer, which says where a fault begins.
 *
 * Reads $SRCDIR/../shared/fixtures/NAME and tests/models/demo, as the CPU's tests do; a
 * folder's goldens may be cut to ids, logprobs and hidden (tests/gpu/bundle.py).
 * TEST_BACKEND=cpu runs the harness without a card. */
#include <math.h>

#include "../model_fixture.h"
#include "../tap.h"

enum { MAX_T = 1024, CASES = 16, MAX_POOL = 16384, MAX_LAYERS = 64 };

struct bar {
    const char *name;
    float mean, p99;
};

/* transformers' own bfloat16 run. */
static const struct bar bars[] = {{"next-moe-r2", 0.069f, 0.45f},
                                  {"q35-dense-r3", 0.063f, 0.24f},
                                  {"q35-moe-r2", 0.074f, 0.50f},
                                  {"q35-dense-r1", 0.046f, 0.18f},
                                  {"demo", 0.028f, 0.25f}};
static const float ALLOWED = 1.1f;

struct golden {
    struct fixture f;
    struct st_set *answers;
    int i_case;
    int32_t ids[MAX_T], n_ids;
    struct row_result rows[MAX_T];
    float errors[MAX_POOL];
    int n_errors;
    float hidden[MAX_LAYERS + 1]; /* worst relative error, by layer */
};

static const void *answer(const struct golden *g, const char *what, int64_t *n)
{
    char name[64];
    snprintf(name, sizeof(name), "case%d.%s", g->i_case, what);
    const struct st_tensor *t = st_find(g->answers, name);
    if (!t)
        return NULL;
    *n = 1;
    for (int32_t d = 0; d < t->n_dims; d++)
        *n *= t->dims[d];
    return t->data;
}

/* Relative error in the 2-norm of the residual stream. */
static void on_hidden(void *arg, int32_t layer, const float *x)
{
    struct golden *g = arg;
    char what[32];
    int64_t n;
    snprintf(what, sizeof(what), "hidden%d", layer);
    const float *want = answer(g, what, &n);
    if (!want || layer > MAX_LAYERS)
        return;
    float *got = malloc((size_t)n * 4);
    double d2 = 0, w2 = 0;
    if (got && g->f.backend.ops->download(&g->f.backend, got, x, (size_t)n * 4) == 0) {
        for (int64_t i = 0; i < n; i++) {
            d2 += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
            w2 += (double)want[i] * want[i];
        }
        /* Not fmaxf: NaN must stay. */
        float error = (float)sqrt(d2 / w2);
        if (!(error <= g->hidden[layer]))
            g->hidden[layer] = error;
    }
    free(got);
}

/* One prompt alone, a row for every token, in slot 1 on pages laid out backwards. */
static int run_case(struct golden *g)
{
    static int32_t positions[MAX_T], rows[MAX_T], targets[MAX_T], tops[MAX_T];
    int32_t pages[MAX_T / 64], n = g->n_ids, cu[2] = {0, n}, start = 0, slot = 1;
    for (int32_t t = 0; t < n; t++) {
        positions[t] = rows[t] = t;
        targets[t] = t + 1 < n ? g->ids[t + 1] : -1;
        tops[t] = TOP_MAX;
    }
    for (int i = 0; i < MAX_T / 64; i++)
        pages[i] = MAX_T / 64 - i;
    struct batch_host h = {.n_tokens = n,
                           .n_seqs = 1,
                           .n_chunks = (n + 63) / 64,
                           .n_rows = n,
                           .max_pages = MAX_T / 64,
                           .max_len = n,
                           .tokens = g->ids,
                           .positions = positions,
                           .cu_seqlens = cu,
                           .start = &start,
                           .slots = &slot,
                           .page_table = pages,
                           .rows = rows,
                           .targets = targets,
                           .row_top = tops};
    int rc = model_launch(g->f.model, &h, g->rows);
    return rc != 0 ? rc : model_done(g->f.model, true) == 1 ? 0 : ERR_DEVICE;
}

static bool pool_errors(struct golden *g)
{
    int64_t n;
    const float *want = answer(g, "logprobs", &n);
    bool is_finite = want != NULL;
    for (int32_t t = 0; want && t + 1 < g->n_ids && g->n_errors < MAX_POOL; t++) {
        float error = fabsf(g->rows[t].target_logprob - want[t]);
        is_finite = is_finite && isfinite(error) && g->rows[t].n_bad == 0;
        g->errors[g->n_errors++] = error;
    }
    return is_finite;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void judge(struct golden *g, const struct bar *bar)
{
    double sum = 0;
    qsort(g->errors, (size_t)g->n_errors, sizeof(float), by_value);
    for (int i = 0; i < g->n_errors; i++)
        sum += g->errors[i];
    double mean = sum / g->n_errors, p99 = g->errors[(int)((g->n_errors - 1) * 0.99)];
    CHECK(mean <= (double)(ALLOWED * bar->mean) && p99 <= (double)(ALLOWED * bar->p99),
          "%s: %d logprobs, error mean %.4f (bar %.4f), p99 %.3f (bar %.3f), max %.3f",
          bar->name, g->n_errors, mean, (double)(ALLOWED * bar->mean), p99,
          (double)(ALLOWED * bar->p99), (double)g->errors[g->n_errors - 1]);
    printf("# %s, residual stream by layer:", bar->name);
    for (int32_t l = 0; l <= g->f.arch.n_layers && l <= MAX_LAYERS; l++)
        printf(" %.2g", (double)g->hidden[l]);
    printf("\n");
}

static void run_folder(const struct bar *bar)
{
    static struct golden g;
    char dir[512], file[640];
    struct errmsg e;
    struct model_options o = {.max_step_tokens = MAX_T};
    if (!fixture_find(dir, bar->name)) {
        tap_skip(bar->name, "its fixture folder is not there");
        return;
    }
    memset(&g, 0, sizeof(g));
    snprintf(file, sizeof(file), "%s/goldens.safetensors", dir);
    if (strcmp(bar->name, "demo") == 0)
        fixture_path(dir, "tests/models/demo");
    if (!CHECK(fixture_open(&g.f, dir, &o, 0) == 0 && st_open_file(file, &g.answers, &e) == 0,
               "%s opens", bar->name))
        return;
    model_set_tap(g.f.model, on_hidden, &g);
    for (g.i_case = 0; g.i_case < CASES; g.i_case++) {
        int64_t n;
        const void *ids = answer(&g, "ids", &n);
        if (!ids || n > MAX_T)
            continue;
        g.n_ids = (int32_t)n;
        memcpy(g.ids, ids, (size_t)n * 4);
        int rc = run_case(&g);
        if (!CHECK(rc == 0, "%s: case %d of %d tokens runs (%d, %s)", bar->name, g.i_case,
                   g.n_ids, rc, model_why_lost(g.f.model)))
            break;
        if (!pool_errors(&g))
            CHECK(false, "%s: case %d of %d tokens is finite", bar->name, g.i_case, g.n_ids);
    }
    if (g.n_errors > 0)
        judge(&g, bar);
    st_close(g.answers);
    fixture_close(&g.f);
}

int main(void)
{
    struct errmsg e = {{0}};
    struct backend b;
    setenv("TEST_BACKEND", "cuda", 0);
    const struct backend_ops *ops = backend_find(fixture_backend(), &e);
    if (!ops || ops->open(&b, 0, &e) != 0) {
        tap_skip("whole models on a GPU", e.text);
        return tap_done();
    }
    ops->close(&b);
    for (size_t i = 0; i < sizeof(bars) / sizeof(bars[0]); i++)
        run_folder(&bars[i]);
    return tap_done();
}
