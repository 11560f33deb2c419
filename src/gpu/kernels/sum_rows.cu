#include "gpu/kernels/sum_rows.h"

#include <algorithm>

#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/numeric.h"

namespace latent_moe::gpu {
namespace {

constexpr int threads = cta_threads(256);
constexpr std::uint64_t most_ctas = 1024;

struct Params {
    UnitRows x[max_ranks];
    UnitRows y;
    int world;
    std::uint64_t units;
    std::uint32_t row_units;
};

template <Dtype dtype>
__global__ void __launch_bounds__(threads) sum(const __grid_constant__ Params p) {
    using U = Unit<dtype>;
    const std::uint64_t step = std::uint64_t{gridDim.x} * threads;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * threads + threadIdx.x; i < p.units; i += step) {
        const auto row = static_cast<std::uint32_t>(i / p.row_units), unit = static_cast<std::uint32_t>(i % p.row_units);
        float sum[U::size] = {};
        for (int r = 0; r < p.world; ++r) {
            float term[U::size];
            U::unpack(load16(p.x[r].at(row, unit)), term);
#pragma unroll
            for (int e = 0; e < U::size; ++e) sum[e] += term[e];
        }
        store16(p.y.at(row, unit), U::canonical(U::pack(sum)));
    }
}

}  // namespace

cudaError_t sum_rows(const SumRows& op, cudaStream_t stream) {
    const std::int64_t row_units = op.width * static_cast<std::int64_t>(bytes_of(op.dtype)) / 16;
    Params p{.y = unit_rows(op.y, op.width, op.dtype),
             .world = op.world,
             .units = static_cast<std::uint64_t>(op.tokens * row_units),
             .row_units = static_cast<std::uint32_t>(row_units)};
    if (op.world < 1 || op.world > max_ranks || op.tokens < 0 || op.width <= 0 || op.width % 8 != 0 || !aligned(p.y)) {
        return cudaErrorInvalidValue;
    }
    for (int r = 0; r < op.world; ++r) {
        p.x[r] = unit_rows(op.x[r], op.width, op.dtype);
        if (!aligned(p.x[r])) return cudaErrorInvalidValue;
    }
    if (op.tokens == 0) return cudaSuccess;
    const Launch how{.grid = static_cast<int>(std::min<std::uint64_t>((p.units + threads - 1) / threads, most_ctas)),
                     .block = threads,
                     .stream = stream};
    return for_dtype(op.dtype, [&]<Dtype dtype>() { return launch(how, sum<dtype>, p); });
}

}  // namespace latent_moe::gpu
