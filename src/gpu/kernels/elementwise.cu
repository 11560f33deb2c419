// Kernels that touch every element once and talk to nobody.
//
//     rms_norm: CTA ◀── row ── x      one row a CTA at a time, in registers ──▶ y
//     add, copy, zero: thread ◀── 16 bytes of each operand ──▶ y
#include <algorithm>

#include "gpu/kernels/kernels.h"
#include "gpu/kernels/row_norm.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

constexpr int most_ctas = 1024;
constexpr int unit_threads = cta_threads(256);

struct NormParams {
    UnitRows x, y;
    const uint4* gamma;
    float epsilon;
    float inverse_width;
    std::uint32_t tokens;
    std::uint32_t row_units;
    bool release;
};

template <Dtype dtype, int per_thread>
__global__ void __launch_bounds__(norm_threads) normalise(const __grid_constant__ NormParams p) {
    LATENT_MOE_SHARED(SumParts[2], parts);
    dependency_wait();
    if (p.release) release_dependents();
    int turn = 0;
    for (std::uint32_t row = blockIdx.x; row < p.tokens; row += gridDim.x, ++turn) {
        const auto for_units = [&](auto body) {
#pragma unroll
            for (int i = 0; i < per_thread; ++i) {
                if (const std::uint32_t unit = threadIdx.x + i * blockDim.x; unit < p.row_units) body(i, unit);
            }
        };
        uint4 x[per_thread];
        float squares = 0;
        for_units([&](int i, std::uint32_t unit) { x[i] = load16(p.x.at(row, unit)); });
        for_units([&](int i, std::uint32_t) { squares = sum_of_squares<dtype>(x[i], squares); });
        const float factor = rms_factor(sum_over_cta(squares, parts[turn % 2]), p.inverse_width, p.epsilon);
        for_units([&](int i, std::uint32_t unit) {
            store16(p.y.at(row, unit), normalised<dtype>(x[i], load16(p.gamma + unit), factor));
        });
    }
}

struct AddParams {
    UnitRows a, b, prefix, y;  ///< an absent operand is skipped: copy has no b, zero has no a
    std::uint64_t units;
    std::uint32_t row_units;
    bool release;
};

template <Dtype dtype>
__global__ void __launch_bounds__(unit_threads) add_units(const __grid_constant__ AddParams p) {
    dependency_wait();
    if (p.release) release_dependents();
    const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < p.units; i += step) {
        const auto row = static_cast<std::uint32_t>(i / p.row_units), unit = static_cast<std::uint32_t>(i % p.row_units);
        uint4 value{};
        if (p.a.data) value = load16(p.a.at(row, unit));
        if (p.b.data) value = Unit<dtype>::add(value, load16(p.b.at(row, unit)));
        if (p.prefix.data) value = Unit<dtype>::add(value, load16(p.prefix.at(row, unit)));
        store16(p.y.at(row, unit), value);
    }
}

cudaError_t launch_add(const Add& op, cudaStream_t stream) {
    const std::int64_t row_units = op.width * static_cast<std::int64_t>(bytes_of(op.dtype)) / 16;
    const AddParams p{.a = unit_rows(op.a, op.width, op.dtype),
                      .b = unit_rows(op.b, op.width, op.dtype),
                      .prefix = unit_rows(op.prefix, op.width, op.dtype),
                      .y = unit_rows(op.y, op.width, op.dtype),
                      .units = static_cast<std::uint64_t>(op.tokens * row_units),
                      .row_units = static_cast<std::uint32_t>(row_units),
                      .release = op.dependent_launch};
    if (op.tokens < 0 || op.width <= 0 || op.width % 8 != 0 || !aligned(p.a) || !aligned(p.b) || !aligned(p.prefix) ||
        !aligned(p.y)) {
        return cudaErrorInvalidValue;
    }
    if (op.tokens == 0) return cudaSuccess;
    const Launch how{
        .grid = static_cast<int>(std::min<std::uint64_t>((p.units + unit_threads - 1) / unit_threads, most_ctas)),
        .block = unit_threads,
        .dependent = op.dependent_launch,
        .stream = stream};
    return for_dtype(op.dtype, [&]<Dtype dtype>() { return launch(how, add_units<dtype>, p); });
}

template <Dtype dtype>
__global__ void __launch_bounds__(unit_threads) reset(Control* control, uint4* mailboxes, std::int64_t units) {
    const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                       step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = first; i < control_bytes / 16; i += step)
        store_relaxed(reinterpret_cast<uint4*>(control) + i, uint4{});
    for (std::int64_t i = first; i < units; i += step) store_relaxed(mailboxes + i, Unit<dtype>::sentinel());
    fence<Scope::system>();
}

}  // namespace

cudaError_t rms_norm(const RmsNorm& op, cudaStream_t stream) {
    const std::int64_t units = op.width * static_cast<std::int64_t>(bytes_of(op.dtype)) / 16;
    const NormParams p{.x = unit_rows(op.x, op.width, op.dtype),
                       .y = unit_rows(op.y, op.width, op.dtype),
                       .gamma = static_cast<const uint4*>(op.gamma),
                       .epsilon = op.epsilon,
                       .inverse_width = 1.0F / static_cast<float>(op.width),
                       .tokens = static_cast<std::uint32_t>(op.tokens),
                       .row_units = static_cast<std::uint32_t>(units),
                       .release = op.dependent_launch};
    if (op.tokens < 0 || op.width <= 0 || op.width % 8 != 0 || op.width > max_norm_width(op.dtype) || !op.gamma ||
        !aligned(p.x) || !aligned(p.y)) {
        return cudaErrorInvalidValue;
    }
    if (op.tokens == 0) return cudaSuccess;
    const RowShape shape = row_shape(units);
    const Launch how{.grid = static_cast<int>(std::min<std::int64_t>(op.tokens, most_ctas)),
                     .block = shape.threads,
                     .dependent = op.dependent_launch,
                     .stream = stream};
    return for_dtype(op.dtype, [&]<Dtype dtype>() {
        switch (shape.per_thread) {
            case 1: return launch(how, normalise<dtype, 1>, p);
            case 2: return launch(how, normalise<dtype, 2>, p);
            case 4: return launch(how, normalise<dtype, 4>, p);
            default: return launch(how, normalise<dtype, 8>, p);
        }
    });
}

cudaError_t add(const Add& op, cudaStream_t stream) {
    return op.a.data && op.b.data ? launch_add(op, stream) : cudaErrorInvalidValue;
}

cudaError_t copy_rows(ConstRows from, Rows to, std::int64_t tokens, std::int64_t width, Dtype dtype, cudaStream_t stream) {
    return launch_add({.a = from, .y = to, .tokens = tokens, .width = width, .dtype = dtype}, stream);
}

cudaError_t zero_rows(Rows to, std::int64_t tokens, std::int64_t width, Dtype dtype, cudaStream_t stream) {
    return launch_add({.y = to, .tokens = tokens, .width = width, .dtype = dtype}, stream);
}

cudaError_t reset_window(void* base, std::int64_t slot_bytes, Dtype dtype, cudaStream_t stream) {
    if (!base || slot_bytes % 128 != 0) return cudaErrorInvalidValue;
    auto* control = static_cast<Control*>(base);
    auto* mailboxes = reinterpret_cast<uint4*>(static_cast<char*>(base) + control_bytes);
    const std::int64_t units = slots * slot_bytes / 16;
    return for_dtype(dtype, [&]<Dtype type>() {
        return launch({.grid = 264, .block = unit_threads, .stream = stream}, reset<type>, control, mailboxes, units);
    });
}

}  // namespace latent_moe::gpu
