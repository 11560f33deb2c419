// A product whose every element is one sum in the order of k, for weights that are not packed.
#pragma once

#include <cstdint>

#include "gpu/kernels/finish_product.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// What `finish_product` makes of the sums x · wᵀ: each in float32, k ascending, one fused multiply-add a step, whatever the
/// number of tokens is. Rows of any alignment and width.
struct OrderedProjection {
    ConstRows x;                       ///< [tokens, latent], of `finish.dtype`
    const void* w = nullptr;           ///< [finish.width, latent], contiguous
    Dtype weight_dtype = Dtype::bf16;  ///< that of x, or f32
    std::int64_t latent = 0;
    FinishProduct finish;  ///< all but its `sums`
};
cudaError_t ordered_projection(const OrderedProjection& op, cudaStream_t stream);

}  // namespace latent_moe::gpu
