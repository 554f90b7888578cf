#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"
#include "buf.h"
#include "conf.h"
#include "leaks.h"
#include "log.h"
#include "rng.h"
#include "sched.h"

enum { MAX_ARGS = 80 };

static struct conf c;
static struct errmsg e;
static char path[] = "/tmp/prefilld-conf-XXXXXX";

static void fini(void)
{
    conf_fini(&c);
    unlink(path);
    leaks_check();
}

TestSuite(conf, .fini = fini);

/* Parses the words of a command line. */
static int parse(const char *line)
{
    char *copy = strdup(line), *save = NULL;
    char *argv[MAX_ARGS] = {"prefilld"};
    int argc = 1;
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
        cr_assert(argc < MAX_ARGS);
        argv[argc++] = w;
    }
    e.text[0] = '\0';
    conf_fini(&c);
    int rc = conf_parse(argc, argv, &c, &e);
    free(copy);
    return rc;
}

/* Parses a configuration file of these bytes, then more words. */
static int parse_bytes(const char *bytes, size_t len, const char *more)
{
    strcpy(strrchr(path, '-'), "-XXXXXX");
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, bytes, len) == (ssize_t)len);
    close(fd);
    char line[512];
    snprintf(line, sizeof(line), "--config %s %s", path, more);
    int rc = parse(line);
    unlink(path);
    return rc;
}

static int parse_text(const char *text, const char *more)
{
    return parse_bytes(text, strlen(text), more);
}

static bool says(const char *part)
{
    if (strstr(e.text, part))
        return true;
    cr_log_error("message is: %s", e.text);
    return false;
}

Test(conf, defaults_are_the_documented_ones)
{
    cr_assert(parse("--model dir") == 0);
    cr_assert_str_eq(c.model, "dir");
    cr_assert(c.action == CONF_RUN && !c.served_name && !c.api_key_file);
    cr_assert(c.n_listen == 1);
    cr_assert_str_eq(c.listen[0], "127.0.0.1:8080");
    cr_assert_str_eq(c.backend, "auto");
    cr_assert(c.load == CONF_LOAD_FILE && c.dummy_seed == 0);
    cr_assert(c.log_level == LOG_LEVEL_INFO && c.policy == SCHED_SHORT_FIRST);
    cr_assert(c.max_step_tokens == 8192 && c.max_seqs == 256 && c.max_prompt_tokens == 0);
    cr_assert(c.max_decode_share == 500);
    cr_assert(c.queue_length == 1024 && c.kv_tokens == 0 && c.state_slots == 0);
    cr_assert(c.page_tokens == 64 && c.cpu_threads == 0 && c.workers == 2);
    cr_assert(c.prefix_cache && c.checkpoint_tokens == 2048 && c.prefix_cache_share == 500);
    cr_assert(c.max_body_bytes == 64ll * 1024 * 1024 && c.max_connections == 4096);
    cr_assert(c.header_timeout_s == 10 && c.body_timeout_s == 60 && c.idle_timeout_s == 60 &&
              c.sse_ping_s == 30);
    cr_assert(c.drain_s == 30 && c.stall_s == 30);
    cr_assert(c.api_key_scope == API_KEY_CALLS && c.debug_calls == 0);
}

