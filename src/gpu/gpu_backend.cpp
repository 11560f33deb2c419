#include "gpu/gpu_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "core/deferred.h"
#include "core/partition.h"
#include "gpu/collective_setup.h"
#include "gpu/device_check.h"
#include "gpu/external_tails.h"
#include "gpu/fault_records.h"
#include "gpu/fused_part.h"
#include "gpu/gpu_device.h"
#include "gpu/kernel_tracer.h"
#include "gpu/kernels/combine_rows.h"
#include "gpu/kernels/convert.h"
#include "gpu/kernels/kernels.h"
#include "gpu/lane.h"
#include "gpu/lane_grids.h"
#include "gpu/machine.h"
#include "gpu/nccl_communicator.h"
#include "gpu/packed_layer.h"
#include "gpu/peer_memory.h"
#include "gpu/product.h"
#include "gpu/runtime/resources.h"
#include "gpu/runtime/vendor.h"
#include "gpu/spinning_grids.h"
#include "gpu/token_parallel_part.h"
#include "gpu/topology.h"
#include "gpu/trace_range.h"
#include "gpu/views.h"
#include "gpu/warm_up.h"
#include "latent_moe/status.h"
#include "tails/schedule.h"

namespace latent_moe::gpu {
namespace {

/// Tokens at a time: products are at full speed, and the workspace does not grow with the longest call.
constexpr std::int64_t most_block_tokens = 4096;

/// Most bytes of the mailboxes of one call, and of the boxes of one in bulk. Larger messages are cut: past this a kernel
/// more costs little beside the wire.
constexpr std::int64_t mailbox_bytes = std::int64_t{2} << 20;
constexpr std::int64_t column_mailbox_bytes = std::int64_t{32} << 20;  // of the main lane, for column exchanges
constexpr std::int64_t bulk_box_bytes = std::int64_t{16} << 20;

/// Summands from this size on go in bulk.
constexpr std::int64_t bulk_pays_from_bytes = std::int64_t{3} << 19;

/// Two ranks with a window and GPUs of their own send summands from this size on through NCCL (which gives the same bits:
/// two summands have one order). Measured on two H200, as is the next one.
constexpr std::int64_t nccl_pays_from_bytes = std::int64_t{8} << 20;

enum LaneIndex : int { main_lane, side_lane, lane_count };

/// The fused tail has a window and a fault record of its own, behind the lanes'.
constexpr int fused_record = lane_count;
/// So has the self-check.
constexpr int check_record = lane_count + 1;
/// And the kernel that is a whole token-parallel tail.
constexpr int token_parallel_record = lane_count + 2;

/// Tokens from which it is taken: never, until it has been measured in a context (docs/decisions/0011-prefill-kernel.md).
constexpr std::int64_t token_parallel_pays_from = INT64_MAX;

class GpuBackend final : public Backend {
public:
    GpuBackend(const Shape& shape, const Bootstrap& bootstrap, const Options& options)
        : shape_(shape),
          bootstrap_(bootstrap),
          options_(options),
          topology_(discover(bootstrap, options)),
          current_(topology_.device),
          own_rows_(even_part(shape.hidden, bootstrap.world, bootstrap.rank)),
          block_tokens_(std::clamp<std::int64_t>(options.max_tokens, 1, most_block_tokens)) {
        together(bootstrap, "GPU set-up", [&] {
            if (shape.norm == Norm::rms && shape.latent > max_norm_width(shape.activations)) {
                throw Error(
                    StatusCode::unsupported,
                    fmt::format("latent is {}, expected at most {} {} values a row for the norm on a GPU", shape.latent,
                                max_norm_width(shape.activations), latent_moe::name(shape.activations)));
            }
            records_.emplace(bootstrap.rank, options.timeout_ms);
            setup_stream_ = make_stream();
            side_stream_ = make_stream(true);
            forked_event_ = make_event();
            joined_event_ = make_event();
            half_event_ = make_event();
            if (options.self_check_period > 0) check_.emplace(shape, options, bootstrap.rank, bootstrap.world);
        });
        make_product();
        make_communicator();
        acquire_workspace();
        current_.reset();
    }

    const std::string& name() const noexcept override { return name_; }

