// Nobody sends anything: a thread owns 16 bytes of one token's row and reads those of each of its experts' rows, in slot
// order.
//
// The product and the sum of each step are rounded on their own (no fused multiply-add), as on the host.
#include "gpu/kernels/combine_rows.h"

#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/numeric.h"

namespace latent_moe::gpu {
namespace {

constexpr int threads = cta_threads(128);

struct Params {
    UnitRows x;
    std::int64_t count;
    const void* weights;
    const std::int32_t* map;
    int slots;
    UnitRows y;
    std::int64_t units;  ///< of all tokens
    std::uint32_t row_units;
    bool bf16_weights;
};

template <Dtype dtype>
__global__ void __launch_bounds__(threads) combine(const Params p) {
    using U = Unit<dtype>;
    const std::int64_t unit = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (unit >= p.units) return;
    const std::int64_t token = unit / p.row_units;
    const auto column = static_cast<std::uint32_t>(unit % p.row_units);
    float sum[U::size] = {};
    for (int slot = 0; slot < p.slots; ++slot) {
        const std::int64_t at = token * p.slots + slot;
        const std::int32_t row = p.map[at];
        if (row < 0) continue;
        float weight = as_float(0x7fc00000);  // of a row that is not there
        uint4 unit_of_row = make_uint4(0, 0, 0, 0);
        if (row < p.count) {
            weight = p.bf16_weights ? as_float(std::uint32_t{static_cast<const std::uint16_t*>(p.weights)[at]} << 16)
                                    : static_cast<const float*>(p.weights)[at];
            unit_of_row = *p.x.at(static_cast<std::uint32_t>(row), column);
        }
        float value[U::size];
        U::unpack(unit_of_row, value);
#pragma unroll
        for (int i = 0; i < U::size; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, value[i]));
    }
    *p.y.at(static_cast<std::uint32_t>(token), column) = U::pack(sum);
}

}  // namespace

cudaError_t combine_rows(const CombineRows& call, cudaStream_t stream) {
    const std::int64_t row_bytes = call.width * static_cast<std::int64_t>(bytes_of(call.dtype));
    const bool bf16_weights = call.weight_dtype == Dtype::bf16;
    if (call.tokens < 0 || call.slots < 1 || row_bytes <= 0 || row_bytes % 16 != 0) return cudaErrorInvalidValue;
    if (!bf16_weights && call.weight_dtype != Dtype::f32) return cudaErrorInvalidValue;
    if (call.tokens == 0) return cudaSuccess;
    const Params params{.x = unit_rows(call.x, call.width, call.dtype),
                        .count = call.count,
                        .weights = call.weights,
                        .map = call.map,
                        .slots = call.slots,
                        .y = unit_rows(call.y, call.width, call.dtype),
                        .units = call.tokens * (row_bytes / 16),
                        .row_units = static_cast<std::uint32_t>(row_bytes / 16),
                        .bf16_weights = bf16_weights};
    if (!aligned(params.x) || !aligned(params.y)) return cudaErrorInvalidValue;
    const Launch how{.grid = static_cast<int>((params.units + threads - 1) / threads), .block = threads, .stream = stream};
    return for_dtype(call.dtype, [&]<Dtype dtype>() { return launch(how, combine<dtype>, params); });
}

}  // namespace latent_moe::gpu
