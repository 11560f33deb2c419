// A cheap 64-bit digest of rows, to notice that ranks diverged. Not cryptographic.
#pragma once

#include <cstdint>

#include "core/matrix.h"

namespace latent_moe {

std::uint64_t digest_of(const ConstMatrix& matrix) noexcept;

}  // namespace latent_moe
