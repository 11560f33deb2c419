#include "core/deferred.h"

#include <algorithm>

#include "core/numeric.h"

namespace latent_moe {

void combine_row(const DeferredMatrix& deferred, std::int64_t token, float* sum, float* scratch) noexcept {
    const std::int64_t count = deferred.rows.columns;
    std::fill_n(sum, count, 0.0F);
    for (std::int64_t slot = 0; slot < deferred.slots; ++slot) {
        const std::int64_t at = token * deferred.slots + slot;
        if (deferred.map[at] < 0) continue;
        const float weight = load_element(deferred.weights, deferred.weight_dtype, at);
        widen(deferred.rows.row(deferred.map[at]), deferred.rows.dtype, scratch, count);
        // No fused multiply-add: this library is compiled for machines without one.
#pragma omp simd
        for (std::int64_t i = 0; i < count; ++i) sum[i] += weight * scratch[i];
    }
}

}  // namespace latent_moe
