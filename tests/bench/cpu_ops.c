/* Times the CPU backend's operations on the shapes of a 0.8B model (gdn.md 1.8), and measures
 * the drift of a state over 128k tokens against f64 (gdn.md 4, fault 14).
 *
 *   tests/bench/cpu_ops [threads [op]]  a table of milliseconds a call, of ops whose names
 *                                      begin with op
 *   tests/bench/cpu_ops drift          the state's error in 1, 16 and 256 pieces */
#include <time.h>

#include "../gdn_ref.h"

enum { M = 1024, F = 3584, VOCAB = 248320, HQ = 8, HK = 2, D = 256, MAX_T = 2048, MAX_N = 8 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct bench {
    struct backend b;
    struct gdn_dims gd;
    struct attn_dims ad;
    struct batch batch;
    struct state_pool states;
    struct kv_pool kv;
    float *x, *h, *y, *p, *q, *k, *v, *g, *beta, *o, *w, *ones, *A_log, *conv_w, *inv_freq;
    struct weight gdn_in, gdn_out, attn_in, attn_out, gate_up, down, head;
    struct row_result *rows;
};

/* ---- one function an operation ---- */

static void run_rmsnorm(struct bench *t)
{
    struct op_rmsnorm a = {t->batch.n_tokens, M, 1e-6f, t->x, t->y, t->w, t->h};
    t->b.ops->rmsnorm(&t->b, &a);
}

static void run_conv(struct bench *t)
{
    struct op_gdn_conv a = {&t->batch,  t->gd, t->p, t->conv_w, t->A_log, t->w,
                            &t->states, t->q,  t->k, t->v,      t->g,     t->beta};
    t->b.ops->gdn_conv(&t->b, &a);
}

static void run_delta(struct bench *t)
{
    struct op_gdn_delta a = {
        &t->batch, t->gd, t->q, t->k, t->v, t->g, t->beta, &t->states, t->p + t->gd.conv_dim,
        t->w,      1e-6f, t->o};
    t->b.ops->gdn_delta(&t->b, &a);
}

static void run_prep(struct bench *t)
{
    struct op_attn_prep a = {&t->batch, t->ad,       t->p,  t->ones,
                             t->ones,   t->inv_freq, 1e-6f, &t->kv};
    t->b.ops->attn_prep(&t->b, &a);
}

static void run_attn(struct bench *t)
{
    struct op_attn a = {&t->batch, t->ad, t->p, &t->kv, t->o};
    t->b.ops->attn(&t->b, &a);
}

static void run_swiglu(struct bench *t)
{
    struct op_swiglu a = {t->batch.n_tokens, F, t->p, t->o};
    t->b.ops->swiglu(&t->b, &a);
}

static void run_head(struct bench *t)
{
    struct op_head a = {&t->batch, t->x, t->w, 1e-6f, M, &t->head, t->rows};
    t->b.ops->head(&t->b, &a);
}

static void multiply(struct bench *t, const struct weight *w, const float *a, float *c)
{
    struct op_matmul op = {t->batch.n_tokens, w, a, c, w->rows};
    t->b.ops->matmul(&t->b, &op);
}

static void run_gdn_products(struct bench *t)
{
    multiply(t, &t->gdn_in, t->h, t->p);
    multiply(t, &t->gdn_out, t->o, t->y);
}

static void run_attn_products(struct bench *t)
{
    multiply(t, &t->attn_in, t->h, t->p);
    multiply(t, &t->attn_out, t->o, t->y);
}

static void run_mlp_products(struct bench *t)
{
    multiply(t, &t->gate_up, t->h, t->p);
    multiply(t, &t->down, t->o, t->y);
}

/* ---- set-up ---- */

static struct weight random_weight(struct bench *t, int32_t rows, int32_t cols)
{
    struct rng r = {(uint64_t)rows};
    uint16_t *w = must(malloc((size_t)rows * cols * 2));
    for (size_t i = 0; i < (size_t)rows * cols; i++)
        w[i] = (uint16_t)(0x3c00 | (rng_u64(&r) & 0x80ff)); /* +-0.008 .. 0.03 */
    struct weight_part part = {w, DTYPE_BF16, rows};
    struct weight out;
    struct errmsg e;
    if (t->b.ops->weight_make(&t->b, &part, 1, 1, rows, cols, WEIGHT_MATMUL, &out, &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        exit(1);
    }
    return out;
}

static float *room(struct bench *t, struct rng *r, size_t n)
{
    float *p = must(t->b.ops->alloc(&t->b, n * sizeof(float)));
    for (size_t i = 0; i < n; i++)
        p[i] = (float)(rng_unit(r) - 0.5);
    return p;
}

static void bench_open(struct bench *t, int32_t n_threads)
{
    struct rng r = {1};
    t->gd = gdn_dims_of(16, 1, 128, 128);
    t->ad = (struct attn_dims){HQ, HK, D, 64, (2 * HQ + 2 * HK) * D};
    struct backend_limits l = {.max_tokens = MAX_T,
                               .max_seqs = MAX_N,
                               .max_rows = MAX_T,
                               .max_pages = MAX_T / 64,
                               .M = M,
                               .F = F,
                               .vocab = VOCAB,
                               .HQ = HQ,
                               .HV = t->gd.HV,
                               .conv_dim = t->gd.conv_dim};
    open_cpu(&t->b, n_threads, &l);
    size_t T = MAX_T;
    t->x = room(t, &r, T * M);
    t->h = room(t, &r, T * M);
    t->y = room(t, &r, T * M);
    t->p = room(t, &r, T * t->gd.ld);
    t->q = room(t, &r, T * 2048);
    t->k = room(t, &r, T * 2048);
    t->v = room(t, &r, T * 2048);
    t->g = room(t, &r, T * 16);
    t->beta = room(t, &r, T * 16);
    t->o = room(t, &r, T * F);
    t->w = room(t, &r, M);
    t->A_log = room(t, &r, 16);
    t->ones = room(t, &r, D); /* run again and again on its own output, q must not fade */
    for (int32_t i = 0; i < D; i++)
        t->ones[i] = 1;
    for (int32_t i = 0; i < M; i++)
        t->w[i] += 1;
    for (int32_t i = 0; i < 16; i++)
        t->A_log[i] = -4 + (float)i / 4; /* g of about -0.03 to -1 */
    t->conv_w = room(t, &r, (size_t)t->gd.conv_dim * 4);
    t->inv_freq = room(t, &r, 32);
    t->rows = must(malloc(T * sizeof(*t->rows)));
    t->b.ops->state_pool_make(&t->b, &t->gd, MAX_N, &t->states);
    t->b.ops->kv_pool_make(&t->b, &t->ad, MAX_N * MAX_T / 64, 64, &t->kv);
    t->gdn_in = random_weight(t, t->gd.ld, M);
    t->gdn_out = random_weight(t, M, 2048);
    t->attn_in = random_weight(t, t->ad.ld, M);
    t->attn_out = random_weight(t, M, HQ * D);
    t->gate_up = random_weight(t, 2 * F, M);
    t->down = random_weight(t, M, F);
    t->head = random_weight(t, VOCAB, M);
}

static struct pack make_batch(struct bench *t, int32_t n, int32_t len)
{
    struct piece pieces[MAX_N];
    static int32_t tables[MAX_N * MAX_T / 64], rows[MAX_T], targets[MAX_T], tops[MAX_T];
    int32_t max_pages = len / 64;
    for (int32_t i = 0; i < n; i++)
        pieces[i] = (struct piece){i, 0, len, i};
    for (int32_t i = 0; i < n * max_pages; i++)
        tables[i] = n * max_pages - 1 - i;
    struct pack pk;
    pack_make(&t->b, &pk, pieces, n, tables, max_pages);
    for (int32_t i = 0; i < n; i++) {
        rows[i] = (i + 1) * len - 1;
        targets[i] = -1;
        tops[i] = 20;
    }
    pk.b.n_rows = n;
    pk.b.rows = rows;
    pk.b.targets = targets;
    pk.b.row_top = tops;
    t->batch = pk.b;
    return pk;
}

static void bench_table(struct bench *t, const char *only)
{
    struct {
        const char *name;
        void (*run)(struct bench *);
    } ops[] = {{"rmsnorm", run_rmsnorm},
               {"gdn conv", run_conv},
               {"gdn delta", run_delta},
               {"attention prep", run_prep},
               {"attention", run_attn},
               {"swiglu", run_swiglu},
               {"products, GDN layer", run_gdn_products},
               {"products, attention layer", run_attn_products},
               {"products, MLP", run_mlp_products},
               {"head, last rows", run_head}};
    int32_t shapes[][2] = {{1, 512}, {1, 2048}, {8, 256}};
    printf("%-28s %10s %10s %10s   ms a call, %d threads\n", "", "1x512", "1x2048", "8x256",
           (int)cpu_pool_threads(cpu_impl_pool(&t->b)));
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        if (strncmp(ops[i].name, only, strlen(only)) != 0)
            continue;
        printf("%-28s", ops[i].name);
        for (int s = 0; s < 3; s++) {
            struct pack pk = make_batch(t, shapes[s][0], shapes[s][1]);
            run_conv(t); /* q, k, v, g as the delta gets them */
            double best = 1e9, spent = 0;
            for (int k = 0; k < 2 || (spent < 1 && k < 50); k++) {
                double start = now();
                ops[i].run(t);
                double took = now() - start;
                spent += took;
                best = took < best ? took : best;
            }
            printf(" %10.2f", 1e3 * best);
            fflush(stdout);
            pack_free(&pk);
        }
        printf("\n");
    }
}

/* ---- fault 14 at full length ---- */

static void bench_drift(void)
{
    enum { T = 131072, DIM = 128 };
    struct rng r = {14};
    struct gdn_dims d = gdn_dims_of(1, 1, DIM, DIM);
    struct gdn_input in = gdn_input_make(&r, d, T, 1e-4, 0.5);
    double *S = must(calloc((size_t)DIM * DIM, sizeof(double)));
    double *o = must(calloc((size_t)T * DIM, sizeof(double)));
    gdn_ref(&in, S, o);
    struct backend b;
    struct backend_limits l = gdn_limits(&d, T, 1);
    open_cpu(&b, 0, &l);
    struct state_pool pool;
    b.ops->state_pool_make(&b, &d, 1, &pool);
    float *out = poisoned((size_t)T * DIM), *S_out = poisoned((size_t)DIM * DIM);
    float *conv = poisoned((size_t)3 * d.conv_dim);
    printf("128k tokens, one head, g about -1e-4: largest error over largest value\n");
    for (int32_t n = 1; n <= 256; n *= 16) {
        for (int32_t i = 0; i < n; i++) {
            size_t at = (size_t)i * (T / n);
            struct piece piece = {0, (int32_t)at, T / n, 0};
            struct pack pk;
            pack_make(&b, &pk, &piece, 1, NULL, 0);
            struct op_gdn_delta a = {.b = &pk.b,
                                     .d = d,
                                     .q = in.q + at * DIM,
                                     .k = in.k + at * DIM,
                                     .v = in.v + at * DIM,
                                     .g = in.g + at,
                                     .beta = in.beta + at,
                                     .pool = &pool,
                                     .o = out + at * DIM};
            b.ops->gdn_delta(&b, &a);
            pack_free(&pk);
        }
        b.ops->state_read(&b, &d, &pool, 0, S_out, conv);
        printf("%4d pieces: S %.3g, o %.3g\n", (int)n,
               max_diff(S_out, S, (size_t)DIM * DIM) / max_abs(S, (size_t)DIM * DIM),
               max_diff(out, o, (size_t)T * DIM) / max_abs(o, (size_t)T * DIM));
    }
}

int main(int argc, char **argv)
{
    static struct bench t;
    if (argc > 1 && strcmp(argv[1], "drift") == 0) {
        bench_drift();
        return 0;
    }
    bench_open(&t, argc > 1 ? atoi(argv[1]) : 0);
    bench_table(&t, argc > 2 ? argv[2] : "");
    return 0;
}
