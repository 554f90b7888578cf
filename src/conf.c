/* See conf.h. Everything a new option needs is its row in conf_options; --help, the file, the
 * command line, bounds and messages follow from it. tests/docs.py holds the README, the man
 * page and the sample file to the same rows. */
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include "api.h"
#include "conf_priv.h"
#include "log.h"
#include "sched.h"

#define AT(member) offsetof(struct conf, member)
#define DAY_S (24 * 60 * 60)
#define GIB (1024ll * 1024 * 1024)

static const char *const backend_choices[] = {"cpu", "cuda", "auto", NULL};
static const char *const load_choices[] = {
    [CONF_LOAD_FILE] = "file", [CONF_LOAD_DUMMY] = "dummy", NULL};
static const char *const switch_choices[] = {"no", "yes", NULL};
static const char *const log_choices[] = {[LOG_LEVEL_ERROR] = "error",
                                          [LOG_LEVEL_WARN] = "warn",
                                          [LOG_LEVEL_INFO] = "info",
                                          [LOG_LEVEL_DEBUG] = "debug",
                                          NULL};
static const char *const scope_choices[] = {[API_KEY_CALLS] = "calls",
                                            [API_KEY_ALL_BUT_HEALTH] = "all-but-health",
                                            [API_KEY_ALL] = "all",
                                            NULL};
static const char *const policy_choices[] = {
    [SCHED_SHORT_FIRST] = "short-first", [SCHED_FCFS] = "fcfs", NULL};

