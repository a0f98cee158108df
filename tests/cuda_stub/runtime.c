/* libcudart: the functions of the runtime, based on cards.c. Kernels compute nothing. Only the header with types
 * is included, so functions can have the names and arguments of several versions. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cards.h"

static __thread int last_error, current;

static int said(int code) {
    if (code) last_error = code;
    return code;
}

#define BEGIN                       \
    do {                            \
        int begun = stub_context(current); \
        if (begun) return said(begun);     \
    } while (0)

/* --- errors and versions ---------------------------------------------------------------------------------- */

int cudaGetLastError(void) {
    int code = last_error;
    last_error = OK;
    return code;
}

int cudaPeekAtLastError(void) { return last_error; }

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {OK, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NOT_INITIALIZED, "cudaErrorInitializationError", "initialization error"},
    {INSUFFICIENT_DRIVER, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {UNAVAILABLE, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {OPERATING_SYSTEM, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {MPS_NOT_READY, "cudaErrorMpsServerNotReady", "MPS server is not ready to accept new MPS client requests"},
    {NOT_SUPPORTED_HERE, "cudaErrorNotSupported", "operation not supported"},
    {UNKNOWN, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorString(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].text;
    return "unrecognized error code";
}

const char *cudaGetErrorName(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].name;
    return "unrecognized error code";
}

int cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return OK;
}

int cudaDriverGetVersion(int *version) {
    *version = stub_driver_cuda();
    return OK;
}

static int missing(void) { return NOT_SUPPORTED_HERE; }

static int entry_point(const char *name, void **function) {
    stub_init();
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = driver == NULL ? NULL : dlsym(driver, name);
    if (*function == NULL) *function = (void *)missing;
    return OK;
}

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found) {
    (void)flags;
    if (found != NULL) *found = 0;
    return entry_point(name, function);
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                     unsigned long long flags, int *found) {
    (void)version;
    return cudaGetDriverEntryPoint(name, function, flags, found);
}

/* --- cards ------------------------------------------------------------------------------------------------ */

int cudaGetDeviceCount(int *count) {
    int code = stub_init();
    *count = code ? 0 : stub_count();
    return said(code);
}

int cudaGetDevice(int *card) {
    *card = current;
    return said(stub_init());
}

int cudaSetDevice(int card) {
    int code = stub_context(card);
    if (code == OK) current = card;
    return said(code);
}

static int known(int card) {
    int code = stub_init();
    return said(code ? code : card < 0 || card >= stub_count() ? INVALID_DEVICE : OK);
}

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int card) {
    int code = known(card);
    if (code) return code;
    *found = (struct cudaDeviceProp){
        .totalGlobalMem = stub_total(card),
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {INT32_MAX, 65535, 65535},
        .totalConstMem = 65536,
        .major = 9,
        .multiProcessorCount = stub_sms(),
        .l2CacheSize = 50 << 20,
        .pciBusID = stub_bus(card),
        .unifiedAddressing = 1,
    };
    stub_name(card, found->name, sizeof found->name);
    stub_uuid(card, (unsigned char *)&found->uuid);
    return OK;
}

int cudaGetDeviceProperties_v2(struct cudaDeviceProp *found, int card) {
    return cudaGetDeviceProperties(found, card);
}

int cudaDeviceGetAttribute(int *found, int attribute, int card) {
    int code = known(card);
    if (code) return code;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *found = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *found = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *found = 232448; break;
    case cudaDevAttrWarpSize: *found = 32; break;
    case cudaDevAttrMultiProcessorCount: *found = stub_sms(); break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *found = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *found = 9; break;
    case cudaDevAttrUnifiedAddressing: *found = 1; break;
    case cudaDevAttrMemoryPoolsSupported: *found = 1; break;
    case cudaDevAttrPciBusId: *found = stub_bus(card); break;
    case cudaDevAttrComputeMode: *found = (int)stub_number(card, "compute_mode", 0); break;
    default: *found = 0;
    }
    return OK;
}

int cudaDeviceGetPCIBusId(char *text, int size, int card) {
    int code = known(card);
    if (code == OK) snprintf(text, (size_t)size, "0000:%02X:00.0", stub_bus(card));
    return code;
}

int cudaDeviceCanAccessPeer(int *can, int card, int other) {
    (void)card, (void)other;
    *can = 0;
    return OK;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return OK;
}

