// Launching a kernel, with clusters and dependent launch where asked for.
//
// GUARANTEE. With dependent launch a kernel may start before its predecessor in the stream has ended. It then reads and
// writes nothing that the predecessor may touch before `dependency_wait`, which returns when the predecessor has ended and
// all that it wrote is visible. `release_dependents` only lets the successor start; it promises nothing about this kernel's
// output, so a successor that was launched so must call `dependency_wait` too. All kernels here do.
#pragma once

#include "gpu/runtime/device_api.h"
#include "latent_moe/tensor.h"
#include "scoped.h"

namespace latent_moe::gpu {

struct Launch {
    int grid = 1;
    int block = 1;
    int cluster = 0;  ///< CTAs; 0: a kernel that knows nothing of clusters
    int shared_bytes = 0;
    bool dependent = false;  ///< may start before its predecessor has ended (sm_90 and newer)
    cudaStream_t stream = nullptr;
};

#ifdef LATENT_MOE_HIP

/// Without clusters, and in order whatever `dependent` says.
template <class... Params>
cudaError_t launch(const Launch& how, void (*kernel)(Params...), const Params&... params) {
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&params))...};
    return hipLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(how.grid)),
                           dim3(static_cast<unsigned>(how.block)), arguments, static_cast<std::size_t>(how.shared_bytes),
                           how.stream);
}

#else

template <class... Params>
cudaError_t launch(const Launch& how, void (*kernel)(Params...), const Params&... params) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(how.grid));
    config.blockDim = dim3(static_cast<unsigned>(how.block));
    config.dynamicSmemBytes = static_cast<std::size_t>(how.shared_bytes);
    config.stream = how.stream;
    cudaLaunchAttribute attributes[2];
    if (how.cluster > 0) {
        cudaLaunchAttribute& a = attributes[config.numAttrs++];
        a.id = cudaLaunchAttributeClusterDimension;
        a.val.clusterDim.x = static_cast<unsigned>(how.cluster);
        a.val.clusterDim.y = a.val.clusterDim.z = 1;
    }
    if (how.dependent) {
        cudaLaunchAttribute& a = attributes[config.numAttrs++];
        a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        a.val.programmaticStreamSerializationAllowed = 1;
    }
    config.attrs = attributes;
    return cudaLaunchKernelEx(&config, kernel, params...);
}

#endif

/// Calls `f` with the dtype as a constant.
template <class F>
cudaError_t for_dtype(Dtype dtype, F f) {
    switch (dtype) {
        case Dtype::bf16: return f.template operator()<Dtype::bf16>();
        case Dtype::f16: return f.template operator()<Dtype::f16>();
        case Dtype::f32: return f.template operator()<Dtype::f32>();
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace latent_moe::gpu
