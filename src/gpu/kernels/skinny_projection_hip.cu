// C[M, N] = addend + s · A[M, K] · Wᵀ for M up to 64 on AMD GPUs (skinny_projection.cu has the others).
//
//     CTA t, wave v    16 rows of W, blocks v, v + 8, … ── registers ──▶ MFMA with A's rows, straight from L2
//     CTA t, all       Σ of the waves' parts in LDS, in their order; scale, addend, prefix ──▶ C
//
// Nobody waits for another CTA. The sums' order depends on K alone: the same bits on every run, and for every number of
// tokens, so `batch_invariant` asks for nothing here.
#include "gpu/kernels/mfma_tile.cuh"
#include "gpu/kernels/projection.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

constexpr int waves = cta_threads(8 * static_cast<int>(wave_size)) / static_cast<int>(wave_size);
constexpr int blocks_at_once = 4;  ///< of weights in flight a wave: 64 KB a CU

template <Dtype dtype, int tokens>
__global__ void __launch_bounds__(waves* static_cast<int>(wave_size)) project(const Projection p) {
    using Tile = MfmaTile<dtype, tokens, waves>;
    LATENT_MOE_SHARED(typename Tile::Parts, parts);
    const int blocks = static_cast<int>(p.layout.blocks());
    const int units = static_cast<int>(p.layout.latent / 8);
    const auto token_unit = [&](int token, int unit) {
        return unit_or_zero(p.a.data, p.a.stride, token, unit, p.tokens, units);
    };
    Tile tile;
    for (int first = Tile::wave(); first < blocks; first += waves * blocks_at_once) {
        typename Tile::Weights w[blocks_at_once];
#pragma unroll
        for (int i = 0; i < blocks_at_once; ++i) w[i] = Tile::load(p.packed, p.layout, blockIdx.x, first + i * waves);
#pragma unroll
        for (int i = 0; i < blocks_at_once; ++i) tile.multiply(w[i], first + i * waves, token_unit);
    }
    tile.keep(parts);
    sync_cta();
    for (int i = static_cast<int>(threadIdx.x); i < p.tokens * Tile::rows / 2; i += Tile::threads) {
        const int token = i / (Tile::rows / 2), row = i % (Tile::rows / 2) * 2;
        const std::int64_t n = std::int64_t{blockIdx.x} * Tile::rows + row;
        if (n >= p.layout.rows) continue;
        float sum[2];
        Tile::total(parts, token, row, sum);
        finish<dtype>(p, token, n, sum, addend_at<dtype>(p, token, n));
    }
}

template <Dtype dtype>
cudaError_t launch_tokens(const Projection& p, cudaStream_t stream) {
    const Launch how{
        .grid = static_cast<int>((p.layout.rows + 15) / 16), .block = waves * static_cast<int>(wave_size), .stream = stream};
    if (p.tokens <= 16) return launch(how, project<dtype, 16>, p);
    if (p.tokens <= 32) return launch(how, project<dtype, 32>, p);
    return launch(how, project<dtype, 64>, p);
}

}  // namespace

cudaError_t skinny_projection(const SkinnyProjection& op, cudaStream_t stream) {
    Projection p;
    if (!describe(op, p)) return cudaErrorInvalidValue;
    if (op.tokens == 0) return cudaSuccess;
    switch (op.dtype) {
        case Dtype::bf16: return launch_tokens<Dtype::bf16>(p, stream);
        case Dtype::f16: return launch_tokens<Dtype::f16>(p, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace latent_moe::gpu
