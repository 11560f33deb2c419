// Views of the caller's memory. Nothing here owns anything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "latent_moe/export.h"

namespace latent_moe {

/// Element types. Activations are bf16, f16 or f32; weights may also be e4m3 (float8, no infinities), which carries a scale.
enum class Dtype : std::uint8_t { bf16, f16, f32, e4m3 };

LATENT_MOE_API const char* name(Dtype dtype) noexcept;

constexpr std::size_t bytes_of(Dtype dtype) noexcept {
    switch (dtype) {
        case Dtype::bf16:
        case Dtype::f16: return 2;
        case Dtype::f32: return 4;
        case Dtype::e4m3: return 1;
    }
    return 0;
}

/// Rows of a tensor that is only read. `stride` counts elements from one row to the next; 0 means the rows are contiguous.
/// A null `data` means that the tensor is absent.
struct ConstRows {
    const void* data = nullptr;
    std::int64_t stride = 0;

    ConstRows() = default;
    ConstRows(const void* data_, std::int64_t stride_ = 0) : data(data_), stride(stride_) {}
};

/// Rows of a tensor that is written.
struct Rows {
    void* data = nullptr;
    std::int64_t stride = 0;

    Rows() = default;
    Rows(void* data_, std::int64_t stride_ = 0) : data(data_), stride(stride_) {}
};

/// The up-projection W_up as a checkpoint stores it: `rows` rows of `latent` elements.
/// `rows` is `hidden` (the whole matrix) or `hidden / world` (this rank's own rows, those of its output columns).
struct WeightView {
    const void* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t stride = 0;  ///< elements from one row to the next; 0: contiguous
    Dtype dtype = Dtype::bf16;
    float scale = 1.0F;                 ///< multiplies every element (`weight_scale` of an e4m3 checkpoint)
    const float* row_scales = nullptr;  ///< optional, one factor a row of this view, on top of `scale`; host memory
};

}  // namespace latent_moe
