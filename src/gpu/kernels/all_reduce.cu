// All-reduce over the peer window: the kernels' launch. Who sends what to whom and when is in all_reduce.cuh.
#include "gpu/kernels/all_reduce.cuh"

#include <algorithm>

#include "gpu/kernels/kernels.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

using reduction::Params;

constexpr int threads = cta_threads(256);

template <Dtype dtype, int batch>
__global__ void __launch_bounds__(threads) one_stage(const __grid_constant__ Params p) {
    reduction::one_stage<dtype, batch, threads>(p);
}
template <Dtype dtype, int batch>
__global__ void __launch_bounds__(threads) two_stage(const __grid_constant__ Params p) {
    reduction::two_stage<dtype, batch, threads>(p);
}

std::int64_t slot_units(int world, int stages, std::int64_t units) {
    return stages == 1 ? (world - 1) * units : 2 * (world - 1) * ((units + world - 1) / world);
}

cudaError_t launch_rows(const AllReduce& op, const Params& p, cudaStream_t stream) {
    // Enough CTAs for one unit a thread, as far as they may be.
    const std::int64_t wanted = (p.units + threads - 1) / threads;
    const int grid = static_cast<int>(std::min<std::int64_t>(wanted, op.max_ctas - 1)) + 1;
    return for_dtype(op.dtype, [&]<Dtype dtype>() {
        const Launch how{.grid = grid, .block = threads, .dependent = op.dependent_launch, .stream = stream};
        const bool two = op.stages == 2;
        switch (batch_for(op.exchange.window.world)) {
            case 2: return launch(how, two ? two_stage<dtype, 2> : one_stage<dtype, 2>, p);
            case 4: return launch(how, two ? two_stage<dtype, 4> : one_stage<dtype, 4>, p);
            default: return launch(how, two ? two_stage<dtype, 8> : one_stage<dtype, 8>, p);
        }
    });
}

}  // namespace

std::int64_t all_reduce_slot_bytes(int world, int stages, std::int64_t rows, std::int64_t width, Dtype dtype) {
    const std::int64_t units = rows * width * static_cast<std::int64_t>(bytes_of(dtype)) / 16;
    return (slot_units(world, stages, units) * 16 + 127) / 128 * 128;
}

cudaError_t all_reduce(const AllReduce& op, cudaStream_t stream) {
    const std::int64_t row_units = op.width * static_cast<std::int64_t>(bytes_of(op.dtype)) / 16;
    Params p{.exchange = op.exchange,
             .x = unit_rows(op.x, op.width, op.dtype),
             .y = unit_rows(op.y, op.width, op.dtype),
             .prefix = unit_rows(op.prefix, op.width, op.dtype),
             .row_units = static_cast<std::uint32_t>(row_units),
             .release = op.dependent_launch};
    if (!valid(op.exchange) || op.tokens < 0 || op.width <= 0 || op.width % 8 != 0 || (op.stages != 1 && op.stages != 2) ||
        op.max_ctas < 2 || op.max_ctas > max_grid || !aligned(p.x) || !aligned(p.y) || !aligned(p.prefix)) {
        return cudaErrorInvalidValue;
    }
    // As many rows at a time as a slot holds (and 32-bit unit numbers count).
    std::int64_t most = std::min<std::int64_t>(op.tokens, (std::int64_t{1} << 30) / row_units);
    while (most > 1 &&
           all_reduce_slot_bytes(op.exchange.window.world, op.stages, most, op.width, op.dtype) > op.exchange.slot_bytes) {
        const std::int64_t one = all_reduce_slot_bytes(op.exchange.window.world, op.stages, most, op.width, op.dtype);
        most = std::max<std::int64_t>(1, std::min(most - 1, most * op.exchange.slot_bytes / one));
    }
    if (all_reduce_slot_bytes(op.exchange.window.world, op.stages, most, op.width, op.dtype) > op.exchange.slot_bytes) {
        return cudaErrorInvalidValue;  // not even one row fits
    }
    std::int64_t done = 0;
    do {
        const std::int64_t rows = std::min(most, op.tokens - done);
        p.tokens = static_cast<std::uint32_t>(rows);
        p.units = static_cast<std::uint32_t>(rows * row_units);
        if (const cudaError_t error = launch_rows(op, p, stream); error != cudaSuccess) return error;
        p.x.data += rows * p.x.stride;
        p.y.data += rows * p.y.stride;
        if (p.prefix.data) p.prefix.data += rows * p.prefix.stride;
        done += rows;
    } while (done < op.tokens);
    return cudaSuccess;
}

}  // namespace latent_moe::gpu
