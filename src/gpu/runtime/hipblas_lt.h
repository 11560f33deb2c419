// hipBLASLt, loaded when it is first wanted.
#pragma once

#include <string>

#include "gpu/runtime/hipblas_lt_api.h"

namespace latent_moe::gpu {

using MatmulHandle = hipblasLtHandle_t;
using MatmulAlgorithm = hipblasLtMatmulAlgo_t;

struct HipblasLt {
// clang-format off
#define LATENT_MOE_HIPBLASLT_FUNCTIONS(X) \
    X(GetVersion) \
    X(Create) \
    X(Destroy) X(Matmul) X(MatmulAlgoGetHeuristic) X(MatmulDescCreate) X(MatmulDescDestroy) X(MatmulDescSetAttribute) \
        X(MatrixLayoutCreate) X(MatrixLayoutDestroy) X(MatmulPreferenceCreate) X(MatmulPreferenceDestroy) \
            X(MatmulPreferenceSetAttribute)
// clang-format on
#define X(name) decltype(&hipblasLt##name) name = nullptr;
    LATENT_MOE_HIPBLASLT_FUNCTIONS(X)
#undef X
    std::string missing;  ///< empty if it can be used
};

const HipblasLt& look_for_hipblas_lt();
/// Throws `unavailable` if it is missing.
const HipblasLt& hipblas_lt();

[[noreturn]] void fail(hipblasStatus_t status, const char* call);
inline void check(hipblasStatus_t status, const char* call) {
    if (status != HIPBLAS_STATUS_SUCCESS) [[unlikely]]
        fail(status, call);
}

}  // namespace latent_moe::gpu
