// CUDA's vector types and the seam's arithmetic (target.h) for targets that are this machine.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/numeric.h"

namespace latent_moe::gpu {

using std::fmaf;
using std::max;
using std::min;

struct alignas(8) uint2 {
    std::uint32_t x, y;
};
struct alignas(16) uint4 {
    std::uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(std::uint32_t x, std::uint32_t y) {
    return {x, y};
}
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

inline float as_float(std::uint32_t bits) {
    return std::bit_cast<float>(bits);
}
inline std::uint32_t as_bits(float value) {
    return std::bit_cast<std::uint32_t>(value);
}
inline std::uint32_t pack_bf16x2(float low, float high) {
    const auto pack = [](float v) { return std::uint32_t{std::isnan(v) ? std::uint16_t{0x7fff} : bf16_from_float(v)}; };
    return pack(low) | pack(high) << 16;
}
inline std::uint32_t pack_f16x2(float low, float high) {
    const auto pack = [](float v) { return std::uint32_t{std::isnan(v) ? std::uint16_t{0x7fff} : f16_from_float(v)}; };
    return pack(low) | pack(high) << 16;
}
inline float2 unpack_f16x2(std::uint32_t word) {
    return {float_from_f16(static_cast<std::uint16_t>(word)), float_from_f16(static_cast<std::uint16_t>(word >> 16))};
}
inline std::uint32_t canonical_bf16x2(std::uint32_t word) {
    return pack_bf16x2(as_float(word << 16) + 0.0F, as_float(word & 0xffff0000) + 0.0F);
}
inline std::uint32_t canonical_f16x2(std::uint32_t word) {
    const float2 f = unpack_f16x2(word);
    return pack_f16x2(f.x + 0.0F, f.y + 0.0F);
}
inline std::uint32_t canonical_f32(std::uint32_t word) {
    return as_bits(as_float(word) + 0.0F);
}
inline float reciprocal_root(float x) {
    return 1.0F / std::sqrt(x);
}

}  // namespace latent_moe::gpu
