// What the kernels' host side uses of CUDA's runtime, played by threads of this machine (emulated_gpu.h): sources of src/gpu
// that are compiled against this folder launch their kernels on an emulated GPU.
//
// A stream is an emulated one, and every thread of its rank makes every call. A null stream is the calling thread alone: for
// kernels whose threads do not wait for one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "gpu/protocol/emulated_gpu.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__

enum cudaError_t : int {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorInsufficientDriver,
    cudaErrorNoDevice,
    cudaErrorInvalidDevice,
    cudaErrorNoKernelImageForDevice,
    cudaErrorNotSupported,
    cudaErrorLaunchOutOfResources,
};
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidValue ? "invalid argument" : "an error";
}
inline const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorInvalidValue ? "cudaErrorInvalidValue" : "another";
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

using cudaStream_t = latent_moe::gpu::emulated::Stream*;
using cudaEvent_t = void*;

// ---- launches

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
enum cudaLaunchAttributeID : int { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        dim3 clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
namespace latent_moe::gpu::emulated {
cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& kernel);
}
template <class... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), const Params&... params) {
    return latent_moe::gpu::emulated::launch(*config, [&] { kernel(params...); });
}

/// Of a GPU that has every kernel and room for every grid.
struct cudaDeviceProp {
    char gcnArchName[16];
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {"gfx942"};
    return cudaSuccess;
}
enum cudaDeviceAttr : int { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 1 << 10;
    return cudaSuccess;
}
inline cudaError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, const void*, int, std::size_t) {
    *ctas = 1;
    return cudaSuccess;
}
struct cudaFuncAttributes {};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
    return cudaSuccess;
}

// ---- memory

enum cudaMemcpyKind : int { cudaMemcpyDefault, cudaMemcpyDeviceToDevice };
inline constexpr unsigned cudaHostAllocMapped = 1, cudaHostAllocPortable = 2;

inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
    *memory = std::aligned_alloc(128, (bytes + 127) / 128 * 128);
    return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
    return cudaMalloc(memory, bytes);
}
inline cudaError_t cudaFreeHost(void* memory) {
    return cudaFree(memory);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                              std::size_t rows, cudaMemcpyKind kind, cudaStream_t stream);
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream);

// ---- devices, streams and events: what nobody asks for here

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2;
inline cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*) {
    return cudaErrorNotSupported;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, unsigned, int) {
    return cudaErrorNotSupported;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaErrorNotSupported;
}
/// A null stream has done its work when it was asked.
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return stream == nullptr ? cudaSuccess : cudaErrorNotSupported;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) {
    return cudaErrorNotSupported;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaErrorNotSupported;
}

// ---- arithmetic: what the compiler may not fuse. It has no fused operations to use (x86-64's baseline).

inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
