// What `info --measure` makes of its times.
#include "cli/measure_machine.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "gpu/known_devices.h"

namespace latent_moe::cli {
namespace {

constexpr MachineProbes probes{
    .shape = {.hidden = 7168, .latent = 3584}, .world = 2, .narrow_hidden = 1792, .large_tokens = 4096, .many_tokens = 1024};

MachineKind assumed() {
    MachineKind kind = *gpu::known_device("h200");
    kind.machine.memory_bytes_per_us = 1;
    kind.machine.flops_per_us = 1;
    kind.machine.wire_bytes_per_us = 1;
    kind.machine.hop_us = 77;
    kind.machine.launch_us = 66;
    return kind;
}

bool is_unmeasured(const MachineKind& kind, const char* name) {
    return std::find(kind.unmeasured.begin(), kind.unmeasured.end(), name) != kind.unmeasured.end();
}

/// What the parts take on a machine with these constants.
MachineTimes times_on(const Machine& machine) {
    const auto product = [&](double hidden, double tokens) {
        const double bytes = hidden / 2 * 3584 * 2 + tokens * (3584 + hidden) * 2;
        const double flops = 2 * tokens * hidden / 2 * 3584;
        const double memory = bytes / machine.memory_bytes_per_us;
        const double arithmetic = flops / machine.flops_per_us;
        return machine.launch_us + std::max(memory, arithmetic) + machine.reached.contention * std::min(memory, arithmetic);
    };
    const auto reduction = [&](double tokens) {
        return machine.launch_us + 2 * machine.hop_us + tokens * 3584 * 2 / machine.wire_bytes_per_us;
    };
    return {.wide_us = product(7168, 1),
            .narrow_us = product(1792, 1),
            .large_us = product(7168, 4096),
            .few_us = reduction(1),
            .many_us = reduction(1024)};
}

TEST(MeasuredMachine, IsTheOneThatTheTimesAreOf) {
    const Machine truth = gpu::known_device("h200")->machine;
    const MachineKind found = machine_from(times_on(truth), probes, assumed());
    EXPECT_NEAR(found.machine.memory_bytes_per_us / truth.memory_bytes_per_us, 1, 0.01);
    EXPECT_NEAR(found.machine.flops_per_us / truth.flops_per_us, 1, 0.01);
    EXPECT_NEAR(found.machine.launch_us, truth.launch_us, 0.05);
    EXPECT_NEAR(found.machine.hop_us, truth.hop_us, 0.05);
    EXPECT_NEAR(found.machine.wire_bytes_per_us / truth.wire_bytes_per_us, 1, 0.01);
    EXPECT_TRUE(found.unmeasured.empty());
}

TEST(MeasuredMachine, KeepsWhatIsAssumedOfLinksWhereThereAreNone) {
    MachineTimes times = times_on(gpu::known_device("h200")->machine);
    times.few_us = times.many_us = 0;
    const MachineKind found = machine_from(times, probes, assumed());
    EXPECT_EQ(found.machine.hop_us, 77);
    EXPECT_EQ(found.machine.wire_bytes_per_us, 1);
    for (const char* name : {"hop_us", "collective_us", "wire_bytes_per_us"})
        EXPECT_TRUE(is_unmeasured(found, name)) << name;
    EXPECT_FALSE(is_unmeasured(found, "memory_bytes_per_us"));
}

TEST(MeasuredMachine, SaysSoWhereALaunchIsLostInTheNoise) {
    MachineTimes times = times_on(gpu::known_device("h200")->machine);
    times.wide_us = 400;  // four times the bytes, five times as long: part of the narrow one came from a cache
    times.narrow_us = 80;
    MachineKind before = assumed();
    before.machine.launch_us = 2;
    const MachineKind found = machine_from(times, probes, before);
    EXPECT_TRUE(is_unmeasured(found, "launch_us"));
    EXPECT_EQ(found.machine.launch_us, 2);
    EXPECT_NEAR(found.machine.memory_bytes_per_us, 25.7e6 / 398, 0.02 * 25.7e6 / 398);
}

}  // namespace
}  // namespace latent_moe::cli
