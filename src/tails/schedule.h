// The portable schedules: each is a function over `Backend`, in a file of its own.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

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
    bool stop_before_gather;
    const PackedLayer& layer;
    bool shared_in_out = false;   ///< the second half of a call: `out` holds the reduced shared rows (or columns) already
    bool starts_early = false;    ///< see `TailInput`
    bool releases_early = false;  ///< see `TailInput`

    bool reduces_shared() const noexcept { return shared_state == SharedState::partial && world > 1 && !shared_in_out; }
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

/// The first half of a call in two halves: this rank's part of the reduced shared rows goes where the tail will have it, in
/// `out`. Only for tails that `has_halves` (core/planner.h).
void reduce_shared_ahead(Backend& backend, Tail tail, const TailCall& call);

/// The schedule of a portable tail; null for `fused`, which is a backend's own.
Schedule portable_schedule(Tail tail) noexcept;

/// The columns that ranks own.
class OwnColumns {
public:
    OwnColumns(std::int64_t hidden, int world) noexcept : world_(world) {
        for (int rank = 0; rank < world; ++rank) parts_[static_cast<std::size_t>(rank)] = even_part(hidden, world, rank);
    }
    std::span<const TokenRange> all() const noexcept { return {parts_.data(), static_cast<std::size_t>(world_)}; }
    const TokenRange& of(int rank) const noexcept { return parts_[static_cast<std::size_t>(rank)]; }

private:
    std::array<TokenRange, max_world> parts_;
    int world_;
};

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

/// Runs `body(ranges)` for consecutive blocks that are cut from every rank's own tokens, so that ownership is that of the
/// whole call: `ranges[r]` are rank r's tokens of the block, `done` those of this rank's before it.
template <typename Body>
void for_each_block_of_own_tokens(Backend& backend, const TailCall& call, Body body) {
    std::array<TokenRange, max_world> owned;
    std::int64_t most = 0;
    for (int rank = 0; rank < call.world; ++rank) {
        owned[static_cast<std::size_t>(rank)] = even_part(call.tokens, call.world, rank);
        most = std::max(most, owned[static_cast<std::size_t>(rank)].count);
    }
    std::int64_t done = 0;
    std::int64_t index = 0;
    do {
        const std::int64_t block = std::min(backend.block_tokens(), most - done);
        std::array<TokenRange, max_world> ranges;
        for (std::size_t rank = 0; rank < static_cast<std::size_t>(call.world); ++rank) {
            const std::int64_t left = std::max<std::int64_t>(owned[rank].count - done, 0);
            ranges[rank] = {owned[rank].first + std::min(done, owned[rank].count), std::min(block, left)};
        }
        backend.begin_block(index++);
        body(std::span<const TokenRange>(ranges.data(), static_cast<std::size_t>(call.world)), done);
        done += block;
    } while (done < most);
}

}  // namespace latent_moe
