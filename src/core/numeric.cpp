#include "core/numeric.h"

#include <cstring>

namespace latent_moe {
namespace {

/// Quicker than the arithmetic, by far.
constexpr auto e4m3_values = [] {
    std::array<float, 256> values{};
    for (unsigned bits = 0; bits < 256; ++bits) values[bits] = float_from_e4m3(static_cast<std::uint8_t>(bits));
    return values;
}();

constexpr auto e4m3_bf16_values = [] {
    std::array<std::uint16_t, 256> values{};
    for (unsigned bits = 0; bits < 256; ++bits)
        values[bits] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(e4m3_values[bits]) >> 16);
    return values;
}();

}  // namespace

void widen(const void* source, Dtype dtype, float* destination, std::int64_t count) noexcept {
    switch (dtype) {
        case Dtype::bf16: {
            const auto* from = static_cast<const std::uint16_t*>(source);
#pragma omp simd
            for (std::int64_t i = 0; i < count; ++i) destination[i] = float_from_bf16(from[i]);
            return;
        }
        case Dtype::f16: {
            const auto* from = static_cast<const std::uint16_t*>(source);
#pragma omp simd
            for (std::int64_t i = 0; i < count; ++i) destination[i] = float_from_f16(from[i]);
            return;
        }
        case Dtype::f32: std::memcpy(destination, source, static_cast<std::size_t>(count) * sizeof(float)); return;
        case Dtype::e4m3: {
            const auto* from = static_cast<const std::uint8_t*>(source);
            for (std::int64_t i = 0; i < count; ++i) destination[i] = e4m3_values[from[i]];
            return;
        }
    }
}

void bf16_from_e4m3(const void* source, void* destination, std::int64_t count) noexcept {
    const auto* from = static_cast<const std::uint8_t*>(source);
    auto* to = static_cast<std::uint16_t*>(destination);
    for (std::int64_t i = 0; i < count; ++i) to[i] = e4m3_bf16_values[from[i]];
}

void narrow(const float* source, Dtype dtype, void* destination, std::int64_t count) noexcept {
    if (dtype == Dtype::f32) {
        std::memcpy(destination, source, static_cast<std::size_t>(count) * sizeof(float));
        return;
    }
    auto* to = static_cast<std::uint16_t*>(destination);
    if (dtype == Dtype::bf16) {  // NOLINT(bugprone-branch-clone): the checker does not see the rounding
#pragma omp simd
        for (std::int64_t i = 0; i < count; ++i) to[i] = bf16_from_float(source[i]);
    } else {
#pragma omp simd
        for (std::int64_t i = 0; i < count; ++i) to[i] = f16_from_float(source[i]);
    }
}

float load_element(const void* source, Dtype dtype, std::int64_t index) noexcept {
    float value = 0;
    widen(static_cast<const std::byte*>(source) + index * static_cast<std::int64_t>(bytes_of(dtype)), dtype, &value, 1);
    return value;
}

float round_to(Dtype dtype, float value) noexcept {
    switch (dtype) {
        case Dtype::bf16: return float_from_bf16(bf16_from_float(value));
        case Dtype::f16: return float_from_f16(f16_from_float(value));
        default: return value;
    }
}

}  // namespace latent_moe
