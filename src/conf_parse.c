/* The two places where options are written: the configuration file and the command line. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"
#include "buf.h"
#include "conf_priv.h"

enum { MAX_FILE_BYTES = 1024 * 1024, MAX_LINE_BYTES = 4096 };

/* ---- the file */

/* Appends the whole file to b. */
static int read_file(const char *path, struct buf *b, struct errmsg *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errmsg_set(e, ERR_IO, "cannot open the configuration file %s: %s", path,
                          strerror(errno));
    int rc = 0;
    for (;;) {
        if (buf_reserve(b, 4096) != 0) {
            rc = errmsg_set(e, ERR_NOMEM, "out of memory");
            break;
        }
        ssize_t n = read(fd, b->data + b->len, 4096);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = errmsg_set(e, ERR_IO, "cannot read the configuration file %s: %s", path,
                            strerror(errno));
        if (n <= 0)
            break;
        b->len += (size_t)n;
        if (b->len > MAX_FILE_BYTES) {
            rc = errmsg_set(e, ERR_INVALID,
                            "%s is longer than %d bytes: that is no configuration file", path,
                            MAX_FILE_BYTES);
            break;
        }
    }
    close(fd);
    return rc;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t';
}

/* The first byte of [p, end) that no line of text has, or NULL. */
static const char *find_control(const char *p, const char *end)
{
    for (; p < end; p++)
        if (((unsigned char)*p < 0x20 && *p != '\t') || *p == 0x7f)
            return p;
    return NULL;
}

/* One line, its end cut off: blank, a comment, or `key value`. seen: rows that came before. */
static int parse_line(struct conf *c, char *line, size_t len, const char *where, bool *seen,
                      struct errmsg *e)
{
    if (len > MAX_LINE_BYTES)
        return errmsg_set(e, ERR_INVALID, "%s: the line has %zu bytes: at most %d are accepted",
                          where, len, MAX_LINE_BYTES);
    const char *control = find_control(line, line + len);
    if (control)
        return errmsg_set(e, ERR_INVALID,
                          "%s: byte %zu of the line is \\x%02x: a configuration file is text",
                          where, (size_t)(control - line) + 1, (unsigned char)*control);
    while (len && is_blank(line[len - 1]))
        len--;
    line[len] = '\0';
    char *key = line;
    while (is_blank(*key))
        key++;
    if (*key == '\0' || *key == '#')
        return 0;
    size_t key_len = strcspn(key, " \t");
    char *value = key + key_len;
    while (is_blank(*value))
        value++;

    struct shown s;
    const struct option *o = conf_find(key, key_len);
    if (!o) {
        key[key_len] = '\0';
        return errmsg_set(e, ERR_INVALID, "%s: unknown key %s: prefilld --help lists the keys",
                          where, conf_show(&s, key));
    }
    if (*value == '\0')
        return errmsg_set(e, ERR_INVALID, "%s: %s has no value: write `%s %s`", where, o->name,
                          o->name, o->arg);
    if (seen[o - conf_options] && o->kind != KIND_LISTEN)
        return errmsg_set(e, ERR_INVALID, "%s: %s is given a second time: keep one", where,
                          o->name);
    seen[o - conf_options] = true;
    char subject[PATH_MAX + 64];
    snprintf(subject, sizeof(subject), "%s: %s", where, o->name);
    return conf_set(c, o, value, subject, e);
}

