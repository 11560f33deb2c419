#include "core/planner.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "gpu/known_devices.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

constexpr Shape k3{.hidden = 7168, .latent = 3584};

Capabilities capable() {
    return {.machine = {.description = "a test machine",
                        .memory_bytes_per_us = 4.49e6,
                        .flops_per_us = 790e6,
                        .wire_bytes_per_us = 369e3,
                        .hop_us = 0.67,
                        .launch_us = 0.51,
                        .collective_us = 3},
            .concurrent_lanes = true,
            .concurrent_lanes_reason = "no lanes here",
            .fused = true,
            .whole_weights = true};
}

std::string reason(const Planner& planner, Tail tail, std::int64_t tokens) {
    return planner.refusal(tail, tokens);
}

TEST(Plan, RefusesWithOneReasonForEveryGate) {
    EXPECT_EQ(reason({k3, 1, {}, capable()}, Tail::column_parallel, 4),
              "there is one rank, so nothing to exchange: replicated is the whole job");
    EXPECT_EQ(reason({k3, 2, {.shared = SharedState::absent}, capable()}, Tail::overlap, 4),
              "there is no shared partial whose reduction could overlap");
    EXPECT_EQ(reason({k3, 2, {.shared = SharedState::reduced}, capable()}, Tail::overlap, 4),
              "the shared partial is already reduced, so there is nothing to overlap");
    EXPECT_EQ(
        reason({*shape_preset("nemotron-3-ultra"), 2, {.shared = SharedState::reduced}, capable()}, Tail::late_reduce, 4),
        "the shared partial is already reduced, and this tail would sum it over the ranks again");
    EXPECT_EQ(reason({k3, 3, {}, capable()}, Tail::fused, 4),
              "hidden 7168 is not divisible by 3 ranks, so the rows of W_up cannot be split evenly");
    EXPECT_EQ(reason({k3, 2, {}, capable()}, Tail::late_reduce, 4),
              "the norm needs the summed latent before the projection");
    EXPECT_EQ(reason({k3, 2, {}, capable()}, Tail::fused, 129), "129 tokens exceed the capacity of 128 tokens");
    EXPECT_EQ(reason({k3, 2, {}, capable()}, Tail::replicated, 8193), "8193 tokens exceed max_tokens 8192");
    EXPECT_EQ(reason({k3, 2, {.sequence_parallel = true}, capable()}, Tail::fused, 4),
              "a sequence-parallel caller wants its own tokens only: token_parallel stops before the gather");
    EXPECT_EQ(reason({k3, 2, {.tail = Tail::fused}, capable()}, Tail::overlap, 4), "the options ask for fused only");

    // Gates of engines that have reducers of their own.
    EXPECT_EQ(reason({k3, 2, {.custom_all_reduce = false}, capable()}, Tail::fused, 4),
              "custom all-reduce is switched off, and this tail has one inside");
    EXPECT_EQ(reason({k3, 2, {.other_reducer_from_bytes = 1 << 20}, capable()}, Tail::fused, 73), "");
    EXPECT_EQ(reason({k3, 2, {.other_reducer_from_bytes = 1 << 20}, capable()}, Tail::fused, 74),
              "a summand of 1060864 bytes belongs to another reducer, which takes precedence from 1048576 on");
    Capabilities bounded = capable();
    bounded.one_stage_bytes = 128 << 10;
    bounded.not_captured_reason = "nobody has seen it";
    EXPECT_EQ(reason({k3, 8, {}, bounded}, Tail::fused, 18), "");
    EXPECT_EQ(reason({k3, 8, {}, bounded}, Tail::fused, 19),
              "136192 bytes of latents exceed the 131072 that may go to every one of 8 ranks in one stage");
    EXPECT_EQ(reason({k3, 8, {.captured = true}, bounded}, Tail::overlap, 4),
              "the calls are to be captured, and nobody has seen it");
    EXPECT_EQ(reason({k3, 8, {.captured = true}, bounded}, Tail::fused, 4), "");
    EXPECT_EQ(reason({k3, 1, {.captured = true}, bounded}, Tail::replicated, 4), "");

    Capabilities shards_only = capable();
    shards_only.whole_weights = false;
    EXPECT_EQ(reason({k3, 2, {}, shards_only}, Tail::token_parallel, 4),
              "it needs the whole W_up on every rank (51.4 MB a layer instead of 25.7); keep_whole_weights is off");
    EXPECT_EQ(reason({k3, 2, {}, shards_only}, Tail::column_parallel, 4), "");
    EXPECT_EQ(reason({k3, 1, {}, shards_only}, Tail::replicated, 4), "");

    Capabilities one_lane = capable();
    one_lane.concurrent_lanes = false;
    EXPECT_EQ(reason({k3, 2, {}, one_lane}, Tail::overlap, 4), "no lanes here");
    Capabilities no_kernel = capable();
    no_kernel.fused = false;
    no_kernel.fused_reason = "no kernel";
    EXPECT_EQ(reason({k3, 2, {}, no_kernel}, Tail::fused, 4), "no kernel");
}