    Capabilities capabilities() const override {
        Machine machine = vendor::cost_constants(topology_.device, topology_.sharing, world());
        if (options_.batch_invariant) {  // a product reads its weights again for every `skinny_tokens` rows
            const auto flops_of_byte =
                2.0 * static_cast<double>(skinny_tokens) / static_cast<double>(bytes_of(shape_.activations));
            machine.flops_per_us = std::min(machine.flops_per_us, flops_of_byte * machine.memory_bytes_per_us);
        }
        return {.machine = machine,
                .device = machine.description,
                .links = world() == 1   ? "none"
                         : has_window() ? "peer memory"
                                        : "NCCL",
                .weight_element_bytes = static_cast<double>(bytes_of(shape_.activations)),
                .concurrent_lanes = world() == 1 || has_window(),
                .concurrent_lanes_reason = fmt::format("two collectives at once need a peer window: {}", window_missing_),
                .fused = fused_.has_value() && fused_->missing().empty(),
                .fused_reason = fused_.has_value() ? fused_->missing() : "there is one rank",
                .dependent_launch = !topology_.shares_devices(),
                .one_stage_bytes = vendor::one_stage_bounds_fused ? one_stage_bytes_ : INT64_MAX,
                .not_captured_reason = has_window() ? "" : vendor::collectives_not_captured,
                .row_alignment = 16,
                .whole_weights = keeps_whole(),
                .shares_device = topology_.shares_devices(),
                .host_memory = false,
                .no_batch_invariance = why_not_batch_invariant()};
    }

    std::unique_ptr<PackedLayer> pack(const WeightView& up_projection, const void* gamma) override {
        const CurrentDevice current(topology_.device);
        const GpuPackedLayer::Wish wish{
            .own = own_rows_,
            .whole = keeps_whole(),
            .plain = (options_.max_tokens > skinny_tokens && !options_.batch_invariant) || own_rows_.count % 8 != 0,
            .round_to_float8 = options_.float8_weights};
        auto layer = std::make_unique<GpuPackedLayer>(shape_, wish, up_projection, gamma, setup_stream_.get());
        product_->prepare(*layer);
        return layer;
    }

    const void* gamma(const PackedLayer& layer) const noexcept override {
        return static_cast<const GpuPackedLayer&>(layer).gamma();
    }

    void gather_whole(PackedLayer& packed) override {
        auto& layer = static_cast<GpuPackedLayer&>(packed);
        if (!layer.lacks_rows()) return;
        const CurrentDevice current(topology_.device);
        const std::size_t row = layer.row_bytes();
        gather_rows(row, [&](std::int64_t first) { return layer.plain_row(first); });
        if (layer.row_scales() != nullptr) {
            gather_rows(sizeof(float),
                        [&](std::int64_t first) { return reinterpret_cast<std::byte*>(layer.row_scales() + first); });
        }
        layer.complete(setup_stream_.get());
        check(cudaStreamSynchronize(setup_stream_.get()), "packing kernel");
    }

    std::int64_t block_tokens() const noexcept override { return block_tokens_; }

    void acquire_workspace() override {
        const CurrentDevice current(topology_.device);
        together(bootstrap_, "workspace", [&] {
            const auto element = static_cast<std::int64_t>(bytes_of(shape_.activations));
            latent_ = DeviceMemory(static_cast<std::size_t>(block_tokens_ * shape_.latent * element), "workspace");
            product_out_ = DeviceMemory(static_cast<std::size_t>(block_tokens_ * shape_.hidden * element), "workspace");
            shared_ = DeviceMemory(static_cast<std::size_t>(block_tokens_ * shape_.hidden * element), "workspace");
            if (options_.deferred_finalize) {
                combined_ =
                    DeviceMemory(static_cast<std::size_t>(options_.max_tokens * shape_.latent * element), "workspace");
            }
            product_->acquire_workspace();
        });
        LaneGrids grids{};
        if (world() > 1) {
            // All ranks cut their grids the same way.
            const Room room = room_of(topology_.multiprocessors, options_.reserved_sms, topology_.free_for_a_cluster);
            const int ctas_of_rank = ctas_of_each(room, topology_.sharing);
            fused_.emplace(bootstrap_, shape_, options_, ctas_of_rank);
            token_parallel_.emplace(bootstrap_, shape_, options_, token_parallel_from_, ctas_of_rank);
            acquire_window();
            if (nccl_exchange_ == nullptr && communicator_ != nullptr) {
                together(bootstrap_, "workspace", [&] {
                    nccl_exchange_ = std::make_unique<NcclExchange>(*communicator_, shape_, rank(), world(), block_tokens_,
                                                                    options_.batch_invariant);
                });
            }
            if (has_window()) {
                // A rank's lanes and its fused tail follow one another on its streams, so the larger counts.
                grids = lane_grids(room, topology_.sharing, fused_->grid());
                const int ctas = std::max({grids.alone, fused_->grid(), token_parallel_->grid()});
                together(bootstrap_, "co-residency",
                         [&] { reservation_ = GridReservation(topology_.device, ctas, options_.reserved_sms); });
                choose_fused_cut();
            }
        }
        acquire_check();
        main_.emplace(shape_, rank(), world(), lane_parts(main_lane, grids));
        side_.emplace(shape_, rank(), world(), lane_parts(side_lane, grids));
        together(bootstrap_, "loading of kernels", [&] {
            warm_up(shape_, main_->parts(), own_rows_.count, options_.batch_invariant,
                    records_->record(FaultRecords::loading), setup_stream_.get());
            if (nccl_exchange_ != nullptr) nccl_exchange_->connect(setup_stream_.get());
            if (options_.deferred_finalize) load_combining_kernel();
        });
    }

