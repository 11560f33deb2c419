#include "gpu/kernels/finish_product.h"

#include <algorithm>

#include "gpu/kernels/finish_element.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

constexpr int threads = cta_threads(256);
constexpr std::int64_t most_ctas = 2048;

// An element at a time: rows of any alignment, since this is also where unaligned callers end.
template <class T>
__global__ void __launch_bounds__(threads) finish(const FinishProduct op) {
    const std::int64_t step = std::int64_t{gridDim.x} * threads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < op.tokens * op.width; i += step)
        finish_element<T>(op, i / op.width, i % op.width, op.sums[i]);
}

}  // namespace

cudaError_t finish_product(const FinishProduct& given, cudaStream_t stream) {
    const FinishProduct op = with_strides(given);
    if (op.tokens < 0 || op.width <= 0 || op.sums == nullptr || op.out.data == nullptr) return cudaErrorInvalidValue;
    if (op.tokens == 0) return cudaSuccess;
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