/* clang-format off: a row is read as a row */
const struct option conf_options[] = {
    {.help = "Model"},
    {"model", "DIR", NULL, KIND_TEXT, AT(model), 0, 0, 0, NULL,
     "the checkpoint: config.json, *.safetensors, tokenizer.json (required)"},
    {"served-name", "NAME", NULL, KIND_TEXT, AT(served_name), 0, 0, 0, NULL,
     "the model's id in the API (default: last component of model)"},
    {"backend", "NAME", "auto", KIND_TEXT, AT(backend), 0, 0, 0, backend_choices,
     "what computes; auto takes the best one built in"},
    {"load", "HOW", "file", KIND_CHOICE, AT(load), 0, 0, 0, load_choices,
     "dummy makes random weights from config.json alone, to try sizes and speed"},
    {"dummy-seed", "N", "0", KIND_I64, AT(dummy_seed), 0, INT64_MAX, 0, NULL,
     "seed of the random weights"},

    {.help = "Steps and pools"},
    {"policy", "NAME", "short-first", KIND_CHOICE, AT(policy), 0, 0, 0, policy_choices,
     "who goes first among equal priorities"},
    {"max-step-tokens", "N", "8192", KIND_I32, AT(max_step_tokens), 64, 1 << 20, 0, NULL,
     "tokens in one step, of all requests together"},
    {"max-seqs", "N", "256", KIND_I32, AT(max_seqs), 1, 1 << 16, 0, NULL,
     "requests in one step"},
    {"max-decode-share", "SHARE", "0.5", KIND_SHARE, AT(max_decode_share), 1, 1000, 0, NULL,
     "share of max-seqs that generated tokens may take of a step; the rest is for prompts"},
    {"max-prompt-tokens", "N", "0", KIND_I32, AT(max_prompt_tokens), 0, 1 << 24, 0, NULL,
     "longest prompt; 0: the model's limit, cut to what the pools hold"},
    {"queue-length", "N", "1024", KIND_I32, AT(queue_length), 1, 1 << 20, 0, NULL,
     "requests that may wait; one more is answered 503"},
    {"kv-tokens", "N", "0", KIND_I64, AT(kv_tokens), 0, 1ll << 40, 0, NULL,
     "size of the KV pool in tokens; 0: chosen from the free memory"},
    {"state-slots", "N", "0", KIND_I32, AT(state_slots), 0, 1 << 20, 0, NULL,
     "size of the state pool, one slot a running request; 0: chosen"},
    {"page-tokens", "N", "64", KIND_I32, AT(page_tokens), 64, 1 << 16, 64, NULL,
     "tokens of one KV page"},
    {"prefix-cache", "SWITCH", "yes", KIND_CHOICE, AT(prefix_cache), 0, 0, 0, switch_choices,
     "no computes every prompt from its start; one call's prompts share all the same"},
    {"checkpoint-tokens", "N", "2048", KIND_I32, AT(checkpoint_tokens), 64, 1 << 24, 0, NULL,
     "tokens a prompt computes until its state is kept for others, at its end, too"},
    {"prefix-cache-share", "SHARE", "0.5", KIND_SHARE, AT(prefix_cache_share), 1, 1000, 0, NULL,
     "share of each pool that kept states may take; running requests may take it back"},
    {"session-ttl-s", "N", "3600", KIND_I32, AT(session_ttl_s), 1, 30 * DAY_S, 0, NULL,
     "seconds that a session stays unused, where its request does not say"},
    {"session-dir", "DIR", NULL, KIND_TEXT, AT(session_dir), 0, 0, 0, NULL,
     "folder that keeps sessions over a restart (default: they end with the daemon)"},
    {"kv-lease-s", "N", "30", KIND_I32, AT(kv_lease_s), 0, 30 * DAY_S, 0, NULL,
     "seconds that a prompt is kept for a decode server (kv_transfer_params); 0: it is not"},
    {"cpu-threads", "N", "0", KIND_I32, AT(cpu_threads), 0, 1024, 0, NULL,
     "threads of the cpu backend; 0: one for each CPU"},
    {"cuda-device", "N", "0", KIND_I32, AT(cuda_device), 0, 1023, 0, NULL,
     "which device the cuda backend takes, as CUDA counts them"},
    {"gpu-memory", "SHARE", "0.92", KIND_SHARE, AT(gpu_memory), 50, 1000, 0, NULL,
     "share of the device's free memory that the cuda backend may take"},
    {"cache-dir", "DIR", NULL, KIND_TEXT, AT(cache_dir), 0, 0, 0, NULL,
     "folder that keeps which products are fastest (default: not kept)"},

    {.help = "HTTP"},
    {"listen", "ADDRESS", NULL, KIND_LISTEN, AT(listen), 0, 0, 0, NULL,
     "ADDR:PORT, [ADDR6]:PORT or unix:PATH; may repeat; port 0 takes a free one "
     "(default 127.0.0.1:8080)"},
    {"api-key-file", "FILE", NULL, KIND_TEXT, AT(api_key_file), 0, 0, 0, NULL,
     "bearer keys, one a line, asked for as api-key-scope says (default: none asked for)"},
    {"api-key-scope", "NAME", "calls", KIND_CHOICE, AT(api_key_scope), 0, 0, 0, scope_choices,
     "what needs a key: /v1/ and all that compute, or also /metrics and the rest"},
    {"max-key-requests", "N", "0", KIND_I64, AT(max_key_requests), 0, 1 << 20, 0, NULL,
     "requests that one key may have queued and running; one more is answered 429; 0: any "
     "number"},
    {"max-key-tokens", "N", "0", KIND_I64, AT(max_key_tokens), 0, 1ll << 40, 0, NULL,
     "prompt tokens that one key may have queued and running; more is answered 429; 0: any "
     "number"},
    {"workers", "N", "2", KIND_I32, AT(workers), 1, 256, 0, NULL,
     "threads that parse, tokenize and format"},
    {"max-body-bytes", "SIZE", "64M", KIND_BYTES, AT(max_body_bytes), 1, 16 * GIB, 0, NULL,
     "longest request body"},
    {"max-connections", "N", "4096", KIND_I32, AT(max_connections), 1, 1 << 20, 0, NULL,
     "open connections"},
    {"header-timeout-s", "N", "10", KIND_I32, AT(header_timeout_s), 1, DAY_S, 0, NULL,
     "seconds a client may take over its header, in all"},
    {"body-timeout-s", "N", "60", KIND_I32, AT(body_timeout_s), 1, DAY_S, 0, NULL,
     "seconds a client may take over its body, in all"},
    {"transfer-timeout-s", "N", "600", KIND_I32, AT(transfer_timeout_s), 1, DAY_S, 0, NULL,
     "seconds that a session may take on its way in or out as a file, in all"},
    {"idle-timeout-s", "N", "60", KIND_I32, AT(idle_timeout_s), 1, DAY_S, 0, NULL,
     "seconds a connection may stay open between two requests, in all"},
    {"sse-ping-s", "N", "30", KIND_I32, AT(sse_ping_s), 0, DAY_S, 0, NULL,
     "seconds until a silent stream gets a comment; 0: never"},

    {.help = "Operation"},
    {"log-level", "LEVEL", "info", KIND_CHOICE, AT(log_level), 0, 0, 0, log_choices,
     "the least urgent lines that are written"},
    {"drain-s", "N", "30", KIND_I32, AT(drain_s), 0, DAY_S, 0, NULL,
     "seconds that accepted requests get after SIGTERM"},
    {"stall-s", "N", "30", KIND_I32, AT(stall_s), 1, DAY_S, 0, NULL,
     "seconds without progress, while there is work, until /health says stalled"},
    {"trace-operations", "SWITCH", "no", KIND_CHOICE, AT(trace_operations), 0, 0, 0,
     switch_choices, "yes adds the device's operations to /v1/trace; costs some speed"},
    {"debug-calls", "SWITCH", "no", KIND_CHOICE, AT(debug_calls), 0, 0, 0, switch_choices,
     "yes adds POST /v1/debug/stall, to try a watchdog; not for daemons that serve"},
};
/* clang-format on */

