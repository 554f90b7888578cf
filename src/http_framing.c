#include "http_framing.h"

#include <string.h>
#include <strings.h>

static bool is_named(const char *name, size_t len, const char *want)
{
    return len == strlen(want) && strncasecmp(name, want, len) == 0;
}

/* RFC 9110, 5.6.2: token. */
static bool is_token(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        char c = s[i];
        bool is_alnum =
            (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!is_alnum && (c == '\0' || !strchr("!#$%&'*+-.^_`|~", c)))
            return false;
    }
    return len > 0;
}

static bool has_control(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if ((c < 0x20 && c != '\t') || c == 0x7f)
            return true;
    }
    return false;
}

void framing_add(struct framing *f, const char *name, size_t name_len, const char *value,
                 size_t value_len)
{
    while (value_len > 0 && (value[value_len - 1] == ' ' || value[value_len - 1] == '\t'))
        value_len--;
    f->has_bad_name |= !is_token(name, name_len);
    f->has_bad_value |= has_control(value, value_len);
    if (is_named(name, name_len, "Host")) {
        f->n_hosts++;
    } else if (is_named(name, name_len, "Transfer-Encoding")) {
        f->n_codings++;
        f->is_chunked = f->n_codings == 1 && is_named(value, value_len, "chunked");
    } else if (is_named(name, name_len, "Expect")) {
        f->is_expecting |= is_named(value, value_len, "100-continue");
    } else if (is_named(name, name_len, "Content-Length")) {
        if (!f->length) {
            f->length = value;
            f->length_len = value_len;
        } else if (f->length_len != value_len || memcmp(f->length, value, value_len) != 0) {
            f->lengths_differ = true;
        }
    }
}

/* Digits only; what does not fit is as good as INT64_MAX. Returns -1 for anything else. */
static int64_t parse_length(const char *s, size_t len)
{
    int64_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (s[i] < '0' || s[i] > '9')
            return -1;
        n = n > (INT64_MAX - 9) / 10 ? INT64_MAX / 10 : n * 10 + (s[i] - '0');
    }
    return len > 0 ? n : -1;
}

int framing_check(struct framing *f, bool is_http11, const char **message)
{
    f->length_bytes = 0;
    *message = NULL;
    if (f->has_bad_name)
        *message = "a header name holds a character that is not allowed there";
    else if (f->has_bad_value)
        *message = "a header value holds a control character";
    else if (f->lengths_differ)
        *message = "Content-Length is given twice with different values";
    else if (f->length && f->n_codings > 0)
        *message = "Content-Length and Transfer-Encoding exclude each other";
    else if (f->n_codings > 0 && !is_http11)
        *message = "Transfer-Encoding needs HTTP/1.1";
    else if (is_http11 && f->n_hosts == 0)
        *message = "HTTP/1.1 needs a Host header";
    else if (f->n_hosts > 1)
        *message = "Host is given more than once";
    if (*message)
        return 400;
    if (f->n_codings > 0) {
        f->length_bytes = -1;
        if (f->is_chunked)
            return 0;
        *message = "Transfer-Encoding: chunked, once, is all that is understood";
        return 501;
    }
    if (f->length) {
        f->length_bytes = parse_length(f->length, f->length_len);
        if (f->length_bytes < 0) {
            *message = "Content-Length is a whole number of bytes, not negative";
            return 400;
        }
    }
    return 0;
}
