/* One tokenizer, several threads: ids and text are those of one thread, and TSan sees no
 * race. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tap.h"
#include "tokenizer.h"

#define N_THREADS 4
#define N_ROUNDS 30

static const char *const texts[] = {
    "In the beginning God created the heaven and the earth.\n",
    "<|im_start|>user\nhello<|im_end|>\n",
    "\xe5\x88\x9d\xe3\x81\x82\xe3\x82\x8a e\xcc\x81\xcc\xa3 \xe1\x84\x80\xe1\x85\xa1",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "aaaaaa",
};
#define N_TEXTS 4

static const struct tokenizer *tokenizer;
static int32_t *want_ids[N_TEXTS], n_want[N_TEXTS];

/* Encodes and decodes all texts; adds one to *n_wrong for each that comes out in another
 * way. */
static void *work(void *n_wrong)
{
    for (int i = 0; i < N_ROUNDS * N_TEXTS; i++) {
        int k = i % N_TEXTS;
        struct buf text;
        int32_t *ids = NULL, n = 0;
        if (tokenizer_encode(tokenizer, texts[k], strlen(texts[k]), 0, &ids, &n, NULL) != 0 ||
            n != n_want[k] || memcmp(ids, want_ids[k], (size_t)n * sizeof(*ids)) != 0)
            ++*(int *)n_wrong;
        buf_init(&text);
        tokenizer_decode(tokenizer, ids, (size_t)n, false, &text);
        if (k < 2 &&
            (text.len != strlen(texts[k]) || memcmp(text.data, texts[k], text.len) != 0))
            ++*(int *)n_wrong;
        buf_fini(&text);
        free(ids);
    }
    return NULL;
}

int main(void)
{
    const char *root = getenv("SRCDIR");
    char path[1024];
    struct tokenizer *t;
    struct errmsg e = {""};
    pthread_t threads[N_THREADS];
    int n_wrong[N_THREADS] = {0};

    snprintf(path, sizeof(path), "%s/tests/models/demo/tokenizer.json", root ? root : ".");
    if (!CHECK(tokenizer_load(path, &t, &e) == 0, "load %s", e.text))
        return tap_done();
    tokenizer = t;
    for (int k = 0; k < N_TEXTS; k++)
        CHECK(tokenizer_encode(t, texts[k], strlen(texts[k]), 0, &want_ids[k], &n_want[k],
                               &e) == 0,
              "text %d by one thread", k);
    for (int i = 0; i < N_THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, &n_wrong[i]) != 0)
            return 1;
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(n_wrong[i] == 0, "thread %d", i);
    }
    for (int k = 0; k < N_TEXTS; k++)
        free(want_ids[k]);
    tokenizer_free(t);
    return tap_done();
}
