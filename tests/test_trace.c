/* The trace: valid JSON with what Perfetto needs, the last N of a ring, and device times that
 * follow one another on the host's clock. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <string.h>

#include "leaks.h"
#include "steps.h"

/* Step i: planned at 1000 i, 800 us on the device, 2 us after the one before. */
static struct trace_step step_at(int64_t i)
{
    struct trace_step s = {.number = i,
                           .n_tokens = 64,
                           .n_pieces = 1,
                           .plan_us = 1000 * i,
                           .pack_us = 1000 * i + 10,
                           .launch_us = 1000 * i + 20,
                           .launched_us = 1000 * i + 120,
                           .done_us = 1000 * i + 2500,
                           .published_us = 1000 * i + 2510,
                           .gap_us = i > 1 ? 2 : -1,
                           .device_us = 800};
    return s;
}

static void add(struct steps *s, const struct trace_step *t)
{
    struct steps_record r = {.trace = *t};
    steps_add(s, &r);
}

static json_t *render(struct steps *t, int64_t n)
{
    struct buf b;
    json_error_t e;
    buf_init(&b);
    steps_render_trace(t, n, &b);
    json_t *root = json_loadb(b.data, b.len, 0, &e);
    cr_assert_not_null(root, "%s", e.text);
    buf_fini(&b);
    json_t *events = json_incref(json_object_get(root, "traceEvents"));
    json_decref(root);
    return events;
}

/* The nth event called name, or NULL. */
static json_t *find(json_t *events, const char *name, int n)
{
    size_t i;
    json_t *e;
    json_array_foreach(events, i, e)
    {
        if (strcmp(json_string_value(json_object_get(e, "name")), name) == 0 && n-- == 0)
            return e;
    }
    return NULL;
}

static double number(json_t *e, const char *key)
{
    return json_number_value(json_object_get(e, key));
}

Test(trace, empty_is_valid)
{
    static struct steps t;
    cr_assert(steps_init(&t) == 0);
    json_t *events = render(&t, 10);
    cr_assert(json_array_size(events) == 3, "the names of the rows");
    json_decref(events);
    steps_fini(&t);
}

Test(trace, gives_the_last_steps_of_the_ring)
{
    static struct steps t;
    cr_assert(steps_init(&t) == 0);
    for (int64_t i = 1; i <= STEPS_KEPT + 44; i++) {
        struct trace_step s = step_at(i);
        add(&t, &s);
    }
    json_t *events = render(&t, 3);
    json_t *first = find(events, "plan", 0);
    cr_assert(number(json_object_get(first, "args"), "step") == STEPS_KEPT + 42);
    cr_assert_not_null(find(events, "plan", 2));
    cr_assert_null(find(events, "plan", 3));
    json_decref(events);
    events = render(&t, 1000000);
    cr_assert_not_null(find(events, "plan", STEPS_KEPT - 1));
    cr_assert_null(find(events, "plan", STEPS_KEPT));
    json_decref(events);
    steps_fini(&t);
}

Test(trace, device_times_follow_one_another)
{
    static struct steps t;
    cr_assert(steps_init(&t) == 0);
    for (int64_t i = 1; i <= 3; i++) {
        struct trace_step s = step_at(i);
        add(&t, &s);
    }
    json_t *events = render(&t, 3);
    double end = 1020;
    for (int i = 0; i < 3; i++) {
        json_t *e = find(events, "step", i);
        cr_assert_not_null(e);
        cr_assert(number(e, "ts") == end + (i > 0 ? 2 : 0), "step %d at %g", i,
                  number(e, "ts"));
        cr_assert(number(e, "dur") == 800);
        end = number(e, "ts") + 800;
    }
    json_decref(events);
    steps_fini(&t);
}

Test(trace, a_step_ends_before_its_results_are_seen)
{
    static struct steps t;
    cr_assert(steps_init(&t) == 0);
    struct trace_step s = step_at(1);
    s.device_us = 3000;
    add(&t, &s);
    json_t *events = render(&t, 1);
    cr_assert(number(find(events, "step", 0), "ts") == 3500 - 3000);
    json_decref(events);
    steps_fini(&t);
}

Test(trace, sums_operations_by_kind)
{
    static struct steps t;
    cr_assert(steps_init(&t) == 0);
    struct step_span spans[] = {
        {.name = "matmul", .us = 5}, {.name = "attn", .us = 7}, {.name = "matmul", .us = 6}};
    struct step_times times = {
        .gap_us = -1, .device_us = 18, .is_replayed = true, .n_spans = 3, .spans = spans};
    struct trace_step s = step_at(1);
    trace_set_times(&s, &times);
    add(&t, &s);
    json_t *events = render(&t, 1), *matmul = find(events, "matmul", 0);
    cr_assert(number(matmul, "dur") == 11);
    cr_assert(number(json_object_get(matmul, "args"), "calls") == 2);
    cr_assert(number(find(events, "attn", 0), "ts") == number(matmul, "ts") + 11);
    const json_t *step = json_object_get(find(events, "step", 0), "args");
    cr_assert(!json_object_get(step, "gap_us") &&
              json_is_true(json_object_get(step, "replayed")));
    json_decref(events);
    steps_fini(&t);
}
