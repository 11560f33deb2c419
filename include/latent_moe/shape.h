// What a latent mixture-of-experts layer looks like, as far as its tail is concerned.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "latent_moe/export.h"
#include "latent_moe/tensor.h"

namespace latent_moe {

enum class Norm : std::uint8_t {
    none,  ///< the summed latent is projected as it is (Nemotron-3)
    rms,   ///< RMSNorm(x; γ, ε) = γ · x / sqrt(mean(x²) + ε), the mean over the `latent` elements of a row (Kimi-K3)
};

LATENT_MOE_API const char* name(Norm norm) noexcept;

/// One tail computes, for `tokens` rows and on every rank,
///
///     out[hidden] = prefix + Σ_ranks shared + routed_scale · norm(Σ_ranks routed[latent]) · W_upᵀ,   W_up: [hidden, latent]
struct Shape {
    std::int64_t hidden =
        0;  ///< columns of the output; a multiple of 8. Tails that own columns need a multiple of the ranks
    std::int64_t latent = 0;  ///< columns of the routed partial; a multiple of 8
    Norm norm = Norm::rms;
    float epsilon = 1e-5F;
    float routed_scale = 1.0F;
    Dtype activations = Dtype::bf16;  ///< of routed, shared, prefix, γ and out; weights have a dtype of their own

    bool operator==(const Shape&) const = default;
};

/// The limits that hold for every context.
inline constexpr std::int64_t max_tokens_limit = 65'536;
inline constexpr std::int64_t max_width_limit = 1 << 20;
inline constexpr int max_world = 16;

/// Throws `Error(invalid_argument)` naming the field, its value and the limit that it breaks.
LATENT_MOE_API void validate(const Shape& shape);

/// `kimi-k3`, `nemotron-3-super` or `nemotron-3-ultra`; nothing for any other name.
LATENT_MOE_API std::optional<Shape> shape_preset(std::string_view model);
LATENT_MOE_API std::vector<std::string> shape_preset_names();

}  // namespace latent_moe
