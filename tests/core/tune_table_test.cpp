// Plans by measured times.
#include "core/tune_table.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/planner.h"

namespace latent_moe {
namespace {

constexpr Shape k3{.hidden = 7168, .latent = 3584};

Capabilities capable() {
    return {.machine = {.description = "a test machine"}, .fused = true, .whole_weights = true};
}

/// Fused wins up to about 76 tokens, column_parallel up to about 3000, token_parallel beyond.
TuneTable table() {
    TuneTable made;
    made.origin = "made up";
    made.points[static_cast<std::size_t>(Tail::fused)] = {{1, 8}, {16, 10}, {64, 22}, {128, 45}};
    made.points[static_cast<std::size_t>(Tail::column_parallel)] = {{1, 17},   {16, 20},    {64, 25},
                                                                    {128, 33}, {1024, 120}, {4096, 520}};
    made.points[static_cast<std::size_t>(Tail::token_parallel)] = {{1, 29}, {1024, 165}, {4096, 450}};
    return made;
}

Planner planner_of(const TuneTable& measured, const Options& options = {}) {
    return {k3, 2, options, capable(), {.table = measured, .note = "t.json (made up)"}};
}

TEST(TuneTable, LiesOnTheLineBetweenMeasuredNeighbours) {
    EXPECT_DOUBLE_EQ(*table().us(Tail::fused, 16), 10);
    EXPECT_DOUBLE_EQ(*table().us(Tail::fused, 40), 16);
    EXPECT_DOUBLE_EQ(*table().us(Tail::fused, 0), 8);
    EXPECT_DOUBLE_EQ(*table().us(Tail::token_parallel, 4096 + 3072), 450 + 285);
    EXPECT_FALSE(table().us(Tail::overlap, 16).has_value());
}

TEST(TuneTable, NeverMakesManyTokensCheaperThanTheLastMeasured) {
    TuneTable falling = table();
    falling.points[static_cast<std::size_t>(Tail::fused)] = {{1, 10}, {2, 9}};
    EXPECT_DOUBLE_EQ(*falling.us(Tail::fused, 1000), 9);
}

TEST(TuneTable, SaysOfATailThatWasMeasuredOnceOnlyThatOnce) {
    TuneTable once;
    once.points[static_cast<std::size_t>(Tail::fused)] = {{16, 10}};
    EXPECT_DOUBLE_EQ(*once.us(Tail::fused, 16), 10);
    EXPECT_FALSE(once.us(Tail::fused, 15).has_value());
    EXPECT_FALSE(once.us(Tail::fused, 17).has_value());
}

TEST(PlanByTable, DoesNotCarryASingleTimeToOtherNumbersOfTokens) {
    TuneTable measured = table();
    measured.points[static_cast<std::size_t>(Tail::overlap)] = {{1024, 2}};
    const Planner planner = planner_of(measured);
    EXPECT_EQ(planner.choose(1024), Tail::overlap);
    for (const std::int64_t tokens : {0, 16, 1023, 1025, 2000}) EXPECT_NE(planner.choose(tokens), Tail::overlap) << tokens;
    EXPECT_EQ(planner.choose(8192), Tail::token_parallel);

    TuneTable alone;
    alone.points[static_cast<std::size_t>(Tail::column_parallel)] = {{1, 2}};
    EXPECT_TRUE(planner_of(alone).plan(1).from_table);
    EXPECT_FALSE(planner_of(alone).plan(8192).from_table);
    EXPECT_FALSE(planner_of(alone).plan(0).from_table);
}

TEST(PlanByTable, ChoosesAtUnmeasuredTokensWhatANeighbourChooses) {
    const TuneTable measured = table();
    const Planner planner = planner_of(measured);
    const std::vector<std::int64_t> stops = measured.tokens();
    for (std::int64_t tokens = stops.front(); tokens <= stops.back(); ++tokens) {
        const auto right = std::lower_bound(stops.begin(), stops.end(), tokens);
        const auto left = *right == tokens ? right : right - 1;
        const auto choice = planner.choose(tokens);
        EXPECT_TRUE(choice == planner.choose(*left) || choice == planner.choose(*right)) << tokens;
    }
}

TEST(PlanByTable, ChangesWhereTheTimesCross) {
    const Planner planner = planner_of(table());
    EXPECT_EQ(planner.choose(0), Tail::fused);
    EXPECT_EQ(planner.choose(76), Tail::fused);            // 26.3 us against 26.5
    EXPECT_EQ(planner.choose(78), Tail::column_parallel);  // 27.0 against 26.8
    EXPECT_EQ(planner.choose(1024), Tail::column_parallel);
    EXPECT_EQ(planner.choose(4096), Tail::token_parallel);
    EXPECT_EQ(planner.choose(8192), Tail::token_parallel);
}

TEST(PlanByTable, StaysWithATailThatIsHardlySlower) {
    TuneTable noisy;
    noisy.points[static_cast<std::size_t>(Tail::column_parallel)] = {{1, 10}, {2, 10.2}, {4, 10}, {8, 10.2}, {16, 12}};
    noisy.points[static_cast<std::size_t>(Tail::replicated)] = {{1, 10.1}, {2, 10}, {4, 10.1}, {8, 10}, {16, 11}};
    const Planner planner = planner_of(noisy);
    for (std::int64_t tokens = 0; tokens <= 8; ++tokens) EXPECT_EQ(planner.choose(tokens), Tail::column_parallel) << tokens;
    EXPECT_EQ(planner.choose(16), Tail::replicated);
}

TEST(PlanByTable, ObeysCapacityAndTheUsersLimitsAgainstTheTimes) {
    Options options{.capacity_tokens = 32};
    EXPECT_EQ(planner_of(table(), options).choose(32), Tail::fused);
    EXPECT_EQ(planner_of(table(), options).choose(33), Tail::column_parallel);
    options.tail_token_limit[static_cast<std::size_t>(Tail::column_parallel)] = 40;
    EXPECT_EQ(planner_of(table(), options).choose(40), Tail::column_parallel);
    EXPECT_EQ(planner_of(table(), options).choose(41), Tail::token_parallel);
    options.tail_token_limit[static_cast<std::size_t>(Tail::fused)] = 3;
    EXPECT_EQ(planner_of(table(), options).choose(3), Tail::fused);
    EXPECT_EQ(planner_of(table(), options).choose(4), Tail::column_parallel);
    options.max_tokens = 100;
    EXPECT_FALSE(planner_of(table(), options).choose(101).has_value());
}

TEST(PlanByTable, TakesOnlyTailsWithHalvesForACallInHalves) {
    const Planner planner = planner_of(table());
    EXPECT_EQ(planner.choose(1), Tail::fused);
    EXPECT_EQ(planner.choose(1, true), Tail::column_parallel);
    EXPECT_EQ(planner.choose(4096, true), Tail::token_parallel);
}

TEST(PlanByTable, KeepsToTheFastestMeasuredOneWhereABatchInvariantCallerWantsOneTail) {
    const Planner planner = planner_of(table(), {.capacity_tokens = 8192, .batch_invariant = true});
    for (const std::int64_t tokens : {1, 64, 65, 8192}) EXPECT_EQ(planner.choose(tokens), Tail::fused) << tokens;
    const Planner small = planner_of(table(), {.batch_invariant = true});  // where fused cannot run any number
    for (const std::int64_t tokens : {1, 64, 8192}) EXPECT_EQ(small.choose(tokens), Tail::column_parallel) << tokens;
}

TEST(PlanByTable, AsksTheModelWhereNoMeasuredTailMayRun) {
    const Planner planner = planner_of(table(), {.tail = Tail::replicated});
    EXPECT_EQ(planner.choose(16), Tail::replicated);
    EXPECT_FALSE(planner.plan(16).from_table);
    EXPECT_EQ(planner.plan(16).source,
              "cost model with the constants of a test machine (table t.json (made up) has no tail that may run)");
}

TEST(PlanByTable, SaysWhereItsTimesComeFrom) {
    const Plan plan = planner_of(table()).plan(16);
    EXPECT_TRUE(plan.from_table);
    EXPECT_EQ(plan.source, "table t.json (made up)");
    EXPECT_EQ(plan.tail, Tail::fused);
    EXPECT_DOUBLE_EQ(plan.expected_us, 10);
    for (const Candidate& candidate : plan.candidates)
        EXPECT_EQ(candidate.measured, table().has(candidate.tail)) << name(candidate.tail);
}

TEST(TuneKey, NamesTheFirstFieldThatDiffers) {
    const TuneKey here = tune_key(k3, 2, {}, "a GPU", "peer memory");
    TuneKey other = here;
    EXPECT_EQ(difference(other, here), "");
    other.world = 4;
    EXPECT_EQ(difference(other, here), "its tp is 4, here it is 2");
    other.device = "another GPU";
    EXPECT_EQ(difference(other, here), "its device is another GPU, here it is a GPU");
    other = here;
    other.shared = SharedState::absent;
    EXPECT_EQ(difference(other, here), "its shared is absent, here it is partial");
}

TEST(UntriedTokens, LieBetweenThoseThatAreKnown) {
    const std::vector<std::int64_t> known{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
    const std::vector<std::int64_t> untried = untried_tokens(known, 40);
    EXPECT_EQ(untried.size(), 40U);
    EXPECT_TRUE(std::is_sorted(untried.begin(), untried.end()));
    EXPECT_LT(untried.front(), 5);
    EXPECT_GT(untried.back(), 4096);
    for (const std::int64_t tokens : untried) {
        EXPECT_EQ(std::count(known.begin(), known.end(), tokens), 0) << tokens;
        EXPECT_EQ(std::count(untried.begin(), untried.end(), tokens), 1) << tokens;
    }
    EXPECT_EQ(untried_tokens({1, 4}, 40), (std::vector<std::int64_t>{2, 3}));
    EXPECT_TRUE(untried_tokens({7}, 40).empty());
    EXPECT_TRUE(untried_tokens({}, 40).empty());
}

}  // namespace
}  // namespace latent_moe
