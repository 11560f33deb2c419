// Memory that the ranks of one context, each a process of its own, can address in each other. How is the vendor's: NCCL's
// symmetric windows (nccl_window.cu), or IPC handles (ipc_window.cpp).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "gpu/runtime/nccl.h"
#include "latent_moe/bootstrap.h"

namespace latent_moe::gpu {

class ProcessWindow {
public:
#ifdef LATENT_MOE_HIP
    static constexpr bool needs_communicator = false;
#else
    static constexpr bool needs_communicator = true;
#endif

    /// Collective, with the rank's device current. Afterwards `missing()` says, on every rank, why there is no window, if
    /// there is none. `comm` may be null where none is needed.
    ProcessWindow(const Bootstrap& bootstrap, ncclComm_t comm, std::size_t bytes);
    ~ProcessWindow();
    ProcessWindow(const ProcessWindow&) = delete;
    ProcessWindow& operator=(const ProcessWindow&) = delete;

    const std::string& missing() const noexcept {
        return missing_;
    }
    /// The communicator is gone: the window cannot be given back to it.
    void forget_communicator() noexcept {
        comm_ = nullptr;
    }
    /// Where this rank's kernels find each rank's memory.
    const std::vector<void*>& bases() const noexcept {
        return bases_;
    }

private:
    ncclComm_t comm_;
    void* memory_ = nullptr;  ///< this rank's
    void* window_ = nullptr;  ///< NCCL's
    std::vector<void*> bases_;
    std::string missing_;
};

}  // namespace latent_moe::gpu
