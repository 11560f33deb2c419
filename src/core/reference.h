// What a tail should return: a float64 reference, independent of every schedule, and the exact unfused chain that it is
// judged beside. Plain loops over host memory; used by tests and `verify`, never by a tail.
#pragma once

#include <cstdint>
#include <vector>

#include "core/matrix.h"
#include "latent_moe/shape.h"

namespace latent_moe {

/// One call's inputs, those of all ranks.
struct ReferenceInput {
    Shape shape;
    std::vector<ConstMatrix> routed;  ///< a rank each
    std::vector<ConstMatrix> shared;  ///< a rank each; empty: no shared partial; one: already reduced
    ConstMatrix prefix;               ///< may be absent
    ConstMatrix weights;              ///< [hidden, latent], any dtype
    float weight_scale = 1;
    const float* row_scales = nullptr;  ///< [hidden] or null
    const void* gamma = nullptr;        ///< [latent], activation dtype, or null
};

/// [tokens, hidden] in float64: the formula of `Shape`, nothing rounded.
std::vector<double> reference_tail(const ReferenceInput& input);

/// The unfused chain in the activation dtype T, as [tokens, hidden] of values that are exact in T. Each step rounds once:
///
///     x   = T(Σ_r routed_r)                 sums in rank order, in float32
///     y   = T(x · rsqrt(mean(x²) + ε) · γ)  in float32; without a norm y = x
///     p   = T(scale · y·W_upᵀ)              accumulated in float32
///     h   = T(Σ_r shared_r)
///     out = T(T(h + p) + prefix)
std::vector<float> chain_tail(const ReferenceInput& input);

/// ‖value − reference‖ / ‖reference‖ over the elements where the reference is finite; infinite if a value is not finite
/// there. 0 for empty inputs.
double relative_l2(const ConstMatrix& value, const std::vector<double>& reference);
double relative_l2(const std::vector<float>& value, const std::vector<double>& reference);
double max_abs_error(const ConstMatrix& value, const std::vector<double>& reference);

}  // namespace latent_moe
