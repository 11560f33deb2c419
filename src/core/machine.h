// What the cost model knows of a machine. docs/cost-model.md says where each constant comes from.
#pragma once

#include <cstdint>
#include <string>

#include "latent_moe/shape.h"

namespace latent_moe {

/// Constants of one rank's share of a machine. Rates are per microsecond, so that bytes over rate is microseconds.
struct Machine {
    std::string description;
    double memory_bytes_per_us = 1;  ///< reading weights that are in no cache
    double flops_per_us = 1;         ///< a large bf16 product
    double wire_bytes_per_us = 1;    ///< one direction, all peers together
    double hop_us = 0;               ///< from a store on one rank until another has seen it
    double launch_us = 0;            ///< one operation of the backend: what it takes beyond its bytes and its arithmetic
    double collective_us = 0;        ///< one library collective of no bytes, beyond its launch and hops

    /// What the backend's own kernels reach of the rates above. One: all of it.
    struct Reached {
        double early_launch = 1;    ///< of a launch, what is left where a kernel starts before its predecessor ends
        double contention = 0;      ///< of the shorter of two things that go on side by side, what it still costs
        double all_reduce = 1;      ///< of the wire, an all-reduce
        double scatter_gather = 1;  ///< of the wire, a reduce-scatter and an all-gather by tokens
        double side_lane = 1;       ///< of the wire, a lane beside another
        double gathering = 1;       ///< of the memory, the fused tail's tiles that read the latents again, from the cache
        std::int64_t early_tokens = max_tokens_limit;  ///< most tokens whose product starts before its predecessor ends

        /// From so many tokens on the fused tail sums the latents once a device, not once a tile.
        std::int64_t pooled_from_tokens = max_tokens_limit + 1;

        bool operator==(const Reached&) const = default;
    } reached;

    /// What no program on such a machine has been seen to beat, for floors; where zero the value above is taken.
    struct Best {
        double flops_per_us = 0;
        double wire_bytes_per_us = 0;
        double hop_us = 0;
        double launch_us = 0;

        bool operator==(const Best&) const = default;
    } best;

    /// The part of one of so many ranks on one device.
    Machine shared_by(int ranks) const {
        Machine part = *this;
        for (double* rate : {&part.memory_bytes_per_us, &part.flops_per_us, &part.wire_bytes_per_us, &part.best.flops_per_us,
                             &part.best.wire_bytes_per_us})
            *rate /= ranks;
        return part;
    }

    bool operator==(const Machine&) const = default;
};

}  // namespace latent_moe
