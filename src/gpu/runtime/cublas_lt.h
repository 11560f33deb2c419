// cuBLASLt, loaded when it is first wanted.
#pragma once

#include <cublasLt.h>

#include <string>

namespace latent_moe::gpu {

using MatmulHandle = cublasLtHandle_t;
using MatmulAlgorithm = cublasLtMatmulAlgo_t;

struct CublasLt {
// clang-format off
#define LATENT_MOE_CUBLASLT_FUNCTIONS(X) \
    X(GetVersion) \
    X(GetStatusString) \
    X(Create) \
    X(Destroy) X(Matmul) X(MatmulAlgoGetHeuristic) X(MatmulAlgoConfigGetAttribute) X(MatmulDescInit_internal) \
        X(MatmulDescSetAttribute) X(MatrixLayoutInit_internal) X(MatmulPreferenceInit_internal) \
            X(MatmulPreferenceSetAttribute)
// clang-format on
#define X(name) decltype(&cublasLt##name) name = nullptr;
    LATENT_MOE_CUBLASLT_FUNCTIONS(X)
#undef X
    std::string missing;  ///< empty if it can be used

    std::string version_text() const;
};

const CublasLt& look_for_cublas_lt();
/// Throws `unavailable` if it is missing.
const CublasLt& cublas_lt();

[[noreturn]] void fail(cublasStatus_t status, const char* call);
inline void check(cublasStatus_t status, const char* call) {
    if (status != CUBLAS_STATUS_SUCCESS) [[unlikely]]
        fail(status, call);
}

}  // namespace latent_moe::gpu
