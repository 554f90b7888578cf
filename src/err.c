#include "err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int errmsg_set(struct errmsg *e, int code, const char *fmt, ...)
{
    if (e) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(e->text, sizeof(e->text), fmt, ap);
        va_end(ap);
    }
    return code;
}

void errmsg_add(struct errmsg *e, const char *fmt, ...)
{
    if (!e)
        return;
    size_t len = strlen(e->text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->text + len, sizeof(e->text) - len, fmt, ap);
    va_end(ap);
}

const char *err_name(int code)
{
    switch (code) {
    case ERR_OK:
        return "ok";
    case ERR_NOMEM:
        return "nomem";
    case ERR_INVALID:
        return "invalid";
    case ERR_IO:
        return "io";
    case ERR_UNSUPPORTED:
        return "unsupported";
    case ERR_FULL:
        return "full";
    case ERR_NOT_FOUND:
        return "not_found";
    case ERR_TOO_LARGE:
        return "too_large";
    case ERR_DEVICE:
        return "device";
    case ERR_STOPPED:
        return "stopped";
    default:
        return "unknown";
    }
}
