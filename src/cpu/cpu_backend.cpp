#include "cpu/cpu_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "comm/transport.h"
#include "core/deferred.h"
#include "core/digest.h"
#include "core/float8_packing.h"
#include "core/numeric.h"
#include "core/partition.h"
#include "core/wait_meter.h"
#include "cpu/collectives.h"
#include "cpu/cpu_model.h"
#include "cpu/packed_weights.h"
#include "cpu/product.h"
#include "cpu/row_math.h"
#include "cpu/workers.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

/// Tokens at a time: enough rows that reading W_up again for the next block costs little beside the arithmetic.
constexpr std::int64_t tokens_per_block = 256;

/// Constants of one worker thread, measured on the kinds of machine that build this project; `tune` replaces them by a
/// table.
Machine machine_of(int threads, bool native_bf16) {
    const double each = threads;
    return {.description = fmt::format("{} CPU thread{} a rank, {} products", threads, threads == 1 ? "" : "s",
                                       native_bf16 ? "bf16" : "widened float32"),
            .memory_bytes_per_us = 7.5e3 * each,
            .flops_per_us = (native_bf16 ? 350e3 : 75e3) * each,
            .wire_bytes_per_us = 2e3,
            .hop_us = 15,
            .launch_us = 2,
            .collective_us = 10,
            .reached = {.contention = 1}};  // what goes on side by side shares the threads
}

class CpuLane final : public Lane {
public:
    /// `product` is null on a lane that runs collectives only.
    CpuLane(Transport& transport, Channel channel, Workers& workers, Product* product, const Shape& shape, WaitMeter& waits)
        : workers_(workers),
          product_(product),
          widest_(std::max(shape.hidden, shape.latent)),
          collectives_(transport, channel, workers, shape, widest_, waits),
          sums_(static_cast<std::size_t>(widest_ * workers.count())),
          scratch_(sums_.size()) {}

    void set_header(const ExchangeHeader& header) noexcept { collectives_.set_header(header); }
    std::size_t workspace_bytes() const noexcept {
        return collectives_.workspace_bytes() + (sums_.size() + scratch_.size()) * sizeof(float);
    }

    void all_reduce(Step step, const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) override {
        collectives_.all_reduce(step, in, out, prefix);
    }
    void all_reduce_norm(Step step, const ConstMatrix& in, const void* gamma, const Matrix& out) override {
        collectives_.all_reduce_norm(step, in, gamma, out);
    }
    void reduce_scatter(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) override {
        collectives_.reduce_scatter(step, in, own, out);
    }
    void reduce_scatter_norm(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const void* gamma,
                             const Matrix& out) override {
        collectives_.reduce_scatter_norm(step, in, own, gamma, out);
    }
    void all_gather(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) override {
        collectives_.all_gather(step, in, own, out);
    }

    void reduce_for_columns(Step step, const ConstMatrix& routed, const void* gamma, const Matrix& latent,
                            const ConstMatrix& shared, std::span<const TokenRange> columns, const Matrix& own) override {
        collectives_.all_reduce_norm(step, routed, gamma, latent);
        if (shared.present()) collectives_.reduce_columns(Step::reduce_shared, shared, columns, own);
    }
    void reduce_columns(Step step, const ConstMatrix& shared, std::span<const TokenRange> columns,
                        const Matrix& own) override {
        collectives_.reduce_columns(step, shared, columns, own);
    }
    void gather_columns(Step step, const ConstMatrix& own, std::span<const TokenRange> columns, const Matrix& out,
                        const ConstMatrix& prefix) override {
        collectives_.gather_columns(step, own, columns, out, prefix);
    }

    void project(const ConstMatrix& x, const PackedLayer& layer, WeightPart part, const Epilogue& epilogue,
                 const Matrix& out) override {
        product_->run(x, static_cast<const CpuPackedLayer&>(layer).weights(part), epilogue, out);
    }

