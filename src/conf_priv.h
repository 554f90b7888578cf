/* Inside the conf module: the option table's row, shared by conf.c (rows, values, help) and
 * conf_parse.c (the file and the command line). */
#ifndef PREFILLD_CONF_PRIV_H
#define PREFILLD_CONF_PRIV_H

#include <stddef.h>

#include "conf.h"

enum kind {
    KIND_SECTION, /* a heading of --help */
    KIND_TEXT,    /* char *, one of choices when there are any */
    KIND_LISTEN,  /* appended to listen */
    KIND_I32,
    KIND_I64,
    KIND_BYTES, /* int64_t, with K, M or G for powers of 1024 */
    KIND_SHARE, /* int32_t in thousandths, written as 0.92 */
    KIND_CHOICE /* int32_t, the place in choices */
};

/* name stands in the file and, after two dashes, on the command line. A number lies in
 * [min, max] and is a multiple of `multiple` (0: any). deflt is parsed like any other value;
 * NULL leaves the member zero. */
struct option {
    const char *name, *arg, *deflt;
    enum kind kind;
    size_t offset;
    int64_t min, max, multiple;
    const char *const *choices;
    const char *help;
};

enum { CONF_MAX_OPTIONS = 64 };

extern const struct option conf_options[];
extern const size_t conf_n_options;

/* Options of the command line alone. */
struct line_option {
    const char *name, *arg, *help;
    enum conf_action action; /* CONF_RUN: takes arg */
};

extern const struct line_option conf_line_options[];
extern const size_t conf_n_line_options;

/* A value that somebody wrote, fit for a message: quoted, short, printable. */
enum { CONF_SHOWN_BYTES = 64 };

struct shown {
    char text[4 * CONF_SHOWN_BYTES + 8];
};

const char *conf_show(struct shown *s, const char *value);

/* The row called name[len], or NULL. */
const struct option *conf_find(const char *name, size_t len);

/* Parses value into c's member; a listen is appended. where begins the message: `--name` or
 * `file:line: name`. Returns 0, ERR_INVALID or ERR_NOMEM with e filled. */
int conf_set(struct conf *c, const struct option *o, const char *value, const char *where,
             struct errmsg *e);

void conf_drop_listen(struct conf *c);

#endif
