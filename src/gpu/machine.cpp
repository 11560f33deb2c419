#include "gpu/machine.h"

#include <fmt/format.h>

#include "gpu/kernels/convert.h"
#include "gpu/runtime/matmul.h"
#include "gpu/runtime/nccl.h"
#include "gpu/runtime/resources.h"
#include "gpu/runtime/vendor.h"

namespace latent_moe::gpu {
namespace {

cudaDeviceProp properties_of(int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return properties;
}

void describe_devices(std::vector<std::string>& lines) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    lines.push_back(fmt::format("driver: {}", vendor::driver()));
    for (int device = 0; device < count; ++device) {
        const cudaDeviceProp properties = properties_of(device);
        lines.push_back(fmt::format("device {}: {}, {}, {} multiprocessors, {:.0f} GiB, L2 {} MiB", device, properties.name,
                                    vendor::architecture_of(device), properties.multiProcessorCount,
                                    static_cast<double>(properties.totalGlobalMem) / (1 << 30),
                                    properties.l2CacheSize >> 20));
    }
    for (int from = 0; from < count; ++from) {
        for (int to = 0; to < count; ++to) {
            if (from == to) continue;
            int possible = 0;
            int rank = 0;
            check(cudaDeviceCanAccessPeer(&possible, from, to), "cudaDeviceCanAccessPeer");
            static_cast<void>(cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, from, to));
            lines.push_back(fmt::format(
                "link {} to {}: {}", from, to,
                possible == 0 ? std::string("no peer access") : fmt::format("peer access, performance rank {}", rank)));
        }
    }
}

}  // namespace

std::string why_unavailable() {
    if (std::string reason = vendor::why_no_device(); !reason.empty()) return reason;
    try {
        const CurrentDevice first(0);
        if (const cudaError_t error = has_code_for_device(); error != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            return fmt::format("{} ({}) loads no kernel of this build, which has code for architectures {}: {}",
                               properties_of(0).name, vendor::architecture_of(0), LATENT_MOE_GPU_ARCHITECTURES,
                               cudaGetErrorString(error));
        }
    } catch (const Error& error) {
        return error.what();
    }
    return Matmul::missing();
}

std::vector<std::string> describe_machine() {
    std::vector<std::string> lines;
    lines.push_back(fmt::format("built for: architectures {}, {}", LATENT_MOE_GPU_ARCHITECTURES, vendor::built_against()));
    if (const std::string reason = vendor::why_no_device(); reason.empty()) {
        try {
            describe_devices(lines);
        } catch (const Error& error) {
            lines.push_back(fmt::format("devices: {}", error.what()));
        }
    } else {
        lines.push_back(fmt::format("devices: none ({})", reason));
    }
    lines.push_back(
        fmt::format("{}: {}", Matmul::library(), Matmul::missing().empty() ? Matmul::version_text() : Matmul::missing()));
    const Nccl& nccl_table = look_for_nccl();
    if (!nccl_table.missing.empty()) {
        lines.push_back(fmt::format("{}: {}", nccl_name, nccl_table.missing));
    } else {
        lines.push_back(fmt::format(
            "{}: {}{}", nccl_name, nccl_table.version_text(),
            nccl_table.window_missing.empty() ? "" : fmt::format(", no peer windows ({})", nccl_table.window_missing)));
    }
    return lines;
}

}  // namespace latent_moe::gpu
