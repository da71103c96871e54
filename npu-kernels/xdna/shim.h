/* The C face of XRT 2.25's C++ interface, as far as this project uses it. The Rust side loads it at run time, so that the
 * programs build and start without XRT. Nothing here decides anything: it translates calls, and exceptions into xdna_error.
 *
 * Rules of every function that takes an xdna_error: it fills it whole (kind 0 on success), and no exception leaves it. A null
 * pointer, or a negative number, means failure. Handles are owned by the caller and given back with the _free of their type.
 * What the library prints to descriptor 1 during a call goes to descriptor 2: standard output belongs to the program.
 *
 * src/ffi.rs repeats this file in Rust and is held against it by a test. */
#ifndef XDNA_SHIM_H
#define XDNA_SHIM_H

#include <stddef.h>
#include <stdint.h>

/* Raised with every change of this file. The library and the program must have the same. */
#define XDNA_SHIM_ABI 1

/* xdna_error.kind: success; an errno in code; another exception; an exception that is none of C++'s; a command that ended in the
 * state that code holds (ert_cmd_state). */
#define XDNA_OK 0
#define XDNA_SYSTEM 1
#define XDNA_EXCEPTION 2
#define XDNA_UNKNOWN 3
#define XDNA_COMMAND 4

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xdna_device xdna_device;
typedef struct xdna_context xdna_context;
typedef struct xdna_kernel xdna_kernel;
typedef struct xdna_buffer xdna_buffer;
typedef struct xdna_run xdna_run;

typedef struct xdna_error {
    int32_t kind;
    int32_t code;
    char text[504];
} xdna_error;

/* XDNA_SHIM_ABI of the library. Calls nothing of XRT. */
uint32_t xdna_abi(void);
/* XRT's version: major << 16 | minor, and of the headers that this was built with. */
int32_t xdna_versions(uint32_t *runtime, uint32_t *built, xdna_error *e);
/* How many devices XRT sees. */
int32_t xdna_device_count(uint32_t *count, xdna_error *e);
/* Ends the process without running destructors: XRT's are known to hang. Flushes C and C++ streams first. */
void xdna_leave(int32_t code);

xdna_device *xdna_device_open(uint32_t index, xdna_error *e);
/* A text about the device, cut to n bytes with its final NUL. what: 0 name, 1 PCI address. */
int32_t xdna_device_text(xdna_device *d, int32_t what, char *out, size_t n, xdna_error *e);
void xdna_device_free(xdna_device *d);

/* Registers an xclbin and makes a context for it (flow 1). */
xdna_context *xdna_context_xclbin(xdna_device *d, const void *bytes, size_t n, xdna_error *e);
/* Makes a context for a full ELF (flow 2). */
xdna_context *xdna_context_elf(xdna_device *d, const void *bytes, size_t n, xdna_error *e);
/* Adds another full ELF's kernels to a context of flow 2. */
int32_t xdna_context_add(xdna_context *c, const void *bytes, size_t n, xdna_error *e);
void xdna_context_free(xdna_context *c);

/* The kernel of that name: "NAME" in flow 1, "KERNEL:INSTANCE" in flow 2. */
xdna_kernel *xdna_kernel_open(xdna_context *c, const char *name, xdna_error *e);
/* The memory group of an argument (flow 1). */
int32_t xdna_kernel_group(xdna_kernel *k, int32_t arg, int32_t *group, xdna_error *e);
void xdna_kernel_free(xdna_kernel *k);

/* Memory that host and device see, not zeroed. */
xdna_buffer *xdna_buffer_data(xdna_device *d, size_t n, xdna_error *e);
/* The same, in the memory group of a kernel's argument (flow 1). */
xdna_buffer *xdna_buffer_grouped(xdna_device *d, int32_t group, size_t n, xdna_error *e);
/* Memory for a flow-1 kernel's instructions, in the device's heap. */
xdna_buffer *xdna_buffer_instructions(xdna_device *d, int32_t group, size_t n, xdna_error *e);
/* Imports a dma-buf. XRT maps it through the driver: not for memory of another device, see Foreign in src/foreign.rs. */
xdna_buffer *xdna_buffer_import(xdna_device *d, int32_t fd, xdna_error *e);
/* A dma-buf descriptor for the buffer; the caller closes it. */
int32_t xdna_buffer_export(xdna_buffer *b, int32_t *fd, xdna_error *e);
void *xdna_buffer_map(xdna_buffer *b, xdna_error *e);
int32_t xdna_buffer_address(xdna_buffer *b, uint64_t *address, uint64_t *size, xdna_error *e);
/* Flushes or invalidates the host's caches over a range. to_device: 1 before the device reads, 0 before the host does. */
int32_t xdna_buffer_sync(xdna_buffer *b, int32_t to_device, size_t n, size_t offset, xdna_error *e);
void xdna_buffer_free(xdna_buffer *b);

xdna_run *xdna_run_new(xdna_kernel *k, xdna_error *e);
int32_t xdna_run_set_u64(xdna_run *r, int32_t arg, uint64_t value, xdna_error *e);
int32_t xdna_run_set_u32(xdna_run *r, int32_t arg, uint32_t value, xdna_error *e);
int32_t xdna_run_set_buffer(xdna_run *r, int32_t arg, xdna_buffer *b, xdna_error *e);
int32_t xdna_run_start(xdna_run *r, xdna_error *e);
/* Waits at most ms milliseconds (not 0) and gives the command's state, an ert_cmd_state: 4 is COMPLETED. A state under 4 or 7
 * means that the time was up and the command may still be running. Only after a start that succeeded: XRT would wait for ever. */
int32_t xdna_run_wait(xdna_run *r, uint32_t ms, int32_t *state, xdna_error *e);
/* A run that has not been seen to end is left behind, and with it its context and buffers, until the process ends. */
void xdna_run_free(xdna_run *r);

#ifdef __cplusplus
}
#endif
#endif
