/* The file of chosen products: what is written is read, and what is damaged counts as none. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gemm_cache.h"

static char dir[] = "/tmp/test_gemm_cache.XXXXXX";
static const char *const card = "Some Card 80GB";

static void setup(void)
{
    strcpy(dir + sizeof(dir) - 7, "XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
}

static void teardown(void)
{
    char command[64];
    snprintf(command, sizeof(command), "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

static struct gemm_record record(int32_t rows, uint32_t has_algo)
{
    struct gemm_record r = {
        .rows = rows, .cols = 2048, .is_f32 = 1, .max_rows = 8192, .has_algo = has_algo};
    for (int w = 0; w < GEMM_ALGO_WORDS; w++) {
        r.common.w[w] = UINT64_MAX - (uint64_t)w;
        for (int i = 0; i < GEMM_CACHE_BUCKETS; i++)
            if (has_algo >> i & 1)
                r.algo[i].w[w] = (uint64_t)(i * 100 + w);
    }
    return r;
}

static void open_cache(struct gemm_cache *c)
{
    cr_assert_eq(gemm_cache_open(c, dir, card, 130200), 0);
}

/* Two products in a file. */
static void write_two(void)
{
    struct gemm_cache c;
    struct gemm_record a = record(64, 0xfff), b = record(4096, 5);
    open_cache(&c);
    cr_assert_eq(c.n, 0);
    cr_assert(gemm_cache_add(&c, &a, NULL) == 0 && gemm_cache_add(&c, &b, NULL) == 0);
    gemm_cache_close(&c);
}

Test(gemm_cache, is_read_as_written, .init = setup, .fini = teardown)
{
    struct gemm_cache c;
    struct gemm_record a = record(64, 0xfff), b = record(4096, 5);
    write_two();
    open_cache(&c);
    cr_assert_eq(c.n, 2);
    cr_assert_eq(memcmp(gemm_cache_find(&c, 64, 2048, true, 8192), &a, sizeof(a)), 0);
    cr_assert_eq(memcmp(gemm_cache_find(&c, 4096, 2048, true, 8192), &b, sizeof(b)), 0);
    cr_assert(!gemm_cache_find(&c, 64, 2048, false, 8192));
    cr_assert(!gemm_cache_find(&c, 64, 2048, true, 4096));
    gemm_cache_close(&c);
}

Test(gemm_cache, replaces_a_record, .init = setup, .fini = teardown)
{
    struct gemm_cache c;
    struct gemm_record changed = record(64, 1);
    write_two();
    open_cache(&c);
    cr_assert_eq(gemm_cache_add(&c, &changed, NULL), 0);
    gemm_cache_close(&c);
    open_cache(&c);
    cr_assert_eq(c.n, 2);
    cr_assert_eq(memcmp(gemm_cache_find(&c, 64, 2048, true, 8192), &changed, sizeof(changed)),
                 0);
    gemm_cache_close(&c);
}

Test(gemm_cache, keeps_cards_and_versions_apart, .init = setup, .fini = teardown)
{
    struct gemm_cache c;
    write_two();
    cr_assert(gemm_cache_open(&c, dir, card, 130300) == 0 && c.n == 0);
    gemm_cache_close(&c);
    cr_assert(gemm_cache_open(&c, dir, "Some Card", 130200) == 0 && c.n == 0);
    gemm_cache_close(&c);
}

/* Each byte of the file changed, and each length that it may be cut to. */
Test(gemm_cache, takes_nothing_from_a_damaged_file, .init = setup, .fini = teardown)
{
    static char text[1 << 16], hurt[1 << 16];
    struct gemm_cache c;
    write_two();
    open_cache(&c);
    FILE *f = fopen(c.path, "r");
    size_t n = fread(text, 1, sizeof(text), f);
    fclose(f);
    cr_assert(n > 100 && n < sizeof(text));
    for (size_t i = 0; i < 2 * n; i++) {
        memcpy(hurt, text, n);
        if (i < n)
            hurt[i] ^= 1;
        f = fopen(c.path, "w");
        fwrite(hurt, 1, i < n ? n : i - n, f);
        fclose(f);
        struct gemm_cache again;
        open_cache(&again);
        /* The file's last byte, the newline, is not summed. */
        bool is_good = i == n - 1 || i == 2 * n - 1;
        cr_assert(again.n == (is_good ? 2 : 0), "byte %zu of %zu: %d records", i, n, again.n);
        gemm_cache_close(&again);
    }
    gemm_cache_close(&c);
}

Test(gemm_cache, says_where_it_cannot_write, .init = setup, .fini = teardown)
{
    struct gemm_cache c;
    struct errmsg e = {""};
    struct gemm_record a = record(64, 0);
    cr_assert_eq(gemm_cache_open(&c, "/nonexistent/folder", card, 1), 0);
    cr_assert_eq(gemm_cache_add(&c, &a, &e), ERR_IO);
    cr_assert(strstr(e.text, "/nonexistent/folder/products.Some_Card_80GB.1"), "%s", e.text);
    cr_assert_not_null(gemm_cache_find(&c, 64, 2048, true, 8192));
    gemm_cache_close(&c);
}

/* A file that cannot be replaced leaves no other beside it. */
Test(gemm_cache, leaves_nothing_behind, .init = setup, .fini = teardown)
{
    struct gemm_cache c;
    struct gemm_record a = record(64, 0);
    open_cache(&c);
    cr_assert_eq(mkdir(c.path, 0700), 0);
    cr_assert_eq(gemm_cache_add(&c, &a, NULL), ERR_IO);
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *entry; (entry = readdir(d));)
        n += entry->d_name[0] != '.';
    closedir(d);
    cr_assert_eq(n, 1);
    gemm_cache_close(&c);
}
