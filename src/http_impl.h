/* Inside of http*.c: the connection, the exchange, and who may touch what.
 *
 * One lock, http.lock, guards the list of connections, the phases and deadlines in them, the
 * states of exchanges, and the counts. Order: the watcher's own lock, then http.lock, then
 * libmicrohttpd's; no callback of the owner runs under any of them. A socket is touched outside
 * the I/O thread only under http.lock and while its struct conn is in the list, which
 * libmicrohttpd keeps up until just before it closes the socket. */
#ifndef PREFILLD_HTTP_IMPL_H
#define PREFILLD_HTTP_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "http.h"
#include "http_listen.h"
#include "watch.h"

struct MHD_Daemon;
struct MHD_Connection;

enum {
    HTTP_POOL_BYTES = 64 * 1024,    /* libmicrohttpd's memory for a connection */
    HTTP_MAX_TARGET = 8 * 1024,     /* above: 414 */
    HTTP_MAX_HEADERS = 16 * 1024,   /* above: 431 */
    HTTP_MAX_ARGUMENTS = 256,       /* of a request target; above: 414 */
    HTTP_SWALLOW_BYTES = 64 * 1024, /* a refused body up to this is read, and the connection
                                       kept */
    HTTP_MAX_FAREWELLS = 64,
    HTTP_FAREWELL_US = 2000000, /* for the client to read the answer and close */
    HTTP_N_HEADERS = 4
};

enum conn_phase {
    CONN_HEADERS, /* a request line or headers are due, until the deadline */
    CONN_BODY,    /* a body is due, until the deadline */
    CONN_ANSWER,  /* the request is complete, its answer is due or being sent */
    CONN_IDLE     /* between requests */
};

/* A connection, from libmicrohttpd's first notice of it to its last. */
struct conn {
    struct conn *prev, *next;
    struct http *http;
    int fd;
    enum conn_phase phase;
    int64_t deadline_us;
    uint64_t idle_bytes; /* received when CONN_IDLE began; TCP only */
    bool is_lingering;   /* the client may still be sending: drain before the close */
    bool is_expired;     /* the socket was shut down: no more answers */
    struct exchange *current;
};

enum exchange_state {
    EXCHANGE_READING,
    EXCHANGE_ENTERING,  /* suspended, or its body comes; its watch is being set up */
    EXCHANGE_INTAKE,    /* its body comes; the handler owes an answer */
    EXCHANGE_PENDING,   /* suspended; the handler owes an answer */
    EXCHANGE_STREAMING, /* a stream has begun; the handler owes its end */
    EXCHANGE_ANSWERED,
    EXCHANGE_GONE /* the client went, or we are closing */
};

struct exchange {
    atomic_int refs; /* libmicrohttpd's, the handler's, and the watcher's for a hang-up */
    struct http *http;
    struct conn *conn;          /* I/O thread */
    struct MHD_Connection *mhd; /* valid for others while suspended */
    enum exchange_state state;  /* http.lock, but for the I/O thread's own EXCHANGE_READING */
    bool is_begun, is_deferred; /* I/O thread; deferred: answered, but the body is read first */
    bool is_hung;               /* http.lock: hung up while EXCHANGE_ENTERING */
    bool is_owed, is_active;    /* counted in http.n_owed, http.n_active */
    bool must_close;
    bool is_chunked;    /* an answer of unknown length is; to HTTP/1.0 it ends by a close */
    int refused_status; /* http.c's own refusal, or 0 */

    char *target; /* path, NUL, query */
    const char *query;
    char *method, *authorization;
    char id[HTTP_ID_MAX + 1];
    struct buf body;
    int64_t length_bytes; /* -1: chunked */
    int64_t charged_bytes;
    int64_t arrival_us;

    /* http.lock. A stream: events not yet given to libmicrohttpd are [stream_at,
     * stream.len). */
    bool is_stream, is_streaming; /* opened; begun */
    bool is_parked; /* suspended until there are more events, or room for more body */
    struct buf stream;
    size_t stream_at;
    int64_t stream_us;  /* the last write, or the opening */
    int64_t file_bytes; /* the stream is a file of so many; -1: it is none */
    int64_t file_until_us;

    int64_t max_intake_bytes; /* I/O thread; 0: the body is collected */
    bool is_intake;           /* I/O thread: its handler was started before the body came */
    /* http.lock. Of a body that is handed on: a ring, [intake_at, intake_at + n_intake). */
    char *intake; /* [intake_cap] */
    size_t intake_cap, intake_at, n_intake;
    int64_t intake_bytes; /* taken so far */
    bool is_intake_over;
    bool is_sent; /* the answer, by hand */

    atomic_int n_notices; /* not yet looked at; a worker is there, or to come, while above 0 */
    bool (*look)(struct exchange *x);

    uint64_t watch_token;
    struct work_job job;
    void (*posted)(struct exchange *x);

    void *call;
    void (*on_hangup)(void *call);
    void (*free_call)(void *call);
    bool is_hanging_up; /* http.lock: on_hangup is due or running: call stays */
    struct exchange *next_gone;

    int status;
    const char *content_type;
    struct buf answer;
    struct {
        const char *name;
        char *value;
    } headers[HTTP_N_HEADERS];
    int32_t n_headers;
};

/* A socket that is read empty before it is closed, so that the answer is not lost to a
 * reset. */
struct farewell {
    int fd; /* -1: free */
    uint64_t token;
    int64_t deadline_us;
};

