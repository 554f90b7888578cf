/* Between safetensors.c (a file's header and data) and safetensors_index.c (a directory's
 * files). */
#ifndef PREFILLD_SAFETENSORS_PRIV_H
#define PREFILLD_SAFETENSORS_PRIV_H

#include <stdbool.h>

#include "safetensors.h"

struct st_map {
    void *base;
    size_t len;
};

struct st_set {
    struct st_tensor *tensors; /* sorted by st_sort */
    size_t n_tensors, tensors_cap;
    struct st_map *maps;
    size_t n_maps, maps_cap;
};

struct st_set *st_new(void);
/* Maps a file and appends its tensors. A set that failed is only good for st_close. Returns as
 * st_open_file, and ERR_NOT_FOUND when there is no such file. */
int st_add_file(struct st_set *s, const char *path, struct errmsg *e);
/* Sorts by name; refuses a name that occurs twice. */
int st_sort(struct st_set *s, struct errmsg *e);
/* A name that may stand in a message: 1 to 512 bytes, printable ASCII. */
bool st_is_name(const char *name);

#endif
