// The element types of the safetensors format, under the names that files use.
#pragma once

#include <optional>
#include <string_view>

#include "latent_moe/tensor.h"

namespace latent_moe::io {

struct ElementType {
    std::string_view name;
    unsigned bits;
    std::optional<Dtype> dtype;  ///< nothing for types that this library only lists
};

/// Null for a name that the format does not have.
const ElementType* find_element_type(std::string_view name) noexcept;

/// The name that the format gives to `dtype`.
std::string_view format_name(Dtype dtype) noexcept;

}  // namespace latent_moe::io
