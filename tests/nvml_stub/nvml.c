/* A libnvidia-ml.so.1 that needs no driver, because its answers come from the files in NVML_STUB_DIR.
 *
 * The files are read again at each call, so a test can change them while programs run. A writer replaces whole
 * files, so a reader never sees half of a change. The only state of the library is its count of nvmlInit calls.
 *
 *   host        "driver 550.54.14", "init <code>" (returned by nvmlInit), "gpus <count>", "fail <function> <code>",
 *               "cuda 12040" (the newest CUDA version of this driver)
 *               "count 1" (calls are recorded in calls/<pid>, with the name of a function in each line)
 *   hang        "<function> <pid or 0>": while this file exists, the function blocks in that process, or in all
 *   gpu-<i>     "uuid", "name", "total", "used", "reserved" (bytes), "util" (percent), "temp" (degrees Celsius),
 *               "persistence 1" (mode, 0 is off), "compute_mode 3" (EXCLUSIVE_PROCESS), "error <code>" (of each
 *               call), "hidden 1" (processes without memory figures), "unlisted 1" (no process is listed), "shift
 *               <number>" (added to their pids, as in another namespace), "mps 1" (its processes are clients of
 *               MPS), "mig 1", "instances <count>", "fail <function> <code>"
 *   gpu-<i>-<j> the same for MIG device j of GPU i
 *   limits/...  limits of control groups on cards, since driver 615; see host_files.h
 *   use/<pid>.<start>   memory of a process, counted while the process exists: lines of
 *                       "<pid> <gpu> <MIG device or -1> <bytes> [name]". They are written by simulated workers
 *                       (nvml_stub.allocate) or by the stand-in for CUDA (../cuda_stub)
 *   use/program-<n>     the same for a program that need not exist, counted while the file exists
 *   use/graphics-<n>    the same for a graphics program
 *   use/mps-<n>         the same for a client of MPS
 *
 * A handle is valid for one nvmlInit in one process. After nvmlShutdown, or in a fork, it is refused, which is
 * stricter than the real library. DRIVER is the major version of the driver whose symbols are exported.
 */

#include <stdint.h>
#include <sys/stat.h>

#include "host_files.h"

#ifndef DRIVER
#define DRIVER 550
#endif

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

#define NOT_AVAILABLE (~0ULL)

typedef void *Device;

EXPORT int users;      /* calls of nvmlInit minus calls of nvmlShutdown; exported for tests */
static pid_t user_pid; /* process that called nvmlInit; a fork has to call it again */
static unsigned epoch; /* counts initialisations, so that older handles can be refused */

static int copy(const char *text, const char *key, char *target, unsigned size) {
    const char *value;
    int length = field(text, key, &value);
    if (length < 0) return NOT_SUPPORTED;
    if ((unsigned)length >= size) return INSUFFICIENT_SIZE;
    memcpy(target, value, (size_t)length);
    target[length] = 0;
    return SUCCESS;
}

static int forced(const char *text, const char *function) {
    char key[128];
    snprintf(key, sizeof key, "fail %s", function);
    return (int)number(text, key, SUCCESS);
}

/* --- the first steps of each call -------------------------------------------------------------------------- */

/* Record this call if calls are counted. */
static void note(const char *function) {
    char text[TEXT_BYTES], path[4096], line[128];
    if (!read_stub("host", text, sizeof text) || !number(text, "count", 0)) return;
    snprintf(path, sizeof path, "%s/calls/%d", getenv("NVML_STUB_DIR"), getpid());
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    int length = snprintf(line, sizeof line, "%s\n", function);
    if (write(file, line, (size_t)length) != length) abort(); /* otherwise a test would miscount */
    close(file);
}

/* Block while the file "hang" names this function, and this process or 0. The file "hanging-<pid>" shows this. */
static void hang(const char *function) {
    char text[256], name[128], path[4096];
    int pid;
    note(function);
    while (read_stub("hang", text, sizeof text) && sscanf(text, "%127s %d", name, &pid) == 2 &&
           strcmp(name, function) == 0 && (pid == 0 || pid == getpid())) {
        snprintf(path, sizeof path, "%s/hanging-%d", getenv("NVML_STUB_DIR"), getpid());
        close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
        usleep(5000);
    }
}

static int host(const char *function, char *text, size_t size) {
    hang(function);
    if (users == 0 || user_pid != getpid()) return UNINITIALIZED;
    if (!read_stub("host", text, size)) return DRIVER_NOT_LOADED;
    return forced(text, function);
}

static Device handle(int gpu, int mig) {
    return (Device)(uintptr_t)((uintptr_t)epoch << 16 | (uintptr_t)(gpu + 1) << 8 | (uintptr_t)(mig + 1));
}

