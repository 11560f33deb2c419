// What a device's own tracer saw, and what can be read from it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace latent_moe {

struct KernelRun {
    std::string name;
    int device = 0;
    std::uint64_t stream = 0;
    bool is_all_reduce = false;  ///< does nothing but sum rows over ranks
    double begin_us = 0;         ///< on one clock for all devices of a machine
    double end_us = 0;
};

/// Traces the kernels of the whole process while it lives.
class KernelTrace {
public:
    virtual ~KernelTrace() = default;
    /// The kernels that have ended since the trace began or since the last call; nothing may be running.
    virtual std::vector<KernelRun> take() = 0;
};

/// How long other kernels of its device ran beside `run`, which is one of `all`.
double hidden_us(const KernelRun& run, std::span<const KernelRun> all);

/// The part of the all-reduces' time in which other kernels of their device ran; nothing where there is none.
std::optional<double> hidden_share(std::span<const KernelRun> all);

}  // namespace latent_moe
