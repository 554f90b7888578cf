/* Where a request ends: the checks that keep this server and a proxy before it of one mind.
 *
 * Pure. libmicrohttpd 0.9.75 takes the first of two Content-Length headers, Content-Length
 * beside Transfer-Encoding, HTTP/1.1 without Host, and header names with blanks before the
 * colon; each of these lets one request hide in another (RFC 9112, 6.3 and 11.2). */
#ifndef PREFILLD_HTTP_FRAMING_H
#define PREFILLD_HTTP_FRAMING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zero-initialised, then fed with every header. Values are borrowed until framing_check. */
struct framing {
    const char *length; /* the first Content-Length, or NULL */
    size_t length_len;
    int32_t n_hosts, n_codings;
    bool is_chunked;   /* the only coding, so far */
    bool is_expecting; /* Expect: 100-continue */
    bool lengths_differ;
    bool has_bad_name, has_bad_value;
    /* after framing_check */
    int64_t length_bytes; /* of the body; -1: chunked */
};

void framing_add(struct framing *f, const char *name, size_t name_len, const char *value,
                 size_t value_len);

/* 0, or the status of the refusal with a message (a constant). After a refusal nothing that
 * follows on the connection can be trusted. */
int framing_check(struct framing *f, bool is_http11, const char **message);

#endif
