// What this machine's GPUs, driver and libraries are.
#pragma once

#include <string>
#include <vector>

namespace latent_moe::gpu {

/// Why no tail can run on a GPU here, in one line; empty if one can.
std::string why_unavailable();

/// Lines for `latent-moe info`.
std::vector<std::string> describe_machine();

}  // namespace latent_moe::gpu
