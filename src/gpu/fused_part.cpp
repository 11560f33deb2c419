#include "gpu/fused_part.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/log.h"
#include "gpu/collective_setup.h"
#include "gpu/fused_choice.h"
#include "gpu/kernels/convert.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/runtime/check.h"
#include "gpu/runtime/vendor.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

/// Rows of one kernel: a call takes the smallest that holds it, or several kernels of the largest.
constexpr std::array<int, 5> plan_rows = {8, 16, 32, 64, 128};

/// What ranks must agree in before one of them runs a plan.
struct Agreed {
    int possible;
    std::array<int, plan_rows.size()> rows;
    bool operator==(const Agreed&) const = default;
};

}  // namespace

FusedPart::FusedPart(const Bootstrap& bootstrap, const Shape& shape, const Options& options, int max_ctas)
    : shape_(shape),
      tail_shape_{.hidden = shape.hidden,
                  .latent = shape.latent,
                  .world = bootstrap.world,
                  .capacity = static_cast<int>(options.capacity_tokens)},
      max_ctas_(max_ctas) {
    if (options.batch_invariant) {
        missing_ = "how its kernel cuts a product depends on the number of tokens, so it is not batch-invariant";
    } else if (options.capacity_tokens == 0) {
        missing_ = "capacity_tokens is 0";
    } else if (shape.activations != Dtype::bf16) {
        missing_ = fmt::format("activations are {}, and the fused kernel has bf16 only", name(shape.activations));
    } else if (bootstrap.world == 1) {
        missing_ = "there is one rank";
    } else if (shape.hidden % (std::int64_t{8} * bootstrap.world) != 0) {
        missing_ =
            fmt::format("hidden {} over {} ranks is not a multiple of 8 columns a rank", shape.hidden, bootstrap.world);
    } else {
        missing_ = plan();
    }

    Agreed mine{missing_.empty() ? 1 : 0, {}};
    for (std::size_t at = 0; at < plans_.size(); ++at) mine.rows[at] = plans_[at].tokens;
    const std::vector<Agreed> all = gather(bootstrap, mine);
    if (!missing_.empty()) return;
    if (std::ranges::any_of(all, [](const Agreed& rank) { return rank.possible == 0; })) {
        missing_ = "it cannot run on another rank's device";
    } else if (std::ranges::any_of(all, [&](const Agreed& rank) { return rank != mine; })) {
        missing_ = "ranks' devices would cut a call differently";
    }
}

std::string FusedPart::plan() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (std::string reason = vendor::why_not_fused(device); !reason.empty()) return reason;
    if (const cudaError_t error = prepare_fused_tail(); error != cudaSuccess) {
        return fmt::format("this build has no fused kernel for the device ({})", cudaGetErrorString(error));
    }
    for (const int rows : plan_rows) {
        FusedTailPlan plan;
        if (plan_fused_tail(tail_shape_, rows, max_ctas_, &plan) != cudaSuccess) break;
        plans_.push_back(plan);
        if (rows >= tail_shape_.capacity) break;
    }
    static_cast<void>(cudaGetLastError());
    if (plans_.empty()) return fmt::format("its grid does not fit in {} CTAs, all resident at once", max_ctas_);
    try {
        workspace_ = DeviceMemory(static_cast<std::size_t>(fused_tail_workspace_bytes(tail_shape_)), "fused tail");
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

const FusedTailPlan& FusedPart::plan_for(std::int64_t tokens) const noexcept {
    const auto fits = std::ranges::find_if(plans_, [&](const FusedTailPlan& plan) { return plan.tokens >= tokens; });
    return fits == plans_.end() ? plans_.back() : *fits;
}

int FusedPart::grid() const noexcept {
    int most = 0;
    for (const FusedTailPlan& plan : plans_) most = std::max(most, fused_tail_grid(plan));
    return most;
}

std::int64_t FusedPart::window_bytes() const noexcept {
    return missing_.empty() ? control_bytes + fused_tail_region_bytes(tail_shape_) : 0;
}

void FusedPart::reset(void* base, cudaStream_t stream) const {
    check(cudaMemsetAsync(base, 0, control_bytes, stream), "cudaMemsetAsync");
    check(reset_fused_tail(static_cast<std::byte*>(base) + control_bytes, workspace_.get(), tail_shape_, stream),
          "fused window kernel");
}

void FusedPart::choose_by_measurement(const Bootstrap& bootstrap, const Exchange& exchange, const Trial& trial,
                                      cudaStream_t stream) {
    const auto shard = static_cast<std::size_t>(PackedLayout{shape_.hidden / tail_shape_.world, shape_.latent}.bytes());
    const std::size_t copies = std::max<std::size_t>(2, cold_bytes / shard);
    DeviceMemory weights;
    together(bootstrap, "choice of the fused tail's cut", [&] {
        weights = DeviceMemory(copies * shard, "weights to measure with");
        check(fill_noise(weights.get(), Dtype::bf16, static_cast<std::int64_t>(weights.bytes() / 2), stream),
              "noise kernel");
        check(cudaStreamSynchronize(stream), "noise kernel");
    });
    for (FusedTailPlan& plan : plans_) {
        const std::int64_t tokens = std::min<std::int64_t>({plan.tokens, tail_shape_.capacity, trial.rows});
        const auto measured = measure_cuts(
            bootstrap, cuts_to_try(tail_shape_, tokens, max_ctas_, plan),
            [&](const FusedTailPlan& cut, int turn) {
                const FusedTail tail{.exchange = exchange,
                                     .region_offset = control_bytes,
                                     .shape = tail_shape_,
                                     .plan = cut,
                                     .workspace = workspace_.get(),
                                     .routed = trial.routed,
                                     .shared = trial.shared,
                                     .out = trial.out,
                                     .packed = weights.get() + static_cast<std::size_t>(turn) % copies * shard,
                                     .rms_norm = shape_.norm == Norm::rms,
                                     .epsilon = shape_.epsilon,
                                     .tokens = tokens};
                check(launch_fused_tail(tail, stream), "fused tail kernel");
            },
            stream);
        for (const MeasuredCut& each : measured) {
            if (bootstrap.rank == 0)
                log(LogLevel::info, "fused tail, {} tokens: {:.2f} us with {}", tokens, each.us, name_of(each.plan));
        }
        plan = measured.front().plan;
    }
}

void FusedPart::run(const TailCall& call, const GpuPackedLayer& layer, const Exchange& exchange, bool overlaps,
                    cudaStream_t stream) const {
    const ProductWeights weights = layer.weights(WeightPart::shard);
    const FusedTail tail{.exchange = exchange,
                         .region_offset = control_bytes,
                         .shape = tail_shape_,
                         .plan = plan_for(call.tokens),
                         .workspace = workspace_.get(),
                         .routed = {call.routed.data, call.routed.stride},
                         .shared = {call.shared.data, call.shared.stride},
                         .shared_is_sum = call.shared_state == SharedState::reduced,
                         .prefix = {call.prefix.data, call.prefix.stride},
                         .out = {call.out.data, call.out.stride},
                         .packed = weights.packed,
                         .rms_norm = shape_.norm == Norm::rms,
                         .gamma = layer.gamma(),
                         .epsilon = shape_.epsilon,
                         .scale = weights.scale,
                         .column_scales = weights.row_scales,
                         .tokens = call.tokens,
                         .starts_early = overlaps && call.starts_early,
                         .releases_early = overlaps && call.releases_early};
    check(launch_fused_tail(tail, stream), "fused tail kernel");
}

}  // namespace latent_moe::gpu
