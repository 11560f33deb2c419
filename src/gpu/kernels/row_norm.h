// RMSNorm of one row that a CTA holds in registers. `rms_norm` and `all_reduce_rms_norm` share it, with the same
// thread for the same element, so that the fused kernel gives the bits of the chain.
#pragma once

#include "gpu/primitives/numeric.h"
#include "gpu/primitives/scoped.h"

namespace latent_moe::gpu {

inline constexpr int norm_threads = 512;  ///< most threads of a CTA that holds a row

/// How a row lies in a CTA: thread t holds units t, t + threads, …
struct RowShape {
    int per_thread;  ///< 1, 2, 4 or 8 units
    int threads;
};

constexpr RowShape row_shape(std::int64_t units) {
    int per_thread = 1;
    while (per_thread * norm_threads < units) per_thread *= 2;
    const std::int64_t threads = (units + per_thread - 1) / per_thread;
    return {per_thread, static_cast<int>((threads + 31) / 32 * 32)};
}

template <Dtype dtype>
LATENT_MOE_DEVICE float sum_of_squares(uint4 v, float sum) {
    float x[Unit<dtype>::size];
    Unit<dtype>::unpack(v, x);
#pragma unroll
    for (float e : x) sum = fmaf(e, e, sum);
    return sum;
}

/// Σ over the CTA's threads, the same for all of them and on every run. One barrier. `parts` alternates between two buffers
/// from call to call.
LATENT_MOE_DEVICE float sum_over_cta(float value, float (&parts)[norm_threads / 32]) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffff, value, lane);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) sum += parts[w];
    return sum;
}

/// The same over a team: thread `thread` of `threads` neighbours of the CTA, whose own `parts` are. The CTA's barrier keeps
/// its teams in step.
LATENT_MOE_DEVICE float sum_over_team(float value, float (&parts)[norm_threads / 32], std::uint32_t thread,
                                      std::uint32_t threads) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffff, value, lane);
    if (thread % 32 == 0) parts[thread / 32] = value;
    __syncthreads();
    float sum = 0;
    for (std::uint32_t w = 0; w < threads / 32; ++w) sum += parts[w];
    return sum;
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
