// Time stamps of a call's stages, for measurement: compiled in where a tile says so, into `stamps[layer-chosen
// base][CTA][stage]`.
#pragma once

#include "gpu/kernels/fused_tail_params.cuh"

namespace latent_moe::gpu::fused {

/// SM clocks; subtract a CTA's `began`.
enum Stage : int {
    began,
    predecessor_over,   ///< as the first gathering warp sees it
    published,          ///< first math warp
    weights_begun,      ///< the first bulk copy was issued
    weights_asked,      ///< the last bulk copy was issued
    latents_came,       ///< the first gathering thread has its first rows from the peer
    latents_done,       ///< the first gathering thread has written its last pass
    last_latents_done,  ///< by the last gathering warp
    shared_done,
    last_weights,
    multiply_done,
    parts_there,
    columns_sent,
    columns_came,
    stage_count
};
inline constexpr int stamps_per_cta = 16;

template <class Tile>
LATENT_MOE_DEVICE void stamp(const Params& p, Stage stage, bool mine) {
    if constexpr (Tile::known.stamps) {
        if (mine && p.stamps) p.stamps[blockIdx.x * stamps_per_cta + stage] = clock64();
    }
}

}  // namespace latent_moe::gpu::fused
