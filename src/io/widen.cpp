#include "io/widen.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "io/element_type.h"
#include "io/report.h"

namespace latent_moe::io {
namespace {

float from_bf16(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

float from_f16(std::uint16_t bits) {
    constexpr int mantissa_bits = 10;
    constexpr int bias = 15;
    constexpr int special_exponent = 31;
    const int exponent = (bits >> mantissa_bits) & 0x1F;
    const int mantissa = bits & 0x3FF;
    float magnitude = 0.0F;
    if (exponent == special_exponent) {
        magnitude = mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    } else if (exponent == 0) {
        magnitude = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
    } else {
        magnitude = std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
    }
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class Element>
std::vector<float> convert(std::span<const std::byte> bytes, float (*to_float)(Element)) {
    std::vector<float> values(bytes.size() / sizeof(Element));
    for (std::size_t i = 0; i < values.size(); ++i) {
        Element element{};
        std::memcpy(&element, bytes.data() + i * sizeof(Element), sizeof(Element));  // may be misaligned
        values[i] = to_float(element);
    }
    return values;
}

}  // namespace

std::vector<float> to_floats(const Matrix& tensor, std::string_view source) {
    switch (tensor.dtype) {
        case Dtype::bf16: return convert<std::uint16_t>(tensor.bytes, from_bf16);
        case Dtype::f16: return convert<std::uint16_t>(tensor.bytes, from_f16);
        case Dtype::f32: return convert<float>(tensor.bytes, [](float value) { return value; });
        case Dtype::e4m3: break;
    }
    refuse_request(source, fmt::format("tensor {}: has dtype {}, expected BF16, F16 or F32", quote(tensor.name),
                                       format_name(tensor.dtype)));
}

}  // namespace latent_moe::io
