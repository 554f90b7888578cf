#include "api_error.h"

#include <string.h>

const char *api_error_type(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    case 500:
        return "server_error";
    case 503:
        return "overloaded_error";
    case 504:
        return "timeout_error";
    default:
        return "invalid_request_error";
    }
}

void api_error_write(struct buf *out, int status, const char *type, const char *param,
                     const char *message)
{
    buf_adds(out, "{\"error\": {\"message\": ");
    buf_json_string(out, message, strlen(message));
    buf_adds(out, ", \"type\": ");
    const char *t = type ? type : api_error_type(status);
    buf_json_string(out, t, strlen(t));
    buf_adds(out, ", \"param\": ");
    if (param)
        buf_json_string(out, param, strlen(param));
    else
        buf_adds(out, "null");
    buf_adds(out, ", \"code\": ");
    buf_json_i64(out, status);
    buf_adds(out, "}}");
}
