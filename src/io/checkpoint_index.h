// `model.safetensors.index.json`: which file of a sharded checkpoint holds which tensor.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace latent_moe::io {

/// Tensor name to file name. Throws `Error(io)` that names `source` for anything that is not such an index, and for file
/// names that lead out of the index's own folder. Touches no file.
std::map<std::string, std::string> parse_checkpoint_index(std::string_view text, std::string_view source);

}  // namespace latent_moe::io
