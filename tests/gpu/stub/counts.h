// What a thread has asked of the stub and of the allocator, and how long the stub's kernels take there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace latent_moe::test {

struct Counts {
    std::uint64_t launches = 0;
    std::uint64_t others = 0;  ///< functions of CUDA's runtime and driver, but for launches
    std::uint64_t allocations = 0;
};

Counts& counts() noexcept;

/// Microseconds of a thread's kernels by how they are launched, which its events then show. None: every event is a
/// millisecond after the one before.
using KernelTime = double (*)(const cudaLaunchConfig_t& config);
KernelTime& kernel_time() noexcept;

}  // namespace latent_moe::test