static int gpu_file(const char *function, int gpu, int mig, char *text, size_t size) {
    char name[64];
    snprintf(name, sizeof name, mig == NO_MIG ? "gpu-%d" : "gpu-%d-%d", gpu, mig);
    if (!read_stub(name, text, size)) return NOT_FOUND;
    int error = (int)number(text, "error", SUCCESS);
    return error ? error : forced(text, function);
}

/* Read the text of a device's file. A MIG device is lost with its card. */
static int device(const char *function, Device of, int *gpu, int *mig, char *text, size_t size) {
    uintptr_t bits = (uintptr_t)of;
    int error = host(function, text, size);
    if (error) return error;
    if (bits >> 16 != epoch) return INVALID_ARGUMENT;
    *gpu = (int)(bits >> 8 & 0xFF) - 1;
    *mig = (int)(bits & 0xFF) - 1;
    if (*mig != NO_MIG) {
        error = gpu_file("", *gpu, NO_MIG, text, size);
        if (error) return error;
        if (*mig >= number(text, "instances", 0)) return INVALID_ARGUMENT;
    }
    return gpu_file(function, *gpu, *mig, text, size);
}

#define HOST                                      \
    char text[TEXT_BYTES];                        \
    int error = host(__func__, text, sizeof text); \
    if (error) return error
#define DEVICE(of)                                                    \
    char text[TEXT_BYTES];                                            \
    int gpu, mig;                                                     \
    int error = device(__func__, of, &gpu, &mig, text, sizeof text);   \
    (void)gpu, (void)mig;                                             \
    if (error) return error

/* --- memory of processes ---------------------------------------------------------------------------------- */

static void add(const Use *use, void *context) { *(Bytes *)context += use->bytes; }

static Bytes used_bytes(const char *text, int gpu, int mig) {
    Bytes sum = (Bytes)number(text, "used", 0);
    uses(gpu, mig, add, &sum);
    return sum;
}

/* --- the library ------------------------------------------------------------------------------------------ */

static int initialise(void) {
    char text[TEXT_BYTES];
    hang("nvmlInit");
    if (user_pid != getpid()) users = 0;
    user_pid = getpid();
    if (!read_stub("host", text, sizeof text)) return DRIVER_NOT_LOADED;
    int error = (int)number(text, "init", SUCCESS);
    if (error) return error;
    if (users++ == 0) epoch++;
    return SUCCESS;
}

EXPORT int nvmlInit(void) { return initialise(); }
EXPORT int nvmlInit_v2(void) { return initialise(); }
#if DRIVER >= 390
EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return initialise();
}
#endif

EXPORT int nvmlShutdown(void) {
    if (users == 0 || user_pid != getpid()) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    HOST;
    return copy(text, "driver", version, length);
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    HOST;
    return copy(text, "driver", version, length);
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) {
    HOST;
    *version = (int)number(text, "cuda", 12040);
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    HOST;
    *version = (int)number(text, "cuda", 12040);
    return SUCCESS;
}

static void find_name(const Use *use, void *context) {
    Use *wanted = context;
    if (use->pid == wanted->pid && use->name[0]) memcpy(wanted->name, use->name, sizeof use->name);
}

EXPORT int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    HOST;
    Use wanted = {.pid = pid};
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    if (!read_path(path, wanted.name, sizeof wanted.name)) uses(ANY, NO_MIG, find_name, &wanted);
    if (!wanted.name[0]) return NOT_FOUND;
    if (strlen(wanted.name) >= length) return INSUFFICIENT_SIZE;
    strcpy(name, wanted.name);
    return SUCCESS;
}

