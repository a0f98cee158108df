/* See cards.h. The memory used by a process is in a file that the NVML stub also reads, so both agree. */

#define _GNU_SOURCE
#include "cards.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>

#include "../nvml_stub/host_files.h"

#define PIECE ((size_t)2 << 20) /* the driver allocates memory in pieces of 2 MiB */
#define ROUNDED(size) (((size) + PIECE - 1) & ~(PIECE - 1))
#define NAMES_THREADS_SINCE 570 /* first driver version that does */

typedef struct {
    int gpu, mig;     /* numbers in the host's files */
    int has_context, lost; /* lost: the error that every later call returns */
    Bytes used;       /* memory used by this process, context included */
    Stream stream;    /* the default one */
} Card;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Card cards[MOST_CARDS];
static int card_count, init_code;
static pid_t init_pid; /* process that has started CUDA; 0: none */
static long long busy_until;
static Block *blocks;
static char daemon_folder[4096]; /* folder of this process's MPS daemon; empty: no daemon */

/* --- visible cards ---------------------------------------------------------------------------------------- */

static int card_file(int gpu, int mig, char *text) {
    char name[64];
    snprintf(name, sizeof name, mig == NO_MIG ? "gpu-%d" : "gpu-%d-%d", gpu, mig);
    return read_stub(name, text, TEXT_BYTES);
}

static int value(const char *text, const char *key, char *target, size_t size) {
    const char *at;
    int length = field(text, key, &at);
    if (length < 0) return 0;
    snprintf(target, size, "%.*s", length, at);
    return 1;
}

static void show(int gpu, int mig) {
    if (card_count < MOST_CARDS) cards[card_count++] = (Card){.gpu = gpu, .mig = mig};
}

/* Find a card or MIG device by its number or by the beginning of its UUID. */
static int show_named(const char *name, int count) {
    char text[TEXT_BYTES], uuid[128], *rest;
    long index = strtol(name, &rest, 10);
    if (*name && !*rest) {
        if (index < 0 || index >= count) return 0;
        show((int)index, NO_MIG);
        return 1;
    }
    for (int gpu = 0; gpu < count && *name; gpu++) {
        if (!card_file(gpu, NO_MIG, text)) continue;
        int instances = (int)number(text, "instances", 0);
        for (int mig = NO_MIG; mig < instances; mig++) {
            if (!card_file(gpu, mig, text) || !value(text, "uuid", uuid, sizeof uuid)) continue;
            if (strncmp(uuid, name, strlen(name)) == 0) {
                show(gpu, mig);
                return 1;
            }
        }
    }
    return 0;
}

/* All cards, or those in CUDA_VISIBLE_DEVICES up to the first unknown entry. A card in MIG mode cannot be used as a
 * whole. Without the variable, CUDA shows only the first of its MIG devices. */
static void look_for_cards(int count) {
    char text[TEXT_BYTES], names[4096], *rest;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible != NULL) {
        snprintf(names, sizeof names, "%s", visible);
        for (char *name = strtok_r(names, ", ", &rest); name != NULL; name = strtok_r(NULL, ", ", &rest)) {
            if (!show_named(name, count)) break;
        }
        return;
    }
    for (int gpu = 0; gpu < count; gpu++) {
        if (!card_file(gpu, NO_MIG, text)) continue;
        if (number(text, "instances", 0) > 0) {
            card_count = 0;
            show(gpu, 0);
            return;
        }
        show(gpu, NO_MIG);
    }
}

static void *idle(void *nothing) {
    for (;;) pause();
    return nothing;
}

/* Drivers from 570 on start threads and name them through /proc/self/task/<thread>/comm. */
static int name_a_thread(void) {
    pthread_t thread;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &small, idle, NULL)) return OPERATING_SYSTEM;
    return pthread_setname_np(thread, "cuda-EvtHandlr") ? OPERATING_SYSTEM : OK;
}

static int lock_uses(char *folder, size_t size);
static void unlock_uses(int file);
static void count_other(const Use *use, void *count);

/* --- MPS: a process is a client if it finds a daemon when it starts CUDA ----------------------------------- */

static void look_for_daemon(void) {
    const char *named = getenv("CUDA_MPS_PIPE_DIRECTORY"), *folder = named != NULL ? named : "/tmp/nvidia-mps";
    char path[4200], pid[32];
    snprintf(path, sizeof path, "%s/nvidia-cuda-mps-control.pid", folder);
    if (read_path(path, pid, sizeof pid) && kill(atoi(pid), 0) == 0) {
        snprintf(daemon_folder, sizeof daemon_folder, "%s", folder);
    }
}

