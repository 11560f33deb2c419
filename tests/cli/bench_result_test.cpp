// What `bench` makes of its rows.
#include "cli/bench_result.h"

#include <gtest/gtest.h>

namespace latent_moe::cli {
namespace {

BenchRow row(const char* tail, std::int64_t tokens, double us, bool external = false, InputState inputs = InputState::raw) {
    BenchRow made{
        .tail = tail, .backend = external ? "other" : "cuda", .external = external, .inputs = inputs, .tokens = tokens};
    made.timing.median_us = us;
    made.floor_us = 5;
    return made;
}

TEST(StepGains, CompareTheFastestTailWithEveryExternalRow) {
    const std::vector<BenchRow> rows = {row("fused", 1, 8), row("overlap", 1, 20), row("external:a", 1, 30, true),
                                        row("external:b", 1, 45, true)};
    const std::vector<StepGain> gains = step_gains(rows, {1}, {23.86});
    ASSERT_EQ(gains.size(), 2U);
    EXPECT_EQ(gains[0].tail, "fused");
    EXPECT_EQ(gains[0].baseline, "external:a");
    EXPECT_NEAR(gains[0].saved_ms, 22 * 92 / 1e3, 1e-9);
    EXPECT_NEAR(gains[1].candidate_tpot_ms(), 23.86 - 37 * 92 / 1e3, 1e-9);
    EXPECT_NEAR(gains[1].baseline_tokens_per_s(), 41.91, 0.01);
    EXPECT_NEAR(gains[1].tokens_per_s(), 48.88, 0.01);
    EXPECT_NEAR(gains[1].percent(), 16.6, 0.1);
}

TEST(StepGains, CompareRowsWithFreshInputsWhereThereAreAny) {
    const std::vector<BenchRow> rows = {
        row("fused", 1, 8), row("external:a", 1, 30, true), row("fused", 1, 9, false, InputState::fresh_late),
        row("fused", 1, 6, false, InputState::cooperating), row("external:a", 1, 29, true, InputState::fresh_late)};
    const std::vector<StepGain> gains = step_gains(rows, {1}, {});
    ASSERT_EQ(gains.size(), 1U);
    EXPECT_EQ(gains[0].inputs, InputState::fresh_late);
    EXPECT_EQ(gains[0].tail_us, 9);
    EXPECT_EQ(gains[0].baseline_us, 29);
    EXPECT_EQ(gains[0].tpot_ms, 0);
}

TEST(StepGains, TakeEachNumberOfTokensItsOwnTpot) {
    const std::vector<BenchRow> rows = {row("fused", 1, 8), row("external:a", 1, 30, true), row("fused", 8, 9),
                                        row("external:a", 8, 31, true), row(product_row, 8, 1)};
    const std::vector<StepGain> gains = step_gains(rows, {1, 8, 16}, {20, 30, 40});
    ASSERT_EQ(gains.size(), 2U);
    EXPECT_EQ(gains[0].tpot_ms, 20);
    EXPECT_EQ(gains[1].tpot_ms, 30);
    EXPECT_EQ(gains[1].tail, "fused");  // a product alone is no tail
}

TEST(StepGains, HaveNoTpotWhereAStepWouldTakeLessThanNothing) {
    const std::vector<StepGain> gains = step_gains({row("fused", 1, 8), row("external:a", 1, 30, true)}, {1}, {2});
    ASSERT_EQ(gains.size(), 1U);
    EXPECT_FALSE(gains[0].has_tpot());
    EXPECT_TRUE(step_gains({row("fused", 1, 8), row("external:a", 1, 30, true)}, {1}, {3})[0].has_tpot());
    EXPECT_FALSE(step_gains({row("fused", 1, 8), row("external:a", 1, 30, true)}, {1}, {})[0].has_tpot());
}

TEST(BenchResult, NotesARefusalOnce) {
    BenchResult result;
    result.refuse("fused", "first");
    result.refuse("fused", "second");
    ASSERT_EQ(result.refused.size(), 1U);
    EXPECT_EQ(result.refused[0].reason, "first");
}

}  // namespace
}  // namespace latent_moe::cli
