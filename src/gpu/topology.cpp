#include "gpu/topology.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "gpu/collective_setup.h"
#include "gpu/runtime/resources.h"
#include "gpu/runtime/vendor.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

std::uint64_t process_token() {
    static const std::uint64_t token = [] {
        std::random_device random;
        return static_cast<std::uint64_t>(random()) << 32 | random();
    }();
    return token;
}

/// Lets kernels on `device` address memory of `peer`. False where the machine cannot.
bool enable_peer_access(int device, int peer) {
    if (device == peer) return true;
    int possible = 0;
    check(cudaDeviceCanAccessPeer(&possible, device, peer), "cudaDeviceCanAccessPeer");
    if (possible == 0) return false;
    const CurrentDevice current(device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        static_cast<void>(cudaGetLastError());
    } else {
        check(error, "cudaDeviceEnablePeerAccess");
    }
    return true;
}

}  // namespace

int device_of(const Options& options, int rank) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (options.device >= count) {
        throw Error(StatusCode::unavailable,
                    fmt::format("device is {}, but this machine has {} GPUs", options.device, count));
    }
    return options.device >= 0 ? options.device : rank % count;
}

Topology discover(const Bootstrap& bootstrap, const Options& options) {
    Topology topology;
    RankPlace mine{};
    together(bootstrap, "GPU set-up", [&] {
        topology.device = device_of(options, bootstrap.rank);
        cudaDeviceProp properties{};
        check(cudaGetDeviceProperties(&properties, topology.device), "cudaGetDeviceProperties");
        static_cast<void>(gethostname(mine.host.data(), mine.host.size() - 1));
        mine.process = process_token();
        mine.device_uuid = vendor::identity_of(topology.device);
        mine.device = topology.device;
        mine.multiprocessors = properties.multiProcessorCount;
        mine.free_for_a_cluster = vendor::free_for_a_cluster(topology.device);
    });
    topology.places = gather(bootstrap, mine);

    topology.multiprocessors = mine.multiprocessors;
    for (const RankPlace& place : topology.places) {
        topology.multiprocessors = std::min(topology.multiprocessors, place.multiprocessors);
        topology.free_for_a_cluster = std::max(topology.free_for_a_cluster, place.free_for_a_cluster);
        topology.one_host &= place.host == mine.host;
        topology.one_process &= place.process == mine.process && place.host == mine.host;
        const auto same = [&](const RankPlace& other) {
            return other.host == place.host && other.device_uuid == place.device_uuid;
        };
        topology.sharing = std::max(topology.sharing, static_cast<int>(std::ranges::count_if(topology.places, same)));
    }
    topology.peer_access = topology.one_process;
    if (topology.one_process) {
        together(bootstrap, "peer access", [&] {
            mine.reaches_all = true;
            for (const RankPlace& place : topology.places)
                mine.reaches_all &= enable_peer_access(topology.device, place.device);
        });
        for (const RankPlace& place : gather(bootstrap, mine)) topology.peer_access &= place.reaches_all;
    }
    return topology;
}

}  // namespace latent_moe::gpu