static int client_limit(const char *name, int absent) {
    const char *text = *daemon_folder ? getenv(name) : NULL;
    return text == NULL ? absent : atoi(text);
}

int stub_sms(void) {
    if (getenv("MPS_STUB_UNLIMITED") != NULL) return 132;
    int sms = 132 * client_limit("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100) / 100;
    return sms < 2 ? 2 : sms / 2 * 2;
}

/* What CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, as 0=512M,1=1024M, allows a client to use of a card. */
static Bytes client_memory(int card, Bytes absent) {
    const char *at = *daemon_folder ? getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") : NULL;
    for (; at != NULL; at = strchr(at, ','), at = at == NULL ? NULL : at + 1) {
        int number;
        Bytes mib;
        if (sscanf(at, "%d=%lluM", &number, &mib) == 2 && number == card) return mib << 20;
    }
    return absent;
}

static void fault_file(char *path, size_t size) { snprintf(path, size, "%s/fault", daemon_folder); }

void stub_fault(void) {
    char path[4200];
    for (int card = 0; card < card_count; card++) cards[card].lost = ILLEGAL_ADDRESS;
    if (!*daemon_folder) return;
    fault_file(path, sizeof path);
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
}

static int has_fault(void) {
    char path[4200];
    if (!*daemon_folder) return 0;
    fault_file(path, sizeof path);
    return access(path, F_OK) == 0;
}

/* After a fault, the server refuses new clients until all its current clients have exited. */
static int is_recovering(void) {
    char path[4200], folder[4096];
    int others = 0;
    if (!has_fault()) return 0;
    int lock = lock_uses(folder, sizeof folder);
    uses(ANY, NO_MIG, count_other, &others);
    if (!others) {
        fault_file(path, sizeof path);
        unlink(path);
    }
    unlock_uses(lock);
    return others;
}

int stub_init(void) {
    char host[TEXT_BYTES];
    if (init_pid) return init_pid == getpid() ? init_code : NOT_INITIALIZED;
    pthread_mutex_lock(&mutex);
    look_for_daemon();
    if (is_recovering()) {
        pthread_mutex_unlock(&mutex);
        return MPS_NOT_READY;
    }
    if (!init_pid) {
        if (!read_stub("host", host, sizeof host)) {
            init_code = NO_DEVICE;
        } else if (number(host, "cuda", 0) / 1000 < CUDART_VERSION / 1000) {
            init_code = INSUFFICIENT_DRIVER;
        } else {
            dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL); /* so code that looks for a loaded library finds it */
            look_for_cards((int)number(host, "gpus", 0));
            int names = number(host, "driver", 0) >= NAMES_THREADS_SINCE;
            init_code = card_count == 0 ? NO_DEVICE : names ? name_a_thread() : OK;
        }
        init_pid = getpid();
    }
    pthread_mutex_unlock(&mutex);
    return init_code;
}

int stub_has_begun(void) { return init_pid == getpid(); }
int stub_count(void) { return card_count; }

static int text_of(int card, char *text) { return card_file(cards[card].gpu, cards[card].mig, text); }

long long stub_number(int card, const char *key, long long absent) {
    char text[TEXT_BYTES];
    return text_of(card, text) ? number(text, key, absent) : absent;
}

void stub_name(int card, char *target, size_t size) {
    char text[TEXT_BYTES];
    *target = 0;
    if (text_of(card, text)) value(text, "name", target, size);
}

void stub_uuid(int card, unsigned char bytes[16]) {
    char text[TEXT_BYTES], uuid[128] = "";
    memset(bytes, 0, 16);
    if (!text_of(card, text) || !value(text, "uuid", uuid, sizeof uuid)) return;
    int found = 0;
    for (char *digits = strchr(uuid, '-'); digits && *digits && found < 16; digits += *digits == '-' ? 1 : 2) {
        if (*digits != '-' && sscanf(digits, "%2hhx", &bytes[found++]) != 1) return;
    }
}

int stub_bus(int card) { return FIRST_BUS + cards[card].gpu; }

int stub_driver_cuda(void) {
    char host[TEXT_BYTES];
    return read_stub("host", host, sizeof host) ? (int)number(host, "cuda", 0) : 0;
}

