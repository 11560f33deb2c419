// How W_up [rows N, latent K] lies in memory packed as e4m3, for products that multiply it from registers:
//
//     bytes:  | tile 0: block 0, block 1, … | tile 1: block 0, … | …        tile: 128 rows of W; block: 64 of its columns,
//     8 KB, or two halves of 64 rows
//
//     block:     8 fragments of 16 rows                                          (one warp's part of wgmma's A operand)
//     fragment:  2 halves of 32 columns, each 32 lanes of 16 bytes: 4 words      (one conflict-free read of a warp)
//     word:      for a step of 16 columns, two of the lane's four registers of A: two columns of row g and of row g + 8
//
// A word's bits are not four codes side by side: they stand where widening to bf16 needs the fewest instructions. Rows from
// N on and columns from K on are zeros. A row with a NaN has a NaN for its scale instead: `widen_float8` knows no NaN.
#pragma once

#include <cstdint>

#include "gpu/kernels/packed_layout.h"
#include "gpu/primitives/anywhere.h"

namespace latent_moe::gpu {

struct PackedFloat8Layout {
    static constexpr int fragment_rows = 16;
    static constexpr int half_bytes = 32 * 16;  ///< of a fragment: 32 columns
    static constexpr int fragment_bytes = 2 * half_bytes;
    static constexpr int block_bytes = PackedLayout::tile_rows / fragment_rows * fragment_bytes;  ///< 8 KB

    std::int64_t rows;    ///< N
    std::int64_t latent;  ///< K

    LATENT_MOE_ANYWHERE constexpr std::int64_t bytes() const { return PackedLayout{rows, latent}.bytes() / 2; }

    /// The four elements of a word, by its number from the start: W[n, k], W[n, k + 1], W[n + 8, k], W[n + 8, k + 1].
    struct Place {
        std::int64_t n, k;
    };
    LATENT_MOE_ANYWHERE constexpr Place place(std::int64_t word) const {
        const std::int64_t block = word / (block_bytes / 4), blocks = PackedLayout{rows, latent}.blocks();
        const int in_block = static_cast<int>(word % (block_bytes / 4)), in_fragment = in_block % (fragment_bytes / 4);
        const int half = in_fragment / (half_bytes / 4), lane = in_fragment / 4 % 32, of_lane = in_fragment % 4;
        const int step = 2 * half + of_lane / 2, pair = lane % 4 + of_lane % 2 * 4;  // of columns
        return {block / blocks * PackedLayout::tile_rows + in_block / (fragment_bytes / 4) * fragment_rows + lane / 4,
                block % blocks * PackedLayout::block_columns + step * 16 + pair * 2};
    }
};

/// A word of four codes: of row n in the lower and the upper half (columns k, k + 1), and of row n + 8.
LATENT_MOE_ANYWHERE constexpr std::uint32_t pack_float8_word(const std::uint8_t (&low)[2], const std::uint8_t (&high)[2]) {
    std::uint32_t word = 0;
    for (int column = 0; column < 2; ++column) {
        const std::uint32_t a = low[column], b = high[column];
        // a: the sign and the other seven bits as in a bf16 with a smaller exponent. b: in the gaps.
        const std::uint32_t half = (a & 0x80) << 8 | (a & 0x7f) << 4 | (b & 0x70) << 8 | (b & 0x80) << 4 | (b & 0x0f);
        word |= half << 16 * column;
    }
    return word;
}

}  // namespace latent_moe::gpu
