/* How much memory the CPU backend may draw from: the machine's, or its control group's when
 * that is less. Set-up only. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "cpu_impl.h"

/* The number after key at the start of a line of a file of "key number" lines; fallback when
 * there is none. An empty key takes the first line. */
static uint64_t read_number(const char *path, const char *key, uint64_t fallback)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return fallback;
    uint64_t found = fallback;
    char line[256];
    size_t key_len = strlen(key);
    while (fgets(line, sizeof line, f)) {
        unsigned long long n;
        if (strncmp(line, key, key_len) == 0 && sscanf(line + key_len, "%llu", &n) == 1) {
            found = n;
            break;
        }
    }
    fclose(f);
    return found;
}

/* The directory of this process's control group (version 2), without a slash at its end. */
static bool find_cgroup(char *dir, size_t cap)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f)
        return false;
    char line[1024];
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "0::/", 4) == 0) {
            int n = snprintf(dir, cap, "/sys/fs/cgroup%s", line[4] ? line + 3 : "");
            found = n > 0 && (size_t)n < cap;
        }
    }
    fclose(f);
    return found;
}

void cpu_memory(struct backend *b, size_t *free_bytes, size_t *total_bytes)
{
    (void)b;
    uint64_t total = read_number("/proc/meminfo", "MemTotal:", 0) * 1024;
    uint64_t room = read_number("/proc/meminfo", "MemAvailable:", 0) * 1024;
    char dir[1100], path[1200];
    if (find_cgroup(dir, sizeof dir)) {
        snprintf(path, sizeof path, "%s/memory.max", dir);
        uint64_t limit = read_number(path, "", UINT64_MAX);
        /* Only anonymous memory counts as taken: the page cache gives way. */
        snprintf(path, sizeof path, "%s/memory.stat", dir);
        uint64_t taken = read_number(path, "anon ", 0);
        uint64_t left = limit > taken ? limit - taken : 0;
        if (limit < total)
            total = limit;
        if (left < room)
            room = left;
    }
    *free_bytes = (size_t)room;
    *total_bytes = (size_t)total;
}
