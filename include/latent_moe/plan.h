// Which tail runs for how many tokens, and why not the others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "latent_moe/export.h"

namespace latent_moe {

/// The schedules. One arithmetic; they differ in what each rank computes and in what crosses the wire.
enum class Tail : std::uint8_t {
    replicated,       ///< all-reduce latent, norm, whole W_up on every rank; all-reduce shared; add
    overlap,          ///< the same, with the shared all-reduce on a second stream under the projection
    column_parallel,  ///< the rank's own rows of W_up and the sum of its own columns of shared; an all-gather by columns
    token_parallel,   ///< reduce-scatter by tokens, norm and whole W_up on the rank's own tokens, all-gather
    late_reduce,      ///< no norm: project the partials with the whole W_up, add, one all-reduce
    fused,            ///< one kernel: exchange partials early, the rank's own columns, exchange columns late
};

inline constexpr int tail_count = 6;

LATENT_MOE_API const char* name(Tail tail) noexcept;
LATENT_MOE_API std::optional<Tail> tail_from_name(std::string_view name) noexcept;

/// What a caller's shared partial is.
enum class SharedState : std::uint8_t {
    partial,  ///< every rank holds a summand
    reduced,  ///< already summed: every rank holds the same rows
    absent,   ///< the model has no shared expert
};

LATENT_MOE_API const char* name(SharedState state) noexcept;

struct Refusal {
    Tail tail;
    std::string reason;
};

struct Candidate {
    Tail tail;
    double expected_us;
    bool measured = false;  ///< by `latent-moe tune`; else it is the cost model's
};

/// For one number of tokens: the choice, its rivals with their expected cost, and those that cannot run, each with the
/// reason.
struct Plan {
    std::int64_t tokens = 0;
    Tail tail = Tail::replicated;
    double expected_us = 0;
    std::vector<Candidate> candidates;  ///< every tail that may run, the chosen one first, then those that were measured,
                                        ///< then the cheapest; empty: none can, and `tail` means nothing
    std::vector<Refusal> refused;
    bool from_table = false;  ///< whether measured times chose, or the cost model
    std::string source;       ///< where the costs come from
};

}  // namespace latent_moe
