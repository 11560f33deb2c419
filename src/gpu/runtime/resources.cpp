#include "gpu/runtime/resources.h"

#include <fmt/format.h>

#include <cstring>

namespace latent_moe::gpu {

Stream make_stream(bool urgent) {
    int least = 0;
    int greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, urgent ? greatest : least),
          "cudaStreamCreateWithPriority");
    return Stream(stream);
}

Event make_event(bool timing) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return Event(event);
}

DeviceMemory::DeviceMemory(std::size_t bytes, const char* what) : bytes_(bytes) {
    if (bytes == 0) return;
    void* memory = nullptr;
    if (const cudaError_t error = cudaMalloc(&memory, bytes); error != cudaSuccess) {
        fail(error, fmt::format("{}: cudaMalloc of {:.1f} MB", what, static_cast<double>(bytes) / 1e6));
    }
    memory_ = Owned<DeviceMemoryKind>(static_cast<std::byte*>(memory));
}

DeviceMemory DeviceMemory::window(std::size_t bytes) {
    void* memory = nullptr;
    if (const cudaError_t error = allocate_window(&memory, bytes); error != cudaSuccess) {
        fail(error, fmt::format("peer window: {:.1f} MB", static_cast<double>(bytes) / 1e6));
    }
    DeviceMemory result;
    result.bytes_ = bytes;
    result.memory_ = Owned<DeviceMemoryKind>(static_cast<std::byte*>(memory));
    return result;
}

MappedMemory::MappedMemory(std::size_t bytes, const char* what) {
    void* memory = nullptr;
    if (const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
        error != cudaSuccess) {
        fail(error, fmt::format("{}: cudaHostAlloc of {} bytes", what, bytes));
    }
    std::memset(memory, 0, bytes);
    memory_ = Owned<MappedMemoryKind>(static_cast<std::byte*>(memory));
}

}  // namespace latent_moe::gpu