    void add(const ConstMatrix& a, const ConstMatrix& b, const ConstMatrix& prefix, const Matrix& out) override {
        workers_.for_each(out.rows, [&](int worker, std::int64_t row) {
            float* sum = sums_.data() + worker * widest_;
            float* scratch = scratch_.data() + worker * widest_;
            const std::array<Region, 2> addends = {Region{a.row(row), 1, a.row_bytes(), 0},
                                                   Region{b.row(row), 1, b.row_bytes(), 0}};
            sum_row(addends, 0, out.dtype, sum, scratch, out.columns);
            finish_row(sum, out.dtype, prefix.present() ? prefix.row(row) : nullptr, out.row(row), scratch, out.columns);
        });
    }

    void combine(const DeferredMatrix& deferred, const Matrix& out) {
        workers_.for_each(out.rows, [&](int worker, std::int64_t row) {
            float* sum = sums_.data() + worker * widest_;
            combine_row(deferred, row, sum, scratch_.data() + worker * widest_);
            narrow(sum, out.dtype, out.row(row), out.columns);
        });
    }

    void copy(const ConstMatrix& in, const Matrix& out) override {
        workers_.for_each(in.rows, [&](int, std::int64_t row) {
            std::memcpy(out.row(row), in.row(row), static_cast<std::size_t>(in.row_bytes()));
        });
    }

    void fill_zero(const Matrix& out) override {
        workers_.for_each(out.rows, [&](int, std::int64_t row) {
            std::memset(out.row(row), 0, static_cast<std::size_t>(out.row_bytes()));
        });
    }

private:
    Workers& workers_;
    Product* product_;
    std::int64_t widest_;
    Collectives collectives_;
    std::vector<float> sums_;     // a row a worker
    std::vector<float> scratch_;  // a row a worker
};

class CpuBackend final : public Backend {
public:
    CpuBackend(const Shape& shape, const Bootstrap& bootstrap, const Options& options)
        : shape_(shape),
          options_(options),
          rank_(bootstrap.rank),
          world_(bootstrap.world),
          transport_(bootstrap.transport),
          workers_(cpu_threads_of_rank(options, bootstrap.local_world)),
          side_workers_(1) {
        block_tokens_ = std::min(tokens_per_block, std::max<std::int64_t>(options.max_tokens, 1));
        native_bf16_ = Product(*side_workers_, 1, 8).native_bf16();
        acquire_workspace();
    }

    const std::string& name() const noexcept override { return name_; }

    Capabilities capabilities() const override {
        return {
            .machine = machine_of(workers_->count(), native_bf16_),
            .device =
                fmt::format("{}, {} thread{} a rank", cpu_model(), workers_->count(), workers_->count() == 1 ? "" : "s"),
            .links = world_ == 1 ? "none" : transport_->description(),
            .weight_element_bytes = options_.float8_weights ? 1.0 : 2.0,
            .concurrent_lanes = transport_->concurrent_channels(),
            .concurrent_lanes_reason = "these ranks cannot run two collectives at once (MPI needs MPI_THREAD_SERIALIZED)",
            .fused = false,
            .fused_reason = "the cpu backend has no fused kernel",
            .whole_weights = world_ == 1 || options_.keep_whole_weights,
            .host_memory = true,
            .no_batch_invariance = {}};
    }

    std::unique_ptr<PackedLayer> pack(const WeightView& up_projection, const void* gamma) override {
        std::optional<Float8Rows> float8;
        if (options_.float8_weights && up_projection.dtype != Dtype::e4m3)
            float8 = pack_float8(up_projection, shape_.latent);
        return std::make_unique<CpuPackedLayer>(shape_, even_part(shape_.hidden, world_, rank_),
                                                capabilities().whole_weights, float8 ? float8->view() : up_projection,
                                                gamma);
    }

    const void* gamma(const PackedLayer& layer) const noexcept override {
        return static_cast<const CpuPackedLayer&>(layer).gamma();
    }