struct http {
    struct http_config c; /* listen is NULL: not kept */
    char addresses[2048];
    struct MHD_Daemon *mhd;
    struct watch *watch;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* CLOCK_MONOTONIC: a count fell, or the listeners closed */

    struct conn *conns;
    int32_t n_conns, n_adding; /* known to libmicrohttpd; accepted, not yet known */
    int32_t n_owed;            /* exchanges whose handler has not replied */
    int32_t n_active;          /* exchanges dispatched and not over */
    int64_t buffered_bytes;
    bool is_quiescing, is_closing;
    struct exchange *gone; /* hang-ups whose owners are to be told */

    struct listener *listeners; /* watcher thread, once started */
    uint64_t *listener_tokens;
    int32_t n_listeners;
    bool are_listeners_closed;
    bool wants_inherited, releases_inherited; /* http.lock: what was asked of the watcher */
    bool accepts_inherited;                   /* watcher thread */
    int64_t accept_again_us;                  /* watcher thread; 0: accepting */

    struct farewell farewells[HTTP_MAX_FAREWELLS]; /* http.lock for fd and deadline */
    int64_t next_scan_us, next_inspection_us;      /* watcher thread */
};

int64_t http_now_us(void);

/* ---- http.c ---- */
/* Takes ownership of fd. http.lock not held. */
void http_add_socket(struct http *h, int fd, const void *addr, unsigned addr_len);
/* Ends the suspension of x, whose state is not EXCHANGE_PENDING any more, or which is not
 * parked any more. */
void http_resume(struct exchange *x);
/* I/O thread. */
void http_suspend(struct exchange *x);

/* ---- http_listeners.c ---- */
/* At set-up. Inherited ones come first. Returns 0 or what failed, with e filled. */
int http_open_listeners(struct http *h, const struct http_config *c, struct errmsg *e);

/* ---- http_conn.c: the watcher's side ---- */
void conn_readable(void *arg, void *owner);
void conn_turn(void *arg);
/* Makes room for descriptors, or lowers the number of connections to what there is. Returns 0
 * or ERR_INVALID. */
int conn_raise_limit(int32_t *max_connections, struct errmsg *e);
/* After the watcher has ended. */
void conn_close_farewells(struct http *h);
/* http.lock held. Keeps the socket of c open in a copy until the client has seen the answer. */
void conn_linger(struct conn *c);
/* Bytes received so far; 0 when that is not known (unix sockets). */
uint64_t conn_received_bytes(int fd);
/* http.lock held. Answers as conn_send_refusal does, and makes libmicrohttpd see the end. */
void conn_refuse_now(struct conn *c, int status, const char *message);
/* Writes a whole answer to a socket on which none is under way, without libmicrohttpd. */
void conn_send_refusal(int fd, int status, const char *id, const char *message);
/* The same with x's headers and a JSON body. */
void conn_send_answer(int fd, const struct exchange *x, int status, const struct buf *body);

/* ---- http_exchange.c ---- */
struct exchange *exchange_new(struct http *h, struct conn *c, struct MHD_Connection *mhd,
                              const char *target);
/* An answer of http.c's own; same thread rules as exchange_reply. */
void exchange_refuse(struct exchange *x, int status, const char *message);
/* http.lock held. exchange_set_call. */
bool exchange_put_call(struct exchange *x, void *call, void (*on_hangup)(void *call),
                       void (*free_call)(void *call));
/* Watcher: the client of owner, an exchange, has gone. */
void exchange_hangup(void *arg, void *owner);
/* http.lock held. The connection of x, a stream that has not ended, is being closed by
 * libmicrohttpd: its owner is told at the watcher's next turn. */
void exchange_lose_stream(struct exchange *x);
/* http.lock held. Keeps a stream alive on which nothing moves, and cuts a file that takes too
 * long. */
void exchange_ping(struct exchange *x, int64_t now_us);

/* Hangs up on every exchange that waits for its handler. No lock held. */
void exchange_hangup_all(struct http *h);
/* Runs fn(x) on a worker. Returns 0 or ERR_FULL. */
int exchange_run(struct exchange *x, enum work_lane lane, void (*fn)(struct exchange *x));
/* I/O thread: from here on the handler, on a worker, owes an answer; the state becomes next,
 * EXCHANGE_PENDING, suspended, or EXCHANGE_INTAKE. False: we are closing. */
bool exchange_enter(struct exchange *x, enum exchange_state next, enum work_lane lane);
/* Tells the owners of hung-up exchanges. No lock held. */
void exchange_tell_gone(struct http *h);
/* http.lock held. Room for more bytes in the sum over all bodies? Then they are counted. */
bool exchange_charge(struct exchange *x, int64_t n_bytes);
/* http.lock not held. The handler no longer owes an answer. */
void exchange_settle(struct exchange *x);

/* ---- http_flow.c ---- */
/* I/O thread: the headers are complete, and the body is to be handed on: the socket is watched,
 * x is handed to a worker. False: we are closing. */
bool exchange_intake_start(struct exchange *x);
/* I/O thread: takes what there is room for of a body that is handed on, and suspends the
 * connection until there is room for the rest; *size: bytes not taken. False: nobody wants
 * it. */
bool exchange_intake_add(struct exchange *x, const char *data, size_t *size);
/* I/O thread: the body is complete; the connection is suspended for the answer. The same. */
bool exchange_intake_end(struct exchange *x);

#endif
