#include "gpu/refused_algorithms.h"
#include "gpu/runtime/matmul.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

cudaDataType_t type_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return CUDA_R_16BF;
        case Dtype::f16: return CUDA_R_16F;
        case Dtype::f32: return CUDA_R_32F;
        case Dtype::e4m3: break;
    }
    throw Error(StatusCode::internal, "cuBLASLt products take bf16, f16 or f32");
}

/// The library counts columns first, so our product is transposed: Dᵀ[n, m] = W · Xᵀ.
struct Description {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w, x, c, d;

    Description(const MatmulOperands& o, std::int64_t k) {
        const CublasLt& api = cublas_lt();
        check(api.MatmulDescInit_internal(&product, sizeof product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescInit");
        const cublasOperation_t transpose = CUBLAS_OP_T;
        check(api.MatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose),
              "cublasLtMatmulDescSetAttribute");
        const auto layout = [&](cublasLtMatrixLayoutOpaque_t& to, Dtype dtype, std::int64_t rows, std::int64_t columns,
                                std::int64_t stride) {
            check(api.MatrixLayoutInit_internal(&to, sizeof to, type_of(dtype), static_cast<std::uint64_t>(rows),
                                                static_cast<std::uint64_t>(columns), stride),
                  "cublasLtMatrixLayoutInit");
        };
        layout(w, o.in, k, o.n, k);
        layout(x, o.in, k, o.m, o.x_stride);
        layout(c, o.out, o.n, o.m, o.c != nullptr ? o.c_stride : o.d_stride);
        layout(d, o.out, o.n, o.m, o.d_stride);
    }
};

}  // namespace

Matmul::Matmul() {
    check(cublas_lt().Create(&handle_), "cublasLtCreate");
}

Matmul::~Matmul() {
    static_cast<void>(cublas_lt().Destroy(handle_));
}

const char* Matmul::library() noexcept {
    return "cuBLASLt";
}
const std::string& Matmul::missing() {
    return look_for_cublas_lt().missing;
}
std::string Matmul::version_text() {
    return look_for_cublas_lt().version_text();
}

std::vector<MatmulAlgorithm> Matmul::suggestions(const MatmulOperands& o, std::int64_t k, std::size_t workspace_bytes,
                                                 int most) const {
    const CublasLt& api = cublas_lt();
    Description d(o, k);
    cublasLtMatmulPreferenceOpaque_t preference;
    check(api.MatmulPreferenceInit_internal(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        check(api.MatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
              "cublasLtMatmulPreferenceSetAttribute");
    };
    const std::uint64_t bytes = workspace_bytes;
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes);
    // Parts of k are added in float32, in the workspace: never rounded in between, always in the same order.
    const std::uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, matmul_alignment(o.w, k, o.in));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, matmul_alignment(o.x, o.x_stride, o.in));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
           o.c != nullptr ? matmul_alignment(o.c, o.c_stride, o.out) : std::uint32_t{16});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, matmul_alignment(o.d, o.d_stride, o.out));

    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<std::size_t>(most));
    int count = 0;
    if (api.MatmulAlgoGetHeuristic(handle_, &d.product, &d.w, &d.x, &d.c, &d.d, &preference, most, found.data(), &count) !=
        CUBLAS_STATUS_SUCCESS) {
        return {};
    }
    std::vector<MatmulAlgorithm> kept;
    for (int i = 0; i < count; ++i) {
        const cublasLtMatmulHeuristicResult_t& result = found[static_cast<std::size_t>(i)];
        int id = -1;
        std::size_t written = 0;
        static_cast<void>(api.MatmulAlgoConfigGetAttribute(&result.algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written));
        if (result.state == CUBLAS_STATUS_SUCCESS && !is_refused(id, o.m)) kept.push_back(result.algo);
    }
    return kept;
}

bool Matmul::launch(const MatmulOperands& o, std::int64_t k, const MatmulAlgorithm& algorithm, std::byte* workspace,
                    std::size_t workspace_bytes, cudaStream_t stream) const {
    Description d(o, k);
    const float alpha = o.alpha;
    const float beta = o.c != nullptr ? 1.0F : 0.0F;
    return cublas_lt().Matmul(handle_, &d.product, &alpha, o.w, &d.w, o.x, &d.x, &beta, o.c != nullptr ? o.c : o.d, &d.c,
                              o.d, &d.d, &algorithm, workspace, workspace_bytes, stream) == CUBLAS_STATUS_SUCCESS;
}

}  // namespace latent_moe::gpu
