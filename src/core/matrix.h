// Strided two-dimensional views with their dtype: what the inside of the library passes around.
#pragma once

#include <cstddef>
#include <cstdint>

#include "latent_moe/tensor.h"

namespace latent_moe {

struct ConstMatrix {
    const std::byte* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::int64_t stride = 0;  ///< elements from one row to the next
    Dtype dtype = Dtype::bf16;

    bool present() const noexcept { return data != nullptr; }
    std::int64_t row_bytes() const noexcept { return columns * static_cast<std::int64_t>(bytes_of(dtype)); }
    std::int64_t stride_bytes() const noexcept { return stride * static_cast<std::int64_t>(bytes_of(dtype)); }
    const std::byte* row(std::int64_t index) const noexcept { return data + index * stride_bytes(); }

    /// `count` rows from `first`; an absent matrix stays absent.
    ConstMatrix row_range(std::int64_t first, std::int64_t count) const noexcept {
        return {data == nullptr ? nullptr : row(first), count, columns, stride, dtype};
    }
    ConstMatrix column_range(std::int64_t first, std::int64_t count) const noexcept {
        return {data == nullptr ? nullptr : data + first * static_cast<std::int64_t>(bytes_of(dtype)), rows, count, stride,
                dtype};
    }
};

struct Matrix {
    std::byte* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::int64_t stride = 0;
    Dtype dtype = Dtype::bf16;

    operator ConstMatrix() const noexcept { return {data, rows, columns, stride, dtype}; }
    bool present() const noexcept { return data != nullptr; }
    std::int64_t row_bytes() const noexcept { return ConstMatrix(*this).row_bytes(); }
    std::int64_t stride_bytes() const noexcept { return ConstMatrix(*this).stride_bytes(); }
    std::byte* row(std::int64_t index) const noexcept { return data + index * stride_bytes(); }

    Matrix row_range(std::int64_t first, std::int64_t count) const noexcept {
        return {data == nullptr ? nullptr : row(first), count, columns, stride, dtype};
    }
    Matrix column_range(std::int64_t first, std::int64_t count) const noexcept {
        return {data == nullptr ? nullptr : data + first * static_cast<std::int64_t>(bytes_of(dtype)), rows, count, stride,
                dtype};
    }
};

}  // namespace latent_moe
