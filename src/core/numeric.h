// Number formats on the host: conversions that round to nearest even and keep NaN and infinities, written without branches
// on the data so that loops over them vectorise.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "latent_moe/tensor.h"

namespace latent_moe {

inline float float_from_bf16(std::uint16_t bits) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t bf16_from_float(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40U;
    return static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded);
}

inline float float_from_f16(std::uint16_t bits) noexcept {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7FFFU) << 13;
    // Rebias the exponent by a multiplication, which also normalises subnormals.
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F);
    const bool special = (bits & 0x7C00U) == 0x7C00U;
    const std::uint32_t finite_or_special = special ? (magnitude | 0x7F800000U) : scaled;
    return std::bit_cast<float>(finite_or_special | (static_cast<std::uint32_t>(bits & 0x8000U) << 16));
}

inline std::uint16_t f16_from_float(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    // Below the smallest normal half: adding 0.5 lets the float adder round to the half's fixed grid of 2^-24.
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - std::bit_cast<std::uint32_t>(0.5F);
    const std::uint32_t normal = (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
    const std::uint32_t special = magnitude > 0x7F800000U ? 0x7E00U : 0x7C00U;
    const std::uint32_t finite = magnitude < 0x38800000U ? subnormal : normal;
    return static_cast<std::uint16_t>(sign | (magnitude >= 0x47800000U ? special : finite));
}

/// e4m3 ("fn": no infinities, 0x7F and 0xFF are NaN). Every value is exact in bf16, f16 and f32.
constexpr float float_from_e4m3(std::uint8_t bits) noexcept {
    // As above: the exponent is rebiased by a multiplication.
    const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7FU) << 20;
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p120F);
    const std::uint32_t finite_or_nan = (bits & 0x7FU) == 0x7FU ? 0x7FC00000U : scaled;
    return std::bit_cast<float>(finite_or_nan | (static_cast<std::uint32_t>(bits & 0x80U) << 24));
}

/// The largest finite e4m3 value, which larger ones, and infinities, become.
inline constexpr float e4m3_max = 448;

constexpr std::uint8_t e4m3_from_float(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 24) & 0x80U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    // Below the smallest normal value: adding 2^14 lets the float adder round to the fixed grid of 2^-9.
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14F) - std::bit_cast<std::uint32_t>(0x1p14F);
    const std::uint32_t normal = (magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U) - (120U << 23)) >> 20;
    const std::uint32_t finite = magnitude < 0x3C800000U ? subnormal : normal;
    const std::uint32_t large = magnitude > 0x7F800000U ? 0x7FU : 0x7EU;
    return static_cast<std::uint8_t>(sign | (magnitude >= 0x43E00000U ? large : finite));
}

/// Widens `count` contiguous elements to float, exactly.
void widen(const void* source, Dtype dtype, float* destination, std::int64_t count) noexcept;
/// e4m3 to bf16, which holds every value.
void bf16_from_e4m3(const void* source, void* destination, std::int64_t count) noexcept;
/// Rounds `count` floats to `dtype` (bf16, f16 or f32).
void narrow(const float* source, Dtype dtype, void* destination, std::int64_t count) noexcept;

float load_element(const void* source, Dtype dtype, std::int64_t index) noexcept;
/// `value` rounded to `dtype` and widened again.
float round_to(Dtype dtype, float value) noexcept;

}  // namespace latent_moe
