#include "trace.h"

#include <string.h>

#include "request.h"

/* Rows of the picture. */
enum { ROW_ENGINE = 1, ROW_DEVICE, ROW_KINDS };

void trace_start(struct trace_step *s, int64_t number, const struct batch_host *h,
                 int64_t plan_us, int64_t pack_us)
{
    *s = (struct trace_step){.number = number,
                             .n_tokens = h->n_tokens,
                             .n_pieces = h->n_seqs,
                             .n_rows = h->n_rows,
                             .plan_us = plan_us,
                             .pack_us = pack_us,
                             .launch_us = request_now_us(),
                             .gap_us = -1,
                             .device_us = -1};
}

void trace_set_times(struct trace_step *s, const struct step_times *times)
{
    s->gap_us = times->gap_us;
    s->device_us = times->device_us;
    s->is_replayed = times->is_replayed;
    s->n_kinds = 0;
    for (int32_t i = 0; i < times->n_spans; i++) {
        const struct step_span *span = &times->spans[i];
        int32_t k = 0;
        while (k < s->n_kinds && strcmp(s->kinds[k].name, span->name) != 0)
            k++;
        if (k == TRACE_KINDS)
            continue;
        if (k == s->n_kinds)
            s->kinds[s->n_kinds++] = (struct trace_kind){.name = span->name};
        s->kinds[k].us += span->us;
        s->kinds[k].n++;
    }
}

/* Where the step lies on the host's clock. */
static int64_t begin_on_host(const struct trace_step *s, int64_t ended_us)
{
    if (s->device_us < 0)
        return s->launch_us;
    int64_t device_us = (int64_t)s->device_us;
    int64_t begin = s->gap_us >= 0 ? ended_us + (int64_t)s->gap_us : s->launch_us;
    if (begin < ended_us)
        begin = ended_us;
    return begin + device_us > s->done_us ? s->done_us - device_us : begin;
}

int64_t trace_place(struct trace_step *s, int64_t ended_us)
{
    s->begun_us = begin_on_host(s, ended_us);
    return s->device_us < 0 ? s->launched_us : s->begun_us + (int64_t)s->device_us;
}

/* ---- rendering ---- */

static void event(struct buf *out, int row, const char *name, int64_t number, int64_t from_us,
                  double us)
{
    buf_printf(out,
               ",\n{\"name\": \"%s\", \"ph\": \"X\", \"pid\": 1, \"tid\": %d, \"ts\": %lld, "
               "\"dur\": %.3f, \"args\": {\"step\": %lld",
               name, row, (long long)from_us, us > 0 ? us : 0, (long long)number);
}

static void plain_event(struct buf *out, int row, const char *name, int64_t number,
                        int64_t from_us, int64_t to_us)
{
    event(out, row, name, number, from_us, (double)(to_us - from_us));
    buf_adds(out, "}}");
}

static void row_name(struct buf *out, int row, const char *name)
{
    buf_printf(
        out,
        "%s{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": 1, \"tid\": %d, \"ts\": 0, "
        "\"args\": {\"name\": \"%s\"}}",
        row == ROW_ENGINE ? "\n" : ",\n", row, name);
}

void trace_render_step(const struct trace_step *s, struct buf *out)
{
    plain_event(out, ROW_ENGINE, "plan", s->number, s->plan_us, s->pack_us);
    plain_event(out, ROW_ENGINE, "pack", s->number, s->pack_us, s->launch_us);
    plain_event(out, ROW_ENGINE, "launch", s->number, s->launch_us, s->launched_us);
    plain_event(out, ROW_ENGINE, "publish", s->number, s->done_us, s->published_us);
    if (s->device_us < 0)
        return;
    event(out, ROW_DEVICE, "step", s->number, s->begun_us, (double)s->device_us);
    buf_printf(out, ", \"tokens\": %d, \"pieces\": %d, \"rows\": %d, \"replayed\": %s",
               s->n_tokens, s->n_pieces, s->n_rows, s->is_replayed ? "true" : "false");
    if (s->gap_us >= 0)
        buf_printf(out, ", \"gap_us\": %.3f", (double)s->gap_us);
    buf_adds(out, "}}");
    double at = (double)s->begun_us;
    for (int32_t k = 0; k < s->n_kinds; k++) {
        const struct trace_kind *kind = &s->kinds[k];
        buf_printf(
            out,
            ",\n{\"name\": \"%s\", \"ph\": \"X\", \"pid\": 1, \"tid\": %d, \"ts\": %.3f, "
            "\"dur\": %.3f, \"args\": {\"step\": %lld, \"calls\": %d}}",
            kind->name, ROW_KINDS, at, (double)kind->us, (long long)s->number, kind->n);
        at += (double)kind->us;
    }
}

void trace_render_begin(struct buf *out)
{
    buf_adds(out, "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [");
    row_name(out, ROW_ENGINE, "engine (host)");
    row_name(out, ROW_DEVICE, "device");
    row_name(out, ROW_KINDS, "device, operations summed by kind");
}

void trace_render_end(struct buf *out)
{
    buf_adds(out, "\n]}\n");
}
