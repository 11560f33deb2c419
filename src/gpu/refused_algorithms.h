// Algorithms of the GEMM library that are never used: the library's own suggestions are not always right (see the field
// reports about products that fault at some row counts).
#pragma once

#include <cstdint>
#include <cstdlib>

namespace latent_moe::gpu {

struct RefusedAlgorithm {
    int id;  ///< CUBLASLT_ALGO_CONFIG_ID
    std::int64_t first_rows;
    std::int64_t last_rows;
    const char* why;
};

/// Known to be wrong. `{-1}` matches none.
inline constexpr RefusedAlgorithm refused_algorithms[] = {{-1, 0, 0, "an array cannot be empty"}};

/// Refused above, or by the user: LATENT_MOE_REFUSED_ALGORITHMS=12,66. Rank 0's environment counts, since it chooses.
inline bool is_refused(int id, std::int64_t rows) {
    for (const RefusedAlgorithm& refused : refused_algorithms) {
        if (refused.id == id && refused.first_rows <= rows && rows <= refused.last_rows) return true;
    }
    const char* given = std::getenv("LATENT_MOE_REFUSED_ALGORITHMS");
    for (const char* at = given; at != nullptr && *at != '\0';) {
        char* end = nullptr;
        if (std::strtol(at, &end, 10) == id && end != at) return true;
        at = *end == '\0' ? end : end + 1;
    }
    return false;
}

}  // namespace latent_moe::gpu
