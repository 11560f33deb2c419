// The HIP runtime is loaded when the program starts, if it is there: a program that was linked with it would not start
// elsewhere.
#pragma once

#include <string>

namespace latent_moe::gpu {

/// Why it was not; empty if it was. Every call of HIP then says that there is no device.
std::string hip_library_missing();

}  // namespace latent_moe::gpu
