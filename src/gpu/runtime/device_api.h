// The GPU runtime under one set of names. They are CUDA's, as most readers know them; where LATENT_MOE_HIP is defined each
// stands for its twin in HIP. A call that the sources did not make before is one line here.
//
// What differs in meaning, not only in name: host memory that kernels write must be asked for as coherent, and memory that
// other GPUs write while a kernel polls it must not be cached (`allocate_window`).
#pragma once

#include <cstddef>

#ifndef LATENT_MOE_HIP

#include <cuda_runtime.h>

namespace latent_moe::gpu {

/// Memory that peers' kernels write while this rank's poll it.
inline cudaError_t allocate_window(void** memory, std::size_t bytes) {
    return cudaMalloc(memory, bytes);
}

}  // namespace latent_moe::gpu

#else

#ifndef __HIP_PLATFORM_AMD__
#define __HIP_PLATFORM_AMD__
#endif
#ifdef __HIP__
#include <hip/hip_runtime.h>
#else
#include <hip/hip_runtime_api.h>
#endif

#define __grid_constant__

using cudaError_t = hipError_t;
using cudaStream_t = hipStream_t;
using cudaEvent_t = hipEvent_t;
using cudaGraph_t = hipGraph_t;
using cudaGraphExec_t = hipGraphExec_t;
using cudaDeviceProp = hipDeviceProp_t;
using cudaDeviceAttr = hipDeviceAttribute_t;
using cudaFuncAttributes = hipFuncAttributes;
using cudaStreamCaptureMode = hipStreamCaptureMode;
using cudaStreamCaptureStatus = hipStreamCaptureStatus;

#define cudaSuccess hipSuccess
#define cudaErrorInvalidDevice hipErrorInvalidDevice
#define cudaErrorInvalidValue hipErrorInvalidValue
#define cudaErrorInsufficientDriver hipErrorInsufficientDriver
#define cudaErrorLaunchOutOfResources hipErrorLaunchOutOfResources
#define cudaErrorMemoryAllocation hipErrorOutOfMemory
#define cudaErrorNoDevice hipErrorNoDevice
#define cudaErrorNoKernelImageForDevice hipErrorNoBinaryForGpu
#define cudaErrorNotReady hipErrorNotReady
#define cudaErrorNotSupported hipErrorNotSupported
#define cudaErrorPeerAccessAlreadyEnabled hipErrorPeerAccessAlreadyEnabled
#define cudaGetErrorName hipGetErrorName
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError

#define cudaGetDevice hipGetDevice
#define cudaSetDevice hipSetDevice
#define cudaGetDeviceCount hipGetDeviceCount
#define cudaGetDeviceProperties hipGetDeviceProperties
#define cudaDeviceGetAttribute hipDeviceGetAttribute
#define cudaDevAttrClockRate hipDeviceAttributeClockRate
#define cudaDevAttrComputeCapabilityMajor hipDeviceAttributeComputeCapabilityMajor
#define cudaDevAttrComputeCapabilityMinor hipDeviceAttributeComputeCapabilityMinor
#define cudaDevAttrGlobalMemoryBusWidth hipDeviceAttributeMemoryBusWidth
#define cudaDevAttrMemoryClockRate hipDeviceAttributeMemoryClockRate
#define cudaDevAttrMultiProcessorCount hipDeviceAttributeMultiprocessorCount
#define cudaDeviceCanAccessPeer hipDeviceCanAccessPeer
#define cudaDeviceEnablePeerAccess hipDeviceEnablePeerAccess
#define cudaDeviceGetP2PAttribute hipDeviceGetP2PAttribute
#define cudaDevP2PAttrPerformanceRank hipDevP2PAttrPerformanceRank
#define cudaDriverGetVersion hipDriverGetVersion

#define cudaMalloc hipMalloc
#define cudaFree hipFree
#define cudaHostAlloc hipHostMalloc
#define cudaHostAllocMapped (hipHostMallocMapped | hipHostMallocCoherent)
#define cudaHostAllocPortable hipHostMallocPortable
#define cudaFreeHost hipHostFree
#define cudaMemGetInfo hipMemGetInfo
#define cudaMemcpyAsync hipMemcpyAsync
#define cudaMemcpy2DAsync hipMemcpy2DAsync
#define cudaMemcpyDefault hipMemcpyDefault
#define cudaMemcpyHostToDevice hipMemcpyHostToDevice
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
#define cudaMemcpyDeviceToDevice hipMemcpyDeviceToDevice
#define cudaMemsetAsync hipMemsetAsync

#define cudaStreamCreateWithPriority hipStreamCreateWithPriority
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamDestroy hipStreamDestroy
#define cudaStreamQuery hipStreamQuery
#define cudaStreamSynchronize hipStreamSynchronize
#define cudaStreamWaitEvent hipStreamWaitEvent
#define cudaStreamIsCapturing hipStreamIsCapturing
#define cudaStreamBeginCapture hipStreamBeginCapture
#define cudaStreamEndCapture hipStreamEndCapture
#define cudaStreamCaptureModeRelaxed hipStreamCaptureModeRelaxed
#define cudaStreamCaptureModeThreadLocal hipStreamCaptureModeThreadLocal
#define cudaStreamCaptureStatusNone hipStreamCaptureStatusNone
#define cudaThreadExchangeStreamCaptureMode hipThreadExchangeStreamCaptureMode
#define cudaDeviceGetStreamPriorityRange hipDeviceGetStreamPriorityRange

#define cudaEventCreateWithFlags hipEventCreateWithFlags
#define cudaEventDefault hipEventDefault
#define cudaEventDisableTiming hipEventDisableTiming
#define cudaEventDestroy hipEventDestroy
#define cudaEventElapsedTime hipEventElapsedTime
#define cudaEventQuery hipEventQuery
#define cudaEventRecord hipEventRecord
#define cudaEventSynchronize hipEventSynchronize

#define cudaGraphDestroy hipGraphDestroy
#define cudaGraphExecDestroy hipGraphExecDestroy
#define cudaGraphInstantiate hipGraphInstantiateWithFlags
#define cudaGraphLaunch hipGraphLaunch

#define cudaFuncAttributeMaxDynamicSharedMemorySize hipFuncAttributeMaxDynamicSharedMemorySize
#define cudaFuncAttributePreferredSharedMemoryCarveout hipFuncAttributePreferredSharedMemoryCarveout
#define cudaSharedmemCarveoutMaxShared 100

/// Uploads with the first launch.
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* kernel) {
    return hipFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, hipFuncAttribute attribute, int value) {
    return hipFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

namespace latent_moe::gpu {

/// As above. Cached memory would show a poll what its L2 holds.
inline cudaError_t allocate_window(void** memory, std::size_t bytes) {
    constexpr unsigned uncached = 3;  // hipDeviceMallocUncached, which older headers do not name
    if (hipExtMallocWithFlags(memory, bytes, uncached) == hipSuccess) return hipSuccess;
    static_cast<void>(hipGetLastError());
    return hipExtMallocWithFlags(memory, bytes, hipDeviceMallocFinegrained);
}

}  // namespace latent_moe::gpu

#endif