/* --- devices ---------------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    HOST;
    *count = (unsigned)number(text, "gpus", 0);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *result) {
    HOST;
    if (index >= (unsigned)number(text, "gpus", 0)) return INVALID_ARGUMENT;
    error = gpu_file(__func__, (int)index, NO_MIG, text, sizeof text);
    if (error) return error;
    *result = handle((int)index, NO_MIG);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, Device *result) {
    return nvmlDeviceGetHandleByIndex_v2(index, result);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, Device *result) {
    HOST;
    int count = (int)number(text, "gpus", 0);
    for (int gpu = 0; gpu < count; gpu++) {
        if (gpu_file("", gpu, NO_MIG, text, sizeof text)) continue;
        int instances = (int)number(text, "instances", 0);
        for (int mig = NO_MIG; mig < instances; mig++) {
            char own[128];
            if (gpu_file(__func__, gpu, mig, text, sizeof text) || copy(text, "uuid", own, sizeof own)) continue;
            if (strcmp(own, uuid) == 0) {
                *result = handle(gpu, mig);
                return SUCCESS;
            }
        }
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *result) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || domain || number < FIRST_BUS) return INVALID_ARGUMENT;
    int code = nvmlDeviceGetHandleByIndex_v2(number - FIRST_BUS, result);
    return code == INVALID_ARGUMENT ? NOT_FOUND : code;
}

EXPORT int nvmlDeviceGetUUID(Device of, char *uuid, unsigned length) {
    DEVICE(of);
    return copy(text, "uuid", uuid, length);
}

EXPORT int nvmlDeviceGetName(Device of, char *name, unsigned length) {
    DEVICE(of);
    return copy(text, "name", name, length);
}

EXPORT int nvmlDeviceGetPersistenceMode(Device of, unsigned *mode) {
    DEVICE(of);
    long long on = number(text, "persistence", -1);
    if (on < 0 || mig != NO_MIG) return NOT_SUPPORTED;
    *mode = (unsigned)on;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeMode(Device of, unsigned *mode) {
    DEVICE(of);
    *mode = (unsigned)number(text, "compute_mode", 0);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetIndex(Device of, unsigned *index) {
    DEVICE(of);
    *index = (unsigned)(mig == NO_MIG ? gpu : mig);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMinorNumber(Device of, unsigned *minor) {
    DEVICE(of);
    *minor = (unsigned)gpu;
    return SUCCESS;
}

typedef struct {
    Bytes total, free, used;
} Memory;

typedef struct {
    unsigned version;
    Bytes total, reserved, free, used;
} Memory_v2;

static void memory(const char *text, int gpu, int mig, Memory_v2 *result) {
    result->total = (Bytes)number(text, "total", 0);
    result->reserved = (Bytes)number(text, "reserved", 0);
    result->used = used_bytes(text, gpu, mig);
    Bytes taken = result->reserved + result->used;
    result->free = taken < result->total ? result->total - taken : 0;
}

/* Before version 2, the used memory includes the memory that the driver reserves. */
EXPORT int nvmlDeviceGetMemoryInfo(Device of, Memory *result) {
    DEVICE(of);
    Memory_v2 now;
    memory(text, gpu, mig, &now);
    result->total = now.total;
    result->free = now.free;
    result->used = now.used + now.reserved;
    return SUCCESS;
}

