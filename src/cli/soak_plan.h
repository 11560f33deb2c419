// What a soak does, drawn from its seed. A context is a function of the seed and its number, a call of the seed and its own
// number, so any call can be made again without those before it.
#pragma once

#include <cstdint>
#include <optional>

#include "latent_moe/options.h"
#include "latent_moe/shape.h"
#include "latent_moe/tensor.h"

namespace latent_moe::cli {

/// Calls that one set of contexts makes: call n belongs to set n / calls_per_set.
inline constexpr std::uint64_t calls_per_set = 32;

/// Contexts that live together over the same ranks; call by call one of them is used.
struct SoakSet {
    int world = 1;
    Shape shape;
    Options options;  ///< without the backend, the deadline and the threads, which are the command line's
    Dtype weight_dtype = Dtype::bf16;
    bool whole_views = false;  ///< ranks pack from the whole W_up, not from their shard
    int contexts = 1;
    int layers = 1;
    bool ends_in_abort = false;
};

/// Where a call puts its output.
enum class Placement : std::uint8_t { own, over_shared, over_prefix };

struct SoakCall {
    int context = 0;
    int layer = 0;
    std::int64_t tokens = 0;
    std::uint64_t tail_draw = 0;  ///< picks among the tails that the plan allows
    bool planned_tail = false;    ///< leaves the tail to the plan instead
    bool prefix = false;
    bool consume_shared = false;
    Placement placement = Placement::own;
    bool in_halves = false;    ///< begin(shared), then finish(routed)
    std::int64_t padding = 0;  ///< elements between rows, a multiple of 16 bytes
    int replays = 0;           ///< times that the call, recorded, is run again
    bool suspend_before = false;
    bool refused = false;  ///< asks for more tokens than `max_tokens`, on every rank
    int late_rank = -1;
    int late_us = 0;
};

/// `world`: how many ranks there must be; drawn where it is empty.
SoakSet draw_set(std::uint64_t seed, std::uint64_t number, std::optional<int> world);
SoakCall draw_call(std::uint64_t seed, std::uint64_t number, const SoakSet& set);

}  // namespace latent_moe::cli