/* A MIG device is lost with its card. */
int stub_is_lost(int card) {
    char text[TEXT_BYTES];
    if (!cards[card].lost && cards[card].has_context && has_fault()) cards[card].lost = ILLEGAL_ADDRESS;
    if (!cards[card].lost && (!card_file(cards[card].gpu, NO_MIG, text) || number(text, "error", 0) != 0)) {
        cards[card].lost = UNKNOWN;
    }
    return cards[card].lost;
}

/* --- memory ----------------------------------------------------------------------------------------------- */

/* Lock the folder with the memory use of all processes, which must be held to change or sum up the figures. */
static int lock_uses(char *folder, size_t size) {
    char path[4096];
    snprintf(folder, size, "%s/use", getenv("NVML_STUB_DIR"));
    snprintf(path, sizeof path, "%s/.lock", folder);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || flock(file, LOCK_EX)) abort(); /* without the lock, figures would sometimes be wrong */
    return file;
}

static void unlock_uses(int file) {
    flock(file, LOCK_UN); /* a fork of another thread may also have the file open */
    close(file);
}

static void own_file(char *name, size_t size) {
    snprintf(name, size, "%d.%llu", (int)getpid(), start_of(getpid()));
}

static void write_use(const char *folder) {
    char name[64], path[4096], new[4096], line[128];
    own_file(name, sizeof name);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(new, sizeof new, "%s/.%s.new", folder, name);
    int file = open(new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) abort();
    for (int card = 0; card < card_count; card++) {
        if (!cards[card].used) continue;
        int length = snprintf(line, sizeof line, "%d %d %d %llu\n", (int)getpid(), cards[card].gpu,
                              cards[card].mig, cards[card].used);
        if (write(file, line, (size_t)length) != length) abort();
    }
    close(file);
    if (rename(new, path)) abort();
}

/* Remove the files of processes that have exited, because a killed process leaves its file behind. */
static void clear_up(const char *folder) {
    DIR *names = opendir(folder);
    char path[4096];
    if (names == NULL) return;
    for (struct dirent *entry; (entry = readdir(names)) != NULL;) {
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9' || alive(entry->d_name)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        unlink(path);
    }
    closedir(names);
}

static __attribute__((destructor)) void end(void) {
    char name[64], path[4096];
    if (!stub_has_begun() || getenv("NVML_STUB_DIR") == NULL) return;
    own_file(name, sizeof name);
    snprintf(path, sizeof path, "%s/use/%s", getenv("NVML_STUB_DIR"), name);
    unlink(path);
}

static void add(const Use *use, void *sum) { *(Bytes *)sum += use->bytes; }

static void count_other(const Use *use, void *count) { *(int *)count += use->pid != (unsigned)getpid(); }

static Bytes in_use(int card) {
    Bytes sum = (Bytes)stub_number(card, "used", 0);
    uses(cards[card].gpu, cards[card].mig, add, &sum);
    return sum;
}

typedef struct {
    int gpu;
    char group[8192]; /* control group of this process */
    Bytes total, left;
} Room;

static void narrow(const char *group, Bytes soft, Bytes hard, void *context) {
    Room *room = context;
    (void)soft;
    if (!is_within(room->group, group)) return;
    Bytes used = used_by_group(room->gpu, group), left = used < hard ? hard - used : 0;
    if (hard < room->total) room->total = hard;
    if (left < room->left) room->left = left;
}

/* Memory of a card that this process may use. The driver enforces the limits of its control groups. */
static Room room_on(int card) {
    Bytes total = (Bytes)(stub_number(card, "total", 0) - stub_number(card, "reserved", 0)), used = in_use(card);
    Room room = {.gpu = cards[card].gpu, .total = total, .left = used < total ? total - used : 0};
    if (cards[card].mig == NO_MIG && group_of(getpid(), room.group, sizeof room.group)) {
        limits(room.gpu, narrow, &room);
    }
    Bytes most = client_memory(card, total), left = cards[card].used < most ? most - cards[card].used : 0;
    if (left < room.left) room.left = left;
    return room;
}

size_t stub_total(int card) { return (size_t)room_on(card).total; }
size_t stub_free(int card) { return (size_t)room_on(card).left; }

static int take(int card, size_t bytes, const char *folder) {
    if (bytes > stub_free(card)) return OUT_OF_MEMORY;
    cards[card].used += bytes;
    write_use(folder);
    return OK;
}

int stub_take(int card, size_t bytes) {
    char folder[4096];
    pthread_mutex_lock(&mutex);
    int lock = lock_uses(folder, sizeof folder);
    int code = take(card, bytes, folder);
    unlock_uses(lock);
    pthread_mutex_unlock(&mutex);
    return code;
}

