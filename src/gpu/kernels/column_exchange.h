// The two exchanges of a column-parallel tail, in which rank r owns the r-th columns of the hidden rows: what goes in, and
// what comes out. Conventions: kernels.h.
#pragma once

#include <cstdint>

#include "gpu/kernels/kernels.h"
#include "gpu/primitives/window.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// latent = norm(round(Σ_ranks routed)), and own = round(Σ_ranks shared) for this rank's columns of `shared`: of its
/// `world` × `own_width` columns those from rank · own_width on. Sums run in rank order in float32; `latent` has the bits of
/// `all_reduce_rms_norm`. `latent` may be exactly `routed`, `own` exactly its columns of `shared`. More rows than a slot
/// holds are split into several kernels.
struct ReduceForColumns {
    Exchange exchange;
    ConstRows routed;             ///< null: no latents, only the shared columns
    const void* gamma = nullptr;  ///< null: no norm
    float epsilon = 1e-5F;
    Rows latent;
    ConstRows shared;  ///< null: there is none
    Rows own;
    std::int64_t tokens = 0;
    std::int64_t latent_width = 0;  ///< with latents: at most `max_norm_width(dtype)`
    std::int64_t own_width = 0;     ///< a multiple of 8
    Dtype dtype = Dtype::bf16;
    int max_ctas = 64;
    bool starts_early = false;    ///< may start before its predecessor has ended
    bool releases_early = false;  ///< lets its successor do the same
};
cudaError_t reduce_for_columns(const ReduceForColumns& op, cudaStream_t stream);

/// y = what the ranks own, side by side: columns r · own_width … of y are rank r's `own`; with a prefix y = round(y +
/// prefix). `own` may be exactly this rank's columns of y, or `prefix` exactly y.
struct GatherColumns {
    Exchange exchange;
    ConstRows own;
    ConstRows prefix;
    Rows y;
    std::int64_t tokens = 0;
    std::int64_t own_width = 0;  ///< a multiple of 8
    Dtype dtype = Dtype::bf16;
    int max_ctas = 64;
    bool starts_early = false;
    bool releases_early = false;
};
cudaError_t gather_columns(const GatherColumns& op, cudaStream_t stream);

/// Bytes of a slot that either needs for so many rows in one kernel.
std::int64_t column_exchange_slot_bytes(int world, std::int64_t rows, std::int64_t latent_width, std::int64_t own_width,
                                        Dtype dtype);

}  // namespace latent_moe::gpu
