// The fused tail of one rank: whether its kernel can run here, what it needs of the window, and its launch.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu/kernels/fused_tail.h"
#include "gpu/packed_layer.h"
#include "gpu/primitives/window.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/bootstrap.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"
#include "tails/schedule.h"

namespace latent_moe::gpu {

class FusedPart {
public:
    /// Collective, with the rank's device current: plans for every class of token counts up to the capacity, the same on
    /// every rank, or a reason why there are none.
    FusedPart(const Bootstrap& bootstrap, const Shape& shape, const Options& options, int max_ctas);

    /// Why it cannot run; empty if it can.
    const std::string& missing() const noexcept { return missing_; }
    void refuse(std::string reason) { missing_ = std::move(reason); }

    /// CTAs that wait for peers at once.
    int grid() const noexcept;
    /// Of its part of the window: a head like every window's (window.h), and its mailboxes.
    std::int64_t window_bytes() const noexcept;
    std::size_t workspace_bytes() const noexcept { return workspace_.bytes(); }
    void release_workspace() noexcept { workspace_ = {}; }
    void reset(void* base, cudaStream_t stream) const;

    /// What is there to call with while a context is made: contents do not matter, but are not all equal.
    struct Trial {
        ConstRows routed;  ///< [rows, latent]
        ConstRows shared;  ///< [rows, hidden]
        Rows out;          ///< [rows, hidden]
        std::int64_t rows = 0;
    };
    /// Collective: takes for each class of token counts what all ranks together find fastest (fused_choice.h). The windows
    /// are to be reset afterwards, and the largest grid is registered before. No cut has more CTAs than `grid()` says.
    void choose_by_measurement(const Bootstrap& bootstrap, const Exchange& exchange, const Trial& trial,
                               cudaStream_t stream);
    const std::vector<FusedTailPlan>& plans() const noexcept { return plans_; }
    /// What `plans` of a part for the same ranks, shape and devices said.
    void take(std::vector<FusedTailPlan> plans) { plans_ = std::move(plans); }

    /// `exchange.window` has this part's bases. `overlaps`: the kernel may start early and let its successor do so, where
    /// the call asks for that. Enqueues one kernel.
    void run(const TailCall& call, const GpuPackedLayer& layer, const Exchange& exchange, bool overlaps,
             cudaStream_t stream) const;

private:
    std::string plan();
    const FusedTailPlan& plan_for(std::int64_t tokens) const noexcept;

    Shape shape_;
    FusedTailShape tail_shape_;
    int max_ctas_;
    std::vector<FusedTailPlan> plans_;  // by ascending rows
    DeviceMemory workspace_;
    std::string missing_;
};

}  // namespace latent_moe::gpu
