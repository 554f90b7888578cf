#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int file_read(const char *path, size_t max_bytes, struct buf *out, struct errmsg *e)
{
    int rc = 0;
    struct stat st;
    /* O_NONBLOCK: opening a FIFO must fail the regular-file test below, not wait for a
     * writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errmsg_set(e, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", path,
                          strerror(errno));
    if (fstat(fd, &st) != 0) {
        rc = errmsg_set(e, ERR_IO, "%s: %s", path, strerror(errno));
        goto done;
    }
    if (!S_ISREG(st.st_mode)) {
        rc = errmsg_set(e, ERR_IO, "%s: not a regular file", path);
        goto done;
    }
    size_t total = 0;
    for (;;) {
        size_t want = 1 << 16;
        if (buf_reserve(out, want) != 0) {
            rc = errmsg_set(e, ERR_NOMEM, "%s: no memory", path);
            goto done;
        }
        ssize_t n = read(fd, out->data + out->len, want);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            rc = errmsg_set(e, ERR_IO, "%s: %s", path, strerror(errno));
            goto done;
        }
        if (n == 0)
            goto done;
        total += (size_t)n;
        out->len += (size_t)n;
        if (total > max_bytes) {
            rc = errmsg_set(e, ERR_TOO_LARGE, "%s: more than %zu bytes", path, max_bytes);
            goto done;
        }
    }
done:
    close(fd);
    return rc;
}
