// Elements: unpack to float32, pack with rounding to nearest even, and the mailbox's view of a word.
//
// GUARANTEE. `pack` rounds each element once, to nearest even; NaN stays NaN (one canonical NaN), Inf stays Inf, subnormals
// are kept. `Unit` is 16 bytes: what a thread loads, stores, sends or sums at a time.
#pragma once

#include <cstdint>

#include "latent_moe/tensor.h"
#include "scoped.h"

namespace latent_moe::gpu {

template <Dtype dtype>
struct Element;

template <>
struct Element<Dtype::bf16> {
    static constexpr int bytes = 2;
    static constexpr std::uint32_t sentinel = 0x80008000;  ///< two times -0.0
    LATENT_MOE_DEVICE static void unpack(std::uint32_t word, float* to) {
        to[0] = as_float(word << 16);
        to[1] = as_float(word & 0xffff0000);
    }
    LATENT_MOE_DEVICE static std::uint32_t pack(const float* from) { return pack_bf16x2(from[0], from[1]); }
    /// -0.0 becomes +0.0, all else stays: what is written to a mailbox is never the sentinel.
    LATENT_MOE_DEVICE static std::uint32_t canonical(std::uint32_t word) { return canonical_bf16x2(word); }
};

template <>
struct Element<Dtype::f16> {
    static constexpr int bytes = 2;
    static constexpr std::uint32_t sentinel = 0x80008000;
    LATENT_MOE_DEVICE static void unpack(std::uint32_t word, float* to) {
        const float2 f = unpack_f16x2(word);
        to[0] = f.x;
        to[1] = f.y;
    }
    LATENT_MOE_DEVICE static std::uint32_t pack(const float* from) { return pack_f16x2(from[0], from[1]); }
    LATENT_MOE_DEVICE static std::uint32_t canonical(std::uint32_t word) { return canonical_f16x2(word); }
};

template <>
struct Element<Dtype::f32> {
    static constexpr int bytes = 4;
    static constexpr std::uint32_t sentinel = 0x80000000;
    LATENT_MOE_DEVICE static void unpack(std::uint32_t word, float* to) { to[0] = as_float(word); }
    LATENT_MOE_DEVICE static std::uint32_t pack(const float* from) { return as_bits(from[0]); }
    LATENT_MOE_DEVICE static std::uint32_t canonical(std::uint32_t word) { return canonical_f32(word); }
};

template <Dtype dtype>
struct Unit {
    using E = Element<dtype>;
    static constexpr int size = 16 / E::bytes;  ///< elements
    static constexpr int per_word = 4 / E::bytes;

    LATENT_MOE_DEVICE static void unpack(uint4 v, float (&to)[size]) {
        E::unpack(v.x, to), E::unpack(v.y, to + per_word), E::unpack(v.z, to + 2 * per_word),
            E::unpack(v.w, to + 3 * per_word);
    }
    LATENT_MOE_DEVICE static uint4 pack(const float (&from)[size]) {
        return make_uint4(E::pack(from), E::pack(from + per_word), E::pack(from + 2 * per_word),
                          E::pack(from + 3 * per_word));
    }
    LATENT_MOE_DEVICE static uint4 canonical(uint4 v) {
        return make_uint4(E::canonical(v.x), E::canonical(v.y), E::canonical(v.z), E::canonical(v.w));
    }
    LATENT_MOE_DEVICE static uint4 sentinel() { return make_uint4(E::sentinel, E::sentinel, E::sentinel, E::sentinel); }
    LATENT_MOE_DEVICE static bool arrived(uint4 v) {
        return v.x != E::sentinel && v.y != E::sentinel && v.z != E::sentinel && v.w != E::sentinel;
    }
    /// round(a + b), element by element.
    LATENT_MOE_DEVICE static uint4 add(uint4 a, uint4 b) {
        float x[size], y[size];
        unpack(a, x), unpack(b, y);
#pragma unroll
        for (int i = 0; i < size; ++i) x[i] += y[i];
        return pack(x);
    }
};

/// The factor of RMSNorm, from the sum of a row's squares. Every kernel that normalises uses this one, so that they agree.
LATENT_MOE_DEVICE float rms_factor(float sum_of_squares, float inverse_width, float epsilon) {
    return reciprocal_root(fmaf(sum_of_squares, inverse_width, epsilon));
}

/// A cheap digest: order does not matter (it is a sum), positions do.
LATENT_MOE_DEVICE std::uint32_t digest_of(uint4 v, std::uint32_t position) {
    const std::uint32_t mixed = v.x * 0x9e3779b1u + v.y * 0x85ebca77u + v.z * 0xc2b2ae3du + v.w * 0x27d4eb2fu;
    return (mixed ^ mixed >> 15) * (2 * position + 1);
}

}  // namespace latent_moe::gpu
