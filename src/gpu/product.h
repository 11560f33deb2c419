// out = T(addend + scale · x·Wᵀ), then T(out + prefix): which kernel does it.
//
//     up to 64 tokens, 16-bit, aligned rows   the skinny kernel over packed weights, all in its epilogue
//     else                                    cuBLASLt, the addend through beta; the prefix by one more kernel
//     weights with row scales or wider types  cuBLASLt to float32 sums, then one kernel for all the rest
//
// In a batch-invariant context an element is summed in one order, whatever the number of tokens (docs/decisions/0013):
//
//     packed weights                          the skinny kernel, 64 tokens at a time, always as for 64
//     else                                    `ordered_projection`
#pragma once

#include <optional>
#include <vector>

#include "core/matrix.h"
#include "gpu/gemm.h"
#include "gpu/packed_layer.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/shape.h"
#include "tails/backend.h"

namespace latent_moe::gpu {

inline constexpr std::int64_t skinny_tokens = 64;

class Product {
public:
    /// `block_tokens`: most rows of one call. `widths`: rows of W_up that products have.
    Product(const Shape& shape, const Bootstrap& bootstrap, std::int64_t block_tokens,
            const std::vector<std::int64_t>& widths, bool batch_invariant);

    /// A layer of this kind will be multiplied by.
    void prepare(const GpuPackedLayer& layer);

    void acquire_workspace();
    void release_workspace() noexcept;
    std::size_t workspace_bytes() const noexcept {
        return (gemm_ ? gemm_->workspace_bytes() : 0) + sums_.bytes() + widened_.bytes();
    }

    /// `spare`: [rows, hidden], used where `out` still holds the prefix. A kernel of ours of up to `early_ctas` CTAs starts
    /// before its predecessor has ended.
    void run(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out,
             const Matrix& spare, int early_ctas, cudaStream_t stream);

private:
    void run_packed(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out,
                    int early_ctas, cudaStream_t stream) const;
    void run_in_float32(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out,
                        cudaStream_t stream);

    Shape shape_;
    std::vector<std::int64_t> widths_;
    std::int64_t float32_rows_;  // of the two buffers below
    std::optional<Gemm> gemm_;   ///< not in a batch-invariant context: what order it sums in is the library's affair
    bool needs_sums_ = false;
    bool needs_widening_ = false;
    DeviceMemory sums_;
    DeviceMemory widened_;
};

}  // namespace latent_moe::gpu
