#include "latent_moe/shape.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "latent_moe/status.h"

namespace latent_moe {
namespace {

struct Preset {
    const char* model = nullptr;
    Shape shape;
};

// From the models' published configurations.
constexpr std::array<Preset, 3> presets = {{
    {"kimi-k3", {.hidden = 7168, .latent = 3584, .norm = Norm::rms, .epsilon = 1e-5F}},
    {"nemotron-3-super", {.hidden = 4096, .latent = 1024, .norm = Norm::none}},
    {"nemotron-3-ultra", {.hidden = 8192, .latent = 2048, .norm = Norm::none}},
}};

void check_width(const char* field, std::int64_t width) {
    if (width < 8 || width > max_width_limit || width % 8 != 0) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("{} is {}, expected a multiple of 8 from 8 to {}", field, width, max_width_limit));
    }
}

}  // namespace

void validate(const Shape& shape) {
    check_width("hidden", shape.hidden);
    check_width("latent", shape.latent);
    if (shape.norm != Norm::none && shape.norm != Norm::rms) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("norm is number {}, expected none or rms", static_cast<int>(shape.norm)));
    }
    if (shape.norm == Norm::rms && !(std::isfinite(shape.epsilon) && shape.epsilon >= 0)) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("epsilon is {}, expected a finite number of at least 0", shape.epsilon));
    }
    if (!std::isfinite(shape.routed_scale)) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("routed_scale is {}, expected a finite number", shape.routed_scale));
    }
    if (shape.activations == Dtype::e4m3 || bytes_of(shape.activations) == 0) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("activations are {}, expected bf16, f16 or f32", name(shape.activations)));
    }
}

std::optional<Shape> shape_preset(std::string_view model) {
    for (const Preset& preset : presets) {
        if (model == preset.model) return preset.shape;
    }
    return std::nullopt;
}

std::vector<std::string> shape_preset_names() {
    std::vector<std::string> names;
    for (const Preset& preset : presets) names.emplace_back(preset.model);
    return names;
}

}  // namespace latent_moe
