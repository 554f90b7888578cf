/* One prefill request, from the parsed body to its answer.
 *
 * Made by a worker (api_*.c), handed to the engine through the queue, handed back by the engine
 * through done(). Reference-counted: the HTTP exchange holds one reference (so that a hang-up
 * can cancel it), the queue and then the engine hold one. Each member belongs to one side at a
 * time; only `cancelled` and the count are touched by several threads. */
#ifndef PREFILLD_REQUEST_H
#define PREFILLD_REQUEST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "sampler.h"
#include "sched.h"
#include "session.h"

enum { REQUEST_ID_MAX = 128 };

enum logprobs_mode { LOGPROBS_NONE, LOGPROBS_NEXT, LOGPROBS_ALL };

/* How a request ended; names are the metric's labels. */
enum outcome {
    OUTCOME_OK,
    OUTCOME_INVALID,   /* 4xx before it was queued */
    OUTCOME_OVERLOAD,  /* 503 */
    OUTCOME_DEADLINE,  /* 504 */
    OUTCOME_CANCELLED, /* hang-up: no answer */
    OUTCOME_ERROR,     /* 500, or 503 when the device was lost */
    OUTCOME_COUNT
};

struct top_entry {
    int32_t id; /* -1: unused */
    float logprob;
};

struct request_piece {
    int64_t step;
    int32_t start;
    int32_t n_tokens;
};

enum finish { FINISH_LENGTH, FINISH_STOP };

struct prefix_node;

struct request {
    atomic_int refs;
    atomic_bool cancelled; /* set by any thread, read by the engine at step boundaries */

    /* ---- the question; constant once queued ---- */
    char id[REQUEST_ID_MAX + 1];
    int32_t *ids;  /* [n_ids], owned; behind the prompt what was generated */
    int32_t n_ids; /* grows with each token generated: the engine's */
    int32_t n_prompt;
    struct sampling *sampling; /* NULL: nothing is generated; owned, with its bias */
    enum logprobs_mode logprobs;
    int32_t logprobs_from; /* with LOGPROBS_ALL: rows before this one are left out, as 0 */
    int32_t n_top;         /* candidates wanted, 0..TOP_MAX */
    int64_t arrival_us;    /* monotonic */
    /* Whether it may begin at a state that another prompt under the same key left, and leave
     * some; once: they go with the last of these requests. */
    bool shares, shares_once;
    /* The session whose state it begins at, behind its n_source tokens, which ids begin with;
     * and the one that keeps its end, which may be the same. References of the table, given up
     * by the engine at the request's end, else by whoever made it. */
    struct session *source, *keeps;
    int32_t n_source;
    struct session_terms keep_terms;
    bool is_fork;       /* the source stays as it is */
    int32_t *share_key; /* [n_share_key], owned; NULL: none, which is a key, too */
    int32_t n_share_key;
    /* Called once by the engine thread when the request has ended, after results are in place
     * and all pool memory was returned; must not block. */
    void (*done)(struct request *r, void *arg);
    void *done_arg;

    /* Called by the engine thread after each token generated, the last one too, and, with
     * tells_progress, after each piece of the prompt, before done(); may be NULL; must not
     * block. Others read ids, new_logprobs, new_top and new_labels below n_new. */
    void (*on_token)(struct request *r, void *arg);
    bool tells_progress;
    /* Ids whose logprobs are wanted beside each token generated. */
    int32_t *labels;  /* [n_labels], owned */
    int32_t n_labels; /* 0..LABELS_MAX */

