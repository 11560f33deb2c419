// Un-combined rows of the experts, and how they are combined: `DeferredRows` of the public API, checked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/matrix.h"

namespace latent_moe {

/// Most experts of a token.
inline constexpr std::int64_t max_slots = 1024;

struct DeferredMatrix {
    ConstMatrix rows;
    const std::byte* weights = nullptr;  ///< [tokens, slots]
    Dtype weight_dtype = Dtype::f32;
    const std::int32_t* map = nullptr;  ///< [tokens, slots]
    std::int64_t slots = 0;
};

/// sum[0 … columns) = Σ_j weights[token, j] · rows[map[token, j]], j in order; each product and each sum is rounded to
/// float32, which every backend does alike. `scratch` has room for a row.
void combine_row(const DeferredMatrix& deferred, std::int64_t token, float* sum, float* scratch) noexcept;

}  // namespace latent_moe
