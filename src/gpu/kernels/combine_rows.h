// The experts' un-combined rows to one row a token.
#pragma once

#include <cstdint>

#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// y[t] = T(Σ_j weights[t, j] · x[map[t, j]]), j in order; the same bits as `combine_row` (core/deferred.h). An entry below
/// 0 drops its slot; one of `count` or more, which would be read from nowhere, makes the row NaN.
struct CombineRows {
    ConstRows x;  ///< [count, width]
    std::int64_t count = 0;
    const void* weights = nullptr;  ///< [tokens, slots], bf16 or f32
    Dtype weight_dtype = Dtype::f32;
    const std::int32_t* map = nullptr;  ///< [tokens, slots]
    int slots = 0;
    Rows y;  ///< [tokens, width]
    std::int64_t tokens = 0;
    std::int64_t width = 0;  ///< of whole 16-byte units
    Dtype dtype = Dtype::bf16;
};

cudaError_t combine_rows(const CombineRows& call, cudaStream_t stream);

}  // namespace latent_moe::gpu