    void gather_whole(PackedLayer& packed) override {
        auto& layer = static_cast<CpuPackedLayer&>(packed);
        if (!layer.lacks_rows()) return;
        const Matrix own = layer.rows(layer.own_rows());
        const std::int64_t chunk = std::max<std::int64_t>(1, transport_->preferred_region_bytes() / own.row_bytes());
        for (std::int64_t first = 0; first < own.rows; first += chunk) {
            const std::int64_t count = std::min(chunk, own.rows - first);
            const ConstMatrix part = own.row_range(first, count);
            share_weights({part.data, count, part.row_bytes(), part.stride_bytes()}, [&](int peer, const Region& from) {
                const Matrix to = layer.rows({even_part(shape_.hidden, world_, peer).first + first, count});
                for (std::int64_t row = 0; row < count; ++row)
                    std::memcpy(to.row(row), from.row(row), static_cast<std::size_t>(from.row_bytes));
            });
        }
        if (float* scales = layer.row_scales(); scales != nullptr) {
            const TokenRange mine = layer.own_rows();
            const auto bytes = static_cast<std::int64_t>(sizeof(float)) * mine.count;
            share_weights({reinterpret_cast<const std::byte*>(scales + mine.first), 1, bytes, bytes},
                          [&](int peer, const Region& from) {
                              std::memcpy(scales + even_part(shape_.hidden, world_, peer).first, from.data,
                                          static_cast<std::size_t>(from.row_bytes));
                          });
        }
        layer.set_complete();
    }

    std::int64_t block_tokens() const noexcept override { return block_tokens_; }

    void acquire_workspace() override {
        const std::size_t element = bytes_of(shape_.activations);
        latent_.resize(static_cast<std::size_t>(block_tokens_ * shape_.latent) * element);
        product_out_.resize(static_cast<std::size_t>(block_tokens_ * shape_.hidden) * element);
        shared_.resize(product_out_.size());
        if (options_.deferred_finalize)
            combined_.resize(static_cast<std::size_t>(options_.max_tokens * shape_.latent) * element);
        product_.emplace(*workers_, block_tokens_, shape_.latent, Product::Arithmetic::automatic, options_.batch_invariant);
        main_.emplace(*transport_, Channel::main, *workers_, &*product_, shape_, waits_);
        side_.emplace(*transport_, Channel::side, *side_workers_, nullptr, shape_, waits_);
        side_worker_.emplace();
    }

    void release_workspace() noexcept override {
        side_worker_.reset();
        side_.reset();
        main_.reset();
        product_.reset();
        for (std::vector<std::byte>* memory : {&latent_, &product_out_, &shared_, &combined_})
            std::vector<std::byte>().swap(*memory);
    }

    std::size_t workspace_bytes() const noexcept override {
        if (!main_) return 0;
        return latent_.size() + product_out_.size() + shared_.size() + combined_.size() + product_->workspace_bytes() +
               main_->workspace_bytes() + side_->workspace_bytes();
    }

    Matrix scratch(Scratch which, std::int64_t rows) override {
        switch (which) {
            case Scratch::latent: return {latent_.data(), rows, shape_.latent, shape_.latent, shape_.activations};
            case Scratch::product: return {product_out_.data(), rows, shape_.hidden, shape_.hidden, shape_.activations};
            case Scratch::shared: return {shared_.data(), rows, shape_.hidden, shape_.hidden, shape_.activations};
        }
        return {};
    }

    void begin_call(const CallIdentity& identity, Stream) override {
        side_failure_ = {};
        header_ = {.context = identity.context,
                   .call = identity.call,
                   .tokens = identity.tokens,
                   .layer = identity.layer,
                   .block = 0,
                   .digest = digest_,
                   .tail = identity.tail,
                   .is_tail = identity.is_tail,
                   .prefix = identity.prefix,
                   .step = Step::none};
        begin_block(0);
    }

    void order_next_call() override {}  // a call is done when it returns
    void begin_block(std::int64_t block) override {
        header_.block = block;
        main_->set_header(header_);
        side_->set_header(header_);
    }

    void end_call(const ConstMatrix& out) override { digest_ = out.present() && world_ > 1 ? digest_of(out) : 0; }

    ConstMatrix combine(const DeferredMatrix& deferred, std::int64_t tokens) override {
        const Matrix out{combined_.data(), tokens, shape_.latent, shape_.latent, shape_.activations};
        main_->combine(deferred, out);
        return out;
    }

