// Splitting rows or columns among ranks or workers.
#pragma once

#include <cstdint>

#include "latent_moe/context.h"

namespace latent_moe {

/// Part `index` of `total` items split in `parts` nearly equal contiguous ranges, in order; the sizes differ by at most
/// `grain`. Every range but the last starts at a multiple of `grain`.
constexpr TokenRange even_part(std::int64_t total, int parts, int index, std::int64_t grain = 1) noexcept {
    const std::int64_t grains = (total + grain - 1) / grain;
    const std::int64_t first = grains * index / parts * grain;
    const std::int64_t last = grains * (index + 1) / parts * grain;
    const auto clamp = [total](std::int64_t at) { return at < total ? at : total; };
    return {clamp(first), clamp(last) - clamp(first)};
}

}  // namespace latent_moe
