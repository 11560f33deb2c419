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

}  // namespace latent_moe::gpu
