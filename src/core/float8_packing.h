// W_up as e4m3 with a scale a row, made from wider weights.
#pragma once

#include <cstdint>
#include <vector>

#include "latent_moe/tensor.h"

namespace latent_moe {

struct Float8Rows {
    std::vector<std::uint8_t> bits;  ///< [rows, columns], contiguous
    std::vector<float> scales;       ///< one a row
    std::int64_t rows = 0;
    float scale = 1;  ///< of all rows, as it was given

    WeightView view() const noexcept;
};

/// Each row is divided by its largest magnitude / 448, which becomes its scale, and rounded to nearest. A row of zeros has
/// the scale 1, as has one that is not finite, whose NaNs and infinities become NaNs. `view` is host memory and holds
/// bf16, f16 or f32.
Float8Rows pack_float8(const WeightView& view, std::int64_t columns);

}  // namespace latent_moe
