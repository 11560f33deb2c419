#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/harness.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::make_context;
using test::on_ranks;
using test::Problem;
using test::Tensor;

constexpr Tail with_halves[] = {Tail::replicated, Tail::column_parallel, Tail::token_parallel};

bool allowed(const Context& context, Tail tail, std::int64_t tokens) {
    for (const Candidate& candidate : context.plan(tokens).candidates) {
        if (candidate.tail == tail) return true;
    }
    return false;
}

TEST(ACallInHalves, GivesTheBitsOfTheWholeCall) {
    for (const int world : {1, 2, 3, 4}) {
        for (const std::int64_t tokens : {0, 1, 5, 257, 600}) {
            const Problem problem(world, tokens);
            on_ranks(world, [&](const Bootstrap& bootstrap) {
                const Context context = make_context(problem, bootstrap, problem.context_options());
                const Layer layer = context.layer(0);
                const TailInput input = problem.input(bootstrap.rank);
                for (const Tail tail : with_halves) {
                    if (!allowed(context, tail, tokens)) continue;
                    Tensor whole = problem.output();
                    ASSERT_TRUE(layer.run(tail, input, whole.writable_rows()).ok());
                    Tensor halves = problem.output();
                    halves.poison();
                    Status status = layer.begin(tail, input.shared, halves.writable_rows(), tokens);
                    ASSERT_TRUE(status.ok()) << status.message();
                    status = layer.finish(input.routed, input.prefix);
                    ASSERT_TRUE(status.ok()) << status.message();
                    EXPECT_EQ(whole.content() == halves.content(), true)
                        << name(tail) << ", " << world << " ranks, " << tokens << " tokens";
                }
            });
        }
    }
}

TEST(ACallInHalves, MayWriteItsOutputOverShared) {
    const Problem problem(3, 20, {.prefix = false});
    on_ranks(3, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        const TailInput input = problem.input(bootstrap.rank);
        for (const Tail tail : with_halves) {
            Tensor whole = problem.output();
            ASSERT_TRUE(context.layer(0).run(tail, input, whole.writable_rows()).ok());
            Tensor both = problem.shared[static_cast<std::size_t>(bootstrap.rank)];
            ASSERT_TRUE(context.layer(0).begin(tail, both.rows(), both.writable_rows(), 20).ok());
            ASSERT_TRUE(context.layer(0).finish(input.routed).ok());
            EXPECT_EQ(whole.content() == both.content(), true) << name(tail);
        }
    });
}

TEST(ACallInHalves, LeavesASequenceParallelCallerItsOwnRows) {
    const Problem problem(3, 17, {.prefix = false});
    on_ranks(3, [&](const Bootstrap& bootstrap) {
        Options options = problem.context_options();
        options.sequence_parallel = true;
        const Context context = make_context(problem, bootstrap, options);
        const std::int64_t own = context.own_tokens(17, bootstrap.rank).count;
        const TailInput input = problem.input(bootstrap.rank);
        Tensor whole(own, problem.shape.hidden, problem.shape.activations);
        Tensor halves(own, problem.shape.hidden, problem.shape.activations);
        ASSERT_TRUE(context.layer(0).run(input, whole.writable_rows()).ok());
        ASSERT_TRUE(context.layer(0).begin(input.shared, halves.writable_rows(), 17).ok());
        ASSERT_TRUE(context.layer(0).finish(input.routed).ok());
        EXPECT_EQ(whole.content() == halves.content(), true);
    });
}

TEST(ACallInHalves, TakesNoOtherCallInBetween) {
    const Problem problem(2, 4);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        const Layer layer = context.layer(0);
        const TailInput input = problem.input(bootstrap.rank);
        Tensor out = problem.output();
        Tensor other = problem.output();
        ASSERT_TRUE(layer.begin(input.shared, out.writable_rows(), 4).ok());
        const std::string expected = "has begun and not finished";
        EXPECT_NE(layer.run(input, other.writable_rows()).message().find(expected), std::string::npos);
        EXPECT_NE(layer.begin(input.shared, other.writable_rows(), 4).message().find(expected), std::string::npos);
        const Status finished = layer.finish(input.routed, input.prefix);
        EXPECT_TRUE(finished.ok()) << finished.message();  // the refusals cost nothing
        EXPECT_TRUE(layer.run(input, other.writable_rows()).ok());
        EXPECT_EQ(layer.finish(input.routed).code(), StatusCode::unsupported);
        EXPECT_NE(layer.finish(input.routed).message().find("has not begun"), std::string::npos);
    });
}

TEST(ACallInHalves, IsRefusedWhereNothingCouldTravelAhead) {
    const Problem reduced(2, 4, {.shared = SharedState::reduced});
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(reduced, bootstrap, reduced.context_options());
        Tensor out = reduced.output();
        const Status status = context.layer(0).begin(reduced.input(bootstrap.rank).shared, out.writable_rows(), 4);
        EXPECT_EQ(status.message(), "shared is reduced, so there is nothing to begin with");
    });
    const Problem problem(2, 4);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        Tensor out = problem.output();
        const Status status =
            context.layer(0).begin(Tail::overlap, problem.input(bootstrap.rank).shared, out.writable_rows(), 4);
        EXPECT_EQ(status.message(), "tail overlap has no halves, expected replicated, column_parallel or token_parallel");
    });
}

TEST(ACallInHalves, OnOneRankOnlyIsAnErrorOnEveryRank) {
    const Problem problem(2, 4);
    on_ranks(2, [&](const Bootstrap& bootstrap) {
        const Context context = make_context(problem, bootstrap, problem.context_options());
        const TailInput input = problem.input(bootstrap.rank);
        Tensor out = problem.output();
        Status status = bootstrap.rank == 0 ? context.layer(0).begin(Tail::replicated, input.shared, out.writable_rows(), 4)
                                            : context.layer(0).run(Tail::replicated, input, out.writable_rows());
        if (status.ok() && bootstrap.rank == 0) status = context.layer(0).finish(input.routed, input.prefix);
        EXPECT_FALSE(status.ok());
    });
}

}  // namespace
}  // namespace latent_moe
