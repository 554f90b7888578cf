#include "step.h"

#include <stdlib.h>
#include <string.h>

static int32_t *step_ints(size_t n)
{
    return calloc(n ? n : 1, sizeof(int32_t));
}

int step_open(struct step *s, const struct step_limits *l)
{
    size_t whole_chunks = (size_t)l->max_tokens / CHUNK_TOKENS;
    memset(s, 0, sizeof(*s));
    s->limits = *l;
    s->pieces = calloc((size_t)l->max_seqs, sizeof(*s->pieces));
    s->results = calloc((size_t)l->max_rows, sizeof(*s->results));
    s->tokens = step_ints((size_t)l->max_tokens);
    s->positions = step_ints((size_t)l->max_tokens);
    s->cu_seqlens = step_ints((size_t)l->max_seqs + 1);
    s->start = step_ints((size_t)l->max_seqs);
    s->slots = step_ints((size_t)l->max_seqs);
    s->save_slots = step_ints(whole_chunks + (size_t)l->max_seqs);
    s->page_table = step_ints((size_t)l->max_seqs * (size_t)l->max_pages);
    s->rows = step_ints((size_t)l->max_rows);
    s->targets = step_ints((size_t)l->max_rows);
    s->row_top = step_ints((size_t)l->max_rows);
    s->samples = calloc((size_t)l->max_seqs, sizeof(*s->samples));
    s->copies = calloc((size_t)l->max_seqs, sizeof(*s->copies));
    s->page_copies = calloc((size_t)l->max_seqs, sizeof(*s->page_copies));
    s->taken = calloc(whole_chunks + 1, sizeof(struct prefix_node *));
    if (!s->page_copies || !s->copies || !s->taken || !s->pieces || !s->results || !s->tokens ||
        !s->positions || !s->cu_seqlens || !s->start || !s->slots || !s->save_slots ||
        !s->page_table || !s->rows || !s->targets || !s->row_top || !s->samples) {
        step_close(s);
        return ERR_NOMEM;
    }
    return 0;
}

void step_close(struct step *s)
{
    free(s->pieces);
    free(s->results);
    free(s->tokens);
    free(s->positions);
    free(s->cu_seqlens);
    free(s->start);
    free(s->slots);
    free(s->save_slots);
    free(s->page_table);
    free(s->rows);
    free(s->targets);
    free(s->row_top);
    free(s->samples);
    free(s->copies);
    free(s->page_copies);
    free(s->taken);
    memset(s, 0, sizeof(*s));
}

void step_reset(struct step *s, int64_t number)
{
    s->number = number;
    s->launched_us = 0;
    s->is_abandoned = false;
    s->n_pieces = s->n_taken = 0;
    memset(&s->host, 0, sizeof(s->host));
    s->cu_seqlens[0] = 0;
}

/* Asks for the head's row of batch token i. */
static void step_add_row(struct step *s, int32_t i, int32_t target, int32_t n_top)
{
    int32_t r = s->host.n_rows++;
    s->rows[r] = i;
    s->targets[r] = target;
    s->row_top[r] = n_top;
}