    Lane& main() override { return *main_; }

    void fork(FunctionRef<void(Lane& side)> side_work) override {
        side_work_ = side_work;
        (*side_worker_)->start(run_side_);
        forked_ = true;
    }

    void join() override {
        forked_ = false;
        (*side_worker_)->join();
    }

    Status end_after_failure() noexcept override {
        if (!forked_) return side_failure_;
        try {
            join();
        } catch (const Error& error) {
            side_failure_ = error.status();
        } catch (const std::exception& error) {
            side_failure_ = {StatusCode::internal, error.what()};
        }
        return side_failure_;
    }

    void fused_tail(const TailCall&) override { throw Error(StatusCode::unsupported, capabilities().fused_reason); }

    bool can_self_check() const noexcept override { return true; }
    HostLayer host_layer(const PackedLayer& packed) const override {
        const auto& layer = static_cast<const CpuPackedLayer&>(packed);
        const bool whole = capabilities().whole_weights;
        const ProductWeights weights = layer.weights(whole ? WeightPart::whole : WeightPart::shard);
        return {.rows = weights.rows,
                .first_row = whole ? 0 : layer.own_rows().first,
                .scale = weights.scale,
                .row_scales = weights.row_scales,
                .gamma = layer.gamma()};
    }
    void share(Step step, const Region& mine, FunctionRef<void(int peer, const Region& from)> store) override {
        ExchangeHeader header = header_;
        header.step = step;
        share_with(header, mine, store);
    }
    Waits waits() const noexcept override { return {waits_.count, waits_.us, waits_.longest_us}; }

    Status poll_fault() noexcept override { return {}; }
    void abort(const std::string& reason) noexcept override { transport_->abort(reason); }

private:
    /// Every rank gets every rank's `mine`.
    void share_with(const ExchangeHeader& header, const Region& mine,
                    FunctionRef<void(int peer, const Region& from)> store) {
        std::array<Region, max_world> outgoing;
        outgoing.fill(mine);
        transport_->exchange(Channel::main, header, std::span(outgoing.data(), static_cast<std::size_t>(world_)),
                             [&](std::span<const Region> incoming) {
                                 for (int peer = 0; peer < world_; ++peer)
                                     store(peer, incoming[static_cast<std::size_t>(peer)]);
                             });
    }
    /// Rows of the others' weights.
    template <typename Store>
    void share_weights(const Region& mine, Store store) {
        share_with({.step = Step::gather_weights}, mine, [&](int peer, const Region& from) {
            if (peer != rank_) store(peer, from);
        });
    }

    const std::string name_ = "cpu";
    Shape shape_;
    Options options_;
    int rank_;
    int world_;
    std::shared_ptr<Transport> transport_;
    OwnThreads<Workers> workers_;
    OwnThreads<Workers> side_workers_;
    bool native_bf16_ = false;
    std::int64_t block_tokens_ = tokens_per_block;
    std::vector<std::byte> latent_;
    std::vector<std::byte> product_out_;
    std::vector<std::byte> shared_;
    std::vector<std::byte> combined_;  // of a whole call
    std::optional<Product> product_;
    std::optional<CpuLane> main_;
    std::optional<CpuLane> side_;
    std::optional<OwnThreads<SideWorker>> side_worker_;
    FunctionRef<void(Lane&)> side_work_;
    const std::function<void()> run_side_ = [this] { side_work_(*side_); };
    bool forked_ = false;
    Status side_failure_;  // of this call
    ExchangeHeader header_;
    std::uint64_t digest_ = 0;
    WaitMeter waits_;
};

}  // namespace

int cpu_threads_of_rank(const Options& options, int local_world) noexcept {
    if (options.cpu_threads > 0) return options.cpu_threads;
    const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    return std::max(1, cores / std::max(1, local_world));
}

std::unique_ptr<Backend> make_cpu_backend(const Shape& shape, const Bootstrap& bootstrap, const Options& options) {
    return std::make_unique<CpuBackend>(shape, bootstrap, options);
}

}  // namespace latent_moe
