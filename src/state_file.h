/* The file of a session: what it holds and in which order, its header written and checked.
 *
 * One safetensors file. Its tensors, without holes, in this order:
 *   token_ids            I32 [n]
 *   layers.L.gdn.state   F32 [HV, K, V]     each GDN layer, with
 *   layers.L.gdn.conv    X   [conv_dim, 3]  the last inputs of its convolution, oldest first
 *   layers.L.attn.k, .v  X   [n, HK, D]     each attention layer, keys rotated; layers in order
 *   checksum             U64 [1]            state_sum.h, of every byte of the file before it
 * X is F32 or BF16, one for all. __metadata__ (strings): format "prefilld-session", version,
 * fingerprint (model_print.h), position (n), dtype (X), and, to be read by people, model and
 * backend; a daemon's own files also have id, ttl_s, pinned, created, idle_s and saved.
 *
 * Numbers of a prompt's tokens are not in it: they were answered, and what goes on behind the
 * session needs none of them. Knows no pool and does no I/O. Any thread. */
#ifndef PREFILLD_STATE_FILE_H
#define PREFILLD_STATE_FILE_H

#include "arch.h"
#include "backend.h"
#include "buf.h"
#include "session.h"
#include "state_sum.h"

enum {
    STATE_VERSION = 1,
    /* Bytes of a header that are read: 1024 layers take 300 KB, and small values take 50 times
     * their text's memory when it is parsed. */
    STATE_MAX_HEAD = 512 << 10,
    STATE_PART_BYTES = 1 << 20 /* larger ones leave the CPU's caches from one use to the next */
};

/* What a daemon's sessions look like; constant. */
struct state_shape {
    const struct arch *a;
    struct gdn_dims gd;
    struct attn_dims ad;
    enum dtype act; /* of the pools */
    int32_t page_tokens;
    size_t slot_bytes;      /* of one layer, as the backend's pool has it */
    size_t half_page_bytes; /* of one layer's keys, or values */
    int32_t part_pages;     /* pages of keys, or values, that a part has at most */
    uint64_t fingerprint;
    const char *model, *backend; /* names, for people */
};

/* What a file says of its session. */
struct state_info {
    int32_t n_tokens;
    enum dtype dtype;
    bool has_terms; /* the rest is there */
    char id[SESSION_ID_MAX + 1];
    int64_t ttl_s, created_unix_s, idle_s, saved_unix_s;
    bool is_pinned;
};

/* part_pages, from the sizes that are filled in. */
void state_shape_seal(struct state_shape *z);

/* Appends the first 8 bytes and the header, filled up to a multiple of 8. out may fail. */
void state_head_write(const struct state_shape *z, const struct state_info *i, struct buf *out);
/* Bytes of all tensors. */
int64_t state_data_bytes(const struct state_shape *z, const struct state_info *i);
/* Checks a header of len bytes, without the 8 before it. Returns 0, or with e saying what was
 * found where and what is accepted ERR_INVALID, ERR_UNSUPPORTED (another model or version) or
 * ERR_TOO_LARGE (more than max_tokens). */
int state_head_read(const struct state_shape *z, const char *text, size_t len,
                    int32_t max_tokens, struct state_info *out, struct errmsg *e);

/* ---- the data, in parts of bounded size ---- */

enum state_kind { STATE_IDS, STATE_SLOT, STATE_KEYS, STATE_VALUES, STATE_SUM, STATE_END };

/* Consecutive bytes of the data. */
struct state_part {
    enum state_kind kind;
    int32_t i_layer;         /* among the layers of its kind */
    int32_t i_page, n_pages; /* of keys or values */
    int32_t n_tokens;        /* in those pages */
    size_t bytes;            /* in the file */
    size_t raw_bytes;        /* as the pool has it; 0: it is not in a pool */
};

/* Where a walk over the parts is; zero at the start. */
struct state_walk {
    int32_t layer, i_gdn, i_attn, i_page;
    bool has_ids, is_values, is_over;
};

/* The next part, for numbers of dtype; kind STATE_END: there is none. */
struct state_part state_next(const struct state_shape *z, int32_t n_tokens, enum dtype dtype,
                             struct state_walk *w);
/* The largest raw_bytes, and bytes, of any part with raw bytes. */
size_t state_max_raw(const struct state_shape *z);
size_t state_max_bytes(const struct state_shape *z, enum dtype dtype);

/* A part's bytes from the pool's, and back; dtype is that of the file, out and raw have the
 * part's sizes. Positions of a page beyond the tokens become 0. tmp:
 * state_max_bytes(z, z->act), unless dtype is the pools'. */
void state_unpack(const struct state_shape *z, const struct backend_ops *ops,
                  const struct state_part *p, const void *raw, void *out);
void state_pack(const struct state_shape *z, const struct backend_ops *ops,
                const struct state_part *p, enum dtype dtype, const void *in, void *tmp,
                void *raw);

const char *state_dtype_name(enum dtype d);

/* ---- reading one from bytes as they come ---- */

enum state_event {
    STATE_MORE, /* bytes are wanted */
    STATE_HEAD, /* the header was read: info says what comes */
    STATE_PART, /* a part is complete */
    STATE_DONE  /* all is there, and the checksum is right */
};

struct state_reader {
    const struct state_shape *z;
    int32_t max_tokens;
    struct state_sum sum;
    struct buf head; /* the 8 bytes, then the header */
    uint64_t head_len;
    bool has_head, is_done;
    struct state_info info;
    struct state_walk walk;
    struct state_part part;
    unsigned char *data; /* [part.bytes], owned, of the part under way or complete */
    size_t data_cap, n_data;
    int32_t *ids; /* [info.n_tokens], owned, from its part on */
};

void state_reader_init(struct state_reader *r, const struct state_shape *z, int32_t max_tokens);
void state_reader_fini(struct state_reader *r);
/* Takes bytes up to the next event; *n_taken of len. After STATE_PART data is the caller's
 * until the next call. Returns an enum state_event, or the errors of state_head_read or
 * ERR_NOMEM with e filled. */
int state_reader_take(struct state_reader *r, const void *bytes, size_t len, size_t *n_taken,
                      struct errmsg *e);
/* The bytes have ended: 0, or ERR_INVALID when the file has not. */
int state_reader_end(const struct state_reader *r, struct errmsg *e);

#endif
