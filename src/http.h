/* HTTP/1.1: bytes in, bytes out. http*.c own the sockets; http.c alone knows libmicrohttpd.
 *
 * One exchange is one request and its answer. Its headers are checked on the I/O thread, its
 * body is collected there, and then the connection is suspended: a worker calls the handler,
 * which answers at once or later, from any thread. Until then the watcher looks at the socket:
 * a client that hangs up, or closes its sending side, ends the exchange without an answer, or
 * in the middle of one that grows. Listening, the limit of connections and the deadlines of
 * headers and bodies are the watcher's too.
 *
 * Never parses a body, never waits on the I/O thread. */
#ifndef PREFILLD_HTTP_H
#define PREFILLD_HTTP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "err.h"
#include "work.h"

enum {
    HTTP_ID_MAX = 128, /* characters of a request id */
    HTTP_MAX_STREAM_BYTES = 16 << 20,
    HTTP_FILE_LOW_BYTES = 2 << 20 /* of a file that is sent: fewer waiting ask for more */
};

struct http;
struct exchange;

struct http_config {
    const char *const *listen; /* ADDR:PORT, [ADDR6]:PORT or unix:PATH; port 0: a free one */
    int32_t n_listen;
    const int *inherited; /* [n_inherited] listening sockets, owned by http from http_open on */
    int32_t n_inherited;
    int32_t max_connections;    /* above: 503 and a close */
    int64_t max_body_bytes;     /* above: 413 */
    int64_t max_buffered_bytes; /* of all bodies being read or waiting for a worker; above: 503;
                                   0: four of the largest */
    int32_t header_timeout_s;   /* totals: from the first byte to the end of the headers, */
    int32_t body_timeout_s;     /* and from there to the end of the body; past them 408 */
    int32_t idle_timeout_s;     /* a connection on which nothing moves is closed */
    int32_t file_timeout_s; /* total, of a body or an answer that is handed on as it comes */
    struct work *work;      /* borrowed until http_close */
    int32_t
        ping_s; /* a stream on which nothing was written for so long gets a comment; 0: none */
    atomic_int *n_connections; /* kept up to date; may be NULL */

    void *arg; /* of the functions below */
    /* I/O thread: the headers are complete and well-framed, the body was not read. May refuse
     * with exchange_reply. Must not block. May be NULL. */
    void (*admit)(void *arg, struct exchange *x);
    /* The most bytes of x's body when it is to be handed on as it comes: handle runs when the
     * headers are complete, and reads it (exchange_intake_*). 0: it is collected. I/O thread.
     * May be NULL. */
    int64_t (*intake)(void *arg, const struct exchange *x);
    /* Says in which lane handle runs (WORK_QUICK or WORK_REQUEST). I/O thread. NULL:
     * requests. */
    enum work_lane (*lane)(void *arg, const struct exchange *x);
    /* A worker: the request is complete. Must lead to exactly one exchange_reply. */
    void (*handle)(void *arg, struct exchange *x);
    /* http.c itself refused x with this status. I/O thread or watcher. May be NULL. */
    void (*refused)(void *arg, const struct exchange *x, int status);
};

/* Binds, and starts the I/O thread and the watcher. The strings of c->listen are copied; one
 * that names an inherited address is passed over. Returns 0, ERR_INVALID (an address), ERR_IO
 * or ERR_NOMEM. */
int http_open(const struct http_config *c, struct http **out, struct errmsg *e);

/* Connections to inherited sockets are accepted from here on; before, they wait in the sockets'
 * queues, where no predecessor and no loading refuses them. */
void http_accept_inherited(struct http *h);
/* Lets go of inherited sockets at once: who connects from here on waits for the successor. */
void http_release_inherited(struct http *h);
/* Connections whose request is on its way, or that have not sent their first one. */
int32_t http_n_incoming(struct http *h);

/* The bound addresses as ADDR:PORT[,...] with real ports; owned by h. */
const char *http_addresses(const struct http *h);

/* Stops accepting; listening sockets are closed, unix paths removed. Connections stay, and
 * close after their next answer. */
void http_quiesce(struct http *h);
/* Waits until every request that arrived is answered and the answers are sent, or deadline_us
 * (monotonic) has passed; returns whether nothing is left. After http_quiesce. */
bool http_flush(struct http *h, int64_t deadline_us);
/* Streams that have ended, but whose clients lag, are cut: whole events that they have not
 * taken give way to an error event, which reaches a slow reader sooner. Then another
 * http_flush. */
void http_cut(struct http *h);
/* Closes every connection; what is unanswered is hung up on. Returns when each exchange has had
 * its exchange_reply, so whoever owes one must still run. May be NULL. */
void http_close(struct http *h);

/* ---- the exchange; from the handler, or from any one thread it was handed to ------------- */

