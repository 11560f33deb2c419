#include "gpu/runtime/nccl.h"

#include <fmt/format.h>

#include <exception>
#include <future>
#include <thread>
#include <utility>

#include "gpu/runtime/device_api.h"
#include "gpu/runtime/library.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

constexpr int oldest_version = 21800;  // ncclCommSplit

#ifdef LATENT_MOE_HIP

/// Peer windows are not RCCL's business here: processes share memory by IPC handles (ipc_window.cpp).
void find_windows(Library&, Nccl& table) {
    table.window_missing = "RCCL registers none here";
}
Library open() {
    return Library({"librccl.so.1", "librccl.so"});
}

#else

void find_windows(Library& library, Nccl& table) {
#define X(name) table.name = library.symbol<decltype(nccl##name)>("nccl" #name, true);
    LATENT_MOE_NCCL_WINDOW_FUNCTIONS(X)
#undef X
    table.DevCommCreate = library.symbol<void>("ncclDevCommCreate", true);
    table.DevCommDestroy = library.symbol<void>("ncclDevCommDestroy", true);
    if (table.DevCommCreate == nullptr || table.CommWindowRegister == nullptr) {
        table.window_missing = fmt::format("NCCL {} has no device API, expected 2.28", table.version_text());
    } else if (table.version / 100 != NCCL_VERSION_CODE / 100) {
        // The device communicator's layout is compiled in, and each release has its own.
        table.window_missing = fmt::format("NCCL is {}, but this build's device API is that of {}.{}", table.version_text(),
                                           NCCL_MAJOR, NCCL_MINOR);
    }
}
Library open() {
    return Library({"libnccl.so.2"});
}

#endif

Nccl load() {
    Nccl table;
    Library library = open();
#define X(name) table.name = library.symbol<decltype(nccl##name)>("nccl" #name);
    LATENT_MOE_NCCL_FUNCTIONS(X)
#undef X
    table.missing = library.missing();
    if (!table.missing.empty()) {
        table.window_missing = table.missing;
        return table;
    }
    if (table.GetVersion(&table.version) != ncclSuccess || table.version < oldest_version) {
        table.missing = fmt::format("{} is version {}, expected 2.18 or newer", nccl_name, table.version_text());
    }
    find_windows(library, table);
    return table;
}

}  // namespace

std::string Nccl::version_text() const {
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

const Nccl& look_for_nccl() {
    static const Nccl table = load();
    return table;
}

const Nccl& nccl() {
    const Nccl& table = look_for_nccl();
    if (!table.missing.empty()) throw Error(StatusCode::unavailable, fmt::format("{}: {}", nccl_name, table.missing));
    return table;
}

bool destroy_within(std::chrono::milliseconds timeout, ncclComm_t comm, int device) noexcept {
    try {
        std::promise<void> destroyed;
        std::future<void> end = destroyed.get_future();
        std::thread([comm, device, destroyed = std::move(destroyed)]() mutable {
            static_cast<void>(cudaSetDevice(device));
            // Whatever another thread captures.
            cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
            static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
            static_cast<void>(nccl().CommDestroy(comm));
            destroyed.set_value();
        }).detach();
        return end.wait_for(timeout) == std::future_status::ready;
    } catch (const std::exception&) {  // there is no thread to be had
        static_cast<void>(nccl().CommAbort(comm));
        return true;
    }
}

void fail(ncclResult_t result, const char* call) {
    const char* detail = nccl().GetLastError(nullptr);
    throw Error(result == ncclRemoteError ? StatusCode::aborted : StatusCode::internal,
                fmt::format("{}: {}{}{}", call, nccl().GetErrorString(result),
                            detail != nullptr && *detail != '\0' ? ": " : "", detail != nullptr ? detail : ""));
}

}  // namespace latent_moe::gpu