Test(conf, every_option_reaches_its_member)
{
    cr_assert(parse("--model=m --served-name n --listen localhost:0 --listen=[::1]:80 "
                    "--listen unix:/run/p.sock --backend cpu --load dummy --dummy-seed 7 "
                    "--log-level error --api-key-file k --policy fcfs") == 0);
    cr_assert_str_eq(c.model, "m");
    cr_assert_str_eq(c.served_name, "n");
    cr_assert(c.n_listen == 3);
    cr_assert_str_eq(c.listen[0], "localhost:0");
    cr_assert_str_eq(c.listen[1], "[::1]:80");
    cr_assert_str_eq(c.listen[2], "unix:/run/p.sock");
    cr_assert_str_eq(c.backend, "cpu");
    cr_assert(c.load == CONF_LOAD_DUMMY && c.dummy_seed == 7);
    cr_assert(c.log_level == LOG_LEVEL_ERROR && c.policy == SCHED_FCFS);
    cr_assert_str_eq(c.api_key_file, "k");

    cr_assert(parse("--model m --max-step-tokens 64 --max-seqs 3 --max-prompt-tokens 4 "
                    "--queue-length 5 --kv-tokens 6 --state-slots 8 --page-tokens 128 "
                    "--cpu-threads 9 --workers 10 --cuda-device 3 --gpu-memory 0.5 "
                    "--max-decode-share 0.25 --cache-dir /c --prefix-cache no "
                    "--checkpoint-tokens 512 --prefix-cache-share 0.125 --session-ttl-s 9 "
                    "--session-dir /s --kv-lease-s 7 --transfer-timeout-s 5") == 0);
    cr_assert(c.session_ttl_s == 9 && c.kv_lease_s == 7 && c.transfer_timeout_s == 5);
    cr_assert_str_eq(c.session_dir, "/s");
    cr_assert_str_eq(c.cache_dir, "/c");
    cr_assert(!c.prefix_cache && c.checkpoint_tokens == 512 && c.prefix_cache_share == 125);
    cr_assert(c.max_step_tokens == 64 && c.max_seqs == 3 && c.max_prompt_tokens == 4);
    cr_assert(c.queue_length == 5 && c.kv_tokens == 6 && c.state_slots == 8);
    cr_assert(c.page_tokens == 128 && c.cpu_threads == 9 && c.workers == 10);
    cr_assert(c.cuda_device == 3 && c.gpu_memory == 500 && c.max_decode_share == 250);

    cr_assert(
        parse("--model m --max-body-bytes 11 --max-connections 12 --header-timeout-s 13 "
              "--body-timeout-s 14 --idle-timeout-s 15 --sse-ping-s 0 --drain-s 0 --stall-s 17 "
              "--trace-operations yes --debug-calls yes "
              "--api-key-scope all-but-health --api-key-file keys "
              "--max-key-requests 8 --max-key-tokens 70000 --check") == 0);
    cr_assert(c.max_body_bytes == 11 && c.max_connections == 12 && c.header_timeout_s == 13);
    cr_assert(c.body_timeout_s == 14 && c.idle_timeout_s == 15 && c.sse_ping_s == 0 &&
              c.drain_s == 0);
    cr_assert(c.stall_s == 17 && c.trace_operations == 1 && c.action == CONF_CHECK);
    cr_assert(c.debug_calls == 1 && c.api_key_scope == API_KEY_ALL_BUT_HEALTH);
    cr_assert(c.max_key_requests == 8 && c.max_key_tokens == 70000);
}

Test(conf, limits_of_keys_need_keys)
{
    cr_assert(parse("--model m --max-key-tokens 5") == ERR_INVALID);
    cr_assert(strstr(e.text, "max-key-tokens: limits of keys need api-key-file"), "%s", e.text);
    cr_assert(parse("--model m --api-key-scope all") == ERR_INVALID);
    cr_assert(strstr(e.text, "api-key-scope: asking for keys needs api-key-file"), "%s",
              e.text);
    cr_assert(parse("--model m --max-key-requests 5 --api-key-file k") == 0);
    conf_fini(&c);
}

Test(conf, shares_are_decimals)
{
    cr_assert(parse("--model m") == 0 && c.gpu_memory == 920);
    cr_assert(parse("--model m --gpu-memory 0.925") == 0 && c.gpu_memory == 925);
    cr_assert(parse("--model m --gpu-memory 1") == 0 && c.gpu_memory == 1000);
    cr_assert(parse("--model m --gpu-memory 1.0") == 0 && c.gpu_memory == 1000);
    const char *wrong[] = {"0", "92", "1.01", ".5", "0.", "0.9251", "0.9x", "-0.5", "0.04"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        char line[80];
        snprintf(line, sizeof(line), "--model m --gpu-memory %s", wrong[i]);
        cr_assert(parse(line) == ERR_INVALID && says("--gpu-memory") && says("0.05 to 1"), "%s",
                  wrong[i]);
    }
}

