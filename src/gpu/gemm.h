// Large products through the GEMM library, each with an algorithm that rank 0 measured and all ranks use.
//
//     D[m, n] = T(beta · C[m, n] + alpha · X[m, k] · W[n, k]ᵀ)      float32 inside, rounded once
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gpu/runtime/matmul.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/bootstrap.h"
#include "latent_moe/tensor.h"

namespace latent_moe::gpu {

class Gemm {
public:
    using Operands = MatmulOperands;

    /// Products of this many columns k, on the current device.
    explicit Gemm(std::int64_t k);

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
    struct Choice {
        std::int64_t n = 0;
        int bucket = 0;  ///< of m: up to 64 · 2^bucket
        Dtype in = Dtype::bf16;
        Dtype out = Dtype::bf16;
        bool accumulate = false;
        bool found = false;
        MatmulAlgorithm algorithm = {};
    };

    Choice* find(const Operands& operands) noexcept;
    std::vector<MatmulAlgorithm> suggestions(const Operands& operands, int most) const;
    void measure(Choice& choice, std::int64_t m) const;
    /// Launches it at several sizes up to `most`: the first launch of a kernel loads it, which must not happen while another
    /// kernel waits for a peer.
    void load(const Choice& choice, std::int64_t most);
    bool launch(const Operands& operands, const MatmulAlgorithm& algorithm, cudaStream_t stream) const;

    std::int64_t k_;
    Matmul library_;
    DeviceMemory workspace_;
    std::vector<Choice> choices_;
};

}  // namespace latent_moe::gpu
