// A layer's weights on the device, in the layouts that its products read:
//
//     packed   (packed_layout.h)  products of up to 64 tokens; 16-bit weights only
//     plain    contiguous rows    larger products through cuBLASLt, and every product in float32
//
// Both are kept where both are used: a plain copy is dropped in a context whose calls never exceed 64 tokens. Elements are
// of the activations' dtype where that holds every weight (e4m3 fits all), of float32 otherwise. The whole W_up and the
// rank's shard share their memory wherever a shard begins at a tile.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/runtime/resources.h"
#include "latent_moe/context.h"
#include "latent_moe/shape.h"
#include "tails/backend.h"

namespace latent_moe::gpu {

/// What a product reads of a layer.
struct ProductWeights {
    const std::byte* packed;  ///< null: there is no packed form
    const std::byte* plain;   ///< null: there is no plain form
    Dtype dtype;
    std::int64_t rows;
    float scale;              ///< of the layer and the shape together
    const float* row_scales;  ///< on the device; may be null
};

class GpuPackedLayer final : public PackedLayer {
public:
    struct Wish {
        TokenRange own;                ///< rows of W_up that belong to this rank
        bool whole;                    ///< keep all `hidden` rows
        bool plain;                    ///< larger products will be asked for
        bool round_to_float8 = false;  ///< wider weights to e4m3, with a scale a row; kept as all e4m3 is
    };

    GpuPackedLayer(const Shape& shape, const Wish& wish, const WeightView& view, const void* gamma, cudaStream_t stream);

    std::size_t bytes() const noexcept override;

    ProductWeights weights(WeightPart part) const noexcept;
    /// All that it holds on the device; empty where there is none.
    std::array<std::span<const std::byte>, 5> buffers() const noexcept;
    const void* gamma() const noexcept { return gamma_.get(); }
    bool needs_float32_sums() const noexcept { return dtype_ != shape_.activations || row_scales_.get() != nullptr; }

    /// Whether other ranks' rows are still missing; `plain_rows` and `row_scales` are then to be filled in, and `complete`
    /// called.
    bool lacks_rows() const noexcept { return lacks_rows_; }
    TokenRange own_rows() const noexcept { return wish_.own; }
    std::byte* plain_row(std::int64_t row) const noexcept;  ///< of the whole W_up
    std::size_t row_bytes() const noexcept { return static_cast<std::size_t>(shape_.latent) * bytes_of(dtype_); }
    float* row_scales() const noexcept { return reinterpret_cast<float*>(row_scales_.get()); }
    void complete(cudaStream_t stream);

private:
    void upload(const WeightView& view, std::int64_t first_of_view, TokenRange to, cudaStream_t stream);
    bool packable(std::int64_t rows) const noexcept;

    Shape shape_;
    Wish wish_;
    Dtype dtype_;
    float scale_;
    std::int64_t first_stored_;
    std::int64_t stored_;
    bool lacks_rows_;
    DeviceMemory plain_;
    DeviceMemory packed_;        // of all stored rows
    DeviceMemory packed_shard_;  // only where the shard is not a range of tiles of `packed_`
    DeviceMemory row_scales_;
    DeviceMemory gamma_;
};

}  // namespace latent_moe::gpu
