// Combining the experts' rows.
#include "core/deferred.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "core/numeric.h"

namespace latent_moe {
namespace {

std::vector<float> combined(const DeferredMatrix& deferred, std::int64_t token) {
    std::vector<float> sum(static_cast<std::size_t>(deferred.rows.columns), -1.0F);
    std::vector<float> scratch(sum.size());
    combine_row(deferred, token, sum.data(), scratch.data());
    return sum;
}

template <typename Values>
const std::byte* bytes_in(const Values& values) {
    return reinterpret_cast<const std::byte*>(values.data());
}

TEST(Combining, AddsWeightedRowsInSlotOrderAndDropsNegativeSlots) {
    // In float32 2^24 + 1 - 2^24 is 0 and 2^24 - 2^24 + 1 is 1: order shows.
    const std::array<float, 6> rows = {0x1p24F, 10, 1, 100, -0x1p24F, 1000};  // three rows of two
    const std::array<std::int32_t, 9> map = {0, 1, 2, 0, 2, 1, -1, 1, -7};
    const std::array<float, 9> weights = {1, 1, 1, 1, 1, 1, 5, 3, 5};
    const DeferredMatrix deferred{.rows = {bytes_in(rows), 3, 2, 2, Dtype::f32},
                                  .weights = bytes_in(weights),
                                  .weight_dtype = Dtype::f32,
                                  .map = map.data(),
                                  .slots = 3};
    EXPECT_EQ(combined(deferred, 0), (std::vector<float>{0, 1110}));
    EXPECT_EQ(combined(deferred, 1), (std::vector<float>{1, 1110}));
    EXPECT_EQ(combined(deferred, 2), (std::vector<float>{3, 300}));
}

TEST(Combining, GivesZerosWhereEverySlotIsDropped) {
    const std::array<std::int32_t, 2> map = {-1, -1};
    const std::array<float, 2> weights = {1, 1};
    const DeferredMatrix deferred{.rows = {nullptr, 0, 2, 2, Dtype::f32},
                                  .weights = bytes_in(weights),
                                  .weight_dtype = Dtype::f32,
                                  .map = map.data(),
                                  .slots = 2};
    EXPECT_EQ(combined(deferred, 0), (std::vector<float>{0, 0}));
}

TEST(Combining, ReadsStridedRowsAndBf16Weights) {
    const std::array<std::uint16_t, 8> rows = {bf16_from_float(1), bf16_from_float(2), 0x7FC0, 0x7FC0,
                                               bf16_from_float(3), bf16_from_float(4), 0x7FC0, 0x7FC0};
    const std::array<std::uint16_t, 2> weights = {bf16_from_float(0.5F), bf16_from_float(-2)};
    const std::array<std::int32_t, 2> map = {1, 0};
    const DeferredMatrix deferred{.rows = {bytes_in(rows), 2, 2, 4, Dtype::bf16},
                                  .weights = bytes_in(weights),
                                  .weight_dtype = Dtype::bf16,
                                  .map = map.data(),
                                  .slots = 2};
    EXPECT_EQ(combined(deferred, 0), (std::vector<float>{-0.5F, -2}));
}

}  // namespace
}  // namespace latent_moe
