// The fused tail's cut by measurement, over a runtime that launches nothing and takes as long for it as a test says (stub/).
#include "gpu/fused_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "gpu/runtime/resources.h"
#include "latent_moe/latent_moe.h"
#include "stub/counts.h"

namespace latent_moe::gpu {
namespace {

constexpr FusedTailShape kimi{.hidden = 7168, .latent = 3584, .world = 2, .capacity = 128};
constexpr int room = 116;

int cluster_of(const cudaLaunchConfig_t& config) {
    for (unsigned at = 0; at < config.numAttrs; ++at) {
        if (config.attrs[at].id == cudaLaunchAttributeClusterDimension)
            return static_cast<int>(config.attrs[at].val.clusterDim.x);
    }
    return 0;
}

FusedTailPlan estimated(std::int64_t tokens, int most_ctas = room) {
    FusedTailPlan plan;
    EXPECT_EQ(plan_fused_tail(kimi, tokens, most_ctas, &plan), cudaSuccess);
    return plan;
}

/// What each of two ranks takes, in whose threads a kernel takes as long as its function says.
std::vector<std::vector<MeasuredCut>> measured_by(test::KernelTime first, test::KernelTime second) {
    std::vector<std::vector<MeasuredCut>> found(2);
    run_thread_ranks(2, [&](const Bootstrap& boot) {
        const CurrentDevice device(boot.rank);
        test::kernel_time() = boot.rank == 0 ? first : second;
        const Stream stream = make_stream();
        const auto run = [&](const FusedTailPlan& plan, int) {
            cudaLaunchAttribute cluster{};
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim = {static_cast<unsigned>(plan.split), 1, 1};
            cudaLaunchConfig_t config{};
            config.attrs = &cluster, config.numAttrs = 1;
            config.gridDim = dim3(static_cast<unsigned>(fused_tail_grid(plan)));
            EXPECT_EQ(cudaLaunchKernelExC(&config, nullptr, nullptr), cudaSuccess);
        };
        const auto plans = cuts_to_try(kimi, 16, room, estimated(16));
        found[static_cast<std::size_t>(boot.rank)] = measure_cuts(boot, plans, run, stream.get());
        test::kernel_time() = nullptr;
    });
    return found;
}

TEST(CutsToTry, BeginWithTheEstimatedOneAndHaveNoMoreCtas) {
    // 115: the estimated one has no room for a cluster that receives.
    for (const auto& [tokens, most_ctas] : {std::pair{1, room}, {16, room}, {17, room}, {64, room}, {128, room}, {1, 115}}) {
        const FusedTailPlan first = estimated(tokens, most_ctas);
        const auto plans = cuts_to_try(kimi, tokens, most_ctas, first);
        ASSERT_GE(plans.size(), 4U);
        EXPECT_EQ(plans.front(), first);
        for (std::size_t at = 0; at < plans.size(); ++at) {
            EXPECT_EQ(plans[at].tokens, first.tokens);
            EXPECT_LE(fused_tail_grid(plans[at]), fused_tail_grid(first));
            EXPECT_EQ(fused_tail_fits(kimi, plans[at]), cudaSuccess) << name_of(plans[at]);
            EXPECT_EQ(std::find(plans.begin(), plans.end(), plans[at]) - plans.begin(), static_cast<long>(at));
        }
        EXPECT_TRUE(std::ranges::any_of(plans, [&](const FusedTailPlan& plan) { return plan.split != first.split; }));
    }
}

TEST(MeasuredCuts, TheFastestIsTakenOnEveryRank) {
    const auto two_is_fastest = [](const cudaLaunchConfig_t& config) { return cluster_of(config) == 2 ? 5.0 : 10.0; };
    ASSERT_EQ(estimated(16).split, 4);
    for (const auto& of_rank : measured_by(two_is_fastest, two_is_fastest)) {
        EXPECT_EQ(of_rank.front().plan.split, 2);
        EXPECT_NEAR(of_rank.front().us, 5, 1e-3);
        EXPECT_EQ(of_rank.size(), cuts_to_try(kimi, 16, room, estimated(16)).size());
    }
}

TEST(MeasuredCuts, TheSlowestRankCounts) {
    const auto found = measured_by([](const cudaLaunchConfig_t& config) { return cluster_of(config) == 2 ? 5.0 : 10.0; },
                                   [](const cudaLaunchConfig_t& config) { return cluster_of(config) == 2 ? 20.0 : 10.0; });
    for (const auto& of_rank : found) {
        EXPECT_EQ(of_rank.front().plan, estimated(16));
        EXPECT_NEAR(of_rank.front().us, 10, 1e-3);
    }
}

TEST(MeasuredCuts, NoiseChangesNobodysBits) {
    const auto hardly = [](const cudaLaunchConfig_t& config) { return cluster_of(config) == 2 ? 9.8 : 10.0; };
    for (const auto& of_rank : measured_by(hardly, hardly)) EXPECT_EQ(of_rank.front().plan, estimated(16));
}

TEST(MeasuredCuts, RanksThatWouldTryOthersRunNone) {
    run_thread_ranks(2, [&](const Bootstrap& boot) {
        const Stream stream = make_stream();
        int calls = 0;
        const auto measured = measure_cuts(
            boot, cuts_to_try(kimi, 16, boot.rank == 0 ? room : 64, estimated(16)),
            [&](const FusedTailPlan&, int) { ++calls; }, stream.get());
        ASSERT_EQ(measured.size(), 1U);
        EXPECT_EQ(measured.front().plan, estimated(16));
        EXPECT_EQ(calls, 0);
    });
}

/// Clusters of the kernel that a call of 16 tokens is, in a context made with LATENT_MOE_MEASURE_FUSED so; and once it has
/// been suspended and resumed.
std::vector<int> clusters_of_calls(const char* measures) {
    static thread_local std::vector<int> launched;
    std::vector<int> found;
    if (measures != nullptr) ::setenv("LATENT_MOE_MEASURE_FUSED", measures, 1);
    run_thread_ranks(2, [&](const Bootstrap& boot) {
        test::kernel_time() = [](const cudaLaunchConfig_t& config) {
            launched.push_back(cluster_of(config));
            return launched.back() == 2 ? 5.0 : 10.0;
        };
        const Shape shape{.hidden = 7168, .latent = 3584};
        Context context = Context::create(shape, boot, {.backend = "cuda", .max_tokens = 64});
        const DeviceMemory weights(static_cast<std::size_t>(shape.hidden * shape.latent) * 2, "weights");
        const DeviceMemory rows(static_cast<std::size_t>(shape.hidden) * 16 * 2, "rows");
        const DeviceMemory out(static_cast<std::size_t>(shape.hidden) * 16 * 2, "rows");
        const Layer layer = context.add_layer(0, {.data = weights.get(), .rows = shape.hidden}, weights.get());
        context.seal();
        const auto call = [&] {
            const Stream stream = make_stream();
            launched.clear();
            const Status status = layer.run(Tail::fused, {.routed = {rows.get()}, .shared = {rows.get()}, .tokens = 16},
                                            Rows{out.get()}, stream.get());
            EXPECT_TRUE(status.ok()) << status.message();
            EXPECT_EQ(launched.size(), 1U);
            if (boot.rank == 0) found.push_back(launched.back());
        };
        call();
        context.suspend();
        context.resume();
        call();
        test::kernel_time() = nullptr;
    });
    ::unsetenv("LATENT_MOE_MEASURE_FUSED");
    return found;
}

TEST(AContextOnGpus, TakesTheEstimatedCut) {
    EXPECT_EQ(clusters_of_calls(nullptr), (std::vector{4, 4}));
    EXPECT_EQ(clusters_of_calls("0"), (std::vector{4, 4}));
}

TEST(AContextOnGpus, TakesTheMeasuredCutWhereItIsAskedToAndKeepsIt) {
    EXPECT_EQ(clusters_of_calls("1"), (std::vector{2, 2}));
}

TEST(AContextOnGpus, RefusesAVariableThatIsNoNumber) {
    try {
        clusters_of_calls("maybe");
        ADD_FAILURE() << "was not refused";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("LATENT_MOE_MEASURE_FUSED is 'maybe', expected a whole number"),
                  std::string::npos)
            << error.what();
    }
    ::unsetenv("LATENT_MOE_MEASURE_FUSED");
}

}  // namespace
}  // namespace latent_moe::gpu
