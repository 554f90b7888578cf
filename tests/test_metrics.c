/* Counters, the snapshot of the pools, and the Prometheus text. Also the numbers of answers. */
#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "metrics.h"
#include "rng.h"

static struct buf render(struct metrics *m)
{
    struct buf b;
    buf_init(&b);
    metrics_render(m, 2500000, &b);
    buf_cstr(&b);
    return b;
}

Test(metrics, names_and_values)
{
    struct metrics m;
    cr_assert_eq(metrics_init(&m), 0);
    const struct metrics_pools p = {1, 2, 3, 40, 50, 60, 7, 8};
    metrics_set_pools(&m, &p);
    metrics_count(&m, OUTCOME_OK);
    metrics_count(&m, OUTCOME_CANCELLED);
    metrics_count(&m, OUTCOME_CANCELLED);
    atomic_store(&m.steps, 11);
    atomic_store(&m.step_tokens, 5000000000);
    atomic_store(&m.connections, 9);
    struct buf b = render(&m);
    static const char *const lines[] = {"prefilld_requests_running 7\n",
                                        "prefilld_requests_waiting 8\n",
                                        "prefilld_queue_age_seconds 2.500000\n",
                                        "prefilld_state_slots{state=\"free\"} 1\n",
                                        "prefilld_state_slots{state=\"held\"} 2\n",
                                        "prefilld_state_slots{state=\"cached\"} 3\n",
                                        "prefilld_kv_pages{state=\"free\"} 40\n",
                                        "prefilld_kv_pages{state=\"held\"} 50\n",
                                        "prefilld_kv_pages{state=\"cached\"} 60\n",
                                        "prefilld_connections 9\n",
                                        "# TYPE prefilld_steps_total counter\n"
                                        "prefilld_steps_total 11\n",
                                        "prefilld_step_tokens_total 5000000000\n",
                                        "# TYPE prefilld_requests_total counter\n",
                                        "prefilld_requests_total{outcome=\"ok\"} 1\n",
                                        "prefilld_requests_total{outcome=\"invalid\"} 0\n",
                                        "prefilld_requests_total{outcome=\"overload\"} 0\n",
                                        "prefilld_requests_total{outcome=\"deadline\"} 0\n",
                                        "prefilld_requests_total{outcome=\"cancelled\"} 2\n",
                                        "prefilld_requests_total{outcome=\"error\"} 0\n"};
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        cr_expect(strstr(b.data, lines[i]), "no line %s", lines[i]);
    buf_fini(&b);
    metrics_fini(&m);
}

/* OpenMetrics counts x_total to the family x: none other may be called so. */
Test(metrics, families_have_names_of_their_own)
{
    struct metrics m;
    cr_assert_eq(metrics_init(&m), 0);
    m.model_name = "x";
    struct buf b = render(&m);
    for (const char *p = b.data; (p = strstr(p, "# TYPE ")) != NULL;) {
        p += 7;
        int len = (int)strcspn(p, " ");
        char other[160];
        snprintf(other, sizeof(other), "# TYPE %.*s_total ", len, p);
        cr_expect(!strstr(b.data, other), "%s is there beside its histogram or gauge", other);
    }
    buf_fini(&b);
    metrics_fini(&m);
}

/* Every line is a comment or a sample; every sample's name has HELP and TYPE before it. */
Test(metrics, form)
{
    struct metrics m;
    cr_assert_eq(metrics_init(&m), 0);
    m.model_name = "a \"quoted\" \\ name";
    struct buf b = render(&m);
    char type_of[128] = "";
    int n_samples = 0;
    for (char *line = strtok(b.data, "\n"); line; line = strtok(NULL, "\n")) {
        char name[128], kind[32], rest[128];
        if (sscanf(line, "# TYPE %127s %31s", name, kind) == 2) {
            strcpy(type_of, name);
            const char *total = strstr(name, "_total");
            if (strcmp(kind, "histogram") != 0)
                cr_expect_str_eq(kind, total && total[6] == '\0' ? "counter" : "gauge", "%s",
                                 name);
            continue;
        }
        if (strncmp(line, "# HELP ", 7) == 0)
            continue;
        cr_assert_eq(sscanf(line, "%127[a-z0-9_:]%127s", name, rest) >= 1, 1, "%s", line);
        cr_expect_eq(strncmp(name, type_of, strlen(type_of)), 0, "%s has no TYPE before it",
                     line);
        const char *part = name + strlen(type_of);
        cr_expect(!*part || !strcmp(part, "_bucket") || !strcmp(part, "_sum") ||
                      !strcmp(part, "_count"),
                  "%s", line);
        char *end;
        strtod(strrchr(line, ' ') + 1, &end);
        cr_expect_eq(*end, '\0', "%s", line);
        n_samples++;
    }
    cr_expect(n_samples > 20);
    buf_fini(&b);
    metrics_fini(&m);
}