    ~GpuBackend() override {
        release_workspace();
        // A rank that is known to be missing is not waited for again when NCCL takes leave of its peers.
        if (const Status fault = records_->poll(); communicator_ != nullptr && !fault.ok()) communicator_->abort(fault);
    }

    void release_workspace() noexcept override {
        int before = topology_.device;
        static_cast<void>(cudaGetDevice(&before));
        static_cast<void>(cudaSetDevice(topology_.device));  // NCCL releases on the current device
        main_.reset();
        side_.reset();
        reservation_ = {};
        nccl_exchange_.reset();
        if (peer_memory_ != nullptr && communicator_ != nullptr && communicator_->has_ended())
            peer_memory_->forget_communicator();
        peer_memory_.reset();
        token_parallel_.reset();
        product_->release_workspace();
        if (fused_) fused_->release_workspace();
        if (check_) check_->release();
        latent_ = {};
        product_out_ = {};
        shared_ = {};
        combined_ = {};
        static_cast<void>(cudaSetDevice(before));
    }

    std::size_t workspace_bytes() const noexcept override {
        return latent_.bytes() + product_out_.bytes() + shared_.bytes() + combined_.bytes() + product_->workspace_bytes() +
               (fused_ ? fused_->workspace_bytes() : 0) + (token_parallel_ ? token_parallel_->workspace_bytes() : 0) +
               (check_ ? check_->workspace_bytes() : 0) +
               (peer_memory_ != nullptr && has_window() ? static_cast<std::size_t>(all_window_bytes()) : 0) +
               (nccl_exchange_ != nullptr ? nccl_exchange_->workspace_bytes() : 0);
    }

    Matrix scratch(Scratch which, std::int64_t rows) override {
        switch (which) {
            case Scratch::latent: return {latent_.get(), rows, shape_.latent, shape_.latent, shape_.activations};
            case Scratch::product: return {product_out_.get(), rows, shape_.hidden, shape_.hidden, shape_.activations};
            case Scratch::shared: return {shared_.get(), rows, shape_.hidden, shape_.hidden, shape_.activations};
        }
        return {};
    }

