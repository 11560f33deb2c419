#include "core/machine_kind.h"

#include <algorithm>

namespace latent_moe {

Machine MachineKind::of(int world) const {
    Machine machine_of_world = machine;
    if (link_bytes_per_us > 0) {
        machine_of_world.wire_bytes_per_us = std::min(machine.wire_bytes_per_us, link_bytes_per_us * std::max(1, world - 1));
    }
    return machine_of_world;
}

}  // namespace latent_moe