TEST(Plan, ObeysAUsersTokenLimitAgainstTheCosts) {
    Options options;
    const Planner free(k3, 2, options, capable());
    ASSERT_EQ(free.choose(32), Tail::fused);
    options.tail_token_limit[static_cast<std::size_t>(Tail::fused)] = 16;
    const Planner limited(k3, 2, options, capable());
    EXPECT_EQ(limited.choose(16), Tail::fused);
    EXPECT_NE(limited.choose(17), Tail::fused);
    EXPECT_EQ(limited.refusal(Tail::fused, 17), "17 tokens exceed the limit of 16 tokens that the options set for it");
}

TEST(Plan, LeavesTheFusedTailWhereItNoLongerPaysThoughTheCapacityGoesOn) {
    Capabilities h200 = capable();
    h200.machine = gpu::known_device("h200")->of(2);
    const Planner planner(k3, 2, {.capacity_tokens = 1024}, h200);
    EXPECT_EQ(planner.choose(16), Tail::fused);
    EXPECT_EQ(planner.refusal(Tail::fused, 1024), "");
    EXPECT_NE(planner.choose(1024), Tail::fused);
}

TEST(Plan, AsksTheGroupThatIsReducedOver) {
    // An expert-parallel caller with tensor-parallel size 1: the group that is summed over has 8 ranks, and that is what
    // counts.
    const Planner planner(k3, 8, {.shared = SharedState::reduced, .expert_parallel = true}, capable());
    EXPECT_EQ(planner.refusal(Tail::fused, 4), "");
    EXPECT_TRUE(planner.choose(4).has_value());
}

TEST(Plan, ListsEveryTailOnceAndTheCheapestFirst) {
    const Planner planner(k3, 4, {}, capable());
    for (const std::int64_t tokens : {0, 1, 64, 512, 8192}) {
        const Plan plan = planner.plan(tokens);
        EXPECT_EQ(plan.candidates.size() + plan.refused.size(), static_cast<std::size_t>(tail_count));
        ASSERT_FALSE(plan.candidates.empty());
        EXPECT_EQ(plan.tail, plan.candidates.front().tail);
        EXPECT_EQ(planner.choose(tokens), plan.tail);
        EXPECT_TRUE(std::is_sorted(
            plan.candidates.begin(), plan.candidates.end(),
            [](const Candidate& left, const Candidate& right) { return left.expected_us < right.expected_us; }));
        for (const Refusal& refusal : plan.refused) EXPECT_FALSE(refusal.reason.empty());
    }
}

TEST(Plan, PrefersFewerWeightBytesForFewTokensAndFewerWireBytesForMany) {
    Capabilities capabilities = capable();
    capabilities.fused = false;
    const Planner planner(k3, 2, {}, capabilities);
    EXPECT_EQ(planner.choose(8192), Tail::token_parallel);
    Options no_overlap;
    no_overlap.tail_token_limit[static_cast<std::size_t>(Tail::overlap)] = -1;
    EXPECT_EQ(Planner(k3, 8, no_overlap, capabilities).choose(128), Tail::column_parallel);
}

TEST(Shapes, AreCheckedFieldByField) {
    const auto message = [](const Shape& shape) -> std::string {
        try {
            validate(shape);
        } catch (const Error& error) {
            return error.what();
        }
        return {};
    };
    EXPECT_EQ(message(k3), "");
    EXPECT_EQ(message({.hidden = 7169, .latent = 8}), "hidden is 7169, expected a multiple of 8 from 8 to 1048576");
    EXPECT_EQ(message({.hidden = 8, .latent = 0}), "latent is 0, expected a multiple of 8 from 8 to 1048576");
    EXPECT_EQ(message({.hidden = 8, .latent = 8, .epsilon = -1}), "epsilon is -1, expected a finite number of at least 0");
    EXPECT_EQ(message({.hidden = 8, .latent = 8, .activations = Dtype::e4m3}),
              "activations are e4m3, expected bf16, f16 or f32");
}

TEST(Shapes, HavePresetsForTheModels) {
    EXPECT_EQ(shape_preset("kimi-k3"), k3);
    EXPECT_EQ(shape_preset("nemotron-3-super")->norm, Norm::none);
    EXPECT_EQ(shape_preset("nemotron-3-ultra")->latent, 2048);
    EXPECT_FALSE(shape_preset("kimi-k2").has_value());
    EXPECT_EQ(shape_preset_names().size(), 3U);
}

}  // namespace
}  // namespace latent_moe
