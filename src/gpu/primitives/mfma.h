// Matrix products of one wave: MFMA on AMD GPUs, whose waves have 64 lanes; on the host its arithmetic is played by the
// threads of a wave, of 64 lanes or, with half as many columns a product, of 32 (which no AMD GPU has with MFMA).
//
// GUARANTEE. Operands are bf16 or f16, sums are float32. The order in which one instruction adds its 16 products is the
// hardware's: the same on every run and every GPU of one kind. On the host it is that of k, each product and sum rounded.
#pragma once

#include <cstdint>

#include "latent_moe/tensor.h"
#include "numeric.h"
#include "scoped.h"

namespace latent_moe::gpu {

/// A value that all lanes of a wave have, so that the compiler may branch on it once for all.
LATENT_MOE_DEVICE int same_in_wave(int value) {
#ifdef __HIP__
    return __builtin_amdgcn_readfirstlane(value);
#else
    return value;
#endif
}

/// Lanes that share a row of an operand, and what each of them has of 16 rows of the result.
inline constexpr int mfma_lanes_of_row = static_cast<int>(wave_size) / 16;
inline constexpr int mfma_sums = 16 / mfma_lanes_of_row;

/// d[16 × 16] += a[16 × K] · b[16 × K]ᵀ, K = 4 · mfma_lanes_of_row: 16 in a wave of 64. Lane l has 4 neighbouring k, from 4
/// (l / 16), of row l % 16 of `a` and of `b`; d[i] is row mfma_sums · (l / 16) + i of a, row l % 16 of b. By all lanes.
template <Dtype dtype>
LATENT_MOE_DEVICE void mfma_16x16(float (&d)[mfma_sums], uint2 a, uint2 b) {
#ifdef __HIP__
    static_assert(wave_size == 64);
    using Sums = __attribute__((ext_vector_type(4))) float;
    Sums sums = {d[0], d[1], d[2], d[3]};
    const std::uint64_t left = hip::both(a.x, a.y), right = hip::both(b.x, b.y);
    if constexpr (dtype == Dtype::bf16) {
        using Operand = __attribute__((ext_vector_type(4))) short;
        sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Operand, left),
                                                         __builtin_bit_cast(Operand, right), sums, 0, 0, 0);
    } else {
        using Operand = __attribute__((ext_vector_type(4))) _Float16;
        sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Operand, left), __builtin_bit_cast(Operand, right),
                                                     sums, 0, 0, 0);
    }
    d[0] = sums[0], d[1] = sums[1], d[2] = sums[2], d[3] = sums[3];
#else
    const unsigned lane = threadIdx.x % wave_size;
    const uint4* const all = share_in_wave(make_uint4(a.x, a.y, b.x, b.y));
    for (unsigned i = 0; i < mfma_sums; ++i) {
        for (unsigned part = 0; part < mfma_lanes_of_row; ++part) {
            const uint4 rows = all[part * 16 + lane / 16 * mfma_sums + i], columns = all[part * 16 + lane % 16];
            float left[4], right[4];
            Element<dtype>::unpack(rows.x, left), Element<dtype>::unpack(rows.y, left + 2);
            Element<dtype>::unpack(columns.z, right), Element<dtype>::unpack(columns.w, right + 2);
            for (int k = 0; k < 4; ++k) d[i] += left[k] * right[k];
        }
    }
#endif
}

}  // namespace latent_moe::gpu
