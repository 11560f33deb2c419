// What the cost model knows of a machine.
#pragma once

#include <string>

namespace latent_moe {

/// Constants of one rank's share of a machine. Rates are per microsecond, so that bytes over rate is microseconds.
struct Machine {
    std::string description;
    double memory_bytes_per_us = 1;  ///< reading weights that are in no cache
    double flops_per_us = 1;         ///< a large bf16 product
    double wire_bytes_per_us = 1;    ///< one direction, all peers together
    double hop_us = 0;               ///< from a store on one rank until another has seen it
    double launch_us = 0;            ///< one operation of the backend
    double collective_us = 0;        ///< one library collective of no bytes, beyond its launch and hops

    /// What no program on such a machine has been seen to beat, for floors; where zero the value above is taken.
    struct Best {
        double flops_per_us = 0;
        double wire_bytes_per_us = 0;
        double hop_us = 0;
        double launch_us = 0;
    } best;
};

}  // namespace latent_moe
