/* Sampling: the cuts and the draw on rows of logits against sorting in f64, penalties and
 * biases by their formulas, and seeds that give the same tokens in any company. */
#include <criterion/criterion.h>
#include <math.h>

#include "cpu_impl.h"
#include "model_fixture.h"
#include "rng.h"

enum { VOCAB = 1000 };

static float normal(struct rng *r)
{
    double u = rng_unit(r) + 1e-12, v = rng_unit(r);
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

static void fill(struct rng *r, float *x, int32_t n, bool has_ties)
{
    for (int32_t i = 0; i < n; i++) {
        x[i] = 3 * normal(r);
        if (has_ties)
            x[i] = roundf(x[i]);
    }
}

static int falling(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Probabilities of what may be chosen, the rest 0, by sorting. */
static void expected(int32_t n, const float *logits, const struct row_sample *s, double *p)
{
    static double sorted[VOCAB];
    double max = -INFINITY, sum = 0;
    for (int32_t i = 0; i < n; i++)
        p[i] = logits[i];
    for (int32_t i = 0; i < s->n_adjust; i++) {
        const struct row_adjust *a = &s->adjust[i];
        p[a->id] = (p[a->id] > 0 ? p[a->id] / a->scale : p[a->id] * a->scale) + a->add;
    }
    for (int32_t i = 0; i < n; i++)
        max = p[i] > max ? p[i] : max;
    for (int32_t i = 0; i < n; i++)
        sorted[i] = p[i] = exp((p[i] - max) * s->inv_temperature);
    qsort(sorted, (size_t)n, sizeof(*sorted), falling);
    double least = s->min_p, kept = 0, so_far = 0;
    if (s->top_k > 0 && s->top_k < n && sorted[s->top_k - 1] > least)
        least = sorted[s->top_k - 1];
    for (int32_t i = 0; i < n && sorted[i] >= least; i++)
        kept += sorted[i];
    for (int32_t i = 0; s->top_p < 1 && i < n && sorted[i] >= least; i++) {
        so_far += sorted[i];
        if (so_far >= s->top_p * kept) {
            least = sorted[i];
            break;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        p[i] = p[i] >= least ? p[i] : 0;
        sum += p[i];
    }
    for (int32_t i = 0; i < n; i++)
        p[i] /= sum;
}

/* u at the middle of each token's share must give that token: every token that may be chosen
 * is, with its probability, and no other. Shares under 1e-4 are passed over: f32 places their
 * edges to about 1e-6. */
Test(sampler, every_share_of_u_gives_its_token)
{
    const uint64_t seed = 20261129;
    struct rng r = {seed};
    static float x[VOCAB], work[VOCAB];
    static double p[VOCAB];
    int n_shares = 0;
    for (int round = 0; round < 400; round++) {
        int32_t n = 1 + rng_int(&r, VOCAB);
        struct row_adjust adjust[3];
        struct row_sample s = {.inv_temperature = 1 / (0.2f + 2 * (float)rng_unit(&r)),
                               .top_k = rng_int(&r, 2) ? 1 + rng_int(&r, 60) : 0,
                               .top_p = rng_int(&r, 2) ? 0.05f + 0.9f * (float)rng_unit(&r) : 1,
                               .min_p = rng_int(&r, 3) ? 0 : 0.2f * (float)rng_unit(&r),
                               .n_adjust = n > 10 ? rng_int(&r, 4) : 0,
                               .adjust = adjust};
        fill(&r, x, n, rng_int(&r, 2));
        for (int32_t i = 0; i < s.n_adjust; i++)
            adjust[i] = (struct row_adjust){i * 3, 1 + (float)rng_unit(&r),
                                            rng_int(&r, 4) ? normal(&r) : -INFINITY};
        expected(n, x, &s, p);
        double before = 0;
        for (int32_t i = 0; i < n; before += p[i++]) {
            if (p[i] < 1e-4)
                continue;
            s.u = (float)(before + p[i] / 2);
            int32_t id = cpu_sample_row(n, x, &s, work);
            cr_assert_eq(id, i, "seed %llu round %d n %d u %g: %d, not %d (p %g, %g)",
                         (unsigned long long)seed, round, (int)n, (double)s.u, (int)id, (int)i,
                         p[id], p[i]);
            n_shares++;
        }
        s.u = 0;
        cr_assert(p[cpu_sample_row(n, x, &s, work)] > 0);
        s.u = 0x1.fffffep-1f;
        cr_assert(p[cpu_sample_row(n, x, &s, work)] > 0);
    }
    printf("# seed %llu, %d shares\n", (unsigned long long)seed, n_shares);
    cr_assert_gt(n_shares, 10000);
}

Test(sampler, greedy_takes_the_lowest_of_equals)
{
    float x[5] = {1, 7, 3, 7, -2}, work[5];
    struct row_adjust a = {.id = 1, .scale = 1, .add = -1};
    struct row_sample s = {.inv_temperature = INFINITY, .top_p = 1};
    cr_expect_eq(cpu_sample_row(5, x, &s, work), 1);
    s.adjust = &a;
    s.n_adjust = 1;
    cr_expect_eq(cpu_sample_row(5, x, &s, work), 3);
    cr_expect_eq(x[1], 7, "the logits are left alone");
}

static const struct row_adjust *adjust_of(const struct row_sample *s, int32_t id)
{
    for (int32_t i = 0; i < s->n_adjust; i++)
        if (s->adjust[i].id == id)
            return &s->adjust[i];
    return NULL;
}

Test(sampler, penalties_biases_and_stops)
{
    int32_t prompt[] = {9, 4, 9, 2};
    struct token_bias bias[] = {{7, 1.5f}, {4, -2}};
    struct sampling s = {.max_new = 9,
                         .min_new = 2,
                         .temperature = 0.5f,
                         .presence_penalty = 0.25f,
                         .frequency_penalty = 0.5f,
                         .repetition_penalty = 1.25f,
                         .bias = bias,
                         .n_bias = 2,
                         .stop_ids = {5, 7},
                         .n_stop = 2};
    struct sampler m;
    cr_assert_eq(sampler_init(&m, &s, prompt, 4), 0);
    cr_expect(!sampler_is_plain(&m) && sampler_is_stop(&m, 7) && !sampler_is_stop(&m, 4));
    struct row_sample a = sampler_next(&m);
    cr_expect_eq(a.inv_temperature, 2);
    cr_expect_eq(a.n_adjust, 5, "the prompt's three, the biased and the stops");
    cr_expect(adjust_of(&a, 9)->scale == 1.25f && adjust_of(&a, 9)->add == 0);
    cr_expect(adjust_of(&a, 4)->scale == 1.25f && adjust_of(&a, 4)->add == -2);
    cr_expect(isinf(adjust_of(&a, 7)->add) && isinf(adjust_of(&a, 5)->add), "no stop yet");
    cr_assert_eq(sampler_add(&m, 9), 0);
    cr_assert_eq(sampler_add(&m, 11), 0);
    a = sampler_next(&m);
    cr_expect_eq(adjust_of(&a, 9)->add, -0.75f);
    cr_expect(adjust_of(&a, 11)->scale == 1.25f && adjust_of(&a, 11)->add == -0.75f);
    cr_expect(adjust_of(&a, 7)->add == 1.5f && adjust_of(&a, 5)->add == 0, "stops may come");
    cr_assert_eq(sampler_add(&m, 9), 0);
    a = sampler_next(&m);
    cr_expect_eq(adjust_of(&a, 9)->add, -1.25f);
    sampler_fini(&m);
    struct sampling plain = {.max_new = 3};
    cr_assert_eq(sampler_init(&m, &plain, prompt, 4), 0);
    cr_assert_eq(sampler_add(&m, 9), 0);
    cr_expect(sampler_is_plain(&m));
    sampler_fini(&m);
}

/* Draws are uniform enough, differ by seed and by place, and do not depend on the calls
 * before. */
Test(sampler, draws)
{
    enum { N = 4000 };
    double sum = 0;
    int n_same = 0;
    for (int seed = 0; seed < 2; seed++) {
        struct sampling s = {.max_new = N, .temperature = 1, .seed = (uint64_t)seed};
        struct sampler m;
        cr_assert_eq(sampler_init(&m, &s, NULL, 0), 0);
        static float first[N];
        for (int i = 0; i < N; i++) {
            float u = sampler_next(&m).u;
            cr_assert(u >= 0 && u < 1 && u == sampler_next(&m).u);
            sum += u;
            n_same += seed == 1 && u == first[i];
            first[i] = u;
            sampler_add(&m, 1);
        }
        sampler_fini(&m);
    }
    /* The mean of 8,000 has a standard deviation of 0.0032. */
    cr_expect(fabs(sum / (2 * N) - 0.5) < 0.013, "mean %g", sum / (2 * N));
    cr_expect_lt(n_same, 3);
}

/* The same seed gives the same tokens and logprobs alone and in company; another seed
 * others. */
Test(sampler, a_seed_gives_its_tokens_in_any_company)
{
    enum { ROUNDS = 4, OTHERS = 5, NEW = 24, PROMPT = 70 };
    struct fixture f;
    char dir[512];
    struct rng r = {77};
    struct model_options o = {.max_step_tokens = 256, .max_seqs = 8};
    struct engine_config c = {.max_waiting = 16};
    fixture_path(dir, "tests/models/demo");
    cr_assert_eq(fixture_open(&f, dir, &o, 2), 0);
    cr_assert_eq(fixture_open_engine(&f, &c), 0);
    int32_t prompt[PROMPT], first[NEW];
    float logprobs[NEW];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = rng_int(&r, f.arch.vocab);
    for (int round = 0; round < ROUNDS; round++) {
        int n_done = 0, n_asked = 0;
        struct request *all[OTHERS + 1];
        int n_others = round == 0 ? 0 : OTHERS;
        for (int i = 0; i <= n_others; i++) {
            bool is_it = i == n_others;
            int32_t n = is_it ? PROMPT : 1 + rng_int(&r, PROMPT);
            all[i] = fixture_request(&f, prompt, n, is_it ? LOGPROBS_NONE : LOGPROBS_ALL, 3,
                                     &n_done);
            struct sampling s = {.max_new = is_it ? NEW : 1 + rng_int(&r, 30),
                                 .temperature = 0.9f,
                                 .top_p = 0.95f,
                                 .repetition_penalty = 1.1f,
                                 .seed = is_it ? (round == ROUNDS - 1 ? 6 : 5)
                                               : (uint64_t)rng_int(&r, 1000)};
            cr_assert_eq(request_generate(all[i], &s, f.sizes.o.page_tokens), 0);
            cr_assert_eq(queue_push(f.queue, all[i]), 0);
            n_asked++;
        }
        while (n_done < n_asked)
            engine_turn(f.engine);
        const struct request *it = all[n_others];
        cr_assert(it->outcome == OUTCOME_OK && it->n_new == NEW, "%s", it->error.text);
        bool is_same = true;
        for (int i = 0; i < NEW; i++) {
            if (round == 0) {
                first[i] = it->ids[PROMPT + i];
                logprobs[i] = it->new_logprobs[i];
            }
            is_same &= it->ids[PROMPT + i] == first[i] && it->new_logprobs[i] == logprobs[i];
        }
        cr_expect_eq(is_same, round < ROUNDS - 1, "round %d", round);
        for (int i = 0; i < n_asked; i++)
            request_unref(all[i]);
    }
    struct metrics_pools p;
    metrics_get_pools(&f.metrics, &p);
    cr_expect(p.slots_held == 0 && p.pages_held == 0);
    fixture_close(&f);
}
