// What a context has done since it was created.
#pragma once

#include <array>
#include <cstdint>

#include "latent_moe/plan.h"
#include "latent_moe/status.h"

namespace latent_moe {

inline constexpr int status_count = static_cast<int>(StatusCode::internal) + 1;

/// Counted on the host: a call that was captured in a graph counts once, its replays do not.
struct Counters {
    std::array<std::uint64_t, tail_count> calls{};      ///< that were made, by `Tail`; one in halves counts at its finish
    std::uint64_t parts = 0;                            ///< the tail's parts as operations of their own
    std::array<std::uint64_t, status_count> refused{};  ///< calls that left the context usable, by `StatusCode`
    std::array<std::uint64_t, status_count> failed{};   ///< calls that did not, and those after them

    // Waits for peers, on backends whose ranks wait on the host (the CPU's); 0 elsewhere.
    std::uint64_t waits = 0;
    std::uint64_t wait_us = 0;          ///< in all
    std::uint64_t longest_wait_us = 0;  ///< until the last peer had come

    std::uint64_t self_checks = 0;  ///< calls that were checked (see `Options::self_check_period`)
};

}  // namespace latent_moe
