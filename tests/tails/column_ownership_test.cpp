// Two ranks that swapped both their weights and their offsets would still sum right: so look at each rank's own buffer
// before the last collective.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "cpu/cpu_backend.h"
#include "support/problem.h"
#include "tails/schedule.h"

namespace latent_moe {
namespace {

using test::Problem;
using test::Tensor;

/// Passes everything on to another lane, and shows what goes into all-reduces.
class WatchingLane final : public Lane {
public:
    WatchingLane(Lane& lane, std::function<void(const ConstMatrix&)> watch) : lane_(lane), watch_(std::move(watch)) {}

    void all_reduce(Step step, const ConstMatrix& in, const Matrix& out, const ConstMatrix& prefix) override {
        lane_.all_reduce(step, in, out, prefix);
    }
    void all_reduce_norm(Step step, const ConstMatrix& in, const void* gamma, const Matrix& out) override {
        lane_.all_reduce_norm(step, in, gamma, out);
    }
    void reduce_scatter(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) override {
        lane_.reduce_scatter(step, in, own, out);
    }
    void reduce_scatter_norm(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const void* gamma,
                             const Matrix& out) override {
        lane_.reduce_scatter_norm(step, in, own, gamma, out);
    }
    void all_gather(Step step, const ConstMatrix& in, std::span<const TokenRange> own, const Matrix& out) override {
        lane_.all_gather(step, in, own, out);
    }
    void reduce_for_columns(Step step, const ConstMatrix& routed, const void* gamma, const Matrix& latent,
                            const ConstMatrix& shared, std::span<const TokenRange> columns, const Matrix& own) override {
        lane_.reduce_for_columns(step, routed, gamma, latent, shared, columns, own);
    }
    void reduce_columns(Step step, const ConstMatrix& shared, std::span<const TokenRange> columns,
                        const Matrix& own) override {
        lane_.reduce_columns(step, shared, columns, own);
    }
    void gather_columns(Step step, const ConstMatrix& own, std::span<const TokenRange> columns, const Matrix& out,
                        const ConstMatrix& prefix) override {
        watch_(out);
        lane_.gather_columns(step, own, columns, out, prefix);
    }
    void project(const ConstMatrix& x, const PackedLayer& layer, WeightPart part, const Epilogue& epilogue,
                 const Matrix& out) override {
        lane_.project(x, layer, part, epilogue, out);
    }
    void add(const ConstMatrix& a, const ConstMatrix& b, const ConstMatrix& prefix, const Matrix& out) override {
        lane_.add(a, b, prefix, out);
    }
    void copy(const ConstMatrix& in, const Matrix& out) override { lane_.copy(in, out); }
    void fill_zero(const Matrix& out) override { lane_.fill_zero(out); }

private:
    Lane& lane_;
    std::function<void(const ConstMatrix&)> watch_;
};

class WatchingBackend final : public Backend {
public:
    WatchingBackend(Backend& backend, std::function<void(const ConstMatrix&)> watch)
        : backend_(backend), lane_(backend.main(), std::move(watch)) {}

    const std::string& name() const noexcept override { return backend_.name(); }
    Capabilities capabilities() const override { return backend_.capabilities(); }
    std::unique_ptr<PackedLayer> pack(const WeightView& view, const void* gamma) override {
        return backend_.pack(view, gamma);
    }
    const void* gamma(const PackedLayer& layer) const noexcept override { return backend_.gamma(layer); }
    void gather_whole(PackedLayer& layer) override { backend_.gather_whole(layer); }
    std::int64_t block_tokens() const noexcept override { return backend_.block_tokens(); }
    void acquire_workspace() override { backend_.acquire_workspace(); }
    void release_workspace() noexcept override { backend_.release_workspace(); }
    std::size_t workspace_bytes() const noexcept override { return backend_.workspace_bytes(); }
    Matrix scratch(Scratch which, std::int64_t rows) override { return backend_.scratch(which, rows); }
    void begin_call(const CallIdentity& identity, Stream stream) override { backend_.begin_call(identity, stream); }
    void end_call(const ConstMatrix& out) override { backend_.end_call(out); }
    Status end_after_failure() noexcept override { return backend_.end_after_failure(); }
    void begin_block(std::int64_t block) override { backend_.begin_block(block); }
    void order_next_call() override { backend_.order_next_call(); }
    ConstMatrix combine(const DeferredMatrix& deferred, std::int64_t tokens) override {
        return backend_.combine(deferred, tokens);
    }
    Lane& main() override { return lane_; }
    void fork(FunctionRef<void(Lane&)> side_work) override { backend_.fork(side_work); }
    void join() override { backend_.join(); }
    void fused_tail(const TailCall& call) override { backend_.fused_tail(call); }
    Status poll_fault() noexcept override { return backend_.poll_fault(); }
    void abort(const std::string& reason) noexcept override { backend_.abort(reason); }

private:
    Backend& backend_;
    WatchingLane lane_;
};

TEST(ColumnParallel, WritesItsOwnColumnsAndNoOther) {
    for (const int world : {2, 3, 4}) {
        const Problem problem(world, 11, {.prefix = false});
        run_thread_ranks(world, [&](const Bootstrap& bootstrap) {
            const auto rank = static_cast<std::size_t>(bootstrap.rank);
            const std::unique_ptr<Backend> backend = make_cpu_backend(problem.shape, bootstrap, problem.context_options());
            const std::unique_ptr<PackedLayer> layer =
                backend->pack(problem.weight_shard(bootstrap.rank), problem.gamma_data());
            std::vector<ConstMatrix> seen;
            Tensor partial = problem.output();
            WatchingBackend watching(*backend, [&](const ConstMatrix& in) {
                seen.push_back(in);
                for (std::int64_t row = 0; row < in.rows; ++row)
                    std::memcpy(partial.matrix().row(row), in.row(row), static_cast<std::size_t>(in.row_bytes()));
            });
            Tensor out = problem.output();
            constexpr float untouched = 12288.0F;
            for (std::int64_t row = 0; row < problem.tokens; ++row)
                for (std::int64_t column = 0; column < problem.shape.hidden; ++column) out.set(row, column, untouched);
            watching.begin_call({.tokens = problem.tokens, .layer = 7, .tail = Tail::column_parallel}, nullptr);
            column_parallel_tail(watching, {.shape = problem.shape,
                                            .rank = bootstrap.rank,
                                            .world = world,
                                            .tokens = problem.tokens,
                                            .routed = problem.routed[rank].matrix(),
                                            .shared = problem.shared[rank].matrix(),
                                            .prefix = {},
                                            .out = out.matrix(),
                                            .shared_state = SharedState::partial,
                                            .stop_before_gather = false,
                                            .layer = *layer});
            watching.end_call(out.matrix());
            ASSERT_EQ(seen.size(), 1U);

            // Inside its own columns the buffer is the finished tail already; outside, untouched.
            const std::vector<double> expected = reference_tail(problem.reference_input());
            const std::int64_t width = problem.shape.hidden / world;
            for (std::int64_t row = 0; row < problem.tokens; ++row) {
                for (std::int64_t column = 0; column < problem.shape.hidden; ++column) {
                    const float value = partial.at(row, column);
                    if (column / width == bootstrap.rank) {
                        const double wanted = expected[static_cast<std::size_t>(row * problem.shape.hidden + column)];
                        ASSERT_NEAR(value, wanted, 0.02 + 0.01 * std::abs(wanted)) << "row " << row << " column " << column;
                    } else {
                        ASSERT_EQ(value, untouched) << "row " << row << " column " << column;
                    }
                }
            }
        });
    }
}

}  // namespace
}  // namespace latent_moe
