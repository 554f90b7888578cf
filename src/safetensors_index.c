/* Which files make a checkpoint: an index with shards, or one file. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "buf.h"
#include "file.h"
#include "safetensors_priv.h"

enum { PATH_CAP = 4096, INDEX_MAX_BYTES = 256 << 20, SHARDS_MAX = 4096, NAMED_MAX = 20 };

static const char index_name[] = "model.safetensors.index.json";
static const char single_name[] = "model.safetensors";

/* The name of a file in the same directory, nothing else: a checkpoint must not make us open
 * files elsewhere. */
static bool is_shard_name(const char *name)
{
    size_t len = strlen(name);
    return st_is_name(name) && len > 12 && name[0] != '.' &&
           strcmp(name + len - 12, ".safetensors") == 0 && !strpbrk(name, "/\\");
}

static int join_path(char path[PATH_CAP], const char *dir, const char *name, struct errmsg *e)
{
    int n = snprintf(path, PATH_CAP, "%s/%s", dir, name);
    if (n < 0 || n >= PATH_CAP)
        return errmsg_set(e, ERR_INVALID, "the model directory's name is too long");
    return 0;
}

/* ---- the index ---- */

struct shards {
    const char **names; /* [n] borrowed from the index's JSON, in order of appearance */
    size_t n, cap;
};

static int add_shard(struct shards *l, const char *name)
{
    /* Names mostly come in runs: look at the last ones first. */
    for (size_t i = l->n; i-- > 0;)
        if (strcmp(l->names[i], name) == 0)
            return 0;
    if (l->n == SHARDS_MAX)
        return ERR_TOO_LARGE;
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 64;
        const char **p = realloc(l->names, cap * sizeof(*p));
        if (!p)
            return ERR_NOMEM;
        l->names = p;
        l->cap = cap;
    }
    l->names[l->n++] = name;
    return 0;
}

static int list_shards(const char *path, json_t *weight_map, struct shards *l, struct errmsg *e)
{
    if (!json_is_object(weight_map))
        return errmsg_set(e, ERR_INVALID, "%s: weight_map is not an object", path);
    const char *tensor;
    json_t *file;
    json_object_foreach(weight_map, tensor, file)
    {
        if (!st_is_name(tensor))
            return errmsg_set(e, ERR_INVALID,
                              "%s: weight_map names a tensor that is not "
                              "printable ASCII",
                              path);
        if (!json_is_string(file) || !is_shard_name(json_string_value(file)))
            return errmsg_set(e, ERR_INVALID,
                              "%s: weight_map gives tensor %s a file that is not accepted; "
                              "accepted: the name of a .safetensors file in the same directory",
                              path, tensor);
        int rc = add_shard(l, json_string_value(file));
        if (rc == ERR_TOO_LARGE)
            return errmsg_set(e, ERR_INVALID, "%s: weight_map names more than %d files", path,
                              SHARDS_MAX);
        if (rc != 0)
            return errmsg_set(e, rc, "%s: no memory", path);
    }
    if (l->n == 0)
        return errmsg_set(e, ERR_INVALID, "%s: weight_map is empty", path);
    return 0;
}

/* One of the two was left there by an earlier save, and loaders differ in which one they
 * take. */
static int check_one_choice(const char *dir, const struct shards *l, struct errmsg *e)
{
    char path[PATH_CAP];
    for (size_t i = 0; i < l->n; i++)
        if (strcmp(l->names[i], single_name) == 0)
            return 0;
    int rc = join_path(path, dir, single_name, e);
    if (rc != 0 || access(path, F_OK) != 0)
        return rc;
    return errmsg_set(
        e, ERR_INVALID,
        "%s: there is %s beside %s, which names other files; accepted: one of the "
        "two, the other removed",
        dir, single_name, index_name);
}

/* Opens every shard; those that are not there are named together. from[i] is the first tensor
 * of shard i. */
static int open_shards(struct st_set *s, const char *dir, const struct shards *l, size_t *from,
                       struct errmsg *e)
{
    size_t n_missing = 0;
    struct errmsg missing = {{0}};
    char path[PATH_CAP];
    for (size_t i = 0; i < l->n; i++) {
        from[i] = s->n_tensors;
        int rc = join_path(path, dir, l->names[i], e);
        if (rc == 0)
            rc = st_add_file(s, path, e);
        if (rc == ERR_NOT_FOUND) {
            if (n_missing++ < NAMED_MAX)
                errmsg_add(&missing, " %.128s", l->names[i]);
        } else if (rc != 0) {
            return rc;
        }
    }
    from[l->n] = s->n_tensors;
    if (n_missing == 0)
        return 0;
    errmsg_set(e, ERR_IO, "%s: %zu of %zu files that %s names are missing:%s", dir, n_missing,
               l->n, index_name, missing.text);
    if (n_missing > NAMED_MAX)
        errmsg_add(e, " and %zu more", n_missing - NAMED_MAX);
    return ERR_IO;
}