    void begin_call(const CallIdentity& identity, latent_moe::Stream stream) override {
        if (stream == nullptr && topology_.shares_devices()) {
            throw Error(StatusCode::invalid_argument,
                        "the stream is null, but ranks that share a GPU need a stream of their own each");
        }
        current_.emplace(topology_.device);
        range_.emplace(identity.is_tail ? latent_moe::name(identity.tail) : "part of a tail");
        identity_ = identity;
        if (half_stream_ && *half_stream_ != static_cast<cudaStream_t>(stream))
            check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), half_event_.get(), 0), "the order of calls");
        half_stream_.reset();
        // Kernels that wait for their predecessor hold places that a rank or a context beside them may need.
        overlaps_ = identity.is_tail && !topology_.shares_devices() && reservation_.may_start_early();
        main_->set_call(static_cast<cudaStream_t>(stream), identity, overlaps_);
        if (check_) check_->set_stream(static_cast<cudaStream_t>(stream));
        // Where ranks share a GPU their lanes take turns. With lanes of several ranks waiting for each other on one GPU, a
        // launch was seen to stay behind another rank's wait until that timed out (large messages, 2 to 4 ranks a GPU).
        side_->set_call(topology_.shares_devices() ? main_->stream() : side_stream_.get(), identity, false);
    }

    /// The kernels make the digest of what they write, and send it with the next call's header.
    void end_call(const ConstMatrix&) override {
        range_.reset();
        current_.reset();
    }

    /// The side lane has been enqueued when `fork` returns, so it cannot fail on its own.
    Status end_after_failure() noexcept override {
        if (forked_) static_cast<void>(cudaStreamWaitEvent(main_->stream(), joined_event_.get(), 0));
        forked_ = false;
        main_->set_beside(false);
        range_.reset();
        current_.reset();
        return {};
    }

    void begin_block(std::int64_t) override {}
    void order_next_call() override {
        check(cudaEventRecord(half_event_.get(), main_->stream()), "the order of calls");
        half_stream_ = main_->stream();
    }

    /// One small kernel in front of every tail, `fused` among them, which waits for its end before it reads the rows.
    ConstMatrix combine(const DeferredMatrix& deferred, std::int64_t tokens) override {
        const Matrix out{combined_.get(), tokens, shape_.latent, shape_.latent, shape_.activations};
        check(combine_rows({.x = rows_of(deferred.rows),
                            .count = deferred.rows.rows,
                            .weights = deferred.weights,
                            .weight_dtype = deferred.weight_dtype,
                            .map = deferred.map,
                            .slots = static_cast<int>(deferred.slots),
                            .y = writable(out),
                            .tokens = tokens,
                            .width = shape_.latent,
                            .dtype = shape_.activations},
                           main_->stream()),
              "combining kernel");
        return out;
    }

    Lane& main() override { return *main_; }

    void fork(FunctionRef<void(Lane& side)> side_work) override {
        if (side_->stream() == main_->stream()) return side_work(*side_);
        check(cudaEventRecord(forked_event_.get(), main_->stream()), "fork");
        check(cudaStreamWaitEvent(side_->stream(), forked_event_.get(), 0), "fork");
        forked_ = true;
        main_->set_beside(true);
        try {
            side_work(*side_);
        } catch (...) {
            static_cast<void>(cudaEventRecord(joined_event_.get(), side_->stream()));
            throw;
        }
        check(cudaEventRecord(joined_event_.get(), side_->stream()), "fork");
    }

    void join() override {
        if (side_->stream() == main_->stream()) return;
        check(cudaStreamWaitEvent(main_->stream(), joined_event_.get(), 0), "join");
        forked_ = false;
        main_->set_beside(false);
    }

    void fused_tail(const TailCall& call) override {
        const auto& layer = static_cast<const GpuPackedLayer&>(call.layer);
        // The kernel reads packed bf16. A layer whose weights bf16 does not hold takes the same columns the portable way.
        const ProductWeights weights = layer.weights(WeightPart::shard);
        if (weights.packed == nullptr || weights.dtype != Dtype::bf16) return column_parallel_tail(*this, call);
        fused_exchange_.layer = static_cast<std::int32_t>(identity_.layer);
        fused_exchange_.tail = static_cast<std::uint32_t>(Tail::fused);
        fused_->run(call, layer, fused_exchange_, overlaps_, main_->stream());
    }

    bool whole_token_parallel_tail(const TailCall& call) override {
        const auto& layer = static_cast<const GpuPackedLayer&>(call.layer);
        if (!token_parallel_ || !token_parallel_->takes(call, layer)) return false;
        token_parallel_exchange_.layer = static_cast<std::int32_t>(identity_.layer);
        token_parallel_exchange_.tail = static_cast<std::uint32_t>(Tail::token_parallel);
        token_parallel_->run(call, layer, token_parallel_exchange_, main_->stream());
        return true;
    }

    DeviceCheck* device_check() noexcept override { return check_ && (world() == 1 || has_window()) ? &*check_ : nullptr; }

    std::span<std::byte> peer_window() const noexcept override {
        if (world() == 1 || !has_window()) return {};
        return {static_cast<std::byte*>(peer_memory_->base(rank())), static_cast<std::size_t>(all_window_bytes())};
    }

    Status poll_fault() noexcept override {
        Status fault = records_->poll();
        if (!fault.ok() && check_) {
            if (std::string finding = check_->finding(); !finding.empty())
                return {StatusCode::mismatch, fmt::format("rank {}: {}", rank(), finding)};
        }
        if (fault.ok() && communicator_ != nullptr) fault = communicator_->fault();
        return fault;
    }

    void abort(const std::string& reason) noexcept override {
        for (const LaneIndex lane : {main_lane, side_lane}) {
            if (peer_memory_ != nullptr && has_window()) records_->abort(window_base(rank(), lane));
        }
        if (fused_ && fused_->missing().empty()) records_->abort(fused_base(rank()));
        if (token_parallel_ && token_parallel_->missing().empty()) records_->abort(token_parallel_base(rank()));
        if (check_ && peer_memory_ != nullptr && has_window()) records_->abort(check_base(rank()));
        if (communicator_ != nullptr) communicator_->abort({StatusCode::aborted, reason});
        bootstrap_.transport->abort(reason);
    }

