/* libnvidia-ml: what gdrd-nvml asks. Structures and numbers are those of nvml.h. */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, NO_DRIVER = 9, TIMEOUT = 10, GPU_LOST = 15,
};
enum { UNCORRECTED = 1 };
enum { EVENT_XID = 8, EVENT_DOUBLE_BIT_ECC = 2 };
enum { FIELD_RECOVERY_ACTION = 230, TYPE_UNSIGNED = 1 };

typedef const struct gpu *device;

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, ids, subsystem_ids;
    char bus_id[32];
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct bar1 {
    unsigned long long total, free, used;
};
struct fabric_v3 {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique, state, health;
    unsigned char summary;
};
struct field {
    unsigned id, scope;
    long long time, latency_us;
    int type, result;
    union {
        unsigned number;
        unsigned long long widest;
    } value;
};
struct event {
    device device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};
struct events {
    device devices[MAX_GPUS];
    unsigned long long types[MAX_GPUS];
    unsigned count;
};

static unsigned index_of(device of) { return (unsigned)(of - machine()->gpus); }

static int pci_of(const char *bdf, struct pci_info *info) {
    memset(info, 0, sizeof *info);
    unsigned function;
    if (sscanf(bdf, "%x:%x:%x.%u", &info->domain, &info->bus, &info->device, &function) != 4) return INVALID;
    snprintf(info->bus_id, sizeof info->bus_id, "%s", bdf);
    info->ids = 0x233510de;
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return machine() ? OK : NO_DRIVER; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake driver"; }

int nvmlSystemGetDriverVersion(char *version, unsigned len) {
    snprintf(version, len, "999.1.fake");
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = machine()->count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *of) {
    if (index >= machine()->count) return INVALID;
    *of = &machine()->gpus[index];
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device *of) {
    for (unsigned at = 0; at < machine()->count; at++)
        if (strcmp(machine()->gpus[at].uuid, uuid) == 0) {
            *of = &machine()->gpus[at];
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device of, char *uuid, unsigned len) {
    snprintf(uuid, len, "%s", of->uuid);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(device of, struct pci_info *info) { return pci_of(of->bdf, info); }

int nvmlDeviceGetName(device of, char *name, unsigned len) {
    (void)of;
    snprintf(name, len, "Fake GPU");
    return OK;
}

int nvmlDeviceGetMinorNumber(device of, unsigned *minor) {
    *minor = index_of(of);
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device of, struct memory_v2 *memory) {
    if (of->lost) return GPU_LOST;
    memory->total = of->total_bytes;
    memory->reserved = 0;
    memory->used = memory_used(index_of(of), 0);
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetBAR1MemoryInfo(device of, struct bar1 *bar1) {
    if (of->lost) return GPU_LOST;
    bar1->total = 1ull << 38;
    bar1->used = (1ull << 20) + memory_used(index_of(of), 0);
    bar1->free = bar1->total - bar1->used;
    return OK;
}

int nvmlDeviceGetMigMode(device of, unsigned *now, unsigned *pending) {
    if (!of->has_mig) return NOT_SUPPORTED;
    *now = *pending = of->mig;
    return OK;
}

int nvmlDeviceGetComputeMode(device of, unsigned *mode) {
    *mode = of->mode;
    return OK;
}

int nvmlDeviceGetCurrPcieLinkGeneration(device of, unsigned *value) { (void)of; *value = 5; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(device of, unsigned *value) { (void)of; *value = 16; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(device of, unsigned *value) { (void)of; *value = 5; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(device of, unsigned *value) { (void)of; *value = 16; return OK; }

/* The number in a file `NAME-INDEX`; 0 without one. */
static int read_number(const char *name, device of, unsigned long long *number) {
    char path[320];
    snprintf(path, sizeof path, "%s/%s-%u", machine()->folder, name, index_of(of));
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    int read = fscanf(file, "%llu", number);
    fclose(file);
    return read == 1;
}

int nvmlDeviceGetTotalEccErrors(device of, unsigned kind, unsigned counter, unsigned long long *count) {
    (void)counter;
    if (of->lost) return GPU_LOST;
    *count = 0;
    if (kind == UNCORRECTED) (void)read_number("ecc-count", of, count);
    return OK;
}

/* What it takes to mend a GPU, below, is the number in a file `recovery-INDEX`; nothing without one. */
int nvmlDeviceGetFieldValues(device of, int count, struct field *fields) {
    for (int at = 0; at < count; at++) {
        struct field *field = &fields[at];
        field->result = field->id == FIELD_RECOVERY_ACTION ? OK : NOT_SUPPORTED;
        field->type = TYPE_UNSIGNED;
        field->value.widest = 0;
        char path[320];
        snprintf(path, sizeof path, "%s/recovery-%u", machine()->folder, index_of(of));
        FILE *file = fopen(path, "re");
        if (!file) continue;
        if (fscanf(file, "%u", &field->value.number) != 1) field->result = INVALID;
        fclose(file);
    }
    return OK;
}

/* The far end of a link; NULL for one that is not active. */
static const struct end *end_of(device of, unsigned link) {
    for (unsigned at = 0; at < of->end_count; at++) {
        if (link < of->ends[at].links) return &of->ends[at];
        link -= of->ends[at].links;
    }
    return NULL;
}

int nvmlDeviceGetNvLinkState(device of, unsigned link, unsigned *state) {
    if (link >= MAX_ENDS) return INVALID;
    if (!of->end_count) return NOT_SUPPORTED;
    *state = end_of(of, link) != NULL;
    return OK;
}

int nvmlDeviceGetNvLinkVersion(device of, unsigned link, unsigned *version) {
    if (!end_of(of, link)) return INVALID;
    *version = 6; /* NVML_NVLINK_VERSION_4_0 */
    return OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device of, unsigned link, struct pci_info *info) {
    const struct end *end = end_of(of, link);
    if (!end) return INVALID;
    return pci_of(end->bdf[0] ? end->bdf : "00000000:ff:00.0", info);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(device of, unsigned link, unsigned *type) {
    const struct end *end = end_of(of, link);
    if (!end) return INVALID;
    *type = end->bdf[0] ? 0 : 2; /* NVML_NVLINK_DEVICE_TYPE_GPU, _SWITCH */
    return OK;
}

int nvmlDeviceGetGpuFabricInfoV(device of, struct fabric_v3 *info) {
    unsigned version = info->version;
    memset(info, 0, sizeof *info);
    info->version = version;
    info->state = of->fabric;
    memset(info->cluster, 0xab, sizeof info->cluster);
    info->clique = 1;
    return OK;
}

int nvmlDeviceGetSupportedEventTypes(device of, unsigned long long *types) {
    (void)of;
    *types = EVENT_XID | EVENT_DOUBLE_BIT_ECC;
    return OK;
}

int nvmlEventSetCreate(struct events **set) {
    *set = calloc(1, sizeof **set);
    return *set ? OK : INVALID;
}

int nvmlEventSetFree(struct events *set) {
    free(set);
    return OK;
}

int nvmlDeviceRegisterEvents(device of, unsigned long long types, struct events *set) {
    if (set->count >= MAX_GPUS) return INVALID;
    set->devices[set->count] = of;
    set->types[set->count++] = types;
    return OK;
}

/* An event is a file `xid-INDEX` with the number in it, or `ecc-INDEX`; it is taken away when it is told. */
static int take_event(struct events *set, struct event *event) {
    for (unsigned at = 0; at < set->count; at++) {
        char path[320];
        unsigned index = index_of(set->devices[at]);
        snprintf(path, sizeof path, "%s/xid-%u", machine()->folder, index);
        FILE *file = fopen(path, "re");
        if (file) {
            if (fscanf(file, "%llu", &event->data) != 1) event->data = 999;
            fclose(file);
            event->type = EVENT_XID;
        } else {
            snprintf(path, sizeof path, "%s/ecc-%u", machine()->folder, index);
            if (access(path, F_OK) != 0) continue;
            event->data = 0;
            event->type = EVENT_DOUBLE_BIT_ECC;
        }
        event->device = set->devices[at];
        if (event->type & set->types[at] && unlink(path) == 0) return 1;
    }
    return 0;
}

int nvmlEventSetWait_v2(struct events *set, struct event *event, unsigned timeout_ms) {
    memset(event, 0, sizeof *event);
    for (unsigned waited = 0;; waited += 5) {
        if (take_event(set, event)) return OK;
        if (waited >= timeout_ms) return TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
}