static int parse_file(struct conf *c, const char *path, struct errmsg *e)
{
    struct buf b;
    buf_init(&b);
    int rc = read_file(path, &b, e);
    if (rc == 0) {
        buf_addc(&b, '\n'); /* the last line may lack its own */
        if (b.failed)
            rc = errmsg_set(e, ERR_NOMEM, "out of memory");
    }
    bool seen[CONF_MAX_OPTIONS] = {false};
    int n = 0;
    /* Some editors write a byte order mark. */
    size_t start = b.len >= 3 && memcmp(b.data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    for (size_t from = start; rc == 0 && from < b.len;) {
        char *line = b.data + from;
        size_t len = (size_t)((char *)memchr(line, '\n', b.len - from) - line);
        from += len + 1;
        if (len && line[len - 1] == '\r')
            len--;
        char where[PATH_MAX + 16];
        snprintf(where, sizeof(where), "%s:%d", path, ++n);
        rc = parse_line(c, line, len, where, seen, e);
    }
    buf_fini(&b);
    return rc;
}

/* ---- the command line */

/* One argument of the command line, resolved: a row with its value, or one of the options
 * of the command line alone. */
struct argument {
    const struct option *option;    /* or NULL */
    const struct line_option *line; /* or NULL */
    const char *value;
    char where[64];
};

/* Reads the argument at *i and moves past it. */
static int next_argument(int argc, char **argv, int *i, struct argument *a, struct errmsg *e)
{
    struct shown s;
    const char *text = argv[(*i)++];
    if (strcmp(text, "-h") == 0)
        text = "--help";
    if (strncmp(text, "--", 2) != 0 || text[2] == '\0')
        return errmsg_set(e, ERR_INVALID,
                          "unexpected argument %s: options start with two dashes, as "
                          "--model DIR; prefilld --help lists them",
                          conf_show(&s, text));
    const char *name = text + 2;
    size_t len = strcspn(name, "=");
    const char *arg = NULL;
    a->option = conf_find(name, len);
    a->line = NULL;
    if (a->option)
        arg = a->option->arg;
    for (size_t k = 0; k < conf_n_line_options; k++) {
        const struct line_option *l = &conf_line_options[k];
        if (strlen(l->name) == len && memcmp(l->name, name, len) == 0) {
            a->line = l;
            arg = l->arg;
        }
    }
    if (!a->option && !a->line)
        return errmsg_set(e, ERR_INVALID, "unknown option %s: prefilld --help lists them",
                          conf_show(&s, text));
    snprintf(a->where, sizeof(a->where), "--%.*s", (int)len, name);
    a->value = NULL;
    if (name[len] == '=')
        a->value = name + len + 1;
    if (!arg && a->value)
        return errmsg_set(e, ERR_INVALID, "%s takes no value", a->where);
    if (arg && !a->value) {
        if (*i == argc || strncmp(argv[*i], "--", 2) == 0)
            return errmsg_set(e, ERR_INVALID, "%s needs a value: %s %s", a->where, a->where,
                              arg);
        a->value = argv[(*i)++];
    }
    return 0;
}

/* First pass: what to do, and which file to read. Stops at --help and --version. */
static int scan_arguments(int argc, char **argv, struct conf *c, const char **path,
                          struct errmsg *e)
{
    for (int i = 1; i < argc;) {
        struct argument a;
        int rc = next_argument(argc, argv, &i, &a, e);
        if (rc != 0)
            return rc;
        if (a.option)
            continue;
        enum conf_action action = a.line->action;
        if (action == CONF_RUN)
            *path = a.value;
        else
            c->action = action;
        if (action == CONF_HELP || action == CONF_VERSION)
            return 0;
    }
    return 0;
}

/* Second pass: values. The first --listen replaces what the file listens on. */
static int apply_arguments(int argc, char **argv, struct conf *c, struct errmsg *e)
{
    bool has_listen = false;
    for (int i = 1; i < argc;) {
        struct argument a;
        int rc = next_argument(argc, argv, &i, &a, e);
        if (rc == 0 && a.option) {
            if (a.option->kind == KIND_LISTEN && !has_listen) {
                conf_drop_listen(c);
                has_listen = true;
            }
            rc = conf_set(c, a.option, a.value, a.where, e);
        }
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int set_defaults(struct conf *c, struct errmsg *e)
{
    for (size_t i = 0; i < conf_n_options; i++) {
        const struct option *o = &conf_options[i];
        int rc = o->deflt ? conf_set(c, o, o->deflt, "default", e) : 0;
        if (rc != 0)
            return rc;
    }
    return 0;
}

int conf_parse(int argc, char **argv, struct conf *c, struct errmsg *e)
{
    memset(c, 0, sizeof(*c));
    const char *path = NULL;
    int rc = set_defaults(c, e);
    if (rc == 0)
        rc = scan_arguments(argc, argv, c, &path, e);
    if (rc == 0 && (c->action == CONF_HELP || c->action == CONF_VERSION))
        return 0;
    if (rc == 0 && path)
        rc = parse_file(c, path, e);
    if (rc == 0)
        rc = apply_arguments(argc, argv, c, e);
    c->listen_is_default = c->n_listen == 0;
    if (rc == 0 && c->listen_is_default)
        rc = conf_set(c, conf_find("listen", 6), "127.0.0.1:8080", "default", e);
    if (rc == 0 && !c->model)
        rc = errmsg_set(e, ERR_INVALID,
                        "no model: give --model DIR, a directory with config.json, "
                        "*.safetensors and tokenizer.json");
    if (rc == 0 && !c->api_key_file && (c->max_key_requests > 0 || c->max_key_tokens > 0))
        rc = errmsg_set(e, ERR_INVALID,
                        "%s: limits of keys need api-key-file, which is not given",
                        c->max_key_requests > 0 ? "max-key-requests" : "max-key-tokens");
    if (rc == 0 && !c->api_key_file && c->api_key_scope != API_KEY_CALLS)
        rc =
            errmsg_set(e, ERR_INVALID,
                       "api-key-scope: asking for keys needs api-key-file, which is not given");
    if (rc != 0)
        conf_fini(c);
    return rc;
}
