// RMSNorm of one row that a CTA holds in registers. `rms_norm` and `all_reduce_rms_norm` share it, with the same
// thread for the same element, so that the fused kernel gives the bits of the chain.
#pragma once

#include "gpu/primitives/numeric.h"
#include "gpu/primitives/scoped.h"

namespace latent_moe::gpu {

inline constexpr int norm_threads = cta_threads(512);  ///< most threads of a CTA that holds a row
inline constexpr int norm_group = 32;  ///< threads whose sums are added first: the same on every GPU, whatever its waves

/// Threads of a CTA that has at least so many: its waves are whole.
constexpr int whole_waves(std::int64_t threads) {
    return static_cast<int>((threads + wave_size - 1) / wave_size * wave_size);
}

/// How a row lies in a CTA: thread t holds units t, t + threads, …
struct RowShape {
    int per_thread;  ///< 1, 2, 4 or 8 units
    int threads;
};

constexpr RowShape row_shape(std::int64_t units) {
    int per_thread = 1;
    while (per_thread * norm_threads < units) per_thread *= 2;
    const std::int64_t threads = (units + per_thread - 1) / per_thread;
    return {per_thread, whole_waves(threads)};
}

template <Dtype dtype>
LATENT_MOE_DEVICE float sum_of_squares(uint4 v, float sum) {
    float x[Unit<dtype>::size];
    Unit<dtype>::unpack(v, x);
#pragma unroll
    for (float e : x) sum = fmaf(e, e, sum);
    return sum;
}

/// What the groups of a team sum to.
using SumParts = float[norm_threads / norm_group];

/// Σ over a team, the same for all of it and on every run: thread `thread` of `threads` neighbours of the CTA, whose own
/// `parts` are. The CTA's barrier keeps its teams in step. `parts` alternates between two buffers from call to call.
LATENT_MOE_DEVICE float sum_over_team(float value, SumParts& parts, std::uint32_t thread, std::uint32_t threads) {
#pragma unroll
    for (int lane = norm_group / 2; lane > 0; lane /= 2) value += shuffle_xor(value, static_cast<unsigned>(lane));
    if (thread % norm_group == 0) parts[thread / norm_group] = value;
    sync_cta();
    float sum = 0;
    for (std::uint32_t w = 0; w < threads / norm_group; ++w) sum += parts[w];
    return sum;
}

/// The same over the whole CTA.
LATENT_MOE_DEVICE float sum_over_cta(float value, SumParts& parts) {
    return sum_over_team(value, parts, threadIdx.x, blockDim.x);
}

template <Dtype dtype>
LATENT_MOE_DEVICE uint4 normalised(uint4 v, uint4 gamma, float factor) {
    float x[Unit<dtype>::size], g[Unit<dtype>::size];
    Unit<dtype>::unpack(v, x), Unit<dtype>::unpack(gamma, g);
#pragma unroll
    for (int i = 0; i < Unit<dtype>::size; ++i) x[i] = x[i] * factor * g[i];
    return Unit<dtype>::pack(x);
}

}  // namespace latent_moe::gpu
