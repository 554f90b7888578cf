/* A growable byte buffer, and the JSON text that answers are made of.
 *
 * Owns its bytes. Not thread-safe. Allocation failure is sticky: later appends do nothing and
 * `failed` says so, so that writers check once, at the end. */
#ifndef PREFILLD_BUF_H
#define PREFILLD_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct buf {
    char *data; /* NULL when empty; not NUL-terminated unless buf_cstr was called */
    size_t len;
    size_t cap;
    bool failed;
};

void buf_init(struct buf *b);
void buf_fini(struct buf *b);

/* Makes room for extra more bytes. Returns 0 or ERR_NOMEM. */
int buf_reserve(struct buf *b, size_t extra_bytes);
/* Inline, as buf_adds and buf_addc: an answer with a million numbers is made of little pieces,
 * most of them constants whose length the compiler knows. */
static inline void buf_add(struct buf *b, const void *data, size_t len)
{
    if (len == 0 || (len > b->cap - b->len && buf_reserve(b, len) != 0) || b->failed)
        return;
    memcpy(b->data + b->len, data, len);
    b->len += len;
}
static inline void buf_adds(struct buf *b, const char *s)
{
    buf_add(b, s, strlen(s));
}
static inline void buf_addc(struct buf *b, char c)
{
    buf_add(b, &c, 1);
}
void buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Terminates with NUL (not counted in len) and returns data, or NULL when failed. */
const char *buf_cstr(struct buf *b);
/* Hands the bytes to the caller, who frees them with free(); b is empty again. */
char *buf_take(struct buf *b, size_t *len);

/* JSON pieces. Strings must be UTF-8; control characters are escaped. Floats print as %.9g,
 * which reads back to the same f32; NaN and infinities print as null. */
void buf_json_string(struct buf *b, const char *s, size_t len);
void buf_json_f32(struct buf *b, float x);
void buf_json_i64(struct buf *b, int64_t x);

#endif
