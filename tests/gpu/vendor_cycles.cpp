// What the vendor's libraries keep in the host's memory of things that were made and destroyed, a kind of thing at a time
// and without this library's contexts: what `context_cycles` on GPUs is to be compared with. Not a pass or a fail.
//
//     vendor_cycles [cycles=200] [ranks=2]
//
// Each rank is a thread that comes and goes with the cycle, as in `context_cycles`, on the GPU rank mod GPUs.
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "gpu/runtime/cublas_lt.h"
#include "gpu/runtime/nccl.h"
#include "ranks.h"

using namespace latent_moe;
using namespace latent_moe::gpu;

namespace {

constexpr std::size_t megabyte = std::size_t{1} << 20;

double resident_kilobytes() {
    ::malloc_trim(0);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    return static_cast<double>(pages) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 1024;
}

void stream_and_events() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (int i = 0; i < 4; ++i) {
        cudaEvent_t event = nullptr;
        check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
        check(cudaEventRecord(event, stream), "cudaEventRecord");
        check(cudaEventDestroy(event), "cudaEventDestroy");
    }
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

void device_memory() {
    std::vector<void*> blocks(8);
    for (void*& block : blocks) check(cudaMalloc(&block, 4 * megabyte), "cudaMalloc");
    for (void* block : blocks) check(cudaFree(block), "cudaFree");
}

void pinned_memory() {
    void* block = nullptr;
    check(cudaHostAlloc(&block, 4096, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    check(cudaFreeHost(block), "cudaFreeHost");
}

void graph() {
    cudaStream_t stream = nullptr;
    void* block = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaMalloc(&block, megabyte), "cudaMalloc");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < 4; ++i) check(cudaMemsetAsync(block, i, megabyte, stream), "cudaMemsetAsync");
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check(cudaFree(block), "cudaFree");
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

void matmul_handle() {
    if (!look_for_cublas_lt().missing.empty()) return;
    MatmulHandle handle = nullptr;
    check(cublas_lt().Create(&handle), "cublasLtCreate");
    check(cublas_lt().Destroy(handle), "cublasLtDestroy");
}

/// With one all-reduce, if `used`.
void communicator(const Bootstrap& boot, bool used) {
    ncclUniqueId id{};
    if (boot.rank == 0) check(nccl().GetUniqueId(&id), "ncclGetUniqueId");
    std::vector<ncclUniqueId> all(static_cast<std::size_t>(boot.world));
    boot.all_gather_bytes(&id, all.data(), sizeof id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = nullptr;
    check(nccl().CommInitRankConfig(&comm, boot.world, all.front(), boot.rank, &config), "ncclCommInitRankConfig");
    if (used) {
        cudaStream_t stream = nullptr;
        void* block = nullptr;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        check(cudaMalloc(&block, megabyte), "cudaMalloc");
        check(nccl().AllReduce(block, block, megabyte / 4, ncclFloat32, ncclSum, comm, stream), "ncclAllReduce");
        check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        test::meet(boot);
        check(cudaFree(block), "cudaFree");
        check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    }
    check(nccl().CommDestroy(comm), "ncclCommDestroy");
}

}  // namespace

int main(int argc, char** argv) {
    int cycles = 200;
    int ranks = 2;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.starts_with("cycles=")) cycles = std::max(10, std::atoi(argument.c_str() + 7));
        if (argument.starts_with("ranks=")) ranks = std::max(1, std::atoi(argument.c_str() + 6));
    }
    try {
        const int gpus = test::devices();
        const bool has_nccl = look_for_nccl().missing.empty() && gpus >= ranks;
        struct Kind {
            const char* name;
            std::function<void(const Bootstrap&)> make_and_destroy;
        };
        std::vector<Kind> kinds = {
            {"a thread that names its GPU", [](const Bootstrap&) {}},
            {"a stream and four events", [](const Bootstrap&) { stream_and_events(); }},
            {"device memory, eight blocks", [](const Bootstrap&) { device_memory(); }},
            {"a pinned page", [](const Bootstrap&) { pinned_memory(); }},
            {"a graph of four memsets", [](const Bootstrap&) { graph(); }},
            {"a handle of cuBLASLt", [](const Bootstrap&) { matmul_handle(); }},
        };
        if (has_nccl) {
            kinds.push_back({"a communicator of NCCL", [](const Bootstrap& boot) { communicator(boot, false); }});
            kinds.push_back({"one that is used", [](const Bootstrap& boot) { communicator(boot, true); }});
        } else {
            fmt::print("no communicators: {} ranks, {} GPUs, {}\n", ranks, gpus, look_for_nccl().missing);
        }
        fmt::print("{:<30} {:>14} {:>14}\n", fmt::format("{} cycles of {} ranks", cycles, ranks), "kept, KB", "KB a cycle");
        for (const Kind& kind : kinds) {
            const auto cycle = [&] {
                run_thread_ranks(ranks, [&](const Bootstrap& boot) {
                    check(cudaSetDevice(boot.rank % gpus), "cudaSetDevice");
                    kind.make_and_destroy(boot);
                });
            };
            for (int i = 0; i < cycles / 10; ++i) cycle();
            const double before = resident_kilobytes();
            for (int i = 0; i < cycles; ++i) cycle();
            const double kept = resident_kilobytes() - before;
            fmt::print("{:<30} {:>14.0f} {:>14.2f}\n", kind.name, kept, kept / cycles);
            std::fflush(stdout);
        }
    } catch (const std::exception& error) {
        fmt::print(stderr, "vendor_cycles: {}\n", error.what());
        return 1;
    }
    return 0;
}
