// What this project calls of hipBLASLt: its own header where ROCm is installed, else these declarations, which were written
// down from the interface of hipBLASLt 0.6 (ROCm 6). The library is loaded at run time either way, so building needs no
// ROCm.
#pragma once

#include "gpu/runtime/device_api.h"

#if __has_include(<hipblaslt/hipblaslt.h>)
#include <hipblaslt/hipblaslt.h>

using MatmulDataType = hipDataType;
inline constexpr MatmulDataType matmul_f32 = HIP_R_32F, matmul_f16 = HIP_R_16F, matmul_bf16 = HIP_R_16BF;

#else

#include <cstddef>
#include <cstdint>

/// hipDataType, which Debian's header has without bf16.
enum MatmulDataType : int { matmul_f32 = 0, matmul_f16 = 2, matmul_bf16 = 14 };

enum hipblasStatus_t : int { HIPBLAS_STATUS_SUCCESS = 0, HIPBLAS_STATUS_ALLOC_FAILED = 2 };
enum hipblasOperation_t : int { HIPBLAS_OP_N = 111, HIPBLAS_OP_T = 112 };
enum hipblasComputeType_t : int { HIPBLAS_COMPUTE_32F = 2 };
enum hipblasLtMatmulDescAttributes_t : int { HIPBLASLT_MATMUL_DESC_TRANSA = 0, HIPBLASLT_MATMUL_DESC_TRANSB = 1 };
enum hipblasLtMatmulPreferenceAttributes_t : int { HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1 };

using hipblasLtHandle_t = void*;
using hipblasLtMatmulDesc_t = struct hipblasLtMatmulDescOpaque_t*;
using hipblasLtMatrixLayout_t = struct hipblasLtMatrixLayoutOpaque_t*;
using hipblasLtMatmulPreference_t = struct hipblasLtMatmulPreferenceOpaque_t*;

struct hipblasLtMatmulAlgo_t {
    std::uint8_t data[16];
    std::size_t max_workspace_bytes;
};
struct hipblasLtMatmulHeuristicResult_t {
    hipblasLtMatmulAlgo_t algo;
    std::size_t workspaceSize;
    hipblasStatus_t state;
    float wavesCount;
    int reserved[4];
};

extern "C" {
hipblasStatus_t hipblasLtGetVersion(hipblasLtHandle_t handle, int* version);
hipblasStatus_t hipblasLtCreate(hipblasLtHandle_t* handle);
hipblasStatus_t hipblasLtDestroy(hipblasLtHandle_t handle);
hipblasStatus_t hipblasLtMatrixLayoutCreate(hipblasLtMatrixLayout_t* layout, MatmulDataType type, std::uint64_t rows,
                                            std::uint64_t columns, std::int64_t stride);
hipblasStatus_t hipblasLtMatrixLayoutDestroy(hipblasLtMatrixLayout_t layout);
hipblasStatus_t hipblasLtMatmulDescCreate(hipblasLtMatmulDesc_t* description, hipblasComputeType_t compute,
                                          MatmulDataType scale);
hipblasStatus_t hipblasLtMatmulDescDestroy(hipblasLtMatmulDesc_t description);
hipblasStatus_t hipblasLtMatmulDescSetAttribute(hipblasLtMatmulDesc_t description, hipblasLtMatmulDescAttributes_t attribute,
                                                const void* value, std::size_t bytes);
hipblasStatus_t hipblasLtMatmulPreferenceCreate(hipblasLtMatmulPreference_t* preference);
hipblasStatus_t hipblasLtMatmulPreferenceDestroy(hipblasLtMatmulPreference_t preference);
hipblasStatus_t hipblasLtMatmulPreferenceSetAttribute(hipblasLtMatmulPreference_t preference,
                                                      hipblasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                      std::size_t bytes);
hipblasStatus_t hipblasLtMatmulAlgoGetHeuristic(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t description,
                                                hipblasLtMatrixLayout_t a, hipblasLtMatrixLayout_t b,
                                                hipblasLtMatrixLayout_t c, hipblasLtMatrixLayout_t d,
                                                hipblasLtMatmulPreference_t preference, int most,
                                                hipblasLtMatmulHeuristicResult_t* results, int* count);
hipblasStatus_t hipblasLtMatmul(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t description, const void* alpha,
                                const void* a, hipblasLtMatrixLayout_t a_layout, const void* b,
                                hipblasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                                hipblasLtMatrixLayout_t c_layout, void* d, hipblasLtMatrixLayout_t d_layout,
                                const hipblasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t workspace_bytes,
                                hipStream_t stream);
}

#endif
