#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "gpu/kernels/fused_tail.h"
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

/// Of data sheets, taken at 80 % for memory and 40 % for products: nothing here was measured.
struct Kind {
    std::string_view architecture;
    double memory_bytes_per_us;
    double flops_per_us;
    double link_bytes_per_us;  ///< to one peer
};
constexpr Kind kinds[] = {
    {"gfx950", 6.4e6, 920e6, 60e3},  // MI355X: 8 TB/s, 2.3 PFLOP/s
    {"gfx942", 4.2e6, 520e6, 50e3},  // MI300X: 5.3 TB/s, 1.3 PFLOP/s
    {"gfx90a", 1.3e6, 76e6, 40e3},   // half an MI250X
};

}  // namespace

const char* const backend_name = "hip";
const bool one_stage_bounds_fused = true;
const char* const collectives_not_captured = "its collectives go through RCCL, which has not been seen captured yet";

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

/// To start with; `tune` is to find better ones.
std::int64_t one_stage_bytes(int world) {
    return world <= 4 ? std::int64_t{256} << 10 : std::int64_t{128} << 10;
}

Machine cost_constants(int device, int sharing, int world) {
    const std::string here = architecture_of(device);
    const auto* kind = std::ranges::find(kinds, here, &Kind::architecture);
    if (kind == std::end(kinds)) kind = &kinds[1];
    const double share = 1.0 / sharing;
    return {.description = fmt::format("{} ({}, from its data sheet){}", properties_of(device).name, here,
                                       sharing > 1 ? fmt::format(" shared by {} ranks", sharing) : ""),
            .memory_bytes_per_us = kind->memory_bytes_per_us * share,
            .flops_per_us = kind->flops_per_us * share,
            .wire_bytes_per_us = kind->link_bytes_per_us * std::max(1, world - 1) * share,  // a link to every peer
            .hop_us = 2.0,
            .launch_us = 4.0,
            .collective_us = 8.0};
}

}  // namespace latent_moe::gpu::vendor
