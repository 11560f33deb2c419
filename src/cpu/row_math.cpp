#include "cpu/row_math.h"

#include <cmath>

#include "core/numeric.h"

namespace latent_moe {

void sum_row(std::span<const Region> partials, std::int64_t row, Dtype dtype, float* sum, float* scratch,
             std::int64_t count) {
    widen(partials.front().row(row), dtype, sum, count);
    for (const Region& partial : partials.subspan(1)) {
        widen(partial.row(row), dtype, scratch, count);
#pragma omp simd
        for (std::int64_t i = 0; i < count; ++i) sum[i] += scratch[i];
    }
}

void norm_row(const Shape& shape, const float* gamma, float* values) {
    const std::int64_t count = shape.latent;
    for (std::int64_t i = 0; i < count; ++i) values[i] = round_to(shape.activations, values[i]);
    if (shape.norm == Norm::none) return;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t i = 0; i < count; ++i) squares += values[i] * values[i];
    // Squares that overflow give a scale of 0 and finite values a row of zeros, as the unfused chain does.
    const float scale = 1 / std::sqrt(squares / static_cast<float>(count) + shape.epsilon);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) values[i] = values[i] * scale * gamma[i];
}

void finish_row(float* values, Dtype dtype, const std::byte* prefix, std::byte* out, float* scratch, std::int64_t count) {
    if (prefix != nullptr) {
        widen(prefix, dtype, scratch, count);
        for (std::int64_t i = 0; i < count; ++i) values[i] = round_to(dtype, values[i]) + scratch[i];
    }
    narrow(values, dtype, out, count);
}

}  // namespace latent_moe
