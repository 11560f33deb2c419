// A call's host side by the name of its tail, in the domain `latent_moe` of a profiler's timeline (NVTX, whose headers come
// with the CUDA toolkit; without them, and without a profiler, this does nothing). The kernels that it enqueues are found
// below it.
#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>) && !defined(LATENT_MOE_HIP)
#include <nvtx3/nvToolsExt.h>
#define LATENT_MOE_HAS_NVTX
#endif

namespace latent_moe::gpu {

class TraceRange {
public:
#ifdef LATENT_MOE_HAS_NVTX
    explicit TraceRange(const char* name) noexcept {
        nvtxEventAttributes_t event{};
        event.version = NVTX_VERSION;
        event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        event.messageType = NVTX_MESSAGE_TYPE_ASCII;
        event.message.ascii = name;
        nvtxDomainRangePushEx(domain(), &event);
    }
    ~TraceRange() {
        nvtxDomainRangePop(domain());
    }
#else
    explicit TraceRange(const char*) noexcept {}
    ~TraceRange() = default;
#endif
    TraceRange(const TraceRange&) = delete;
    TraceRange& operator=(const TraceRange&) = delete;

private:
#ifdef LATENT_MOE_HAS_NVTX
    static nvtxDomainHandle_t domain() noexcept {
        static const nvtxDomainHandle_t handle = nvtxDomainCreateA("latent_moe");
        return handle;
    }
#endif
};

}  // namespace latent_moe::gpu
