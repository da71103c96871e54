// shim.h over XRT's C++ interface. Built by `cargo xtask shim` where XRT's headers are; see shim.h for what each call does.
#include "shim.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <unistd.h>
#include <vector>

#include <xrt/detail/version-slim.h>
#include <xrt/experimental/xrt_elf.h>
#include <xrt/experimental/xrt_ext.h>
#include <xrt/experimental/xrt_system.h>
#include <xrt/experimental/xrt_version.h>
#include <xrt/experimental/xrt_xclbin.h>
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_hw_context.h>
#include <xrt/xrt_kernel.h>

struct xdna_device {
    xrt::device device;
};

// A context of a full ELF makes its kernels by another class than one of an xclbin.
struct xdna_context {
    xrt::hw_context context;
    bool is_elf;
};

struct xdna_kernel {
    xrt::kernel kernel;
};

struct xdna_buffer {
    xrt::bo bo;
};

struct xdna_run {
    xrt::run run;
    // Started, and not seen to end.
    bool going = false;
};

namespace {

// Without this, XRT would read xrt.ini beside the program or in the current directory, which can be anybody's. Whoever names a
// file of their own is heeded. It has to run before XRT's own initialisers (-z initfirst).
[[gnu::constructor]] void no_ini_by_chance() { setenv("XRT_INI_PATH", "/dev/null", 0); }

// While one of these lives, descriptor 1 is descriptor 2. They nest, also over threads: the last one out restores it.
class StdoutIsStderr {
  public:
    StdoutIsStderr() {
        std::lock_guard<std::mutex> guard(mutex);
        if (depth++ == 0) {
            std::fflush(stdout);
            saved = fcntl(1, F_DUPFD_CLOEXEC, 3);
            if (saved >= 0 && dup2(2, 1) < 0) {
                close(saved);
                saved = -1;
            }
        }
    }
    ~StdoutIsStderr() {
        std::lock_guard<std::mutex> guard(mutex);
        if (--depth == 0) {
            // What is still buffered would come out on the program's stdout at its end.
            std::cout.flush();
            std::fflush(stdout);
            if (saved >= 0) {
                dup2(saved, 1);
                close(saved);
                saved = -1;
            }
        }
    }
    StdoutIsStderr(const StdoutIsStderr &) = delete;
    StdoutIsStderr &operator=(const StdoutIsStderr &) = delete;

  private:
    static std::mutex mutex;
    static int depth;
    static int saved;
};

std::mutex StdoutIsStderr::mutex;
int StdoutIsStderr::depth = 0;
int StdoutIsStderr::saved = -1;

void fill(xdna_error *e, int32_t kind, int32_t code, const char *text) {
    if (!e) return;
    e->kind = kind;
    e->code = code;
    std::snprintf(e->text, sizeof e->text, "%s", text);
}

// Runs f and turns what it throws into e and `bad`.
template <class T, class F> T guarded(xdna_error *e, T bad, F f) {
    StdoutIsStderr quiet;
    try {
        T result = f();
        fill(e, XDNA_OK, 0, "");
        return result;
    } catch (const xrt::run::command_error &x) {
        fill(e, XDNA_COMMAND, static_cast<int32_t>(x.get_command_state()), x.what());
    } catch (const std::system_error &x) {
        // XRT throws errno both as it is and negated.
        fill(e, XDNA_SYSTEM, std::abs(x.code().value()), x.what());
    } catch (const std::bad_alloc &x) {
        fill(e, XDNA_SYSTEM, ENOMEM, x.what());
    } catch (const std::exception &x) {
        fill(e, XDNA_EXCEPTION, 0, x.what());
    } catch (...) {
        fill(e, XDNA_UNKNOWN, 0, "an exception of an unknown type");
    }
    return bad;
}

// For calls that give a handle.
template <class H, class F> H *make(xdna_error *e, F f) {
    return guarded(e, static_cast<H *>(nullptr), f);
}

// For calls that do something.
template <class F> int32_t act(xdna_error *e, F f) {
    return guarded(e, static_cast<int32_t>(-1), [&] {
        f();
        return static_cast<int32_t>(0);
    });
}

// Destructors of XRT's classes print and, where a device is gone, throw.
template <class H> void drop(H *handle) {
    act(nullptr, [&] { delete handle; });
}

} // namespace

