/* Whether a checkpoint holds what its config asks for: everything that is wrong, in one
 * message, before anything is allocated on a backend. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "weights_plan.h"

/* Names of one kind of trouble, as many as fit. */
struct names {
    size_t n, n_named;
    char text[880]; /* four lists and their heads fit struct errmsg */
};

struct plan_report {
    const struct st_set *set;
    bool *used; /* [st_count] */
    struct names missing, shape, type, extra;
};

static void add_name(struct names *l, const char *name, const char *what)
{
    size_t len = strlen(l->text);
    l->n++;
    if (l->n_named + 1 < l->n)
        return; /* one did not fit: from there on only count, so that the list is a prefix */
    int n = snprintf(l->text + len, sizeof(l->text) - len, "%s%s%s", l->n_named ? ", " : "",
                     name, what);
    if (n < 0 || (size_t)n >= sizeof(l->text) - len)
        l->text[len] = '\0';
    else
        l->n_named++;
}

static void say_names(struct errmsg *e, const char *head, const struct names *l)
{
    if (l->n == 0)
        return;
    errmsg_add(e, "; %zu %s: %s", l->n, head, l->text);
    if (l->n > l->n_named)
        errmsg_add(e, "%s and %zu more", l->n_named ? "" : "(names too long)",
                   l->n - l->n_named);
}

static int print_dims(char *text, size_t cap, int32_t n_dims, const int64_t *dims)
{
    int len = snprintf(text, cap, "[");
    for (int32_t i = 0; i < n_dims; i++)
        len += snprintf(text + len, cap - (size_t)len, "%s%lld", i ? ", " : "",
                        (long long)dims[i]);
    return len + snprintf(text + len, cap - (size_t)len, "]");
}

void plan_report_tensor(struct plan_report *r, const char *name, const struct st_tensor *t,
                        int32_t n_dims, const int64_t *dims)
{
    char what[ST_MAX_DIMS * 24 + 128];
    if (!t) {
        add_name(&r->missing, name, "");
        return;
    }
    r->used[t - st_at(r->set, 0)] = true;
    if (t->dtype != ST_BF16 && t->dtype != ST_F16 && t->dtype != ST_F32) {
        snprintf(what, sizeof(what), " %s", st_dtype_name(t->dtype));
        add_name(&r->type, name, what);
    }
    if (t->n_dims != n_dims || memcmp(t->dims, dims, (size_t)n_dims * sizeof(*dims)) != 0) {
        int len = snprintf(what, sizeof(what), " ");
        len += print_dims(what + len, sizeof(what) - (size_t)len, t->n_dims, t->dims);
        len += snprintf(what + len, sizeof(what) - (size_t)len, " for ");
        print_dims(what + len, sizeof(what) - (size_t)len, n_dims, dims);
        add_name(&r->shape, name, what);
    }
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), k = strlen(end);
    return n >= k && strcmp(name + n - k, end) == 0;
}

/* Parts of a release that text prefill has no use for: the draft head and the vision tower. */
static bool is_skipped(const char *name)
{
    static const char *const starts[] = {"mtp.", "model.mtp.", "model.language_model.mtp.",
                                         "visual.", "model.visual."};
    for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++)
        if (strncmp(name, starts[i], strlen(starts[i])) == 0)
            return true;
    return false;
}

static void find_extra(struct plan_report *r)
{
    for (size_t i = 0; i < st_count(r->set); i++) {
        const char *name = st_at(r->set, i)->name;
        if (r->used[i] || is_skipped(name))
            continue;
        if (ends_with(name, "_scale_inv") || ends_with(name, "_scale"))
            add_name(&r->type, name, " (scales of quantized weights)");
        else
            add_name(&r->extra, name, "");
    }
}

int weights_check(const struct arch *a, const struct st_set *set, struct errmsg *e)
{
    struct plan plan;
    struct plan_report *r = calloc(1, sizeof(*r));
    bool *used = calloc(st_count(set), sizeof(*used));
    int rc = r && used ? 0 : ERR_NOMEM;
    plan_init(&plan, a, set);
    if (rc == 0) {
        r->set = set;
        r->used = used;
        plan.report = r;
    }
    for (int32_t l = -1; l < a->n_layers && rc == 0; l++)
        rc = plan_scope(&plan, l);
    if (rc != 0) {
        errmsg_set(e, rc, "no memory to check the checkpoint's tensors");
        goto done;
    }
    find_extra(r);
    if (r->missing.n + r->shape.n + r->type.n + r->extra.n == 0)
        goto done;
    rc = r->type.n ? ERR_UNSUPPORTED : ERR_INVALID;
    errmsg_set(e, rc, "the checkpoint is not what its config.json (%s) needs", a->model_type);
    say_names(e, "of a type that is not read yet; accepted: BF16, F16, F32", &r->type);
    say_names(e, "missing", &r->missing);
    say_names(e, "of another shape", &r->shape);
    say_names(e, "that this model does not have", &r->extra);
    if (a->needs_head && !st_find(set, "lm_head.weight"))
        errmsg_add(e, "; tie_word_embeddings is false, so lm_head.weight is not the embedding");
done:
    plan_fini(&plan);
    free(used);
    free(r);
    return rc;
}
