/* libcuda: the driver API that workers and clients of gdrd call, over memfds. Addresses on a GPU are addresses of this
 * process. Asynchronous are memsets of a GPU with `late=1` only: they are done when somebody waits. Structures and numbers
 * are those of cuda.h. */
#include "common.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    NO_PEER = 217, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801,
};
enum { MAX_RANGES = 4096, MAX_STACK = 16 };
#define GRANULARITY (2ull << 20)

struct location { unsigned kind; int id; };
struct properties {
    unsigned kind, handle_types;
    struct location location;
    void *windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access { struct location location; unsigned flags; };

struct handle { int fd; int gpu; uint64_t len; };
struct range { uint64_t start, len; int gpu; int fd; unsigned open_to; uint64_t id; };
struct context { int device; int memory; int retained; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[MAX_RANGES];
static struct context contexts[MAX_GPUS];
static int visible[MAX_GPUS], visible_count;
/* Number of the allocation mapped last, and where memory was freed last: a driver gives that address again. */
static uint64_t last_id, freed_at, freed_len;
/* Work that is queued and not done, in its order. */
static struct fill { uint64_t to; size_t len; unsigned char byte; } fills[64];
static unsigned fill_count;
static __thread struct context *stack[MAX_STACK];
static __thread int depth;

static const struct gpu *gpu_of(int device) { return &machine()->gpus[device]; }

int cuInit(unsigned flags) {
    if (flags) return INVALID;
    if (!machine()) return NO_DEVICE;
    pthread_mutex_lock(&lock);
    visible_count = 0;
    const char *only = getenv("CUDA_VISIBLE_DEVICES");
    for (unsigned at = 0; at < machine()->count; at++)
        if ((!only || strstr(only, machine()->gpus[at].uuid)) && !machine()->gpus[at].lost)
            visible[visible_count++] = (int)at;
    pthread_mutex_unlock(&lock);
    return visible_count ? OK : NO_DEVICE;
}

int cuGetErrorName(unsigned code, const char **name) {
    switch (code) {
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case INVALID: *name = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case NO_PEER: *name = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"; return OK;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return OK;
    default: *name = NULL; return INVALID;
    }
}

int cuDeviceGetCount(int *count) { *count = visible_count; return OK; }

int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= visible_count) return INVALID_DEVICE;
    *device = visible[ordinal];
    return OK;
}

int cuDeviceGetUuid_v2(unsigned char *bytes, int device) {
    const char *text = gpu_of(device)->uuid + 4;
    for (int at = 0; at < 16; at++) {
        unsigned byte = 0;
        while (*text == '-') text++;
        if (sscanf(text, "%2x", &byte) != 1) return INVALID;
        bytes[at] = (unsigned char)byte;
        text += 2;
    }
    return OK;
}

int cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    *value = attribute != 100 || gpu_of(device)->is_coherent; /* ..._USES_HOST_PAGE_TABLES */
    return OK;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer && gpu_of(device)->has_peers && gpu_of(peer)->has_peers;
    return OK;
}

int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { (void)device, (void)flags; return OK; }

