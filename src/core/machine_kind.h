// Constants of a kind of machine for any number of ranks: those that are built in, and what a file of `info --measure`
// holds.
#pragma once

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
    std::vector<std::string> unmeasured;  ///< constants that a measurement could not get and that are as they were before

    bool operator==(const MachineKind&) const = default;

    /// One rank of `world`.
    Machine of(int world) const;
};

}  // namespace latent_moe
