#include "core/synthetic.h"

#include <cmath>
#include <vector>

#include "core/numeric.h"

namespace latent_moe {
namespace {

// The finaliser of SplitMix64: a bijection that spreads every input bit over the output.
std::uint64_t scramble(std::uint64_t value) noexcept {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31);
}

template <typename ValueAt>
void fill(const Matrix& matrix, ValueAt value_at) {
    std::vector<float> row(static_cast<std::size_t>(matrix.columns));
    for (std::int64_t i = 0; i < matrix.rows; ++i) {
        for (std::int64_t j = 0; j < matrix.columns; ++j) {
            row[static_cast<std::size_t>(j)] = value_at(static_cast<std::uint64_t>(i * matrix.columns + j));
        }
        narrow(row.data(), matrix.dtype, matrix.row(i), matrix.columns);
    }
}

}  // namespace

float standard_draw(std::uint64_t key, std::uint64_t index) noexcept {
    const std::uint64_t bits = scramble(key + index * 0x9E3779B97F4A7C15U);
    const std::int64_t sum = static_cast<std::int64_t>(bits & 0xFFFFU) + static_cast<std::int64_t>(bits >> 16 & 0xFFFFU) +
                             static_cast<std::int64_t>(bits >> 32 & 0xFFFFU) + static_cast<std::int64_t>(bits >> 48);
    // Four uniforms on 0 … 65535: mean 131070, standard deviation 65536 · sqrt(4 / 12).
    return static_cast<float>(sum - 131070) * (1.0F / 37837.0F);
}

std::uint64_t draw_key(std::uint64_t seed, Draw draw, std::uint64_t instance) noexcept {
    return scramble(scramble(seed + 1) ^ scramble((static_cast<std::uint64_t>(draw) + 1) << 32 | (instance + 1)));
}

void fill_normal(const Matrix& matrix, std::uint64_t key, float deviation, float mean, std::int64_t first_row) {
    const auto offset = static_cast<std::uint64_t>(first_row * matrix.columns);
    fill(matrix, [&](std::uint64_t index) { return mean + deviation * standard_draw(key, offset + index); });
}

void fill_partial(const Matrix& matrix, std::uint64_t key, int rank, int world) {
    const auto noise_key = [&](int r) { return scramble(key ^ scramble(static_cast<std::uint64_t>(r) + 17)); };
    const std::uint64_t plus = noise_key(rank);
    const std::uint64_t minus = noise_key((rank + 1) % world);
    const float share = 1.0F / static_cast<float>(world);
    // Independent summands of variance 1/R, given their sum, are sum/R plus deviations of variance (1 − 1/R) / R; the noise
    // here is a difference of two draws.
    const float deviation = std::sqrt((1 - share) * share / 2);
    fill(matrix, [&](std::uint64_t index) {
        const float noise = deviation * (standard_draw(plus, index) - standard_draw(minus, index));
        return share * standard_draw(key, index) + noise;
    });
}

}  // namespace latent_moe
