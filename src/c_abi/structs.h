// Structs that cross the C ABI in a size of the caller's: its headers may be older or newer than the library.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <fmt/format.h>

#include "latent_moe/status.h"

namespace latent_moe::c_abi {

template <typename Struct>
void require_size(const char* what, std::size_t given) {
    // A caller older than this library has fewer fields, but every version has had a field behind the size.
    if (given > sizeof(std::size_t)) return;
    throw Error(StatusCode::invalid_argument,
                fmt::format("{}: struct_size is {}, expected {} as set by its _init function", what, given, sizeof(Struct)));
}

/// `defaults` in as many bytes as the caller has; what the library does not know is zero.
template <typename Struct>
void write_struct(const char* what, Struct* to, std::size_t size, Struct defaults) {
    if (to == nullptr) throw Error(StatusCode::invalid_argument, fmt::format("{} is null", what));
    require_size<Struct>(what, size);
    defaults.struct_size = size;
    std::memset(to, 0, size);
    std::memcpy(to, &defaults, std::min(size, sizeof defaults));
}

/// The caller's struct over `defaults`. Fields behind those that the library knows must be zero.
template <typename Struct>
Struct read_struct(const char* what, const Struct* from, Struct defaults) {
    if (from == nullptr) throw Error(StatusCode::invalid_argument, fmt::format("{} is null", what));
    const std::size_t size = from->struct_size;
    require_size<Struct>(what, size);
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    for (std::size_t at = sizeof(Struct); at < size; ++at) {
        if (bytes[at] == 0) continue;
        throw Error(StatusCode::unsupported,
                    fmt::format("{}: byte {} is set, but this library knows {} bytes of it: it is older than the caller's "
                                "header",
                                what, at, sizeof(Struct)));
    }
    std::memcpy(&defaults, from, std::min(size, sizeof defaults));
    return defaults;
}

}  // namespace latent_moe::c_abi
