// The row all-reduce, its own source, with threads as ranks × CTAs × waves. Bits are compared with a plain sum.
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/protocol/small_all_reduce.h"

namespace latent_moe::gpu {
namespace {

using namespace small;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int calls_of_all_ranks = 80;  // a call costs ten times as much
#else
constexpr int calls_of_all_ranks = 600;
#endif

/// Rows of each call: none, all, and anything between, in jumps.
std::vector<std::uint32_t> rows_of_calls(std::size_t calls) {
    std::mt19937 random(17);
    std::vector<std::uint32_t> rows(calls);
    for (std::uint32_t& r : rows) {
        r = random() % 4 == 0 ? capacity : static_cast<std::uint32_t>(random() % (capacity + 1));
    }
    return rows;
}

class AllReduceOnHostThreads : public testing::TestWithParam<Config> {};

TEST_P(AllReduceOnHostThreads, GivesThePlainSumWhileTheRowsShrinkAndGrow) {
    const Config c = GetParam();
    const std::vector<std::uint32_t> rows = rows_of_calls(static_cast<std::size_t>(calls_of_all_ranks / c.world));
    emulated::Windows windows = windows_for(c);
    std::vector<Tensors> tensors(static_cast<std::size_t>(c.world));
    emulated::run(c.world, {most_ctas, threads}, [&](int rank, emulated::Stream& stream) {
        Tensors& t = tensors[static_cast<std::size_t>(rank)];
        const Exchange x = windows.exchange(rank, 10 * minutes);
        for (std::uint32_t call = 0; call < rows.size(); ++call) {
            const std::uint32_t units = rows[call] * row_units;
            stream.launch_in_order({2, threads}, [&] {  // a producer, which also looks at what the call before left
                const std::uint32_t before = call == 0 ? 0 : rows[call - 1] * row_units;
                for_own_units(before, [&](std::uint32_t i) {
                    if (!same_bits(t.y[i], plain_sum(c.world, call - 1, i))) ++t.wrong;
                });
                for_own_units(units, [&](std::uint32_t i) { t.x[i] = summand_unit(rank, call, i); });
            });
            stream.launch({ctas_for(rows[call]), threads}, [&] { all_reduce(c, params(x, t, rows[call])); });
        }
    });
    for (int r = 0; r < c.world; ++r) {
        EXPECT_EQ(tensors[static_cast<std::size_t>(r)].wrong, 0) << "rank " << r;
        EXPECT_EQ(windows.record(r).code, 0U) << "rank " << r << ": expected no fault";
    }
}

INSTANTIATE_TEST_SUITE_P(, AllReduceOnHostThreads,
                         testing::Values(Config{1, 1}, Config{2, 1}, Config{2, 2}, Config{3, 1}, Config{3, 2}, Config{4, 1},
                                         Config{4, 2}, Config{5, 2}, Config{6, 1}, Config{7, 2}, Config{8, 1}, Config{8, 2}),
                         name_of);

}  // namespace
}  // namespace latent_moe::gpu