/* --- memory ----------------------------------------------------------------------------------------------- */

int cudaMalloc(void **at, size_t size) {
    BEGIN;
    *at = NULL;
    return size == 0 ? OK : said(stub_allocate(current, size, at));
}

int cudaFree(void *at) {
    BEGIN;
    return at == NULL ? OK : said(stub_release(at));
}

int cudaMallocAsync(void **at, size_t size, void *stream) { return (void)stream, cudaMalloc(at, size); }
int cudaFreeAsync(void *at, void *stream) { return (void)stream, cudaFree(at); }

int cudaMemGetInfo(size_t *free, size_t *total) {
    BEGIN;
    *free = stub_free(current), *total = stub_total(current);
    return OK;
}

static char a_pool;

int cudaDeviceGetDefaultMemPool(void **pool, int card) {
    *pool = &a_pool;
    return known(card);
}

int cudaMemPoolGetAttribute(void *pool, int attribute, void *found) {
    (void)pool, (void)attribute;
    *(uint64_t *)found = 0;
    return OK;
}

int cudaHostAlloc(void **at, size_t size, unsigned flags) {
    (void)flags;
    BEGIN;
    *at = aligned_alloc(4096, (size + 4095) & ~(size_t)4095);
    return *at == NULL ? said(OUT_OF_MEMORY) : stub_pin(*at, size, current);
}

int cudaFreeHost(void *at) {
    int code = stub_unpin(at);
    if (code == OK) free(at);
    return said(code);
}

int cudaHostRegister(void *at, size_t size, unsigned flags) {
    (void)flags;
    BEGIN;
    return stub_pin(at, size, current);
}

int cudaHostUnregister(void *at) { return said(stub_unpin(at)); }

int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    Block block;
    int code = stub_init();
    if (code) return said(code);
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    found->device = -2; /* cudaInvalidDeviceId */
    if (stub_find(at, &block)) {
        found->type = block.is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        found->device = block.card;
        found->devicePointer = (void *)at;
        if (block.is_pinned) found->hostPointer = (void *)at;
    }
    return OK;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    (void)kind, (void)stream;
    BEGIN;
    memmove(to, from, size);
    return OK;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    BEGIN;
    stub_wait(stub_stream(NULL, current)->until);
    return cudaMemcpyAsync(to, from, size, kind, NULL);
}

int cudaMemcpyPeerAsync(void *to, int card, const void *from, int other, size_t size, void *stream) {
    (void)card, (void)other;
    return cudaMemcpyAsync(to, from, size, 0, stream);
}

int cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
                      int kind, void *stream) {
    (void)kind, (void)stream;
    BEGIN;
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * pitch, (const char *)from + row * other, width);
    return OK;
}

/* Pages of zeros are not allocated, so a card of 80 GB needs no main memory. */
int cudaMemsetAsync(void *at, int value, size_t size, void *stream) {
    (void)stream;
    BEGIN;
    Block block;
    uintptr_t first = ((uintptr_t)at + 4095) & ~(uintptr_t)4095, last = ((uintptr_t)at + size) & ~(uintptr_t)4095;
    if (value || last <= first || !stub_find(at, &block) || block.is_pinned) {
        memset(at, value, size);
        return OK;
    }
    memset(at, 0, first - (uintptr_t)at);
    memset((void *)last, 0, (uintptr_t)at + size - last);
    return said(madvise((void *)first, last - first, MADV_DONTNEED) ? UNKNOWN : OK);
}

int cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size, NULL); }

/* --- kernels, streams, events ----------------------------------------------------------------------------- */

typedef struct {
    unsigned x, y, z;
} Grid;

static __thread struct {
    Grid grid, block;
    size_t shared;
    void *stream;
} next_launch;

unsigned __cudaPushCallConfiguration(Grid grid, Grid block, size_t shared, void *stream) {
    next_launch.grid = grid, next_launch.block = block;
    next_launch.shared = shared, next_launch.stream = stream;
    return OK;
}

int __cudaPopCallConfiguration(Grid *grid, Grid *block, size_t *shared, void **stream) {
    *grid = next_launch.grid, *block = next_launch.block;
    *shared = next_launch.shared, *stream = next_launch.stream;
    return OK;
}

int cudaLaunchKernel(const void *function, Grid grid, Grid block, void **arguments, size_t shared, void *stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
    BEGIN;
    stub_launch(stub_stream(stream, current), current);
    return OK;
}

