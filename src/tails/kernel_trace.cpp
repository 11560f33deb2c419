#include "tails/kernel_trace.h"

#include <algorithm>
#include <utility>

namespace latent_moe {

double hidden_us(const KernelRun& run, std::span<const KernelRun> all) {
    std::vector<std::pair<double, double>> others;
    for (const KernelRun& other : all) {
        if (&other == &run || other.device != run.device) continue;
        const double begin = std::max(other.begin_us, run.begin_us);
        const double end = std::min(other.end_us, run.end_us);
        if (begin < end) others.emplace_back(begin, end);
    }
    std::sort(others.begin(), others.end());
    double covered = 0;
    double until = run.begin_us;
    for (const auto& [begin, end] : others) {
        if (end <= until) continue;
        covered += end - std::max(begin, until);
        until = end;
    }
    return covered;
}

std::optional<double> hidden_share(std::span<const KernelRun> all) {
    double total = 0;
    double hidden = 0;
    for (const KernelRun& run : all) {
        if (!run.is_all_reduce) continue;
        total += run.end_us - run.begin_us;
        hidden += hidden_us(run, all);
    }
    return total > 0 ? std::optional(hidden / total) : std::nullopt;
}

}  // namespace latent_moe
