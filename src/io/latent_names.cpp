#include "io/latent_names.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace latent_moe::io {
namespace {

constexpr std::string_view text_part_of_a_multimodal_model = "language_model.";

struct Naming {
    ModelFamily family;
    std::string_view before_number;
    std::string_view after_number;
    std::string_view up_projection;
    std::string_view norm;
    std::string_view scale;
};

constexpr std::array namings{
    Naming{ModelFamily::kimi_k3, "model.layers.", ".block_sparse_moe.", "routed_expert_up_proj.weight",
           "routed_expert_norm.weight", "routed_expert_up_proj.weight_scale"},
    Naming{ModelFamily::nemotron_3, "backbone.layers.", ".mixer.", "fc2_latent_proj.weight", "",
           "fc2_latent_proj.weight_scale"},
};

bool drop_front(std::string_view& text, std::string_view prefix) {
    if (!text.starts_with(prefix)) return false;
    text.remove_prefix(prefix.size());
    return true;
}

/// Only the canonical spelling: "07" would be a second name for layer 7.
std::optional<std::int64_t> drop_number(std::string_view& text) {
    const std::string_view digits = text.substr(0, text.find_first_not_of("0123456789"));
    if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) return {};
    std::int64_t number = 0;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), number).ec != std::errc{}) return {};
    text.remove_prefix(digits.size());
    return number;
}

std::optional<LatentLayerNames> recognise(std::string_view tensor, const Naming& naming) {
    std::string_view rest = tensor;
    drop_front(rest, text_part_of_a_multimodal_model);
    if (!drop_front(rest, naming.before_number)) return {};
    const auto number = drop_number(rest);
    if (!number || !drop_front(rest, naming.after_number)) return {};
    if (rest.empty() || (rest != naming.up_projection && rest != naming.norm && rest != naming.scale)) return {};

    const std::string stem(tensor.substr(0, tensor.size() - rest.size()));
    const auto full_name = [&](std::string_view last) { return last.empty() ? std::string() : stem + std::string(last); };
    return LatentLayerNames{*number, naming.family, full_name(naming.up_projection), full_name(naming.norm),
                            full_name(naming.scale)};
}

}  // namespace

const char* name(ModelFamily family) noexcept {
    switch (family) {
        case ModelFamily::kimi_k3: return "kimi-k3";
        case ModelFamily::nemotron_3: return "nemotron-3";
    }
    return "unknown";
}

std::optional<LatentLayerNames> recognise_latent_tensor(std::string_view tensor) {
    for (const Naming& naming : namings) {
        if (auto names = recognise(tensor, naming)) return names;
    }
    return {};
}

}  // namespace latent_moe::io
