// Rows from one dtype to another, and numbers to measure with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// y = x where the dtype of y holds every value of x: e4m3 to anything, bf16 and f16 to f32, or the same dtype. Contiguous
/// elements of y; `width` is a multiple of 8.
cudaError_t widen_rows(ConstRows x, Dtype from, void* y, Dtype to, std::int64_t rows, std::int64_t width,
                       cudaStream_t stream);

/// Rows as e4m3 with a scale each, as `pack_float8` of core/float8_packing.h makes them, bit for bit: x is bf16, f16 or f32,
/// `codes` are contiguous. `given`: what the rows are to be multiplied with besides; it may be `scales`, or null.
cudaError_t round_rows_to_float8(ConstRows x, Dtype from, const float* given, std::uint8_t* codes, float* scales,
                                 std::int64_t rows, std::int64_t width, cudaStream_t stream);

/// Weights to measure with are so many bytes together, so that none is in a cache, as a step of many layers finds them.
inline constexpr std::size_t cold_bytes = std::size_t{160} << 20;

/// Random elements of about unit size: products of zeros run faster than those of data.
cudaError_t fill_noise(void* y, Dtype dtype, std::int64_t count, cudaStream_t stream);

/// Whether this binary has code for the current device.
cudaError_t has_code_for_device();

}  // namespace latent_moe::gpu
