// The self-check sees what it is there for: a packed weight that changes, a result that is wrong.
//
// Faults come in through the transport, which the test supplies: it changes what a rank receives, and, since threads read
// one another's memory in place, it sees where packed weights lie while they are gathered. The library itself has no hooks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "comm/transport.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::Problem;
using test::Tensor;

/// Passes everything on; changes one bit of what arrives at `step` from rank 0 where it is told to.
class FaultyTransport final : public Transport {
public:
    explicit FaultyTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {
        set_timeout_ms(inner_->timeout_ms());
    }

    int rank() const noexcept override { return inner_->rank(); }
    int world() const noexcept override { return inner_->world(); }
    std::int64_t preferred_region_bytes() const noexcept override { return inner_->preferred_region_bytes(); }
    bool concurrent_channels() const noexcept override { return inner_->concurrent_channels(); }
    const char* description() const noexcept override { return inner_->description(); }
    void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

    void exchange(Channel channel, const ExchangeHeader& header, std::span<const Region> outgoing,
                  Consume consume) override {
        inner_->set_timeout_ms(timeout_ms());
        if (header.step == Step::gather_weights && own_weights == nullptr)
            own_weights = const_cast<std::byte*>(outgoing[0].data);
        inner_->exchange(channel, header, outgoing, [&](std::span<const Region> incoming) {
            if (!flips || header.step != *flips) return consume(incoming);
            std::vector<Region> changed(incoming.begin(), incoming.end());
            Region& first = changed[0];
            std::vector<std::byte> copy(static_cast<std::size_t>(first.bytes()));
            pack(first, copy.data());
            copy[copy.size() / 2 | 1U] ^= std::byte{0x40};  // the top of an exponent
            first = {copy.data(), first.rows, first.row_bytes, first.row_bytes};
            consume(changed);
        });
    }

    std::byte* own_weights = nullptr;
    std::optional<Step> flips;

private:
    std::shared_ptr<Transport> inner_;
};

class SelfChecks : public testing::Test {
protected:
    SelfChecks() { std::filesystem::create_directory(folder_); }
    ~SelfChecks() override { std::filesystem::remove_all(folder_); }

    Options options(const Problem& problem, std::int64_t period) const {
        Options options = problem.context_options();
        options.self_check_period = period;
        options.self_check_folder = folder_;
        options.timeout_ms = 5000;
        return options;
    }

    static Bootstrap faulty(const Bootstrap& bootstrap, std::shared_ptr<FaultyTransport>& transport) {
        transport = std::make_shared<FaultyTransport>(bootstrap.transport);
        Bootstrap copy = bootstrap;
        copy.transport = transport;
        return copy;
    }

    std::vector<std::string> saved() const {
        std::vector<std::string> files;
        for (const auto& entry : std::filesystem::directory_iterator(folder_)) files.push_back(entry.path().string());
        return files;
    }

    const std::string folder_ = testing::TempDir() + "latent-moe-self-check-" + std::to_string(::getpid());
};

Context sealed(const Problem& problem, const Bootstrap& bootstrap, const Options& options, bool from_shards = false) {
    Context context = Context::create(problem.shape, bootstrap, options);
    context.add_layer(7, from_shards ? problem.weight_shard(bootstrap.rank) : problem.weight_view(), problem.gamma_data());
    context.add_layer(8, problem.weight_view(), problem.gamma_data());
    context.seal();
    return context;
}

TEST_F(SelfChecks, PassEveryTailOfEveryShape) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        for (const SharedState shared : {SharedState::partial, SharedState::reduced, SharedState::absent}) {
            for (const std::int64_t tokens : {0, 1, 40}) {
                const Problem problem(
                    3, tokens,
                    {.norm = tokens == 1 ? Norm::none : Norm::rms, .dtype = dtype, .routed_scale = 2.5F, .shared = shared});
                run_thread_ranks(3, [&](const Bootstrap& bootstrap) {
                    const Context context = sealed(problem, bootstrap, options(problem, 1));
                    Tensor out = problem.output();
                    std::uint64_t calls = 0;
                    for (const Candidate& candidate : context.plan(tokens).candidates) {
                        const Status status =
                            context.layer(0).run(candidate.tail, problem.input(bootstrap.rank), out.writable_rows());
                        ASSERT_TRUE(status.ok()) << name(candidate.tail) << ": " << status.message();
                        ++calls;
                    }
                    EXPECT_GT(calls, 1U);
                    EXPECT_EQ(context.counters().self_checks, calls);
                });
            }
        }
    }
    EXPECT_TRUE(saved().empty());
}

TEST_F(SelfChecks, PassWhereInputsAreOverwrittenAndRowsAreShardedOrRowScaled) {
    const Problem problem(2, 21, {.weight_dtype = Dtype::e4m3});
    const std::vector<float> row_scales(static_cast<std::size_t>(problem.shape.hidden), 0.03F);
    for (const bool sequence_parallel : {false, true}) {
        run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
            Options with = options(problem, 1);
            with.sequence_parallel = sequence_parallel;
            Context context = Context::create(problem.shape, bootstrap, with);
            WeightView view = problem.weight_view();
            view.row_scales = row_scales.data();
            context.add_layer(7, view, problem.gamma_data());
            context.seal();
            Tensor shared = problem.shared[static_cast<std::size_t>(bootstrap.rank)];
            TailInput input = problem.input(bootstrap.rank);
            Tensor out = problem.output();
            input.consume_shared = true;
            input.shared = shared.rows();
            const TokenRange own = context.own_tokens(problem.tokens, bootstrap.rank);
            if (sequence_parallel) input.prefix = {problem.prefix.matrix().row(own.first), problem.shape.hidden};
            const Status status =
                context.layer(0).run(input, sequence_parallel ? out.writable_rows() : shared.writable_rows());
            EXPECT_TRUE(status.ok()) << status.message();
        });
    }
}

