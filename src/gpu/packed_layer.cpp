#include "gpu/packed_layer.h"

#include "gpu/kernels/convert.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/packed_layout.h"

namespace latent_moe::gpu {
namespace {

bool rounds(const GpuPackedLayer::Wish& wish, Dtype given) {
    return wish.round_to_float8 && given != Dtype::e4m3;
}

/// Whether every value of `from` is one of `to`.
bool holds(Dtype to, Dtype from) {
    return to == from || to == Dtype::f32 || from == Dtype::e4m3;
}

}  // namespace

GpuPackedLayer::GpuPackedLayer(const Shape& shape, const Wish& wish, const WeightView& view, const void* gamma,
                               cudaStream_t stream)
    : shape_(shape),
      wish_(wish),
      dtype_(holds(shape.activations, wish.round_to_float8 ? Dtype::e4m3 : view.dtype) ? shape.activations : Dtype::f32),
      scale_(view.scale * shape.routed_scale),
      first_stored_(wish.whole ? 0 : wish.own.first),
      stored_(wish.whole ? shape.hidden : wish.own.count),
      lacks_rows_(wish.whole && view.rows != shape.hidden) {
    plain_ = DeviceMemory(static_cast<std::size_t>(stored_) * row_bytes(), "W_up");
    const bool view_is_whole = view.rows == shape.hidden;
    const TokenRange given = view_is_whole ? TokenRange{first_stored_, stored_} : wish.own;
    const std::int64_t first_of_view = view_is_whole ? given.first : 0;
    if (view.row_scales != nullptr || rounds(wish, view.dtype))
        row_scales_ = DeviceMemory(static_cast<std::size_t>(stored_) * sizeof(float), "row scales");
    if (view.row_scales != nullptr) {
        check(cudaMemcpyAsync(row_scales() + (given.first - first_stored_), view.row_scales + first_of_view,
                              static_cast<std::size_t>(given.count) * sizeof(float), cudaMemcpyDefault, stream),
              "copy of the row scales");
    }
    upload(view, first_of_view, given, stream);
    if (gamma != nullptr) {
        gamma_ = DeviceMemory(static_cast<std::size_t>(shape.latent) * bytes_of(shape.activations), "gamma");
        check(cudaMemcpyAsync(gamma_.get(), gamma, gamma_.bytes(), cudaMemcpyDefault, stream), "copy of gamma");
    }
    if (!lacks_rows_) complete(stream);
    check(cudaStreamSynchronize(stream), "packing W_up");  // the source may be freed when this returns
}

void GpuPackedLayer::upload(const WeightView& view, std::int64_t first_of_view, TokenRange to, cudaStream_t stream) {
    const std::size_t element = bytes_of(view.dtype);
    const std::size_t width = static_cast<std::size_t>(shape_.latent) * element;
    const std::size_t pitch = view.stride == 0 ? width : static_cast<std::size_t>(view.stride) * element;
    const auto* from = static_cast<const std::byte*>(view.data) + static_cast<std::size_t>(first_of_view) * pitch;
    const auto rows = static_cast<std::size_t>(to.count);
    const auto copy = [&](std::byte* destination) {
        check(cudaMemcpy2DAsync(destination, width, from, pitch, width, rows, cudaMemcpyDefault, stream),
              "copy of W_up to the device");
    };
    if (view.dtype == dtype_ && !rounds(wish_, view.dtype)) return copy(plain_row(to.first));
    const DeviceMemory staging(rows * width, "W_up as given");
    copy(staging.get());
    Dtype dtype = view.dtype;
    const std::byte* source = staging.get();
    DeviceMemory codes;
    if (rounds(wish_, dtype)) {
        codes = DeviceMemory(rows * static_cast<std::size_t>(shape_.latent), "W_up as e4m3");
        float* scales = row_scales() + (to.first - first_stored_);
        check(round_rows_to_float8({source}, dtype, view.row_scales == nullptr ? nullptr : scales,
                                   reinterpret_cast<std::uint8_t*>(codes.get()), scales, to.count, shape_.latent, stream),
              "rounding kernel");
        dtype = Dtype::e4m3, source = codes.get();
    }
    check(widen_rows({source}, dtype, plain_row(to.first), dtype_, to.count, shape_.latent, stream), "widening kernel");
    check(cudaStreamSynchronize(stream), "widening kernel");
}

bool GpuPackedLayer::packable(std::int64_t rows) const noexcept {
    return dtype_ == shape_.activations && dtype_ != Dtype::f32 && rows % 8 == 0;
}

void GpuPackedLayer::complete(cudaStream_t stream) {
    lacks_rows_ = false;
    const auto packed = [&](std::int64_t first, std::int64_t rows) {
        DeviceMemory memory(static_cast<std::size_t>(PackedLayout{rows, shape_.latent}.bytes()), "packed W_up");
        check(pack_weights({.w = {plain_row(first)}, .rows = rows, .latent = shape_.latent, .packed = memory.get()}, stream),
              "packing kernel");
        return memory;
    };
    if (packable(stored_)) packed_ = packed(first_stored_, stored_);
    const bool shard_is_tiles = wish_.own.first == first_stored_ || wish_.own.first % PackedLayout::tile_rows == 0;
    if (!shard_is_tiles && packable(wish_.own.count)) packed_shard_ = packed(wish_.own.first, wish_.own.count);
    // Every product has a packed form, and none is too large for it.
    if (!wish_.plain && packed_.get() != nullptr && packable(wish_.own.count)) {
        check(cudaStreamSynchronize(stream), "packing kernel");
        plain_ = {};
    }
}

std::size_t GpuPackedLayer::bytes() const noexcept {
    return plain_.bytes() + packed_.bytes() + packed_shard_.bytes() + row_scales_.bytes() + gamma_.bytes();
}

std::array<std::span<const std::byte>, 5> GpuPackedLayer::buffers() const noexcept {
    const auto all = [](const DeviceMemory& memory) { return std::span<const std::byte>(memory.get(), memory.bytes()); };
    return {all(plain_), all(packed_), all(packed_shard_), all(row_scales_), all(gamma_)};
}

std::byte* GpuPackedLayer::plain_row(std::int64_t row) const noexcept {
    return plain_.get() + static_cast<std::size_t>(row - first_stored_) * row_bytes();
}

ProductWeights GpuPackedLayer::weights(WeightPart part) const noexcept {
    const std::int64_t first = part == WeightPart::whole ? first_stored_ : wish_.own.first;
    const std::int64_t rows = part == WeightPart::whole ? stored_ : wish_.own.count;
    const std::byte* packed = nullptr;
    if (packable(rows)) {
        const PackedLayout layout{stored_, shape_.latent};
        const std::int64_t tile = (first - first_stored_) / PackedLayout::tile_rows;
        packed = first != first_stored_ && packed_shard_.get() != nullptr ? packed_shard_.get() : packed_.get();
        if (packed == packed_.get() && packed != nullptr) packed += layout.block(tile, 0);
    }
    return {.packed = packed,
            .plain = plain_.get() != nullptr ? plain_row(first) : nullptr,
            .dtype = dtype_,
            .rows = rows,
            .scale = scale_,
            .row_scales = row_scales_.get() != nullptr ? row_scales() + (first - first_stored_) : nullptr};
}

}  // namespace latent_moe::gpu
