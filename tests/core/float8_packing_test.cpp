// Wider weights to e4m3 with a scale a row.
#include "core/float8_packing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/numeric.h"
#include "core/synthetic.h"

namespace latent_moe {
namespace {

WeightView view_of(const std::vector<float>& values, std::int64_t columns) {
    return {.data = values.data(), .rows = static_cast<std::int64_t>(values.size()) / columns, .dtype = Dtype::f32};
}

float value_at(const Float8Rows& packed, std::int64_t columns, std::int64_t row, std::int64_t column) {
    return float_from_e4m3(packed.bits[static_cast<std::size_t>(row * columns + column)]) *
           packed.scales[static_cast<std::size_t>(row)];
}

TEST(Float8, RoundsToTheNearestValueAndTiesToEven) {
    for (int code = 0; code < 0x7E; ++code) {
        const float low = float_from_e4m3(static_cast<std::uint8_t>(code));
        const float high = float_from_e4m3(static_cast<std::uint8_t>(code + 1));
        const float middle = (low + high) / 2;
        EXPECT_EQ(e4m3_from_float(low), code);
        EXPECT_EQ(e4m3_from_float(-high), (code + 1) | 0x80);
        EXPECT_EQ(e4m3_from_float(middle), code % 2 == 0 ? code : code + 1);
        EXPECT_EQ(e4m3_from_float(std::nextafter(middle, 0.0F)), code);
        EXPECT_EQ(e4m3_from_float(std::nextafter(middle, 1e9F)), code + 1);
    }
    EXPECT_EQ(e4m3_from_float(1e30F), 0x7E);
    EXPECT_EQ(e4m3_from_float(-std::numeric_limits<float>::infinity()), 0xFE);
    EXPECT_EQ(e4m3_from_float(std::nanf("")) & 0x7F, 0x7F);
    EXPECT_EQ(e4m3_from_float(-0.0F), 0x80);
}

TEST(Float8, WidensEveryCodeAsTheFormatSays) {
    for (unsigned bits = 0; bits < 256; ++bits) {
        const unsigned exponent = (bits >> 3) & 15U;
        const auto mantissa = static_cast<float>(bits & 7U);
        const float magnitude =
            exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0F + mantissa, static_cast<int>(exponent) - 10);
        const float value = float_from_e4m3(static_cast<std::uint8_t>(bits));
        if ((bits & 0x7FU) == 0x7FU) {
            EXPECT_TRUE(std::isnan(value));
        } else {
            EXPECT_EQ(value, (bits & 0x80U) != 0 ? -magnitude : magnitude);
        }
    }
}

TEST(Float8Packing, KeepsEachRowsLargestMagnitudeAndStaysWithinItsGrid) {
    const std::vector<float> values = {1, -0.5F, 0.01F, 1e-6F, 3e5F, -1e5F, 7, 0};
    const Float8Rows packed = pack_float8(view_of(values, 4), 4);
    EXPECT_FLOAT_EQ(value_at(packed, 4, 0, 0), 1);
    EXPECT_FLOAT_EQ(value_at(packed, 4, 1, 0), 3e5F);
    for (std::int64_t row = 0; row < 2; ++row) {
        for (std::int64_t column = 0; column < 4; ++column) {
            const float value = values[static_cast<std::size_t>(row * 4 + column)];
            const float grid = packed.scales[static_cast<std::size_t>(row)] * 0x1p-10F;  // half of the finest step
            EXPECT_NEAR(value_at(packed, 4, row, column), value, std::max(std::abs(value) / 16, grid));
        }
    }
}

TEST(Float8Packing, LeavesARowOfZerosAndMarksWhatIsNotFinite) {
    const float infinity = std::numeric_limits<float>::infinity();
    const Float8Rows packed = pack_float8(view_of({0, 0, 2, infinity, -0.0F, 0}, 2), 2);
    EXPECT_EQ(packed.scales, (std::vector<float>{1, 1, 1}));
    EXPECT_EQ(value_at(packed, 2, 0, 1), 0);
    EXPECT_EQ(value_at(packed, 2, 1, 0), 2);
    EXPECT_TRUE(std::isnan(value_at(packed, 2, 1, 1)));
}

TEST(Float8Packing, KeepsTheScalesThatWereGiven) {
    const std::vector<float> values = {448, 1, 448, 1};
    const std::vector<float> row_scales = {2, 3};
    WeightView view = view_of(values, 2);
    view.scale = 0.5F;
    view.row_scales = row_scales.data();
    const Float8Rows packed = pack_float8(view, 2);
    EXPECT_EQ(packed.scales, row_scales);
    EXPECT_EQ(packed.view().scale, 0.5F);
    EXPECT_EQ(packed.view().rows, 2);
}

TEST(Float8Packing, WithAScaleARowHoldsHeavyTailedWeightsAsWellAsBenignOnes) {
    // A few rows a thousand times as large as the rest: one scale for all would flush the rest to zero.
    constexpr std::int64_t rows = 64;
    constexpr std::int64_t columns = 256;
    std::vector<float> values(rows * columns);
    for (std::size_t i = 0; i < values.size(); ++i) {
        const bool outlier = static_cast<std::int64_t>(i) / columns % 16 == 0;
        values[i] = standard_draw(11, i) * (outlier ? 1000.0F : 1.0F);
    }
    const Float8Rows packed = pack_float8(view_of(values, columns), columns);
    for (std::int64_t row = 0; row < rows; ++row) {
        double error = 0;
        double norm = 0;
        for (std::int64_t column = 0; column < columns; ++column) {
            const auto value = static_cast<double>(values[static_cast<std::size_t>(row * columns + column)]);
            error += std::pow(static_cast<double>(value_at(packed, columns, row, column)) - value, 2);
            norm += value * value;
        }
        EXPECT_LT(std::sqrt(error / norm), 0.03) << "row " << row;
    }
}

}  // namespace
}  // namespace latent_moe
