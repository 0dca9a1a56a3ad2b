/* Nanoseconds per hit, get and put, of the registration cache of UCX (ucs_rcache), with a registration that does nothing.
 * usage: ucx_rcache_hit REGIONS THREADS HITS: regions of 64 KiB with gaps of as much, asked for at random; each thread HITS times.
 * Prints one number. libs: -lucs -lpthread (Debian: libucx-dev)
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <ucs/memory/rcache.h>

#define REGION_BYTES (64ul << 10)
#define MAX_THREADS 64

static ucs_rcache_t *cache;
static char *base;
static uint64_t regions, hits;

static ucs_status_t reg(void *context, ucs_rcache_t *rcache, void *arg, ucs_rcache_region_t *region, uint16_t flags)
{
    (void)context; (void)rcache; (void)arg; (void)region; (void)flags;
    return UCS_OK;
}

static void dereg(void *context, ucs_rcache_t *rcache, ucs_rcache_region_t *region)
{
    (void)context; (void)rcache; (void)region;
}

static void dump(void *context, ucs_rcache_t *rcache, ucs_rcache_region_t *region, char *text, size_t max)
{
    (void)context; (void)rcache; (void)region;
    if (max > 0)
        text[0] = 0;
}

static int hit(uint64_t index)
{
    ucs_rcache_region_t *region;
    void *address = base + index * 2 * REGION_BYTES;
    if (ucs_rcache_get(cache, address, REGION_BYTES, PROT_READ | PROT_WRITE, NULL, &region) != UCS_OK)
        return 0;
    ucs_rcache_region_put(cache, region);
    return 1;
}

static void *look_up(void *seed)
{
    uint64_t x = 88172645463325252ull + (uintptr_t)seed;
    uintptr_t missed = 0;
    for (uint64_t i = 0; i < hits; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        missed += !hit(x % regions);
    }
    return (void *)missed;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    regions = strtoull(argv[1], NULL, 10);
    unsigned threads = strtoul(argv[2], NULL, 10);
    hits = strtoull(argv[3], NULL, 10);
    base = mmap(NULL, regions * 2 * REGION_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (regions == 0 || threads == 0 || threads > MAX_THREADS || base == MAP_FAILED)
        return 2;
    ucs_rcache_ops_t ops = {reg, dereg, dump};
    ucs_rcache_params_t params = {
        .region_struct_size = sizeof(ucs_rcache_region_t), .alignment = 64, .max_alignment = 4096, .ucm_events = 0, .ops = &ops,
        .flags = UCS_RCACHE_FLAG_NO_PFN_CHECK, .max_regions = -1, .max_size = -1, .max_unreleased = -1,
    };
    if (ucs_rcache_create(&params, "peer", NULL, &cache) != UCS_OK)
        return 1;
    for (uint64_t i = 0; i < regions; i++)
        if (!hit(i))
            return 1;
    pthread_t thread[MAX_THREADS];
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (unsigned i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, look_up, (void *)(uintptr_t)(i * 7919)))
            return 1;
    uintptr_t missed = 0;
    for (unsigned i = 0; i < threads; i++) {
        void *of_thread;
        pthread_join(thread[i], &of_thread);
        missed += (uintptr_t)of_thread;
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    printf("%.3f\n", ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / hits);
    return missed > 0;
}
