/* tokenizer TOKENIZER.JSON FILE...: the speed of loading, of encoding each file, and of one
 * long piece, as one JSON object. A file holds texts with a NUL after each. One thread.
 * tokenizer.py runs this beside other tokenizers on the same texts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tokenizer.h"

/* Of which the best counts: the first one warms the caches. */
#define PASSES 3

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void stop(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void read_file(const char *path, struct buf *out)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        stop(path, "cannot open");
    do {
        if (buf_reserve(out, 1 << 20) != 0)
            stop(path, "no memory");
        out->len += fread(out->data + out->len, 1, out->cap - out->len, f);
    } while (!feof(f) && !ferror(f));
    fclose(f);
}

/* Encodes all texts of a file; adds up the ids in a way that tells their order. */
static double encode_all(const struct tokenizer *t, const struct buf *file, size_t *n_tokens,
                         uint64_t *sum)
{
    struct errmsg e;
    double start = now_s();

    *n_tokens = 0;
    *sum = 0;
    for (size_t i = 0; i < file->len;) {
        size_t len = strlen(file->data + i);
        int32_t *ids, n_ids;
        if (tokenizer_encode(t, file->data + i, len, 0, &ids, &n_ids, &e) != 0)
            stop("encode", e.text);
        for (int32_t k = 0; k < n_ids; k++)
            *sum = (*sum * 31 + (uint64_t)ids[k]) % 1000000007;
        *n_tokens += (size_t)n_ids;
        free(ids);
        i += len + 1;
    }
    return now_s() - start;
}

int main(int argc, char **argv)
{
    struct tokenizer *t;
    struct errmsg e;

    if (argc < 3)
        stop(argv[0], "usage: tokenizer TOKENIZER.JSON FILE...");
    double start = now_s();
    if (tokenizer_load(argv[1], &t, &e) != 0)
        stop("load", e.text);
    printf("{\"load_s\": %.4f", now_s() - start);
    for (int i = 2; i < argc; i++) {
        struct buf file;
        size_t n_tokens;
        uint64_t sum;
        buf_init(&file);
        read_file(argv[i], &file);
        double seconds = encode_all(t, &file, &n_tokens, &sum);
        for (int pass = 1; pass < PASSES; pass++) {
            double again = encode_all(t, &file, &n_tokens, &sum);
            seconds = again < seconds ? again : seconds;
        }
        printf(", \"%s\": {\"seconds\": %.6f, \"tokens\": %zu, \"sum\": %llu}", argv[i],
               seconds, n_tokens, (unsigned long long)sum);
        buf_fini(&file);
    }
    struct buf run;
    size_t n_tokens;
    uint64_t sum;
    buf_init(&run);
    for (int i = 0; i < 1000000; i++)
        buf_addc(&run, 'a');
    buf_addc(&run, '\0');
    printf(", \"million_a_s\": %.4f}\n", encode_all(t, &run, &n_tokens, &sum));
    buf_fini(&run);
    tokenizer_free(t);
    return 0;
}
