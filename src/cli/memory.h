// How much memory this process has had.
#pragma once

#include <cstddef>

namespace latent_moe::cli {

/// Resident now, and the most so far, in bytes. 0 where the system does not say.
std::size_t resident_bytes();
std::size_t peak_resident_bytes();

}  // namespace latent_moe::cli
