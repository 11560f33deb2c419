// Stands for libamdhip64 where there is no GPU: memory is the host's, work is done or only written down when it is asked
// for, kernels are not run. Signatures are those of the header that the backend was compiled with.
//
// Memory of hipExtMallocWithFlags is shared between processes, so that IPC handles mean something.
#include <fcntl.h>
#include <hip/hip_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "fake_log.h"

using latent_moe::fake::log;

namespace {

struct Shared {
    std::string name;
    std::size_t bytes;
};

std::mutex mutex;
std::map<const void*, std::string> kernels;  // by the address of the host's stub
std::map<void*, Shared> shared_memory;       // allocated or opened here

thread_local int current_device = 0;

struct CallConfiguration {
    dim3 grid, block;
    std::size_t shared_bytes;
    hipStream_t stream;
};
thread_local CallConfiguration configuration;

const char* setting(const char* variable, const char* otherwise) {
    const char* given = std::getenv(variable);
    return given != nullptr ? given : otherwise;
}
int devices() {
    return std::atoi(setting("FAKE_HIP_DEVICES", "8"));
}

void* map(const std::string& name, std::size_t bytes, int flags) {
    const int file = shm_open(name.c_str(), flags, 0600);
    if (file < 0) return nullptr;
    if ((flags & O_CREAT) != 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) return nullptr;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return memory == MAP_FAILED ? nullptr : memory;
}

template <typename Handle>
Handle new_handle() {
    static std::atomic<std::uintptr_t> next{1};
    return reinterpret_cast<Handle>(next++ * 16);
}

}  // namespace

// ---- what clang's code for the host calls

LATENT_MOE_FAKE void** __hipRegisterFatBinary(const void*) {
    static void* registered = nullptr;
    return &registered;
}
LATENT_MOE_FAKE void __hipUnregisterFatBinary(void**) {}
LATENT_MOE_FAKE void __hipRegisterVar(void**, void*, char*, char*, int, std::size_t, int, int) {}
LATENT_MOE_FAKE void __hipRegisterFunction(void**, const void* stub, char*, const char* name, unsigned, uint3*, uint3*,
                                           dim3*, dim3*, int*) {
    const std::lock_guard lock(mutex);
    kernels[stub] = name;
}
LATENT_MOE_FAKE hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes, hipStream_t stream) {
    configuration = {grid, block, shared_bytes, stream};
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes,
                                                     hipStream_t* stream) {
    *grid = configuration.grid, *block = configuration.block, *shared_bytes = configuration.shared_bytes;
    *stream = configuration.stream;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipLaunchKernel(const void* stub, dim3 grid, dim3 block, void**, std::size_t shared_bytes,
                                           hipStream_t) {
    const std::lock_guard lock(mutex);
    if (!kernels.contains(stub)) return hipErrorInvalidDeviceFunction;
    if (grid.x == 0 || block.x == 0 || block.x > 1024 || shared_bytes > 65536) return hipErrorInvalidConfiguration;
    log(fmt::format("launch {} grid {} block {}", kernels[stub], grid.x, block.x));
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* stub) {
    const std::lock_guard lock(mutex);
    *attributes = {};
    return kernels.contains(stub) ? hipSuccess : hipErrorInvalidDeviceFunction;
}
LATENT_MOE_FAKE hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* stub, int threads,
                                                                        std::size_t) {
    const std::lock_guard lock(mutex);
    *blocks = threads <= 1024 ? 1 : 0;
    return kernels.contains(stub) ? hipSuccess : hipErrorInvalidDeviceFunction;
}

// ---- devices