const size_t conf_n_options = sizeof(conf_options) / sizeof(conf_options[0]);
_Static_assert(sizeof(conf_options) / sizeof(conf_options[0]) <= CONF_MAX_OPTIONS, "raise it");

const struct line_option conf_line_options[] = {
    {"config", "FILE", "read FILE first; the command line overrides it", CONF_RUN},
    {"check", NULL, "check options, configuration and model, print the sizes and exit",
     CONF_CHECK},
    {"version", NULL, "print the version and exit", CONF_VERSION},
    {"help", NULL, "print this and exit", CONF_HELP},
};

const size_t conf_n_line_options = sizeof(conf_line_options) / sizeof(conf_line_options[0]);

const char *conf_show(struct shown *s, const char *value)
{
    char *p = s->text;
    *p++ = '"';
    for (size_t i = 0; value[i]; i++) {
        unsigned char c = (unsigned char)value[i];
        if (i == CONF_SHOWN_BYTES) {
            p += sprintf(p, "...");
            break;
        }
        if (c < 0x20 || c >= 0x7f)
            p += sprintf(p, "\\x%02x", c);
        else
            *p++ = (char)c;
    }
    *p++ = '"';
    *p = '\0';
    return s->text;
}

const struct option *conf_find(const char *name, size_t len)
{
    for (size_t i = 0; i < conf_n_options; i++) {
        const struct option *o = &conf_options[i];
        if (o->name && strlen(o->name) == len && memcmp(o->name, name, len) == 0)
            return o;
    }
    return NULL;
}

static void print_choices(char *out, size_t cap, const char *const *choices)
{
    size_t len = 0;
    out[0] = '\0';
    for (size_t i = 0; choices[i] && len < cap; i++) {
        const char *glue = i == 0 ? "" : choices[i + 1] ? ", " : " or ";
        len += (size_t)snprintf(out + len, cap - len, "%s%s", glue, choices[i]);
    }
}

/* where: see conf_set. */
static int bad_value(struct errmsg *e, const char *where, const struct option *o,
                     const char *value, const char *accepted)
{
    struct shown s;
    errmsg_set(e, ERR_INVALID, "%s is %s: give %s", where, conf_show(&s, value), accepted);
    if (strstr(value, " #") && o->kind != KIND_TEXT)
        errmsg_add(e, " (a comment stands on a line of its own)");
    return ERR_INVALID;
}

static int set_text(char **to, const char *value, struct errmsg *e)
{
    char *copy = strdup(value);
    if (!copy)
        return errmsg_set(e, ERR_NOMEM, "out of memory");
    free(*to);
    *to = copy;
    return 0;
}

static int find_choice(const char *const *choices, const char *value)
{
    for (int i = 0; choices[i]; i++)
        if (strcmp(choices[i], value) == 0)
            return i;
    return -1;
}

