#include "gpu/runtime/check.h"

#include <fmt/format.h>

namespace latent_moe::gpu {

void fail(cudaError_t error, const std::string& call) {
    static_cast<void>(cudaGetLastError());  // a failed launch would be reported again by whoever asks next
    StatusCode code = StatusCode::internal;
    if (error == cudaErrorMemoryAllocation) code = StatusCode::out_of_memory;
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice || error == cudaErrorInvalidDevice ||
        error == cudaErrorNoKernelImageForDevice) {
        code = StatusCode::unavailable;
    }
    throw Error(code, fmt::format("{}: {} ({})", call, cudaGetErrorString(error), cudaGetErrorName(error)));
}

}  // namespace latent_moe::gpu
