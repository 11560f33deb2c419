#include "gpu/peer_memory.h"

#include "gpu/collective_setup.h"

namespace latent_moe::gpu {

PeerMemory::PeerMemory(const Bootstrap& bootstrap, const Topology& topology, ncclComm_t comm, std::size_t bytes) {
    if (topology.one_process && topology.peer_access) {
        exchange_pointers(bootstrap, bytes);
    } else if (topology.one_process) {
        missing_ = "the GPUs of this process cannot address each other's memory";
    } else if (!topology.one_host) {
        missing_ = "ranks on several hosts cannot address each other's memory";
    } else if (ProcessWindow::needs_communicator && comm == nullptr) {
        missing_ = "ranks that are processes need NCCL for it";
    } else {
        window_ = std::make_unique<ProcessWindow>(bootstrap, comm, bytes);
        missing_ = window_->missing();
        bases_ = window_->bases();
    }
}

void PeerMemory::exchange_pointers(const Bootstrap& bootstrap, std::size_t bytes) {
    std::shared_ptr<DeviceMemory> mine;
    together(bootstrap, "peer window", [&] { mine = std::make_shared<DeviceMemory>(DeviceMemory::window(bytes)); });
    using Pointer = const std::shared_ptr<DeviceMemory>*;
    for (const Pointer theirs : gather<Pointer>(bootstrap, &mine)) {
        memories_.push_back(*theirs);
        bases_.push_back((*theirs)->get());
    }
    gather(bootstrap, 0);  // `mine` lives until all have copied it
}

}  // namespace latent_moe::gpu
