// The one file that compiles NCCL's device API; host functions come from the table that was loaded at run time.
#include <nccl_device.h>

#include "gpu/collective_setup.h"
#include "gpu/process_window.h"
#include "gpu/runtime/resources.h"

namespace latent_moe::gpu {
namespace {

__global__ void resolve(ncclWindow_t window, int world, void** bases) {
    for (int rank = 0; rank < world; ++rank) bases[rank] = ncclGetLsaPointer(window, 0, rank);
}

}  // namespace

ProcessWindow::ProcessWindow(const Bootstrap& bootstrap, ncclComm_t comm, std::size_t bytes) : comm_(comm) {
    together(bootstrap, "peer window", [&] {
        const Nccl& api = nccl();
        const int world = bootstrap.world;
        missing_ = api.window_missing;
        if (!missing_.empty()) return;
        check(api.MemAlloc(&memory_, bytes), "ncclMemAlloc");
        ncclWindow_t window = nullptr;
        check(api.CommWindowRegister(comm, memory_, bytes, &window, NCCL_WIN_COLL_SYMMETRIC), "ncclCommWindowRegister");
        window_ = window;
        if (window_ == nullptr) {
            missing_ = "NCCL gave no symmetric window";
            return;
        }
        // The device communicator says how many ranks load and store each other's memory. No multicast is asked for.
        ncclDevCommRequirements requirements = {};
        ncclDevComm device_comm;
        const auto create = reinterpret_cast<decltype(&ncclDevCommCreate)>(api.DevCommCreate);
        const auto destroy = reinterpret_cast<decltype(&ncclDevCommDestroy)>(api.DevCommDestroy);
        check(create(comm, &requirements, &device_comm), "ncclDevCommCreate");
        const int reachable = device_comm.lsaSize;
        static_cast<void>(destroy(comm, &device_comm));
        if (reachable != world) {
            missing_ = "only " + std::to_string(reachable) + " of " + std::to_string(world) +
                       " ranks can address each other's memory";
            return;
        }
        const DeviceMemory addresses(static_cast<std::size_t>(world) * sizeof(void*), "peer addresses");
        const Stream stream = make_stream();
        resolve<<<1, 1, 0, stream.get()>>>(window, world, reinterpret_cast<void**>(addresses.get()));
        check(cudaGetLastError(), "peer address kernel");
        bases_.resize(static_cast<std::size_t>(world));
        check(cudaMemcpyAsync(bases_.data(), addresses.get(), addresses.bytes(), cudaMemcpyDeviceToHost, stream.get()),
              "cudaMemcpyAsync");
        check(cudaStreamSynchronize(stream.get()), "peer address kernel");
    });
}

// A rank lets go when its own kernels have ended, whatever its peers do: they write through mappings of their own, and
// memory that is mapped anywhere lasts. So a peer that is late in a call, or stopped in one, still finds it.
ProcessWindow::~ProcessWindow() {
    if (window_ != nullptr && comm_ != nullptr)
        static_cast<void>(nccl().CommWindowDeregister(comm_, static_cast<ncclWindow_t>(window_)));
    if (memory_ != nullptr) static_cast<void>(nccl().MemFree(memory_));
}

}  // namespace latent_moe::gpu