/* Decimal digits and, for sizes, one of K, M, G. False: not a number, or past int64_t. */
static bool parse_number(const char *text, bool is_size, int64_t *out)
{
    int64_t n = 0;
    const char *p = text;
    for (; *p >= '0' && *p <= '9'; p++)
        if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, *p - '0', &n))
            return false;
    if (p == text)
        return false;
    if (is_size && *p) {
        static const char suffixes[] = "KMG";
        const char *suffix = strchr(suffixes, *p++);
        if (!suffix || __builtin_mul_overflow(n, 1ll << (10 * (suffix - suffixes + 1)), &n))
            return false;
    }
    *out = n;
    return *p == '\0';
}

/* 0.92, 1 or 1.000 in thousandths. */
static bool parse_share(const char *text, int64_t *out)
{
    int64_t n = 0, scale = 1000;
    const char *p = text;
    if (*p < '0' || *p > '1')
        return false;
    n = (*p++ - '0') * scale;
    if (*p == '.' && p[1])
        for (p++; *p >= '0' && *p <= '9' && scale > 1; p++)
            n += (*p - '0') * (scale /= 10);
    *out = n;
    return *p == '\0';
}

/* The accepted numbers of a row, in words. */
static void print_range(char *out, size_t cap, const struct option *o)
{
    int n;
    if (o->kind == KIND_BYTES)
        n = snprintf(out, cap, "%lld to %lldG bytes; K, M and G count in powers of 1024",
                     (long long)o->min, (long long)(o->max / GIB));
    else if (o->kind == KIND_SHARE)
        n = snprintf(out, cap, "%.3g to %.3g", (double)o->min / 1000, (double)o->max / 1000);
    else if (o->max == INT64_MAX)
        n = snprintf(out, cap, "%lld or more", (long long)o->min);
    else
        n = snprintf(out, cap, "%lld to %lld", (long long)o->min, (long long)o->max);
    if (o->multiple)
        snprintf(out + n, cap - (size_t)n, ", a multiple of %lld", (long long)o->multiple);
}

static int set_number(struct conf *c, const struct option *o, const char *value,
                      const char *where, struct errmsg *e)
{
    int64_t n;
    bool is_number = o->kind == KIND_SHARE ? parse_share(value, &n)
                                           : parse_number(value, o->kind == KIND_BYTES, &n);
    if (!is_number || n < o->min || n > o->max || (o->multiple && n % o->multiple)) {
        char accepted[128];
        print_range(accepted, sizeof(accepted), o);
        return bad_value(e, where, o, value, accepted);
    }
    void *to = (char *)c + o->offset;
    if (o->kind == KIND_I32 || o->kind == KIND_SHARE)
        *(int32_t *)to = (int32_t)n;
    else
        *(int64_t *)to = n;
    return 0;
}

/* Form alone; whether the address exists and is free is found out when it is bound. */
static bool is_listen_address(const char *value)
{
    if (strncmp(value, "unix:", 5) == 0) {
        size_t len = strlen(value + 5);
        return len > 0 && len < sizeof(((struct sockaddr_un *)NULL)->sun_path);
    }
    const char *colon = strrchr(value, ':');
    int64_t port;
    if (!colon || !parse_number(colon + 1, false, &port) || port > 65535)
        return false;
    size_t len = (size_t)(colon - value);
    if (value[0] == '[')
        return len > 2 && strcspn(value, "]") == len - 1;
    return len > 0 && strcspn(value, ":/*@ ") == len;
}

static int add_listen(struct conf *c, const struct option *o, const char *value,
                      const char *where, struct errmsg *e)
{
    if (!is_listen_address(value))
        return bad_value(e, where, o, value,
                         "ADDR:PORT or [ADDR6]:PORT (127.0.0.1 for this machine alone, 0.0.0.0 "
                         "for everyone; port 0 to 65535, 0 takes a free one), or unix:PATH of "
                         "at most 107 bytes");
    if (c->n_listen == CONF_MAX_LISTEN)
        return errmsg_set(e, ERR_INVALID, "%s is given more than %d times", where,
                          CONF_MAX_LISTEN);
    int rc = set_text(&c->listen[c->n_listen], value, e);
    if (rc == 0)
        c->n_listen++;
    return rc;
}

