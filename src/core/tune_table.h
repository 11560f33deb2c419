// What `tune` measured: each tail's time over the number of tokens, for one machine, shape and number of ranks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "latent_moe/options.h"
#include "latent_moe/plan.h"
#include "latent_moe/shape.h"

namespace latent_moe {

/// What times depend on. A table holds where all of it is the same.
struct TuneKey {
    std::string version;  ///< of the library
    std::string device;   ///< one rank's
    std::string links;    ///< how data gets from rank to rank
    int world = 1;
    std::int64_t hidden = 0;
    std::int64_t latent = 0;
    Norm norm = Norm::rms;
    Dtype activations = Dtype::bf16;
    SharedState shared = SharedState::partial;
    bool sequence_parallel = false;
    bool batch_invariant = false;
    bool float8_weights = false;

    bool operator==(const TuneKey&) const = default;
};

/// The key of contexts like this one, with this library.
TuneKey tune_key(const Shape& shape, int world, const Options& options, const std::string& device, const std::string& links);

/// The first field in which a table's key is not `here`: "its tp is 4, here it is 2". Empty if there is none.
std::string difference(const TuneKey& of_table, const TuneKey& here);

struct TunePoint {
    std::int64_t tokens = 0;
    double us = 0;

    bool operator==(const TunePoint&) const = default;
};

/// A tail takes the place of another only where it is faster by more than this part: times measured twice differ by 1 or 2
/// %.
inline constexpr double tune_hysteresis = 0.03;

/// Up to `count` numbers of tokens between the first and the last of `known`, none of them known, by about equal factors:
/// what a table is verified at. Rising.
std::vector<std::int64_t> untried_tokens(const std::vector<std::int64_t>& known, int count);

struct TuneTable {
    TuneKey key;
    std::string origin;                                     ///< how and when it was measured, for people
    std::array<std::vector<TunePoint>, tail_count> points;  ///< by `Tail`, by rising tokens; empty: not measured

    bool operator==(const TuneTable&) const = default;

    bool has(Tail tail) const noexcept { return !points[static_cast<std::size_t>(tail)].empty(); }
    /// Every number of tokens that was measured, rising.
    std::vector<std::int64_t> tokens() const;
    /// On the line between the neighbours that were measured; beyond the last on that of the last two; nothing for a tail
    /// that was not measured, and for one that was measured once only that once: one time says nothing of others.
    std::optional<double> us(Tail tail, std::int64_t tokens) const noexcept;
};

}  // namespace latent_moe
