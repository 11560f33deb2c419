// One product as the vendor's GEMM library sees it: described, suggested for, launched. What differs between the libraries
// is here and in matmul_<library>.cpp; what to measure and which algorithm to keep is in gemm.cpp.
//
//     D[m, n] = T(beta · C[m, n] + alpha · X[m, k] · W[n, k]ᵀ)      float32 inside, rounded once
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#ifdef LATENT_MOE_HIP
#include "gpu/runtime/hipblas_lt.h"
#else
#include "gpu/runtime/cublas_lt.h"
#endif
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

struct MatmulOperands {
    const void* x;
    std::int64_t x_stride;
    const void* w;  ///< contiguous rows
    const void* c;  ///< null: beta is 0, else 1
    std::int64_t c_stride;
    void* d;
    std::int64_t d_stride;
    std::int64_t m;
    std::int64_t n;
    Dtype in;   ///< of X and W
    Dtype out;  ///< of C and D
    float alpha;
};

/// 16, or the largest smaller power of two that address and stride allow.
std::uint32_t matmul_alignment(const void* data, std::int64_t stride, Dtype dtype);
/// Whether all operands of a product over k columns are aligned to 16 bytes.
bool is_aligned(const MatmulOperands& operands, std::int64_t k);

/// The library on the current device.
class Matmul {
public:
    /// Throws `unavailable` where the library is missing.
    Matmul();
    ~Matmul();
    Matmul(const Matmul&) = delete;
    Matmul& operator=(const Matmul&) = delete;

    static const char* library() noexcept;
    /// Why it cannot be used; empty if it can. Looks for it once.
    static const std::string& missing();
    static std::string version_text();

    /// What the library has for a product, its best guess first; none of `refused_algorithms.h`.
    std::vector<MatmulAlgorithm> suggestions(const MatmulOperands& operands, std::int64_t k, std::size_t workspace_bytes,
                                             int most) const;
    /// False: the library cannot do it with this algorithm.
    bool launch(const MatmulOperands& operands, std::int64_t k, const MatmulAlgorithm& algorithm, std::byte* workspace,
                std::size_t workspace_bytes, cudaStream_t stream) const;

private:
    MatmulHandle handle_ = nullptr;
};

}  // namespace latent_moe::gpu