int __cudaLaunchKernel(const void *kernel, Grid grid, Grid block, void **arguments, size_t shared, void *stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

int cudaLaunchKernelExC(const struct cudaLaunchConfig_st *how, const void *function, void **arguments) {
    Grid any = {1, 1, 1};
    return cudaLaunchKernel(function, any, any, arguments, how->dynamicSmemBytes, how->stream);
}

static long a_binary;

void **__cudaRegisterFatBinary(void *binary) { return (void)binary, (void **)&a_binary; }
char __cudaInitModule(void **module) { return (void)module, 1; }

#define NOTHING_TO_DO(name) \
    int name(void) { return OK; }

NOTHING_TO_DO(__cudaRegisterFatBinaryEnd)
NOTHING_TO_DO(__cudaRegisterFunction)
NOTHING_TO_DO(__cudaRegisterVar)
NOTHING_TO_DO(__cudaUnregisterFatBinary)
NOTHING_TO_DO(__cudaGetKernel)
NOTHING_TO_DO(cudaFuncSetAttribute)
NOTHING_TO_DO(cudaKernelSetAttributeForDevice)
NOTHING_TO_DO(cudaMemPoolSetAccess)
NOTHING_TO_DO(cudaMemPoolSetAttribute)
NOTHING_TO_DO(cudaMemPoolTrimTo)
NOTHING_TO_DO(cudaMemcpyToSymbol)
NOTHING_TO_DO(cudaProfilerStart)
NOTHING_TO_DO(cudaProfilerStop)
NOTHING_TO_DO(cudaThreadExchangeStreamCaptureMode)

int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    (void)function;
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90};
    return OK;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block,
                                                           size_t shared, unsigned flags) {
    (void)function, (void)block, (void)shared, (void)flags;
    *count = 2;
    return OK;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, block, shared, 0);
}

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)flags;
    BEGIN;
    Stream *new = calloc(1, sizeof *new);
    if (new == NULL) return said(OUT_OF_MEMORY);
    new->priority = priority;
    *stream = new;
    return OK;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

int cudaStreamDestroy(void *stream) {
    free(stream);
    return OK;
}

int cudaStreamGetPriority(void *stream, int *priority) {
    *priority = stub_stream(stream, current)->priority;
    return OK;
}

int cudaStreamQuery(void *stream) {
    BEGIN;
    return stub_stream(stream, current)->until > stub_now() ? NOT_READY : OK; /* NOT_READY is not an error here */
}

int cudaStreamSynchronize(void *stream) {
    BEGIN;
    return stub_wait(stub_stream(stream, current)->until);
}

int cudaDeviceSynchronize(void) {
    BEGIN;
    stub_wait(stub_busy_until());
    return said(stub_is_lost(current));
}

int cudaStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return OK;
}

/* The later arguments differ between versions, and are not set unless a graph is being captured. */
int cudaStreamGetCaptureInfo(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }
int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }

/* An event is the time at which all earlier work on its stream is done. */
int cudaEventCreateWithFlags(long long **event, unsigned flags) {
    (void)flags;
    BEGIN;
    *event = calloc(1, sizeof **event);
    return *event == NULL ? said(OUT_OF_MEMORY) : OK;
}

int cudaEventCreate(long long **event) { return cudaEventCreateWithFlags(event, 0); }

int cudaEventDestroy(long long *event) {
    free(event);
    return OK;
}

int cudaEventRecord(long long *event, void *stream) {
    BEGIN;
    long long until = stub_stream(stream, current)->until, now = stub_now();
    *event = until > now ? until : now;
    return OK;
}

int cudaEventRecordWithFlags(long long *event, void *stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

int cudaEventQuery(long long *event) {
    BEGIN;
    return *event > stub_now() ? NOT_READY : OK;
}

int cudaEventSynchronize(long long *event) {
    BEGIN;
    return stub_wait(*event);
}

int cudaEventElapsedTime(float *ms, long long *begin, long long *end) {
    *ms = (float)(*end - *begin) / 1e6f;
    return OK;
}

int cudaStreamWaitEvent(void *stream, long long *event, unsigned flags) {
    (void)flags;
    BEGIN;
    Stream *waiting = stub_stream(stream, current);
    if (*event > waiting->until) waiting->until = *event;
    return OK;
}
