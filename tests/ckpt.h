/* Checkpoints written by tests: any safetensors file, right or wrong, in a directory of its own
 * under $TMPDIR. Element i of a tensor is a small integer drawn from (name, i), exact in every
 * dtype, so that a row says where it came from. */
#ifndef PREFILLD_TESTS_CKPT_H
#define PREFILLD_TESTS_CKPT_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "buf.h"
#include "safetensors.h"

/* In [-127, 127]: bf16 has 8 bits of significand. */
__attribute__((unused)) static float ckpt_value(const char *name, size_t i)
{
    uint64_t h = 0xcbf29ce484222325ull;
    for (const char *c = name; *c; c++)
        h = (h ^ (unsigned char)*c) * 0x100000001b3ull;
    h = (h + i) * 0x9e3779b97f4a7c15ull;
    h = (h ^ (h >> 32)) * 0x9e3779b97f4a7c15ull;
    return (float)((int32_t)((h >> 32) % 255) - 127);
}

/* Exact for the values above, and for any value that the dtype can hold with 8 bits. */
__attribute__((unused)) static void ckpt_encode(float x, enum st_dtype d, unsigned char *out)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (d == ST_F32) {
        memcpy(out, &bits, 4);
    } else if (d == ST_BF16) {
        uint16_t h = (uint16_t)(bits >> 16);
        memcpy(out, &h, 2);
    } else if (d == ST_F16) {
        uint32_t exponent = (bits >> 23) & 255;
        uint16_t h = exponent == 0 ? 0
                                   : (uint16_t)((bits >> 16 & 0x8000) | (exponent - 112) << 10 |
                                                (bits >> 13 & 0x3ff));
        memcpy(out, &h, 2);
    } else {
        memset(out, 0x3c, st_dtype_bytes(d));
    }
}

/* Element i of a tensor of F32, BF16 or F16 (normal numbers and 0). */
__attribute__((unused)) static float ckpt_element(const struct st_tensor *t, size_t i)
{
    const char *at = (const char *)t->data + i * st_dtype_bytes(t->dtype);
    uint16_t h;
    uint32_t bits = 0;
    float x;
    if (t->dtype == ST_F32) {
        memcpy(&bits, at, 4);
    } else {
        memcpy(&h, at, 2);
        if (t->dtype == ST_BF16)
            bits = (uint32_t)h << 16;
        else if (h & 0x7fff)
            bits = ((uint32_t)(h & 0x8000) << 16) |
                   (((uint32_t)(h & 0x7fff) << 13) + (112u << 23));
    }
    memcpy(&x, &bits, 4);
    return x;
}

struct ckpt {
    struct buf header, data; /* header without its closing brace */
};

__attribute__((unused)) static void ckpt_init(struct ckpt *c)
{
    buf_init(&c->header);
    buf_init(&c->data);
    buf_adds(&c->header, "{\"__metadata__\":{\"format\":\"pt\"}");
}

__attribute__((unused)) static void ckpt_fini(struct ckpt *c)
{
    buf_fini(&c->header);
    buf_fini(&c->data);
}

/* dims end with 0. Returns where the tensor's data is in c->data. */
__attribute__((unused)) static size_t ckpt_add(struct ckpt *c, const char *name,
                                               enum st_dtype dtype, const int64_t *dims)
{
    size_t n = 1, from = c->data.len;
    buf_printf(&c->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, st_dtype_name(dtype));
    for (int i = 0; dims[i]; i++) {
        n *= (size_t)dims[i];
        buf_printf(&c->header, "%s%lld", i ? "," : "", (long long)dims[i]);
    }
    for (size_t i = 0; i < n; i++) {
        unsigned char element[8];
        ckpt_encode(ckpt_value(name, i), dtype, element);
        buf_add(&c->data, element, st_dtype_bytes(dtype));
    }
    buf_printf(&c->header, "],\"data_offsets\":[%zu,%zu]}", from, c->data.len);
    return from;
}

/* A file of a header (as it is) and n_data bytes of data; the length field says header_len. */
__attribute__((unused)) static void ckpt_write_raw(const char *path, uint64_t header_len,
                                                   const char *header, size_t n_header,
                                                   const void *data, size_t n_data)
{
    FILE *f = fopen(path, "wb");
    if (!f)
        abort();
    fwrite(&header_len, 8, 1, f); /* tests run on little-endian machines */
    fwrite(header, 1, n_header, f);
    if (data)
        fwrite(data, 1, n_data, f);
    else if (n_data && (fflush(f) != 0 || ftruncate(fileno(f), (off_t)(8 + n_header + n_data))))
        abort();
    if (fclose(f) != 0)
        abort();
}

/* Pads the header so that data starts at 8 n + skew. */
__attribute__((unused)) static void ckpt_write(struct ckpt *c, const char *path, size_t skew)
{
    struct buf h;
    buf_init(&h);
    buf_add(&h, c->header.data, c->header.len);
    buf_addc(&h, '}');
    while (h.len % 8 != skew)
        buf_addc(&h, ' ');
    ckpt_write_raw(path, h.len, h.data, h.len, c->data.data, c->data.len);
    buf_fini(&h);
}

/* ---- directories ---- */

struct ckpt_dir {
    char path[256];
    char file[512];
};

__attribute__((unused)) static void ckpt_dir_open(struct ckpt_dir *d)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(d->path, sizeof(d->path), "%s/prefilld-test-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(d->path))
        abort();
}

/* The path of a file in it; overwritten by the next call. */
__attribute__((unused)) static const char *ckpt_dir_file(struct ckpt_dir *d, const char *name)
{
    snprintf(d->file, sizeof(d->file), "%s/%s", d->path, name);
    return d->file;
}

__attribute__((unused)) static void ckpt_dir_put(struct ckpt_dir *d, const char *name,
                                                 const char *text)
{
    FILE *f = fopen(ckpt_dir_file(d, name), "wb");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0)
        abort();
}

/* Removes its files and itself. */
__attribute__((unused)) static void ckpt_dir_close(struct ckpt_dir *d)
{
    DIR *dir = opendir(d->path);
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (e->d_name[0] != '.' && unlink(ckpt_dir_file(d, e->d_name)) != 0)
            rmdir(d->file);
    if (dir)
        closedir(dir);
    rmdir(d->path);
}

#endif