Test(conf, sizes_take_suffixes)
{
    cr_assert(parse("--model m --max-body-bytes 3K") == 0 && c.max_body_bytes == 3072);
    cr_assert(parse("--model m --max-body-bytes 2M") == 0 && c.max_body_bytes == 2 << 20);
    cr_assert(parse("--model m --max-body-bytes 16G") == 0 && c.max_body_bytes == 16ll << 30);
    const char *wrong[] = {"17G", "3k", "3KiB", "K", "9223372036854775807G", "0"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        char line[80];
        snprintf(line, sizeof(line), "--model m --max-body-bytes %s", wrong[i]);
        cr_assert(parse(line) == ERR_INVALID && says("--max-body-bytes") && says(wrong[i]) &&
                  says("1 to 16G bytes"));
    }
}

Test(conf, wrong_values_name_option_value_and_what_is_accepted)
{
    static const struct {
        const char *line, *subject, *found, *accepted;
    } t[] = {
        {"--model m --max-step-tokens 63", "--max-step-tokens", "63", "64 to"},
        {"--model m --max-step-tokens 99999999999999999999", "--max-step-tokens", "99999",
         "64"},
        {"--model m --max-seqs -1", "--max-seqs", "-1", "1 to"},
        {"--model m --max-seqs=", "--max-seqs", "\"\"", "1 to"},
        {"--model m --max-seqs 0x10", "--max-seqs", "0x10", "1 to"},
        {"--model m --max-seqs 1e3", "--max-seqs", "1e3", "1 to"},
        {"--model m --kv-tokens 10K", "--kv-tokens", "10K", "0 to"},
        {"--model m --prefix-cache-share 0", "--prefix-cache-share", "\"0\"", "0.001 to 1"},
        {"--model m --page-tokens 96", "--page-tokens", "96", "a multiple of 64"},
        {"--model m --page-tokens 0", "--page-tokens", "\"0\"", "64 to"},
        {"--model m --dummy-seed 9223372036854775808", "--dummy-seed", "922337203",
         "0 or more"},
        {"--model m --policy lifo", "--policy", "lifo", "short-first or fcfs"},
        {"--model m --backend gpu", "--backend", "gpu", "cpu, cuda or auto"},
        {"--model m --load File", "--load", "File", "file or dummy"},
        {"--model m --log-level 3", "--log-level", "\"3\"", "error, warn, info or debug"},
        {"--model m --stall-s 0", "--stall-s", "\"0\"", "1 to 86400"},
        {"--model m --listen 8080", "--listen", "8080", "ADDR:PORT"},
        {"--model m --listen :8080", "--listen", ":8080", "127.0.0.1"},
        {"--model m --listen *:80", "--listen", "*:80", "0.0.0.0 for everyone"},
        {"--model m --listen http://h:80", "--listen", "http://h:80", "ADDR:PORT"},
        {"--model m --listen 127.0.0.1:", "--listen", "127.0.0.1:", "port 0 to 65535"},
        {"--model m --listen 127.0.0.1:65536", "--listen", "65536", "port 0 to 65535"},
        {"--model m --listen 127.0.0.1:-1", "--listen", "-1", "port 0 to 65535"},
        {"--model m --listen ::1:80", "--listen", "::1:80", "[ADDR6]:PORT"},
        {"--model m --listen []:80", "--listen", "[]:80", "[ADDR6]:PORT"},
        {"--model m --listen unix:", "--listen", "unix:", "unix:PATH"},
        {"--model m --served-name=", "--served-name", "no value", "NAME"},
        {"--model", "--model", "needs a value", "DIR"},
        {"--model m --check=1", "--check", "takes no value", ""},
        {"--model m --no-such 1", "--no-such", "unknown option", "--help"},
        {"--model m --workers 2 stray", "stray", "unexpected argument", "--help"},
        {"--model --check", "--model", "needs a value", "DIR"},
        {"--model m --", "--", "unexpected argument", "--help"},
        {"", "no model", "", "--model DIR"},
        {"--check", "no model", "", "--model DIR"},
    };
    for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
        cr_expect(parse(t[i].line) == ERR_INVALID, "%s", t[i].line);
        cr_expect(says(t[i].subject) && says(t[i].found) && says(t[i].accepted), "%s",
                  t[i].line);
    }
}

Test(conf, a_long_unix_path_is_refused_with_the_limit)
{
    char line[300] = "--model m --listen unix:/";
    size_t len = strlen(line);
    memset(line + len, 'p', 106);
    cr_assert(parse(line) == 0, "%s", e.text);
    line[len + 106] = 'p';
    cr_assert(parse(line) == ERR_INVALID && says("at most 107 bytes"));
}

