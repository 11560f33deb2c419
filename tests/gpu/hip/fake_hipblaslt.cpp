// Stands for libhipblaslt: writes down each product, with its layouts, as it is asked for.
#include <cstring>
#include <string>

#include "fake_log.h"
#include "gpu/runtime/hipblas_lt_api.h"

using latent_moe::fake::log;

struct hipblasLtMatmulDescOpaque_t {
    int compute, scale, transpose_a;
};
struct hipblasLtMatrixLayoutOpaque_t {
    int type;
    unsigned long rows, columns;
    long stride;
    std::string text() const { return fmt::format("{}x{}/{} type {}", rows, columns, stride, type); }
};
struct hipblasLtMatmulPreferenceOpaque_t {
    unsigned long workspace_bytes;
};

namespace {

int alive = 0;  // descriptors that were made and not destroyed

}  // namespace

LATENT_MOE_FAKE int fake_hipblaslt_alive() {
    return alive;
}

LATENT_MOE_FAKE hipblasStatus_t hipblasLtGetVersion(hipblasLtHandle_t, int* version) {
    *version = 600;
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtCreate(hipblasLtHandle_t* handle) {
    *handle = new char;
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtDestroy(hipblasLtHandle_t handle) {
    delete static_cast<char*>(handle);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatrixLayoutCreate(hipblasLtMatrixLayout_t* layout, MatmulDataType type,
                                                            std::uint64_t rows, std::uint64_t columns, std::int64_t stride) {
    *layout = new hipblasLtMatrixLayoutOpaque_t{type, rows, columns, stride};
    __atomic_add_fetch(&alive, 1, __ATOMIC_RELAXED);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatrixLayoutDestroy(hipblasLtMatrixLayout_t layout) {
    delete layout;
    __atomic_sub_fetch(&alive, 1, __ATOMIC_RELAXED);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmulDescCreate(hipblasLtMatmulDesc_t* description, hipblasComputeType_t compute,
                                                          MatmulDataType scale) {
    *description = new hipblasLtMatmulDescOpaque_t{compute, scale, HIPBLAS_OP_N};
    __atomic_add_fetch(&alive, 1, __ATOMIC_RELAXED);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmulDescDestroy(hipblasLtMatmulDesc_t description) {
    delete description;
    __atomic_sub_fetch(&alive, 1, __ATOMIC_RELAXED);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmulDescSetAttribute(hipblasLtMatmulDesc_t description,
                                                                hipblasLtMatmulDescAttributes_t attribute, const void* value,
                                                                std::size_t bytes) {
    if (attribute != HIPBLASLT_MATMUL_DESC_TRANSA || bytes != 4) return static_cast<hipblasStatus_t>(3);
    std::memcpy(&description->transpose_a, value, 4);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmulPreferenceCreate(hipblasLtMatmulPreference_t* preference) {
    *preference = new hipblasLtMatmulPreferenceOpaque_t{};
    __atomic_add_fetch(&alive, 1, __ATOMIC_RELAXED);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmulPreferenceDestroy(hipblasLtMatmulPreference_t preference) {
    delete preference;
    __atomic_sub_fetch(&alive, 1, __ATOMIC_RELAXED);
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmulPreferenceSetAttribute(hipblasLtMatmulPreference_t preference,
                                                                      hipblasLtMatmulPreferenceAttributes_t attribute,
                                                                      const void* value, std::size_t bytes) {
    if (attribute != HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES || bytes != 8) return static_cast<hipblasStatus_t>(3);
    std::memcpy(&preference->workspace_bytes, value, 8);
    return HIPBLAS_STATUS_SUCCESS;
}
/// Three solutions, 101 to 103; the second says that it cannot.
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmulAlgoGetHeuristic(hipblasLtHandle_t, hipblasLtMatmulDesc_t,
                                                                hipblasLtMatrixLayout_t, hipblasLtMatrixLayout_t,
                                                                hipblasLtMatrixLayout_t, hipblasLtMatrixLayout_t,
                                                                hipblasLtMatmulPreference_t, int most,
                                                                hipblasLtMatmulHeuristicResult_t* results, int* count) {
    *count = most < 3 ? most : 3;
    for (int i = 0; i < *count; ++i) {
        const int solution = 101 + i;
        results[i] = {};
        std::memcpy(results[i].algo.data, &solution, sizeof solution);
        results[i].state = solution == 102 ? static_cast<hipblasStatus_t>(7) : HIPBLAS_STATUS_SUCCESS;
    }
    return HIPBLAS_STATUS_SUCCESS;
}
LATENT_MOE_FAKE hipblasStatus_t hipblasLtMatmul(hipblasLtHandle_t, hipblasLtMatmulDesc_t description, const void* alpha,
                                                const void*, hipblasLtMatrixLayout_t a, const void*,
                                                hipblasLtMatrixLayout_t b, const void* beta, const void* c,
                                                hipblasLtMatrixLayout_t c_layout, void* d, hipblasLtMatrixLayout_t d_layout,
                                                const hipblasLtMatmulAlgo_t* algorithm, void* workspace,
                                                std::size_t workspace_bytes, hipStream_t) {
    int solution = 0;
    std::memcpy(&solution, algorithm->data, sizeof solution);
    log(fmt::format(
        "hipblasLtMatmul {} a {} transposed {} b {} c {}{} d {} alpha {} beta {} compute {} solution {} workspace {}",
        d_layout->columns, a->text(), description->transpose_a == HIPBLAS_OP_T, b->text(), c_layout->text(),
        c == d ? " in place" : "", d_layout->text(), *static_cast<const float*>(alpha), *static_cast<const float*>(beta),
        description->compute, solution, workspace != nullptr ? workspace_bytes : 0));
    return HIPBLAS_STATUS_SUCCESS;
}
