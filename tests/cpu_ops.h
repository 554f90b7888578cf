/* What the tests of the CPU backend's operations share: a backend with limits, batches made
 * from lists of pieces, poisoned buffers, and random schedules.
 *
 * Arrays are mostly left to the process's end (Criterion runs every test in its own); must()
 * remembers them, so that a leak report is about the backend and not about these. */
#ifndef PREFILLD_TESTS_CPU_OPS_H
#define PREFILLD_TESTS_CPU_OPS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend.h"
#include "cpu.h"
#include "rng.h"

#define UNIT_ROUNDOFF 0x1p-24

static inline void *must(void *p)
{
    static void **kept;
    static size_t n_kept, cap_kept;
    if (n_kept == cap_kept) {
        cap_kept = cap_kept ? 2 * cap_kept : 64;
        kept = realloc(kept, cap_kept * sizeof(*kept));
    }
    if (!p || !kept) {
        fprintf(stderr, "test: out of memory\n");
        abort();
    }
    kept[n_kept++] = p;
    return p;
}

/* n floats, all NaN. */
__attribute__((unused)) static float *poisoned(size_t n)
{
    float *p = must(aligned_alloc(64, (n * sizeof(float) + 127) / 64 * 64));
    for (size_t i = 0; i < n; i++)
        p[i] = NAN;
    return p;
}

__attribute__((unused)) static float *normals(struct rng *r, size_t n, double scale)
{
    float *p = poisoned(n);
    for (size_t i = 0; i < n; i++)
        p[i] = (float)(scale * rng_normal(r));
    return p;
}

__attribute__((unused)) static void open_cpu(struct backend *b, int32_t n_threads,
                                             const struct backend_limits *l)
{
    struct errmsg e;
    if (backend_cpu_ops.open(b, n_threads, &e) != 0 || b->ops->workspace_make(b, l, &e) != 0) {
        fprintf(stderr, "test: %s\n", e.text);
        abort();
    }
}

/* Fills the workspace (16 MiB of it) with NaN: no operation may count on what another left
 * there. */
__attribute__((unused)) static void poison_workspace(struct backend *b)
{
    size_t bytes;
    void *p = cpu_impl_workspace(b, &bytes);
    memset(p, 0xff, bytes < 16 << 20 ? bytes : 16 << 20);
}

/* One piece of a batch. */
struct piece {
    int32_t request, start, len, slot;
};

/* A batch of pieces, with the arrays it points to. */
struct pack {
    struct batch_host h;
    struct batch b;
    int32_t *tokens, *positions, *cu_seqlens, *starts, *slots, *page_table;
};

/* tables [n_requests, max_pages]: each request's pages, or NULL. The step is begun and ended at
 * once, so that any number of packs may be used one after another. */
