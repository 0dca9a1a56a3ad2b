/* nvidia-smi as far as checks ask it: `--query-gpu=memory.used … [-i UUID]`, MiB, a line for each GPU. */
#include "common.h"

#include <stdio.h>
#include <string.h>

int main(int count, char **words) {
    const char *only = NULL;
    for (int at = 1; at + 1 < count; at++)
        if (strcmp(words[at], "-i") == 0) only = words[at + 1];
    if (!machine()) return 9;
    for (unsigned at = 0; at < machine()->count; at++)
        if (!only || strcmp(only, machine()->gpus[at].uuid) == 0)
            printf("%lu\n", (unsigned long)(memory_used(at, 0) >> 20));
    return 0;
}
