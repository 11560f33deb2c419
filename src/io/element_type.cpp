#include "io/element_type.h"

#include <algorithm>
#include <array>

namespace latent_moe::io {
namespace {

constexpr std::array<ElementType, 20> element_types{{
    {"BF16", 16, Dtype::bf16}, {"F16", 16, Dtype::f16}, {"F32", 32, Dtype::f32}, {"F8_E4M3", 8, Dtype::e4m3},
    {"BOOL", 8, {}},           {"U8", 8, {}},           {"I8", 8, {}},           {"U16", 16, {}},
    {"I16", 16, {}},           {"U32", 32, {}},         {"I32", 32, {}},         {"U64", 64, {}},
    {"I64", 64, {}},           {"F64", 64, {}},         {"C64", 64, {}},         {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},        {"F6_E2M3", 6, {}},      {"F6_E3M2", 6, {}},      {"F4", 4, {}},
}};

}  // namespace

const ElementType* find_element_type(std::string_view name) noexcept {
    const auto* found = std::ranges::find(element_types, name, &ElementType::name);
    return found == element_types.end() ? nullptr : &*found;
}

std::string_view format_name(Dtype dtype) noexcept {
    return std::ranges::find(element_types, std::optional(dtype), &ElementType::dtype)->name;
}

}  // namespace latent_moe::io
