/* A model opened for a test: checkpoint, backend, pools, and an engine driven by hand. */
#ifndef PREFILLD_TESTS_MODEL_FIXTURE_H
#define PREFILLD_TESTS_MODEL_FIXTURE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "model.h"

struct fixture {
    struct arch arch;
    struct st_set *set;
    struct backend backend;
    struct model_sizes sizes;
    struct model *model;
    struct metrics metrics;
    struct queue *queue;
    struct engine *engine;
    struct sessions *sessions; /* of the engine; NULL: none */
};

/* $SRCDIR/rel into path. */
__attribute__((unused)) static const char *fixture_path(char path[512], const char *rel)
{
    const char *top = getenv("SRCDIR");
    snprintf(path, 512, "%s/%s", top ? top : ".", rel);
    return path;
}

/* A fixture folder: ../shared/fixtures/name, false when it is not there. */
__attribute__((unused)) static bool fixture_find(char path[512], const char *name)
{
    char rel[256], file[640];
    snprintf(rel, sizeof(rel), "../shared/fixtures/%s", name);
    fixture_path(path, rel);
    snprintf(file, sizeof(file), "%s/goldens.safetensors", path);
    return access(file, R_OK) == 0;
}

/* The backend under test: TEST_BACKEND (environment), else cpu. */
__attribute__((unused)) static const char *fixture_backend(void)
{
    const char *name = getenv("TEST_BACKEND");
    return name ? name : "cpu";
}

/* Opens the model of dir with o (0: defaults of the test) on n_threads; is_dummy: from
 * config.json alone, with random weights. Returns 0 or prints why not and returns the error. */
__attribute__((unused)) static int fixture_open_as(struct fixture *f, const char *dir,
                                                   const struct model_options *o,
                                                   int32_t n_threads, bool is_dummy)
{
    struct errmsg e = {{0}};
    struct model_options opt = *o;
    memset(f, 0, sizeof(*f));
    if (!opt.max_step_tokens)
        opt.max_step_tokens = 1024;
    if (!opt.max_seqs)
        opt.max_seqs = 16;
    if (!opt.page_tokens)
        opt.page_tokens = 64;
    if (!opt.kv_tokens)
        opt.kv_tokens = 16 * 1024;
    const struct backend_ops *ops = backend_find(fixture_backend(), &e);
    int rc = ERR_UNSUPPORTED;
    if (ops)
        rc = ops->open(&f->backend, ops == &backend_cpu_ops ? n_threads : 0, &e);
    if (rc == 0)
        rc = arch_read(dir, &f->arch, &e);
    if (rc == 0 && !is_dummy)
        rc = st_open_dir(dir, &f->set, &e);
    if (rc == 0 && !is_dummy)
        rc = weights_check(&f->arch, f->set, &e);
    if (rc == 0)
        rc = model_size(&f->arch, f->set, &f->backend, &opt, &f->sizes, &e);
    if (rc == 0)
        rc = model_open(&f->arch, f->set, 1, &f->backend, &f->sizes, NULL, NULL, &f->model, &e);
    if (rc != 0)
        fprintf(stderr, "%s: %s\n", dir, e.text);
    return rc;
}

__attribute__((unused)) static int fixture_open(struct fixture *f, const char *dir,
                                                const struct model_options *o,
                                                int32_t n_threads)
{
    return fixture_open_as(f, dir, o, n_threads, false);
}

/* Adds queue, metrics and an engine without a thread. */
__attribute__((unused)) static int fixture_open_engine(struct fixture *f,
                                                       const struct engine_config *c)
{
    struct errmsg e = {{0}};
    int rc = metrics_init(&f->metrics);
    if (rc == 0)
        rc = queue_open(c->max_waiting, &f->queue);
    if (rc == 0)
        rc = engine_open(c, f->model, f->queue, &f->metrics, &f->engine, &e);
    if (rc != 0)
        fprintf(stderr, "engine: %s\n", e.text);
    return rc;
}

__attribute__((unused)) static void fixture_close_engine(struct fixture *f)
{
    engine_close(f->engine);
    queue_close(f->queue);
    metrics_fini(&f->metrics);
    f->engine = NULL;
    f->queue = NULL;
}

__attribute__((unused)) static void fixture_close(struct fixture *f)
{
    if (f->engine)
        fixture_close_engine(f);
    sessions_close(f->sessions);
    model_close(f->model);
    arch_fini(&f->arch);
    st_close(f->set);
    if (f->backend.impl)
        f->backend.ops->close(&f->backend);
}

__attribute__((unused)) static void fixture_on_done(struct request *r, void *arg)
{
    (void)r;
    ++*(int *)arg;
}

/* A request for ids[n] (copied); n_done counts its end. */
__attribute__((unused)) static struct request *fixture_request(const struct fixture *f,
                                                               const int32_t *ids, int32_t n,
                                                               enum logprobs_mode mode,
                                                               int32_t n_top, int *n_done)
{
    int32_t *copy = malloc((size_t)n * sizeof(*copy));
    memcpy(copy, ids, (size_t)n * sizeof(*copy));
    struct request *r = request_new(copy, n, mode, n_top, f->sizes.o.page_tokens);
    r->arrival_us = r->item.arrival_us = request_now_us();
    r->done = fixture_on_done;
    r->done_arg = n_done;
    return r;
}

/* Pushes it and turns the engine until it ends. */
__attribute__((unused)) static int fixture_run(struct fixture *f, struct request *r)
{
    int *n_done = r->done_arg;
    int before = *n_done;
    int rc = queue_push(f->queue, r);
    while (rc == 0 && *n_done == before)
        engine_turn(f->engine);
    return rc;
}

#endif
