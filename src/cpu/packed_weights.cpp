#include "cpu/packed_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "latent_moe/status.h"

namespace latent_moe {
namespace {

void store_rows(const WeightView& view, std::int64_t first, std::int64_t latent, const Matrix& to) {
    const std::int64_t stride = view.stride == 0 ? latent : view.stride;
    for (std::int64_t i = 0; i < to.rows; ++i) {
        const auto* from = static_cast<const std::byte*>(view.data) +
                           (first + i) * stride * static_cast<std::int64_t>(bytes_of(view.dtype));
        std::memcpy(to.row(i), from, static_cast<std::size_t>(to.row_bytes()));
    }
}

}  // namespace

CpuPackedLayer::CpuPackedLayer(const Shape& shape, TokenRange own, bool keep_whole, const WeightView& view,
                               const void* gamma)
    : shape_(shape),
      own_(own),
      first_stored_(keep_whole ? 0 : own.first),
      stored_(keep_whole ? shape.hidden : own.count),
      dtype_(view.dtype),
      scale_(view.scale * shape.routed_scale),
      lacks_rows_(keep_whole && view.rows != shape.hidden) {
    const std::size_t bytes = static_cast<std::size_t>(stored_ * shape.latent) * bytes_of(dtype_);
    try {
        data_.reset(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{64})));
        if (view.row_scales != nullptr) row_scales_.resize(static_cast<std::size_t>(stored_), 1.0F);
    } catch (const std::bad_alloc&) {
        throw Error(StatusCode::out_of_memory,
                    fmt::format("W_up: cannot allocate {:.1f} MB", static_cast<double>(bytes) / 1e6));
    }
    // Rows of the view that are kept, and where they belong.
    const bool view_is_whole = view.rows == shape.hidden;
    const TokenRange given = view_is_whole ? TokenRange{first_stored_, stored_} : own;
    store_rows(view, view_is_whole ? given.first : 0, shape.latent, rows(given));
    if (view.row_scales != nullptr) {
        std::copy_n(view.row_scales + (view_is_whole ? given.first : 0), given.count,
                    row_scales_.data() + (given.first - first_stored_));
    }
    if (gamma != nullptr) {
        const auto* begin = static_cast<const std::byte*>(gamma);
        gamma_.assign(begin, begin + static_cast<std::size_t>(shape.latent) * bytes_of(shape.activations));
    }
}

std::size_t CpuPackedLayer::bytes() const noexcept {
    return static_cast<std::size_t>(stored_ * shape_.latent) * bytes_of(dtype_) + row_scales_.size() * sizeof(float) +
           gamma_.size();
}

Matrix CpuPackedLayer::rows(TokenRange range) noexcept {
    return Matrix{data_.get(), stored_, shape_.latent, shape_.latent, dtype_}.row_range(range.first - first_stored_,
                                                                                        range.count);
}

ProductWeights CpuPackedLayer::weights(WeightPart part) const noexcept {
    const ConstMatrix stored{data_.get(), stored_, shape_.latent, shape_.latent, dtype_};
    const std::int64_t first = part == WeightPart::whole ? 0 : own_.first - first_stored_;
    return {.rows = stored.row_range(first, part == WeightPart::whole ? stored_ : own_.count),
            .scale = scale_,
            .row_scales = row_scales_.empty() ? nullptr : row_scales_.data() + first};
}

}  // namespace latent_moe
