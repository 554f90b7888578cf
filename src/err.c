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
