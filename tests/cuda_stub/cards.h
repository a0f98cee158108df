/* The cards of a host and their use by this process, for both libraries. Results are CUDA error codes. */

#ifndef CARDS_H
#define CARDS_H

#include <stddef.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INSUFFICIENT_DRIVER = 35,
    UNAVAILABLE = 46, /* the card is taken by another process, in compute mode EXCLUSIVE_PROCESS */
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    OPERATING_SYSTEM = 304,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, /* caused by this process or by another client of its MPS server */
    NOT_SUPPORTED_HERE = 801,
    MPS_NOT_READY = 807, /* the server is recovering from a fault */
    UNKNOWN = 999, /* returned by every call to a lost card */
};

enum { MOST_CARDS = 64 };

int stub_init(void);              /* like cuInit; returns NOT_INITIALIZED in a fork of a process that has called it */
int stub_has_begun(void);         /* true if this process has called stub_init */
int stub_count(void);             /* number of cards visible to this process */
int stub_context(int card);       /* creates the context unless it exists */
int stub_has_context(int card);
int stub_is_lost(int card);       /* an error if the card is lost, otherwise OK */
int stub_sms(void);               /* processors of a card that this process may use */
void stub_fault(void);            /* ends this process's CUDA, and that of all clients of its MPS daemon */
int stub_take(int card, size_t bytes);
void stub_give(int card, size_t bytes);
size_t stub_total(int card);
size_t stub_free(int card);
long long stub_number(int card, const char *key, long long absent); /* a field of the card's file */
void stub_name(int card, char *text, size_t size);
void stub_uuid(int card, unsigned char bytes[16]);
int stub_bus(int card);
int stub_driver_cuda(void);       /* the newest CUDA that the driver supports, as 13000 */

/* A stream is busy until this time, in nanoseconds of CLOCK_MONOTONIC. Kernels take time but compute nothing. */
typedef struct {
    long long until;
    int priority;
} Stream;

Stream *stub_stream(void *handle, int card); /* NULL, 1 and 2 are the default stream */
void stub_launch(Stream *stream, int card);
int stub_wait(long long until);
long long stub_now(void);
long long stub_busy_until(void); /* when all streams of this process are done */

/* Memory of this process that is registered with CUDA: on a card, or pinned. */
typedef struct Block {
    char *at;
    size_t size;
    int card, is_pinned;
    struct Block *next;
} Block;

int stub_allocate(int card, size_t size, void **at);
int stub_release(void *at);
int stub_pin(void *at, size_t size, int card);
int stub_unpin(void *at);
int stub_find(const void *at, Block *found);
void stub_map(void *at, size_t size, int card); /* maps memory allocated by cuMemCreate */
void stub_unmap(void *at);

#endif
