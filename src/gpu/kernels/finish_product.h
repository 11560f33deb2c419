// From a product's float32 sums to its output, where the library that multiplied cannot do it in its own epilogue.
#pragma once

#include <cstdint>

#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// out = round(addend + scale · column_scales[n] · sums), then with a prefix out = round(out + prefix). `out` may be exactly
/// `addend` or `prefix`; any of `column_scales`, `addend` and `prefix` may be absent. `sums` are contiguous.
struct FinishProduct {
    const float* sums = nullptr;
    float scale = 1.0F;
    const float* column_scales = nullptr;
    ConstRows addend;
    ConstRows prefix;
    Rows out;
    std::int64_t tokens = 0;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
};
cudaError_t finish_product(const FinishProduct& op, cudaStream_t stream);

}  // namespace latent_moe::gpu
