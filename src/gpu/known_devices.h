// Constants of devices by name, for predictions. Part of every build, with a GPU backend or without.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "core/machine_kind.h"

namespace latent_moe::gpu {

/// An H200 as measured, others from their data sheets; each says so.
const std::vector<MachineKind>& known_devices();
std::optional<MachineKind> known_device(std::string_view name);

/// Gates of AMD's devices, on them and in predictions. To start with: `tune` is to find better bounds.
std::int64_t amd_one_stage_bytes(int world);
inline constexpr const char* amd_collectives_not_captured =
    "its collectives go through RCCL, which has not been seen captured yet";

}  // namespace latent_moe::gpu