LATENT_MOE_FAKE hipError_t hipGetDeviceCount(int* count) {
    *count = devices();
    return *count > 0 ? hipSuccess : hipErrorNoDevice;
}
LATENT_MOE_FAKE hipError_t hipGetDevice(int* device) {
    *device = current_device;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipSetDevice(int device) {
    if (device < 0 || device >= devices()) return hipErrorInvalidDevice;
    current_device = device;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device) {
    *properties = {};
    if (device < 0 || device >= devices()) return hipErrorInvalidDevice;
    std::strcpy(properties->name, "Fake Instinct");
    std::strcpy(properties->gcnArchName, setting("FAKE_HIP_ARCHITECTURE", "gfx942:sramecc+:xnack-"));
    properties->multiProcessorCount = 304;
    properties->totalGlobalMem = std::size_t{192} << 30;
    properties->l2CacheSize = 4 << 20;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t which, int) {
    *value = which == hipDeviceAttributeMultiprocessorCount ? 304 : 9;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipDeviceGetPCIBusId(char* id, int bytes, int device) {
    fmt::format_to_n(id, bytes, "0000:{:02x}:00.0\0", device);
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipDeviceCanAccessPeer(int* possible, int, int) {
    *possible = std::atoi(setting("FAKE_HIP_PEERS", "1"));
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipDeviceEnablePeerAccess(int, unsigned) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipDeviceGetP2PAttribute(int* value, hipDeviceP2PAttr, int, int) {
    *value = 0;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipDriverGetVersion(int* version) {
    *version = HIP_VERSION;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipRuntimeGetVersion(int* version) {
    *version = HIP_VERSION;
    return hipSuccess;
}
LATENT_MOE_FAKE const char* hipGetErrorName(hipError_t error) {
    return error == hipSuccess ? "hipSuccess" : "hipErrorOfTheFake";
}
LATENT_MOE_FAKE const char* hipGetErrorString(hipError_t error) {
    return error == hipSuccess ? "no error" : "an error of the fake library";
}
LATENT_MOE_FAKE hipError_t hipGetLastError() {
    return hipSuccess;
}

// ---- memory

LATENT_MOE_FAKE hipError_t hipMalloc(void** memory, std::size_t bytes) {
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *memory != nullptr ? hipSuccess : hipErrorOutOfMemory;
}
LATENT_MOE_FAKE hipError_t hipMemGetInfo(std::size_t* free, std::size_t* all) {
    *free = *all = std::size_t{1} << 30;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipExtMallocWithFlags(void** memory, std::size_t bytes, unsigned flags) {
    static std::atomic<int> next{0};
    log(fmt::format("hipExtMallocWithFlags {} flags {}", bytes, flags));
    const std::lock_guard lock(mutex);
    const std::string name = fmt::format("/latent-moe-fake-{}-{}", getpid(), next++);
    *memory = map(name, bytes, O_CREAT | O_EXCL | O_RDWR);
    if (*memory == nullptr) return hipErrorOutOfMemory;
    shared_memory[*memory] = {name, bytes};
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipFree(void* memory) {
    const std::lock_guard lock(mutex);
    const auto shared = shared_memory.find(memory);
    if (shared == shared_memory.end()) {
        std::free(memory);
        return hipSuccess;
    }
    munmap(memory, shared->second.bytes);
    shm_unlink(shared->second.name.c_str());
    shared_memory.erase(shared);
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipHostMalloc(void** memory, std::size_t bytes, unsigned flags) {
    log(fmt::format("hipHostMalloc {} flags {:#x}", bytes, flags));
    return hipMalloc(memory, bytes);
}
LATENT_MOE_FAKE hipError_t hipHostFree(void* memory) {
    std::free(memory);
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipMemcpyAsync(void* to, const void* from, std::size_t bytes, hipMemcpyKind, hipStream_t) {
    std::memmove(to, from, bytes);
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                            std::size_t width, std::size_t rows, hipMemcpyKind, hipStream_t) {
    for (std::size_t row = 0; row < rows; ++row)
        std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipMemsetAsync(void* to, int value, std::size_t bytes, hipStream_t) {
    std::memset(to, value, bytes);
    return hipSuccess;
}

/// What a handle of the fake holds.
struct FakeHandle {
    std::size_t bytes;
    char name[48];
};
static_assert(sizeof(FakeHandle) <= sizeof(hipIpcMemHandle_t));

LATENT_MOE_FAKE hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* memory) {
    const std::lock_guard lock(mutex);
    const auto shared = shared_memory.find(memory);
    if (shared == shared_memory.end()) return hipErrorInvalidValue;
    FakeHandle content{shared->second.bytes, {}};
    std::strncpy(content.name, shared->second.name.c_str(), sizeof content.name - 1);
    std::memcpy(handle, &content, sizeof content);
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipIpcOpenMemHandle(void** memory, hipIpcMemHandle_t handle, unsigned flags) {
    log(fmt::format("hipIpcOpenMemHandle flags {}", flags));
    if (std::getenv("FAKE_HIP_NO_IPC") != nullptr) return hipErrorInvalidDevicePointer;
    FakeHandle content;
    std::memcpy(&content, &handle, sizeof content);
    const std::lock_guard lock(mutex);
    *memory = map(content.name, content.bytes, O_RDWR);
    if (*memory == nullptr) return hipErrorInvalidDevicePointer;
    shared_memory[*memory] = {{}, content.bytes};
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipIpcCloseMemHandle(void* memory) {
    log("hipIpcCloseMemHandle");
    const std::lock_guard lock(mutex);
    const auto shared = shared_memory.find(memory);
    if (shared == shared_memory.end() || !shared->second.name.empty()) return hipErrorInvalidValue;
    munmap(memory, shared->second.bytes);
    shared_memory.erase(shared);
    return hipSuccess;
}

// ---- streams, events, graphs: all work is over when it has been asked for

LATENT_MOE_FAKE hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -1;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned, int) {
    *stream = new_handle<hipStream_t>();
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamDestroy(hipStream_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamSynchronize(hipStream_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamQuery(hipStream_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamIsCapturing(hipStream_t, hipStreamCaptureStatus* status) {
    *status = hipStreamCaptureStatusNone;
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamBeginCapture(hipStream_t, hipStreamCaptureMode mode) {
    log(fmt::format("hipStreamBeginCapture mode {}", static_cast<int>(mode)));
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t* graph) {
    *graph = new_handle<hipGraph_t>();
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode*) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* executable, hipGraph_t, unsigned long long) {
    *executable = new_handle<hipGraphExec_t>();
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipGraphLaunch(hipGraphExec_t, hipStream_t) {
    log("hipGraphLaunch");
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipGraphDestroy(hipGraph_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipGraphExecDestroy(hipGraphExec_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned) {
    *event = new_handle<hipEvent_t>();
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipEventDestroy(hipEvent_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipEventRecord(hipEvent_t, hipStream_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipEventQuery(hipEvent_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipEventSynchronize(hipEvent_t) {
    return hipSuccess;
}
LATENT_MOE_FAKE hipError_t hipEventElapsedTime(float* ms, hipEvent_t, hipEvent_t) {
    *ms = 1;
    return hipSuccess;
}
