// What one launch costs the host, and which of its properties cost what: an empty kernel with the fused tail's grid, block,
// shared memory, parameters and attributes, one property after the other, then the same launch through other doors. It says
// where a call's host time can still be saved (docs/performance.md). Not a pass or a fail: it prints microseconds.
//
//     launch_cost                                                                     on a GPU of sm_90 or newer
#include <cuda.h>  // types only: the driver's function is looked up at run time
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

constexpr int burst = 20;  // launches that are enqueued in a row: no queue is full
constexpr int bursts = 200;
constexpr int grid = 112, block = 736, cluster = 4, shared_bytes = 231'424;  // the fused tail's at 8 tokens, Kimi-K3, TP 2

template <int bytes>
struct Parameters {
    char data[bytes];
};
constexpr int fused_bytes = 768;  // about what the fused tail's kernel takes

template <int bytes>
__global__ void empty(const __grid_constant__ Parameters<bytes> p) {
    if (p.data[0] == 1) __trap();  // so that parameters are there
}

template <int bytes>
__global__ void __cluster_dims__(cluster, 1, 1) empty_in_clusters(const __grid_constant__ Parameters<bytes> p) {
    if (p.data[0] == 1) __trap();
}

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "launch_cost: %s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}

struct How {
    bool clusters = false, early = false;
    int shared = 0;
};

struct Config {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[2];

    Config(const How& how, cudaStream_t stream) {
        config.gridDim = dim3(grid), config.blockDim = dim3(block);
        config.dynamicSmemBytes = static_cast<std::size_t>(how.shared), config.stream = stream;
        if (how.clusters) {
            cudaLaunchAttribute& a = attributes[config.numAttrs++];
            a.id = cudaLaunchAttributeClusterDimension;
            a.val.clusterDim.x = cluster, a.val.clusterDim.y = a.val.clusterDim.z = 1;
        }
        if (how.early) {
            cudaLaunchAttribute& a = attributes[config.numAttrs++];
            a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            a.val.programmaticStreamSerializationAllowed = 1;
        }
        config.attrs = attributes;
    }
    Config(const Config&) = delete;
    Config& operator=(const Config&) = delete;
};

double median_us(cudaStream_t stream, const std::function<void()>& launch) {
    std::vector<double> times;
    for (int each = 0; each < bursts; ++each) {
        check(cudaStreamSynchronize(stream), "launches");
        const auto begin = std::chrono::steady_clock::now();
        for (int of_burst = 0; of_burst < burst; ++of_burst) launch();
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
        times.push_back(took.count() / burst);
    }
    std::sort(times.begin(), times.end());
    return times[bursts / 2];
}

void print(const char* what, double us) {
    std::printf("%-72s %6.2f us\n", what, us);
    std::fflush(stdout);
}

template <int bytes>
void measure(cudaStream_t stream, const char* what, const How& how, const void* kernel) {
    Parameters<bytes> p{};
    void* arguments[] = {&p};
    print(what, median_us(stream, [&] {
              const Config made(how, stream);  // as the library does, at every launch
              check(cudaLaunchKernelExC(&made.config, kernel, arguments), "launch");
          }));
}

/// The fused tail's launch through the driver's own function.
void measure_driver(cudaStream_t stream, cudaKernel_t kernel) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &found, 12000, cudaEnableDefault, &result), "entry point");
    if (result != cudaDriverEntryPointSuccess) return print("the driver has no cuLaunchKernelEx", 0);
    const auto launch = reinterpret_cast<decltype(&cuLaunchKernelEx)>(found);
    Parameters<fused_bytes> p{};
    void* arguments[] = {&p};
    CUlaunchAttribute attributes[2] = {};
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[0].value.clusterDim.x = cluster, attributes[0].value.clusterDim.y = attributes[0].value.clusterDim.z = 1;
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[1].value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = grid, config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = block, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes, config.hStream = stream;
    config.attrs = attributes, config.numAttrs = 2;
    print("  the same through the driver's cuLaunchKernelEx, with the kernel's handle", median_us(stream, [&] {
              if (launch(&config, reinterpret_cast<CUfunction>(kernel), arguments, nullptr) != CUDA_SUCCESS)
                  check(cudaErrorUnknown, "launch by the driver");
          }));
}

}  // namespace

int main() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    const auto* small = reinterpret_cast<const void*>(&empty<8>);
    const auto* large = reinterpret_cast<const void*>(&empty<fused_bytes>);
    const auto* in_clusters = reinterpret_cast<const void*>(&empty_in_clusters<fused_bytes>);
    for (const void* kernel : {small, large, in_clusters})
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "shared memory");
    measure<8>(stream, "nothing but grid and block, 8 bytes of parameters", {}, small);
    measure<fused_bytes>(stream, "768 bytes of parameters", {}, large);
    measure<8>(stream, "226 KB of shared memory", {.shared = shared_bytes}, small);
    measure<8>(stream, "clusters of 4", {.clusters = true}, small);
    measure<8>(stream, "may start early", {.early = true}, small);
    const How all{.clusters = true, .early = true, .shared = shared_bytes};
    measure<fused_bytes>(stream, "all of that: the fused tail's launch", all, large);
    measure<fused_bytes>(stream, "  the same, but may not start early", {.clusters = true, .shared = shared_bytes}, large);
    measure<fused_bytes>(stream, "  the same, clusters being the kernel's own", {.early = true, .shared = shared_bytes},
                         in_clusters);
    cudaKernel_t handle = nullptr;
    check(cudaGetKernel(&handle, large), "cudaGetKernel");
    measure<fused_bytes>(stream, "  the same, the kernel named by its handle", all, reinterpret_cast<const void*>(handle));
    measure_driver(stream, handle);
    int device = 0;
    print("cudaGetDevice", median_us(stream, [&] { check(cudaGetDevice(&device), "cudaGetDevice"); }));
    cudaFuncAttributes attributes{};
    print("cudaFuncGetAttributes, which a projection asked for at every call",
          median_us(stream, [&] { check(cudaFuncGetAttributes(&attributes, large), "cudaFuncGetAttributes"); }));
    print("cudaFuncSetAttribute, alike", median_us(stream, [&] {
              check(cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "attribute");
          }));
    return 0;
}
