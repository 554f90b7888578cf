/* Checkpoint files: safetensors, one or several, mapped and checked.
 *
 * Owns the mappings. Main thread, at start; the mapped bytes are constant and may be read by
 * any thread until close. Never trusts a file: every offset, size, shape and name is checked
 * before it is used. As the format says, data has neither overlaps nor holes and ends with the
 * file; also refused: names that are not printable ASCII (so that messages and logs stay
 * clean), a name in two shards, a shard that the index does not match. A file truncated by
 * another process while mapped is outside what can be checked (SIGBUS). */
#ifndef PREFILLD_SAFETENSORS_H
#define PREFILLD_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum st_dtype {
    ST_F64,
    ST_F32,
    ST_F16,
    ST_BF16,
    ST_F8_E4M3,
    ST_F8_E5M2,
    ST_I64,
    ST_I32,
    ST_I16,
    ST_I8,
    ST_U64,
    ST_U32,
    ST_U16,
    ST_U8,
    ST_BOOL
};

enum { ST_MAX_DIMS = 8 };

struct st_tensor {
    char *name; /* owned by the set */
    enum st_dtype dtype;
    int32_t n_dims;
    int64_t dims[ST_MAX_DIMS];
    const void *data; /* mapped; not necessarily aligned to the element */
    size_t bytes;
};

struct st_set;

/* Opens dir/model.safetensors.index.json with its shards, or dir/model.safetensors, or the only
 * *.safetensors file of dir. All missing shards are named at once. Returns 0, ERR_IO,
 * ERR_INVALID or ERR_NOMEM with e filled; caller ends with st_close. */
int st_open_dir(const char *dir, struct st_set **out, struct errmsg *e);
/* One file; the same. */
int st_open_file(const char *path, struct st_set **out, struct errmsg *e);
void st_close(struct st_set *s);

/* NULL when absent. O(log n). */
const struct st_tensor *st_find(const struct st_set *s, const char *name);
/* All tensors, sorted by name (strcmp), one behind the other: st_at(s, i) is
 * st_at(s, 0) + i. */
size_t st_count(const struct st_set *s);
const struct st_tensor *st_at(const struct st_set *s, size_t i);

/* As the format spells it: "BF16". */
const char *st_dtype_name(enum st_dtype d);
size_t st_dtype_bytes(enum st_dtype d);

#endif
