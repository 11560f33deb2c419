#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "gpu/kernels/fused_tail.h"
#include "gpu/known_devices.h"
#include "gpu/runtime/check.h"
#include "gpu/runtime/hip_loader.h"
#include "gpu/runtime/vendor.h"

namespace latent_moe::gpu::vendor {
namespace {

std::string version_text(int version) {
    return fmt::format("{}.{}", version / 10'000'000, version / 100'000 % 100);
}

hipDeviceProp_t properties_of(int device) {
    hipDeviceProp_t properties{};
    check(hipGetDeviceProperties(&properties, device), "hipGetDeviceProperties");
    return properties;
}

/// The kind of machine that an architecture is taken for.
const char* kind_of(const std::string& architecture) {
    return architecture == "gfx950" ? "mi355x" : architecture == "gfx90a" ? "mi250x" : "mi300x";
}

}  // namespace

const char* const backend_name = "hip";
const bool one_stage_bounds_fused = true;
const char* const collectives_not_captured = amd_collectives_not_captured;

std::string why_no_device() {
    if (const std::string missing = hip_library_missing(); !missing.empty())
        return fmt::format("no HIP runtime: {}", missing);
    int count = 0;
    const hipError_t error = hipGetDeviceCount(&count);
    static_cast<void>(hipGetLastError());
    if (error == hipSuccess && count > 0) return {};
    if (error == hipSuccess || error == hipErrorNoDevice) return "the HIP runtime finds no GPU";
    return fmt::format("hipGetDeviceCount: {}", hipGetErrorString(error));
}

void prepare_own_process() {}

std::string built_against() {
    return fmt::format("HIP {}", version_text(HIP_VERSION));
}

std::string driver() {
    int version = 0;
    check(hipRuntimeGetVersion(&version), "hipRuntimeGetVersion");
    return fmt::format("HIP {}", version_text(version));
}

/// Without the features that follow a colon.
std::string architecture_of(int device) {
    const std::string name = properties_of(device).gcnArchName;
    return name.substr(0, name.find(':'));
}

/// Its place on the bus; the partitions of one GPU differ in their last digit.
std::array<char, 16> identity_of(int device) {
    std::array<char, 16> identity{};
    check(hipDeviceGetPCIBusId(identity.data(), static_cast<int>(identity.size()), device), "hipDeviceGetPCIBusId");
    return identity;
}

std::string why_not_fused(int device) {
    const std::string here = architecture_of(device);
    if (std::ranges::find(fused_tail_architectures, here) != fused_tail_architectures.end()) return {};
    return fmt::format("{} has no fused kernel: it needs MFMA and waves of 64 lanes, as {} have them", here,
                       fmt::join(fused_tail_architectures, ", "));
}

int free_for_a_cluster(int) {
    return 0;
}

std::int64_t one_stage_bytes(int world) {
    return amd_one_stage_bytes(world);
}

Machine cost_constants(int device, int sharing, int world) {
    const std::string here = architecture_of(device);
    Machine machine = known_device(kind_of(here))->of(world).shared_by(sharing);
    machine.description = fmt::format("{} ({}, from its data sheet){}", properties_of(device).name, here,
                                      sharing > 1 ? fmt::format(" shared by {} ranks", sharing) : "");
    return machine;
}

}  // namespace latent_moe::gpu::vendor