/* As sent: no %-decoding. The query is NULL when there is none. Valid until exchange_reply. */
const char *exchange_method(const struct exchange *x);
const char *exchange_path(const struct exchange *x);
const char *exchange_query(const struct exchange *x);
/* The value of Authorization, or NULL. */
const char *exchange_authorization(const struct exchange *x);
/* Monotonic: the last byte of the request was there (in admit: the last of the headers). */
int64_t exchange_arrival_us(const struct exchange *x);

/* The request id, sent back as X-Request-Id: the client's header when that is 1..128 visible
 * ASCII characters, else `pf-` and 24 hex digits, until exchange_set_id. */
const char *exchange_id(const struct exchange *x);
/* Is id something exchange_set_id may be given? */
bool exchange_id_is_valid(const char *id, size_t len);
void exchange_set_id(struct exchange *x, const char *id);

/* Hands the body over to body, whose former content is freed. Once. */
void exchange_take_body(struct exchange *x, struct buf *body);
size_t exchange_body_len(const struct exchange *x);

/* Remembers call with the exchange: on_hangup(call) runs on the watcher, at most once, should
 * the client go away before exchange_reply; free_call(call) when the exchange is over. Returns
 * false when the client has gone already (free_call still runs). Once. */
bool exchange_set_call(struct exchange *x, void *call, void (*on_hangup)(void *call),
                       void (*free_call)(void *call));
void *exchange_call(const struct exchange *x);

/* Runs fn(x) on a worker, soon. Any thread; does not block. One at a time for an exchange. */
void exchange_post(struct exchange *x, void (*fn)(struct exchange *x));

bool exchange_is_gone(struct exchange *x);

/* A response header; name is a constant, value is copied. At most 4. */
void exchange_add_header(struct exchange *x, const char *name, const char *value);
/* The connection ends after the answer. */
void exchange_set_close(struct exchange *x);

/* Answers, and ends the caller's hold of x: it may not be touched afterwards. Takes the bytes
 * of body, which is empty again; a failed body becomes a 500. content_type is a constant.
 * Returns false when the client had gone: nothing is sent. Any thread. */
bool exchange_reply(struct exchange *x, int status, const char *content_type, struct buf *body);

/* ---- an answer that grows: Server-Sent Events ---- */

/* The answer is going to be a stream, which begins, with status 200, at its first write, or at
 * its first ping when that is due earlier; until then exchange_reply answers as ever. On a
 * stream that has begun exchange_reply sends its body, one line, as the last event. Before any
 * other thread may write. */
void exchange_stream_open(struct exchange *x);
/* Sends whole events, and takes their bytes. Does not wait: what a client does not read is
 * kept, up to HTTP_MAX_STREAM_BYTES; one that leaves more is hung up on. Returns false when the
 * client has gone. One thread at a time. */
bool exchange_stream_write(struct exchange *x, struct buf *events);
/* Bytes written that the client has not taken. Any thread that holds x. */
size_t exchange_stream_waiting(struct exchange *x);
/* The last events; ends the caller's hold of x, as exchange_reply. */
bool exchange_stream_end(struct exchange *x, struct buf *events);

/* ---- long bodies and long answers: handed on as they come ---- */

/* Remembers call with the exchange, as exchange_set_call does; and from here on look(x) runs on
 * a worker, soon and after each notice, never two at a time, as long as it returns true: false
 * says that it has ended x, which may be so on return. When the client has gone already
 * on_hangup(call) runs here. Once. */
void exchange_start_looks(struct exchange *x, bool (*look)(struct exchange *x), void *call,
                          void (*on_hangup)(void *call), void (*free_call)(void *call));
/* Any thread that has a reference, or knows that look has not ended x. */
void exchange_notice(struct exchange *x);
/* A reference keeps x itself, for notices, beyond its end. Any thread. */
void exchange_ref(struct exchange *x);
void exchange_unref(struct exchange *x);

/* Whether config's intake said so of the body when it began. */
bool exchange_is_intake(const struct exchange *x);

/* Up to cap bytes of a body whose config says intake are kept for exchange_intake_read; before
 * this none are taken. Notices come with more bytes, and when all are there. Returns 0 or
 * ERR_NOMEM. */
int exchange_intake_open(struct exchange *x, size_t cap);
/* Moves up to len bytes to out and returns how many; *is_over: those were the last. */
size_t exchange_intake_read(struct exchange *x, void *out, size_t len, bool *is_over);

/* The answer is going to be a file of len bytes, sent by exchange_stream_write, with status 200
 * from the first on, and ended by exchange_stream_end, before its time by a close. Notices come
 * when few bytes are left to send. content_type is a constant. */
void exchange_file_open(struct exchange *x, const char *content_type, int64_t len);

#endif
