// Stands for the kernel before a tail: fills the whole device and writes the tail's inputs.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace latent_moe::gpu {

struct Produced {
    void* to;
    const void* from;
    std::size_t bytes;
};
inline constexpr int most_produced = 8;

/// Copies up to `most_produced` pieces with as many threads as the device holds. `to` and `from` begin at multiples of 16.
cudaError_t produce(const Produced* pieces, int count, int multiprocessors, cudaStream_t stream);

}  // namespace latent_moe::gpu
