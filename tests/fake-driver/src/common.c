#include "common.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct machine the_machine;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* One line a GPU: `gpu UUID BDF MEMORY_MIB [key=value…]`. */
static void read_gpu(char *line) {
    struct gpu *gpu = &the_machine.gpus[the_machine.count];
    unsigned long memory_mib = 0;
    if (sscanf(line, "gpu %79s %31s %lu", gpu->uuid, gpu->bdf, &memory_mib) != 3) return;
    gpu->total_bytes = (uint64_t)memory_mib << 20;
    gpu->context_bytes = 16ull << 20;
    gpu->has_mig = 1;
    gpu->has_peers = 1;
    char *save = NULL;
    for (char *word = strtok_r(line, " \n", &save); word; word = strtok_r(NULL, " \n", &save)) {
        char value[32] = "";
        unsigned number = 0, links = 0;
        if (sscanf(word, "mode=%u", &number) == 1) gpu->mode = number;
        if (sscanf(word, "mig=%u", &number) == 1) gpu->mig = number;
        if (sscanf(word, "has_mig=%u", &number) == 1) gpu->has_mig = number;
        if (sscanf(word, "lost=%u", &number) == 1) gpu->lost = number;
        if (sscanf(word, "fabric=%u", &number) == 1) gpu->fabric = number;
        if (sscanf(word, "peers=%u", &number) == 1) gpu->has_peers = number;
        if (sscanf(word, "coherent=%u", &number) == 1) gpu->is_coherent = number;
        if (sscanf(word, "late=%u", &number) == 1) gpu->is_late = number;
        if (sscanf(word, "context_mib=%u", &number) == 1) gpu->context_bytes = (uint64_t)number << 20;
        /* links=switch/18 or links=00000000:07:00.0/4 */
        if (sscanf(word, "links=%31[^/]/%u", value, &links) == 2 && gpu->end_count < MAX_ENDS) {
            struct end *end = &gpu->ends[gpu->end_count++];
            if (strcmp(value, "switch") != 0) snprintf(end->bdf, sizeof end->bdf, "%s", value);
            end->links = links;
        }
    }
    the_machine.count++;
}

static void read_machine(void) {
    Dl_info info;
    if (!dladdr((void *)read_machine, &info) || !info.dli_fname) return;
    char path[512];
    snprintf(the_machine.folder, sizeof the_machine.folder, "%s", info.dli_fname);
    /* A program's own name is as it was typed. */
    if (!strchr(info.dli_fname, '/')) {
        ssize_t len = readlink("/proc/self/exe", the_machine.folder, sizeof the_machine.folder - 1);
        the_machine.folder[len > 0 ? len : 0] = 0;
    }
    char *slash = strrchr(the_machine.folder, '/');
    if (slash) *slash = 0; else strcpy(the_machine.folder, ".");
    snprintf(path, sizeof path, "%s/gpus", the_machine.folder);
    FILE *file = fopen(path, "re");
    if (!file) return;
    struct stat stat;
    if (fstat(fileno(file), &stat) == 0) the_machine.tag = stat.st_ino;
    char line[1024];
    while (fgets(line, sizeof line, file) && the_machine.count < MAX_GPUS) read_gpu(line);
    fclose(file);
}

const struct machine *machine(void) {
    pthread_once(&once, read_machine);
    return the_machine.count ? &the_machine : NULL;
}

static void name_of(char *name, size_t len, unsigned gpu) {
    snprintf(name, len, "gdrd-fake-%lu-gpu%u", (unsigned long)the_machine.tag, gpu);
}

int memory_create(unsigned gpu, uint64_t len_bytes) {
    char name[64];
    name_of(name, sizeof name, gpu);
    /* A daemon adopts it as it does any memfd: simulated HCAs know no dma-buf of this driver. */
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, (off_t)len_bytes) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

int memory_gpu(int fd) {
    char path[64], link[128], name[80];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(path, link, sizeof link - 1);
    if (len <= 0) return -1;
    link[len] = 0;
    for (unsigned gpu = 0; gpu < the_machine.count; gpu++) {
        strcpy(name, "/memfd:");
        name_of(name + 7, sizeof name - 7, gpu);
        size_t own = strlen(name);
        if (strncmp(link, name, own) == 0 && (link[own] == 0 || link[own] == ' ')) return (int)gpu;
    }
    return -1;
}

struct seen {
    uint64_t inodes[65536];
    size_t count;
};

static int is_new(struct seen *seen, uint64_t inode) {
    for (size_t at = 0; at < seen->count; at++)
        if (seen->inodes[at] == inode) return 0;
    if (seen->count < sizeof seen->inodes / sizeof *seen->inodes) seen->inodes[seen->count++] = inode;
    return 1;
}

static uint64_t used_by(const char *pid, const char *name, struct seen *seen) {
    uint64_t bytes = 0;
    char path[320], link[128];
    size_t own = strlen(name);
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    DIR *fds = opendir(path);
    for (struct dirent *entry; fds && (entry = readdir(fds));) {
        snprintf(path, sizeof path, "/proc/%s/fd/%s", pid, entry->d_name);
        ssize_t len = readlink(path, link, sizeof link - 1);
        struct stat stat_of;
        if (len <= 0) continue;
        link[len] = 0;
        if (strncmp(link, name, own) == 0 && link[own] == ' ' && stat(path, &stat_of) == 0 &&
            is_new(seen, stat_of.st_ino))
            bytes += (uint64_t)stat_of.st_size;
    }
    if (fds) closedir(fds);
    snprintf(path, sizeof path, "/proc/%s/maps", pid);
    FILE *maps = fopen(path, "re");
    char line[512];
    while (maps && fgets(line, sizeof line, maps)) {
        char *at = strstr(line, name);
        unsigned long start, end, inode;
        if (at && at[own] == ' ' && sscanf(line, "%lx-%lx %*s %*s %*s %lu", &start, &end, &inode) == 3 &&
            is_new(seen, inode))
            bytes += end - start;
    }
    if (maps) fclose(maps);
    return bytes;
}

uint64_t memory_used(unsigned gpu, int pid) {
    char name[80] = "/memfd:", number[16];
    name_of(name + 7, sizeof name - 7, gpu);
    struct seen *seen = calloc(1, sizeof *seen);
    if (!seen) return 0;
    uint64_t bytes = 0;
    if (pid) {
        snprintf(number, sizeof number, "%d", pid);
        bytes = used_by(number, name, seen);
    } else {
        DIR *proc = opendir("/proc");
        for (struct dirent *entry; proc && (entry = readdir(proc));)
            if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') bytes += used_by(entry->d_name, name, seen);
        if (proc) closedir(proc);
    }
    free(seen);
    return bytes;
}
