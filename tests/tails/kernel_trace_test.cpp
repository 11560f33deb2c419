// What is read from a trace, on kernels that are known.
#include "tails/kernel_trace.h"

#include <gtest/gtest.h>

namespace latent_moe {
namespace {

KernelRun run(double begin, double end, bool is_all_reduce = false, int device = 0) {
    return {.name = "kernel", .device = device, .is_all_reduce = is_all_reduce, .begin_us = begin, .end_us = end};
}

TEST(KernelTrace, AKernelBesideNothingIsNotHidden) {
    const std::vector<KernelRun> all = {run(0, 4), run(5, 10, true), run(10, 12)};
    EXPECT_EQ(hidden_us(all[1], all), 0);
    EXPECT_EQ(hidden_share(all), 0.0);
}

TEST(KernelTrace, TimeBesideSeveralKernelsCountsOnce) {
    const std::vector<KernelRun> all = {run(0, 10, true), run(1, 5), run(3, 6), run(4, 5), run(8, 20)};
    EXPECT_EQ(hidden_us(all[0], all), 7);  // 1 to 6 and 8 to 10
    EXPECT_EQ(hidden_share(all), 0.7);
}

TEST(KernelTrace, KernelsOfAnotherDeviceHideNothing) {
    const std::vector<KernelRun> all = {run(0, 10, true), run(0, 10, false, 1)};
    EXPECT_EQ(hidden_share(all), 0.0);
}

TEST(KernelTrace, TheShareIsThatOfAllAllReducesTogether) {
    const std::vector<KernelRun> all = {run(0, 9, true), run(0, 9), run(20, 21, true)};
    EXPECT_EQ(hidden_share(all), 0.9);
}

TEST(KernelTrace, WithoutAnAllReduceThereIsNoShare) {
    EXPECT_FALSE(hidden_share(std::vector<KernelRun>{run(0, 1)}).has_value());
}

}  // namespace
}  // namespace latent_moe
