// What the processor calls itself.
#pragma once

#include <string>

namespace latent_moe {

std::string cpu_model();

}  // namespace latent_moe