__attribute__((unused)) static void pack_make(struct backend *b, struct pack *p,
                                              const struct piece *pieces, int32_t n_pieces,
                                              const int32_t *tables, int32_t max_pages)
{
    int32_t T = 0, NC = 0, longest = 0;
    for (int32_t i = 0; i < n_pieces; i++) {
        T += pieces[i].len;
        NC += (pieces[i].len + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
        longest = pieces[i].len > longest ? pieces[i].len : longest;
    }
    size_t n = (size_t)n_pieces + 1;
    p->tokens = must(calloc((size_t)T + 1, sizeof(int32_t)));
    p->positions = must(calloc((size_t)T + 1, sizeof(int32_t)));
    p->cu_seqlens = must(calloc(n, sizeof(int32_t)));
    p->starts = must(calloc(n, sizeof(int32_t)));
    p->slots = must(calloc(n, sizeof(int32_t)));
    p->page_table = must(calloc(n * (size_t)(max_pages + 1), sizeof(int32_t)));
    int32_t t = 0;
    for (int32_t i = 0; i < n_pieces; i++) {
        for (int32_t j = 0; j < pieces[i].len; j++)
            p->positions[t++] = pieces[i].start + j;
        p->cu_seqlens[i + 1] = t;
        p->starts[i] = pieces[i].start;
        p->slots[i] = pieces[i].slot;
        if (tables)
            memcpy(p->page_table + (size_t)i * max_pages,
                   tables + (size_t)pieces[i].request * max_pages,
                   (size_t)max_pages * sizeof(int32_t));
    }
    p->h = (struct batch_host){
        .n_tokens = T,
        .n_seqs = n_pieces,
        .n_chunks = NC,
        .max_pages = max_pages,
        .max_len = longest,
        .tokens = p->tokens,
        .positions = p->positions,
        .cu_seqlens = p->cu_seqlens,
        .start = p->starts,
        .slots = p->slots,
        .page_table = p->page_table,
    };
    if (b->ops->step_begin(b, &p->h, &p->b) != 0 ||
        b->ops->step_end(b, &p->b, NULL, NULL) != 0 || b->ops->step_done(b, true) != 1) {
        fprintf(stderr, "test: step refused\n");
        abort();
    }
}

__attribute__((unused)) static void pack_free(struct pack *p)
{
    free(p->tokens);
    free(p->positions);
    free(p->cu_seqlens);
    free(p->starts);
    free(p->slots);
    free(p->page_table);
}

/* n floats of address space without memory behind it, so that only touched pages cost anything.
 * In front lie 2^31 floats that trap: an offset that wrapped around in 32 bits lands there. */
__attribute__((unused)) static float *reserve(size_t n)
{
    size_t fence = (size_t)4 << 31;
    char *p = mmap(NULL, fence + n * sizeof(float), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, fence, PROT_NONE) != 0) {
        fprintf(stderr, "test: no address space\n");
        abort();
    }
    return (float *)(p + fence);
}

/* ---- random schedules: requests cut at multiples of 64, packed in any order ---- */

enum { SCHED_MAX_REQUESTS = 8 };

struct sched_run {
    int32_t n_requests;
    int32_t len[SCHED_MAX_REQUESTS], done[SCHED_MAX_REQUESTS], slot[SCHED_MAX_REQUESTS];
    bool is_closed[SCHED_MAX_REQUESTS];
};

/* Some of a shuffle of the unfinished requests, each with a piece; sometimes an empty one.
 * Returns the number of pieces, 0 when all are finished. */
__attribute__((unused)) static int32_t sched_next(struct sched_run *s, struct rng *r,
                                                  struct piece *out)
{
    int32_t order[SCHED_MAX_REQUESTS], n = 0, n_out = 0;
    for (int32_t i = 0; i < s->n_requests; i++)
        if (s->done[i] < s->len[i])
            order[n++] = i;
    for (int32_t i = n - 1; i > 0; i--) {
        int32_t j = rng_int(r, i + 1), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    int32_t n_taken = n ? 1 + rng_int(r, n) : 0;
    for (int32_t i = 0; i < n_taken; i++) {
        int32_t q = order[i], left = s->len[q] - s->done[q];
        int32_t len = CHUNK_TOKENS * rng_int(r, 4);
        if (len > left || rng_int(r, 4) == 0)
            len = left;
        if (len == 0 && n_taken == 1)
            len = left < CHUNK_TOKENS ? left : CHUNK_TOKENS;
        out[n_out++] = (struct piece){q, s->done[q], len, s->slot[q]};
        s->done[q] += len;
    }
    return n_out;
}

/* A random permutation of 0 .. n - 1. */
__attribute__((unused)) static void shuffled(struct rng *r, int32_t n, int32_t *out)
{
    for (int32_t i = 0; i < n; i++) {
        int32_t j = rng_int(r, i + 1);
        out[i] = out[j];
        out[j] = i;
    }
}

/* ---- comparing ---- */

/* Largest |x - y| over n, or infinity when an x is not finite. */
__attribute__((unused)) static double max_diff(const float *x, const double *y, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs(x[i] - y[i]);
        if (!isfinite(x[i]))
            return INFINITY;
        most = d > most ? d : most;
    }
    return most;
}

__attribute__((unused)) static double max_abs(const double *y, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++)
        most = fabs(y[i]) > most ? fabs(y[i]) : most;
    return most;
}

#endif
