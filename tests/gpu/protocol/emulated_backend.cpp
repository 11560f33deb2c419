#include "gpu/protocol/emulated_backend.h"

#include <algorithm>

#include "gpu/kernels/kernels.h"
#include "gpu/runtime/check.h"

namespace latent_moe::gpu::emulated {
namespace {

constexpr std::uint64_t minutes = 60'000'000'000;

DeviceMemory rows_of(std::int64_t rows, std::int64_t width, const Shape& shape) {
    return {static_cast<std::size_t>(rows * width) * bytes_of(shape.activations), "scratch"};
}

}  // namespace

Windows Gpus::windows(std::int64_t slot_bytes, std::int64_t behind) const {
    const std::int64_t bytes = window_bytes(slot_bytes) + behind;
    Windows made(fused_shape_.world, slot_bytes, bytes, 0);
    for (int r = 0; r < fused_shape_.world; ++r)
        check(reset_window(made.base(r), slot_bytes, shape_.activations, nullptr), "reset");
    return made;
}

Gpus::Gpus(int world, const Shape& shape, const Wires& wires, Grid grid, std::int64_t block_tokens,
           const WeightView& weights, const void* gamma, bool batch_invariant)
    : shape_(shape),
      wires_(wires),
      grid_(grid),
      block_tokens_(block_tokens),
      slot_bytes_(all_reduce_slot_bytes(world, 1, wires.slot_rows, std::max(shape.hidden, shape.latent), shape.activations)),
      bulk_{.offset = window_bytes(slot_bytes_), .slot_bytes = slot_bytes_},
      fused_shape_{
          .hidden = shape.hidden, .latent = shape.latent, .world = world, .capacity = static_cast<int>(block_tokens)},
      main_(windows(slot_bytes_, bulk_bytes(slot_bytes_))),
      side_(windows(slot_bytes_, bulk_bytes(slot_bytes_))),
      fused_(windows(0, fused_tail_region_bytes(fused_shape_))) {
    for (int r = 0; r < world; ++r) {
        for (Windows* each : {&main_, &side_}) check(reset_bulk(each->base(r), bulk_, nullptr), "reset of bulk");
        if (shape.hidden % (8 * world) == 0) {
            check(reset_fused_tail(static_cast<std::byte*>(fused_.base(r)) + control_bytes, nullptr, fused_shape_, nullptr),
                  "reset");
        }
        const TokenRange own = OwnColumns(shape.hidden, world).of(r);
        const GpuPackedLayer::Wish wish{.own = own, .whole = true, .plain = !batch_invariant || own.count % 8 != 0};
        const std::int64_t rows = block_tokens_;
        ranks_.push_back(std::make_unique<Rank>(Rank{
            .layer = {shape, wish, weights, gamma, nullptr},
            .product =
                {shape, Bootstrap{.rank = r, .world = world}, rows, {shape.hidden / world, shape.hidden}, batch_invariant},
            .latent = rows_of(rows, shape.latent, shape),
            .product_out = rows_of(rows, shape.hidden, shape),
            .shared = rows_of(rows, shape.hidden, shape),
            .spare = rows_of(rows, shape.hidden, shape),
            .fused = {static_cast<std::size_t>(fused_tail_workspace_bytes(fused_shape_)), "fused tail"}}));
        ranks_.back()->product.prepare(ranks_.back()->layer);
    }
}

GpuLane::Parts Gpus::parts(int rank, bool side) const {
    Rank& memory = *ranks_[static_cast<std::size_t>(rank)];
    return {.exchange = (side ? side_ : main_).exchange(rank, 10 * minutes),
            .bulk = bulk_,
            .bulk_from_bytes = wires_.bulk_from_bytes,
            .one_stage_bytes = wires_.one_stage_bytes,
            .max_ctas = static_cast<int>(grid_.ctas),
            .max_ctas_alone = static_cast<int>(grid_.ctas),
            .product = &memory.product,
            .spare = {memory.spare.get(), block_tokens_, shape_.hidden, shape_.hidden, shape_.activations}};
}

EmulatedBackend::EmulatedBackend(Gpus& gpus, int rank, Stream& stream, bool overlaps)
    : gpus_(gpus),
      memory_(*gpus.ranks_[static_cast<std::size_t>(rank)]),
      rank_(rank),
      stream_(stream),
      overlaps_(overlaps),
      main_(gpus.shape_, rank, gpus.world(), gpus.parts(rank, false)),
      side_(gpus.shape_, rank, gpus.world(), gpus.parts(rank, true)),
      fused_exchange_(gpus.fused_.exchange(rank, 10 * minutes)) {}

void EmulatedBackend::run(Tail tail, std::int64_t tokens, const ConstMatrix& routed, const ConstMatrix& shared,
                          const ConstMatrix& prefix, const Matrix& out, bool stop_before_gather) {
    const TailCall call{.shape = gpus_.shape_,
                        .rank = rank_,
                        .world = gpus_.world(),
                        .tokens = tokens,
                        .routed = routed,
                        .shared = shared,
                        .prefix = prefix,
                        .out = out,
                        .shared_state = SharedState::partial,
                        .stop_before_gather = stop_before_gather,
                        .layer = memory_.layer,
                        .starts_early = overlaps_,
                        .releases_early = overlaps_};
    begin_call({.layer = 7, .tail = tail, .starts_early = overlaps_, .releases_early = overlaps_}, nullptr);
    if (tail == Tail::fused) return fused_tail(call);
    portable_schedule(tail)(*this, call);
}

const void* EmulatedBackend::gamma(const PackedLayer& layer) const noexcept {
    return static_cast<const GpuPackedLayer&>(layer).gamma();
}

Matrix EmulatedBackend::scratch(Scratch which, std::int64_t rows) {
    const Shape& shape = gpus_.shape_;
    switch (which) {
        case Scratch::latent: return {memory_.latent.get(), rows, shape.latent, shape.latent, shape.activations};
        case Scratch::product: return {memory_.product_out.get(), rows, shape.hidden, shape.hidden, shape.activations};
        case Scratch::shared: return {memory_.shared.get(), rows, shape.hidden, shape.hidden, shape.activations};
    }
    return {};
}

void EmulatedBackend::begin_call(const CallIdentity& identity, latent_moe::Stream) {
    main_.set_call(&stream_, identity, overlaps_);
    side_.set_call(&stream_, identity, false);
}

void EmulatedBackend::fork(FunctionRef<void(Lane& side)> side_work) {
    main_.set_beside(true);
    side_work(side_);
}

void EmulatedBackend::fused_tail(const TailCall& call) {
    FusedTailPlan plan;
    check(plan_fused_tail(gpus_.fused_shape_, call.tokens, static_cast<int>(gpus_.grid_.ctas), &plan), "plan");
    const Shape& shape = gpus_.shape_;
    const ProductWeights weights = memory_.layer.weights(WeightPart::shard);
    check(launch_fused_tail({.exchange = fused_exchange_,
                             .region_offset = control_bytes,
                             .shape = gpus_.fused_shape_,
                             .plan = plan,
                             .workspace = memory_.fused.get(),
                             .routed = {call.routed.data, call.routed.stride},
                             .shared = {call.shared.data, call.shared.stride},
                             .prefix = {call.prefix.data, call.prefix.stride},
                             .out = {call.out.data, call.out.stride},
                             .packed = weights.packed,
                             .rms_norm = shape.norm == Norm::rms,
                             .gamma = memory_.layer.gamma(),
                             .epsilon = shape.epsilon,
                             .scale = weights.scale,
                             .tokens = call.tokens},
                            &stream_),
          "fused tail kernel");
}

}  // namespace latent_moe::gpu::emulated
