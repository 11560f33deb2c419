#include "gpu/kernels/finish_product.h"

#include <algorithm>

#include "gpu/primitives/launch.h"
#include "gpu/primitives/numeric.h"
#include "gpu/primitives/scalar.h"

namespace latent_moe::gpu {
namespace {

constexpr int threads = cta_threads(256);
constexpr std::int64_t most_ctas = 2048;

template <class T>
struct Number;
template <>
struct Number<__nv_bfloat16> {
    __device__ static float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
    __device__ static __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
};
template <>
struct Number<__half> {
    __device__ static float widen(__half v) { return __half2float(v); }
    __device__ static __half round(float v) { return __float2half_rn(v); }
};
template <>
struct Number<float> {
    __device__ static float widen(float v) { return v; }
    __device__ static float round(float v) { return v; }
};

// An element at a time: rows of any alignment, since this is also where unaligned callers end.
template <class T>
__global__ void __launch_bounds__(threads) finish(const FinishProduct op) {
    using N = Number<T>;
    const std::int64_t step = std::int64_t{gridDim.x} * threads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < op.tokens * op.width; i += step) {
        const std::int64_t m = i / op.width, n = i % op.width;
        const float scale = op.column_scales != nullptr ? op.scale * op.column_scales[n] : op.scale;
        const float addend =
            op.addend.data != nullptr ? N::widen(static_cast<const T*>(op.addend.data)[m * op.addend.stride + n]) : 0;
        T value = N::round(fmaf(scale, op.sums[i], addend));
        if (op.prefix.data != nullptr) {
            value = N::round(N::widen(value) + N::widen(static_cast<const T*>(op.prefix.data)[m * op.prefix.stride + n]));
        }
        static_cast<T*>(op.out.data)[m * op.out.stride + n] = value;
    }
}

}  // namespace

cudaError_t finish_product(const FinishProduct& given, cudaStream_t stream) {
    FinishProduct op = given;
    if (op.tokens < 0 || op.width <= 0 || op.sums == nullptr || op.out.data == nullptr) return cudaErrorInvalidValue;
    if (op.tokens == 0) return cudaSuccess;
    for (std::int64_t* stride : {&op.addend.stride, &op.prefix.stride, &op.out.stride}) {
        if (*stride == 0) *stride = op.width;
    }
    const std::int64_t wanted = (op.tokens * op.width + threads - 1) / threads;
    const Launch how{.grid = static_cast<int>(std::min(wanted, most_ctas)), .block = threads, .stream = stream};
    switch (op.dtype) {
        case Dtype::bf16: return launch(how, finish<__nv_bfloat16>, op);
        case Dtype::f16: return launch(how, finish<__half>, op);
        case Dtype::f32: return launch(how, finish<float>, op);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace latent_moe::gpu
