// The library's matrices as kernels take them.
#pragma once

#include "core/matrix.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

inline ConstRows rows_of(const ConstMatrix& matrix) noexcept {
    return {matrix.data, matrix.stride};
}
inline Rows writable(const Matrix& matrix) noexcept {
    return {matrix.data, matrix.stride};
}

/// Whether every row begins at a multiple of 16 bytes; an absent matrix does.
inline bool is_aligned(const ConstMatrix& matrix) noexcept {
    return ((reinterpret_cast<std::uintptr_t>(matrix.data) | static_cast<std::uintptr_t>(matrix.stride_bytes())) & 15U) ==
               0 ||
           matrix.data == nullptr;
}

}  // namespace latent_moe::gpu
