#define _GNU_SOURCE /* asprintf, memrchr */
#include "gemm_cache.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "file.h"

enum { CACHE_MAX_BYTES = 16 << 20 };

static const char *const magic = "prefilld products 1";

/* FNV-1a, 64 bits. */
static uint64_t checksum(const char *s, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)s[i]) * 0x100000001b3u;
    return h;
}

/* ---- text ---- */

static void put_algo(struct buf *out, const struct gemm_algo_words *a)
{
    for (int i = 0; i < GEMM_ALGO_WORDS; i++)
        buf_printf(out, "%s%" PRIx64, i ? "," : " ", a->w[i]);
}

static void put_record(struct buf *out, const struct gemm_record *r)
{
    buf_printf(out, "%d %d %d %d %x", r->rows, r->cols, r->is_f32, r->max_rows, r->has_algo);
    put_algo(out, &r->common);
    for (int i = 0; i < GEMM_CACHE_BUCKETS; i++)
        if (r->has_algo >> i & 1)
            put_algo(out, &r->algo[i]);
    buf_addc(out, '\n');
}

static bool get_algo(const char **at, struct gemm_algo_words *a)
{
    for (int i = 0; i < GEMM_ALGO_WORDS; i++) {
        char *end;
        if (*(*at)++ != (i ? ',' : ' ') || !isxdigit((unsigned char)**at))
            return false;
        a->w[i] = strtoull(*at, &end, 16);
        *at = end;
    }
    return true;
}

/* A line with its newline; *at is behind it then. */
static bool get_record(const char **at, struct gemm_record *r)
{
    int used = 0;
    memset(r, 0, sizeof(*r));
    if (sscanf(*at, "%" SCNd32 " %" SCNd32 " %" SCNd32 " %" SCNd32 " %" SCNx32 "%n", &r->rows,
               &r->cols, &r->is_f32, &r->max_rows, &r->has_algo, &used) != 5 ||
        r->has_algo >> GEMM_CACHE_BUCKETS)
        return false;
    *at += used;
    bool is_good = get_algo(at, &r->common);
    for (int i = 0; is_good && i < GEMM_CACHE_BUCKETS; i++)
        if (r->has_algo >> i & 1)
            is_good = get_algo(at, &r->algo[i]);
    return is_good && *(*at)++ == '\n';
}

/* ---- records ---- */

static int append(struct gemm_cache *c, const struct gemm_record *r)
{
    if (c->n == c->cap) {
        int32_t cap = c->cap ? 2 * c->cap : 16;
        struct gemm_record *more = realloc(c->records, (size_t)cap * sizeof(*more));
        if (!more)
            return ERR_NOMEM;
        c->records = more;
        c->cap = cap;
    }
    c->records[c->n++] = *r;
    return 0;
}

/* Takes the records of a whole file; of one that is not, none. */
static int parse(struct gemm_cache *c, const char *text, size_t len)
{
    uint64_t sum = 0;
    const char *last = len > 1 ? memrchr(text, '\n', len - 1) : NULL;
    if (!last || strlen(text) != len || sscanf(last, "\nsum %" SCNx64, &sum) != 1 ||
        sum != checksum(text, (size_t)(last + 1 - text)))
        return 0;
    size_t n_key = strlen(c->key);
    if (strncmp(text, c->key, n_key) != 0)
        return 0;
    int rc = 0;
    struct gemm_record r;
    const char *at = text + n_key;
    while (rc == 0 && at <= last && get_record(&at, &r))
        rc = append(c, &r);
    if (rc == 0 && at != last + 1)
        c->n = 0;
    return rc;
}

int gemm_cache_open(struct gemm_cache *c, const char *dir, const char *card, int64_t version)
{
    *c = (struct gemm_cache){0};
    char name[128];
    snprintf(name, sizeof(name), "%s", card);
    for (char *p = name; *p; p++)
        if (!isalnum((unsigned char)*p))
            *p = '_';
    if (asprintf(&c->path, "%s/products.%s.%lld", dir, name, (long long)version) < 0)
        c->path = NULL;
    if (asprintf(&c->key, "%s %s %lld\n", magic, name, (long long)version) < 0)
        c->key = NULL;
    if (!c->path || !c->key) {
        gemm_cache_close(c);
        return ERR_NOMEM;
    }
    struct buf text;
    buf_init(&text);
    int rc = file_read(c->path, CACHE_MAX_BYTES, &text, NULL);
    if (rc == 0 && buf_cstr(&text))
        rc = parse(c, buf_cstr(&text), text.len);
    buf_fini(&text);
    if (rc == ERR_NOMEM)
        gemm_cache_close(c);
    return rc == ERR_NOMEM ? rc : 0;
}

void gemm_cache_close(struct gemm_cache *c)
{
    free(c->path);
    free(c->key);
    free(c->records);
    *c = (struct gemm_cache){0};
}

static struct gemm_record *find(const struct gemm_cache *c, int32_t rows, int32_t cols,
                                bool is_f32, int32_t max_rows)
{
    for (int32_t i = 0; i < c->n; i++) {
        struct gemm_record *r = &c->records[i];
        if (r->rows == rows && r->cols == cols && r->is_f32 == is_f32 &&
            r->max_rows == max_rows)
            return r;
    }
    return NULL;
}

const struct gemm_record *gemm_cache_find(const struct gemm_cache *c, int32_t rows,
                                          int32_t cols, bool is_f32, int32_t max_rows)
{
    return find(c, rows, cols, is_f32, max_rows);
}

/* ---- writing ---- */

static int write_file(const char *path, const struct buf *text, struct errmsg *e)
{
    char *beside;
    if (asprintf(&beside, "%s.%ld", path, (long)getpid()) < 0)
        return ERR_NOMEM;
    FILE *f = fopen(beside, "we");
    bool is_good = f && fwrite(text->data, 1, text->len, f) == text->len;
    is_good = (!f || fclose(f) == 0) && is_good && rename(beside, path) == 0;
    int rc = is_good ? 0 : errmsg_set(e, ERR_IO, "%s: %s", path, strerror(errno));
    if (!is_good && f)
        unlink(beside);
    free(beside);
    return rc;
}

int gemm_cache_add(struct gemm_cache *c, const struct gemm_record *r, struct errmsg *e)
{
    struct gemm_record *old = find(c, r->rows, r->cols, r->is_f32, r->max_rows);
    struct buf text;
    int rc = 0;
    if (old)
        *old = *r;
    else
        rc = append(c, r);
    if (rc != 0)
        return rc;
    buf_init(&text);
    buf_adds(&text, c->key);
    for (int32_t i = 0; i < c->n; i++)
        put_record(&text, &c->records[i]);
    if (!text.failed)
        buf_printf(&text, "sum %" PRIx64 "\n", checksum(text.data, text.len));
    rc = text.failed ? ERR_NOMEM : write_file(c->path, &text, e);
    buf_fini(&text);
    return rc;
}
