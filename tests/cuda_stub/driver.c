/* libcuda.so.1: functions of the driver itself, and its virtual memory (expandable segments). */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cards.h"

#define GRANULARITY ((size_t)2 << 20)

static __thread void *current_context;
static char contexts[MOST_CARDS]; /* a context's handle is the address of its byte */

int cuInit(unsigned flags) { return (void)flags, stub_init(); }

int cuDriverGetVersion(int *version) {
    *version = stub_driver_cuda();
    return OK;
}

static int begun(int card) {
    if (!stub_has_begun()) return NOT_INITIALIZED;
    int code = stub_init();
    return code ? code : card < 0 || card >= stub_count() ? INVALID_DEVICE : OK;
}

int cuDeviceGetCount(int *count) {
    int code = begun(0);
    *count = code ? 0 : stub_count();
    return code;
}

int cuDeviceGet(int *card, int number) {
    *card = number;
    return begun(number);
}

int cuDeviceGetName(char *name, int size, int card) {
    int code = begun(card);
    if (code == OK) stub_name(card, name, (size_t)size);
    return code;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int card) {
    int code = begun(card);
    if (code == OK) stub_uuid(card, uuid);
    return code;
}

int cuDeviceGetUuid(unsigned char *uuid, int card) { return cuDeviceGetUuid_v2(uuid, card); }

int cuDeviceTotalMem_v2(size_t *bytes, int card) {
    int code = begun(card);
    *bytes = code ? 0 : stub_total(card);
    return code;
}

int cuDeviceGetAttribute(int *found, int attribute, int card) {
    /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ..._VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    *found = attribute == 16 ? stub_sms() : attribute == 102;
    return begun(card);
}

int cuDevicePrimaryCtxGetState(int card, unsigned *flags, int *active) {
    *flags = 0;
    *active = stub_has_context(card);
    return begun(card);
}

int cuDevicePrimaryCtxRetain(void **context, int card) {
    int code = stub_context(card);
    *context = code ? NULL : &contexts[card];
    return code;
}

int cuDevicePrimaryCtxRelease_v2(int card) { return begun(card); }

int cuCtxGetCurrent(void **context) {
    *context = current_context != NULL ? current_context : stub_has_context(0) ? &contexts[0] : NULL;
    return begun(0);
}

int cuCtxSetCurrent(void *context) {
    current_context = context;
    return begun(0);
}

extern const char *cudaGetErrorString(int code), *cudaGetErrorName(int code);

int cuGetErrorString(int code, const char **text) {
    *text = cudaGetErrorString(code);
    return OK;
}

int cuGetErrorName(int code, const char **name) {
    *name = cudaGetErrorName(code);
    return OK;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    int code = begun(0);
    *free = code ? 0 : stub_free(0), *total = code ? 0 : stub_total(0);
    return code;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)arguments;
    (void)extra;
    stub_launch(stub_stream(stream, 0), 0);
    return OK;
}

/* --- virtual memory --------------------------------------------------------------------------------------- */

typedef struct {
    int type, handle_types, location_type, card; /* the beginning of CUmemAllocationProp */
} Wanted;

typedef struct {
    size_t size;
    int card, uses; /* uses: by the handle and by its mapping */
} Physical;

static struct Mapping {
    void *at;
    Physical *physical;
    struct Mapping *next;
} *mappings;

static void drop(Physical *physical) {
    if (--physical->uses) return;
    stub_give(physical->card, physical->size);
    free(physical);
}

int cuMemGetAllocationGranularity(size_t *bytes, const Wanted *wanted, int option) {
    (void)wanted, (void)option;
    *bytes = GRANULARITY;
    return OK;
}

int cuMemAddressReserve(void **at, size_t size, size_t alignment, void *near, unsigned long long flags) {
    (void)alignment, (void)near, (void)flags;
    *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *at == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

int cuMemAddressFree(void *at, size_t size) { return munmap(at, size) ? INVALID_VALUE : OK; }

int cuMemCreate(Physical **handle, size_t size, const Wanted *wanted, unsigned long long flags) {
    (void)flags;
    int code = stub_context(wanted->card);
    if (code == OK) code = stub_take(wanted->card, size);
    if (code) return code;
    *handle = malloc(sizeof **handle);
    if (*handle == NULL) abort();
    **handle = (Physical){size, wanted->card, 1};
    return OK;
}

int cuMemRelease(Physical *handle) {
    drop(handle);
    return OK;
}

int cuMemMap(void *at, size_t size, size_t offset, Physical *handle, unsigned long long flags) {
    (void)offset, (void)flags;
    struct Mapping *mapping = malloc(sizeof *mapping);
    if (mapping == NULL) abort();
    *mapping = (struct Mapping){at, handle, mappings};
    mappings = mapping;
    handle->uses++;
    stub_map(at, size, handle->card);
    return OK;
}

int cuMemSetAccess(void *at, size_t size, const void *access, size_t count) {
    (void)access, (void)count;
    return mprotect(at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}

int cuMemUnmap(void *at, size_t size) {
    for (char *now = at; now < (char *)at + size;) {
        struct Mapping **link = &mappings;
        while (*link != NULL && (*link)->at != now) link = &(*link)->next;
        if (*link == NULL) return INVALID_VALUE;
        struct Mapping *mapping = *link;
        *link = mapping->next;
        size_t piece = mapping->physical->size;
        stub_unmap(now);
        mmap(now, piece, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop(mapping->physical);
        free(mapping);
        now += piece;
    }
    return OK;
}
