#include "core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace latent_moe {
namespace {

/// The nearest of all finite values of a 16-bit format, ties to the even mantissa, by search.
template <typename ToFloat>
float nearest(float value, ToFloat to_float, unsigned largest_finite_bits) {
    unsigned low = 0;
    unsigned high = largest_finite_bits + 1;  // the infinity, as if it were the next finite value
    const double magnitude = std::abs(static_cast<double>(value));
    const auto at = [&](unsigned bits) {
        if (bits <= largest_finite_bits) return static_cast<double>(to_float(static_cast<std::uint16_t>(bits)));
        return 2 * static_cast<double>(to_float(static_cast<std::uint16_t>(largest_finite_bits))) -
               static_cast<double>(to_float(static_cast<std::uint16_t>(largest_finite_bits - 1)));
    };
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        (at(middle) <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - at(low);
    const double above = at(high) - magnitude;
    unsigned best = low;
    if (above < below || (above == below && (high & 1U) == 0)) best = high;
    if (magnitude >= at(largest_finite_bits + 1)) best = largest_finite_bits + 1;
    const float result =
        best > largest_finite_bits ? std::numeric_limits<float>::infinity() : to_float(static_cast<std::uint16_t>(best));
    return std::signbit(value) ? -result : result;
}

std::vector<float> interesting_values() {
    std::vector<float> values = {0.0F,     -0.0F,    1.0F,    -1.0F, 65504.0F, 65519.9F, 65520.0F,
                                 65536.0F, 3.38e38F, 3.4e38F, 1e-8F, 2.98e-8F, 5.97e-8F};
    std::uint32_t bits = 12345;
    for (int i = 0; i < 200'000; ++i) {
        bits = bits * 1664525U + 1013904223U;
        const auto value = std::bit_cast<float>(bits);
        if (std::isfinite(value)) values.push_back(value);
        values.push_back(std::bit_cast<float>((bits & 0x0FFFFFFFU) | 0x30000000U));  // magnitudes that f16 holds
        values.push_back(std::bit_cast<float>((bits & 0xFFFF0000U) | 0x8000U));      // ties of bf16
    }
    return values;
}

TEST(Bf16, RoundsToNearestEven) {
    for (const float value : interesting_values()) {
        if (!std::isfinite(value)) continue;
        ASSERT_EQ(float_from_bf16(bf16_from_float(value)), nearest(value, float_from_bf16, 0x7F7F)) << value;
    }
}

TEST(F16, RoundsToNearestEven) {
    for (const float value : interesting_values()) {
        if (!std::isfinite(value)) continue;
        ASSERT_EQ(float_from_f16(f16_from_float(value)), nearest(value, float_from_f16, 0x7BFF)) << value;
    }
}

TEST(SixteenBitFormats, SurviveTheRoundTrip) {
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        if (std::isnan(float_from_bf16(half))) {
            ASSERT_TRUE(std::isnan(float_from_bf16(bf16_from_float(float_from_bf16(half)))));
        } else {
            ASSERT_EQ(bf16_from_float(float_from_bf16(half)), half);
        }
        if (std::isnan(float_from_f16(half))) {
            ASSERT_TRUE(std::isnan(float_from_f16(f16_from_float(float_from_f16(half)))));
        } else {
            ASSERT_EQ(f16_from_float(float_from_f16(half)), half);
        }
    }
}

TEST(SixteenBitFormats, KeepNanAndInfinity) {
    const float infinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(float_from_bf16(bf16_from_float(infinity)), infinity);
    EXPECT_EQ(float_from_f16(f16_from_float(-infinity)), -infinity);
    const auto quiet_low_bits = std::bit_cast<float>(0x7F800001U);  // a NaN whose upper half alone would read as infinity
    EXPECT_TRUE(std::isnan(float_from_bf16(bf16_from_float(quiet_low_bits))));
    EXPECT_TRUE(std::isnan(float_from_f16(f16_from_float(quiet_low_bits))));
}

TEST(E4m3, HasTheValuesOfTheFormat) {
    EXPECT_EQ(float_from_e4m3(0x00), 0.0F);
    EXPECT_EQ(float_from_e4m3(0x01), std::ldexp(1.0F, -9));
    EXPECT_EQ(float_from_e4m3(0x08), std::ldexp(1.0F, -6));
    EXPECT_EQ(float_from_e4m3(0x38), 1.0F);
    EXPECT_EQ(float_from_e4m3(0x7E), 448.0F);
    EXPECT_EQ(float_from_e4m3(0xFE), -448.0F);
    EXPECT_TRUE(std::isnan(float_from_e4m3(0x7F)));
    for (unsigned bits = 0; bits < 256; ++bits) {
        const float value = float_from_e4m3(static_cast<std::uint8_t>(bits));
        if (std::isnan(value)) continue;
        EXPECT_EQ(value, float_from_bf16(bf16_from_float(value))) << "not exact in bf16";
    }
}

}  // namespace
}  // namespace latent_moe
