#include "gpu/token_parallel_part.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/log.h"
#include "core/partition.h"
#include "gpu/collective_setup.h"
#include "gpu/runtime/check.h"
#include "gpu/runtime/vendor.h"
#include "gpu/views.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

constexpr int least_ctas = 16;                                     ///< two carriers, and pairs that multiply
constexpr std::int64_t most_row_elements = std::int64_t{1} << 22;  ///< of a row: a block's offsets fit 32 bits

}  // namespace

TokenParallelPart::TokenParallelPart(const Bootstrap& bootstrap, const Shape& shape, const Options& options,
                                     std::int64_t from_tokens, int max_ctas)
    : shape_(shape), from_tokens_(from_tokens), max_ctas_(std::min(max_ctas, max_grid) / 2 * 2) {
    tail_shape_ = {.hidden = shape.hidden, .latent = shape.latent, .world = bootstrap.world, .block_rows = 0, .depth = 0};
    if (bootstrap.world > 1 && shape.hidden % 8 == 0 && shape.latent % 8 == 0)
        tail_shape_ = shape_token_parallel_tail(shape.hidden, shape.latent, bootstrap.world);
    missing_ = why_not(options);
    if (missing_.empty()) {
        try {
            workspace_ =
                DeviceMemory(static_cast<std::size_t>(token_parallel_workspace_bytes(tail_shape_)), "token-parallel tail");
        } catch (const Error& error) {
            missing_ = error.what();
        }
    }
    const std::vector<int> possible = gather(bootstrap, missing_.empty() ? 1 : 0);
    if (missing_.empty() && std::ranges::count(possible, 0) > 0) missing_ = "it cannot run on another rank's device";
    if (!missing_.empty()) workspace_ = {};
    if (missing_.empty() && bootstrap.rank == 0) {
        log(LogLevel::info, "token_parallel from {} tokens: one kernel of {} CTAs, blocks of {} rows, {} places",
            from_tokens_, max_ctas_, tail_shape_.block_rows, tail_shape_.depth);
    }
}

std::string TokenParallelPart::why_not(const Options& options) const {
    if (from_tokens_ > options.max_tokens) return fmt::format("no call has {} tokens", from_tokens_);
    if (tail_shape_.world == 1) return "there is one rank";
    if (shape_.activations != Dtype::bf16)
        return fmt::format("activations are {}, and it has bf16 only", name(shape_.activations));
    if (!options.keep_whole_weights) return "the context does not keep the whole W_up on every rank";
    if (shape_.hidden % 8 != 0 || shape_.latent % 8 != 0) return "hidden or latent is not a multiple of 8";
    if (const cudaError_t error = prepare_token_parallel_tail(); error != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return fmt::format("this build has no kernel for the device ({})", cudaGetErrorString(error));
    }
    if (tail_shape_.depth == 0) return "its blocks do not fit in its workspace";
    if (max_ctas_ < least_ctas) return fmt::format("{} CTAs, resident at once, are too few for it", max_ctas_);
    return {};
}

std::int64_t TokenParallelPart::window_bytes() const noexcept {
    return missing_.empty() ? control_bytes + token_parallel_region_bytes(tail_shape_) : 0;
}

void TokenParallelPart::reset(void* base, cudaStream_t stream) const {
    check(cudaMemsetAsync(base, 0, control_bytes, stream), "cudaMemsetAsync");
    check(reset_token_parallel_tail(static_cast<std::byte*>(base) + control_bytes, workspace_.get(), tail_shape_, stream),
          "token-parallel window kernel");
}

bool TokenParallelPart::takes(const TailCall& call, const GpuPackedLayer& layer) const noexcept {
    if (!missing_.empty() || call.tokens < from_tokens_) return false;
    const ProductWeights weights = layer.weights(WeightPart::whole);
    return weights.packed != nullptr && weights.dtype == Dtype::bf16 && weights.row_scales == nullptr &&
           is_aligned(call.routed) && is_aligned(call.shared) && is_aligned(call.prefix) && is_aligned(call.out) &&
           std::max({call.shared.stride, call.prefix.stride, call.out.stride}) <= most_row_elements;
}

void TokenParallelPart::run(const TailCall& call, const GpuPackedLayer& layer, const Exchange& exchange,
                            cudaStream_t stream) const {
    const ProductWeights weights = layer.weights(WeightPart::whole);
    OwnRows own{};
    for (int rank = 0; rank < call.world; ++rank) {
        const TokenRange range = even_part(call.tokens, call.world, rank);
        own.first[rank] = range.first;
        own.count[rank] = range.count;
    }
    const TokenRange mine = even_part(call.tokens, call.world, call.rank);
    // A sequence-parallel caller's prefix and output hold this rank's own tokens only.
    const auto own_rows = [&](const ConstMatrix& rows) {
        return call.stop_before_gather ? rows : rows.row_range(mine.first, mine.count);
    };
    ConstMatrix addend;
    if (call.shared_in_out) {
        addend = own_rows(call.out);
    } else if (!call.reduces_shared()) {
        addend = call.shared.row_range(mine.first, mine.count);
    }
    check(token_parallel_tail({.exchange = exchange,
                               .region_offset = control_bytes,
                               .shape = tail_shape_,
                               .plan = plan_token_parallel_tail(tail_shape_, call.tokens, max_ctas_),
                               .workspace = workspace_.get(),
                               .own = own,
                               .routed = rows_of(call.routed),
                               .shared = call.reduces_shared() ? rows_of(call.shared) : ConstRows{},
                               .addend = rows_of(addend),
                               .prefix = rows_of(own_rows(call.prefix)),
                               .out = writable(call.out),
                               .packed = weights.packed,
                               .rms_norm = shape_.norm == Norm::rms,
                               .gamma = layer.gamma(),
                               .epsilon = shape_.epsilon,
                               .scale = weights.scale,
                               .stop_before_gather = call.stop_before_gather},
                              stream),
          "token-parallel kernel");
}

}  // namespace latent_moe::gpu
