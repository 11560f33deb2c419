// Calls of the GPU's libraries that fail become errors that name the call.
#pragma once

#include <string>

#include "gpu/runtime/device_api.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {

[[noreturn]] void fail(cudaError_t error, const std::string& call);

/// `call` says what was asked for: "cudaMalloc", "all-reduce kernel". A literal, so that success costs nothing.
inline void check(cudaError_t error, const char* call) {
    if (error != cudaSuccess) [[unlikely]]
        fail(error, call);
}

}  // namespace latent_moe::gpu
