// Small tensors (scales) as float32.
#pragma once

#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace latent_moe::io {

/// Every element of a bf16, f16 or f32 tensor. Throws `Error(invalid_argument)` for other types.
std::vector<float> to_floats(const Matrix& tensor, std::string_view source);

}  // namespace latent_moe::io
