/* nvidia-smi as far as checks ask it: `--query-gpu=memory.used … [-i UUID]`, MiB, a line for each GPU; `topo -m`;
 * `nvlink -s`. */
#include "common.h"

#include <stdio.h>
#include <string.h>

static unsigned links_to(const struct gpu *gpu, const char *bdf) {
    unsigned links = 0;
    for (unsigned at = 0; at < gpu->end_count; at++)
        if (strcmp(gpu->ends[at].bdf, bdf) == 0) links += gpu->ends[at].links;
    return links;
}

/* GPUs on switches reach each other by as many links as both have. */
static void print_cell(const struct gpu *from, const struct gpu *to) {
    unsigned direct = links_to(from, to->bdf), near = links_to(from, ""), far = links_to(to, "");
    unsigned links = direct ? direct : near < far ? near : far;
    if (from == to) printf("\t X ");
    else if (links) printf("\tNV%u", links);
    else printf("\tSYS");
}

static int print_matrix(void) {
    for (unsigned at = 0; at < machine()->count; at++) printf("\tGPU%u", at);
    printf("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n");
    for (unsigned from = 0; from < machine()->count; from++) {
        printf("GPU%u", from);
        for (unsigned to = 0; to < machine()->count; to++) print_cell(&machine()->gpus[from], &machine()->gpus[to]);
        printf("\t0-3\t0\t\tN/A\n");
    }
    printf("\nLegend:\n\n  X    = Self\n");
    return 0;
}

static int print_links(void) {
    for (unsigned at = 0; at < machine()->count; at++) {
        const struct gpu *gpu = &machine()->gpus[at];
        unsigned links = 0;
        printf("GPU %u: Fake GPU (UUID: %s)\n", at, gpu->uuid);
        for (unsigned end = 0; end < gpu->end_count; end++) links += gpu->ends[end].links;
        for (unsigned link = 0; link < links; link++) printf("\t Link %u: 26.562 GB/s\n", link);
    }
    return 0;
}

int main(int count, char **words) {
    const char *only = NULL;
    for (int at = 1; at + 1 < count; at++)
        if (strcmp(words[at], "-i") == 0) only = words[at + 1];
    if (!machine()) return 9;
    if (count > 1 && strcmp(words[1], "topo") == 0) return print_matrix();
    if (count > 1 && strcmp(words[1], "nvlink") == 0) return print_links();
    for (unsigned at = 0; at < machine()->count; at++)
        if (!only || strcmp(only, machine()->gpus[at].uuid) == 0)
            printf("%lu\n", (unsigned long)(memory_used(at, 0) >> 20));
    return 0;
}
