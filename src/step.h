/* Packs pieces into one step: tokens, positions, cu_seqlens, slots, page tables, output rows.
 *
 * Engine thread only. All arrays are allocated once for the limits; packing writes and never
 * allocates. Knows requests and plain arrays, no tensor. */
#ifndef PREFILLD_STEP_H
#define PREFILLD_STEP_H

#include "backend.h"
#include "request.h"

struct step_limits {
    int32_t max_tokens, max_seqs, max_rows;
    int32_t max_pages; /* of one request: row length of the page table */
    int32_t page_tokens;
};

/* Which request a piece belongs to, for publishing. */
struct step_piece {
    struct request *req;
    int32_t start, n_tokens;
    int32_t row0, n_rows; /* its rows in results */
    bool is_last;
};

struct step {
    int64_t number;
    int64_t launched_us;
    bool is_abandoned;      /* the engine's: some layers were left out, results mean nothing */
    struct batch_host host; /* points into the arrays below */
    struct step_piece *pieces; /* [max_seqs] */
    int32_t n_pieces;
    struct row_result *results; /* [max_rows] host */
    int32_t *tokens, *positions, *cu_seqlens, *start, *slots, *page_table;
    int32_t *save_slots; /* [max_tokens / 64 + max_seqs] */
    int32_t *rows, *targets, *row_top;
    struct row_sample *samples;             /* [max_seqs] */
    struct slot_copy *copies, *page_copies; /* [max_seqs] */
    struct prefix_node **taken; /* [max_tokens / 64] the engine's: what save_slots are of */
    int32_t n_taken;
    struct step_limits limits;
};

int step_open(struct step *s, const struct step_limits *l);
void step_close(struct step *s);

/* Empties it for a new step. */
void step_reset(struct step *s, int64_t number);
/* Adds a piece [start, start + n_tokens) of r, which has its slot and pages. The caller keeps
 * the sums within the limits. */
void step_add(struct step *s, struct request *r, int32_t start, int32_t n_tokens, bool is_last);
/* The state of the piece added last, as it is behind its first n_tokens (a multiple of 64, not
 * 0), goes to slot, too. */
void step_save(struct step *s, int32_t n_tokens, int32_t slot);
/* A state slot that is copied before the first layer; at most one for a piece. */
void step_copy_slot(struct step *s, int32_t from, int32_t to);
/* A page that is copied before the first layer; at most one for a piece. */
void step_copy_page(struct step *s, int32_t from, int32_t to);
/* Fills s->host. */
void step_seal(struct step *s);
/* Copies a piece's results into its request. Returns the number of rows that hold NaN or
 * infinities. */
int32_t step_publish(const struct step *s, int32_t i_piece);

#endif