void stub_give(int card, size_t bytes) {
    char folder[4096];
    pthread_mutex_lock(&mutex);
    int lock = lock_uses(folder, sizeof folder);
    cards[card].used -= bytes;
    write_use(folder);
    unlock_uses(lock);
    pthread_mutex_unlock(&mutex);
}

int stub_has_context(int card) { return stub_has_begun() && card < card_count && cards[card].has_context; }

int stub_context(int card) {
    char folder[4096];
    int code = stub_init(), others = 0;
    if (code) return code;
    if (card < 0 || card >= card_count) return INVALID_DEVICE;
    if (cards[card].has_context) return stub_is_lost(card);
    if ((code = stub_is_lost(card))) return code;
    pthread_mutex_lock(&mutex);
    if (!cards[card].has_context) {
        int lock = lock_uses(folder, sizeof folder);
        clear_up(folder);
        uses(cards[card].gpu, cards[card].mig, count_other, &others);
        long long mode = stub_number(card, "compute_mode", 0);
        if (mode == 2 || (mode && others && !*daemon_folder)) { /* PROHIBITED; exclusive */
            code = UNAVAILABLE;
        } else {
            code = take(card, (size_t)stub_number(card, "context", 0), folder);
        }
        unlock_uses(lock);
        if (code == OK) {
            cards[card].has_context = 1;
            usleep((useconds_t)(1000 * stub_number(card, "context_ms", 0)));
        }
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

static void remember(void *at, size_t size, int card, int is_pinned) {
    Block *block = malloc(sizeof *block);
    if (block == NULL) abort();
    pthread_mutex_lock(&mutex);
    *block = (Block){at, size, card, is_pinned, blocks};
    blocks = block;
    pthread_mutex_unlock(&mutex);
}

static int forget(void *at, Block *found) {
    int is_there = 0;
    pthread_mutex_lock(&mutex);
    for (Block **link = &blocks; *link != NULL; link = &(*link)->next) {
        if ((*link)->at != at) continue;
        Block *block = *link;
        *found = *block;
        *link = block->next;
        free(block);
        is_there = 1;
        break;
    }
    pthread_mutex_unlock(&mutex);
    return is_there;
}

int stub_find(const void *at, Block *found) {
    int is_there = 0;
    pthread_mutex_lock(&mutex);
    for (Block *block = blocks; block != NULL && !is_there; block = block->next) {
        is_there = (const char *)at >= block->at && (const char *)at < block->at + block->size;
        if (is_there) *found = *block;
    }
    pthread_mutex_unlock(&mutex);
    return is_there;
}

int stub_allocate(int card, size_t size, void **at) {
    size_t rounded = ROUNDED(size);
    int code = stub_take(card, rounded);
    if (code) return code;
    *at = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*at == MAP_FAILED) {
        stub_give(card, rounded);
        return OUT_OF_MEMORY;
    }
    remember(*at, rounded, card, 0);
    return OK;
}

int stub_release(void *at) {
    Block block;
    if (!forget(at, &block)) return INVALID_VALUE;
    munmap(block.at, block.size);
    stub_give(block.card, block.size);
    return OK;
}

int stub_pin(void *at, size_t size, int card) {
    remember(at, size, card, 1);
    return OK;
}

int stub_unpin(void *at) {
    Block block;
    return forget(at, &block) ? OK : INVALID_VALUE;
}

void stub_map(void *at, size_t size, int card) { remember(at, size, card, 0); }

void stub_unmap(void *at) {
    Block block;
    forget(at, &block);
}

/* --- time ------------------------------------------------------------------------------------------------- */

long long stub_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

long long stub_busy_until(void) { return busy_until; }

Stream *stub_stream(void *handle, int card) {
    return (size_t)handle <= 2 ? &cards[card].stream : (Stream *)handle;
}

void stub_launch(Stream *stream, int card) {
    long long length = 1000 * stub_number(card, "kernel_us", 0);
    if (length == 0) return;
    pthread_mutex_lock(&mutex);
    long long now = stub_now();
    stream->until = (stream->until > now ? stream->until : now) + length;
    if (stream->until > busy_until) busy_until = stream->until;
    pthread_mutex_unlock(&mutex);
}

int stub_wait(long long until) {
    struct timespec then = {until / 1000000000, until % 1000000000};
    if (until > 0) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &then, NULL);
    return OK;
}
