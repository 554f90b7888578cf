/* A reader of JSON text that holds no tree: for the vocabulary and the merges, whose trees
 * would cost more time than all the rest of loading. The small parts of the file go to jansson.
 *
 * The text is well-formed UTF-8, checked before. One cursor, one thread. A failed call leaves
 * the cursor where the fault is. */
#ifndef PREFILLD_TOKENIZER_CURSOR_H
#define PREFILLD_TOKENIZER_CURSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"

struct cursor {
    const char *at;
    const char *end;
};

/* Past white space, and the character there; NUL at the end. */
char cursor_peek(struct cursor *j);

/* Past white space; true and past c as well when that comes next. */
bool cursor_take(struct cursor *j, char c);

/* Appends the string that comes next to out, escapes resolved. Returns 0, ERR_INVALID (also for
 * a lone surrogate) or ERR_NOMEM. */
int cursor_string(struct cursor *j, struct buf *out);

/* The integer 0..INT32_MAX that comes next, written without sign, fraction or exponent. */
int cursor_int32(struct cursor *j, int32_t *value);

/* Past the value that comes next, of at most 64 levels. It is checked only as far as finding
 * its end takes: strings, brackets, and no character that cannot be in JSON. */
int cursor_skip(struct cursor *j);

/* Steps through the members of an object or the elements of a list, whose bracket has been
 * taken: true, and one more in *n, when there is another. At the end *code is 0, or
 * ERR_INVALID. */
bool cursor_more(struct cursor *j, char close, size_t *n, int *code);

#endif
