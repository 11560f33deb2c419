// Many tokens times packed weights, on Hopper. Conventions: kernels.h.
#pragma once

#include <cstdint>

#include "gpu/kernels/kernels.h"

namespace latent_moe::gpu {

/// c = T(addend + scale · a · Wᵀ), then with a prefix c = T(c + prefix); bf16. `c` may be exactly `addend` or `prefix`. All
/// rows are aligned to 16 bytes, `rows` and `latent` are multiples of 8.
struct TileProjection {
    ConstRows a;         ///< [tokens, latent]
    const void* packed;  ///< packed_layout.h
    ConstRows addend;
    ConstRows prefix;
    Rows c;  ///< [tokens, rows]
    float scale = 1.0F;
    std::int64_t tokens = 0;
    std::int64_t rows = 0;  ///< N
    std::int64_t latent = 0;
    int tile_columns = 0;  ///< 128 or 256; 0: chosen by the shape
    int max_ctas = 0;      ///< 0: as many as there are multiprocessors
};
cudaError_t tile_projection(const TileProjection& op, cudaStream_t stream);

}  // namespace latent_moe::gpu
