// The portable schedules: each is a function over `Backend`, in a file of its own.
#pragma once

#include <cstdint>

#include "core/matrix.h"
#include "core/partition.h"
#include "latent_moe/plan.h"
#include "latent_moe/shape.h"
#include "tails/backend.h"

namespace latent_moe {

/// One call, validated. Matrices have `tokens` rows; `out` has this rank's own rows only where `stop_before_gather`.
struct TailCall {
    const Shape& shape;
    int rank;
    int world;
    std::int64_t tokens;
    ConstMatrix routed;
    ConstMatrix shared;  ///< absent where the model has no shared expert
    ConstMatrix prefix;  ///< absent, or added last
    Matrix out;
    SharedState shared_state;
    bool consume_shared;
    bool stop_before_gather;
    const PackedLayer& layer;
    bool starts_early = false;    ///< see `TailInput`
    bool releases_early = false;  ///< see `TailInput`

    bool reduces_shared() const noexcept { return shared_state == SharedState::partial && world > 1; }
    bool prefix_is_out() const noexcept { return prefix.present() && prefix.data == out.data; }
    /// Where hidden-sized rows may be put before the last step: `out`, unless that holds a prefix which is still to be
    /// added.
    Matrix before_prefix(Backend& backend) const {
        return prefix_is_out() ? backend.scratch(Scratch::shared, out.rows) : out;
    }
    /// The call restricted to some of its tokens.
    TailCall block(std::int64_t first, std::int64_t count) const {
        TailCall part = *this;
        part.tokens = count;
        part.routed = routed.row_range(first, count);
        part.shared = shared.row_range(first, count);
        part.prefix = prefix.row_range(first, count);
        part.out = out.row_range(first, count);
        return part;
    }
};

using Schedule = void (*)(Backend& backend, const TailCall& call);

void replicated_tail(Backend& backend, const TailCall& call);
void overlap_tail(Backend& backend, const TailCall& call);
void column_parallel_tail(Backend& backend, const TailCall& call);
void token_parallel_tail(Backend& backend, const TailCall& call);
void late_reduce_tail(Backend& backend, const TailCall& call);

/// The schedule of a portable tail; null for `fused`, which is a backend's own.
Schedule portable_schedule(Tail tail) noexcept;

/// Runs `body(part of the call)` for consecutive blocks that fit the backend's workspace; once, with no tokens, for an empty
/// call.
template <typename Body>
void for_each_block(Backend& backend, const TailCall& call, Body body) {
    std::int64_t block = 0;
    std::int64_t first = 0;
    do {
        const std::int64_t left = call.tokens - first;
        const std::int64_t count = left < backend.block_tokens() ? left : backend.block_tokens();
        backend.begin_block(block++);
        body(call.block(first, count));
        first += count;
    } while (first < call.tokens);
}

}  // namespace latent_moe
