/* A server for the HTTP tests: http.c and work.c as they are, a stub in the place of the API
 * and the engine. */
#ifndef PREFILLD_TESTS_HTTP_STUB_H
#define PREFILLD_TESTS_HTTP_STUB_H

#include <pthread.h>
#include <stdatomic.h>

#include "http_client.h"

#include "http.h"

#define HOST "Host: t\r\n"

enum {
    MAX_PARKED = 512,
    BIG_WORDS = 1 << 22, /* of the answer to /big, counting up */
    N_EVENTS = 4000,     /* of the stream at /events, counting up in so many digits */
    EVENT_DIGITS = 1000
};

/* The server under test and what the stub saw. */
struct server {
    struct http *http;
    struct work *work;
    char address[512];
    atomic_int n_connections, n_handled, n_hangups, n_replied_gone, n_freed, n_refused;
    atomic_int last_refused;
    atomic_bool holds_workers;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct exchange *parked[MAX_PARKED];
    int n_parked;
};

/* One loopback port, 300 connections, a body of a megabyte, timeouts of 10 s and more. */
struct http_config server_config(void);
/* Ends the program when it cannot start; the caller stops it. */
struct server *server_start(struct http_config c);
/* max_requests: of the worker pool's queue. */
struct server *server_start_with(struct http_config c, int32_t max_requests);
void server_stop(struct server *s);

/* Waits up to two seconds; whether it came. */
int becomes(atomic_int *value, int want);
/* Waits up to two seconds until n requests to /wait are parked. */
int wait_parked(struct server *s, int n);
/* The engine's part: answers whatever is parked, from this thread. */
void release_parked(struct server *s);

#endif