/* Buckets are cumulative, hold what is at most their bound, and agree with the sum. */
Test(metrics, histograms)
{
    struct metrics m;
    cr_assert_eq(metrics_init(&m), 0);
    m.model_name = "x";
    histogram_add(&m.queue_us, 0);
    histogram_add(&m.queue_us, 100);
    histogram_add(&m.queue_us, 101);
    histogram_add(&m.queue_us, 3000000000);
    struct buf b = render(&m);
    static const char *const lines[] = {
        "# TYPE prefilld_request_queue_seconds histogram\n"
        "prefilld_request_queue_seconds_bucket{le=\"0.0001\"} 2\n"
        "prefilld_request_queue_seconds_bucket{le=\"0.00025\"} 3\n",
        "prefilld_request_queue_seconds_bucket{le=\"250\"} 3\n"
        "prefilld_request_queue_seconds_bucket{le=\"+Inf\"} 4\n"
        "prefilld_request_queue_seconds_sum 3000.0002",
        "prefilld_request_queue_seconds_count 4\n",
        "vllm:request_queue_time_seconds_bucket{model_name=\"x\",engine=\"0\",le=\"0.0001\"} "
        "2\n",
        "vllm:request_queue_time_seconds_count{model_name=\"x\",engine=\"0\"} 4\n"};
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        cr_expect(strstr(b.data, lines[i]), "no line %s", lines[i]);
    buf_fini(&b);
    metrics_zero_steps(&m);
    b = render(&m);
    cr_expect(strstr(b.data, "prefilld_request_queue_seconds_count 0\n"));
    buf_fini(&b);
    metrics_fini(&m);
}

static void *publish(void *arg)
{
    struct metrics *m = arg;
    for (int i = 0; i < 20000; i++) {
        const int32_t held = i % 17;
        const struct metrics_pools p = {.slots_free = 16 - held, .slots_held = held};
        metrics_set_pools(m, &p);
    }
    return NULL;
}

/* A scrape never sees a slot in two states. */
Test(metrics, snapshot_is_whole)
{
    struct metrics m;
    cr_assert_eq(metrics_init(&m), 0);
    const struct metrics_pools p = {.slots_free = 16};
    metrics_set_pools(&m, &p);
    pthread_t t;
    pthread_create(&t, NULL, publish, &m);
    for (int i = 0; i < 20000; i++) {
        struct metrics_pools seen;
        metrics_get_pools(&m, &seen);
        cr_assert_eq(seen.slots_free + seen.slots_held, 16);
    }
    pthread_join(t, NULL);
    metrics_fini(&m);
}

/* ---- buf_json_f32: the text of %.9g, for every kind of number ---- */

static void check_f32(float x)
{
    char want[40];
    struct buf b;
    buf_init(&b);
    buf_json_f32(&b, x);
    if (isfinite(x))
        snprintf(want, sizeof(want), "%.9g", (double)x);
    else
        strcpy(want, "null");
    cr_assert_str_eq(buf_cstr(&b), want);
    if (isfinite(x))
        cr_assert_eq(strtof(b.data, NULL), x, "%s", want);
    buf_fini(&b);
}

Test(numbers, f32_is_as_printf_has_it)
{
    static const float some[] = {0,
                                 -0.0f,
                                 1,
                                 -1,
                                 10,
                                 0.1f,
                                 1e-4f,
                                 9.9999997e-5f,
                                 0.00099999997f,
                                 0.5f,
                                 0.25f,
                                 123456.789f,
                                 16777216,
                                 99999999,
                                 999999936,
                                 1e9f,
                                 1e10f,
                                 3.4028235e38f,
                                 1.17549435e-38f,
                                 1e-45f,
                                 INFINITY,
                                 -INFINITY,
                                 NAN,
                                 -0.69314718f,
                                 9.9999994f,
                                 99.999992f,
                                 999.99994f};
    for (size_t i = 0; i < sizeof(some) / sizeof(some[0]); i++)
        check_f32(some[i]);
    const uint64_t seed = 5;
    struct rng r = {seed};
    for (int i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)rng_u64(&r);
        float x;
        memcpy(&x, &bits, sizeof(x));
        check_f32(x);
        check_f32((float)(-30 * rng_unit(&r)));
        check_f32(ldexpf((float)rng_unit(&r), rng_int(&r, 50) - 20));
    }
    /* Each power of ten, and its neighbours. */
    for (float t = 1e-10f; t < 1e12f; t *= 10) {
        float below = t, above = t;
        for (int i = 0; i < 50; i++) {
            check_f32(below = nextafterf(below, 0));
            check_f32(above = nextafterf(above, INFINITY));
        }
    }
}
