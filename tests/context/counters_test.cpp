// What a context counts.
#include <gtest/gtest.h>

#include <thread>

#include "context/call_counters.h"
#include "core/log.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::Problem;
using test::Tensor;

std::uint64_t count(const std::array<std::uint64_t, status_count>& counts, StatusCode code) {
    return counts[static_cast<std::size_t>(code)];
}

TEST(Counters, CountCallsByTailAndRefusalsByReason) {
    const Problem problem(2, 4);
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        TailInput input = problem.input(bootstrap.rank);
        for (const Tail tail : {Tail::replicated, Tail::overlap, Tail::replicated})
            ASSERT_TRUE(context.layer(0).run(tail, input, out.writable_rows()).ok());
        EXPECT_FALSE(context.layer(0).run(Tail::fused, input, out.writable_rows()).ok());
        input.tokens = -1;
        EXPECT_FALSE(context.layer(0).run(input, out.writable_rows()).ok());
        Tensor y(4, problem.shape.latent, problem.shape.activations);
        ASSERT_TRUE(context
                        .all_reduce_rms_norm(problem.routed[static_cast<std::size_t>(bootstrap.rank)].rows(),
                                             problem.gamma_data(), y.writable_rows(), 4)
                        .ok());
        const Counters counters = context.counters();
        EXPECT_EQ(counters.calls[static_cast<std::size_t>(Tail::replicated)], 2U);
        EXPECT_EQ(counters.calls[static_cast<std::size_t>(Tail::overlap)], 1U);
        EXPECT_EQ(counters.calls[static_cast<std::size_t>(Tail::fused)], 0U);
        EXPECT_EQ(counters.parts, 1U);
        EXPECT_EQ(count(counters.refused, StatusCode::unsupported), 1U);
        EXPECT_EQ(count(counters.refused, StatusCode::invalid_argument), 1U);
        EXPECT_EQ(count(counters.failed, StatusCode::mismatch), 0U);
        EXPECT_GT(counters.waits, 3U);
    });
}

TEST(Counters, SeeTheWaitForALateRank) {
    const Problem problem(2, 4);
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        if (bootstrap.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
        ASSERT_TRUE(context.layer(0).run(problem.input(bootstrap.rank), out.writable_rows()).ok());
        const Counters counters = context.counters();
        EXPECT_GE(counters.wait_us, counters.longest_wait_us);
        if (bootstrap.rank == 0) {
            EXPECT_GE(counters.longest_wait_us, 20'000U);
        }
    });
}

TEST(Counters, CountFailuresAndTheCallsAfterThem) {
    const Problem problem(2, 4);
    run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        TailInput input = problem.input(bootstrap.rank);
        input.tokens = 3 + bootstrap.rank;
        EXPECT_FALSE(context.layer(0).run(Tail::replicated, input, out.writable_rows()).ok());
        EXPECT_FALSE(context.layer(0).run(Tail::replicated, input, out.writable_rows()).ok());
        EXPECT_EQ(count(context.counters().failed, StatusCode::mismatch), 1U);
        EXPECT_EQ(count(context.counters().failed, StatusCode::aborted), 1U);
    });
}

TEST(LogLevels, AreNamedAndDefaultToWarn) {
    EXPECT_EQ(log_level_from("off"), LogLevel::off);
    EXPECT_EQ(log_level_from("error"), LogLevel::error);
    EXPECT_EQ(log_level_from("debug"), LogLevel::debug);
    EXPECT_EQ(log_level_from(nullptr), LogLevel::warn);
    EXPECT_EQ(log_level_from("loud"), LogLevel::warn);
}

TEST(LogLines, AreOneLineEachWithTheirLevel) {
    testing::internal::CaptureStderr();
    write_log(LogLevel::warn, "two\nlines");
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "[latent-moe] warn: two\\nlines\n");
}

TEST(Refusals, AreToldTheFirstTheTenthTheHundredthTime) {
    std::vector<std::uint64_t> told;
    for (std::uint64_t count = 1; count <= 2000; ++count)
        if (is_power_of_ten(count)) told.push_back(count);
    EXPECT_EQ(told, (std::vector<std::uint64_t>{1, 10, 100, 1000}));
}

}  // namespace
}  // namespace latent_moe
