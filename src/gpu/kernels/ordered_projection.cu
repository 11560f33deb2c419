// Any number of tokens times weights as they are. Nobody waits for another CTA.
//
//     CTA       16 tokens × 64 columns: 32 columns of k at a time of both operands ── widened ──▶ shared memory
//     thread    some of the 1024 elements: Σ_k x·w in a register, k ascending, then the epilogue ──▶ out
//
// An element's sum is one chain of fused multiply-adds, the same for every number of tokens and at every place. That is what
// it is for (docs/decisions/0013): it is much slower than a product on tensor cores.
#include "gpu/kernels/ordered_projection.h"

#include "gpu/kernels/finish_element.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

constexpr int threads = cta_threads(256);
constexpr int tile_tokens = 16, tile_columns = 64, tile_k = 32;
constexpr int elements = tile_tokens * tile_columns / threads;  ///< of a thread
static_assert(tile_tokens * tile_columns % threads == 0);

struct Params {
    const void* x;
    std::int64_t x_stride;
    const void* w;
    bool wide_weights;  ///< float32 beside narrower x
    std::int64_t latent;
    std::int64_t column_tiles;
    FinishProduct finish;
};

/// A place more a row, so that neighbouring columns lie in different banks.
struct Tiles {
    float x[tile_tokens][tile_k];
    float w[tile_columns][tile_k + 1];
};

template <class T>
__global__ void __launch_bounds__(threads) multiply(const Params p) {
    using N = Number<T>;
    LATENT_MOE_SHARED(Tiles, tiles);
    const std::int64_t token0 = blockIdx.x / p.column_tiles * tile_tokens;
    const std::int64_t column0 = blockIdx.x % p.column_tiles * tile_columns;
    const int thread = static_cast<int>(threadIdx.x);
    const auto weight = [&](std::int64_t i) {
        return p.wide_weights ? static_cast<const float*>(p.w)[i] : N::widen(static_cast<const T*>(p.w)[i]);
    };
    float sums[elements] = {};
    for (std::int64_t first = 0; first < p.latent; first += tile_k) {
        for (int i = thread; i < tile_tokens * tile_k; i += threads) {
            const std::int64_t token = token0 + i / tile_k, k = first + i % tile_k;
            const bool inside = token < p.finish.tokens && k < p.latent;
            tiles.x[i / tile_k][i % tile_k] = inside ? N::widen(static_cast<const T*>(p.x)[token * p.x_stride + k]) : 0.0F;
        }
        for (int i = thread; i < tile_columns * tile_k; i += threads) {
            const std::int64_t column = column0 + i / tile_k, k = first + i % tile_k;
            const bool inside = column < p.finish.width && k < p.latent;
            tiles.w[i / tile_k][i % tile_k] = inside ? weight(column * p.latent + k) : 0.0F;
        }
        sync_cta();
        const int count = static_cast<int>(p.latent - first < tile_k ? p.latent - first : tile_k);
        for (int k = 0; k < count; ++k) {
#pragma unroll
            for (int e = 0; e < elements; ++e) {
                const int at = thread + e * threads;
                sums[e] = fmaf(tiles.x[at / tile_columns][k], tiles.w[at % tile_columns][k], sums[e]);
            }
        }
        sync_cta();
    }
#pragma unroll
    for (int e = 0; e < elements; ++e) {
        const int at = thread + e * threads;
        const std::int64_t token = token0 + at / tile_columns, column = column0 + at % tile_columns;
        if (token < p.finish.tokens && column < p.finish.width) finish_element<T>(p.finish, token, column, sums[e]);
    }
}

}  // namespace

cudaError_t ordered_projection(const OrderedProjection& op, cudaStream_t stream) {
    const Params p{.x = op.x.data,
                   .x_stride = op.x.stride == 0 ? op.latent : op.x.stride,
                   .w = op.w,
                   .wide_weights = op.weight_dtype != op.finish.dtype,
                   .latent = op.latent,
                   .column_tiles = (op.finish.width + tile_columns - 1) / tile_columns,
                   .finish = with_strides(op.finish)};
    const std::int64_t ctas = (p.finish.tokens + tile_tokens - 1) / tile_tokens * p.column_tiles;
    if (p.finish.tokens < 0 || p.finish.width <= 0 || p.latent <= 0 || !p.x || !p.w || !p.finish.out.data ||
        (p.wide_weights && op.weight_dtype != Dtype::f32) || ctas > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    if (ctas == 0) return cudaSuccess;
    const Launch how{.grid = static_cast<int>(ctas), .block = threads, .stream = stream};
    switch (p.finish.dtype) {
        case Dtype::bf16: return launch(how, multiply<__nv_bfloat16>, p);
        case Dtype::f16: return launch(how, multiply<__half>, p);
        case Dtype::f32: return launch(how, multiply<float>, p);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace latent_moe::gpu
