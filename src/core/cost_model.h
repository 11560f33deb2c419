// What a tail is expected to cost: a formula that a person can check, from the machine's constants.
#pragma once

#include <cstdint>

#include "core/machine.h"
#include "latent_moe/plan.h"
#include "latent_moe/shape.h"

namespace latent_moe {

/// What one rank does for one call of a tail.
struct Work {
    double weight_bytes = 0;      ///< of W_up read
    double activation_bytes = 0;  ///< of activations read and written, locally
    double gathered_bytes = 0;    ///< of summands that every tile of the product reads again, from the cache
    double flops = 0;
    double wire_bytes = 0;           ///< sent by this rank, all peers together
    double hideable_wire_bytes = 0;  ///< the part of `wire_bytes` that the tail sends under its own product
    int hops = 0;                    ///< one-way trips that wait for one another
    int collectives = 0;
    int launches = 0;
};

/// `weight_element_bytes`: of a packed weight.
Work work_of(Tail tail, const Shape& shape, int world, std::int64_t tokens, SharedState shared, double weight_element_bytes);

double expected_us(const Work& work, const Machine& machine) noexcept;

/// No implementation can take less: max(weights, arithmetic, wire) + one hop + one launch (docs/performance.md).
double floor_us(int world, const Work& work, const Machine& machine) noexcept;

}  // namespace latent_moe
