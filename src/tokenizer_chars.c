/* The flags of every code point, in blocks of which equal ones are shared: about 40 KB that
 * stay in the cache, where a flat table would be 1.1 MB. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_internal.h"

/* block_of holds a byte; the generated data make about 150 different blocks. */
#define MAX_BLOCKS 256

/* The flags of one block's code points; *run is the run that holds the first of them, and
 * becomes the one that holds the last. */
static void fill_block(uint32_t block, size_t *run, uint8_t flags[CHAR_BLOCK])
{
    const uint32_t first = block * CHAR_BLOCK;
    for (uint32_t i = 0; i < CHAR_BLOCK;) {
        size_t next = *run + 1;
        uint32_t end = CHAR_BLOCK; /* of this run, in this block */
        if (next < tokenizer_unicode_n_runs &&
            tokenizer_unicode_runs[next] >> 8 < first + CHAR_BLOCK)
            end = (tokenizer_unicode_runs[next] >> 8) - first;
        memset(flags + i, (uint8_t)tokenizer_unicode_runs[*run], end - i);
        i = end;
        if (i < CHAR_BLOCK)
            *run = next;
    }
}

int char_table_init(struct char_table *c)
{
    size_t n_blocks = 0, run = 0;

    c->blocks = malloc((size_t)MAX_BLOCKS * CHAR_BLOCK);
    if (!c->blocks)
        return ERR_NOMEM;
    for (uint32_t block = 0; block < CHAR_N_BLOCKS; block++) {
        uint8_t flags[CHAR_BLOCK];
        fill_block(block, &run, flags);
        size_t same = n_blocks;
        while (same > 0 && memcmp(c->blocks + (same - 1) * CHAR_BLOCK, flags, CHAR_BLOCK) != 0)
            same--;
        if (same == 0) {
            if (n_blocks == MAX_BLOCKS) {
                char_table_fini(c);
                return ERR_TOO_LARGE;
            }
            memcpy(c->blocks + n_blocks * CHAR_BLOCK, flags, CHAR_BLOCK);
            same = ++n_blocks;
        }
        c->block_of[block] = (uint8_t)(same - 1);
    }
    return 0;
}

void char_table_fini(struct char_table *c)
{
    free(c->blocks);
    c->blocks = NULL;
}