void step_add(struct step *s, struct request *r, int32_t start, int32_t n_tokens, bool is_last)
{
    int32_t t0 = s->host.n_tokens;
    int32_t i = s->n_pieces++;
    struct step_piece *p = &s->pieces[i];
    *p = (struct step_piece){.req = r,
                             .start = start,
                             .n_tokens = n_tokens,
                             .row0 = s->host.n_rows,
                             .is_last = is_last};
    memcpy(s->tokens + t0, r->ids + start, (size_t)n_tokens * sizeof(int32_t));
    for (int32_t t = 0; t < n_tokens; t++)
        s->positions[t0 + t] = start + t;
    s->start[i] = start;
    s->slots[i] = r->slot;
    int32_t n_pages = (start + n_tokens + s->limits.page_tokens - 1) / s->limits.page_tokens;
    memcpy(s->page_table + (size_t)i * (size_t)s->limits.max_pages, r->pages,
           (size_t)n_pages * sizeof(int32_t));
    int32_t end = start + n_tokens;
    if (r->logprobs == LOGPROBS_ALL) {
        int32_t first = r->logprobs_from - 1 > start ? r->logprobs_from - 1 : start;
        for (int32_t t = first; t < end && t + 1 < r->n_ids; t++)
            step_add_row(s, t0 + t - start, r->ids[t + 1], r->n_top);
    }
    if (is_last && r->sampling && !sampler_is_plain(&r->sampler)) {
        struct row_sample *sample = &s->samples[s->host.n_samples++];
        *sample = sampler_next(&r->sampler);
        sample->row = s->host.n_rows;
    }
    if (is_last && (r->logprobs != LOGPROBS_NONE || r->sampling))
        /* The next token is the best candidate, also when none were asked for. */
        step_add_row(s, t0 + n_tokens - 1, -1, r->n_top > 0 ? r->n_top : 1);
    /* A row has one target: what is wanted of labels is asked for again and again. */
    for (int32_t j = 0; is_last && j < r->n_labels; j++)
        step_add_row(s, t0 + n_tokens - 1, r->labels[j], 0);
    p->n_rows = s->host.n_rows - p->row0;
    s->host.n_tokens += n_tokens;
    for (int32_t t = 0; t < n_tokens; t += CHUNK_TOKENS)
        s->save_slots[s->host.n_chunks++] = -1;
    if (n_tokens > s->host.max_len)
        s->host.max_len = n_tokens;
    s->cu_seqlens[i + 1] = s->host.n_tokens;
}

void step_save(struct step *s, int32_t n_tokens, int32_t slot)
{
    int32_t len = s->host.n_tokens - s->cu_seqlens[s->n_pieces - 1];
    int32_t first = s->host.n_chunks - (len + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
    s->save_slots[first + n_tokens / CHUNK_TOKENS - 1] = slot;
}

void step_copy_slot(struct step *s, int32_t from, int32_t to)
{
    s->copies[s->host.n_copies++] = (struct slot_copy){from, to};
}

void step_copy_page(struct step *s, int32_t from, int32_t to)
{
    s->page_copies[s->host.n_page_copies++] = (struct slot_copy){from, to};
}

void step_seal(struct step *s)
{
    s->host.n_seqs = s->n_pieces;
    s->host.max_pages = s->limits.max_pages;
    s->host.tokens = s->tokens;
    s->host.positions = s->positions;
    s->host.cu_seqlens = s->cu_seqlens;
    s->host.start = s->start;
    s->host.slots = s->slots;
    s->host.save_slots = s->save_slots;
    s->host.page_table = s->page_table;
    s->host.rows = s->rows;
    s->host.targets = s->targets;
    s->host.row_top = s->row_top;
    s->host.samples = s->samples;
    s->host.copies = s->copies;
    s->host.page_copies = s->page_copies;
}

static void step_copy_top(struct top_entry *dst, const struct row_result *src, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        dst[i] = (struct top_entry){.id = src->top_id[i], .logprob = src->top_logprob[i]};
}

int32_t step_publish(const struct step *s, int32_t i_piece)
{
    const struct step_piece *p = &s->pieces[i_piece];
    struct request *r = p->req;
    int32_t n_bad = 0;
    float *labels = NULL; /* behind the row of the next token */
    for (int32_t i = 0; i < p->n_rows; i++) {
        const struct row_result *row = &s->results[p->row0 + i];
        n_bad += row->n_bad > 0;
        if (s->targets[p->row0 + i] < 0) {
            step_copy_top(r->next_top, row, s->row_top[p->row0 + i]);
            if (row->sampled_id >= 0)
                r->chosen = (struct top_entry){row->sampled_id, row->sampled_logprob};
            else
                r->chosen = r->next_top[0];
            labels = r->n_labels > 0
                         ? r->new_labels + (size_t)atomic_load(&r->n_new) * (size_t)r->n_labels
                         : NULL;
            continue;
        }
        if (labels) {
            *labels++ = row->target_logprob;
            continue;
        }
        /* The row of token t gives the logprob of token t + 1. */
        int32_t i_token = s->rows[p->row0 + i] - s->cu_seqlens[i_piece];
        size_t t = (size_t)p->start + (size_t)i_token + 1;
        r->prompt_logprobs[t] = row->target_logprob;
        if (r->n_top > 0)
            step_copy_top(r->prompt_top + t * (size_t)r->n_top, row, r->n_top);
    }
    return n_bad;
}
