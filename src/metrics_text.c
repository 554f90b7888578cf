/* The Prometheus text of the metrics. */
#include <stdio.h>
#include <string.h>

#include "metrics.h"

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

static void label(struct buf *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            buf_addc(out, '\\');
        buf_addc(out, *text);
    }
}

/* labels: "" or `name="value"`. unit: of one in the histogram. */
static void histogram(struct buf *out, const char *name, const char *labels, const char *help,
                      double unit, const struct histogram *h)
{
    long long n = 0;
    const char *comma = labels[0] ? "," : "";
    head(out, name, "histogram", help);
    for (int32_t i = 0; i < h->n_bounds; i++) {
        n += atomic_load(&h->counts[i]);
        buf_printf(out, "%s_bucket{%s%sle=\"%.9g\"} %lld\n", name, labels, comma,
                   (double)h->bounds[i] * unit, n);
    }
    n += atomic_load(&h->counts[h->n_bounds]);
    buf_printf(out, "%s_bucket{%s%sle=\"+Inf\"} %lld\n", name, labels, comma, n);
    const char *open = labels[0] ? "{" : "", *close = labels[0] ? "}" : "";
    buf_printf(out, "%s_sum%s%s%s %.9g\n", name, open, labels, close,
               (double)atomic_load(&h->sum) * unit);
    buf_printf(out, "%s_count%s%s%s %lld\n", name, open, labels, close, n);
}

static void render_histograms(const struct metrics *m, struct buf *out)
{
    histogram(out, "prefilld_request_queue_seconds", "", "From arrival to the first piece.",
              1e-6, &m->queue_us);
    histogram(out, "prefilld_request_prefill_seconds", "",
              "From the first piece to the prompt's end.", 1e-6, &m->prefill_us);
    histogram(out, "prefilld_request_seconds", "", "From arrival to the end.", 1e-6,
              &m->total_us);
    histogram(out, "prefilld_request_prompt_tokens", "", "Length of answered prompts.", 1,
              &m->prompt_sizes);
    histogram(out, "prefilld_step_seconds", "", "Time of a step.", 1e-6, &m->steps_us);
    histogram(out, "prefilld_step_size_tokens", "", "Tokens in a step.", 1, &m->step_sizes);
    histogram(out, "prefilld_step_pieces", "", "Requests in a step.", 1, &m->step_pieces);
    histogram(out, "prefilld_gap_seconds", "",
              "Time the device idled between steps, where it measures it.", 1e-9, &m->gaps_ns);
}

static void alias(struct buf *out, const char *name, const char *type, const char *labels,
                  const char *more, double value)
{
    head(out, name, type, "As prefilld's own.");
    buf_printf(out, "%s{%s%s%s} %.9g\n", name, labels, more[0] ? "," : "", more, value);
}

/* The names that routers and dashboards made for vLLM read. */
static void render_aliases(struct metrics *m, const struct metrics_pools *p, struct buf *out)
{
    struct buf labels;
    buf_init(&labels);
    buf_adds(&labels, "model_name=\"");
    label(&labels, m->model_name);
    buf_adds(&labels, "\",engine=\"0\"");
    const char *l = buf_cstr(&labels);
    if (!l) {
        out->failed = true;
        buf_fini(&labels);
        return;
    }
    int64_t n_pages = (int64_t)p->pages_free + p->pages_held + p->pages_cached;
    char info[64];
    snprintf(info, sizeof(info), "block_size=\"%d\",num_gpu_blocks=\"%lld\"", m->page_tokens,
             (long long)n_pages);
    alias(out, "vllm:num_requests_running", "gauge", l, "", p->requests_running);
    alias(out, "vllm:num_requests_waiting", "gauge", l, "", p->requests_waiting);
    alias(out, "vllm:kv_cache_usage_perc", "gauge", l, "",
          n_pages ? (double)p->pages_held / (double)n_pages : 0);
    alias(out, "vllm:cache_config_info", "gauge", l, info, 1);
    alias(out, "vllm:prompt_tokens_total", "counter", l, "",
          (double)atomic_load(&m->prompt_tokens));
    alias(out, "vllm:prefix_cache_queries_total", "counter", l, "",
          (double)atomic_load(&m->prefix_query_tokens));
    alias(out, "vllm:prefix_cache_hits_total", "counter", l, "",
          (double)atomic_load(&m->prefix_hit_tokens));
    alias(out, "vllm:generation_tokens_total", "counter", l, "",
          (double)atomic_load(&m->new_tokens));
    alias(out, "vllm:request_success_total", "counter", l, "finished_reason=\"length\"",
          (double)atomic_load(&m->requests[OUTCOME_OK]));
    histogram(out, "vllm:time_to_first_token_seconds", l, "As prefilld's own.", 1e-6,
              &m->first_us);
    histogram(out, "vllm:request_queue_time_seconds", l, "As prefilld's own.", 1e-6,
              &m->queue_us);
    histogram(out, "vllm:request_prefill_time_seconds", l, "As prefilld's own.", 1e-6,
              &m->prefill_us);
    histogram(out, "vllm:e2e_request_latency_seconds", l, "As prefilld's own.", 1e-6,
              &m->total_us);
    histogram(out, "vllm:request_prompt_tokens", l, "As prefilld's own.", 1, &m->prompt_sizes);
    histogram(out, "vllm:iteration_tokens_total", l, "Tokens in a step.", 1, &m->step_sizes);
    buf_fini(&labels);
}

