// How the places for CTAs that wait for peers are shared out.
#pragma once

#include <algorithm>

#include "gpu/grid_registry.h"

namespace latent_moe::gpu {

/// CTAs that each of so many equal contexts may have on a device.
constexpr int ctas_of_each(Room room, int contexts) noexcept {
    const int together = room.all / contexts;
    return contexts == 1 ? together : std::min(together, room.beside / (contexts - 1));
}

/// CTAs of the lanes of one of `sharing` ranks on a device: what leaves as many to a second context of every rank, or all
/// that a rank can have where its fused tail takes more than that anyway.
struct LaneGrids {
    int main;  ///< beside a kernel of the side lane
    int side;
    int alone;  ///< of the main lane, while the side lane has none: as many as both
};
constexpr LaneGrids lane_grids(Room room, int sharing, int fused_ctas) noexcept {
    constexpr int contexts_of_rank = 2;
    constexpr int fewest_ctas = 4;  // a header and one part of the data on each lane
    const int share = ctas_of_each(room, sharing * contexts_of_rank);
    const int ctas = std::max(fused_ctas > share ? ctas_of_each(room, sharing) : share, fewest_ctas);
    const int side = std::max(2, ctas / 3);
    return {.main = ctas - side, .side = side, .alone = ctas};
}

}  // namespace latent_moe::gpu
