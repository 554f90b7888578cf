/* Reading a whole small file. Main thread, at start; never blocks on anything but the disk. */
#ifndef PREFILLD_FILE_H
#define PREFILLD_FILE_H

#include <stddef.h>

#include "buf.h"
#include "err.h"

/* Appends the file's bytes to out. Refuses what is not a regular file, and files of more than
 * max_bytes. Returns 0, ERR_NOT_FOUND when there is no such file, ERR_IO, ERR_TOO_LARGE or
 * ERR_NOMEM, with e filled. */
int file_read(const char *path, size_t max_bytes, struct buf *out, struct errmsg *e);

#endif