int conf_set(struct conf *c, const struct option *o, const char *value, const char *where,
             struct errmsg *e)
{
    void *to = (char *)c + o->offset;
    if (o->choices) {
        int i = find_choice(o->choices, value);
        if (i < 0) {
            char accepted[128];
            print_choices(accepted, sizeof(accepted), o->choices);
            return bad_value(e, where, o, value, accepted);
        }
        if (o->kind == KIND_CHOICE) {
            *(int32_t *)to = i;
            return 0;
        }
    }
    switch (o->kind) {
    case KIND_TEXT:
        if (value[0] == '\0')
            return errmsg_set(e, ERR_INVALID, "%s has no value: give %s", where, o->arg);
        return set_text(to, value, e);
    case KIND_LISTEN:
        return add_listen(c, o, value, where, e);
    default:
        return set_number(c, o, value, where, e);
    }
}

void conf_drop_listen(struct conf *c)
{
    for (int32_t i = 0; i < c->n_listen; i++) {
        free(c->listen[i]);
        c->listen[i] = NULL;
    }
    c->n_listen = 0;
}
void conf_fini(struct conf *c)
{
    for (size_t i = 0; i < conf_n_options; i++) {
        if (conf_options[i].kind == KIND_TEXT) {
            char **text = (char **)((char *)c + conf_options[i].offset);
            free(*text);
            *text = NULL;
        }
    }
    conf_drop_listen(c);
}
/* ---- help */

enum { HELP_INDENT = 28, HELP_WIDTH = 96 };

/* Words of text from column HELP_INDENT on, broken at HELP_WIDTH. */
static void print_wrapped(FILE *f, const char *text)
{
    int column = HELP_INDENT;
    while (*text) {
        int len = (int)strcspn(text, " ");
        if (column > HELP_INDENT && column + 1 + len > HELP_WIDTH) {
            fprintf(f, "\n%*s", HELP_INDENT, "");
            column = HELP_INDENT;
        }
        column += fprintf(f, "%s%.*s", column > HELP_INDENT ? " " : "", len, text);
        text += len;
        text += strspn(text, " ");
    }
    fputc('\n', f);
}

static void print_row(FILE *f, const char *name, const char *arg, const char *help)
{
    int n = fprintf(f, "  --%s%s%s", name, arg ? " " : "", arg ? arg : "");
    fprintf(f, "%*s", n < HELP_INDENT ? HELP_INDENT - n : 1, "");
    print_wrapped(f, help);
}

static void print_option(FILE *f, const struct option *o)
{
    char range[128] = "", help[512];
    if (o->choices)
        print_choices(range, sizeof(range), o->choices);
    else if (o->kind != KIND_TEXT && o->kind != KIND_LISTEN)
        print_range(range, sizeof(range), o);
    if (o->deflt)
        snprintf(help, sizeof(help), "%s (%s; default %s)", o->help, range, o->deflt);
    else
        snprintf(help, sizeof(help), "%s", o->help);
    print_row(f, o->name, o->arg, help);
}

void conf_print_help(FILE *f)
{
    fputs(
        "usage: prefilld --model DIR [--OPTION VALUE]...\n"
        "       prefilld --config FILE [--OPTION VALUE]...\n\n"
        "Computes prompts for Gated-DeltaNet hybrid models (Qwen3-Next, Qwen3.5) over HTTP.\n\n"
        "Command line only\n",
        f);
    for (size_t i = 0; i < conf_n_line_options; i++)
        print_row(f, conf_line_options[i].name, conf_line_options[i].arg,
                  conf_line_options[i].help);
    for (size_t i = 0; i < conf_n_options; i++) {
        if (conf_options[i].kind == KIND_SECTION)
            fprintf(f, "\n%s\n", conf_options[i].help);
        else
            print_option(f, &conf_options[i]);
    }
    fputs(
        "\nEach option but the first four is also a key of the configuration file: one\n"
        "`key value` a line, the value runs to the end of the line, a line that starts with #\n"
        "is a comment. See prefilld(8) and prefilld.conf(5).\n",
        f);
}
