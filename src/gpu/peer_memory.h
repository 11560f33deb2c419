// A piece of memory at every rank that every rank's kernels can address.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gpu/process_window.h"
#include "gpu/runtime/resources.h"
#include "gpu/topology.h"
#include "latent_moe/bootstrap.h"

namespace latent_moe::gpu {

class PeerMemory {
public:
    /// Collective, with the rank's device current. Threads of one process exchange pointers; processes may need `comm`.
    PeerMemory(const Bootstrap& bootstrap, const Topology& topology, ncclComm_t comm, std::size_t bytes);

    /// Why there is none; empty if there is.
    const std::string& missing() const noexcept { return missing_; }
    /// Before the end of a window that was made with a communicator which is gone.
    void forget_communicator() noexcept {
        if (window_) window_->forget_communicator();
    }
    void* base(int rank) const noexcept { return bases_[static_cast<std::size_t>(rank)]; }

private:
    void exchange_pointers(const Bootstrap& bootstrap, std::size_t bytes);

    // A peer may still hold a rank's memory when that rank has let go of it: what goes last frees it.
    std::vector<std::shared_ptr<DeviceMemory>> memories_;
    std::unique_ptr<ProcessWindow> window_;
    std::vector<void*> bases_;
    std::string missing_;
};

}  // namespace latent_moe::gpu
