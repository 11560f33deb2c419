#include "gpu/kernels/convert.h"

#include <algorithm>
#include <cstring>

#include "core/numeric.h"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/numeric.h"
#include "gpu/primitives/scalar.h"

namespace latent_moe::gpu {
namespace {

constexpr int threads = cta_threads(256);
constexpr std::int64_t most_ctas = 4096;

__device__ float element(const void* data, Dtype dtype, std::int64_t i) {
    switch (dtype) {
        case Dtype::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
        case Dtype::f16: return __half2float(static_cast<const __half*>(data)[i]);
        case Dtype::f32: return static_cast<const float*>(data)[i];
        case Dtype::e4m3: break;
    }
    // e4m3 as the bits of a half: exponent and mantissa one place further right, rebiased by 2^8; 0x7f is NaN.
    const std::uint8_t bits = static_cast<const std::uint8_t*>(data)[i];
    const auto half_bits = static_cast<unsigned short>((bits & 0x7f) << 7);
    float value = __half2float(__ushort_as_half(half_bits)) * 256.0F;
    if ((bits & 0x7f) == 0x7f) value = as_float(0x7fc00000);
    return (bits & 0x80) != 0 ? -value : value;
}

__device__ void store(void* data, Dtype dtype, std::int64_t i, float value) {
    switch (dtype) {
        case Dtype::bf16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value); break;
        case Dtype::f16: static_cast<__half*>(data)[i] = __float2half_rn(value); break;
        default: static_cast<float*>(data)[i] = value; break;
    }
}

__global__ void __launch_bounds__(threads)
    widen(const void* x, Dtype from, std::int64_t stride, void* y, Dtype to, std::int64_t rows, std::int64_t width) {
    const std::int64_t step = std::int64_t{gridDim.x} * threads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < rows * width; i += step) {
        store(y, to, i, element(x, from, i / width * stride + i % width));
    }
}

/// A thread a row: once a layer, when it is added.
__global__ void __launch_bounds__(threads)
    round_to_float8(const void* x, Dtype from, std::int64_t stride, const float* given, std::uint8_t* codes, float* scales,
                    std::int64_t rows, std::int64_t width) {
    const auto is_finite = [](float value) { return as_bits(value) << 1 < 0xff000000u; };
    const std::int64_t row = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (row >= rows) return;
    float largest = 0;
    bool finite = true;
    for (std::int64_t i = 0; i < width; ++i) {
        const float value = element(x, from, row * stride + i);
        finite = finite && is_finite(value);
        if (fabsf(value) > largest) largest = fabsf(value);
    }
    const float least = as_float(0x00800000), quotient = largest / e4m3_max;
    const float scale = finite && largest > 0 ? (quotient < least ? least : quotient) : 1.0F;
    for (std::int64_t i = 0; i < width; ++i) {
        const float value = element(x, from, row * stride + i);
        codes[row * width + i] = is_finite(value) ? e4m3_from_float(value / scale) : std::uint8_t{0x7f};
    }
    scales[row] = scale * (given != nullptr ? given[row] : 1.0F);
}

__global__ void __launch_bounds__(threads) noise(void* y, Dtype dtype, std::int64_t count) {
    const std::int64_t step = std::int64_t{gridDim.x} * threads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < count; i += step) {
        auto bits = static_cast<std::uint32_t>(i) * 0x9e3779b1u;
        bits = (bits ^ bits >> 15) * 0x85ebca77u;
        bits ^= bits >> 13;
        store(y, dtype, i, static_cast<float>(static_cast<int>(bits)) * 0x1p-30F);
    }
}

int ctas_for(std::int64_t items) {
    return static_cast<int>(std::min((items + threads - 1) / threads, most_ctas));
}

}  // namespace

cudaError_t widen_rows(ConstRows x, Dtype from, void* y, Dtype to, std::int64_t rows, std::int64_t width,
                       cudaStream_t stream) {
    if (rows < 0 || width <= 0 || x.data == nullptr || y == nullptr || to == Dtype::e4m3) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    const std::int64_t stride = x.stride == 0 ? width : x.stride;
    return launch({.grid = ctas_for(rows * width), .block = threads, .stream = stream}, widen, x.data, from, stride, y, to,
                  rows, width);
}

cudaError_t round_rows_to_float8(ConstRows x, Dtype from, const float* given, std::uint8_t* codes, float* scales,
                                 std::int64_t rows, std::int64_t width, cudaStream_t stream) {
    if (rows < 0 || width <= 0 || x.data == nullptr || codes == nullptr || scales == nullptr || from == Dtype::e4m3)
        return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    const std::int64_t stride = x.stride == 0 ? width : x.stride;
    return launch({.grid = static_cast<int>((rows + threads - 1) / threads), .block = threads, .stream = stream},
                  round_to_float8, x.data, from, stride, given, codes, scales, rows, width);
}

cudaError_t fill_noise(void* y, Dtype dtype, std::int64_t count, cudaStream_t stream) {
    if (count <= 0) return cudaErrorInvalidValue;
    return launch({.grid = ctas_for(count), .block = threads, .stream = stream}, noise, y, dtype, count);
}

cudaError_t has_code_for_device() {
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, noise);
    static_cast<void>(cudaGetLastError());
    return error;
}

}  // namespace latent_moe::gpu
