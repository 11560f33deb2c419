// The product of 16 rows of W and all tokens by one CTA whose waves split K: what the projection and the fused tail share on
// AMD GPUs. A weight is read once by one lane, so it goes from memory to registers and past LDS.
//
//     wave v    blocks v, v + waves, … of W (packed_layout.h) ── registers ──▶ MFMA ──▶ parts[v][token][row] in LDS
//     all       Σ parts in the order of the waves
//
// The order of k inside a dot product is free as long as both operands agree: of a block's 8 units a lane takes l / 16 and
// l / 16 + 4 (in a wave of 32, l / 16 and every second from there), and feeds each in two halves. The order of the sums
// depends on K alone.
#pragma once

#include <cstdint>

#include "gpu/kernels/packed_layout.h"
#include "gpu/primitives/copy.h"
#include "gpu/primitives/mfma.h"

namespace latent_moe::gpu {

/// Unit `unit` of a row of tokens, zeros outside of [tokens, units]; nothing diverges, so that loads leave together.
LATENT_MOE_DEVICE uint4 unit_or_zero(const char* rows, std::int64_t stride, int token, int unit, int tokens, int units) {
    const bool inside = token < tokens && unit < units;
    const uint4 v = load16(rows + (inside ? token * stride + unit * 16 : 0));
    return inside ? v : uint4{};
}

template <Dtype dtype, int tokens_, int waves_>
struct MfmaTile {
    static constexpr int tokens = tokens_;  ///< columns of the product: a multiple of 16
    static constexpr int waves = waves_;
    static constexpr int rows = 16;  ///< of W
    static constexpr int groups = tokens / 16;
    static constexpr int units = 8;  ///< of 16 bytes in a block's row
    static constexpr int units_of_lane = units / mfma_lanes_of_row;
    static constexpr int threads = waves * static_cast<int>(wave_size);
    static_assert(tokens % 16 == 0 && PackedLayout::tile_rows % rows == 0);

    /// What the waves add up, and the LDS for it: [wave][token][row].
    using Parts = float[waves][tokens][rows];

    /// A lane's part of one block: 16 elements of one row (32 in a wave of 32).
    struct Weights {
        uint4 unit[units_of_lane];
    };

    float sum[groups][mfma_sums] = {};

    LATENT_MOE_DEVICE static int unit_of_lane(int u) { return lane() / 16 + mfma_lanes_of_row * u; }
    LATENT_MOE_DEVICE static int lane() { return static_cast<int>(threadIdx.x % wave_size); }
    LATENT_MOE_DEVICE static int wave() { return same_in_wave(static_cast<int>(threadIdx.x / wave_size)); }

    /// Zeros for a block beyond the last.
    LATENT_MOE_DEVICE static Weights load(const char* packed, const PackedLayout& layout, std::int64_t tile, int block) {
        if (block >= layout.blocks()) return {};
        const std::int64_t first = tile * rows;
        const char* from = packed + layout.block(first / PackedLayout::tile_rows, block);
        const int row = static_cast<int>(first % PackedLayout::tile_rows) + lane() % 16;
        Weights w;
#pragma unroll
        for (int u = 0; u < units_of_lane; ++u) w.unit[u] = load16(from + PackedLayout::unit_in_block(row, unit_of_lane(u)));
        return w;
    }

    /// One block. `token_unit(token, unit)`: 8 elements of a token's row, zeros beyond the last token or column. By all
    /// lanes.
    template <class TokenUnit>
    LATENT_MOE_DEVICE void multiply(const Weights& w, int block, TokenUnit token_unit) {
        uint4 x[groups][units_of_lane];
#pragma unroll
        for (int j = 0; j < groups; ++j) {
#pragma unroll
            for (int u = 0; u < units_of_lane; ++u)
                x[j][u] = token_unit(j * 16 + lane() % 16, block * units + unit_of_lane(u));
        }
#pragma unroll
        for (int u = 0; u < units_of_lane; ++u) {
#pragma unroll
            for (int j = 0; j < groups; ++j) {
                mfma_16x16<dtype>(sum[j], make_uint2(w.unit[u].x, w.unit[u].y), make_uint2(x[j][u].x, x[j][u].y));
                mfma_16x16<dtype>(sum[j], make_uint2(w.unit[u].z, w.unit[u].w), make_uint2(x[j][u].z, x[j][u].w));
            }
        }
    }

    /// Before a barrier of the CTA; `total` after it.
    LATENT_MOE_DEVICE void keep(Parts& parts) const {
#pragma unroll
        for (int j = 0; j < groups; ++j) {
#pragma unroll
            for (int i = 0; i < mfma_sums; ++i) parts[wave()][j * 16 + lane() % 16][lane() / 16 * mfma_sums + i] = sum[j][i];
        }
    }
    /// `count` neighbouring rows of a token, from `row`.
    template <int count>
    LATENT_MOE_DEVICE static void total(const Parts& parts, int token, int row, float (&to)[count]) {
#pragma unroll
        for (float& e : to) e = 0;
        for (int w = 0; w < waves; ++w) {
#pragma unroll
            for (int e = 0; e < count; ++e) to[e] += parts[w][token][row + e];
        }
    }
};

}  // namespace latent_moe::gpu
