// Where the ranks of a context are: which processes, which devices, who can address whose memory.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "latent_moe/bootstrap.h"
#include "latent_moe/options.h"

namespace latent_moe::gpu {

struct RankPlace {
    std::array<char, 64> host;
    std::uint64_t process;  ///< random, drawn once a process
    std::array<char, 16> device_uuid;
    int device;  ///< its number in its process
    int multiprocessors;
    int free_for_a_cluster;
    bool reaches_all;  ///< has peer access to the devices of all ranks of its process
};

struct Topology {
    std::vector<RankPlace> places;
    int device = 0;              ///< of this rank
    int sharing = 1;             ///< most ranks on one device
    int multiprocessors = 0;     ///< fewest of any rank's device
    int free_for_a_cluster = 0;  ///< most of any rank's device (runtime/vendor.h)
    bool one_process = true;     ///< all ranks are threads of this process
    bool one_host = true;
    bool peer_access = true;  ///< in one process: every rank's device reaches every other's

    bool shares_devices() const noexcept { return sharing > 1; }
};

/// The device of this rank: `Options::device`, or its rank modulo the number of devices. Throws if there is no such device.
int device_of(const Options& options, int rank);

/// Collective. Makes peer access possible where ranks are threads of one process.
Topology discover(const Bootstrap& bootstrap, const Options& options);

}  // namespace latent_moe::gpu
