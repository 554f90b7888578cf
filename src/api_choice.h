/* One generated text, as it grows token by token: what is certain of it, and where it ends.
 *
 * Follows a request that the engine may still be extending; belongs to the worker that formats
 * its group. Decides on stop strings, which the engine knows nothing of. */
#ifndef PREFILLD_API_CHOICE_H
#define PREFILLD_API_CHOICE_H

#include "api_group.h"

enum choice_end {
    CHOICE_OPEN,
    CHOICE_LENGTH,     /* all tokens that were asked for */
    CHOICE_STOP_TOKEN, /* the last is one of choosing.sampling.stop_ids */
    CHOICE_STOP_TEXT   /* it holds one of choosing.stops */
};

struct choice {
    const struct choosing *choosing; /* borrowed */
    struct group_member *member;     /* borrowed */
    struct tokenizer_stream stream;
    bool has_text; /* there is a tokenizer */
    struct buf text;
    int32_t n_tokens; /* generated and part of the answer */
    enum choice_end end;
    int32_t i_stop;  /* which of them, with the two kinds of stop */
    size_t sent_len; /* the owner's: bytes of text that are out */
};

/* max_new 0: it has ended. */
void choice_init(struct choice *c, const struct api *a, const struct choosing *choosing,
                 struct group_member *m, int32_t max_new);
void choice_fini(struct choice *c);

/* Takes the next token, if there is one and the text has not ended; says whether. At a stop
 * string the request is ended, too. */
bool choice_step(struct choice *c);

/* Bytes of text that stay as they are, whatever follows. */
size_t choice_certain(const struct choice *c);

/* "stop", "length", or NULL while it is open. */
const char *choice_reason(const struct choice *c);
/* Appends what vLLM calls stop_reason: the string, the id asked for, or null. */
void choice_write_stop_reason(const struct choice *c, struct buf *out);

#endif
