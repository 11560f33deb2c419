// Peer pointers from NCCL: memory that the ranks of one communicator, in processes of their own, can address in each other.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "gpu/runtime/nccl.h"

namespace latent_moe::gpu {

/// Registered with NCCL as a symmetric window. Made and released collectively.
class NcclWindow {
public:
    /// The communicator's device is current. Afterwards `missing()` says why there is no window, if there is none: ranks
    /// that are not all in one peer domain, or a NCCL without a device API.
    NcclWindow(ncclComm_t comm, int world, std::size_t bytes);
    ~NcclWindow();
    NcclWindow(const NcclWindow&) = delete;
    NcclWindow& operator=(const NcclWindow&) = delete;

    const std::string& missing() const noexcept { return missing_; }
    /// Where this rank's kernels find each rank's memory.
    const std::vector<void*>& bases() const noexcept { return bases_; }

private:
    ncclComm_t comm_;
    void* memory_ = nullptr;
    ncclWindow_t window_ = nullptr;
    std::vector<void*> bases_;
    std::string missing_;
};

}  // namespace latent_moe::gpu
