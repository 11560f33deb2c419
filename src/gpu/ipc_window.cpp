// IPC handles: every rank allocates its part, and opens the others'. One host only, which is where peers can address each
// other at all.
#include "gpu/collective_setup.h"
#include "gpu/process_window.h"
#include "gpu/runtime/check.h"

#include <fmt/format.h>

namespace latent_moe::gpu {

ProcessWindow::ProcessWindow(const Bootstrap& bootstrap, ncclComm_t comm, std::size_t bytes) : comm_(comm) {
    hipIpcMemHandle_t mine{};
    together(bootstrap, "peer window", [&] {
        check(allocate_window(&memory_, bytes), "hipExtMallocWithFlags");
        check(hipIpcGetMemHandle(&mine, memory_), "hipIpcGetMemHandle");
    });
    const auto handles = gather(bootstrap, mine);
    bases_.assign(static_cast<std::size_t>(bootstrap.world), nullptr);
    hipError_t error = hipSuccess;
    for (std::size_t rank = 0; rank < handles.size() && error == hipSuccess; ++rank) {
        bases_[rank] = memory_;
        if (static_cast<int>(rank) == bootstrap.rank) continue;
        bases_[rank] = nullptr;
        error = hipIpcOpenMemHandle(&bases_[rank], handles[rank], hipIpcMemLazyEnablePeerAccess);
    }
    static_cast<void>(hipGetLastError());
    const auto errors = gather(bootstrap, error);
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
        if (errors[rank] == hipSuccess || !missing_.empty()) continue;
        missing_ = fmt::format("rank {} cannot address a peer's memory: hipIpcOpenMemHandle: {}", rank,
                               hipGetErrorString(errors[rank]));
    }
}

ProcessWindow::~ProcessWindow() {
    for (void* base : bases_) {
        if (base != nullptr && base != memory_) static_cast<void>(hipIpcCloseMemHandle(base));
    }
    // The memory itself lasts until the last process has closed it.
    if (memory_ != nullptr) static_cast<void>(hipFree(memory_));
}

}  // namespace latent_moe::gpu
