/* OpenAI error objects: the one place where they are written (../shared/api.md, Errors).
 *
 * Pure functions over the caller's buffer; any thread. Messages name fields and what is
 * accepted; callers never put input into them. */
#ifndef PREFILLD_API_ERROR_H
#define PREFILLD_API_ERROR_H

#include "buf.h"

/* The `type` that goes with a status: "invalid_request_error", "overloaded_error", ... */
const char *api_error_type(int status);

/* Appends {"error": {...}}. type NULL: the status's own. param may be NULL. */
void api_error_write(struct buf *out, int status, const char *type, const char *param,
                     const char *message);

#endif
