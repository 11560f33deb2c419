// What this machine's GPUs, driver and libraries are.
#pragma once

#include <string>
#include <vector>

#include "core/machine.h"

namespace latent_moe::gpu {

/// Why no tail can run on a GPU here, in one line; empty if one can.
std::string why_unavailable();

/// Lines for `latent-moe info`.
std::vector<std::string> describe_machine();

/// Constants of a device for the cost model, `sharing` ranks on it: measured ones where this kind of device was measured,
/// those of its data sheet scaled alike elsewhere.
Machine cost_constants(int device, int sharing);

}  // namespace latent_moe::gpu
