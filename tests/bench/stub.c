/* A prefilld that computes nothing: the HTTP server of the daemon, and one answer to all. Shows
 * how much load a client can send and count.
 *
 *     tests/bench/stub [ADDR:PORT]      runs until it is ended */
#include <signal.h>
#include <stdio.h>

#include "http.h"
#include "work.h"

enum { MAX_CONNECTIONS = 4096, N_WORKERS = 1, QUEUE = 16384 };

static const char answer[] =
    "{\"id\": \"pf-0\", \"object\": \"prefill\", \"created\": 1, \"model\": \"stub\", "
    "\"usage\": "
    "{\"prompt_tokens\": 64, \"cached_tokens\": 0, \"total_tokens\": 64}, \"next\": {\"id\": "
    "17, "
    "\"token\": \" the\", \"logprob\": -0.5, \"top\": []}, \"timings\": {\"queue_ms\": 0.0, "
    "\"prefill_ms\": 0.0, \"total_ms\": 0.0, \"tokens_per_s\": 0}, \"pieces\": []}";

static const char models[] = "{\"object\": \"list\", \"data\": [{\"id\": \"stub\", "
                             "\"max_model_len\": 32768, \"vocab_size\": 151936}]}";

static void handle(void *arg, struct exchange *x)
{
    struct buf b;
    (void)arg;
    buf_init(&b);
    buf_adds(&b, exchange_method(x)[0] == 'P' ? answer : models);
    exchange_reply(x, 200, "application/json", &b);
}

int main(int argc, char **argv)
{
    const char *listen = argc > 1 ? argv[1] : "127.0.0.1:8080";
    struct http_config c = {.listen = &listen,
                            .n_listen = 1,
                            .max_connections = MAX_CONNECTIONS,
                            .max_body_bytes = 64 << 20,
                            .header_timeout_s = 60,
                            .body_timeout_s = 60,
                            .idle_timeout_s = 60,
                            .handle = handle};
    struct errmsg e = {0};
    struct http *http;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    if (work_open(N_WORKERS, QUEUE, &c.work) != 0 || http_open(&c, &http, &e) != 0) {
        fprintf(stderr, "stub: %s\n", e.text);
        return 1;
    }
    fprintf(stderr, "ready listen=%s\n", http_addresses(http));
    int sig;
    sigwait(&set, &sig);
    http_close(http);
    work_close(c.work);
    return 0;
}