int cuDevicePrimaryCtxRetain(struct context **context, int device) {
    pthread_mutex_lock(&lock);
    struct context *own = &contexts[device];
    if (!own->retained++) {
        own->device = device;
        own->memory = memory_create((unsigned)device, gpu_of(device)->context_bytes);
    }
    *context = own;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    pthread_mutex_lock(&lock);
    struct context *own = &contexts[device];
    if (own->retained && !--own->retained && own->memory >= 0) close(own->memory);
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuCtxSetCurrent(struct context *context) {
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

int cuCtxPushCurrent_v2(struct context *context) {
    if (depth >= MAX_STACK) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

int cuCtxPopCurrent_v2(struct context **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return OK;
}

static int current(void) { return depth && stack[depth - 1] ? stack[depth - 1]->device : -1; }

/* What was queued is done, as it is by the time that a wait for it returns. */
static int do_fills(void) {
    pthread_mutex_lock(&lock);
    for (unsigned at = 0; at < fill_count; at++) memset((void *)fills[at].to, fills[at].byte, fills[at].len);
    fill_count = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* No cuCtxSetFlags, as a driver before CUDA 12.1 has none. */
int cuCtxGetFlags(unsigned *flags) { *flags = 0; return OK; }
int cuCtxSynchronize(void) { return current() < 0 ? INVALID_CONTEXT : do_fills(); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    *stream = (void *)8;
    return current() < 0 ? INVALID_CONTEXT : OK;
}
int cuStreamSynchronize(void *stream) { (void)stream; return do_fills(); }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = (void *)8; return OK; }
int cuEventRecord(void *event, void *stream) { (void)event, (void)stream; return OK; }
int cuEventSynchronize(void *event) { (void)event; return do_fills(); }
int cuEventDestroy_v2(void *event) { (void)event; return OK; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (current() < 0) return INVALID_CONTEXT;
    *total = gpu_of(current())->total_bytes;
    uint64_t used = memory_used((unsigned)current(), 0);
    *free_bytes = used < *total ? *total - used : 0;
    return OK;
}

int cuMemGetAllocationGranularity(size_t *bytes, const struct properties *properties, unsigned option) {
    (void)properties, (void)option;
    *bytes = GRANULARITY;
    return OK;
}

static int handle_of(struct handle **handle, int fd, int gpu, uint64_t len) {
    *handle = malloc(sizeof **handle);
    if (!*handle) return OUT_OF_MEMORY;
    **handle = (struct handle){fd, gpu, len};
    return OK;
}

int cuMemCreate(struct handle **handle, size_t len, const struct properties *properties, unsigned long long flags) {
    int device = properties->location.id;
    if (flags || !len || len % GRANULARITY) return INVALID;
    if (len > gpu_of(device)->total_bytes ||
        memory_used((unsigned)device, 0) > gpu_of(device)->total_bytes - len)
        return OUT_OF_MEMORY;
    int fd = memory_create((unsigned)device, len);
    return fd < 0 ? OUT_OF_MEMORY : handle_of(handle, fd, device, len);
}

int cuMemImportFromShareableHandle(struct handle **handle, void *number, unsigned type) {
    int fd = (int)(intptr_t)number, gpu = type == 1 ? memory_gpu(fd) : -1;
    struct stat stat;
    if (gpu < 0 || fstat(fd, &stat) != 0) return INVALID;
    if (current() < 0) return INVALID_CONTEXT;
    return handle_of(handle, fcntl(fd, F_DUPFD_CLOEXEC, 0), gpu, (uint64_t)stat.st_size);
}

int cuMemExportToShareableHandle(int *fd, struct handle *handle, unsigned type, unsigned long long flags) {
    if (type != 1 || flags) return INVALID;
    *fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? INVALID : OK;
}

int cuMemRelease(struct handle *handle) {
    close(handle->fd);
    free(handle);
    return OK;
}

/* With the lock held. */
static struct range *range_at(uint64_t address, uint64_t len) {
    for (int at = 0; at < MAX_RANGES; at++)
        if (ranges[at].len && address >= ranges[at].start && len <= ranges[at].len &&
            address - ranges[at].start <= ranges[at].len - len)
            return &ranges[at];
    return NULL;
}

int cuMemAddressReserve(uint64_t *start, size_t len, size_t alignment, uint64_t wish, unsigned long long flags) {
    (void)alignment, (void)flags;
    int fixed = wish ? MAP_FIXED_NOREPLACE : 0;
    void *memory = mmap((void *)wish, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    if (memory == MAP_FAILED && wish)
        memory = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    int result = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_RANGES && result; at++)
        if (!ranges[at].len) {
            ranges[at] = (struct range){(uint64_t)memory, len, -1, -1, 0, 0};
            *start = (uint64_t)memory;
            result = OK;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemAddressFree(uint64_t start, size_t len) {
    pthread_mutex_lock(&lock);
    struct range *range = range_at(start, len);
    if (range) range->len = 0;
    pthread_mutex_unlock(&lock);
    return range && munmap((void *)start, len) == 0 ? OK : INVALID;
}

int cuMemMap(uint64_t start, size_t len, size_t offset, struct handle *handle, unsigned long long flags) {
    (void)flags;
    if (offset + len > handle->len) return INVALID;
    void *at = mmap((void *)start, len, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, (off_t)offset);
    pthread_mutex_lock(&lock);
    struct range *range = range_at(start, len);
    if (range) {
        range->gpu = handle->gpu;
        range->id = ++last_id;
        /* As the driver's mappings do, it keeps the memory of a released handle. */
        range->fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 0);
    }
    pthread_mutex_unlock(&lock);
    return at == MAP_FAILED || !range ? INVALID : OK;
}

int cuMemUnmap(uint64_t start, size_t len) {
    do_fills();
    pthread_mutex_lock(&lock);
    struct range *range = range_at(start, len);
    if (range && range->fd >= 0) close(range->fd);
    if (range) range->fd = range->gpu = -1, range->id = 0;
    pthread_mutex_unlock(&lock);
    void *at = mmap((void *)start, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return range && at != MAP_FAILED ? OK : INVALID;
}

int cuMemSetAccess(uint64_t start, size_t len, const struct access *access, size_t count) {
    int result = OK;
    pthread_mutex_lock(&lock);
    struct range *range = range_at(start, len);
    if (!range || range->gpu < 0) result = INVALID;
    for (size_t at = 0; at < count && !result; at++) {
        int device = access[at].location.id, can = 0;
        if (device != range->gpu && (cuDeviceCanAccessPeer(&can, device, range->gpu) != OK || !can)) result = NO_PEER;
        else range->open_to |= 1u << device;
    }
    pthread_mutex_unlock(&lock);
    if (!result && mprotect((void *)start, len, PROT_READ | PROT_WRITE) != 0) result = INVALID;
    return result;
}

/* A dma-buf of the range: a file of its own on the same memory. */
int cuMemGetHandleForAddressRange(int *fd, uint64_t start, size_t len, unsigned type, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    struct range *range = range_at(start, len);
    int refuses = flags && range && range->gpu >= 0 && !gpu_of(range->gpu)->is_coherent;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", range ? range->fd : -1);
    pthread_mutex_unlock(&lock);
    if (refuses) return NOT_SUPPORTED;
    *fd = type == 1 ? open(path, O_RDWR | O_CLOEXEC) : -1;
    return *fd < 0 ? INVALID : OK;
}

int cuMemAlloc_v2(uint64_t *start, size_t len) {
    int device = current();
    if (device < 0) return INVALID_CONTEXT;
    if (!len) return INVALID;
    len = (len + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    struct properties properties = {.location = {1, device}};
    struct access access = {{1, device}, 3};
    struct handle *handle = NULL;
    int result = cuMemCreate(&handle, len, &properties, 0);
    if (result) return result;
    result = cuMemAddressReserve(start, len, 0, freed_len == len ? freed_at : 0, 0);
    if (!result && !(result = cuMemMap(*start, len, 0, handle, 0))) result = cuMemSetAccess(*start, len, &access, 1);
    cuMemRelease(handle);
    return result;
}

int cuMemFree_v2(uint64_t start) {
    pthread_mutex_lock(&lock);
    struct range *range = range_at(start, 1);
    uint64_t len = range && range->start == start ? range->len : 0;
    pthread_mutex_unlock(&lock);
    if (!len) return INVALID;
    int result = cuMemUnmap(start, len);
    if (!result) result = cuMemAddressFree(start, len);
    freed_at = start, freed_len = len;
    return result;
}

/* BUFFER_ID is asked for by 7, the ordinal by 9; every other attribute that is asked for holds. */
int cuPointerGetAttribute(void *value, unsigned attribute, uint64_t address) {
    pthread_mutex_lock(&lock);
    struct range *range = range_at(address, 1);
    uint64_t id = range ? range->id : 0;
    int gpu = range ? range->gpu : -1, ordinal = 0;
    pthread_mutex_unlock(&lock);
    if (!id) return INVALID;
    while (ordinal < visible_count && visible[ordinal] != gpu) ordinal++;
    if (attribute == 7) *(uint64_t *)value = id;
    else if (attribute == 9) *(int *)value = ordinal;
    else *(unsigned *)value = 1;
    return OK;
}

/* Whether the current context's GPU may touch that memory. */
static int may(uint64_t address, size_t len) {
    int device = current();
    pthread_mutex_lock(&lock);
    struct range *range = range_at(address, len);
    int result = device < 0 ? INVALID_CONTEXT
                 : range && range->open_to & 1u << device ? OK : ILLEGAL_ADDRESS;
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t len) {
    int refused = may(to, len);
    if (refused) return refused;
    pthread_mutex_lock(&lock);
    int is_late = gpu_of(current())->is_late && fill_count < sizeof fills / sizeof *fills;
    if (is_late) fills[fill_count++] = (struct fill){to, len, byte};
    pthread_mutex_unlock(&lock);
    if (!is_late) do_fills(), memset((void *)to, byte, len);
    return OK;
}

int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t len) {
    int refused = may(to, len) ? may(to, len) : may(from, len);
    do_fills();
    if (!refused) memmove((void *)to, (void *)from, len);
    return refused;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t len) {
    int refused = may(from, len);
    do_fills();
    if (!refused) memcpy(to, (void *)from, len);
    return refused;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t len) {
    int refused = may(to, len);
    do_fills();
    if (!refused) memcpy((void *)to, from, len);
    return refused;
}

int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t len, void *stream) {
    (void)stream;
    return cuMemsetD8_v2(to, byte, len);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t len, void *stream) {
    (void)stream;
    return cuMemcpyDtoD_v2(to, from, len);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t len, void *stream) {
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, len);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t len, void *stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, len);
}

int cuMemHostAlloc(void **memory, size_t len, unsigned flags) {
    (void)flags;
    *memory = aligned_alloc(4096, len);
    return *memory ? OK : OUT_OF_MEMORY;
}
/* A driver that refuses this keeps the memory, which shows nowhere: so the process ends. */
int cuMemFreeHost(void *memory) {
    if (current() < 0) abort();
    free(memory);
    return OK;
}
