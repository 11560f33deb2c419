// CUDA's runtime as cuda/cuda_runtime.h declares it.
#include <cstring>

#include "cuda/cuda_runtime.h"

namespace latent_moe::gpu::emulated {
namespace {

/// Work of one thread, on the stream or at once.
void enqueue(cudaStream_t stream, const std::function<void()>& work) {
    if (stream == nullptr) return work();
    stream->launch_in_order({1, 1}, work);
}

bool starts_early(const cudaLaunchConfig_t& config) {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        const cudaLaunchAttribute& a = config.attrs[i];
        if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization && a.val.programmaticStreamSerializationAllowed != 0)
            return true;
    }
    return false;
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& kernel) {
    const Grid grid{config.gridDim.x, config.blockDim.x};
    if (config.stream == nullptr) {
        run_one_by_one(grid, kernel);
    } else if (starts_early(config)) {
        config.stream->launch(grid, kernel);
    } else {
        config.stream->launch_in_order(grid, kernel);
    }
    return cudaSuccess;
}

}  // namespace latent_moe::gpu::emulated

using latent_moe::gpu::emulated::enqueue;

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                              std::size_t rows, cudaMemcpyKind, cudaStream_t stream) {
    enqueue(stream, [&] {
        for (std::size_t row = 0; row < rows; ++row)
            std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    });
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
    enqueue(stream, [&] { std::memset(memory, value, bytes); });
    return cudaSuccess;
}
