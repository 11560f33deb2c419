#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#include "gpu/known_devices.h"
#include "gpu/runtime/check.h"
#include "gpu/runtime/vendor.h"

namespace latent_moe::gpu::vendor {
namespace {

std::string version_text(int version) {
    return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

cudaDeviceProp properties_of(int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return properties;
}

}  // namespace

const char* const backend_name = "cuda";
const bool one_stage_bounds_fused = false;
const char* const collectives_not_captured = "";

std::string why_no_device() {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    static_cast<void>(cudaGetLastError());
    if (error == cudaSuccess && count > 0) return {};
    void* found = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (found == nullptr) return "no CUDA driver: libcuda.so.1 not found";
    dlclose(found);
    if (error == cudaErrorInsufficientDriver) {
        int version = 0;
        static_cast<void>(cudaDriverGetVersion(&version));
        return fmt::format("the driver supports CUDA {}, expected {} or newer", version_text(version),
                           version_text(CUDART_VERSION));
    }
    if (error == cudaSuccess || error == cudaErrorNoDevice) return "the CUDA driver finds no GPU";
    return fmt::format("cudaGetDeviceCount: {}", cudaGetErrorString(error));
}

void prepare_own_process() {
    // Ranks that are threads may share a GPU. There a kernel that is loaded when it is first launched, as cuBLASLt's may be,
    // waits for the device, where a peer's kernel waits for the rank that has yet to call: for ever (seen in a soak). And
    // every rank's launches need a queue of their own.
    ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

std::string built_against() {
    return fmt::format("CUDA {}", version_text(CUDART_VERSION));
}

std::string driver() {
    int version = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return fmt::format("CUDA {}", version_text(version));
}

std::string architecture_of(int device) {
    return fmt::format("compute capability {}.{}", attribute(cudaDevAttrComputeCapabilityMajor, device),
                       attribute(cudaDevAttrComputeCapabilityMinor, device));
}

std::array<char, 16> identity_of(int device) {
    std::array<char, 16> identity{};
    const cudaDeviceProp properties = properties_of(device);
    std::memcpy(identity.data(), properties.uuid.bytes, identity.size());
    return identity;
}

std::string why_not_fused(int) {
    return {};
}

int free_for_a_cluster(int device) {
    // A cluster, of 8 CTAs at most, lies inside one of the chip's parts, of which Hopper has up to 8. Seen to matter: three
    // ranks shared an H200, two waited with 38 CTAs each, and the third's product, in clusters, never began.
    constexpr int most_ctas = 8;
    constexpr int most_parts = 8;
    return attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9 ? most_parts * (most_ctas - 1) + 1 : 0;
}

std::int64_t one_stage_bytes(int world) {
    // One stage sends (R - 1) n bytes from every rank, two stages 2 (R - 1) / R n: what the second hop is worth on the wire,
    // 1.3 µs at 370 GB/s.
    constexpr std::int64_t hop_bytes = 480'000;
    return world <= 2 ? INT64_MAX : hop_bytes * world / (std::int64_t{world - 1} * (world - 2));
}

Machine cost_constants(int device, int sharing, int world) {
    const cudaDeviceProp properties = properties_of(device);
    // An H200 has 132 multiprocessors and 6144-bit memory at 3.2 GHz; its links are anybody's until they are measured.
    const double multiprocessors = properties.multiProcessorCount / 132.0;
    const double memory = static_cast<double>(attribute(cudaDevAttrGlobalMemoryBusWidth, device)) *
                          static_cast<double>(attribute(cudaDevAttrMemoryClockRate, device)) / (6144.0 * 3.201e6);
    Machine machine = known_device("h200")->of(world);
    machine.memory_bytes_per_us *= memory;
    machine.flops_per_us *= multiprocessors;
    machine.best.flops_per_us *= multiprocessors;
    machine = machine.shared_by(sharing);
    machine.description =
        fmt::format("{}{}", properties.name, sharing > 1 ? fmt::format(" shared by {} ranks", sharing) : "");
    return machine;
}

}  // namespace latent_moe::gpu::vendor
