/* The machine that the fake driver shows: GPUs from a text file beside the library, memory as memfds.
 *
 * Memory in use is what the kernel says: every memfd of ours that some process has open or mapped. So what a killed
 * process held comes back by itself, and what only a descriptor holds is in use by no process, as with the real driver. */
#ifndef GDRD_FAKE_COMMON_H
#define GDRD_FAKE_COMMON_H

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>

enum { MAX_GPUS = 16, MAX_ENDS = 18 };

struct end {
    char bdf[32]; /* empty for a switch */
    unsigned links;
};

struct gpu {
    char uuid[80];
    char bdf[32];
    uint64_t total_bytes;
    uint64_t context_bytes;
    unsigned mode, mig, has_mig, lost, fabric, has_peers, is_late, is_coherent;
    struct end ends[MAX_ENDS];
    unsigned end_count;
};

struct machine {
    struct gpu gpus[MAX_GPUS];
    unsigned count;
    char folder[256]; /* where the library lies */
    uint64_t tag;     /* tells machines apart in /proc */
};

/* The machine, read at the first call; NULL without a description. */
const struct machine *machine(void);
/* A memfd of that GPU's memory, of that length. */
int memory_create(unsigned gpu, uint64_t len_bytes);
/* The GPU whose memory a descriptor is, or -1. */
int memory_gpu(int fd);
/* Bytes in use on a GPU; by one process only, unless pid is 0. */
uint64_t memory_used(unsigned gpu, int pid);

#endif
