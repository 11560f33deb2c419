// The context's own count of its calls. Any thread may read while one counts.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "latent_moe/counters.h"

namespace latent_moe {

class CallCounters {
public:
    void made(Tail tail) noexcept { add(calls_[static_cast<std::size_t>(tail)]); }
    void made_part() noexcept { add(parts_); }
    void checked() noexcept { add(self_checks_); }
    void failed(StatusCode code) noexcept { add(failed_[static_cast<std::size_t>(code)]); }
    /// How many there have been with this code.
    std::uint64_t refused(StatusCode code) noexcept { return add(refused_[static_cast<std::size_t>(code)]); }

    Counters read() const noexcept {
        Counters counters;
        for (std::size_t i = 0; i < calls_.size(); ++i) counters.calls[i] = calls_[i].load(std::memory_order_relaxed);
        for (std::size_t i = 0; i < refused_.size(); ++i) {
            counters.refused[i] = refused_[i].load(std::memory_order_relaxed);
            counters.failed[i] = failed_[i].load(std::memory_order_relaxed);
        }
        counters.parts = parts_.load(std::memory_order_relaxed);
        counters.self_checks = self_checks_.load(std::memory_order_relaxed);
        return counters;
    }

private:
    using Count = std::atomic<std::uint64_t>;
    static std::uint64_t add(Count& count) noexcept { return count.fetch_add(1, std::memory_order_relaxed) + 1; }

    std::array<Count, tail_count> calls_{};
    std::array<Count, status_count> refused_{};
    std::array<Count, status_count> failed_{};
    Count parts_ = 0;
    Count self_checks_ = 0;
};

/// Whether the n-th of something is worth a line: 1, 10, 100, …
constexpr bool is_power_of_ten(std::uint64_t count) noexcept {
    while (count >= 10 && count % 10 == 0) count /= 10;
    return count == 1;
}

}  // namespace latent_moe