extern "C" {

uint32_t xdna_abi(void) { return XDNA_SHIM_ABI; }

int32_t xdna_versions(uint32_t *runtime, uint32_t *built, xdna_error *e) {
    return act(e, [&] {
        *runtime = xrt::version::major() << 16 | xrt::version::minor();
        *built = XRT_VERSION_CODE;
    });
}

int32_t xdna_device_count(uint32_t *count, xdna_error *e) {
    return act(e, [&] { *count = xrt::system::enumerate_devices(); });
}

void xdna_leave(int32_t code) {
    {
        StdoutIsStderr quiet;
    }
    std::fflush(nullptr);
    _exit(code);
}

xdna_device *xdna_device_open(uint32_t index, xdna_error *e) {
    return make<xdna_device>(e, [&] { return new xdna_device{xrt::device(index)}; });
}

int32_t xdna_device_text(xdna_device *d, int32_t what, char *out, size_t n, xdna_error *e) {
    return act(e, [&] {
        std::string text;
        switch (what) {
        case 0: text = d->device.get_info<xrt::info::device::name>(); break;
        case 1: text = d->device.get_info<xrt::info::device::bdf>(); break;
        default: throw std::system_error(EINVAL, std::generic_category(), "xdna_device_text");
        }
        std::snprintf(out, n, "%s", text.c_str());
    });
}

void xdna_device_free(xdna_device *d) { drop(d); }

xdna_context *xdna_context_xclbin(xdna_device *d, const void *bytes, size_t n, xdna_error *e) {
    return make<xdna_context>(e, [&] {
        const char *first = static_cast<const char *>(bytes);
        xrt::xclbin xclbin(std::vector<char>(first, first + n));
        xrt::uuid id = d->device.register_xclbin(xclbin);
        return new xdna_context{xrt::hw_context(d->device, id), false};
    });
}

xdna_context *xdna_context_elf(xdna_device *d, const void *bytes, size_t n, xdna_error *e) {
    return make<xdna_context>(e, [&] {
        xrt::elf elf(bytes, n);
        return new xdna_context{xrt::hw_context(d->device, elf), true};
    });
}

int32_t xdna_context_add(xdna_context *c, const void *bytes, size_t n, xdna_error *e) {
    return act(e, [&] { c->context.add_config(xrt::elf(bytes, n)); });
}

void xdna_context_free(xdna_context *c) { drop(c); }

xdna_kernel *xdna_kernel_open(xdna_context *c, const char *name, xdna_error *e) {
    return make<xdna_kernel>(e, [&] {
        if (c->is_elf) return new xdna_kernel{xrt::ext::kernel(c->context, name)};
        return new xdna_kernel{xrt::kernel(c->context, name)};
    });
}

int32_t xdna_kernel_group(xdna_kernel *k, int32_t arg, int32_t *group, xdna_error *e) {
    return act(e, [&] { *group = k->kernel.group_id(arg); });
}

void xdna_kernel_free(xdna_kernel *k) { drop(k); }

xdna_buffer *xdna_buffer_data(xdna_device *d, size_t n, xdna_error *e) {
    return make<xdna_buffer>(e, [&] { return new xdna_buffer{xrt::ext::bo(d->device, n)}; });
}

xdna_buffer *xdna_buffer_grouped(xdna_device *d, int32_t group, size_t n, xdna_error *e) {
    return make<xdna_buffer>(
        e, [&] { return new xdna_buffer{xrt::bo(d->device, n, xrt::bo::flags::host_only, group)}; });
}

xdna_buffer *xdna_buffer_instructions(xdna_device *d, int32_t group, size_t n, xdna_error *e) {
    return make<xdna_buffer>(
        e, [&] { return new xdna_buffer{xrt::bo(d->device, n, xrt::bo::flags::cacheable, group)}; });
}

xdna_buffer *xdna_buffer_import(xdna_device *d, int32_t fd, xdna_error *e) {
    return make<xdna_buffer>(
        e, [&] { return new xdna_buffer{xrt::bo(d->device, static_cast<xrt::bo::export_handle>(fd))}; });
}

int32_t xdna_buffer_export(xdna_buffer *b, int32_t *fd, xdna_error *e) {
    return act(e, [&] {
        // The bo keeps its descriptor and closes it itself; the caller gets one of its own.
        int copy = fcntl(b->bo.export_buffer(), F_DUPFD_CLOEXEC, 3);
        if (copy < 0) throw std::system_error(errno, std::generic_category(), "dup of an exported buffer");
        *fd = copy;
    });
}

void *xdna_buffer_map(xdna_buffer *b, xdna_error *e) {
    return guarded(e, static_cast<void *>(nullptr), [&] { return b->bo.map(); });
}

int32_t xdna_buffer_address(xdna_buffer *b, uint64_t *address, uint64_t *size, xdna_error *e) {
    return act(e, [&] {
        *address = b->bo.address();
        *size = b->bo.size();
    });
}

int32_t xdna_buffer_sync(xdna_buffer *b, int32_t to_device, size_t n, size_t offset, xdna_error *e) {
    return act(e, [&] {
        b->bo.sync(to_device ? XCL_BO_SYNC_BO_TO_DEVICE : XCL_BO_SYNC_BO_FROM_DEVICE, n, offset);
    });
}

void xdna_buffer_free(xdna_buffer *b) { drop(b); }

xdna_run *xdna_run_new(xdna_kernel *k, xdna_error *e) {
    return make<xdna_run>(e, [&] { return new xdna_run{xrt::run(k->kernel), false}; });
}

int32_t xdna_run_set_u64(xdna_run *r, int32_t arg, uint64_t value, xdna_error *e) {
    return act(e, [&] { r->run.set_arg(arg, value); });
}

int32_t xdna_run_set_u32(xdna_run *r, int32_t arg, uint32_t value, xdna_error *e) {
    return act(e, [&] { r->run.set_arg(arg, value); });
}

int32_t xdna_run_set_buffer(xdna_run *r, int32_t arg, xdna_buffer *b, xdna_error *e) {
    return act(e, [&] { r->run.set_arg(arg, b->bo); });
}

int32_t xdna_run_start(xdna_run *r, xdna_error *e) {
    return act(e, [&] {
        // Also when it throws: it is not known how far it came.
        r->going = true;
        r->run.start();
    });
}

int32_t xdna_run_wait(xdna_run *r, uint32_t ms, int32_t *state, xdna_error *e) {
    return act(e, [&] {
        ert_cmd_state s = r->run.wait(std::chrono::milliseconds(ms ? ms : 1));
        // XRT says TIMEOUT both when the driver ended the command and when only this wait is over; the command itself knows.
        if (s == ERT_CMD_STATE_TIMEOUT) s = r->run.state();
        r->going = s < ERT_CMD_STATE_COMPLETED || s == ERT_CMD_STATE_SUBMITTED;
        *state = static_cast<int32_t>(s);
    });
}

void xdna_run_free(xdna_run *r) {
    // XRT ends the process when a run is destroyed that has not ended. Such a run is left behind, with the context, the
    // kernel and the buffers that it refers to: the device may still write to them.
    if (r && r->going) return;
    drop(r);
}
}
