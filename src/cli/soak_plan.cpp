#include "cli/soak_plan.h"

#include <algorithm>
#include <array>

namespace latent_moe::cli {
namespace {

/// Draws that depend on a key alone.
class Dice {
public:
    Dice(std::uint64_t seed, std::uint64_t kind, std::uint64_t number) : state_(mix(mix(mix(seed) + kind) + number)) {}

    std::uint64_t bits() noexcept { return mix(state_++); }
    std::int64_t from_to(std::int64_t least, std::int64_t most) noexcept {
        return least + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(most - least + 1));
    }
    bool one_in(std::int64_t count) noexcept { return from_to(1, count) == 1; }
    template <typename Value, std::size_t count>
    Value one_of(const std::array<Value, count>& values) noexcept {
        return values[bits() % count];
    }

private:
    // splitmix64
    static std::uint64_t mix(std::uint64_t value) noexcept {
        value += 0x9E3779B97F4A7C15U;
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
        value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
        return value ^ (value >> 31);
    }

    std::uint64_t state_;
};

enum Kind : std::uint64_t { of_set, of_call };

/// Multiply-adds of the reference in one call: what a soak can afford to check again in float64.
constexpr std::int64_t most_work = 40'000'000;

}  // namespace

SoakSet draw_set(std::uint64_t seed, std::uint64_t number, std::optional<int> world) {
    Dice dice(seed, of_set, number);
    SoakSet set;
    const int drawn_world = dice.one_of(std::array{1, 2, 2, 2, 3, 4, 4, 8});
    set.world = world.value_or(drawn_world);

    Shape& shape = set.shape;
    const bool divisible = !dice.one_in(6);
    const std::int64_t grain = divisible ? 8 * set.world : 8;
    shape.hidden = std::max<std::int64_t>(grain, dice.from_to(64, 1024) / grain * grain);
    shape.latent = 8 * dice.from_to(1, 64);
    if (dice.one_in(50)) {  // as wide as a model
        shape.hidden = 7168;
        shape.latent = 3584;
    }
    shape.norm = dice.one_in(3) ? Norm::none : Norm::rms;
    shape.epsilon = dice.one_of(std::array{1e-5F, 1e-6F});
    shape.routed_scale = dice.one_of(std::array{1.0F, 1.0F, 2.5F, 0.5F});
    shape.activations = dice.one_of(std::array{Dtype::bf16, Dtype::bf16, Dtype::f16, Dtype::f32});

    Options& options = set.options;
    options.max_tokens = dice.one_of(std::array<std::int64_t, 5>{1, 8, 64, 300, 700});
    options.max_tokens = std::clamp<std::int64_t>(options.max_tokens, 1, most_work / (shape.hidden * shape.latent) + 1);
    options.capacity_tokens = dice.one_of(std::array<std::int64_t, 3>{1, 16, 128});
    options.shared = dice.one_of(std::array{SharedState::partial, SharedState::partial, SharedState::partial,
                                            SharedState::reduced, SharedState::absent});
    options.sequence_parallel = dice.one_in(6);
    options.expert_parallel = dice.one_in(8);
    options.keep_whole_weights = options.sequence_parallel || shape.hidden % set.world != 0 || !dice.one_in(4);

    // An unscaled matrix takes the dtype of the activations or bf16; e4m3 goes with any.
    set.weight_dtype = dice.one_of(std::array{Dtype::bf16, Dtype::bf16, shape.activations, Dtype::e4m3});
    set.whole_views = shape.hidden % set.world != 0 || dice.one_in(3);
    set.contexts = dice.one_in(3) ? 2 : 1;
    set.layers = static_cast<int>(dice.from_to(1, 3));
    set.ends_in_abort = dice.one_in(8);
    options.self_check_period = dice.one_in(3) ? dice.from_to(1, 4) : 0;
    return set;
}

SoakCall draw_call(std::uint64_t seed, std::uint64_t number, const SoakSet& set) {
    Dice dice(seed, of_call, number);
    SoakCall call;
    call.context = static_cast<int>(dice.from_to(0, set.contexts - 1));
    call.layer = static_cast<int>(dice.from_to(0, set.layers - 1));

    const std::int64_t most = set.options.max_tokens;
    switch (dice.from_to(0, 9)) {
        case 0: call.tokens = 0; break;
        case 1: call.tokens = most; break;
        case 2: call.tokens = std::min(most, dice.from_to(255, 257)); break;  // around the blocks of the CPU backend
        case 3: call.tokens = dice.from_to(1, most); break;
        default: call.tokens = dice.from_to(1, std::min<std::int64_t>(most, 33)); break;
    }
    call.tail_draw = dice.bits();
    call.planned_tail = dice.one_in(4);
    call.prefix = !dice.one_in(3);
    const bool has_shared = set.options.shared != SharedState::absent;
    call.consume_shared = has_shared && dice.one_in(3);
    if (has_shared && !set.options.sequence_parallel && dice.one_in(5)) call.placement = Placement::over_shared;
    if (call.prefix && dice.one_in(5)) call.placement = Placement::over_prefix;
    call.in_halves = set.options.shared == SharedState::partial && set.world > 1 &&
                     call.placement != Placement::over_prefix && dice.one_in(6);
    call.padding = dice.one_in(3) ? 8 * dice.from_to(1, 4) : 0;
    call.replays = dice.one_in(3) ? static_cast<int>(dice.from_to(1, 3)) : 0;
    call.suspend_before = dice.one_in(24);
    call.refused = dice.one_in(24) && most < max_tokens_limit;
    if (dice.one_in(3)) {
        call.late_rank = static_cast<int>(dice.from_to(0, set.world - 1));
        call.late_us = static_cast<int>(dice.one_in(20) ? dice.from_to(1'000, 20'000) : dice.from_to(1, 300));
    }
    return call;
}

}  // namespace latent_moe::cli
