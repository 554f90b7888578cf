/* What a model takes of a backend, in words: for the log, and for --check. Main thread, at
 * start. */
#ifndef PREFILLD_SIZING_H
#define PREFILLD_SIZING_H

#include "model.h"

/* id and backend are names. */
void sizing_log(const char *id, const char *backend, const struct arch *a,
                const struct model_sizes *z);
/* The answer to --check, to stdout. */
void sizing_print(const char *id, const char *backend, const struct arch *a,
                  const struct model_sizes *z);

#endif
