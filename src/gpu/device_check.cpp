#include "gpu/device_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "core/partition.h"
#include "gpu/packed_layer.h"
#include "gpu/views.h"
#include "latent_moe/status.h"
#include "tails/schedule.h"

namespace latent_moe::gpu {
namespace {

constexpr std::size_t state_bytes = 512;
static_assert(sizeof(CheckState) <= state_bytes);

std::uint64_t number_of(const WeightChecksum& sum) {
    return std::uint64_t{sum.words[1]} << 32 | sum.words[0];
}

WeightParts parts_of(const GpuPackedLayer& layer) {
    WeightParts parts{};
    std::size_t at = 0;
    for (const std::span<const std::byte> each : layer.buffers()) {
        parts.data[at] = each.data();
        parts.bytes[at++] = static_cast<std::int64_t>(each.size());
    }
    return parts;
}

/// Copies that wait, whatever another thread captures.
class Relaxed {
public:
    Relaxed() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
    ~Relaxed() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

GpuDeviceCheck::GpuDeviceCheck(const Shape& shape, const Options& options, int rank, int world)
    : shape_(shape),
      period_(options.self_check_period),
      rank_(rank),
      world_(world),
      report_(sizeof(CheckReport), "self-check"),
      own_stream_(make_stream()),
      has_shared_(options.shared != SharedState::absent) {
    check(cudaGetDevice(&device_), "cudaGetDevice");
}

std::int64_t GpuDeviceCheck::window_bytes() const noexcept {
    return control_bytes + kept_bytes(shape_.latent, shape_.hidden, shape_.activations);
}

void GpuDeviceCheck::reset(void* base, cudaStream_t stream) const {
    check(cudaMemsetAsync(base, 0, control_bytes, stream), "cudaMemsetAsync");
}

void GpuDeviceCheck::acquire(const Exchange& exchange, const std::vector<std::array<void*, max_ranks>>& others,
                             FaultRecord* unread) {
    const CheckScratchBytes bytes = check_scratch_bytes(shape_.latent, shape_.hidden, shape_.activations);
    std::size_t all = state_bytes;
    for (const std::int64_t part : bytes.parts) all += static_cast<std::size_t>(part);
    scratch_ = DeviceMemory(all, "self-check");
    check(cudaMemsetAsync(scratch_.get(), 0, state_bytes, own_stream_.get()), "cudaMemsetAsync");

    prepared_ = CheckCall{.exchange = exchange,
                          .other_controls = {},
                          .windows = static_cast<int>(others.size()),
                          .period = period_,
                          .state = reinterpret_cast<CheckState*>(scratch_.get()),
                          .report = reinterpret_cast<CheckReport*>(report_.get()),
                          .dtype = shape_.activations,
                          .hidden = shape_.hidden,
                          .latent = shape_.latent,
                          .routed = {},
                          .shared = {},
                          .prefix = {},
                          .out = {},
                          .epsilon = shape_.epsilon};
    for (std::size_t window = 0; window < others.size(); ++window)
        std::ranges::copy(others[window], prepared_.other_controls[window]);
    std::byte* at = scratch_.get() + state_bytes;
    const auto take = [&](int part) {
        std::byte* const memory = at;
        at += bytes.parts[part];
        return memory;
    };
    prepared_.scratch.latent = take(0);
    prepared_.scratch.shared = take(1);
    prepared_.scratch.prefix = take(2);
    prepared_.scratch.addends = reinterpret_cast<float*>(take(3));
    prepared_.scratch.chain = reinterpret_cast<float*>(take(4));
    if (world_ == 1) {
        alone_ = DeviceMemory::window(static_cast<std::size_t>(window_bytes()));
        reset(alone_.get(), own_stream_.get());
        prepared_.exchange.window = {.base = {alone_.get()}, .rank = 0, .world = 1};
    }

    // Loads the kernels: they find a fault and leave.
    const DeviceMemory faulty(control_bytes, "loading of kernels");
    const DeviceMemory layer(sizeof(LayerCheck), "loading of kernels");
    check(cudaMemsetAsync(faulty.get(), 0, faulty.bytes(), own_stream_.get()), "cudaMemsetAsync");
    check(cudaMemsetAsync(faulty.get(), 1, sizeof(Control::fault), own_stream_.get()), "cudaMemsetAsync");
    check(cudaMemsetAsync(layer.get(), 0, layer.bytes(), own_stream_.get()), "cudaMemsetAsync");
    CheckCall call = prepared_;
    call.exchange.record = unread;
    std::fill_n(call.exchange.window.base, world_, faulty.get());
    call.layer = reinterpret_cast<LayerCheck*>(layer.get());
    check(keep_for_check(call, own_stream_.get()), "self-check kernel");
    check(compare_with_chain(call, own_stream_.get()), "self-check kernel");
    check(cudaStreamSynchronize(own_stream_.get()), "self-check kernel");
}

void GpuDeviceCheck::release() noexcept {
    scratch_ = {};
    alone_ = {};
}

LayerCheck* GpuDeviceCheck::layer_check(std::size_t index) const noexcept {
    return reinterpret_cast<LayerCheck*>(layers_[index].get());
}

WeightChecksum GpuDeviceCheck::checksum_now(const PackedLayer& layer) const {
    const CurrentDevice current(device_);
    const Relaxed relaxed;
    const DeviceMemory sum(sizeof(WeightChecksum), "self-check");
    check(cudaMemsetAsync(sum.get(), 0, sum.bytes(), own_stream_.get()), "cudaMemsetAsync");
    check(checksum_of_weights(parts_of(static_cast<const GpuPackedLayer&>(layer)),
                              reinterpret_cast<WeightChecksum*>(sum.get()), own_stream_.get()),
          "checksum kernel");
    WeightChecksum result{};
    check(cudaMemcpyAsync(&result, sum.get(), sizeof result, cudaMemcpyDeviceToHost, own_stream_.get()), "checksum kernel");
    check(cudaStreamSynchronize(own_stream_.get()), "checksum kernel");
    return result;
}

void GpuDeviceCheck::seal_layer(const PackedLayer& layer) {
    const CurrentDevice current(device_);
    expected_.push_back(checksum_now(layer));
    layers_.emplace_back(sizeof(LayerCheck), "self-check");
    const LayerCheck state{.calls = 0, .expected = expected_.back()};
    check(cudaMemcpyAsync(layers_.back().get(), &state, sizeof state, cudaMemcpyHostToDevice, own_stream_.get()),
          "self-check");
    check(cudaStreamSynchronize(own_stream_.get()), "self-check");
}

DeviceCheck::Checksums GpuDeviceCheck::checksums(std::size_t index, const PackedLayer& layer) {
    return {.found = number_of(checksum_now(layer)), .expected = number_of(expected_[index])};
}

CheckCall GpuDeviceCheck::check_of(const TailCall& call, const CallIdentity& identity, std::size_t index) const {
    const auto& layer = static_cast<const GpuPackedLayer&>(call.layer);
    const bool own_rows = call.stop_before_gather;
    const TokenRange columns = own_rows ? TokenRange{0, shape_.hidden} : even_part(shape_.hidden, world_, rank_);
    const TokenRange tokens = own_rows ? even_part(call.tokens, world_, rank_) : TokenRange{0, call.tokens};
    const ProductWeights weights = layer.weights(own_rows ? WeightPart::whole : WeightPart::shard);
    CheckCall check = prepared_;
    check.exchange.layer = static_cast<std::int32_t>(identity.layer);
    check.exchange.tail = static_cast<std::uint32_t>(identity.tail);
    check.layer_index = static_cast<std::int64_t>(index);
    check.layer = layer_check(index);
    check.tokens = call.tokens;
    check.own_rows_only = own_rows;
    check.routed = rows_of(call.routed);
    check.shared = rows_of(call.shared);
    check.shared_is_sum = call.shared_state == SharedState::reduced;
    check.prefix = rows_of(call.prefix);
    check.out = rows_of(call.out);
    check.own_first = tokens.first;
    check.own_count = tokens.count;
    check.first_column = columns.first;
    check.columns = columns.count;
    check.late_reduce = identity.tail == Tail::late_reduce;
    check.gamma = layer.gamma();
    check.parts = parts_of(layer);
    check.plain = weights.plain;
    check.packed = weights.packed;
    check.packed_rows = weights.rows;
    check.weight_dtype = weights.dtype;
    check.scale = weights.scale;
    check.row_scales = weights.row_scales;
    return check;
}

void GpuDeviceCheck::before(const TailCall& call, const CallIdentity& identity, std::size_t index) {
    check(keep_for_check(check_of(call, identity, index), stream_), "self-check kernel");
}

void GpuDeviceCheck::after(const TailCall& call, const CallIdentity& identity, std::size_t index) {
    check(compare_with_chain(check_of(call, identity, index), stream_), "self-check kernel");
}

std::string GpuDeviceCheck::finding() const {
    const CheckReport& found = report();
    switch (found.found) {
        case Found::nothing: return {};
        case Found::weights:
            return fmt::format("self-check: the packed weights of layer {} have changed: checksum {:016x}, expected {:016x}",
                               found.layer, number_of(found.checksum), number_of(found.expected));
        case Found::output:
            return fmt::format(
                "self-check: the output of tail {} of layer {} is {} at row {}, column {}, expected {} within {:.2g}",
                latent_moe::name(static_cast<Tail>(found.tail)), found.layer, found.value, found.row, found.column,
                found.chain, found.tolerance);
    }
    return {};
}

std::optional<KeptRows> GpuDeviceCheck::wrong_call() {
    const CheckReport& found = report();
    if (found.found == Found::nothing || scratch_.get() == nullptr) return std::nullopt;
    const CurrentDevice current(device_);
    const Relaxed relaxed;
    const auto rows = static_cast<std::size_t>(found.rows);
    const std::size_t element = bytes_of(shape_.activations);
    const std::size_t latent = static_cast<std::size_t>(shape_.latent) * element;
    const std::size_t hidden = static_cast<std::size_t>(shape_.hidden) * element;
    const auto copy = [&](const std::byte* from, std::size_t bytes) {
        std::vector<std::byte> host(bytes);
        check(cudaMemcpyAsync(host.data(), from, bytes, cudaMemcpyDefault, own_stream_.get()), "self-check");
        check(cudaStreamSynchronize(own_stream_.get()), "self-check");
        return host;
    };
    KeptRows kept{.tail = static_cast<Tail>(found.tail), .layer = found.layer};
    for (int rank = 0; rank < world_; ++rank) {
        const std::byte* base = static_cast<const std::byte*>(prepared_.exchange.window.base[rank]) + control_bytes +
                                std::size_t{found.buffer} * most_checked_rows * (latent + hidden);
        kept.routed.push_back(copy(base, rows * latent));
        if (has_shared_) kept.shared.push_back(copy(base + most_checked_rows * latent, rows * hidden));
    }
    return kept;
}

}  // namespace latent_moe::gpu
