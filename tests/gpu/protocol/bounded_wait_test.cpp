// What ends a wait, and what it leaves behind. Nothing here depends on how long anything took: time is counted
// (emulated_gpu.h), and a wait that should not be there would be one of an hour.
#include <array>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/protocol/small_all_reduce.h"

namespace latent_moe::gpu {
namespace {

using namespace small;

constexpr std::uint64_t soon = 200 * emulated::tick_ns, an_hour = 3'600'000'000'000;
constexpr uint4 untouched{1, 2, 3, 4};

struct Outcome {
    std::uint32_t fault_word, epoch;
    FaultRecord record;
};

/// Ranks run `rows[rank]` calls one after the other; the first may wait `soon`, all others an hour.
class BoundedWait : public testing::TestWithParam<Config> {
protected:
    const Config config = GetParam();
    emulated::Windows windows = windows_for(config);
    std::vector<Tensors> tensors = std::vector<Tensors>(static_cast<std::size_t>(config.world));

    void run(const std::vector<std::vector<std::uint32_t>>& rows, std::int32_t layer_of_last_rank = 0) {
        for (Tensors& t : tensors) std::fill(t.y.begin(), t.y.end(), untouched);
        emulated::run(config.world, {most_ctas, threads}, [&](int rank, emulated::Stream& stream) {
            Tensors& t = tensors[static_cast<std::size_t>(rank)];
            std::uint64_t timeout = soon;
            for (const std::uint32_t m : rows[static_cast<std::size_t>(rank)]) {
                Exchange x = windows.exchange(rank, timeout);
                x.layer = rank == config.world - 1 ? layer_of_last_rank : 0;
                stream.launch({ctas_for(m), threads}, [&] { all_reduce(config, params(x, t, m)); });
                timeout = an_hour;
            }
        });
    }

    Outcome outcome(int rank) {
        const Control& c = *static_cast<const Control*>(windows.base(rank));
        return {c.fault, c.epoch[0], windows.record(rank)};
    }
    bool output_is_untouched(int rank) {
        const auto& y = tensors[static_cast<std::size_t>(rank)].y;
        return std::all_of(y.begin(), y.end(), [](uint4 v) { return same_bits(v, untouched); });
    }
};

TEST_P(BoundedWait, ARankThatNeverCallsEndsAllOthersInOneTimeoutAndIsNamed) {
    std::vector<std::vector<std::uint32_t>> rows(static_cast<std::size_t>(config.world), {5, 12, 0, 3, 12});
    const int missing = config.world - 1;
    rows.back().clear();
    run(rows);
    for (int r = 0; r < missing; ++r) {
        const Outcome o = outcome(r);
        EXPECT_EQ(o.record.code, static_cast<std::uint32_t>(FaultCode::timeout)) << "rank " << r;
        // In two stages a rank may wait for one that is there, and itself waits for the missing one.
        if (config.stages == 1) {
            EXPECT_EQ(o.record.rank, missing) << "rank " << r;
        }
        EXPECT_NE(o.record.rank, r) << "rank " << r;
        EXPECT_NE(o.record.phase, static_cast<std::uint32_t>(Phase::none)) << "rank " << r;
        EXPECT_EQ(o.record.call, 0U) << "rank " << r;
        EXPECT_NE(o.fault_word, 0U) << "rank " << r;
        // The later calls left at once: they took no number, wrote nothing, and did not wait their hour.
        EXPECT_EQ(o.epoch, 1U) << "rank " << r;
        EXPECT_TRUE(output_is_untouched(r)) << "rank " << r;
    }
    EXPECT_NE(outcome(missing).fault_word, 0U) << "the missing rank was told, should it still come";
}

TEST_P(BoundedWait, ARankThatComesAfterwardsLeavesAtOnceAndTellsItsHost) {
    std::vector<std::vector<std::uint32_t>> rows(static_cast<std::size_t>(config.world), {4});
    rows.back().clear();
    run(rows);
    for (auto& r : rows) r.clear();
    rows.back() = {4};
    run(rows);
    const int late = config.world - 1;
    EXPECT_EQ(outcome(late).record.code, static_cast<std::uint32_t>(FaultCode::timeout));
    if (config.stages == 1) {
        EXPECT_EQ(outcome(late).record.rank, late);
    }
    EXPECT_EQ(outcome(late).epoch, 0U);
    EXPECT_TRUE(output_is_untouched(late));
}

TEST_P(BoundedWait, RanksThatDifferInLayerAllFailAndOfTwoBothNameTheOther) {
    const std::vector<std::vector<std::uint32_t>> rows(static_cast<std::size_t>(config.world), {6, 6, 6});
    run(rows, 9);
    for (int r = 0; r < config.world; ++r) {
        const Outcome o = outcome(r);
        ASSERT_EQ(o.record.code, static_cast<std::uint32_t>(FaultCode::mismatch)) << "rank " << r;
        EXPECT_NE(o.record.rank, r) << "rank " << r;
        // A rank that was told by another, and found nothing itself, may name the one that told it.
        if (config.world == 2) {
            EXPECT_EQ(o.record.rank, 1 - r);
        }
        EXPECT_NE(o.fault_word, 0U) << "rank " << r;
    }
}

TEST_P(BoundedWait, AnAbortByTheHostEndsEveryRank) {
    const std::uint32_t word = abort_word(0);
    store_relaxed(&static_cast<Control*>(windows.base(0))->fault, word);
    run(std::vector<std::vector<std::uint32_t>>(static_cast<std::size_t>(config.world), {7, 7}));
    for (int r = 0; r < config.world; ++r) {
        EXPECT_EQ(outcome(r).record.code, static_cast<std::uint32_t>(FaultCode::aborted)) << "rank " << r;
        EXPECT_EQ(outcome(r).record.rank, 0) << "rank " << r;
    }
}

INSTANTIATE_TEST_SUITE_P(, BoundedWait, testing::Values(Config{2, 1}, Config{3, 1}, Config{3, 2}), name_of);

}  // namespace
}  // namespace latent_moe::gpu