private:
    int rank() const noexcept { return bootstrap_.rank; }
    int world() const noexcept { return bootstrap_.world; }
    bool keeps_whole() const noexcept { return world() == 1 || options_.keep_whole_weights; }
    bool has_window() const noexcept { return window_missing_.empty(); }

    /// One token whose only slot is dropped.
    void load_combining_kernel() {
        check(cudaMemsetAsync(latent_.get(), 0xFF, sizeof(std::int32_t), setup_stream_.get()), "cudaMemsetAsync");
        check(combine_rows({.x = {combined_.get()},
                            .weights = latent_.get(),
                            .map = reinterpret_cast<const std::int32_t*>(latent_.get()),
                            .slots = 1,
                            .y = {combined_.get()},
                            .tokens = 1,
                            .width = shape_.latent,
                            .dtype = shape_.activations},
                           setup_stream_.get()),
              "combining kernel");
        check(cudaStreamSynchronize(setup_stream_.get()), "combining kernel");
    }

    void make_product() {
        std::vector<std::int64_t> widths;
        if (shape_.hidden % world() == 0) widths.push_back(own_rows_.count);
        if (keeps_whole() && world() > 1) widths.push_back(shape_.hidden);
        together(bootstrap_, Matmul::library(), [&] { const Matmul looked_for; });
        product_.emplace(shape_, bootstrap_, block_tokens_, widths, options_.batch_invariant);
    }

    /// Ranks with a window send rows of every size the same way, so there is none left to hand over to.
    std::string why_not_batch_invariant() const {
        const bool other_way = world() > 1 && has_window() && options_.other_reducer_from_bytes < INT64_MAX;
        return other_way ? "from other_reducer_from_bytes on summands would be reduced another way" : "";
    }

    /// Collective: the user's or the default, as rank 0 has it.
    std::int64_t agreed_number(const char* variable, std::int64_t otherwise) const {
        std::int64_t number = otherwise;
        together(bootstrap_, "environment", [&] {
            const char* given = std::getenv(variable);
            if (given == nullptr) return;
            char* end = nullptr;
            number = std::strtoll(given, &end, 10);
            if (end == given || *end != '\0' || number < 0) {
                throw Error(StatusCode::invalid_argument,
                            fmt::format("{} is '{}', expected a whole number of 0 or more", variable, given));
            }
        });
        return gather(bootstrap_, number).front();
    }

    /// From which sizes on messages go another way. In a batch-invariant context none does: through the mailboxes, in one
    /// stage.
    void choose_ways() {
        if (options_.batch_invariant) return;
        nccl_from_bytes_ = agreed_number("LATENT_MOE_NCCL_FROM_BYTES", world() == 2 ? nccl_pays_from_bytes : INT64_MAX);
        nccl_from_bytes_ = std::min(nccl_from_bytes_, options_.other_reducer_from_bytes);
        bulk_from_bytes_ = agreed_number("LATENT_MOE_BULK_FROM_BYTES", bulk_pays_from_bytes);
        one_stage_bytes_ = agreed_number("LATENT_MOE_ONE_STAGE_BYTES", vendor::one_stage_bytes(world()));
        measures_fused_cut_ = agreed_number("LATENT_MOE_MEASURE_FUSED", 0) != 0;
        token_parallel_from_ = agreed_number("LATENT_MOE_TOKEN_PARALLEL_KERNEL_FROM", token_parallel_pays_from);
    }

    /// Processes need NCCL for everything; threads only where it is faster.
    void make_communicator() {
        if (world() == 1) return;
        choose_ways();
        const bool pays =
            block_tokens_ * shape_.hidden * static_cast<std::int64_t>(bytes_of(shape_.activations)) >= nccl_from_bytes_;
        const bool window_needs_none = (topology_.one_process && topology_.peer_access) ||
                                       (!topology_.one_process && topology_.one_host && !ProcessWindow::needs_communicator);
        if (options_.custom_all_reduce && window_needs_none) {
            const int possible = pays && !topology_.shares_devices() && look_for_nccl().missing.empty() ? 1 : 0;
            if (std::ranges::count(gather(bootstrap_, possible), 1) < world()) return;
        }
        if (topology_.shares_devices()) {
            throw Error(
                StatusCode::unavailable,
                fmt::format("ranks that are processes share a GPU, which {} refuses: give each process its own GPU, or "
                            "make the ranks threads of one process",
                            nccl_name));
        }
        communicator_ = std::make_unique<NcclCommunicator>(bootstrap_, topology_.device, options_.timeout_ms);
    }

    // What the largest message needs, but no more than it pays to have; a few rows fit whatever they are.
    std::int64_t slot_bytes_up_to(std::int64_t most) const noexcept {
        const auto for_rows = [&](std::int64_t rows) {
            return all_reduce_slot_bytes(world(), 1, rows, std::max(shape_.hidden, shape_.latent), shape_.activations);
        };
        return std::max(for_rows(8), std::min(for_rows(block_tokens_), most));
    }
    std::int64_t mailbox_slot_bytes(LaneIndex lane) const noexcept {
        return slot_bytes_up_to(lane == main_lane ? column_mailbox_bytes : mailbox_bytes);
    }
    bool has_bulk() const noexcept {
        return block_tokens_ * shape_.hidden * static_cast<std::int64_t>(bytes_of(shape_.activations)) >= bulk_from_bytes_;
    }
    Bulk bulk(LaneIndex lane) const noexcept {
        return {.offset = (window_bytes(mailbox_slot_bytes(lane)) + 127) / 128 * 128,
                .slot_bytes = has_bulk() ? slot_bytes_up_to(bulk_box_bytes) : 0};
    }
    std::int64_t lane_window_bytes(LaneIndex lane) const noexcept {
        return bulk(lane).offset + (has_bulk() ? bulk_bytes(bulk(lane).slot_bytes) : 0);
    }
    std::int64_t window_bytes_of_lanes() const noexcept {
        return lane_window_bytes(main_lane) + lane_window_bytes(side_lane);
    }
    std::int64_t all_window_bytes() const noexcept {
        return window_bytes_of_lanes() + (fused_ ? fused_->window_bytes() : 0) +
               (token_parallel_ ? token_parallel_->window_bytes() : 0) + (check_ ? check_->window_bytes() : 0);
    }

    /// The lanes' windows lie one behind the other.
    void* window_base(int rank, LaneIndex lane) const noexcept {
        return static_cast<std::byte*>(peer_memory_->base(rank)) + (lane == main_lane ? 0 : lane_window_bytes(main_lane));
    }

    void* fused_base(int rank) const noexcept {
        return static_cast<std::byte*>(peer_memory_->base(rank)) + window_bytes_of_lanes();
    }

    void* token_parallel_base(int rank) const noexcept {
        return static_cast<std::byte*>(fused_base(rank)) + fused_->window_bytes();
    }

    /// Behind all others.
    void* check_base(int rank) const noexcept {
        return static_cast<std::byte*>(peer_memory_->base(rank)) + all_window_bytes() - check_->window_bytes();
    }

    /// The self-check's own part of the window, and the heads of the others, which it stops when it finds something.
    void acquire_check() {
        if (!check_ || (world() > 1 && !has_window())) return;
        Exchange exchange = exchange_of(check_record, 0);
        std::vector<std::array<void*, max_ranks>> others;
        for (int r = 0; r < world() && world() > 1; ++r) exchange.window.base[r] = check_base(r);
        const auto stops = [&](auto base_of) {
            others.emplace_back();
            for (int r = 0; r < world(); ++r) others.back()[static_cast<std::size_t>(r)] = base_of(r);
        };
        if (world() > 1) {
            for (const LaneIndex lane : {main_lane, side_lane}) stops([&](int r) { return window_base(r, lane); });
            if (fused_->missing().empty()) stops([&](int r) { return fused_base(r); });
            if (token_parallel_->missing().empty()) stops([&](int r) { return token_parallel_base(r); });
        }
        together(bootstrap_, "self-check",
                 [&] { check_->acquire(exchange, others, records_->record(FaultRecords::loading)); });
    }

    void acquire_window() {
        peer_memory_.reset();
        peer_memory_ =
            std::make_unique<PeerMemory>(bootstrap_, topology_, communicator_ != nullptr ? communicator_->get() : nullptr,
                                         static_cast<std::size_t>(all_window_bytes()));
        window_missing_ =
            options_.custom_all_reduce ? peer_memory_->missing() : std::string("custom all-reduce is switched off");
        if (!has_window() && communicator_ == nullptr)
            throw Error(StatusCode::unavailable, fmt::format("no peer window, and no {}: {}", nccl_name, window_missing_));
        if (!has_window()) {
            fused_->refuse(window_missing_);
            return token_parallel_->refuse(window_missing_);
        }
        together(bootstrap_, "peer window", [&] {
            if (fused_->missing().empty()) fused_->reset(fused_base(rank()), setup_stream_.get());
            if (token_parallel_->missing().empty()) token_parallel_->reset(token_parallel_base(rank()), setup_stream_.get());
            if (check_) check_->reset(check_base(rank()), setup_stream_.get());
            for (const LaneIndex lane : {main_lane, side_lane}) {
                void* base = window_base(rank(), lane);
                check(reset_window(base, mailbox_slot_bytes(lane), shape_.activations, setup_stream_.get()),
                      "window kernel");
                if (has_bulk()) check(reset_bulk(base, bulk(lane), setup_stream_.get()), "cudaMemsetAsync");
            }
            check(cudaStreamSynchronize(setup_stream_.get()), "window kernel");
        });
        fused_exchange_ = exchange_of(fused_record, mailbox_slot_bytes(main_lane));
        token_parallel_exchange_ = exchange_of(token_parallel_record, mailbox_slot_bytes(main_lane));
        for (int r = 0; r < world(); ++r) {
            fused_exchange_.window.base[r] = fused_base(r);
            token_parallel_exchange_.window.base[r] = token_parallel_base(r);
        }
    }

    /// Collective, with the grid registered: once a context, since a cut decides bits.
    void choose_fused_cut() {
        if (!measures_fused_cut_ || !fused_->missing().empty()) return;
        if (!fused_cuts_.empty()) return fused_->take(fused_cuts_);
        together(bootstrap_, "choice of the fused tail's cut", [&] {
            for (const DeviceMemory* memory : {&latent_, &shared_}) {
                check(fill_noise(memory->get(), Dtype::bf16, static_cast<std::int64_t>(memory->bytes() / 2),
                                 setup_stream_.get()),
                      "noise kernel");
            }
        });
        fused_->choose_by_measurement(
            bootstrap_, fused_exchange_,
            {.routed = {latent_.get()}, .shared = {shared_.get()}, .out = {product_out_.get()}, .rows = block_tokens_},
            setup_stream_.get());
        fused_cuts_ = fused_->plans();
        together(bootstrap_, "peer window", [&] {
            fused_->reset(fused_base(rank()), setup_stream_.get());
            check(cudaStreamSynchronize(setup_stream_.get()), "window kernel");
        });
    }

    /// All but the window's bases.
    Exchange exchange_of(int record, std::int64_t slot_bytes) const noexcept {
        return {.window = {.base = {}, .rank = rank(), .world = world()},
                .slot_bytes = slot_bytes,
                .record = records_->record(record),
                .timeout_ns = static_cast<std::uint64_t>(options_.timeout_ms) * 1'000'000,
                .layer = -1,
                .tail = 0};
    }

    GpuLane::Parts lane_parts(LaneIndex lane, const LaneGrids& grids) {
        GpuLane::Parts parts{.max_ctas = lane == main_lane ? grids.main : grids.side,
                             .max_ctas_alone = lane == main_lane ? grids.alone : grids.side,
                             .nccl = nccl_exchange_.get(),
                             .nccl_from_bytes = nccl_from_bytes_,
                             .product = lane == main_lane ? &*product_ : nullptr,
                             .spare = scratch(Scratch::product, block_tokens_)};
        if (lane == side_lane) parts.nccl_from_bytes = INT64_MAX;  // two lanes must not meet in one communicator
        if (world() == 1 || !has_window()) return parts;
        parts.exchange = exchange_of(lane, mailbox_slot_bytes(lane));
        for (int r = 0; r < world(); ++r) parts.exchange.window.base[r] = window_base(r, lane);
        parts.one_stage_bytes = one_stage_bytes_;
        if (has_bulk()) {
            parts.bulk = bulk(lane);
            parts.bulk_from_bytes = bulk_from_bytes_;
        }
        return parts;
    }

    /// Collective: fills in the rows of W_up that other ranks own, over the bootstrap, some megabytes at a time.
    template <typename RowAddress>
    void gather_rows(std::size_t row, RowAddress address) {
        constexpr std::size_t chunk_bytes = std::size_t{8} << 20;
        const auto chunk = static_cast<std::int64_t>(std::max<std::size_t>(1, chunk_bytes / row));
        std::vector<std::byte> mine;
        std::vector<std::byte> all;
        for (std::int64_t first = 0; first < own_rows_.count; first += chunk) {
            const std::int64_t count = std::min(chunk, own_rows_.count - first);
            const std::size_t bytes = static_cast<std::size_t>(count) * row;
            mine.resize(bytes);
            all.resize(bytes * static_cast<std::size_t>(world()));
            copy_now(mine.data(), address(own_rows_.first + first), bytes);
            bootstrap_.all_gather_bytes(mine.data(), all.data(), bytes);
            for (int peer = 0; peer < world(); ++peer) {
                if (peer == rank()) continue;
                copy_now(address(even_part(shape_.hidden, world(), peer).first + first),
                         all.data() + static_cast<std::size_t>(peer) * bytes, bytes);
            }
        }
    }

    void copy_now(std::byte* to, const std::byte* from, std::size_t bytes) {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, setup_stream_.get()), "copy of W_up");
        check(cudaStreamSynchronize(setup_stream_.get()), "copy of W_up");
    }

    const std::string name_ = vendor::backend_name;
    Shape shape_;
    Bootstrap bootstrap_;
    Options options_;
    Topology topology_;
    std::optional<CurrentDevice> current_;  // during set-up and calls
    std::optional<TraceRange> range_;       // during calls
    TokenRange own_rows_;
    std::int64_t block_tokens_;
    std::int64_t nccl_from_bytes_ = INT64_MAX;
    std::int64_t bulk_from_bytes_ = INT64_MAX;
    std::int64_t one_stage_bytes_ = INT64_MAX;
    std::int64_t token_parallel_from_ = INT64_MAX;  ///< tokens
    std::string window_missing_;

    std::optional<FaultRecords> records_;
    Stream setup_stream_;
    Stream side_stream_;
    Event forked_event_;
    Event joined_event_;
    Event half_event_;
    std::optional<cudaStream_t> half_stream_;  ///< where the first half of a call is, until the second begins
    std::optional<Product> product_;
    std::unique_ptr<NcclCommunicator> communicator_;

    DeviceMemory latent_;
    DeviceMemory product_out_;
    DeviceMemory shared_;
    DeviceMemory combined_;  // of a whole call
    std::unique_ptr<PeerMemory> peer_memory_;
    std::unique_ptr<NcclExchange> nccl_exchange_;
    GridReservation reservation_;
    bool overlaps_ = false;  // kernels of the present call may start early
    std::optional<GpuLane> main_;
    std::optional<GpuLane> side_;
    std::optional<FusedPart> fused_;
    std::vector<FusedTailPlan> fused_cuts_;  ///< that were measured
    bool measures_fused_cut_ = false;
    Exchange fused_exchange_{};
    std::optional<TokenParallelPart> token_parallel_;
    Exchange token_parallel_exchange_{};
    std::optional<GpuDeviceCheck> check_;
    CallIdentity identity_;
    bool forked_ = false;
};

}  // namespace
}  // namespace latent_moe::gpu

namespace latent_moe {
namespace {

std::unique_ptr<Backend> make_gpu_backend(const Shape& shape, const Bootstrap& bootstrap, const Options& options) {
    return std::make_unique<gpu::GpuBackend>(shape, bootstrap, options);
}

}  // namespace

BackendEntry gpu_backend_entry() {
    return {.name = gpu::vendor::backend_name,
            .unavailable = &gpu::why_unavailable,
            .make = &make_gpu_backend,
            .describe = &gpu::describe_machine,
            .make_device = &gpu::make_gpu_device,
            .make_external_tails = &gpu::make_external_tails,
            .why_no_trace = &gpu::why_no_trace,
            .trace_kernels = &gpu::trace_kernels,
            .prepare_own_process = &gpu::vendor::prepare_own_process};
}

}  // namespace latent_moe
