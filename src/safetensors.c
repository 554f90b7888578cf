/* One safetensors file: 8 bytes with the header's length (little-endian), the header (JSON:
 * name -> {dtype, shape, data_offsets}), the data. Offsets count from the data's start. */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "safetensors_priv.h"

/* As the format's own reader allows. */
static const uint64_t HEADER_MAX_BYTES = 100000000;
static const size_t NAME_MAX_BYTES = 512;

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
    [ST_F64] = {"F64", 8},   [ST_F32] = {"F32", 4},         [ST_F16] = {"F16", 2},
    [ST_BF16] = {"BF16", 2}, [ST_F8_E4M3] = {"F8_E4M3", 1}, [ST_F8_E5M2] = {"F8_E5M2", 1},
    [ST_I64] = {"I64", 8},   [ST_I32] = {"I32", 4},         [ST_I16] = {"I16", 2},
    [ST_I8] = {"I8", 1},     [ST_U64] = {"U64", 8},         [ST_U32] = {"U32", 4},
    [ST_U16] = {"U16", 2},   [ST_U8] = {"U8", 1},           [ST_BOOL] = {"BOOL", 1},
};
enum { DTYPE_COUNT = sizeof(dtypes) / sizeof(dtypes[0]) };

const char *st_dtype_name(enum st_dtype d)
{
    return dtypes[d].name;
}

size_t st_dtype_bytes(enum st_dtype d)
{
    return dtypes[d].bytes;
}

bool st_is_name(const char *name)
{
    size_t len = strlen(name);
    if (len == 0 || len > NAME_MAX_BYTES)
        return false;
    for (size_t i = 0; i < len; i++)
        if (name[i] <= 0x20 || name[i] > 0x7e)
            return false;
    return true;
}

/* ---- the header ---- */

struct header {
    const char *path;
    const char *data; /* [data_bytes] what offsets count from */
    uint64_t data_bytes;
    struct errmsg *e;
};

static int refuse_tensor(const struct header *h, const char *name, const char *what)
{
    return errmsg_set(h->e, ERR_INVALID, "%s: tensor %s: %s", h->path, name, what);
}

static int read_dtype(const struct header *h, const char *name, const json_t *v,
                      enum st_dtype *out)
{
    const char *s = json_string_value(v);
    if (!s)
        return refuse_tensor(h, name, "dtype is not a string");
    for (int d = 0; d < DTYPE_COUNT; d++)
        if (strcmp(s, dtypes[d].name) == 0) {
            *out = (enum st_dtype)d;
            return 0;
        }
    errmsg_set(h->e, ERR_INVALID, "%s: tensor %s: dtype %.32s is not known; accepted:", h->path,
               name, st_is_name(s) ? s : "(not printable)");
    for (int d = 0; d < DTYPE_COUNT; d++)
        errmsg_add(h->e, " %s", dtypes[d].name);
    return ERR_INVALID;
}

