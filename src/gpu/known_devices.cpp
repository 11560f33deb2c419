#include "gpu/known_devices.h"

#include <fmt/format.h>

namespace latent_moe::gpu {
namespace {

/// What a data sheet says of one device.
struct Sheet {
    double memory_tb_per_s;
    double bf16_tflop_per_s;  ///< dense
    double gb_per_s;          ///< one direction: to all peers together, or to each where links go from each to each
};

constexpr Sheet h200_sheet{4.8, 989, 450};

/// A host of 8 with 2 in use, 2026-11-30: docs/cost-model.md.
MachineKind h200() {
    return {.name = "h200",
            .origin = "measured with 2 ranks, 2026-11-30: docs/cost-model.md",
            .machine = {.description = "NVIDIA H200",
                        .memory_bytes_per_us = 4.49e6,
                        .flops_per_us = 790e6,
                        .wire_bytes_per_us = 315e3,
                        .hop_us = 0.92,
                        .launch_us = 3.0,
                        .reached = {.early_launch = 0.6,
                                    .contention = 0.38,
                                    .all_reduce = 0.78,
                                    .scatter_gather = 0.60,
                                    .side_lane = 0.43,
                                    .gathering = 0.32,
                                    .early_tokens = 64,
                                    .pooled_from_tokens = 17},
                        .best = {.flops_per_us = 790e6, .wire_bytes_per_us = 369e3, .hop_us = 0.67, .launch_us = 0.51}},
            .linked_ranks = 8};
}

/// A device of the same make: of its sheet it is taken to reach what an H200 reached of its own.
MachineKind like_h200(const char* name, const char* device, const Sheet& sheet) {
    MachineKind kind = h200();
    kind.name = name;
    kind.origin = fmt::format(
        "from its data sheet ({} TB/s, {} Tflop/s dense bf16, {} GB/s a direction), of which it is taken to reach what an "
        "H200 "
        "did of its own, with an H200's hop and launch",
        sheet.memory_tb_per_s, sheet.bf16_tflop_per_s, sheet.gb_per_s);
    Machine& machine = kind.machine;
    machine.description = device;
    machine.memory_bytes_per_us *= sheet.memory_tb_per_s / h200_sheet.memory_tb_per_s;
    for (double* flops : {&machine.flops_per_us, &machine.best.flops_per_us})
        *flops *= sheet.bf16_tflop_per_s / h200_sheet.bf16_tflop_per_s;
    for (double* wire : {&machine.wire_bytes_per_us, &machine.best.wire_bytes_per_us})
        *wire *= sheet.gb_per_s / h200_sheet.gb_per_s;
    return kind;
}

/// Nothing was measured on one yet: the parts of the sheet, hop, launch and collective are guesses.
MachineKind amd(const char* name, const char* device, const Sheet& sheet) {
    constexpr double memory_part = 0.8;
    constexpr double flops_part = 0.4;
    constexpr double link_part = 0.8;
    constexpr int peers = 7;
    const Machine::Reached of_h200 = h200().machine.reached;
    const double link = link_part * sheet.gb_per_s * 1e3;
    return {.name = name,
            .origin = fmt::format(
                "from its data sheet ({} TB/s, {} Tflop/s dense bf16, {} GB/s a direction to each peer), of which it "
                "is taken to reach {:.0f}, {:.0f} and {:.0f} %; hop and launch are guesses",
                sheet.memory_tb_per_s, sheet.bf16_tflop_per_s, sheet.gb_per_s, 100 * memory_part, 100 * flops_part,
                100 * link_part),
            .machine = {.description = device,
                        .memory_bytes_per_us = memory_part * sheet.memory_tb_per_s * 1e6,
                        .flops_per_us = flops_part * sheet.bf16_tflop_per_s * 1e6,
                        .wire_bytes_per_us = peers * link,
                        .hop_us = 2,
                        .launch_us = 4,
                        .collective_us = 8,
                        .reached = {.contention = of_h200.contention, .gathering = of_h200.gathering}},
            .link_bytes_per_us = link,
            .linked_ranks = peers + 1,
            .one_stage_bytes = {amd_one_stage_bytes(4), amd_one_stage_bytes(8)},
            .not_captured_reason = amd_collectives_not_captured};
}

}  // namespace

std::int64_t amd_one_stage_bytes(int world) {
    return world <= 4 ? std::int64_t{256} << 10 : std::int64_t{128} << 10;
}

const std::vector<MachineKind>& known_devices() {
    static const std::vector<MachineKind> known = {h200(),
                                                   like_h200("h100", "NVIDIA H100 SXM", {3.35, 989, 450}),
                                                   like_h200("b200", "NVIDIA B200", {8, 2250, 900}),
                                                   amd("mi300x", "AMD MI300X", {5.3, 1307, 64}),
                                                   amd("mi355x", "AMD MI355X", {8, 2300, 76.8}),
                                                   amd("mi250x", "half an AMD MI250X", {1.6, 191.5, 50})};
    return known;
}

std::optional<MachineKind> known_device(std::string_view name) {
    for (const MachineKind& kind : known_devices()) {
        if (kind.name == name) return kind;
    }
    return std::nullopt;
}

}  // namespace latent_moe::gpu
