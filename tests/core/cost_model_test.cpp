// The formulas of docs/cost-model.md: that they say what was measured, and that they move as a machine does.
#include "core/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu/known_devices.h"

namespace latent_moe {
namespace {

constexpr Shape k3{.hidden = 7168, .latent = 3584};

Machine h200(int world = 2) {
    return gpu::known_device("h200")->of(world);
}

CostedCall call(std::int64_t tokens, int world = 2) {
    return {.shape = k3, .world = world, .tokens = tokens};
}

double us(Tail tail, std::int64_t tokens, int world = 2) {
    return expected_us(tail, call(tokens, world), h200(world));
}

TEST(Floor, IsTheDesignsForTheFusedTail) {
    const auto floor = [](std::int64_t tokens) { return floor_us(2, work_of(Tail::fused, call(tokens)), h200()); };
    EXPECT_NEAR(floor(1), 6.9, 0.05);
    EXPECT_NEAR(floor(128), 8.6, 0.1);
    EXPECT_NEAR(floor(4096), 239.9, 0.5);  // the columns' bytes; with those of token_parallel it is 199.6
}

TEST(Floor, GoesByTheBestThatWasSeenAndThePlanByWhatIsUsual) {
    Machine machine = h200();
    machine.best = {};
    const Work work = work_of(Tail::fused, call(1024));
    const double usual = floor_us(2, work, machine);
    machine.best = {.flops_per_us = 2 * machine.flops_per_us,
                    .wire_bytes_per_us = 2 * machine.wire_bytes_per_us,
                    .hop_us = machine.hop_us / 2,
                    .launch_us = machine.launch_us / 2};
    EXPECT_NEAR(floor_us(2, work, machine), usual / 2, 1e-9);
    EXPECT_EQ(expected_us(Tail::fused, call(1024), machine), us(Tail::fused, 1024));
}

// docs/performance.md: TP 2, Kimi-K3. scripts/check-cost-model compares every point; here are a few, so that a formula that
// is broken is seen at once.
TEST(CostModel, SaysWhatWasMeasuredOnTwoH200) {
    struct Point {
        Tail tail;
        std::int64_t tokens;
        double measured_us;
    };
    const std::vector<Point> points = {
        {Tail::replicated, 1, 24.2},         {Tail::replicated, 256, 55.6},
        {Tail::replicated, 4096, 632.3},     {Tail::overlap, 1, 22.1},
        {Tail::overlap, 256, 56.7},          {Tail::overlap, 4096, 692.6},
        {Tail::column_parallel, 1, 14.8},    {Tail::column_parallel, 64, 22.2},
        {Tail::column_parallel, 256, 45.9},  {Tail::column_parallel, 4096, 425.5},
        {Tail::token_parallel, 1, 28.7},     {Tail::token_parallel, 256, 61.2},
        {Tail::token_parallel, 4096, 509.8},
    };
    for (const Point& point : points) {
        EXPECT_NEAR(us(point.tail, point.tokens) / point.measured_us, 1, 0.15) << name(point.tail) << " at " << point.tokens;
    }
    const auto fused = [](std::int64_t tokens, bool early) {
        CostedCall costed = call(tokens);
        costed.starts_early = early;
        Machine machine = h200();
        machine.reached.pooled_from_tokens = max_tokens_limit + 1;  // as the kernel was
        return expected_us(Tail::fused, costed, machine);
    };
    EXPECT_NEAR(fused(1, true) / 7.97, 1, 0.15);
    EXPECT_NEAR(fused(16, true) / 9.7, 1, 0.15);
    EXPECT_NEAR(fused(128, true) / 44.7, 1, 0.15);
    EXPECT_NEAR(fused(1, false) / 9.53, 1, 0.15);
    EXPECT_NEAR(fused(16, false) / 11.1, 1, 0.15);
}

TEST(CostModel, OfTheFusedTailReadsTheSumOfTheLatentsWhereTheyArePooled) {
    Machine apart = h200();
    apart.reached.pooled_from_tokens = max_tokens_limit + 1;
    EXPECT_EQ(us(Tail::fused, 16), expected_us(Tail::fused, call(16), apart));
    EXPECT_LT(us(Tail::fused, 128), 0.7 * expected_us(Tail::fused, call(128), apart));
}

TEST(CostModel, NeverPromisesLessThanTheFloor) {
    for (const int world : {2, 4, 8, 16}) {
        for (const std::int64_t tokens : {1, 16, 128, 1024, 8192}) {
            for (int index = 0; index < tail_count; ++index) {
                const auto tail = static_cast<Tail>(index);
                EXPECT_GE(us(tail, tokens, world), floor_us(world, work_of(tail, call(tokens, world)), h200()))
                    << name(tail) << " at " << tokens << " on " << world;
            }
        }
    }
}

TEST(CostModel, CountsWhatCrossesTheWire) {
    const double latents = 8 * 3584 * 2;
    const double hiddens = 8 * 7168 * 2;
    const auto wire = [](Tail tail, SharedState shared) {
        return work_of(tail, {.shape = k3, .world = 4, .tokens = 8, .shared = shared}).wire_bytes;
    };
    EXPECT_DOUBLE_EQ(wire(Tail::replicated, SharedState::partial), 1.5 * (latents + hiddens));
    EXPECT_DOUBLE_EQ(wire(Tail::replicated, SharedState::reduced), 1.5 * latents);
    EXPECT_DOUBLE_EQ(wire(Tail::column_parallel, SharedState::partial), 1.5 * (latents + hiddens));
    EXPECT_DOUBLE_EQ(wire(Tail::column_parallel, SharedState::absent), 1.5 * latents + 0.75 * hiddens);
    EXPECT_DOUBLE_EQ(wire(Tail::token_parallel, SharedState::partial), 0.75 * (latents + 2 * hiddens));
    EXPECT_DOUBLE_EQ(wire(Tail::fused, SharedState::partial), 3 * latents + 1.5 * hiddens);
    EXPECT_DOUBLE_EQ(work_of(Tail::replicated, {.shape = k3, .world = 1, .tokens = 8}).wire_bytes, 0);
}

TEST(CostModel, OfOneRankIsItsOperationsAndItsProductAlone) {
    const Machine plain{
        .memory_bytes_per_us = 1e6, .flops_per_us = 1e12, .wire_bytes_per_us = 1, .hop_us = 1e9, .launch_us = 3};
    const double bytes = 2.0 * 7168 * 3584 + 2.0 * (3584 + 2 * 7168);
    EXPECT_NEAR(expected_us(Tail::replicated, call(1, 1), plain), 2 * 3 + bytes / 1e6, 1e-3);
}

TEST(KnownDevices, AreRatesOfTheirSheetsAndSayWhereTheyComeFrom) {
    const MachineKind measured = *gpu::known_device("h200");
    EXPECT_EQ(measured.origin.find("data sheet"), std::string::npos);
    for (const MachineKind& kind : gpu::known_devices()) {
        if (kind.name != "h200") {
            EXPECT_NE(kind.origin.find("from its data sheet"), std::string::npos) << kind.name;
        }
    }
    EXPECT_NEAR(gpu::known_device("b200")->machine.memory_bytes_per_us / measured.machine.memory_bytes_per_us, 8 / 4.8,
                1e-9);
    EXPECT_NEAR(gpu::known_device("h100")->machine.wire_bytes_per_us, measured.machine.wire_bytes_per_us, 1e-9);
    EXPECT_FALSE(gpu::known_device("h300").has_value());
}

TEST(KnownDevices, HaveALinkToEveryPeerOrOneWireForAll) {
    const MachineKind mesh = *gpu::known_device("mi300x");
    EXPECT_NEAR(mesh.of(2).wire_bytes_per_us * 7, mesh.of(8).wire_bytes_per_us, 1e-6);
    EXPECT_EQ(mesh.of(16).wire_bytes_per_us, mesh.of(8).wire_bytes_per_us);  // there are no more links
    EXPECT_EQ(gpu::known_device("h200")->of(2), gpu::known_device("h200")->of(8));
}

TEST(Machines, GiveEachOfTheRanksOnOneDeviceItsPart) {
    const Machine half = h200().shared_by(2);
    EXPECT_EQ(half.memory_bytes_per_us, h200().memory_bytes_per_us / 2);
    EXPECT_EQ(half.best.flops_per_us, h200().best.flops_per_us / 2);
    EXPECT_EQ(half.launch_us, h200().launch_us);
}

}  // namespace
}  // namespace latent_moe
