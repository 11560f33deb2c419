// Tensors drawn from a seed. An element depends on the seed, the tensor and its position alone, so any part of any tensor
// can be drawn anywhere, and every backend, tail and TP size sees the same ones.
#pragma once

#include <cstdint>

#include "core/matrix.h"

namespace latent_moe {

enum class Draw : std::uint8_t { routed, shared, prefix, weights, gamma };

/// A draw of about N(0, 1) (a sum of four uniforms, exact in integers until its last step, so the same on every machine).
float standard_draw(std::uint64_t key, std::uint64_t index) noexcept;
std::uint64_t draw_key(std::uint64_t seed, Draw draw, std::uint64_t instance) noexcept;

/// Fills `matrix` with mean + deviation · N(0, 1), rounded to its dtype; element (i, j) has index (i + first_row) · columns
/// + j.
void fill_normal(const Matrix& matrix, std::uint64_t key, float deviation, float mean = 0, std::int64_t first_row = 0);

/// Rank `rank`'s summand of a matrix that is N(0, 1) when summed over all ranks, up to rounding: total / world plus noise
/// that cancels over the ranks, sized so that a summand looks like that of independent ranks.
void fill_partial(const Matrix& matrix, std::uint64_t key, int rank, int world);

}  // namespace latent_moe