TEST_F(SelfChecks, SeeAPackedWeightThatChangesWithinTheirPeriod) {
    const Problem problem(2, 3);
    constexpr int period = 4;
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        std::shared_ptr<FaultyTransport> transport;
        const Context context = sealed(problem, faulty(bootstrap, transport), options(problem, period), true);
        Tensor out = problem.output();
        const auto call = [&] {
            return context.layer(0).run(Tail::column_parallel, problem.input(bootstrap.rank), out.writable_rows());
        };
        for (int each = 0; each < period + 1; ++each) ASSERT_TRUE(call().ok());
        ASSERT_NE(transport->own_weights, nullptr);
        // The lowest bit of a mantissa, far below rounding; every rank gets rank 1's columns, so digests agree.
        if (bootstrap.rank == 1) transport->own_weights[4] ^= std::byte{1};
        Status status;
        int calls = 0;
        while (status.ok() && calls < period) {
            status = call();
            ++calls;
        }
        EXPECT_EQ(status.code(), StatusCode::mismatch);
        EXPECT_NE(status.message().find("rank 1: self-check: the packed weights of layer 7 have changed"), std::string::npos)
            << status.message();
        ASSERT_TRUE(context.poll_fault().has_value());
        EXPECT_EQ(context.poll_fault()->rank, 1);
        EXPECT_EQ(call().code(), StatusCode::aborted);
    });
}

TEST_F(SelfChecks, SeeAWeightThatChangedWhileTheContextWasSuspended) {
    const Problem problem(2, 3);
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        std::shared_ptr<FaultyTransport> transport;
        Context context = sealed(problem, faulty(bootstrap, transport), options(problem, 1000), true);
        context.suspend();
        if (bootstrap.rank == 0) transport->own_weights[0] ^= std::byte{1};
        try {
            context.resume();
            ADD_FAILURE() << "expected an error";
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("the packed weights of layer 7 have changed"), std::string::npos)
                << error.what();
        }
    });
}

TEST_F(SelfChecks, SeeAWrongOutputAndSaveItsInputs) {
    const Problem problem(2, 6);
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        std::shared_ptr<FaultyTransport> transport;
        const Context context = sealed(problem, faulty(bootstrap, transport), options(problem, 1));
        Tensor out = problem.output();
        // Both ranks receive the same wrong bits, so their digests agree: only the chain can tell.
        transport->flips = Step::reduce_shared;
        const Status status = context.layer(0).run(Tail::replicated, problem.input(bootstrap.rank), out.writable_rows());
        EXPECT_EQ(status.code(), StatusCode::mismatch);
        EXPECT_NE(status.message().find("self-check: the output of tail replicated of layer 7 is "), std::string::npos)
            << status.message();
        EXPECT_NE(status.message().find("inputs saved to "), std::string::npos) << status.message();
    });
    const auto header_of = [](const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        std::uint64_t length = 0;
        file.read(reinterpret_cast<char*>(&length), sizeof length);
        std::string header(length, ' ');
        file.read(header.data(), static_cast<std::streamsize>(length));
        return header;
    };
    int inputs = 0;
    for (const std::string& path : saved()) {
        EXPECT_EQ(std::filesystem::status(path).permissions(),
                  std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
        if (path.find("-inputs.") == std::string::npos) {
            EXPECT_NE(header_of(path).find("\"out\":{\"dtype\":\"BF16\",\"shape\":[6,1344]"), std::string::npos) << path;
            continue;
        }
        ++inputs;
        const std::string header = header_of(path);
        EXPECT_NE(header.find("\"routed.1\":{\"dtype\":\"BF16\",\"shape\":[6,96]"), std::string::npos) << header;
        EXPECT_NE(header.find("\"shared.1\":{\"dtype\":\"BF16\",\"shape\":[6,1344]"), std::string::npos) << header;
    }
    EXPECT_GE(inputs, 1);
}

TEST_F(SelfChecks, WithoutThemADifferenceBetweenRanksShowsInTheNextCall) {
    const Problem problem(2, 6);
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        std::shared_ptr<FaultyTransport> transport;
        const Context context = sealed(problem, faulty(bootstrap, transport), options(problem, 0));
        Tensor out = problem.output();
        if (bootstrap.rank == 1) transport->flips = Step::reduce_shared;
        const auto call = [&] {
            return context.layer(0).run(Tail::replicated, problem.input(bootstrap.rank), out.writable_rows());
        };
        EXPECT_TRUE(call().ok());
        const Status status = call();
        EXPECT_EQ(status.code(), StatusCode::mismatch);
        EXPECT_EQ(status.message().find("outputs diverged before call 1"), 0U) << status.message();
    });
}

TEST_F(SelfChecks, HaveAPeriodThatRanksAgreeIn) {
    const Problem problem(2, 1);
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        try {
            Context::create(problem.shape, bootstrap, options(problem, bootstrap.rank + 1));
            ADD_FAILURE() << "expected an error";
        } catch (const Error& error) {
            EXPECT_EQ(std::string(error.what()),
                      "context creation: ranks differ in self_check_period: rank 0 has 1, rank 1 has 2");
        }
    });
}

}  // namespace
}  // namespace latent_moe
