// A layer's weights on the CPU: contiguous rows of W_up as the checkpoint stores them, with the scales beside. The whole
// W_up and the rank's shard share their memory: the shard is a range of its rows.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cpu/product.h"
#include "latent_moe/context.h"
#include "tails/backend.h"

namespace latent_moe {

class CpuPackedLayer final : public PackedLayer {
public:
    /// `own`: the rows of W_up that belong to this rank; `keep_whole`: room for all `hidden` rows.
    CpuPackedLayer(const Shape& shape, TokenRange own, bool keep_whole, const WeightView& view, const void* gamma);

    std::size_t bytes() const noexcept override;

    ProductWeights weights(WeightPart part) const noexcept;
    const void* gamma() const noexcept { return gamma_.empty() ? nullptr : gamma_.data(); }

    /// Whether other ranks' rows are still missing.
    bool lacks_rows() const noexcept { return lacks_rows_; }
    TokenRange own_rows() const noexcept { return own_; }
    /// Rows `range` of the whole W_up as bytes, to be filled in.
    Matrix rows(TokenRange range) noexcept;
    float* row_scales() noexcept { return row_scales_.empty() ? nullptr : row_scales_.data(); }
    void set_complete() noexcept { lacks_rows_ = false; }

private:
    struct Release {
        void operator()(std::byte* memory) const noexcept { ::operator delete[](memory, std::align_val_t{64}); }
    };

    Shape shape_;
    TokenRange own_;
    std::int64_t first_stored_ = 0;  // row of W_up that `data_` begins with
    std::int64_t stored_ = 0;
    Dtype dtype_;
    float scale_;
    bool lacks_rows_ = false;
    std::unique_ptr<std::byte[], Release> data_;
    std::vector<float> row_scales_;  // a factor a stored row, or empty
    std::vector<std::byte> gamma_;
};

}  // namespace latent_moe
