// NCCL, or RCCL under the same names, loaded when it is first wanted.
#pragma once

#ifdef LATENT_MOE_HIP
#include "gpu/runtime/rccl_api.h"
#else
#include <nccl.h>
#endif

#include <chrono>
#include <string>

namespace latent_moe::gpu {

#ifdef LATENT_MOE_HIP
inline constexpr const char* nccl_name = "RCCL";
#else
inline constexpr const char* nccl_name = "NCCL";
#endif

struct Nccl {
// clang-format off
#define LATENT_MOE_NCCL_FUNCTIONS(X) \
    X(GetVersion) \
    X(GetUniqueId) \
    X(CommInitRankConfig) \
    X(CommDestroy) X(CommAbort) X(CommSplit) X(CommCount) X(CommUserRank) X(CommCuDevice) X(CommGetAsyncError) \
        X(GetErrorString) X(GetLastError) X(AllReduce) X(AllGather) X(Send) X(Recv) X(GroupStart) X(GroupEnd)
// clang-format on
#define X(name) decltype(&nccl##name) name = nullptr;
    LATENT_MOE_NCCL_FUNCTIONS(X)
#undef X
#ifndef LATENT_MOE_HIP
/// Since 2.28.
#define LATENT_MOE_NCCL_WINDOW_FUNCTIONS(X) X(MemAlloc) X(MemFree) X(CommWindowRegister) X(CommWindowDeregister)
#define X(name) decltype(&nccl##name) name = nullptr;
    LATENT_MOE_NCCL_WINDOW_FUNCTIONS(X)
#undef X
    // Declared in nccl_device.h, which only the one file that needs it includes.
    void* DevCommCreate = nullptr;
    void* DevCommDestroy = nullptr;
#endif

    int version = 0;             ///< 22809 is 2.28.9
    std::string missing;         ///< why NCCL cannot be used at all; empty if it can
    std::string window_missing;  ///< why it cannot give peer windows

    std::string version_text() const;
};

/// Looks for it once.
const Nccl& look_for_nccl();
/// Throws `unavailable` if it is missing.
const Nccl& nccl();

/// Destroys a communicator that has nothing under way, for which NCCL takes leave of its peers. False: a peer has not come
/// in time. Then NCCL goes on waiting for it on a thread of its own, which frees what NCCL holds once the peer goes on or
/// dies: a destruction that has begun cannot be given up.
bool destroy_within(std::chrono::milliseconds timeout, ncclComm_t comm, int device) noexcept;

[[noreturn]] void fail(ncclResult_t result, const char* call);
inline void check(ncclResult_t result, const char* call) {
    if (result != ncclSuccess) [[unlikely]]
        fail(result, call);
}

}  // namespace latent_moe::gpu