    /* ---- the engine's, while it holds the request ---- */
    struct sched_item item;      /* arrival, deadline, priority, lengths */
    struct request *prev, *next; /* engine's list */
    int32_t slot;                /* -1: none */
    int32_t *pages;              /* [n_all_pages] page table, owned; room from the start */
    int32_t n_pages;             /* entries in use; 0: not admitted */
    int32_t n_all_pages;         /* of these, shared ones counted in */
    int32_t copy_from;        /* slot that its first piece's state is copied from; -1: none */
    int32_t copy_page;        /* page, as the one its first token goes to; -1: none */
    struct prefix_node *path; /* where its prompt ends in the tree; NULL: not in it */
    struct prefix_node *use;  /* the deepest node it may begin at */
    struct prefix_node *parked_at;
    struct request *parked_next;
    struct prefix_node *wanted; /* kept for it while it waits */
    bool wants_rows;            /* numbers of its prompt from the second token on */
    int32_t kept_at;            /* where its state was kept or refused room last, or it began */
    int32_t n_in_flight;        /* pieces in steps that have not ended */
    int32_t n_computed;         /* tokens in steps that have ended */
    struct sampler sampler;     /* with sampling */
    struct top_entry chosen;    /* with sampling: the token the last step chose */
    bool is_ending;             /* ended while pieces are in flight; freed at their end */

    /* ---- the queue's: among those that wait ---- */
    struct request *older, *newer;

    /* ---- the answer; valid in done() ---- */
    enum outcome outcome;
    struct errmsg error;    /* text when outcome is not OUTCOME_OK */
    float *prompt_logprobs; /* [n_ids], [t] of ids[t] given the tokens before it; [0] unused;
                                with LOGPROBS_ALL */
    struct top_entry *prompt_top; /* [n_ids * n_top], same rows; with LOGPROBS_ALL, n_top > 0 */
    struct top_entry next_top[20]; /* sorted; [0] is the next token; unless LOGPROBS_NONE */
    atomic_int n_read;   /* with tells_progress: tokens of the prompt computed or cached */
    atomic_int n_new;    /* tokens generated; entries below it stand */
    float *new_logprobs; /* [max_new] of the model, before sampling changes it */
    struct top_entry *new_top; /* [max_new * n_top]; with n_top > 0 */
    float *new_labels;         /* [max_new * n_labels]; with n_labels > 0 */
    enum finish finish;        /* with sampling */
    int32_t n_cached;
    char kept_as[32];             /* the session that keeps its end; "": none */
    struct request_piece *pieces; /* [n_pieces], owned */
    int32_t n_pieces, pieces_cap;
    int64_t started_us; /* first piece launched; 0: never */
    int64_t prompt_us;  /* the prompt's last piece ended; 0: never */
    int64_t ended_us;
};

/* A request with one reference, lengths set in item, and room for its page table, for what its
 * mode returns and for the pieces of any cut at multiples of 64. Takes ids (malloc; freed also
 * on failure). n_ids >= 1, n_top 0..TOP_MAX, page_tokens >= 1. What no step writes stays 0,
 * candidates of row 0 and of next_top -1. Returns NULL when memory is short. */
struct request *request_new(int32_t *ids, int32_t n_ids, enum logprobs_mode mode, int32_t n_top,
                            int32_t page_tokens);
/* Makes r generate behind its prompt: room for the tokens, their logprobs and their pages. s is
 * copied; s->bias (malloc) is taken, also on failure. Before r is queued. Returns 0, or
 * ERR_NOMEM: r must not be queued then. */
int request_generate(struct request *r, const struct sampling *s, int32_t page_tokens);
/* Wants the logprobs of n ids beside each token generated. After request_generate, before r is
 * queued. labels is copied. Returns 0 or ERR_NOMEM, as request_generate. */
int request_label(struct request *r, const int32_t *labels, int32_t n);
/* Any thread that has a reference. */
void request_ref(struct request *r);
/* Gives one up; the last frees r and all it owns. NULL is legal. Any thread. */
void request_unref(struct request *r);

/* Appends a piece; consecutive steps' pieces in order. Returns 0 or ERR_NOMEM. */
int request_add_piece(struct request *r, int64_t step, int32_t start, int32_t n_tokens);

/* Monotonic clock, microseconds. */
int64_t request_now_us(void);

#endif