Test(conf, listen_may_repeat_sixteen_times)
{
    char line[600] = "--model m";
    for (int i = 0; i < CONF_MAX_LISTEN; i++)
        strcat(line, " --listen 127.0.0.1:0");
    cr_assert(parse(line) == 0 && c.n_listen == CONF_MAX_LISTEN);
    strcat(line, " --listen 127.0.0.1:0");
    cr_assert(parse(line) == ERR_INVALID && says("16"));
}

Test(conf, help_and_version_need_nothing_else)
{
    cr_assert(parse("--help") == 0 && c.action == CONF_HELP);
    cr_assert(parse("--version") == 0 && c.action == CONF_VERSION);
    cr_assert(parse("--config /nonexistent --version --no-such") == 0);
    cr_assert(c.action == CONF_VERSION);
}

Test(conf, the_last_of_a_repeated_command_line_option_counts)
{
    cr_assert(parse("--model a --workers 3 --workers 4 --model b") == 0);
    cr_assert(c.workers == 4);
    cr_assert_str_eq(c.model, "b");
}

Test(conf, a_file_is_read)
{
    cr_assert(parse_text("# what it serves\n"
                         "model /srv/my model # 1\n"
                         "\n"
                         "  \t \n"
                         "\tserved-name\t\tname  \n"
                         "   # indented comment\n"
                         "listen 127.0.0.1:1\n"
                         "listen unix:/run/a b\n"
                         "workers 5",
                         "") == 0,
              "%s", e.text);
    cr_assert_str_eq(c.model, "/srv/my model # 1");
    cr_assert_str_eq(c.served_name, "name");
    cr_assert(c.n_listen == 2 && c.workers == 5);
    cr_assert_str_eq(c.listen[1], "unix:/run/a b");
}

Test(conf, the_command_line_overrides_the_file)
{
    const char *text = "model m\nworkers 5\nqueue-length 9\nlisten 127.0.0.1:1\n"
                       "listen 127.0.0.1:2\n";
    cr_assert(parse_text(text, "--workers 6 --listen 127.0.0.1:3") == 0);
    cr_assert(c.workers == 6 && c.queue_length == 9 && c.n_listen == 1);
    cr_assert_str_eq(c.listen[0], "127.0.0.1:3");
    cr_assert(parse_text(text, "") == 0 && c.n_listen == 2);
}

Test(conf, errors_name_file_and_line)
{
    static const struct {
        const char *text, *line, *found, *accepted;
    } t[] = {
        {"model m\nworker 3\n", ":2: ", "unknown key \"worker\"", "--help"},
        {"model m\nconfig x\n", ":2: ", "unknown key \"config\"", "--help"},
        {"model m\nmodel n\n", ":2: ", "model is given a second time", "keep one"},
        {"model m\n\n\nworkers 2\nworkers 2\n", ":5: ", "workers is given a second time", ""},
        {"model m\nworkers\n", ":2: ", "workers has no value", "`workers N`"},
        {"model m\nworkers   \n", ":2: ", "workers has no value", "`workers N`"},
        {"model m\nworkers 2 3\n", ":2: workers", "\"2 3\"", "1 to 256"},
        {"model m\nworkers 0\n", ":2: workers", "\"0\"", "1 to 256"},
        {"model m\nworkers=2\n", ":2: ", "unknown key \"workers=2\"", "--help"},
        {"model m\n--workers 2\n", ":2: ", "unknown key \"--workers\"", "--help"},
        {"model m\nworkers 2 # two\n", ":2: workers", "2 # two", "a line of its own"},
        {"model m\npolicy fast\n", ":2: policy", "fast", "short-first or fcfs"},
        {"model m\nlisten 8080", ":2: listen", "8080", "ADDR:PORT"},
        {"workers 2\n", "no model", "", "--model DIR"},
        {"", "no model", "", "--model DIR"},
    };
    for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
        cr_expect(parse_text(t[i].text, "") == ERR_INVALID, "%s", t[i].text);
        cr_expect(says(t[i].line) && says(t[i].found) && says(t[i].accepted), "%s", t[i].text);
    }
}

