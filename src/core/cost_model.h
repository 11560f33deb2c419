// What a tail is expected to cost: a formula that a person can check, from the machine's constants. docs/cost-model.md has
// the formulas as a table, and what they were seen to be worth.
#pragma once

#include <cstdint>

#include "core/machine.h"
#include "latent_moe/plan.h"
#include "latent_moe/shape.h"

namespace latent_moe {

/// A call of a tail, as far as its cost depends on it.
struct CostedCall {
    Shape shape;
    int world = 1;
    std::int64_t tokens = 0;
    SharedState shared = SharedState::partial;
    double weight_element_bytes = 2;  ///< of a packed weight
    bool starts_early = false;        ///< the fused tail may start before the kernel in front of it has ended

    bool reduces_shared() const noexcept { return shared == SharedState::partial && world > 1; }
};

/// What one rank does for one call of a tail.
struct Work {
    double weight_bytes = 0;      ///< of W_up read
    double activation_bytes = 0;  ///< of activations read and written, locally
    double flops = 0;
    double wire_bytes = 0;  ///< sent by this rank, all peers together
};

Work work_of(Tail tail, const CostedCall& call);

/// By the formula of the tail. No tail is refused: whether it can run is the planner's business.
double expected_us(Tail tail, const CostedCall& call, const Machine& machine) noexcept;

/// No implementation can take less: max(weights, arithmetic, wire) + one hop + one launch (docs/performance.md).
double floor_us(int world, const Work& work, const Machine& machine) noexcept;

}  // namespace latent_moe
