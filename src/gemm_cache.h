/* The file that remembers which of cuBLASLt's algorithms is fastest for a shape of product.
 *
 * One file for a card and a version of the library: both are in its name and its first line.
 * Text, one record a line, a checksum at the end; a file that is damaged or of another version
 * counts as none. Main thread, while weights load. It says nothing about whether an algorithm
 * fits: who reads it tries that. */
#ifndef PREFILLD_GEMM_CACHE_H
#define PREFILLD_GEMM_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

/* Words of cublasLtMatmulAlgo_t, and buckets of row counts (cuda_impl.h). */
enum { GEMM_ALGO_WORDS = 8, GEMM_CACHE_BUCKETS = 12 };

struct gemm_algo_words {
    uint64_t w[GEMM_ALGO_WORDS];
};

struct gemm_record {
    int32_t rows, cols; /* of the weight */
    int32_t is_f32;     /* the product's type: 0 bf16, 1 f32 */
    int32_t max_rows;   /* of the largest step */
    struct gemm_algo_words common;
    uint32_t has_algo; /* bit i: of bucket i */
    struct gemm_algo_words algo[GEMM_CACHE_BUCKETS];
};

struct gemm_cache {
    char *path, *key;
    struct gemm_record *records;
    int32_t n, cap;
};

/* For a folder, a card's name and a library's version; reads what is there. Returns 0 (also
 * when there is no file, or none of use), or ERR_NOMEM. A zeroed cache may be closed, too. */
int gemm_cache_open(struct gemm_cache *c, const char *dir, const char *card, int64_t version);
void gemm_cache_close(struct gemm_cache *c);

/* The record of a product, borrowed until the next add; NULL: none. */
const struct gemm_record *gemm_cache_find(const struct gemm_cache *c, int32_t rows,
                                          int32_t cols, bool is_f32, int32_t max_rows);

/* Takes a copy of r in place of an earlier record of the same product and writes the file anew:
 * beside it first, then renamed, so that a reader meets a whole one. Returns 0, ERR_NOMEM or
 * ERR_IO with e filled; the record is kept in memory either way, but for ERR_NOMEM. */
int gemm_cache_add(struct gemm_cache *c, const struct gemm_record *r, struct errmsg *e);

#endif
