#include "gpu/collective_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "latent_moe/status.h"

namespace latent_moe::gpu {

void throw_together(const Bootstrap& bootstrap, const char* what, const std::exception_ptr& failure) {
    std::array<char, 240> text{};
    if (failure) {
        try {
            std::rethrow_exception(failure);
        } catch (const std::exception& error) {
            std::strncpy(text.data(), error.what(), text.size() - 1);
        }
    }
    const auto all = gather(bootstrap, text);
    if (failure) std::rethrow_exception(failure);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (all[rank][0] != '\0')
            throw Error(StatusCode::unavailable, fmt::format("{}: rank {}: {}", what, rank, all[rank].data()));
    }
}

}  // namespace latent_moe::gpu
