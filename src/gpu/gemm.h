// Large products through cuBLASLt, each with an algorithm that rank 0 measured and all ranks use.
//
//     D[m, n] = T(beta · C[m, n] + alpha · X[m, k] · W[n, k]ᵀ)      float32 inside, rounded once
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gpu/runtime/cublas_lt.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/bootstrap.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

class Gemm {
public:
    struct Operands {
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

    /// Products of this many columns k, on the current device.
    explicit Gemm(std::int64_t k);
    ~Gemm();
    Gemm(const Gemm&) = delete;
    Gemm& operator=(const Gemm&) = delete;

    /// Collective, with the rank's device current: rank 0 measures what products of n columns (each of `widths`) and `least`
    /// to `most` rows run fastest with, adding to C and not.
    void choose(const Bootstrap& bootstrap, const std::vector<std::int64_t>& widths, std::int64_t least, std::int64_t most,
                Dtype dtype);

    /// The same for products that are not worth measuring: the library's first suggestion, which depends on the shape alone.
    void prepare(std::int64_t n, std::int64_t least, std::int64_t most, Dtype in, Dtype out);

    void acquire_workspace();
    void release_workspace() noexcept { workspace_ = {}; }
    std::size_t workspace_bytes() const noexcept { return workspace_.bytes(); }

    /// Enqueues one. Where no measured algorithm fits (other dtypes, operands that are not aligned to 16 bytes) the
    /// library's first suggestion is taken, which depends on the shape alone.
    void run(const Operands& operands, cudaStream_t stream);

private:
    struct Description;
    struct Choice {
        std::int64_t n = 0;
        int bucket = 0;  ///< of m: up to 64 · 2^bucket
        Dtype in = Dtype::bf16;
        Dtype out = Dtype::bf16;
        bool accumulate = false;
        bool found = false;
        cublasLtMatmulAlgo_t algorithm = {};
    };

    Choice* find(const Operands& operands) noexcept;
    std::vector<cublasLtMatmulHeuristicResult_t> suggestions(const Description& description, int most) const;
    void measure(Choice& choice, std::int64_t m) const;
    /// Launches it at several sizes up to `most`: the first launch of a kernel loads it, which must not happen while another
    /// kernel waits for a peer.
    void load(const Choice& choice, std::int64_t most);
    cublasStatus_t launch(const Operands& operands, const Description& description, const cublasLtMatmulAlgo_t& algorithm,
                          cudaStream_t stream) const;

    std::int64_t k_;
    cublasLtHandle_t handle_ = nullptr;
    DeviceMemory workspace_;
    std::vector<Choice> choices_;
};

}  // namespace latent_moe::gpu
