// What a thread has asked of the stub and of the allocator.
#pragma once

#include <cstdint>

namespace latent_moe::test {

struct Counts {
    std::uint64_t launches = 0;
    std::uint64_t others = 0;  ///< functions of CUDA's runtime and driver, but for launches
    std::uint64_t allocations = 0;
};

Counts& counts() noexcept;

}  // namespace latent_moe::test
