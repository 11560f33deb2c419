// What a self-check found wrong, as a safetensors file. Writes without the JSON library, which programs that link the
// library alone do not need (io/ has the writer for everything else).
#pragma once

#include <string>
#include <vector>

#include "core/matrix.h"

namespace latent_moe {

struct MismatchTensor {
    std::string name;
    ConstMatrix rows;  ///< contiguous
};

/// Readable by the user alone. Throws `Error(io)`.
void write_mismatch(const std::string& path, const std::string& what, const std::vector<MismatchTensor>& tensors);

}  // namespace latent_moe
