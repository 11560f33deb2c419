// How W_up [rows N, latent K] lies in memory once packed: one layout a rank, which the skinny, the fused and the prefill
// products read.
//
//     bytes:  | tile 0: block 0, block 1, … | tile 1: block 0, … | …        tile: 128 rows; block: 64 columns of it, 16 KB
//
//     block:  128 rows of 128 bytes; row r's 16-byte unit u lies at place u XOR (r mod 8)       (the 128-byte swizzle)
//
// So a block is one bulk copy, and lands in shared memory ready for wgmma, as 128 rows or as two halves of 64; a row's eight
// units meet eight different banks. Rows from N on and columns from K on are zeros. Nothing here depends on the GPU: the
// host packs, checks and sizes with the same functions.
#pragma once

#include <cstdint>

#include "gpu/primitives/anywhere.h"

namespace latent_moe::gpu {

struct PackedLayout {
    static constexpr int tile_rows = 128;
    static constexpr int block_columns = 64;
    static constexpr int element_bytes = 2;
    static constexpr int row_bytes = block_columns * element_bytes;  ///< 128
    static constexpr int block_bytes = tile_rows * row_bytes;        ///< 16 KB

    std::int64_t rows;    ///< N
    std::int64_t latent;  ///< K

    LATENT_MOE_ANYWHERE constexpr std::int64_t tiles() const { return (rows + tile_rows - 1) / tile_rows; }
    LATENT_MOE_ANYWHERE constexpr std::int64_t blocks() const { return (latent + block_columns - 1) / block_columns; }
    LATENT_MOE_ANYWHERE constexpr std::int64_t bytes() const { return tiles() * blocks() * block_bytes; }

    /// Offset of a block in bytes.
    LATENT_MOE_ANYWHERE constexpr std::int64_t block(std::int64_t tile, std::int64_t index) const {
        return (tile * blocks() + index) * block_bytes;
    }
    /// Offset inside a block of the unit of 8 elements that holds columns 8u … 8u + 7 of a row.
    LATENT_MOE_ANYWHERE static constexpr int unit_in_block(int row, int u) { return row * row_bytes + (u ^ row % 8) * 16; }

    /// Offset of element W[n, k] in bytes.
    LATENT_MOE_ANYWHERE constexpr std::int64_t element(std::int64_t n, std::int64_t k) const {
        return block(n / tile_rows, k / block_columns) +
               unit_in_block(static_cast<int>(n % tile_rows), static_cast<int>(k % block_columns / 8)) +
               k % 8 * element_bytes;
    }
};

}  // namespace latent_moe::gpu
