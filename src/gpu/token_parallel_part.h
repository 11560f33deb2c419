// The whole token-parallel tail as one kernel of one rank: whether it can run here, what it needs, and its launch.
#pragma once

#include <cstdint>
#include <string>

#include "gpu/kernels/token_parallel_tail.h"
#include "gpu/packed_layer.h"
#include "gpu/primitives/window.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/bootstrap.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"
#include "tails/schedule.h"

namespace latent_moe::gpu {

class TokenParallelPart {
public:
    /// Collective, with the rank's device current. `from_tokens`: calls of so many tokens and more take it, the same on
    /// every rank; none if no call may have as many. `max_ctas`: that may wait for peers at once.
    TokenParallelPart(const Bootstrap& bootstrap, const Shape& shape, const Options& options, std::int64_t from_tokens,
                      int max_ctas);

    /// Why it runs no call; empty if it does.
    const std::string& missing() const noexcept { return missing_; }
    void refuse(std::string reason) { missing_ = std::move(reason); }

    /// CTAs that wait for peers at once.
    int grid() const noexcept { return missing_.empty() ? max_ctas_ : 0; }
    /// Of its part of the window: a head like every window's (window.h), and its boxes.
    std::int64_t window_bytes() const noexcept;
    std::size_t workspace_bytes() const noexcept { return workspace_.bytes(); }
    void reset(void* base, cudaStream_t stream) const;

    bool takes(const TailCall& call, const GpuPackedLayer& layer) const noexcept;
    /// Only what it `takes`. `exchange.window` has this part's bases. Enqueues one kernel.
    void run(const TailCall& call, const GpuPackedLayer& layer, const Exchange& exchange, cudaStream_t stream) const;

private:
    std::string why_not(const Options& options) const;

    Shape shape_;
    std::int64_t from_tokens_;
    int max_ctas_;
    TokenParallelShape tail_shape_{};
    DeviceMemory workspace_;
    std::string missing_;
};

}  // namespace latent_moe::gpu
