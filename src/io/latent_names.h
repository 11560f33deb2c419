// How the model families name the tensors of a latent-MoE layer. A new family is one more row in latent_names.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace latent_moe::io {

enum class ModelFamily : std::uint8_t { kimi_k3, nemotron_3 };

/// "kimi-k3", "nemotron-3"
const char* name(ModelFamily family) noexcept;

/// The names that one layer's tensors have in its checkpoint, whether they are there or not.
struct LatentLayerNames {
    std::int64_t number = 0;
    ModelFamily family = ModelFamily::kimi_k3;
    std::string up_projection;
    std::string norm;   ///< empty for a family without
    std::string scale;  ///< of an up-projection in float8_e4m3
};

/// The layer that `tensor` is the up-projection, the norm or the scale of. Nothing for all other tensors of a checkpoint.
/// A leading `language_model.` may be there or not.
std::optional<LatentLayerNames> recognise_latent_tensor(std::string_view tensor);

}  // namespace latent_moe::io