/* Shape, and the bytes it makes. */
static int read_shape(const struct header *h, const char *name, const json_t *v,
                      struct st_tensor *t)
{
    if (!json_is_array(v) || json_array_size(v) > ST_MAX_DIMS)
        return refuse_tensor(h, name, "shape is not a list of at most 8 dims");
    uint64_t bytes = dtypes[t->dtype].bytes;
    bool is_empty = false, is_huge = false;
    t->n_dims = (int32_t)json_array_size(v);
    for (int32_t i = 0; i < t->n_dims; i++) {
        const json_t *dim = json_array_get(v, (size_t)i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return refuse_tensor(h, name, "a dim of the shape is not an integer of 0 or more");
        t->dims[i] = json_integer_value(dim);
        is_empty |= t->dims[i] == 0;
        is_huge |= __builtin_mul_overflow(bytes, (uint64_t)t->dims[i], &bytes);
    }
    if (is_huge && !is_empty)
        return refuse_tensor(h, name, "the shape has more elements than memory could hold");
    t->bytes = is_empty ? 0 : (size_t)bytes;
    return 0;
}

static int read_offsets(const struct header *h, const char *name, const json_t *v,
                        struct st_tensor *t)
{
    const json_t *begin = json_array_get(v, 0), *end = json_array_get(v, 1);
    if (json_array_size(v) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return refuse_tensor(h, name, "data_offsets is not a list of two integers");
    int64_t from = json_integer_value(begin), to = json_integer_value(end);
    if (from < 0 || to < from || (uint64_t)to > h->data_bytes)
        return errmsg_set(
            h->e, ERR_INVALID,
            "%s: tensor %s: data_offsets [%lld, %lld] are outside the file's %llu "
            "bytes of data (is the file cut short?)",
            h->path, name, (long long)from, (long long)to, (unsigned long long)h->data_bytes);
    if ((uint64_t)(to - from) != t->bytes)
        return errmsg_set(h->e, ERR_INVALID,
                          "%s: tensor %s: data_offsets hold %lld bytes, shape and dtype %zu",
                          h->path, name, (long long)(to - from), t->bytes);
    t->data = h->data + from;
    return 0;
}

static int read_entry(const struct header *h, const char *name, const json_t *entry,
                      struct st_tensor *t)
{
    if (!json_is_object(entry))
        return refuse_tensor(h, name, "its entry is not an object");
    int rc = read_dtype(h, name, json_object_get(entry, "dtype"), &t->dtype);
    if (rc == 0)
        rc = read_shape(h, name, json_object_get(entry, "shape"), t);
    if (rc == 0)
        rc = read_offsets(h, name, json_object_get(entry, "data_offsets"), t);
    return rc;
}

static int check_metadata(const struct header *h, json_t *metadata)
{
    const char *key;
    json_t *v;
    if (!json_is_object(metadata))
        return errmsg_set(h->e, ERR_INVALID, "%s: __metadata__ is not an object", h->path);
    json_object_foreach(metadata, key, v) if (!json_is_string(v)) return errmsg_set(
        h->e, ERR_INVALID, "%s: __metadata__ holds more than strings", h->path);
    return 0;
}

static int compare_places(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;
    if (x->data != y->data)
        return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* The tensors of one file, in the order of their data: each starts where the one before ended,
 * the last ends with the file. */
static int check_places(const struct header *h, struct st_tensor *tensors, size_t n)
{
    qsort(tensors, n, sizeof(*tensors), compare_places);
    const char *at = h->data;
    for (size_t i = 0; i < n; i++) {
        const char *data = tensors[i].data;
        if (data < at)
            return errmsg_set(h->e, ERR_INVALID, "%s: the data of tensors %s and %s overlap",
                              h->path, tensors[i - 1].name, tensors[i].name);
        if (data > at)
            return errmsg_set(h->e, ERR_INVALID,
                              "%s: %lld bytes before the data of tensor %s belong to no tensor",
                              h->path, (long long)(data - at), tensors[i].name);
        at = data + tensors[i].bytes;
    }
    if (at != h->data + h->data_bytes)
        return errmsg_set(h->e, ERR_INVALID,
                          "%s: %lld bytes at the end of the file belong to no tensor", h->path,
                          (long long)(h->data + h->data_bytes - at));
    return 0;
}

static int reserve_tensors(struct st_set *s, size_t extra)
{
    size_t need = s->n_tensors + extra;
    if (need <= s->tensors_cap)
        return 0;
    size_t cap = 2 * s->tensors_cap > need ? 2 * s->tensors_cap : need;
    struct st_tensor *p = realloc(s->tensors, cap * sizeof(*p));
    if (!p)
        return ERR_NOMEM;
    s->tensors = p;
    s->tensors_cap = cap;
    return 0;
}

static int read_header(struct st_set *s, const struct header *h, json_t *root)
{
    if (!json_is_object(root))
        return errmsg_set(h->e, ERR_INVALID, "%s: the header is not a JSON object", h->path);
    size_t first = s->n_tensors;
    /* One more, so that even no tensors are an array. */
    if (reserve_tensors(s, json_object_size(root) + 1) != 0)
        return errmsg_set(h->e, ERR_NOMEM, "%s: no memory for its names", h->path);
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry)
    {
        int rc;
        struct st_tensor t = {0};
        if (strcmp(name, "__metadata__") == 0) {
            rc = check_metadata(h, entry);
            if (rc != 0)
                return rc;
            continue;
        }
        if (!st_is_name(name))
            return errmsg_set(h->e, ERR_INVALID,
                              "%s: a tensor's name is not 1 to %zu bytes of printable ASCII",
                              h->path, NAME_MAX_BYTES);
        rc = read_entry(h, name, entry, &t);
        if (rc != 0)
            return rc;
        t.name = strdup(name);
        if (!t.name)
            return errmsg_set(h->e, ERR_NOMEM, "%s: no memory for its names", h->path);
        s->tensors[s->n_tensors++] = t;
    }
    return check_places(h, s->tensors + first, s->n_tensors - first);
}

/* ---- the file ---- */

static int map_file(struct st_set *s, const char *path, struct errmsg *e)
{
    int rc = 0;
    struct stat st;
    if (s->n_maps == s->maps_cap) {
        size_t cap = s->maps_cap ? 2 * s->maps_cap : 4;
        struct st_map *p = realloc(s->maps, cap * sizeof(*p));
        if (!p)
            return errmsg_set(e, ERR_NOMEM, "%s: no memory", path);
        s->maps = p;
        s->maps_cap = cap;
    }
    /* O_NONBLOCK: opening a FIFO must fail the test below, not wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errmsg_set(e, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", path,
                          strerror(errno));
    if (fstat(fd, &st) != 0) {
        rc = errmsg_set(e, ERR_IO, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rc = errmsg_set(e, ERR_IO, "%s: not a regular file", path);
    } else if (st.st_size < 8) {
        rc = errmsg_set(e, ERR_INVALID, "%s: %lld bytes are too few for a safetensors file",
                        path, (long long)st.st_size);
    } else {
        size_t len = (size_t)st.st_size;
        void *base = mmap(NULL, len, PROT_READ, MAP_PRIVATE, fd, 0);
        if (base == MAP_FAILED)
            rc = errmsg_set(e, errno == ENOMEM ? ERR_NOMEM : ERR_IO, "%s: cannot map it: %s",
                            path, strerror(errno));
        else
            s->maps[s->n_maps++] = (struct st_map){base, len};
    }
    close(fd);
    return rc;
}

int st_add_file(struct st_set *s, const char *path, struct errmsg *e)
{
    int rc = map_file(s, path, e);
    if (rc != 0)
        return rc;
    const struct st_map *map = &s->maps[s->n_maps - 1];
    const unsigned char *bytes = map->base;
    uint64_t header_bytes = 0;
    for (int i = 0; i < 8; i++)
        header_bytes |= (uint64_t)bytes[i] << (8 * i);
    if (header_bytes > HEADER_MAX_BYTES)
        return errmsg_set(e, ERR_INVALID,
                          "%s: a header of %llu bytes; accepted: at most %llu (is this a "
                          "safetensors file?)",
                          path, (unsigned long long)header_bytes,
                          (unsigned long long)HEADER_MAX_BYTES);
    if (header_bytes > map->len - 8)
        return errmsg_set(e, ERR_INVALID,
                          "%s: cut short: a header of %llu bytes in a file of %zu", path,
                          (unsigned long long)header_bytes, map->len);
    json_error_t where;
    json_t *root = json_loadb((const char *)bytes + 8, (size_t)header_bytes,
                              JSON_REJECT_DUPLICATES, &where);
    if (!root) {
        if (json_error_code(&where) == json_error_out_of_memory)
            return errmsg_set(e, ERR_NOMEM, "%s: no memory for its header", path);
        bool is_twice = json_error_code(&where) == json_error_duplicate_key;
        return errmsg_set(e, ERR_INVALID, "%s: the header %s at byte %d", path,
                          is_twice ? "has a name twice," : "is not JSON", where.position);
    }
    struct header h = {.path = path,
                       .data = (const char *)bytes + 8 + header_bytes,
                       .data_bytes = map->len - 8 - header_bytes,
                       .e = e};
    rc = read_header(s, &h, root);
    json_decref(root);
    return rc;
}

/* ---- the set ---- */

struct st_set *st_new(void)
{
    return calloc(1, sizeof(struct st_set));
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct st_tensor *)a)->name, ((const struct st_tensor *)b)->name);
}

