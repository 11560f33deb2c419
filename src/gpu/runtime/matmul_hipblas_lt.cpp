#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "gpu/refused_algorithms.h"
#include "gpu/runtime/matmul.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

MatmulDataType type_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return matmul_bf16;
        case Dtype::f16: return matmul_f16;
        case Dtype::f32: return matmul_f32;
        case Dtype::e4m3: break;
    }
    throw Error(StatusCode::internal, "hipBLASLt products take bf16, f16 or f32");
}

/// A descriptor that the library allocated.
template <typename Handle, hipblasStatus_t (*HipblasLt::*destroy)(Handle)>
class Made {
public:
    Made() = default;
    ~Made() {
        if (handle_ != nullptr) static_cast<void>((hipblas_lt().*destroy)(handle_));
    }
    Made(const Made&) = delete;
    Made& operator=(const Made&) = delete;

    Handle* out() noexcept { return &handle_; }
    operator Handle() const noexcept { return handle_; }

private:
    Handle handle_ = nullptr;
};

/// The library counts columns first, so our product is transposed: Dᵀ[n, m] = W · Xᵀ.
struct Description {
    Made<hipblasLtMatmulDesc_t, &HipblasLt::MatmulDescDestroy> product;
    Made<hipblasLtMatrixLayout_t, &HipblasLt::MatrixLayoutDestroy> w, x, c, d;

    Description(const MatmulOperands& o, std::int64_t k) {
        const HipblasLt& api = hipblas_lt();
        check(api.MatmulDescCreate(product.out(), HIPBLAS_COMPUTE_32F, matmul_f32), "hipblasLtMatmulDescCreate");
        const auto transpose = static_cast<std::int32_t>(HIPBLAS_OP_T);
        check(api.MatmulDescSetAttribute(product, HIPBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose),
              "hipblasLtMatmulDescSetAttribute");
        const auto layout = [&](hipblasLtMatrixLayout_t* to, Dtype dtype, std::int64_t rows, std::int64_t columns,
                                std::int64_t stride) {
            check(api.MatrixLayoutCreate(to, type_of(dtype), static_cast<std::uint64_t>(rows),
                                         static_cast<std::uint64_t>(columns), stride),
                  "hipblasLtMatrixLayoutCreate");
        };
        layout(w.out(), o.in, k, o.n, k);
        layout(x.out(), o.in, k, o.m, o.x_stride);
        layout(c.out(), o.out, o.n, o.m, o.c != nullptr ? o.c_stride : o.d_stride);
        layout(d.out(), o.out, o.n, o.m, o.d_stride);
    }
};

/// The library's number of a solution, by which a user may refuse it.
int id_of(const MatmulAlgorithm& algorithm) {
    int id = -1;
    std::memcpy(&id, algorithm.data, sizeof id);
    return id;
}

}  // namespace

Matmul::Matmul() {
    check(hipblas_lt().Create(&handle_), "hipblasLtCreate");
}

Matmul::~Matmul() {
    static_cast<void>(hipblas_lt().Destroy(handle_));
}

const char* Matmul::library() noexcept {
    return "hipBLASLt";
}
const std::string& Matmul::missing() {
    return look_for_hipblas_lt().missing;
}
std::string Matmul::version_text() {
    int version = 0;
    hipblasLtHandle_t handle = nullptr;
    const HipblasLt& api = hipblas_lt();
    if (api.Create(&handle) != HIPBLAS_STATUS_SUCCESS) return "found; its version cannot be read without a GPU";
    static_cast<void>(api.GetVersion(handle, &version));
    static_cast<void>(api.Destroy(handle));
    return fmt::format("{}.{}.{}", version / 100000, version / 100 % 1000, version % 100);
}

std::vector<MatmulAlgorithm> Matmul::suggestions(const MatmulOperands& o, std::int64_t k, std::size_t workspace_bytes,
                                                 int most) const {
    const HipblasLt& api = hipblas_lt();
    const Description d(o, k);
    Made<hipblasLtMatmulPreference_t, &HipblasLt::MatmulPreferenceDestroy> preference;
    check(api.MatmulPreferenceCreate(preference.out()), "hipblasLtMatmulPreferenceCreate");
    const std::uint64_t bytes = workspace_bytes;
    check(api.MatmulPreferenceSetAttribute(preference, HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
          "hipblasLtMatmulPreferenceSetAttribute");
    std::vector<hipblasLtMatmulHeuristicResult_t> found(static_cast<std::size_t>(most));
    int count = 0;
    if (api.MatmulAlgoGetHeuristic(handle_, d.product, d.w, d.x, d.c, d.d, preference, most, found.data(), &count) !=
        HIPBLAS_STATUS_SUCCESS) {
        return {};
    }
    std::vector<MatmulAlgorithm> kept;
    for (int i = 0; i < count; ++i) {
        const hipblasLtMatmulHeuristicResult_t& result = found[static_cast<std::size_t>(i)];
        if (result.state == HIPBLAS_STATUS_SUCCESS && !is_refused(id_of(result.algo), o.m)) kept.push_back(result.algo);
    }
    return kept;
}

bool Matmul::launch(const MatmulOperands& o, std::int64_t k, const MatmulAlgorithm& algorithm, std::byte* workspace,
                    std::size_t workspace_bytes, cudaStream_t stream) const {
    const Description d(o, k);
    const float alpha = o.alpha;
    const float beta = o.c != nullptr ? 1.0F : 0.0F;
    return hipblas_lt().Matmul(handle_, d.product, &alpha, o.w, d.w, o.x, d.x, &beta, o.c != nullptr ? o.c : o.d, d.c, o.d,
                               d.d, &algorithm, workspace, workspace_bytes, stream) == HIPBLAS_STATUS_SUCCESS;
}

}  // namespace latent_moe::gpu
