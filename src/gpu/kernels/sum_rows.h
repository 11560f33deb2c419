// The sum of an exchange whose bytes a library carried: the arithmetic stays ours.
#pragma once

#include <cstdint>

#include "gpu/primitives/window.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// y = round(Σ_r x[r]), r from 0 to world - 1 in order, in float32.
struct SumRows {
    ConstRows x[max_ranks];
    int world = 1;
    Rows y;
    std::int64_t tokens = 0;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
};
cudaError_t sum_rows(const SumRows& op, cudaStream_t stream);

}  // namespace latent_moe::gpu