static void render_memory(const struct metrics *m, struct buf *out)
{
    const struct {
        const char *what;
        int64_t bytes;
    } parts[] = {{"weights", m->weights_bytes},
                 {"scratch", m->scratch_bytes},
                 {"state_slots", m->slots_bytes},
                 {"kv_pages", m->pages_bytes}};
    head(out, "prefilld_memory_bytes", "gauge", "Memory set aside on the device, by use.");
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        buf_printf(out, "prefilld_memory_bytes{use=\"%s\"} %lld\n", parts[i].what,
                   (long long)parts[i].bytes);
}

static void render_prefixes(struct metrics *m, struct buf *out)
{
    single(out, "prefilld_prefix_queries_total", "counter",
           "Requests begun that could have shared a prefix.", atomic_load(&m->prefix_queries));
    single(out, "prefilld_prefix_hits_total", "counter", "Those that began at a kept state.",
           atomic_load(&m->prefix_hits));
    single(out, "prefilld_prefix_hit_tokens_total", "counter",
           "Prompt tokens that were not computed because a prefix was kept.",
           atomic_load(&m->prefix_hit_tokens));
    single(out, "prefilld_checkpoints_total", "counter", "States kept for others to begin at.",
           atomic_load(&m->prefix_kept));
    single(out, "prefilld_checkpoint_evictions_total", "counter",
           "Kept states that gave way to requests or to others.",
           atomic_load(&m->prefix_evicted));
}

static void render_files(struct metrics *m, struct buf *out)
{
    static const char *const ways[] = {"out", "in"};
    head(out, "prefilld_session_files_total", "counter",
         "Sessions sent and taken as files, by direction and how it ended.");
    for (int i = 0; i < 2; i++) {
        long long n = atomic_load(&m->files[i]), n_failed = atomic_load(&m->files_failed[i]);
        buf_printf(out, "prefilld_session_files_total{direction=\"%s\",outcome=\"ok\"} %lld\n",
                   ways[i], n);
        buf_printf(out,
                   "prefilld_session_files_total{direction=\"%s\",outcome=\"failed\"} %lld\n",
                   ways[i], n_failed);
    }
    head(out, "prefilld_session_file_bytes_total", "counter", "Bytes of such files.");
    for (int i = 0; i < 2; i++)
        buf_printf(out, "prefilld_session_file_bytes_total{direction=\"%s\"} %lld\n", ways[i],
                   (long long)atomic_load(&m->file_bytes[i]));
}

void metrics_render(struct metrics *m, int64_t queue_age_us, struct buf *out)
{
    struct metrics_pools p;
    metrics_get_pools(m, &p);
    single(out, "prefilld_requests_running", "gauge", "Requests that hold a state slot.",
           p.requests_running);
    single(out, "prefilld_requests_waiting", "gauge", "Requests that wait for admission.",
           p.requests_waiting);
    head(out, "prefilld_queue_age_seconds", "gauge",
         "How long the request that waits longest has waited.");
    buf_printf(out, "prefilld_queue_age_seconds %.6f\n", (double)queue_age_us / 1e6);
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
    single(out, "prefilld_steps_replayed_total", "counter",
           "Steps whose layers were launched at once, as recorded for an earlier step.",
           atomic_load(&m->steps_replayed));
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
    render_prefixes(m, out);
    render_files(m, out);
    render_memory(m, out);
    render_histograms(m, out);
    if (m->model_name)
        render_aliases(m, &p, out);
}
