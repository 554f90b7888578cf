/* Parsing a prompt of ids: json_parse beside jansson alone, same text, same run.
 *   make tests/bench/json && tests/bench/json [IDS]      default 262144 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../rng.h"
#include "buf.h"
#include "json.h"

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

int main(int argc, char **argv)
{
    enum { RUNS = 21, VOCAB = 151936 };
    int32_t n_ids = argc > 1 ? atoi(argv[1]) : 262144;
    struct rng r = {1};
    struct buf text;
    buf_init(&text);
    buf_adds(&text, "{\"model\": \"demo\", \"prompt\": [");
    for (int32_t i = 0; i < n_ids; i++) {
        buf_json_i64(&text, rng_int(&r, VOCAB));
        buf_adds(&text, i + 1 < n_ids ? ", " : "]");
    }
    buf_adds(&text, ", \"logprobs\": \"none\"}");

    static const char *const fields[] = {"prompt", NULL};
    const struct json_rules rules = {fields, "prompt", VOCAB, n_ids};
    double best = 1e9, best_jansson = 1e9;
    for (int i = 0; i < RUNS; i++) {
        struct json_body b;
        struct json_error e;
        double start = now_ms();
        if (json_parse(text.data, text.len, &rules, &b, &e) != 0 || b.n_ids != n_ids) {
            fprintf(stderr, "%s\n", e.message.text);
            return 1;
        }
        json_fini(&b);
        double middle = now_ms();
        json_t *root = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, NULL);
        json_decref(root);
        double end = now_ms();
        best = middle - start < best ? middle - start : best;
        best_jansson = end - middle < best_jansson ? end - middle : best_jansson;
    }
    printf("json ids=%d bytes=%zu json_parse_ms=%.2f jansson_ms=%.2f ratio=%.1f best_of=%d\n",
           n_ids, text.len, best, best_jansson, best_jansson / best, RUNS);
    buf_fini(&text);
    return 0;
}
