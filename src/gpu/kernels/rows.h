// Strided rows as kernels see them: in bytes, in units of 16.
#pragma once

#include <cstdint>

#include "gpu/primitives/copy.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// Rows of `units` 16-byte units; unit i of the whole is unit i % units of row i / units.
struct UnitRows {
    char* data = nullptr;
    std::int64_t stride = 0;  ///< bytes

    LATENT_MOE_DEVICE uint4* at(std::uint32_t row, std::uint32_t unit) const {
        return reinterpret_cast<uint4*>(data + row * stride) + unit;
    }
    explicit operator bool() const { return data != nullptr; }
};

inline UnitRows unit_rows(const void* data, std::int64_t stride, std::int64_t width, Dtype dtype) {
    const std::int64_t elements = stride == 0 ? width : stride;
    return {static_cast<char*>(const_cast<void*>(data)), elements * static_cast<std::int64_t>(bytes_of(dtype))};
}
inline UnitRows unit_rows(ConstRows r, std::int64_t width, Dtype dtype) {
    return unit_rows(r.data, r.stride, width, dtype);
}
inline UnitRows unit_rows(Rows r, std::int64_t width, Dtype dtype) {
    return unit_rows(r.data, r.stride, width, dtype);
}

inline bool aligned(UnitRows r) {
    return (reinterpret_cast<std::uintptr_t>(r.data) | static_cast<std::uintptr_t>(r.stride)) % 16 == 0;
}

}  // namespace latent_moe::gpu
