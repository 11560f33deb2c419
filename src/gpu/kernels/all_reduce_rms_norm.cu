// All-reduce and RMSNorm in one kernel: what stands between the experts and the projection.
//
//     rank a                              rank b (every other)
//     CTA m: row m of x ── push ──▶ mailbox a of b, row m ──▶ CTA m of b: Σ in rank order, round, Σ x², normalise ──▶ y
//     CTA 0: header ──────────────▶ header place a of b ─────▶ CTA 0 of b: compare
//
// A CTA holds a whole row in registers, a unit a thread where it fits, so the norm needs one barrier and no other CTA. When
// there are more rows than CTAs, row m + grid is pushed before row m is awaited. Memory order: data and signal are one word
// (mailbox.h); slots are reused under the headers' order (header.h, epoch.h).
#include <algorithm>

#include "gpu/kernels/kernels.h"
#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/row_norm.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

struct Params {
    Exchange exchange;
    UnitRows x, y;
    const uint4* gamma;
    float epsilon;
    float inverse_width;
    std::uint32_t tokens;
    std::uint32_t row_units;
    bool release;
};

template <Dtype dtype, int batch, int per_thread>
__global__ void __launch_bounds__(norm_threads) reduce_and_normalise(const __grid_constant__ Params p) {
    using U = Unit<dtype>;
    LATENT_MOE_SHARED(SumParts[2], parts);
    const Exchange& x = p.exchange;

    // γ is a weight: nobody writes it while the context lives, so it may be read before the predecessor has ended.
    uint4 gamma[per_thread] = {};
    const auto for_units = [&](auto body) {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            if (const std::uint32_t unit = threadIdx.x + i * blockDim.x; unit < p.row_units) body(i, unit);
        }
    };
    if (p.gamma) for_units([&](int i, std::uint32_t unit) { gamma[i] = load16(p.gamma + unit); });

    dependency_wait();
    if (p.release) release_dependents();
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);

    const std::int64_t stride = std::int64_t{p.tokens} * p.row_units;
    const auto own = [&](std::uint32_t row, std::uint32_t unit) { return U::canonical(load16(p.x.at(row, unit))); };
    const auto push = [&](std::uint32_t row) {
        for_units([&](int, std::uint32_t unit) {
            send_to_peers<dtype>(x, call, stride, row * p.row_units + unit, own(row, unit));
        });
    };

    const Boxes boxes = boxes_at(x, call, x.window.rank, stride);
    const std::uint32_t step = gridDim.x - 1;
    Wait wait(x, call.epoch);
    std::uint32_t digest = 0;
    int turn = 0;
    push(blockIdx.x - 1);
    for (std::uint32_t row = blockIdx.x - 1; row < p.tokens; row += step, ++turn) {
        if (row + step < p.tokens) push(row + step);
        uint4 sum[per_thread];
        float squares = 0;
        for_units([&](int i, std::uint32_t unit) {
            sum[i] = sum_over_ranks<dtype, batch>(x, boxes, row * p.row_units + unit, own(row, unit), wait, Phase::gather);
            squares = sum_of_squares<dtype>(sum[i], squares);
        });
        // A thread that gave up comes along to the barrier; it only stores nothing.
        const float factor = rms_factor(sum_over_cta(squares, parts[turn % 2]), p.inverse_width, p.epsilon);
        if (turn == 0) leave_call(x, call, threadIdx.x, blockDim.x);
        if (wait.gave_up()) continue;
        for_units([&](int i, std::uint32_t unit) {
            const uint4 value = p.gamma ? normalised<dtype>(sum[i], gamma[i], factor) : sum[i];
            store16(p.y.at(row, unit), value);
            digest += digest_of(value, row * p.row_units + unit);
        });
    }
    add_to_digest(x, call, digest);
}

template <Dtype dtype, int batch>
cudaError_t launch_for(int per_thread, const Launch& how, const Params& p) {
    switch (per_thread) {
        case 1: return launch(how, reduce_and_normalise<dtype, batch, 1>, p);
        case 2: return launch(how, reduce_and_normalise<dtype, batch, 2>, p);
        case 4: return launch(how, reduce_and_normalise<dtype, batch, 4>, p);
        default: return launch(how, reduce_and_normalise<dtype, batch, 8>, p);
    }
}

}  // namespace

std::int64_t max_norm_width(Dtype dtype) {
    return 8 * norm_threads * 16 / static_cast<std::int64_t>(bytes_of(dtype));
}

cudaError_t all_reduce_rms_norm(const AllReduceRmsNorm& op, cudaStream_t stream) {
    const std::int64_t units = op.width * static_cast<std::int64_t>(bytes_of(op.dtype)) / 16;
    const Params p{.exchange = op.exchange,
                   .x = unit_rows(op.x, op.width, op.dtype),
                   .y = unit_rows(op.y, op.width, op.dtype),
                   .gamma = static_cast<const uint4*>(op.gamma),
                   .epsilon = op.epsilon,
                   .inverse_width = 1.0F / static_cast<float>(op.width),
                   .tokens = static_cast<std::uint32_t>(op.tokens),
                   .row_units = static_cast<std::uint32_t>(units),
                   .release = op.dependent_launch};
    const int world = op.exchange.window.world;
    if (!valid(op.exchange) || op.tokens < 0 || op.width <= 0 || op.width % 8 != 0 || op.width > max_norm_width(op.dtype) ||
        op.max_ctas < 2 || op.max_ctas > max_grid || !aligned(p.x) || !aligned(p.y) ||
        all_reduce_slot_bytes(world, 1, op.tokens, op.width, op.dtype) > op.exchange.slot_bytes) {
        return cudaErrorInvalidValue;
    }
    const RowShape shape = row_shape(units);
    const Launch how{.grid = static_cast<int>(std::min<std::int64_t>(op.tokens, op.max_ctas - 1)) + 1,
                     .block = shape.threads,
                     .dependent = op.dependent_launch,
                     .stream = stream};
    return for_dtype(op.dtype, [&]<Dtype dtype>() {
        switch (batch_for(world)) {
            case 2: return launch_for<dtype, 2>(shape.per_thread, how, p);
            case 4: return launch_for<dtype, 4>(shape.per_thread, how, p);
            default: return launch_for<dtype, 8>(shape.per_thread, how, p);
        }
    });
}

}  // namespace latent_moe::gpu
