// The GPU backend's schedules, lanes and kernels (src/tails, gpu/lane.h, gpu/kernels) on emulated GPUs: what stands between
// a tail and its kernels is the GPU backend's own source, launched on the threads of emulated_gpu.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu/kernels/bulk_exchange.h"
#include "gpu/kernels/fused_tail.h"
#include "gpu/lane.h"
#include "gpu/packed_layer.h"
#include "gpu/product.h"
#include "gpu/protocol/emulated_gpu.h"
#include "latent_moe/context.h"
#include "tails/schedule.h"

namespace latent_moe::gpu::emulated {

/// How messages travel.
struct Wires {
    std::int64_t one_stage_bytes = INT64_MAX;  ///< larger sums take two stages
    std::int64_t bulk_from_bytes = INT64_MAX;  ///< sums at least this large go in bulk
    int slot_rows = 8;                         ///< of a mailbox's slot: larger calls take several kernels
};

/// What the ranks of one context have on their GPUs.
class Gpus {
public:
    /// `grid`: the CTAs that wait for peers at most, and their threads.
    Gpus(int world, const Shape& shape, const Wires& wires, Grid grid, std::int64_t block_tokens, const WeightView& weights,
         const void* gamma, bool batch_invariant = false);

    int world() const { return static_cast<int>(ranks_.size()); }
    FaultRecord& fault(int rank, bool side) { return (side ? side_ : main_).record(rank); }

private:
    friend class EmulatedBackend;

    struct Rank {
        GpuPackedLayer layer;
        Product product;
        DeviceMemory latent, product_out, shared, spare, fused;
    };

    Windows windows(std::int64_t slot_bytes, std::int64_t behind) const;
    GpuLane::Parts parts(int rank, bool side) const;

    Shape shape_;
    Wires wires_;
    Grid grid_;
    std::int64_t block_tokens_;
    std::int64_t slot_bytes_;
    Bulk bulk_;
    FusedTailShape fused_shape_;
    Windows main_, side_, fused_;
    std::vector<std::unique_ptr<Rank>> ranks_;
};

/// One thread's view of its rank's backend. Lanes take turns on one stream, as where ranks share a GPU.
class EmulatedBackend final : public Backend {
public:
    /// `overlaps`: a kernel may start while the one before it runs.
    EmulatedBackend(Gpus& gpus, int rank, Stream& stream, bool overlaps);

    /// Enqueues a tail; the call's `layer` is filled in.
    void run(Tail tail, std::int64_t tokens, const ConstMatrix& routed, const ConstMatrix& shared, const ConstMatrix& prefix,
             const Matrix& out, bool stop_before_gather = false);

    const void* gamma(const PackedLayer& layer) const noexcept override;
    std::int64_t block_tokens() const noexcept override { return gpus_.block_tokens_; }
    Matrix scratch(Scratch which, std::int64_t rows) override;
    void begin_call(const CallIdentity& identity, latent_moe::Stream) override;
    void begin_block(std::int64_t) override {}
    Lane& main() override { return main_; }
    void fork(FunctionRef<void(Lane& side)> side_work) override;
    void join() override { main_.set_beside(false); }
    void fused_tail(const TailCall& call) override;

    const std::string& name() const noexcept override { return name_; }
    Capabilities capabilities() const override { return {}; }
    std::unique_ptr<PackedLayer> pack(const WeightView&, const void*) override { return nullptr; }
    void gather_whole(PackedLayer&) override {}
    void acquire_workspace() override {}
    void release_workspace() noexcept override {}
    std::size_t workspace_bytes() const noexcept override { return 0; }
    void end_call(const ConstMatrix&) override {}
    Status end_after_failure() noexcept override { return {}; }
    void order_next_call() override {}
    ConstMatrix combine(const DeferredMatrix&, std::int64_t) override { return {}; }
    Status poll_fault() noexcept override { return {}; }
    void abort(const std::string&) noexcept override {}

private:
    Gpus& gpus_;
    Gpus::Rank& memory_;
    int rank_;
    Stream& stream_;
    bool overlaps_;
    GpuLane main_, side_;
    Exchange fused_exchange_;
    std::string name_ = "emulated";
};

}  // namespace latent_moe::gpu::emulated
