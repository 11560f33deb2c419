// What replay_check does on the device beside the tails.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

namespace latent_moe::test {

/// Fills `count` bf16 values in (-1, 1) that depend on the seed and the place, some of them -0.
cudaError_t draw_bf16(std::byte* to, std::int64_t count, std::uint32_t seed, cudaStream_t stream);

/// Adds to `wrong` how many of the 16-byte units of `a` and `b` differ; `bytes` is a multiple of 16.
cudaError_t count_differences(const std::byte* a, const std::byte* b, std::int64_t bytes, unsigned long long* wrong,
                              cudaStream_t stream);

}  // namespace latent_moe::test