Test(conf, line_ends_of_other_systems_are_read)
{
    cr_assert(parse_text("model m\r\nworkers 4\r\n\r\n# c\r\n", "") == 0, "%s", e.text);
    cr_assert_str_eq(c.model, "m");
    cr_assert(c.workers == 4);
    cr_assert(parse_text("model m\rworkers 4\r", "") == ERR_INVALID);
    cr_assert(says(":1: ") && says("byte 8") && says("\\x0d"));
}

Test(conf, bytes_that_are_no_text_are_refused)
{
    cr_assert(parse_bytes("model m\nworkers 4\0 5\n", 21, "") == ERR_INVALID);
    cr_assert(says(":2: ") && says("byte 10") && says("\\x00"));
    cr_assert(parse_bytes("\0", 1, "") == ERR_INVALID && says(":1: byte 1"));
    cr_assert(parse_text("model m\033[2J\n", "") == ERR_INVALID && says("\\x1b"));
    cr_assert(parse_bytes("\x7f\x45LF", 4, "") == ERR_INVALID && says("\\x7f"));
}

Test(conf, long_lines_and_files_are_refused_with_the_limit)
{
    size_t len = 3 << 20;
    char *text = malloc(len);
    memset(text, 'x', len);
    memcpy(text, "model ", 6);
    cr_assert(parse_bytes(text, 4096, "") == 0, "%s", e.text);
    cr_assert(strlen(c.model) == 4090);
    cr_assert(parse_bytes(text, 4097, "") == ERR_INVALID);
    cr_assert(says(":1: ") && says("4097 bytes") && says("at most 4096"));
    cr_assert(parse_bytes(text, len, "") == ERR_INVALID && says("1048576"));
    memset(text, '\n', len);
    cr_assert(parse_bytes(text, 1 << 20, "--model m") == 0, "%s", e.text);
    memset(text, 'q', 4000);
    cr_assert(parse_bytes(text, 5000, "") == ERR_INVALID && says("qqq...\""));
    cr_assert(strlen(e.text) < 300);
    free(text);
}

Test(conf, an_unreadable_file_is_named)
{
    cr_assert(parse("--model m --config /nonexistent/p.conf") == ERR_IO);
    cr_assert(says("/nonexistent/p.conf") && says("No such file"));
    cr_assert(parse("--model m --config /") == ERR_IO && says("Is a directory"));
}

/* Whatever a file holds, it is parsed or refused in printable words. */
Test(conf, random_files_are_parsed_or_refused)
{
    uint64_t seed = 20;
    struct rng r = {seed};
    static const char *const words[] = {
        "model", "listen", "workers", " ", "\t",      "\n",      "\r\n", "#",    "1",
        "64",    "unix:a", "fcfs",    "-", "policy ", "[::1]:0", "m",    "\xff", "model m\n"};
    int n_ok = 0, n_refused = 0;
    for (int i = 0; i < 2000; i++) {
        struct buf b;
        buf_init(&b);
        for (int k = rng_int(&r, 12); k > 0; k--) {
            if (rng_int(&r, 40) == 0)
                buf_addc(&b, (char)rng_int(&r, 256));
            else
                buf_adds(&b, words[rng_int(&r, sizeof(words) / sizeof(words[0]))]);
        }
        int rc = parse_bytes(b.data ? b.data : "", b.len, "--model m");
        cr_assert(rc == 0 || (rc == ERR_INVALID && e.text[0]), "seed %d, file %d", (int)seed,
                  i);
        for (const char *p = e.text; rc != 0 && *p; p++)
            cr_assert(*p >= 0x20 && *p < 0x7f, "seed %d, file %d: %s", (int)seed, i, e.text);
        rc == 0 ? n_ok++ : n_refused++;
        buf_fini(&b);
    }
    cr_assert(n_ok > 20 && n_refused > 20, "%d parsed, %d refused", n_ok, n_refused);
}

Test(conf, help_shows_every_row_within_the_width)
{
    FILE *f = tmpfile();
    conf_print_help(f);
    rewind(f);
    char line[400];
    int n_options = 0;
    while (fgets(line, sizeof(line), f)) {
        cr_expect(strlen(line) <= 97, "%s", line);
        n_options += strncmp(line, "  --", 4) == 0;
    }
    fclose(f);
    cr_assert(n_options == 46, "%d options: count anew, and extend the tests above", n_options);
}
