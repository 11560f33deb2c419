#include "core/float8_packing.h"

#include <algorithm>
#include <cmath>

#include "core/numeric.h"

namespace latent_moe {

WeightView Float8Rows::view() const noexcept {
    return {.data = bits.data(), .rows = rows, .dtype = Dtype::e4m3, .scale = scale, .row_scales = scales.data()};
}

Float8Rows pack_float8(const WeightView& view, std::int64_t columns) {
    Float8Rows packed{.bits = std::vector<std::uint8_t>(static_cast<std::size_t>(view.rows * columns)),
                      .scales = std::vector<float>(static_cast<std::size_t>(view.rows)),
                      .rows = view.rows,
                      .scale = view.scale};
    const std::int64_t stride = (view.stride == 0 ? columns : view.stride) * static_cast<std::int64_t>(bytes_of(view.dtype));
    std::vector<float> values(static_cast<std::size_t>(columns));
    for (std::int64_t row = 0; row < view.rows; ++row) {
        widen(static_cast<const std::byte*>(view.data) + row * stride, view.dtype, values.data(), columns);
        float largest = 0;
        bool finite = true;
        for (const float value : values) {
            largest = std::max(largest, std::abs(value));
            finite = finite && std::isfinite(value);
        }
        // The smallest normal number keeps the quotient finite; rows that small are zeros to any product.
        const float scale = finite && largest > 0 ? std::max(largest / e4m3_max, 0x1p-126F) : 1.0F;
        std::uint8_t* bits = packed.bits.data() + row * columns;
        for (std::int64_t i = 0; i < columns; ++i) {
            const float value = values[static_cast<std::size_t>(i)];
            bits[i] = std::isfinite(value) ? e4m3_from_float(value / scale) : std::uint8_t{0x7F};
        }
        packed.scales[static_cast<std::size_t>(row)] = scale * (view.row_scales == nullptr ? 1.0F : view.row_scales[row]);
    }
    return packed;
}

}  // namespace latent_moe
