#include "metrics.h"

#include <string.h>

int metrics_init(struct metrics *m)
{
    memset(m, 0, sizeof(*m));
    return pthread_mutex_init(&m->lock, NULL) == 0 ? 0 : ERR_NOMEM;
}

void metrics_fini(struct metrics *m)
{
    pthread_mutex_destroy(&m->lock);
}

void metrics_set_pools(struct metrics *m, const struct metrics_pools *p)
{
    pthread_mutex_lock(&m->lock);
    m->pools = *p;
    pthread_mutex_unlock(&m->lock);
}

void metrics_get_pools(struct metrics *m, struct metrics_pools *p)
{
    pthread_mutex_lock(&m->lock);
    *p = m->pools;
    pthread_mutex_unlock(&m->lock);
}

void metrics_count(struct metrics *m, enum outcome o)
{
    atomic_fetch_add_explicit(&m->requests[o], 1, memory_order_relaxed);
}

void metrics_zero_steps(struct metrics *m)
{
    atomic_store(&m->steps, 0);
    atomic_store(&m->step_tokens, 0);
    atomic_store(&m->step_us, 0);
    atomic_store(&m->gaps, 0);
    atomic_store(&m->gap_ns, 0);
    atomic_store(&m->prompt_tokens, 0);
    atomic_store(&m->new_tokens, 0);
}

const char *outcome_name(enum outcome o)
{
    static const char *const names[OUTCOME_COUNT] = {
        [OUTCOME_OK] = "ok",
        [OUTCOME_INVALID] = "invalid",
        [OUTCOME_OVERLOAD] = "overload",
        [OUTCOME_DEADLINE] = "deadline",
        [OUTCOME_CANCELLED] = "cancelled",
        [OUTCOME_ERROR] = "error",
    };
    return names[o];
}

/* ---- Prometheus text ---- */

static void head(struct buf *out, const char *name, const char *type, const char *help)
{
    buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void single(struct buf *out, const char *name, const char *type, const char *help,
                   int64_t value)
{
    head(out, name, type, help);
    buf_printf(out, "%s %lld\n", name, (long long)value);
}

static void pool(struct buf *out, const char *name, const char *help, int32_t n_free,
                 int32_t n_held, int32_t n_cached)
{
    head(out, name, "gauge", help);
    buf_printf(out, "%s{state=\"free\"} %d\n", name, n_free);
    buf_printf(out, "%s{state=\"held\"} %d\n", name, n_held);
    buf_printf(out, "%s{state=\"cached\"} %d\n", name, n_cached);
}

void metrics_render(struct metrics *m, struct buf *out)
{
    struct metrics_pools p;
    metrics_get_pools(m, &p);
    single(out, "prefilld_requests_running", "gauge", "Requests that hold a state slot.",
           p.requests_running);
    single(out, "prefilld_requests_waiting", "gauge", "Requests that wait for admission.",
           p.requests_waiting);
    pool(out, "prefilld_state_slots", "Slots of recurrent state.", p.slots_free, p.slots_held,
         p.slots_cached);
    pool(out, "prefilld_kv_pages", "Pages of keys and values.", p.pages_free, p.pages_held,
         p.pages_cached);
    single(out, "prefilld_connections", "gauge", "Open client connections.",
           atomic_load(&m->connections));
    single(out, "prefilld_backlog_tokens", "gauge", "Prompt tokens accepted and not computed.",
           atomic_load(&m->backlog_tokens));
    single(out, "prefilld_rate_tokens_per_second", "gauge", "Measured over the last steps.",
           atomic_load(&m->rate_tokens_per_s));
    single(out, "prefilld_device_lost", "gauge", "1 when the device has failed.",
           atomic_load(&m->device_lost));
    single(out, "prefilld_steps_total", "counter", "Steps that have ended.",
           atomic_load(&m->steps));
    single(out, "prefilld_step_tokens_total", "counter", "Prompt tokens in those steps.",
           atomic_load(&m->step_tokens));
    head(out, "prefilld_step_seconds_total", "counter", "Time those steps took.");
    buf_printf(out, "prefilld_step_seconds_total %.6f\n",
               (double)atomic_load(&m->step_us) / 1e6);
    single(out, "prefilld_gaps_total", "counter",
           "Steps launched while the one before ran, on a device that measures the gap.",
           atomic_load(&m->gaps));
    head(out, "prefilld_gap_seconds_total", "counter", "Time the device idled before those.");
    buf_printf(out, "prefilld_gap_seconds_total %.9f\n", (double)atomic_load(&m->gap_ns) / 1e9);
    single(out, "prefilld_prompt_tokens_total", "counter",
           "Prompt tokens of requests that were computed to their end.",
           atomic_load(&m->prompt_tokens));
    single(out, "prefilld_generated_tokens_total", "counter",
           "Tokens generated behind prompts.", atomic_load(&m->new_tokens));
    single(out, "prefilld_not_finite_rows_total", "counter",
           "Result rows that held NaN or infinity.", atomic_load(&m->nan_rows));
    head(out, "prefilld_requests_total", "counter", "Prefill requests by how they ended.");
    for (int o = 0; o < OUTCOME_COUNT; o++)
        buf_printf(out, "prefilld_requests_total{outcome=\"%s\"} %lld\n", outcome_name(o),
                   (long long)atomic_load(&m->requests[o]));
}
