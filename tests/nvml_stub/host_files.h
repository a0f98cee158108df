/* Reads the files of a host with stub GPUs, which nvml.c describes, for its library and the stand-in for CUDA. */

#ifndef HOST_FILES_H
#define HOST_FILES_H

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_BYTES 65536
#define NO_MIG (-1)
#define ANY (-1)
#define FIRST_BUS 0x10 /* PCI bus of card 0; card i has bus 0x10 + i */

typedef unsigned long long Bytes;

static int read_path(const char *path, char *text, size_t size) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    size_t length = 0;
    ssize_t got;
    while (length + 1 < size && (got = read(file, text + length, size - 1 - length)) > 0) length += (size_t)got;
    close(file);
    text[length] = 0;
    return 1;
}

static int read_stub(const char *name, char *text, size_t size) {
    const char *folder = getenv("NVML_STUB_DIR");
    char path[4096];
    text[0] = 0;
    if (folder == NULL || snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return 0;
    return read_path(path, text, size);
}

/* Find the line that starts with a word and a space. `value` is its rest. Returns the length of that, or -1. */
static int field(const char *text, const char *key, const char **value) {
    size_t length = strlen(key);
    for (const char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        if (strncmp(line, key, length) == 0 && line[length] == ' ') {
            *value = line + length + 1;
            return (int)strcspn(*value, "\n");
        }
    }
    return -1;
}

static long long number(const char *text, const char *key, long long absent) {
    const char *value;
    return field(text, key, &value) < 0 ? absent : strtoll(value, NULL, 10);
}

/* Return the start time of a process in clock ticks, which a later process with the same pid does not have.
 * Returns 0 if the process has ended. A zombie counts as ended, because its memory is free. */
static unsigned long long start_of(long pid) {
    char path[64], stat[2048], state = 0;
    unsigned long long start = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    if (!read_path(path, stat, sizeof stat)) return 0;
    char *rest = strrchr(stat, ')'); /* the name before the last ')' may contain any character */
    if (rest == NULL) return 0;
    sscanf(rest + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
           &start);
    return state == 'Z' || state == 'X' ? 0 : start;
}

/* Return 1 if the process that wrote this file still exists. */
static int alive(const char *file_name) {
    char *dot;
    long pid = strtol(file_name, &dot, 10);
    if (pid <= 0 || *dot != '.') return 0;
    unsigned long long start = start_of(pid);
    return start && start == strtoull(dot + 1, NULL, 10);
}

/* The list of NVML in which a program appears. */
enum { COMPUTE, GRAPHICS, MPS };

static int kind_of(const char *file_name) {
    if (strncmp(file_name, "program-", 8) == 0) return COMPUTE;
    if (strncmp(file_name, "graphics-", 9) == 0) return GRAPHICS;
    return strncmp(file_name, "mps-", 4) == 0 ? MPS : -1;
}

typedef struct {
    unsigned pid;
    Bytes bytes;
    char name[256];
    int kind;
} Use;

/* Call `each` for every use of a device, or of all devices (ANY). The uses of MIG devices count for their card. */
static void uses(int gpu, int mig, void (*each)(const Use *use, void *context), void *context) {
    const char *folder = getenv("NVML_STUB_DIR");
    char path[4096], text[TEXT_BYTES];
    if (folder == NULL || snprintf(path, sizeof path, "%s/use", folder) >= (int)sizeof path) return;
    DIR *names = opendir(path);
    if (names == NULL) return;
    for (struct dirent *entry; (entry = readdir(names)) != NULL;) {
        int simulated = entry->d_name[0] >= '0' && entry->d_name[0] <= '9';
        int kind = simulated ? COMPUTE : kind_of(entry->d_name);
        if (kind < 0) continue;
        if (snprintf(path, sizeof path, "%s/use/%s", folder, entry->d_name) >= (int)sizeof path) continue;
        if (!read_path(path, text, sizeof text)) continue;
        int known = !simulated;
        for (char *line = text; *line;) {
            char *end = line + strcspn(line, "\n");
            char *next = *end ? end + 1 : end;
            *end = 0;
            Use use = {.kind = kind};
            int on_gpu, on_mig;
            if (sscanf(line, "%u %d %d %llu %255[^\n]", &use.pid, &on_gpu, &on_mig, &use.bytes, use.name) >= 4 &&
                (gpu == ANY || on_gpu == gpu) && (mig == NO_MIG || on_mig == mig)) {
                if (!known && !alive(entry->d_name)) break;
                known = 1;
                each(&use, context);
            }
            line = next;
        }
    }
    closedir(names);
}

/* --- limits of control groups: limits/<gpu><group with % for />, "<soft> <hard> <group>" -------------------- */

/* Find the folder of a process's control group (version 2). Returns 0 if there is none. */
static int group_of(long pid, char *path, size_t size) {
    char name[64], text[TEXT_BYTES], mounts[TEXT_BYTES], point[4096] = "";
    snprintf(name, sizeof name, "/proc/%ld/cgroup", pid);
    if (!read_path(name, text, sizeof text) || !read_path("/proc/self/mounts", mounts, sizeof mounts)) return 0;
    char *type = strstr(mounts, " cgroup2 "), *own = strstr(text, "0::");
    if (type == NULL || own == NULL) return 0;
    while (type > mounts && type[-1] != '\n') type--;
    sscanf(type, "%*s %4095s", point);
    own[strcspn(own, "\n")] = 0;
    snprintf(path, size, "%s%s", point, strcmp(own + 3, "/") ? own + 3 : "");
    return 1;
}

static int is_within(const char *group, const char *above) {
    size_t length = strlen(above);
    return strncmp(group, above, length) == 0 && (group[length] == 0 || group[length] == '/');
}

typedef struct {
    const char *group;
    Bytes sum;
} GroupUse;

static void add_of_group(const Use *use, void *context) {
    GroupUse *sum = context;
    char group[8192];
    if (group_of(use->pid, group, sizeof group) && is_within(group, sum->group)) sum->sum += use->bytes;
}

static Bytes used_by_group(int gpu, const char *group) {
    GroupUse sum = {group, 0};
    uses(gpu, NO_MIG, add_of_group, &sum);
    return sum.sum;
}

/* Call `each` for every limit on a card. The limits of removed groups are left out. */
static void limits(int gpu, void (*each)(const char *group, Bytes soft, Bytes hard, void *context), void *context) {
    const char *folder = getenv("NVML_STUB_DIR");
    char path[4096], text[8192], group[4096];
    if (folder == NULL || snprintf(path, sizeof path, "%s/limits", folder) >= (int)sizeof path) return;
    DIR *names = opendir(path);
    if (names == NULL) return;
    for (struct dirent *entry; (entry = readdir(names)) != NULL;) {
        Bytes soft, hard;
        if (entry->d_name[0] == '.' || atoi(entry->d_name) != gpu) continue;
        if (snprintf(path, sizeof path, "%s/limits/%s", folder, entry->d_name) >= (int)sizeof path) continue;
        if (!read_path(path, text, sizeof text) || sscanf(text, "%llu %llu %4095s", &soft, &hard, group) != 3) continue;
        if (access(group, F_OK) == 0) each(group, soft, hard, context);
    }
    closedir(names);
}

#endif
