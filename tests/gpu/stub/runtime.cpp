// CUDA's runtime without a GPU, for `host_time_stub`: devices are names, memory is the host's, and a kernel that is launched
// does nothing. What is left of a call is the library's own part of its host time, on any machine.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "stub/counts.h"

namespace latent_moe::test {

Counts& counts() noexcept {
    thread_local Counts of_thread;
    return of_thread;
}

KernelTime& kernel_time() noexcept {
    thread_local KernelTime of_thread = nullptr;
    return of_thread;
}

}  // namespace latent_moe::test

using latent_moe::test::counts;
using latent_moe::test::kernel_time;

// The other forms come here.
void* operator new(std::size_t bytes) {
    ++counts().allocations;
    void* memory = std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

constexpr int devices = 2;
constexpr int multiprocessors = 132;  // an H200's
thread_local int current = 0;

cudaError_t allocate(void** memory, std::size_t bytes) {
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

/// Any function of the driver's.
int succeed() {
    ++counts().others;
    return 0;
}

thread_local double clock_us = 0;

/// An event is when it was recorded.
double& time_of(cudaEvent_t event) {
    return *reinterpret_cast<double*>(event);
}

/// Handles that nobody else looks into.
template <typename Handle>
cudaError_t make(Handle* handle) {
    *handle = static_cast<Handle>(std::calloc(1, sizeof(double)));
    return cudaSuccess;
}

}  // namespace

extern "C" {

// Devices.
cudaError_t cudaGetDeviceCount(int* count) {
    ++counts().others;
    *count = devices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    ++counts().others;
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    ++counts().others;
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    ++counts().others;
    *properties = {};
    std::strcpy(properties->name, "no GPU");
    properties->multiProcessorCount = multiprocessors;
    properties->uuid.bytes[0] = static_cast<char>(device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    ++counts().others;
    switch (which) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = 6144; break;
        case cudaDevAttrMemoryClockRate: *value = 3'201'000; break;
        default: *value = 1;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
    ++counts().others;
    *possible = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) {
    ++counts().others;
    *value = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    ++counts().others;
    *least = 0, *greatest = -1;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    ++counts().others;
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* all) {
    ++counts().others;
    *available = *all = std::size_t{1} << 36;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    *function = reinterpret_cast<void*>(&succeed);
    if (found != nullptr) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// Errors.
cudaError_t cudaGetLastError() {
    ++counts().others;
    return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) {
    return "cudaError";
}
const char* cudaGetErrorString(cudaError_t) {
    return "an error of the stub";
}

// Memory.
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
    ++counts().others;
    return allocate(memory, bytes);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
    ++counts().others;
    return allocate(memory, bytes);
}
cudaError_t cudaFree(void* memory) {
    ++counts().others;
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
    ++counts().others;
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
    ++counts().others;
    std::memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, cudaMemcpyKind,
                              cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaMemset(void*, int, std::size_t) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) {
    ++counts().others;
    return cudaSuccess;
}

// Streams, events, graphs.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    ++counts().others;
    return make(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    ++counts().others;
    std::free(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    ++counts().others;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    ++counts().others;
    return make(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ++counts().others;
    std::free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    ++counts().others;
    time_of(event) = clock_us;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    ++counts().others;
    *ms = kernel_time() == nullptr ? 1 : static_cast<float>((time_of(end) - time_of(begin)) / 1000);
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    ++counts().others;
    return cudaErrorNotSupported;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
    ++counts().others;
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
    ++counts().others;
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
    ++counts().others;
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    ++counts().others;
    return cudaErrorNotSupported;
}

// Kernels.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    ++counts().others;
    *attributes = {};
    attributes->ptxVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    ++counts().others;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* config) {
    ++counts().others;
    *count = multiprocessors / static_cast<int>(config->gridDim.x);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    ++counts().launches;
    if (kernel_time() != nullptr) clock_us += kernel_time()(*config);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t) {
    ++counts().launches;
    return cudaSuccess;
}

// What the compiler's own code calls.
void** __cudaRegisterFatBinary(void*) {
    static void* none = nullptr;
    return &none;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, std::size_t, void*) {
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) {
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void*) {
    *kernel = nullptr;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t, cudaStream_t) {
    ++counts().launches;
    return cudaSuccess;
}

}  // extern "C"
