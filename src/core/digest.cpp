#include "core/digest.h"

#include <array>
#include <cstddef>
#include <cstring>

namespace latent_moe {
namespace {

constexpr std::uint64_t multiplier = 0x9E3779B97F4A7C15U;

std::uint64_t mix(std::uint64_t value) noexcept {
    value = (value ^ (value >> 32)) * multiplier;
    return value ^ (value >> 29);
}

std::uint64_t word_at(const std::byte* data) noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    return word;
}

}  // namespace

std::uint64_t digest_of(const ConstMatrix& matrix) noexcept {
    // Four chains, so that the multiplications overlap.
    std::array<std::uint64_t, 4> chains = {1, 2, 3, 4};
    const std::int64_t bytes = matrix.row_bytes();
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        const std::byte* data = matrix.row(row);
        std::int64_t at = 0;
        for (; at + 32 <= bytes; at += 32) {
            for (std::size_t chain = 0; chain < chains.size(); ++chain) {
                chains[chain] = (chains[chain] ^ word_at(data + at + static_cast<std::int64_t>(chain) * 8)) * multiplier;
                chains[chain] ^= chains[chain] >> 31;
            }
        }
        std::uint64_t rest = static_cast<std::uint64_t>(row);
        for (; at < bytes; ++at) rest = (rest << 8 | rest >> 56) ^ static_cast<std::uint64_t>(data[at]);
        chains[0] = (chains[0] ^ rest) * multiplier;
        chains[0] ^= chains[0] >> 31;
    }
    std::uint64_t digest = static_cast<std::uint64_t>(matrix.rows);
    for (const std::uint64_t chain : chains) digest = mix(digest ^ chain);
    return digest;
}

}  // namespace latent_moe