/* Every tensor of the files is in the file that the index gives it. Before the set is sorted:
 * from tells which file a tensor came from. */
static int check_files(const struct st_set *s, const char *dir, const json_t *weight_map,
                       const struct shards *l, const size_t *from, struct errmsg *e)
{
    for (size_t i = 0; i < l->n; i++)
        for (size_t k = from[i]; k < from[i + 1]; k++) {
            const char *name = s->tensors[k].name;
            const char *file = json_string_value(json_object_get(weight_map, name));
            if (!file || strcmp(file, l->names[i]) != 0)
                return errmsg_set(e, ERR_INVALID, "%s: tensor %s is in %s, but %s puts it %s%s",
                                  dir, name, l->names[i], index_name,
                                  file ? "into " : "nowhere", file ? file : "");
        }
    return 0;
}

/* Every tensor of the index is in the files. After the set is sorted. */
static int check_weight_map(const struct st_set *s, const char *dir, json_t *weight_map,
                            struct errmsg *e)
{
    size_t n_missing = 0;
    struct errmsg missing = {{0}};
    const char *name;
    json_t *file;
    json_object_foreach(weight_map, name,
                        file) if (!st_find(s, name) && n_missing++ < NAMED_MAX)
        errmsg_add(&missing, " %.128s", name);
    if (n_missing == 0)
        return 0;
    errmsg_set(e, ERR_INVALID, "%s: %zu tensors of %s are not in its files:%s", dir, n_missing,
               index_name, missing.text);
    if (n_missing > NAMED_MAX)
        errmsg_add(e, " and %zu more", n_missing - NAMED_MAX);
    return ERR_INVALID;
}

static int open_index(const char *dir, const char *path, const struct buf *text,
                      struct st_set *s, struct errmsg *e)
{
    json_error_t where;
    struct shards l = {0};
    size_t *from = NULL;
    json_t *root = json_loadb(text->data, text->len, JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return errmsg_set(e, ERR_INVALID, "%s: not JSON, or a name twice (line %d, column %d)",
                          path, where.line, where.column);
    json_t *weight_map = json_object_get(root, "weight_map");
    int rc = list_shards(path, weight_map, &l, e);
    if (rc == 0)
        rc = check_one_choice(dir, &l, e);
    if (rc == 0) {
        from = calloc(l.n + 1, sizeof(*from));
        rc = from ? open_shards(s, dir, &l, from, e)
                  : errmsg_set(e, ERR_NOMEM, "%s: no memory", path);
    }
    if (rc == 0)
        rc = check_files(s, dir, weight_map, &l, from, e);
    if (rc == 0)
        rc = st_sort(s, e);
    if (rc == 0)
        rc = check_weight_map(s, dir, weight_map, e);
    free(from);
    free(l.names);
    json_decref(root);
    return rc;
}

/* ---- without an index ---- */

/* model.safetensors, or the only file of that kind. */
static int find_single(const char *dir, char path[PATH_CAP], struct errmsg *e)
{
    char found[256] = "";
    int n_found = 0;
    DIR *d = opendir(dir);
    if (!d)
        return errmsg_set(e, ERR_IO, "%s: %s", dir, strerror(errno));
    for (struct dirent *f; (f = readdir(d));) {
        if (!is_shard_name(f->d_name))
            continue;
        bool is_usual = strcmp(f->d_name, single_name) == 0;
        if (is_usual || n_found == 0)
            snprintf(found, sizeof(found), "%s", f->d_name);
        if (is_usual) {
            n_found = 1;
            break;
        }
        n_found++;
    }
    closedir(d);
    if (n_found == 0)
        return errmsg_set(e, ERR_IO, "%s: no %s and no %s", dir, single_name, index_name);
    if (n_found > 1)
        return errmsg_set(e, ERR_INVALID,
                          "%s: %d .safetensors files, none of them %s, and no %s", dir, n_found,
                          single_name, index_name);
    return join_path(path, dir, found, e);
}

int st_open_dir(const char *dir, struct st_set **out, struct errmsg *e)
{
    char path[PATH_CAP];
    int rc = join_path(path, dir, index_name, e);
    if (rc != 0)
        return rc;
    struct buf text;
    buf_init(&text);
    struct st_set *s = st_new();
    if (!s)
        return errmsg_set(e, ERR_NOMEM, "%s: no memory", dir);
    rc = file_read(path, INDEX_MAX_BYTES, &text, e);
    if (rc == 0) {
        rc = open_index(dir, path, &text, s, e);
    } else if (rc == ERR_NOT_FOUND) {
        rc = find_single(dir, path, e);
        if (rc == 0)
            rc = st_add_file(s, path, e);
        if (rc == 0)
            rc = st_sort(s, e);
    }
    buf_fini(&text);
    if (rc != 0) {
        st_close(s);
        return rc == ERR_NOT_FOUND ? ERR_IO : rc == ERR_TOO_LARGE ? ERR_INVALID : rc;
    }
    *out = s;
    return 0;
}
