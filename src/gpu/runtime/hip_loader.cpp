// One small function for every function of the HIP runtime that this program (or the code that clang adds for its kernels)
// calls: it jumps to where a table says. The table is filled before anything else of the program runs, from the library
// where there is one, else with a function that fails.
//
//     hipMalloc: jmp *table[i]        table[i] ◀── dlsym(libamdhip64.so, "hipMalloc")
//
// A jump needs no signatures, so the headers' own declarations hold, templates and all. The price is one instruction set:
// every machine that carries these GPUs has it.
#include "gpu/runtime/hip_loader.h"

#include <dlfcn.h>
#include <hip/hip_version.h>

#include <array>
#include <cstddef>
#include <string>

#ifndef __x86_64__
#error "the HIP loader is written for x86-64"
#endif

// clang-format off
#define LATENT_MOE_HIP_FUNCTIONS(X) \
    X(__hipPopCallConfiguration) X(__hipPushCallConfiguration) X(__hipRegisterFatBinary) X(__hipRegisterFunction) \
    X(__hipRegisterVar) X(__hipUnregisterFatBinary) \
    X(hipDeviceCanAccessPeer) X(hipDeviceEnablePeerAccess) X(hipDeviceGetAttribute) X(hipDeviceGetP2PAttribute) \
    X(hipDeviceGetPCIBusId) X(hipDeviceGetStreamPriorityRange) X(hipDriverGetVersion) X(hipRuntimeGetVersion) \
    X(hipEventCreateWithFlags) X(hipEventDestroy) X(hipEventElapsedTime) X(hipEventQuery) X(hipEventRecord) \
    X(hipEventSynchronize) X(hipExtMallocWithFlags) X(hipFree) X(hipFuncGetAttributes) X(hipFuncSetAttribute) X(hipGetDevice) \
    X(hipGetDeviceCount) X(hipGetDeviceProperties) X(hipGetDevicePropertiesR0600) X(hipGetErrorName) X(hipGetErrorString) \
    X(hipGetLastError) X(hipGraphDestroy) X(hipGraphExecDestroy) X(hipGraphInstantiateWithFlags) X(hipGraphLaunch) \
    X(hipHostFree) X(hipHostMalloc) X(hipIpcCloseMemHandle) X(hipIpcGetMemHandle) X(hipIpcOpenMemHandle) X(hipLaunchKernel) \
    X(hipMalloc) X(hipMemGetInfo) X(hipMemcpy2DAsync) X(hipMemcpyAsync) X(hipMemsetAsync) X(hipOccupancyMaxActiveBlocksPerMultiprocessor) \
    X(hipSetDevice) X(hipStreamBeginCapture) X(hipStreamCreateWithPriority) X(hipStreamDestroy) X(hipStreamEndCapture) \
    X(hipStreamIsCapturing) X(hipStreamQuery) X(hipStreamSynchronize) X(hipStreamWaitEvent) \
    X(hipThreadExchangeStreamCaptureMode)
// clang-format on

namespace {

constexpr std::array names = {
#define X(name) #name,
    LATENT_MOE_HIP_FUNCTIONS(X)
#undef X
};

enum Index : std::size_t {
#define X(name) index_of_##name,
    LATENT_MOE_HIP_FUNCTIONS(X)
#undef X
};

constexpr int no_device = 100;  // hipErrorNoDevice

int unavailable() {
    return no_device;
}
const char* unavailable_text() {
    return "no HIP runtime";
}

std::string& missing() {
    static std::string instance;
    return instance;
}

}  // namespace

// Read by the jumps below; hidden, as everything is.
extern "C" {
[[gnu::used]] void* latent_moe_hip_table[names.size()];
}

// The number of a name is counted by the assembler, in the order of the list.
asm(".text\n"
    ".set latent_moe_hip_offset, 0\n"
#define X(name)                                                               \
    ".globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name \
    ":\n"                                                                     \
    "jmp *(latent_moe_hip_table + latent_moe_hip_offset)(%rip)\n"             \
    ".set latent_moe_hip_offset, latent_moe_hip_offset + 8\n"
    LATENT_MOE_HIP_FUNCTIONS(X)
#undef X
);

namespace {

/// Before clang's constructors, which register the kernels.
[[gnu::constructor(101)]] void fill_table() {
    const std::string soname = "libamdhip64.so." + std::to_string(HIP_VERSION_MAJOR);
    void* library = dlopen(soname.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) library = dlopen(("/opt/rocm/lib/" + soname).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) missing() = soname + " not found (not in the linker's path, nor in /opt/rocm/lib)";
    for (std::size_t i = 0; i < names.size(); ++i) {
        void* function = library != nullptr ? dlsym(library, names[i]) : nullptr;
        if (function == nullptr) function = reinterpret_cast<void*>(&unavailable);
        latent_moe_hip_table[i] = function;
    }
    if (library != nullptr) return;
    for (const Index index : {index_of_hipGetErrorName, index_of_hipGetErrorString})
        latent_moe_hip_table[index] = reinterpret_cast<void*>(&unavailable_text);
}

}  // namespace

namespace latent_moe::gpu {

std::string hip_library_missing() {
    return missing();
}

}  // namespace latent_moe::gpu
