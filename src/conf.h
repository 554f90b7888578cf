/* The command line and the configuration file: one table of options.
 *
 * Main thread, at start. Every option is one row of conf_options in conf.c: its name is the key
 * in the file and `--name` on the command line; bounds, default, unit and help come from the
 * row, as does the text of --help. Knows nothing of what options do. */
#ifndef PREFILLD_CONF_H
#define PREFILLD_CONF_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "err.h"

enum { CONF_MAX_LISTEN = 16 };

enum conf_action { CONF_RUN, CONF_CHECK, CONF_VERSION, CONF_HELP };
enum conf_load { CONF_LOAD_FILE, CONF_LOAD_DUMMY };

/* Strings are owned by the struct (conf_fini). 0 in a size means: choose a default. */
struct conf {
    enum conf_action action;
    char *model;                   /* directory */
    char *served_name;             /* NULL: last component of model */
    char *listen[CONF_MAX_LISTEN]; /* ADDR:PORT, [ADDR6]:PORT or unix:PATH */
    int32_t n_listen;              /* at least 1 after parsing */
    bool listen_is_default;        /* nobody gave one */
    char *backend;                 /* cpu, cuda, auto */
    int32_t load;                  /* enum conf_load */
    int64_t dummy_seed;
    int32_t log_level; /* enum log_level */
    char *api_key_file;
    int32_t api_key_scope; /* enum api_key_scope */
    int64_t max_key_requests, max_key_tokens;

    /* steps and pools */
    int32_t policy; /* enum sched_policy */
    int32_t max_step_tokens;
    int32_t max_seqs;
    int32_t max_prompt_tokens;
    int32_t queue_length;
    int64_t kv_tokens;
    int32_t state_slots;
    int32_t page_tokens;
    int32_t prefix_cache; /* 0, 1 */
    int32_t checkpoint_tokens;
    int32_t prefix_cache_share; /* thousandths of each pool */
    int32_t session_ttl_s;
    char *session_dir; /* NULL: sessions end with the daemon */
    int32_t kv_lease_s;
    int32_t cpu_threads;
    int32_t cuda_device;
    int32_t max_decode_share; /* thousandths of max_seqs */
    char *cache_dir;
    int32_t gpu_memory; /* thousandths of the device's free memory */

    /* HTTP */
    int32_t workers;
    int64_t max_body_bytes;
    int32_t max_connections;
    int32_t header_timeout_s;
    int32_t body_timeout_s;
    int32_t idle_timeout_s; /* keep-alive without a request */
    int32_t sse_ping_s;     /* 0: none */
    int32_t transfer_timeout_s;

    /* operation */
    int32_t drain_s;
    int32_t stall_s;
    int32_t trace_operations; /* 0, 1 */
    int32_t debug_calls;      /* 0, 1 */
};

/* Defaults, then the file named by --config, then the command line. Returns 0, or ERR_INVALID,
 * ERR_IO (the file) or ERR_NOMEM with e naming where (file:line or the option), what was found
 * and what is accepted; c is then empty. With --help and --version only `action` counts. */
int conf_parse(int argc, char **argv, struct conf *c, struct errmsg *e);
void conf_fini(struct conf *c);

/* --help: usage and every row of the table. */
void conf_print_help(FILE *f);

#endif
