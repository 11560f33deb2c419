// The file that `latent-moe info --measure` writes and `explain --machine` reads: the constants of one machine.
//
//     {"schema": "latent-moe/machine/1", "name": …, "origin": …, "description": …, "memory_bytes_per_us": …, "flops_per_us":
//     …,
//      "wire_bytes_per_us": …, "hop_us": …, "launch_us": …, "collective_us": …, "reached": {"early_launch": …, …},
//      "best": {"flops_per_us": …, …}, "link_bytes_per_us": …, "linked_ranks": …, "fused": …, "unmeasured": ["hop_us", …]}
//
// or a JSON file of `info` that holds such an object as "machine". The names are those of core/machine.h and
// core/machine_kind.h. Fields that it does not know it ignores.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "core/machine_kind.h"

namespace latent_moe::io {

/// Throws `Error(io)` that names `source` and the field for anything else. Touches no file.
MachineKind parse_machine(std::string_view text, std::string_view source);
MachineKind read_machine(const std::filesystem::path& path);

/// What `parse_machine` reads back bit for bit.
std::string machine_text(const MachineKind& kind);

}  // namespace latent_moe::io
