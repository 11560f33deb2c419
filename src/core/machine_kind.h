// Constants of a kind of machine for any number of ranks: those that are built in, and what a file of `info --measure`
// holds.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/machine.h"

namespace latent_moe {

struct MachineKind {
    std::string name;
    std::string origin;            ///< "measured on …", "from the data sheet: …"
    Machine machine;               ///< a rank with a device of its own
    double link_bytes_per_us = 0;  ///< to one peer, where every two have a link of their own; 0: one wire for all peers
    int linked_ranks = max_world;  ///< most ranks that such links join
    bool fused = true;             ///< whether the fused tail has a kernel for it
    /// Gates, as `Capabilities` has them, of kinds that are built in (a file holds constants alone): up to 4 ranks, and
    /// beyond.
    std::array<std::int64_t, 2> one_stage_bytes{INT64_MAX, INT64_MAX};
    std::string not_captured_reason;      ///< where collectives are the library's, as `Capabilities`
    std::vector<std::string> unmeasured;  ///< constants that a measurement could not get and that are as they were before

    bool operator==(const MachineKind&) const = default;

    /// One rank of `world`.
    Machine of(int world) const;
};

}  // namespace latent_moe
