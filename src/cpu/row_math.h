// Arithmetic on rows of the activation dtype, in float32: sums over ranks, the norm, the epilogue.
#pragma once

#include <cstdint>
#include <span>

#include "comm/transport.h"
#include "latent_moe/shape.h"

namespace latent_moe {

/// sum[0 … count) = Σ over `partials`, in order, of row `row` from byte `offset`.
void sum_row(std::span<const Region> partials, std::int64_t row, Dtype dtype, float* sum, float* scratch,
             std::int64_t count);

/// values = T(values) · rsqrt(mean(T(values)²) + ε) · γ, in place, not yet rounded again. For `Norm::none`: T(values).
void norm_row(const Shape& shape, const float* gamma, float* values);

/// out = T(values), then T(out + prefix) where `prefix` is not null. `out` may be `prefix`.
void finish_row(float* values, Dtype dtype, const std::byte* prefix, std::byte* out, float* scratch, std::int64_t count);

}  // namespace latent_moe
