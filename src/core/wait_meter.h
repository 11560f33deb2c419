// How long a rank has waited for its peers. Any thread may add, any may read.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace latent_moe {

struct WaitMeter {
    std::atomic<std::uint64_t> count = 0;
    std::atomic<std::uint64_t> us = 0;
    std::atomic<std::uint64_t> longest_us = 0;

    void add(std::chrono::steady_clock::duration wait) noexcept {
        const auto waited = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(wait).count());
        count.fetch_add(1, std::memory_order_relaxed);
        us.fetch_add(waited, std::memory_order_relaxed);
        std::uint64_t longest = longest_us.load(std::memory_order_relaxed);
        while (waited > longest && !longest_us.compare_exchange_weak(longest, waited, std::memory_order_relaxed)) {}
    }
};

}  // namespace latent_moe