int st_sort(struct st_set *s, struct errmsg *e)
{
    if (s->n_tensors == 0)
        return errmsg_set(e, ERR_INVALID, "the checkpoint holds no tensors");
    qsort(s->tensors, s->n_tensors, sizeof(s->tensors[0]), compare_names);
    for (size_t i = 1; i < s->n_tensors; i++)
        if (strcmp(s->tensors[i - 1].name, s->tensors[i].name) == 0)
            return errmsg_set(e, ERR_INVALID, "tensor %s is in more than one file",
                              s->tensors[i].name);
    return 0;
}

int st_open_file(const char *path, struct st_set **out, struct errmsg *e)
{
    struct st_set *s = st_new();
    if (!s)
        return errmsg_set(e, ERR_NOMEM, "%s: no memory", path);
    int rc = st_add_file(s, path, e);
    if (rc == 0)
        rc = st_sort(s, e);
    if (rc != 0) {
        st_close(s);
        return rc == ERR_NOT_FOUND ? ERR_IO : rc;
    }
    *out = s;
    return 0;
}

void st_close(struct st_set *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->n_tensors; i++)
        free(s->tensors[i].name);
    for (size_t i = 0; i < s->n_maps; i++)
        munmap(s->maps[i].base, s->maps[i].len);
    free(s->tensors);
    free(s->maps);
    free(s);
}

const struct st_tensor *st_find(const struct st_set *s, const char *name)
{
    struct st_tensor key = {.name = (char *)name};
    return bsearch(&key, s->tensors, s->n_tensors, sizeof(s->tensors[0]), compare_names);
}

size_t st_count(const struct st_set *s)
{
    return s->n_tensors;
}

const struct st_tensor *st_at(const struct st_set *s, size_t i)
{
    return &s->tensors[i];
}
