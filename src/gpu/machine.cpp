#include "gpu/machine.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "gpu/kernels/convert.h"
#include "gpu/runtime/cublas_lt.h"
#include "gpu/runtime/nccl.h"
#include "gpu/runtime/resources.h"

namespace latent_moe::gpu {
namespace {

std::string version_text(int version) {
    return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string why_no_device() {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    static_cast<void>(cudaGetLastError());
    if (error == cudaSuccess && count > 0) return {};
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver == nullptr) return "no CUDA driver: libcuda.so.1 not found";
    dlclose(driver);
    if (error == cudaErrorInsufficientDriver) {
        int version = 0;
        static_cast<void>(cudaDriverGetVersion(&version));
        return fmt::format("the driver supports CUDA {}, expected {} or newer", version_text(version),
                           version_text(CUDART_VERSION));
    }
    if (error == cudaSuccess || error == cudaErrorNoDevice) return "the CUDA driver finds no GPU";
    return fmt::format("cudaGetDeviceCount: {}", cudaGetErrorString(error));
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

std::string why_unavailable() {
    if (std::string reason = why_no_device(); !reason.empty()) return reason;
    try {
        const CurrentDevice first(0);
        if (has_code_for_device() != cudaSuccess) {
            return fmt::format("this build has code for architectures {}, but {} is compute capability {}.{}",
                               LATENT_MOE_CUDA_ARCHITECTURES, properties_of(0).name,
                               attribute(cudaDevAttrComputeCapabilityMajor, 0),
                               attribute(cudaDevAttrComputeCapabilityMinor, 0));
        }
    } catch (const Error& error) {
        return error.what();
    }
    return look_for_cublas_lt().missing;
}

std::vector<std::string> describe_machine() {
    std::vector<std::string> lines;
    lines.push_back(
        fmt::format("built for: architectures {}, CUDA {}", LATENT_MOE_CUDA_ARCHITECTURES, version_text(CUDART_VERSION)));
    if (const std::string reason = why_no_device(); reason.empty()) {
        try {
            int count = 0;
            check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
            int driver = 0;
            check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
            lines.push_back(fmt::format("driver: CUDA {}", version_text(driver)));
            for (int device = 0; device < count; ++device) {
                const cudaDeviceProp properties = properties_of(device);
                lines.push_back(
                    fmt::format("device {}: {}, compute capability {}.{}, {} multiprocessors, {:.0f} GiB, L2 {} MiB", device,
                                properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                                static_cast<double>(properties.totalGlobalMem) / (1 << 30), properties.l2CacheSize >> 20));
            }
            for (int from = 0; from < count; ++from) {
                for (int to = 0; to < count; ++to) {
                    if (from == to) continue;
                    int possible = 0;
                    int rank = 0;
                    check(cudaDeviceCanAccessPeer(&possible, from, to), "cudaDeviceCanAccessPeer");
                    static_cast<void>(cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, from, to));
                    lines.push_back(fmt::format("link {} to {}: {}", from, to,
                                                possible == 0 ? std::string("no peer access")
                                                              : fmt::format("peer access, performance rank {}", rank)));
                }
            }
        } catch (const Error& error) {
            lines.push_back(fmt::format("devices: {}", error.what()));
        }
    } else {
        lines.push_back(fmt::format("devices: none ({})", reason));
    }
    const CublasLt& lt = look_for_cublas_lt();
    lines.push_back(fmt::format("cuBLASLt: {}", lt.missing.empty() ? lt.version_text() : lt.missing));
    const Nccl& nccl_table = look_for_nccl();
    if (!nccl_table.missing.empty()) {
        lines.push_back(fmt::format("NCCL: {}", nccl_table.missing));
    } else {
        lines.push_back(fmt::format(
            "NCCL: {}{}", nccl_table.version_text(),
            nccl_table.window_missing.empty() ? "" : fmt::format(", no peer windows ({})", nccl_table.window_missing)));
    }
    return lines;
}

Machine cost_constants(int device, int sharing) {
    const cudaDeviceProp properties = properties_of(device);
    // Measured on an H200: 132 multiprocessors, 6144-bit memory at 3.2 GHz, NVLink 18.
    const double multiprocessors = properties.multiProcessorCount / 132.0;
    const double memory = static_cast<double>(attribute(cudaDevAttrGlobalMemoryBusWidth, device)) *
                          static_cast<double>(attribute(cudaDevAttrMemoryClockRate, device)) / (6144.0 * 3.201e6);
    const double share = 1.0 / sharing;
    return {
        .description = fmt::format("{}{}", properties.name, sharing > 1 ? fmt::format(" shared by {} ranks", sharing) : ""),
        .memory_bytes_per_us = 4.49e6 * memory * share,
        .flops_per_us = 700e6 * multiprocessors * share,
        .wire_bytes_per_us = 220e3 * share,
        .hop_us = 1.0,
        .launch_us = 1.5,
        .collective_us = 1.0,
        .best = {.flops_per_us = 790e6 * multiprocessors * share,
                 .wire_bytes_per_us = 369e3 * share,
                 .hop_us = 0.67,
                 .launch_us = 0.51}};
}

}  // namespace latent_moe::gpu
