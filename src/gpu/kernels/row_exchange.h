// The two halves of a token-parallel all-reduce, on rows that each rank owns. Conventions: kernels.h.
#pragma once

#include <cstdint>

#include "gpu/primitives/window.h"
#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

/// Which rows of a whole each rank owns. The ranges do not overlap; they need not cover the whole.
struct OwnRows {
    std::int64_t first[max_ranks];
    std::int64_t count[max_ranks];
};

/// y = round(Σ_ranks x) for the rows of x that this rank owns, summed in rank order in float32. `y` has this rank's rows
/// only and may be exactly those rows of `x`. More rows than a slot holds are split into several kernels.
struct ReduceScatter {
    Exchange exchange;
    ConstRows x;
    OwnRows own;
    Rows y;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
    int max_ctas = 64;
};
cudaError_t reduce_scatter(const ReduceScatter& op, cudaStream_t stream);

/// Rows own[r] of y = rank r's x, on every rank. `x` has this rank's rows only and may be exactly those rows of `y`.
struct AllGather {
    Exchange exchange;
    ConstRows x;
    OwnRows own;
    Rows y;
    std::int64_t width = 0;
    Dtype dtype = Dtype::bf16;
    int max_ctas = 64;
};
cudaError_t all_gather(const AllGather& op, cudaStream_t stream);

}  // namespace latent_moe::gpu