#if DRIVER >= 510
EXPORT int nvmlDeviceGetMemoryInfo_v2(Device of, Memory_v2 *result) {
    DEVICE(of);
    if (result->version != (sizeof(Memory_v2) | 2U << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory(text, gpu, mig, result);
    return SUCCESS;
}
#endif

#if DRIVER >= 615
typedef struct {
    const char *group;
    Bytes soft, hard, used; /* `used` is only set for queries, not for changes */
} Limits;

static void find_limits(const char *group, Bytes soft, Bytes hard, void *context) {
    Limits *wanted = context;
    if (strcmp(group, wanted->group) == 0) wanted->soft = soft, wanted->hard = hard;
}

EXPORT int nvmlDeviceGetMemoryLimits_v1(Device of, Limits *wanted) {
    DEVICE(of);
    if (mig != NO_MIG) return NOT_SUPPORTED;
    if (access(wanted->group, F_OK)) return NOT_FOUND;
    wanted->soft = 0;
    wanted->hard = NOT_AVAILABLE;
    limits(gpu, find_limits, wanted);
    wanted->used = used_by_group(gpu, wanted->group);
    return SUCCESS;
}

EXPORT int nvmlDeviceSetMemoryLimits_v1(Device of, const Limits *wanted) {
    DEVICE(of);
    char path[8192], new[8192], line[8192];
    if (mig != NO_MIG) return NOT_SUPPORTED;
    if (access(wanted->group, F_OK)) return NOT_FOUND;
    const char *folder = getenv("NVML_STUB_DIR");
    snprintf(path, sizeof path, "%s/limits", folder);
    mkdir(path, 0777);
    int start = snprintf(path, sizeof path, "%s/limits/%d", folder, gpu);
    snprintf(path + start, sizeof path - (size_t)start, "%s", wanted->group);
    for (char *at = path + start; *at; at++) {
        if (*at == '/') *at = '%';
    }
    snprintf(new, sizeof new, "%s/limits/.%d.new", folder, (int)getpid());
    int file = open(new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return NO_PERMISSION;
    int length = snprintf(line, sizeof line, "%llu %llu %s\n", wanted->soft, wanted->hard, wanted->group);
    if (write(file, line, (size_t)length) != length) abort();
    close(file);
    return rename(new, path) ? UNKNOWN : SUCCESS;
}
#endif

typedef struct {
    unsigned gpu, memory;
} Utilization;

EXPORT int nvmlDeviceGetUtilizationRates(Device of, Utilization *result) {
    DEVICE(of);
    long long percent = number(text, "util", -1);
    if (percent < 0 || mig != NO_MIG) return NOT_SUPPORTED;
    result->gpu = (unsigned)percent;
    result->memory = (unsigned)percent / 2;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(Device of, int sensor, unsigned *result) {
    DEVICE(of);
    long long celsius = number(text, "temp", -1);
    if (celsius < 0 || mig != NO_MIG || sensor != 0) return NOT_SUPPORTED;
    *result = (unsigned)celsius;
    return SUCCESS;
}

/* --- processes -------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned pid;
    Bytes bytes;
} Process_v1;

typedef struct {
    unsigned pid;
    Bytes bytes;
    unsigned gpu_instance, compute_instance;
} Process;

typedef struct {
    Process *into;
    unsigned room, found;
    int hidden, kind, is_mps;
    unsigned shift;
} Listing;

static void list(const Use *use, void *context) {
    Listing *listing = context;
    int kind = listing->is_mps && use->kind == COMPUTE ? MPS : use->kind;
    if (kind != listing->kind) return;
    if (listing->into != NULL && listing->found < listing->room) {
        Process process = {use->pid + listing->shift, listing->hidden ? NOT_AVAILABLE : use->bytes, ~0U, ~0U};
        listing->into[listing->found] = process;
    }
    listing->found++;
}

static int processes(const char *function, Device of, unsigned *count, Process *into, int kind) {
    char text[TEXT_BYTES];
    int gpu, mig, error = device(function, of, &gpu, &mig, text, sizeof text);
    if (error) return error;
    Listing listing = {into, *count, 0, (int)number(text, "hidden", 0), kind, (int)number(text, "mps", 0),
                       (unsigned)number(text, "shift", 0)};
    if (!number(text, "unlisted", 0)) uses(gpu, mig, list, &listing);
    int fits = listing.found <= *count;
    *count = listing.found;
    return listing.found == 0 || (into != NULL && fits) ? SUCCESS : INSUFFICIENT_SIZE;
}

/* PyTorch calls this function, without a version, when memory has run out. */
EXPORT int nvmlDeviceGetComputeRunningProcesses(Device of, unsigned *count, Process_v1 *into) {
    Process found[1024];
    unsigned room = *count, most = sizeof found / sizeof *found;
    *count = room < most ? room : most;
    int error = processes(__func__, of, count, into == NULL ? NULL : found, COMPUTE);
    for (unsigned i = 0; into != NULL && error == SUCCESS && i < *count; i++) {
        into[i] = (Process_v1){found[i].pid, found[i].bytes};
    }
    return error;
}

#define LISTS(version)                                                                                      \
    EXPORT int nvmlDeviceGetComputeRunningProcesses##version(Device of, unsigned *count, Process *into) {    \
        return processes(__func__, of, count, into, COMPUTE);                                               \
    }                                                                                                       \
    EXPORT int nvmlDeviceGetGraphicsRunningProcesses##version(Device of, unsigned *count, Process *into) {   \
        return processes(__func__, of, count, into, GRAPHICS);                                              \
    }                                                                                                       \
    EXPORT int nvmlDeviceGetMPSComputeRunningProcesses##version(Device of, unsigned *count, Process *into) { \
        return processes(__func__, of, count, into, MPS);                                                   \
    }

#if DRIVER >= 450
LISTS(_v2)
#endif
#if DRIVER >= 510
LISTS(_v3)
#endif

/* --- NVLink, which PyTorch queries when memory has run out, to name other GPUs that could be used ---------- */

#define NOT_HERE(function) \
    EXPORT int function(Device of) { return (void)of, NOT_SUPPORTED; }

NOT_HERE(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_HERE(nvmlDeviceGetNvLinkRemotePciInfo_v2)

/* The caller has set the state to 0 (not supported), which is the state of a card without a fabric. */
EXPORT int nvmlDeviceGetGpuFabricInfoV(Device of, void *information) {
    DEVICE(of);
    (void)information;
    return SUCCESS;
}

/* --- MIG -------------------------------------------------------------------------------------------------- */

#if DRIVER >= 450
EXPORT int nvmlDeviceGetMigMode(Device of, unsigned *current, unsigned *pending) {
    DEVICE(of);
    long long on = number(text, "mig", -1);
    if (on < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)on;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(Device of, unsigned *count) {
    DEVICE(of);
    *count = number(text, "mig", -1) < 0 ? 0 : 7;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(Device of, unsigned index, Device *result) {
    DEVICE(of);
    if (index >= 7) return INVALID_ARGUMENT;
    if (index >= (unsigned)number(text, "instances", 0)) return NOT_FOUND;
    *result = handle(gpu, (int)index);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device of, Device *result) {
    DEVICE(of);
    if (mig == NO_MIG) return INVALID_ARGUMENT;
    *result = handle(gpu, NO_MIG);
    return SUCCESS;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(Device of, unsigned *is_mig) {
    DEVICE(of);
    *is_mig = mig != NO_MIG;
    return SUCCESS;
}
#endif
